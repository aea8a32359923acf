"""Where a step's warps stand, instruction by instruction: Nsight Compute's samples of the resident
kernel, by source line.

    PYTHONPATH=. python3 studies/h200-history/sampled.py measure OUT llama-3.2-1b@int8   # one GPU
    python studies/h200-history/sampled.py table OUT/0.csv                               # no GPU

Sampling needs no mark in the kernel. The table's microseconds are those of a consumer warp, the
mean of all blocks: who waits for a publication stands in the same row as who waits for memory
behind it. Clocks are left as they are.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

from studies.common.cuda_lines import Place, read_kernel
from twin.engine.cuda_build import compile_cubin
from twin.hardware.load import load_node
from twin.models.load import load_model
from twin.plan.types import Plan
from twin.schedule.options import plan_for

NODE = "1xh200"
PROMPT, TOKENS = 32, 128
REASONS = [
    "barrier",
    "branch_resolving",
    "dispatch_stall",
    "drain",
    "gmma",
    "imc_miss",
    "lg_throttle",
    "long_scoreboard",
    "math_pipe_throttle",
    "membar",
    "mio_throttle",
    "misc",
    "no_instructions",
    "not_selected",
    "selected",
    "short_scoreboard",
    "sleeping",
    "tex_throttle",
    "wait",
]
METRIC = "smsp__pcsamp_warps_issue_stalled_"
SIDE_FILES = ("cuda_loader.cuh", "cuda_scheduler.cuh")  # warps that do not multiply
DEPTH = 3  # places of a row: the innermost, and whose code it was inlined into
OWN = 2  # places of the kernel's main function alone: what the side warps run between their loops


def plan_of(name: str) -> Plan:
    """Default options, for a prompt that is read by steps: all samples are of steps."""
    return plan_for(load_model(name), load_node(NODE), context=96, max_context=168, prompt_chunk=1)


def measure(out: Path, names: list[str]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(names):
        report = out / f"{number}.ncu-rep"
        metrics = ",".join(METRIC + reason for reason in REASONS)
        run = [sys.executable, __file__, "run", str(out / f"{number}.json"), name]
        sampled = ["ncu", "--clock-control", "none", "--metrics", metrics, "-f", "-o", report]
        # the second launch: the first one warms up
        chosen = ["-k", "regex:twin_kernel", "--launch-skip", "1", "--launch-count", "1"]
        subprocess.run([*map(str, sampled), *chosen, *run], check=True)
        page = ["ncu", "--import", str(report), "--page", "source", "--csv"]
        found = subprocess.run(page, check=True, capture_output=True, text=True).stdout
        (out / f"{number}.csv").write_text(found, encoding="utf-8")


def run(kept: Path, name: str) -> None:
    """Two generations; the time of a step without samples is that of the first."""
    from studies.common.rows import SEED, first_tokens, step_ns
    from twin.engine.choose import open_random

    plan = plan_of(name)
    assert plan.spec is not None
    prompt = first_tokens(plan.spec.vocab, PROMPT)
    with open_random(load_node(NODE).device, plan, SEED) as engine:
        made = [engine.generate(prompt, max_tokens=TOKENS) for _ in range(2)]
    kept.write_text(json.dumps({"name": name, "step_us": step_ns(made[0], 8) / 1e3}))


def of_side_warps(places: tuple[Place, ...]) -> bool:
    return any(place.file in SIDE_FILES for place in places) or (
        bool(places) and places[-1].file == "cuda_main.cu" and len(places) <= OWN
    )


def table(file: Path, rows: int) -> None:
    said = json.loads(file.with_suffix(".json").read_text())
    kernel = read_kernel(compile_cubin(plan_of(said["name"]), lines=True).cubin)
    lines = list(csv.reader(file.open(encoding="utf-8")))
    head = next(i for i, line in enumerate(lines) if "Source" in line)
    reasons = [column.removeprefix(METRIC) for column in lines[head][2:]]
    found = [line for line in lines[head + 1 :] if line and line[0].startswith("0x")]
    first = int(found[0][0], 16)
    by_reason: Counter[str] = Counter()
    by_place: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for line in found:
        places = kernel.places(int(line[0], 16) - first)
        if of_side_warps(places):
            continue
        where = " < ".join(f"{place.file}:{place.line}" for place in places[:DEPTH])
        for reason, count in zip(reasons, line[2:], strict=True):
            by_reason[reason] += int(count or 0)
            by_place[where][reason] += int(count or 0)
    us = said["step_us"] / sum(by_reason.values())
    print(f"{said['name']}: {said['step_us']:.0f} us a step")
    for reason, count in by_reason.most_common():
        if count:
            print(f"{us * count:8.1f}  {reason}")
    for where, counts in sorted(by_place.items(), key=lambda one: -one[1].total())[:rows]:
        most = ", ".join(f"{reason} {us * n:.1f}" for reason, n in counts.most_common(3))
        print(f"{us * counts.total():8.1f}  {where:72s} {most}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("measure", "run", "table"))
    parser.add_argument("path", type=Path, help="a folder for NUMBER.csv; one of these")
    parser.add_argument("names", nargs="*", help="models, with @ and a format if not in 16 bits")
    parser.add_argument("--rows", type=int, default=40)
    args = parser.parse_intermixed_args()
    if args.what == "measure":
        measure(args.path, args.names)
    elif args.what == "run":
        run(args.path, args.names[0])
    else:
        table(args.path, args.rows)


if __name__ == "__main__":
    main()
