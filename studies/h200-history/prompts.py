"""Prompts on one H200: the passes' results against single steps and FP32, then the time of 512
tokens; see README.md.

PYTHONPATH=. python3 studies/h200-history/prompts.py --out out/prompts [--only WORD]... [--device
host]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from twin.bench.pieces import replaced
from twin.bench.shapes import (
    CHOSEN,
    OWN,
    SEED,
    STAND_INS,
    TINY,
    TINY_LANES,
    Bench,
    conditions,
    cpu_plan,
    prompt_of,
)
from twin.engine.weights import random_weights
from twin.errors import ConfigError
from twin.hardware.floor import ceiling
from twin.hardware.load import load_device
from twin.kernel.defaults import plan_for
from twin.kernel.prompt import pass_weight_bytes, passes
from twin.models.spec import DType, Lanes, ModelSpec, Rope, RopeStyle
from twin.plan.types import Execution, Plan
from twin.reference.step import Reference

ROOT = Path(__file__).resolve().parents[2]
PROMPT, REPEATS = 512, 5  # tokens; runs
CEILING = ceiling(load_device("h200-sxm")).value  # bytes a second
# tokens before those whose logits are compared, around the borders of a pass
LENGTHS = (5, 31, 32, 33, 70)
AFTER = 2  # positions compared after each
# of the largest logit: inputs of matrices are rounded
TOLERANCE = {DType.FP16: 5e-3, DType.BF16: 3e-2, DType.FP32: 2e-5}

# Small models whose logits are compared with the FP32 reference: every branch of the passes, in a
# second each.
BIASED = replace(TINY, name="biased", qkv_bias=True)
NORMED = replace(TINY, name="normed", qk_norm=True, head_dim=24)
TURNED = replace(
    TINY,
    name="turned",
    rope=Rope(10000.0, RopeStyle.INTERLEAVED),
    windows=(5, 20),
    heads=8,
    kv_heads=1,
)
RAGGED = replace(TINY, name="ragged", hidden=328, heads=16, kv_heads=8, head_dim=24, ffn=1000)
EIGHT = replace(TINY_LANES, name="eight-lanes", heads=16, kv_heads=8, ffn=256, lanes=Lanes(8, 2))
SMALL: tuple[tuple[ModelSpec, dict[str, Any]], ...] = (
    (BIASED, {}),
    (NORMED, {}),
    (TURNED, {"blocks": 3}),
    (EIGHT, {"blocks": 16}),
    (RAGGED, {"slot_bytes": 2048, "tile_rows": 4}),
)
# Real widths, few layers, compared with single steps of the same kernel.
WIDE = (("llama-3.2-1b", 2), ("laneformer-2b", 4), ("qwen3-8b", 1), ("qwen2.5-coder-1.5b", 2))
FULL = ("laneformer-2b", "llama-3.2-1b", "qwen3-8b")
BASE = "kernel"
CHOSEN.setdefault("qwen2.5-coder-1.5b", {"blocks": 132})


@dataclass(frozen=True)
class Variant:
    """Sources in which `old` became `new`. `right`: its results count; otherwise something is left
    out, to see what it takes.
    """

    name: str
    changes: tuple[tuple[str, str, str], ...] = ()
    right: bool = False
    models: tuple[str, ...] = field(default=FULL[:2])


STAGES, PRODUCTS = "monokernel/prompt.cuh", "platform/cuda_prompt.cuh"
ADDED = (
    "if (g < groups) add_warps(b, matrix, row + g * matrix.height, element, unit, tokens, sum, g, "
    "emit);"
)
MULTIPLIED = "if (!multiply_chunk(b, chunk, stage, pass, ready)) return false;"
MET = "  return !b.core.any(!good);\n}\n\n// ---- residual"
VARIANTS = (
    Variant(
        "no prefetch",
        ((PRODUCTS, "if (me == 0 && bytes > 0)", "if (me == 0 && bytes > 0 && false)"),),
        True,
    ),
    Variant(
        "prefetch 512 KiB",
        ((PRODUCTS, "MOST = 128 << 10;  // 16 MiB of all blocks", "MOST = 512 << 10;"),),
        True,
    ),
    Variant("3 slots", ((PRODUCTS, "CHUNK_SLOTS = 4;", "CHUNK_SLOTS = 3;"),), True),
    Variant(
        "without attention", ((STAGES, "attend_chunk(b, stage, pass, last, chunk.memory(b));", ""),)
    ),
    Variant("without norms", ((STAGES, "norm_chunk(b, stage, pass, chunk.memory(b));", ""),)),
    Variant("without products", ((STAGES, MULTIPLIED, "if (!ready()) return false;"),)),
    Variant(
        "without sums over warps",
        ((PRODUCTS, ADDED, "if (sum[g][0][0] == 1e30f) emit(0, element, sum[g][0][1], 0.0f);"),),
    ),
    Variant(
        "without grid barriers",
        (
            (
                STAGES,
                "good = wait_counter(b, counter_of(near",
                "good = false && wait_counter(b, counter_of(near",
            ),
            (STAGES, MET, MET.replace("!good", "false")),
        ),
    ),
)


def main() -> None:
    args = arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    if args.work:
        work(args)
        return
    begun = time.monotonic()
    trees = {v.name: patched(v, args.out / "trees") for v in chosen(args) if v.changes}
    command = [
        sys.executable,
        "studies/h200-history/prompts.py",
        "--out",
        str(args.out.resolve()),
        "--device",
        args.device,
    ]
    command += [word for only in args.only for word in ("--only", only)]
    building = [
        subprocess.Popen([*command, "--work", f"compile:{v}"], cwd=tree, env=environment(tree))
        for v, tree in trees.items()
    ]
    print(f"{compiled(args)} kernels and {len(trees)} variants", flush=True)
    if sum(process.wait() for process in building):
        raise SystemExit("a variant does not compile; see above")
    print(f"compiled in {time.monotonic() - begun:.0f} s", flush=True)
    rows = [*correct(args), *timed(args, Variant(BASE, right=True, models=FULL))]
    write(args, BASE, rows)
    for name, tree in trees.items():
        subprocess.run(
            [*command, "--work", f"time:{name}"], cwd=tree, env=environment(tree), check=False
        )
    table(args)
    print(f"{time.monotonic() - begun:.0f} s in all; {conditions()}", flush=True)
    if not all(row["good"] for row in rows if "good" in row):
        raise SystemExit("the passes are wrong; see above")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the samples")
    parser.add_argument(
        "--device",
        choices=("cuda", "host"),
        default="cuda",
        help="host: small stand-ins, to try this script",
    )
    parser.add_argument(
        "--only", action="append", default=[], help="models and variants whose names hold this word"
    )
    parser.add_argument("--no-variants", action="store_true", help="the kernel alone")
    # compile:VARIANT or time:VARIANT, in a tree of its own
    parser.add_argument("--work", help=argparse.SUPPRESS)
    return parser.parse_args()


def chosen(args: argparse.Namespace) -> list[Variant]:
    """Variants of sources that the host does not run are of no use there."""
    if args.device == "host" or args.no_variants:
        return []
    return [v for v in VARIANTS if wanted(args, v.name)]


def wanted(args: argparse.Namespace, name: str) -> bool:
    return not args.only or any(word in name for word in args.only)


def environment(tree: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(tree)}


def patched(variant: Variant, folder: Path) -> Path:
    """A copy of what a run needs, with the variant's changes."""
    tree = (folder / variant.name.replace(" ", "-")).resolve()
    shutil.rmtree(tree, ignore_errors=True)
    for name in ("twin", "native", "hwmodels", "calibration/fits", "studies/h200-history"):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    for file, old, new in variant.changes:
        source = tree / "native" / file
        try:
            made = replaced(source.read_text(encoding="utf-8"), old, new)
        except ConfigError as error:
            raise SystemExit(f"{variant.name}: {file}: {error}") from error
        source.write_text(made, encoding="utf-8")
    return tree


def work(args: argparse.Namespace) -> None:
    """What the copy of a variant does."""
    what, name = args.work.split(":")
    variant = next(v for v in VARIANTS if v.name == name)
    bench = Bench(args.device)
    if what == "compile":
        bench.compile(
            [full(bench, model) for model in variant.models if wanted(args, model) or args.only]
        )
        return
    write(args, name, list(timed(args, variant)))


# ---- plans ---------------------------------------------------------------------------------------


def small(bench: Bench, spec: ModelSpec, dtype: DType, chunk: int, **more: Any) -> Plan:
    OWN[spec.name] = spec
    few = {
        "blocks": 8,
        "slot_bytes": 1024,
        "ring_slots": 4,
        "window_slots": 4,
        "max_context": 128,
        "weight_dtype": dtype,
        "kv_dtype": dtype,
    }
    if bench.device == "host":
        return cpu_plan(spec, {**few, **more, "prompt_chunk": chunk, "context": 64})
    from twin.hardware.load import load_node

    return plan_for(
        spec, load_node("1xh200"), **{**few, **more, "prompt_chunk": chunk, "context": 64}
    )


def smalls(bench: Bench) -> Iterator[Plan]:
    for spec, more in SMALL:
        yield small(bench, spec, DType.FP16, 16, **more)
        yield small(bench, spec, DType.BF16, 32, **more)
        yield small(bench, spec, DType.FP32, 32, **more)
    yield small(bench, RAGGED, DType.FP16, 64, **SMALL[-1][1])
    yield small(bench, EIGHT, DType.BF16, 64, **SMALL[-2][1])
    yield small(bench, BIASED, DType.FP16, 32, execution=Execution.GRAPH)


def wides(bench: Bench) -> Iterator[tuple[Plan, Plan]]:
    """The default passes, and single steps."""
    for name, layers in WIDE:
        if bench.device == "host" and name not in STAND_INS:
            continue
        made = bench.plan(name, layers=layers, max_context=256, **host_chunk(bench))
        yield made, replace_chunk(made, 1)


def replace_chunk(plan: Plan, chunk: int) -> Plan:
    from twin.plan.build import build

    assert plan.spec is not None
    return build(plan.spec, replace(plan.options, prompt_chunk=chunk), plan.limits)


def full(bench: Bench, name: str, **more: Any) -> Plan:
    return bench.plan(name, max_context=2 * PROMPT, **host_chunk(bench), **more)


def host_chunk(bench: Bench) -> dict[str, int]:
    """Stand-ins have no defaults of their own."""
    return {"prompt_chunk": 16} if bench.device == "host" else {}


def fulls(
    bench: Bench, args: argparse.Namespace, models: tuple[str, ...]
) -> Iterator[tuple[str, Plan]]:
    for name in models:
        if wanted(args, name):
            made = full(bench, name)
            yield name, made
            for other in sorted({16, 32, 64} - {made.options.prompt_chunk}):
                yield f"{name}, {other} a pass", replace_chunk(made, other)


def compiled(args: argparse.Namespace) -> int:
    bench = Bench(args.device)
    plans = [
        *smalls(bench),
        *(plan for pair in wides(bench) for plan in pair),
        *(plan for _, plan in fulls(bench, args, FULL)),
    ]
    bench.compile(plans)
    return len(plans)


# ---- correctness ---------------------------------------------------------------------------------


def correct(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    bench = Bench(args.device)
    for plan in smalls(bench):
        yield said(against_reference(bench, plan))
    for plan, single in wides(bench):
        yield said(against_steps(bench, plan, single))


def against_reference(bench: Bench, plan: Plan) -> dict[str, Any]:
    assert plan.spec is not None
    prompt, weights = (
        prompt_of(plan, max(LENGTHS) + AFTER),
        random_weights(plan.spec, SEED, plan.options.weight_dtype),
    )
    reference = Reference(plan, weights)
    logits = np.stack([reference.step(token).copy() for token in prompt])
    with bench.engine(plan, weights=weights) as engine:
        worst = max(
            apart(
                engine.logits(prompt[n : n + AFTER], after=prompt[:n]),
                logits[n : n + AFTER],
                logits,
            )
            for n in LENGTHS
        )
    return judged(plan, "FP32 reference", worst)


def against_steps(bench: Bench, plan: Plan, single: Plan) -> dict[str, Any]:
    """The same weights fill both engines; and the passes give the same bits again."""
    prompt = prompt_of(plan, max(LENGTHS) + AFTER)
    with bench.engine(single) as engine:
        logits = engine.logits(prompt)
        tokens = engine.generate(prompt, max_tokens=12).tokens
    with bench.engine(plan) as engine:
        found = {n: engine.logits(prompt[n : n + AFTER], after=prompt[:n]) for n in LENGTHS}
        again = engine.logits(prompt[max(LENGTHS) :], after=prompt[: max(LENGTHS)])
        same = engine.generate(prompt, max_tokens=12).tokens == tokens
    worst = max(apart(found[n], logits[n : n + AFTER], logits) for n in LENGTHS)
    return {
        **judged(plan, "single steps", worst),
        "same_bits": bool((again == found[max(LENGTHS)]).all()),
        "same_tokens": same,
    }


def apart(found: Any, expected: Any, logits: Any) -> float:
    """Largest difference, of the largest logit; infinite for what is no number."""
    difference = float(np.abs(found - expected).max() / np.abs(logits).max())
    return difference if np.isfinite(difference) else float("inf")


def judged(plan: Plan, against: str, worst: float) -> dict[str, Any]:
    assert plan.spec is not None
    o = plan.options
    name = (
        f"{plan.spec.name} x {plan.spec.layers} {o.weight_dtype.value} {o.prompt_chunk} a pass "
        f"{o.execution.value}"
    )
    return {
        "name": name,
        "against": against,
        "worst": worst,
        "good": worst < TOLERANCE[o.weight_dtype],
    }


def said(row: dict[str, Any]) -> dict[str, Any]:
    more = ", ".join(f"{key}: {row[key]}" for key in ("same_bits", "same_tokens") if key in row)
    print(
        f"{'good ' if row['good'] else 'WRONG'} {row['name']:46s} {row['worst']:.1e} of the "
        f"largest logit from {row['against']} {more}",
        flush=True,
    )
    return row


# ---- time ----------------------------------------------------------------------------------------


def timed(args: argparse.Namespace, variant: Variant) -> Iterator[dict[str, Any]]:
    bench = Bench(args.device)
    plans = (
        fulls(bench, args, variant.models)
        if variant.name == BASE
        else ((name, full(bench, name)) for name in variant.models)
    )
    for name, plan in plans:
        prompt = prompt_of(plan, PROMPT)
        with bench.engine(plan) as engine:
            runs = [engine.generate(prompt, max_tokens=8) for _ in range(REPEATS)]
        seconds = [float(run.pass_ns.sum()) * 1e-9 for run in runs[1:]]
        floor = passes(plan, len(prompt)) * pass_weight_bytes(plan) / CEILING
        row = {
            "variant": variant.name,
            "model": name,
            "chunk": plan.options.prompt_chunk,
            "seconds": seconds,
            "floor_s": floor,
            "passes": [int(ns) for ns in runs[-1].pass_ns],
            "prompt_s": [run.prompt_ns * 1e-9 for run in runs],
            "step_s": statistics.median(float(ns) for run in runs[1:] for ns in run.step_ns) * 1e-9,
            "tokens": runs[-1].tokens,
            "same": all(run.tokens == runs[0].tokens for run in runs),
        }
        print(line(row), flush=True)
        yield row


def line(row: dict[str, Any]) -> str:
    middle = statistics.median(row["seconds"])
    bits = "same tokens" if row["same"] else "TOKENS DIFFER"
    return (
        f"{row['variant']:24s} {row['model']:28s} {row['chunk']:3d} a pass {middle * 1e3:8.2f} ms "
        f"({min(row['seconds']) * 1e3:.2f}-{max(row['seconds']) * 1e3:.2f}), floor "
        f"{row['floor_s'] * 1e3:5.1f} ms, a pass "
        f"{row['passes'][0] / 1e3:.0f}..{row['passes'][-1] / 1e3:.0f} us, a step "
        f"{row['step_s'] * 1e6:.0f} us, {bits}"
    )


def write(args: argparse.Namespace, name: str, rows: list[dict[str, Any]]) -> None:
    (args.out / f"{name.replace(' ', '-')}.json").write_text(
        json.dumps(rows, indent=1) + "\n", encoding="utf-8"
    )


def table(args: argparse.Namespace) -> None:
    print("\n512 tokens, medians")
    for name in (BASE, *(v.name for v in chosen(args))):
        path = args.out / f"{name.replace(' ', '-')}.json"
        for row in json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []:
            if "seconds" in row:
                print(line(row))


if __name__ == "__main__":
    main()
