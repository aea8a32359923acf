"""Records traced steps of real generations on a GPU, for `twin trace`; needs no simulator. See
README.md.

python studies/h200-traces/record.py --out out/traces [model ...]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

from studies.common.shapes import Bench, conditions, prompt_of
from twin.engine.generation import Generation
from twin.plan.types import Plan
from twin.report.recording import STEPS, record

# positions that the recorded steps lie around
CONTEXTS = {"llama-3.2-1b": 128, "laneformer-2b": 128, "qwen3-8b": 1024}
LEAD = 48  # tokens generated before the recorded steps


def plan_of(bench: Bench, model: str, context: int) -> Plan:
    return bench.plan(model, context=context, max_context=context + STEPS)


def generate(bench: Bench, plan: Plan, *, trace: bool) -> tuple[Generation, int]:
    prompt = prompt_of(plan, plan.options.context - LEAD - STEPS // 2)
    with bench.engine(plan, trace=trace) as engine:
        engine.generate(prompt[:4], max_tokens=4)  # a first run pays for cold caches
        return engine.generate(prompt, max_tokens=LEAD + STEPS + STEPS // 4), len(prompt)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", help=f"of {', '.join(CONTEXTS)}; all unless given")
    parser.add_argument("--out", type=Path, required=True, help="folder for one MODEL.npz each")
    parser.add_argument(
        "--device",
        choices=("cuda", "host"),
        default="cuda",
        help="host: small stand-ins, to try this script",
    )
    args = parser.parse_intermixed_args()
    unknown = [name for name in args.models if name not in CONTEXTS]
    if unknown:
        parser.error(f"no model {unknown[0]!r}; choose from {', '.join(CONTEXTS)}")
    bench = Bench(args.device)
    plans = {name: plan_of(bench, name, CONTEXTS[name]) for name in args.models or CONTEXTS}
    bench.compile(plans.values(), traced=plans.values())
    args.out.mkdir(parents=True, exist_ok=True)
    for name, plan in plans.items():
        plain, _ = generate(bench, plan, trace=False)
        traced, prompt = generate(bench, plan, trace=True)
        if traced.tokens != plain.tokens:
            sys.exit(f"{name}: the traced kernel gives other tokens: its marks would prove nothing")
        us = {
            kind: float(np.median(made.step_ns[LEAD:])) / 1e3
            for kind, made in (("untraced", plain), ("traced", traced))
        }
        about = {**conditions(), "device": args.device, "step_us": us}
        record(plan, traced, prompt=prompt, conditions=about).save(args.out / f"{name}.npz")
        print(
            f"{name}: {us['untraced']:.1f} us a step, {us['traced']:.1f} us traced -> "
            f"{args.out / name}.npz",
            flush=True,
        )


if __name__ == "__main__":
    main()
