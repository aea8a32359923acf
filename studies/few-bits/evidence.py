"""What few-bit models and experts have to show on a GPU next to their speed; README.md says what.

python studies/few-bits/evidence.py --out FOLDER [--seconds 360] [--device host] [part ...]

Parts run next to each other, in order of worth, each in a process of its own. What is known lies in
FOLDER at any time: a line a result in PART.jsonl, a log a part, summary.json. Who is not done when
the time is over is ended, and keeps its lines. Needs no simulator.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from studies.common.acceptance import formats
from studies.common.acceptance.runs import Failed
from studies.common.acceptance.sanitizer import TOOLS, NotRun, sanitize, with_lines
from studies.common.shapes import Bench, conditions
from twin.plan.types import Plan

ROOT = Path(__file__).resolve().parents[2]
TESTS = "tests/engine/test_cuda_codes.py"
TRIED = "tests/native/test_coded.py"  # on a computer without a GPU
SLICES = 8  # processes that share the tests
SHARES = 4  # and the small models whose fidelity is judged
AT_ONCE = 16
COMPILED = "kernels"  # before everything but the tests, which compile their own
COUNTED = re.compile(r"(PASSED|FAILED|ERROR|SKIPPED)")


@dataclass(slots=True)
class Running:
    name: str
    process: subprocess.Popen[bytes]
    begun: float


def part_names() -> list[str]:
    """In order of worth."""
    return [
        *(f"tests-{at}" for at in range(SLICES)),
        "repeats",
        *(f"fidelity-{at}" for at in range(SHARES)),
        *(f"sanitizer-{tool}" for tool in TOOLS),
        "soak",
    ]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(part_names())}; all unless given")
    parser.add_argument("--out", type=Path, required=True, help="folder of all results")
    parser.add_argument("--device", choices=("cuda", "host"), default="cuda")
    parser.add_argument("--seconds", type=float, default=360, help="in all (default %(default)s)")
    parser.add_argument("--tokens", type=int, default=1000, help="of each repeated run")
    parser.add_argument("--soak-tokens", type=int, default=200_000)
    parser.add_argument("--only", help=argparse.SUPPRESS)  # what a process of its own runs
    return parser.parse_intermixed_args()


def main() -> int:
    args = arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.only:
        return one(args)
    unknown = [name for name in args.parts if name not in part_names()]
    if unknown:
        print(f"evidence: no part {unknown[0]!r}; choose from {', '.join(part_names())}")
        return 2
    return every(args, args.parts or part_names())


def every(args: argparse.Namespace, names: list[str]) -> int:
    end = time.monotonic() + args.seconds
    args.cache = tempfile.mkdtemp(prefix="evidence-")
    summary: dict[str, Any] = {"device": args.device, "conditions": conditions(), "parts": {}}
    waiting, running = list(names), list[Running]()
    if any(not name.startswith("tests") for name in names):
        waiting.insert(0, COMPILED)

    def done(one: Running, result: str) -> None:
        took = round(time.monotonic() - one.begun, 1)
        summary["parts"][one.name] = {"result": result, "seconds": took, **counted(args.out, one)}
        (args.out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
        print(f"{result:8} {one.name} ({took} s)", flush=True)

    try:
        while (waiting or running) and time.monotonic() < end:
            held = any(one.name == COMPILED for one in running)
            ready = [name for name in waiting if not held or name.startswith("tests")]
            for name in ready[: AT_ONCE - len(running)]:
                waiting.remove(name)
                running.append(started(args, name))
                if name == COMPILED:
                    break
            time.sleep(0.2)
            for one in [one for one in running if one.process.poll() is not None]:
                running.remove(one)
                code = one.process.returncode
                done(one, {0: "passed", 3: "not run"}.get(code, "FAILED"))
    finally:
        for one in running:
            os.killpg(one.process.pid, signal.SIGKILL)
            one.process.wait()
            done(one, "cut off")
        for name in waiting:
            summary["parts"][name] = {"result": "not begun"}
        shutil.rmtree(args.cache, ignore_errors=True)
        (args.out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
    results = [part["result"] for part in summary["parts"].values()]
    kinds = dict.fromkeys(results)
    print(", ".join(f"{results.count(kind)} {kind}" for kind in kinds))
    return int(any(result not in ("passed", "not run") for result in results))


def started(args: argparse.Namespace, name: str) -> Running:
    command = [sys.executable, __file__, "--only", name, "--out", str(args.out)]
    command += ["--device", args.device, "--tokens", str(args.tokens)]
    command += ["--soak-tokens", str(args.soak_tokens)]
    log = (args.out / f"{name}.log").open("wb")
    environment = {"OMP_NUM_THREADS": "2", **os.environ, "PYTHONUNBUFFERED": "1"}
    if args.device == "cuda":
        environment |= with_lines(Path(args.cache))
    process = subprocess.Popen(
        command,
        stdout=log,
        stderr=subprocess.STDOUT,
        cwd=ROOT,
        env=environment,
        start_new_session=True,
    )
    return Running(name, process, time.monotonic())


def counted(out: Path, one: Running) -> dict[str, Any]:
    """Of tests, as far as they came."""
    if not one.name.startswith("tests"):
        return {}
    said = (out / f"{one.name}.log").read_text(errors="replace")
    found = COUNTED.findall("\n".join(line for line in said.splitlines() if "::" in line))
    return {word.lower(): found.count(word) for word in sorted(set(found))}


# ---- in a process of its own ---------------------------------------------------------------------


def one(args: argparse.Namespace) -> int:
    bench = Bench(args.device)

    def tell(name: str, said: Any) -> None:
        with (args.out / f"{args.only}.jsonl").open("a") as file:
            file.write(json.dumps({"name": name, **said}) + "\n")
        print(name, said, flush=True)

    kind, _, rest = args.only.partition("-")
    try:
        if kind == "tests":
            return tests(args, int(rest))
        parts: dict[str, Callable[[], object]] = {
            COMPILED: lambda: bench.compile(plans(bench, args)),
            "repeats": lambda: formats.repeats(bench, args.tokens, tell),
            "soak": lambda: formats.soak(bench, args.soak_tokens, tell),
            "fidelity": lambda: formats.fidelities(bench, args.out, tell, share(int(rest))),
            "sanitizer": lambda: tell(rest, sanitize(bench, args.out, "formats", (rest,))),
        }
        parts[kind]()
    except NotRun as reason:
        print(f"not run: {reason}")
        return 3
    except Failed as reason:
        tell("failed", {"why": str(reason)})
        return 1
    return 0


def plans(bench: Bench, args: argparse.Namespace) -> list[Plan]:
    """Of all parts but the tests."""
    public = formats.public_plans(bench, args.tokens).values()
    return [*public, *formats.watched_plans(bench), *formats.small_plans(bench)]


def share(number: int) -> list[int]:
    """Of the small models."""
    return list(range(number, len(formats.DENSE) + len(formats.MIXTURES), SHARES))


def tests(args: argparse.Namespace, number: int) -> int:
    """Every so manyth of the tests, a line each as it ends."""
    gpu = args.device == "cuda"
    base = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"]
    base += ["-m", "gpu" if gpu else "not slow", TESTS if gpu else TRIED]
    mine = list(collected(base))[number::SLICES]
    if not mine:
        return 0
    command = [*base[:-1], "-v", "--tb=short", *mine]
    return subprocess.run(command, check=False).returncode


def collected(base: list[str]) -> Iterator[str]:
    found = subprocess.run(
        [*base, "--collect-only", "-q"], capture_output=True, text=True, check=False
    )
    yield from (line for line in found.stdout.splitlines() if "::" in line)


if __name__ == "__main__":
    sys.exit(main())
