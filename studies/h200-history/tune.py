"""Times variants of the kernel on one H200: plans by option, sources by patch; see README.md.

python studies/h200-history/tune.py OUT.json NAME... [--trace NAME...] [--patch LABEL=FILE:OLD=>NEW]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from twin.bench.tuning import Case, measure_model, measure_probe, plan_of, trace_of
from twin.engine.cuda_build import compile_cubin

ROOT = Path(__file__).resolve().parents[2]


def measure(names: list[str], traced: list[str]) -> list[dict[str, Any]]:
    plans = {name: plan_of(name) for name in [*names, *traced]}
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda name: compile_cubin(plans[name]), names))
        list(pool.map(lambda name: compile_cubin(plans[name], trace=True), traced))
    rows = []
    for name in names:
        plan = plans[name]
        if plan.spec is None:
            made = measure_probe(Case(name, plan, 0, tokens=60))
            rows.append({"name": name, "step_us": made["step_s"] * 1e6})
            print(f"{name:60s} {made['step_s'] * 1e6:8.2f} us", flush=True)
            continue
        prompt = max(8, plan.options.context - 160)
        made = measure_model(Case(name, plan, prompt))
        gone = plan.bytes_per_step() / made["step_s"] / 1e12
        micro = {key: made[f"{key}_s"] * 1e6 for key in ("step", "p5", "p95")}
        found = {
            "tb_s": gone,
            "same": made["same_tokens"],
            "tokens": made["tokens"],
            "registers": made["registers"],
        }
        rows.append({"name": name, **micro, **found, "slots": plan.options.ring_slots})
        spread = f"p5 {micro['p5']:7.1f} p95 {micro['p95']:7.1f}"
        same = f"same {made['same_tokens']} {made['tokens'][:4]} slots {plan.options.ring_slots}"
        print(
            f"{name:60s} {micro['step']:8.1f} us  {gone:5.2f} TB/s {gone / 4.61:4.0%}  {spread}  "
            f"{same}",
            flush=True,
        )
    for name in traced:
        found = trace_of(Case(name, plans[name], 32))
        rows.append({"name": name, "trace": found})
        print("trace", name)
        for kind, numbers in found.items():
            print("   ", kind, numbers, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--trace", action="append", default=[])
    parser.add_argument(
        "--patch",
        action="append",
        default=[],
        help="LABEL=FILE:OLD=>NEW; the names run once more with the patched sources",
    )
    args = parser.parse_intermixed_args()
    if not args.patch:
        args.out.write_text(json.dumps(measure(args.names, args.trace), indent=1) + "\n")
        return
    commands = []
    for patch in args.patch:
        label, rest = patch.split("=", 1)
        tree = Path(tempfile.mkdtemp()) / label
        shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".git", ".venv", "out"))
        for one in rest.split(";;"):
            file, change = one.split(":", 1)
            old, new = change.split("=>", 1)
            source = tree / "native" / file
            text = source.read_text()
            if old not in text:
                raise SystemExit(f"{label}: {file} does not contain {old!r}")
            source.write_text(text.replace(old, new))
        command = [
            sys.executable,
            str(tree / "studies/h200-history/tune.py"),
            str(args.out) + f".{label}",
            *args.names,
        ]
        commands.append((label, command, tree))
    for label, command, tree in commands:
        print(f"--- {label}", flush=True)
        subprocess.run(command, cwd=tree, env={**os.environ, "PYTHONPATH": str(tree)}, check=False)


if __name__ == "__main__":
    main()
