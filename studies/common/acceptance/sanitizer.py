"""compute-sanitizer over tiny models of every protocol: `sanitize` starts it, this module as a
program is what it watches.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from studies.common.acceptance.formats import watched_plans
from studies.common.acceptance.hazards import judged
from studies.common.acceptance.runs import Failed
from studies.common.cuda_lines import Kernel, read_kernel
from studies.common.shapes import Bench, prompt_of
from twin.engine.cuda_build import LINES, compile_kernels
from twin.plan.options import CollectiveKind, Execution, HandOffKind
from twin.plan.types import Plan

TOOLS = ("memcheck", "racecheck", "synccheck")  # racecheck looks at shared memory only
CLEAN = "ERROR SUMMARY: 0 errors"
SHOWN = 1000  # reports of one tool: racecheck's are judged one by one
PLACES = (
    "/usr/local/cuda*/bin",
    "/usr/local/cuda*/compute-sanitizer",
    "/opt/nvidia/*/bin",
    "/opt/nvidia/nsight-compute/*/host/*",
)
ERRORS_FOUND = 9  # exit code
WATCHDOG_S = 300.0  # watched kernels are slow, and others wait for them
LIMIT_S = 150.0  # for one tool
REFUSED = "Device not supported"  # some virtual machines do not let the tool in
PROMPT, TOKENS = 3, 4
MODELS = ("tiny", "tiny-lanes")


class NotRun(Exception):
    """Why a part could not be tried."""


def find() -> str | None:
    """compute-sanitizer on the path, else where CUDA and Nsight put it."""
    found = shutil.which("compute-sanitizer")
    for place in () if found else PLACES:
        for folder in sorted(Path("/").glob(place.lstrip("/"))):
            if (folder / "compute-sanitizer").is_file():
                return str(folder / "compute-sanitizer")
    return found


def sanitizer_plans(bench: Bench) -> list[Plan]:
    plans = [
        bench.plan(name, max_context=64, handoff=handoff)
        for name in MODELS
        for handoff in HandOffKind
    ]
    return [
        *plans,
        bench.plan("tiny", max_context=64, execution=Execution.GRAPH),
        bench.plan("tiny-tensor", max_context=64, slot_bytes=4096),
    ]


def several_plans(bench: Bench) -> list[Plan]:
    """On two GPUs."""
    plans = [
        bench.plan(name, max_context=64, handoff=handoff, gpus=2)
        for name in MODELS
        for handoff in HandOffKind
    ]
    launched = bench.plan(
        "tiny",
        max_context=64,
        gpus=2,
        execution=Execution.GRAPH,
        collective=CollectiveKind.PUSH,  # a library's is for the CPU
    )
    return [*plans, launched]


PLANS: dict[str, Callable[[Bench], list[Plan]]] = {
    "protocols": sanitizer_plans,
    "formats": watched_plans,
    "several": several_plans,
}


def run_all(bench: Bench, which: str = "protocols") -> list[list[int]]:
    """Tokens of every plan: the same with and without a tool that watches."""
    made = []
    for plan in PLANS[which](bench):
        with bench.engine(plan, watchdog_s=WATCHDOG_S) as engine:
            made.append(engine.generate(prompt_of(plan, PROMPT), max_tokens=TOKENS).tokens)
            engine.logits(prompt_of(plan, PROMPT))
    return made


def with_lines(cache: Path) -> dict[str, str]:
    """Of the environment, for kernels with source lines: racecheck's reports name them. Those that
    are kept have none, so they have a `cache` of their own.
    """
    flags = f"{os.environ.get('NVCC_APPEND_FLAGS', '')} {LINES}".strip()
    return {"NVCC_APPEND_FLAGS": flags, "XDG_CACHE_HOME": str(cache.resolve())}


def sanitize(
    bench: Bench, out: Path, which: str = "protocols", tools: Sequence[str] = TOOLS
) -> dict[str, Any]:
    """Each tool without a finding (racecheck's are judged by hazards.py), and with the tokens of an
    unwatched run. Logs go to `out`.
    """
    if bench.device == "host":
        raise NotRun(
            "compute-sanitizer watches GPU kernels; the host engine has its own tests under ASan, "
            "UBSan and TSan"
        )
    program = find()
    if program is None:
        raise NotRun(
            f"compute-sanitizer is neither on the path nor under {', '.join(PLACES)}: install it "
            "with the CUDA toolkit"
        )
    expected = run_all(bench, which)
    # those that ran: the cache has them
    reports = [report for plan in PLANS[which](bench) for report in compile_kernels(plan).values()]
    kernels = [read_kernel(report.cubin) for report in reports]
    if "racecheck" in tools and not all(kernel.rows for kernel in kernels):
        raise NotRun(
            "the kernels have no source lines, by which racecheck's reports are judged: set "
            f"NVCC_APPEND_FLAGS={LINES}, and XDG_CACHE_HOME to an empty folder"
        )
    facts: dict[str, Any] = {"program": program, "plans": len(expected)}
    failed = []
    out.mkdir(parents=True, exist_ok=True)
    for tool in tools:
        log = out / f"{tool}.log"
        facts[tool] = _watch(program, tool, log, which)
        said = log.read_text()
        if REFUSED in said:
            raise NotRun(
                f"{program} says {REFUSED!r}: this machine does not let it watch the GPU; run the "
                "part on another one"
            )
        wrong = _races(said, facts[tool], kernels) if tool == "racecheck" else _errors(facts[tool])
        if wrong:
            failed.append(f"{tool}: {wrong}")
        elif facts[tool]["tokens"] != expected:
            failed.append(f"{tool}: other tokens than without it")
    if failed:
        raise Failed("; ".join(failed) + f"; logs in {out}")
    return facts


def _errors(fact: dict[str, Any]) -> str:
    if CLEAN in fact["summary"] and not fact["exit"]:
        return ""
    return f"{fact['summary'] or 'no summary'} (exit code {fact['exit']})"


def _races(said: str, fact: dict[str, Any], kernels: list[Kernel]) -> str:
    """What is wrong, if anything. Pairs that an mbarrier orders are counted, not failed."""
    verdict = judged(said, kernels)
    if verdict is None:
        return f"no summary (exit code {fact['exit']})"
    fact["ordered by an mbarrier that the tool does not follow"] = verdict.ordered
    fact["reads whose line only the line table has"] = verdict.looked_up
    if verdict.unseen:
        return f"{verdict.unseen} of its reports are not shown"
    if verdict.others:
        return (
            f"{len(verdict.others)} pairs of accesses that no mbarrier of the ring orders, the "
            f"first: {verdict.others[0]}"
        )
    return "" if fact["exit"] in (0, ERRORS_FOUND) else f"exit code {fact['exit']}"


def _watch(program: str, tool: str, log: Path, which: str) -> dict[str, Any]:
    command = [
        program,
        "--tool",
        tool,
        "--error-exitcode",
        str(ERRORS_FOUND),
        "--print-limit",
        str(SHOWN),
    ]
    command += [sys.executable, "-m", "studies.common.acceptance.sanitizer", which]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ,
        start_new_session=True,
    ) as running:
        try:
            said, _ = running.communicate(timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            # the tool and what it watches: a spinning kernel would hold the GPU
            os.killpg(running.pid, signal.SIGKILL)
            said, _ = running.communicate()
            said += f"\n========= SUMMARY: ended after {LIMIT_S:g} s\n"
    log.write_text(said)
    summary = re.findall(r"=+ (.*SUMMARY.*)", said)
    tokens = [line for line in said.splitlines() if line.startswith("[[")]
    return {
        "exit": running.returncode,
        "summary": summary[-1] if summary else "",
        "tokens": json.loads(tokens[-1]) if tokens else None,
    }


if __name__ == "__main__":
    print(json.dumps(run_all(Bench("cuda"), *sys.argv[1:])), flush=True)
