"""Where a step's microseconds go inside its stages, and when each tile is asked for: a kernel with
marks of its own, on one H200.

A copy of the sources with the marks; measured on a GPU machine, NAMEs as of tune.py; a table of the
times from the last block of a stage to each mark:

    python studies/h200-history/inside.py tree FOLDER
    PYTHONPATH=FOLDER python FOLDER/studies/h200-history/inside.py measure OUT NAME...
    python studies/h200-history/inside.py table OUT/0.npz

The marks cost Llama-3.2-1B 5 % of a step. They are placed by exact pieces of the sources; where one
is not found any more, `tree` names it.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import warnings
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twin.bench.pieces import replaced
from twin.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]

# kept: the last steps; marks of a stage; stages; blocks; a block's last tiles
STEPS, MARKS, STAGES, WORKERS, TILES = 4, 12, 330, 132, 8192
TOKENS = 48
KEPT = 16  # blocks whose tiles are stored; of all of them it would be 17 MB a plan
# Of a stage: 0 begun, 1 weights taken ahead, 2 a thread's inputs there, 3 the block's, 4
# multiplied, 5 a barrier later, 6 resets seen, 7 published; of attention 4 heads prepared, 6
# scanned, 7 a barrier later, 8 published, 9 appended.
PUBLISHED = 7
ATTENTION_DONE = {PUBLISHED: 8}
NAMES = {
    ("", 0): "begun",
    ("", 1): "weights taken ahead",
    ("", 2): "a thread's inputs there",
    ("", 3): "the block's",
    ("", 4): "multiplied",
    ("", 5): "a barrier later",
    ("", 6): "resets of the first rows seen",
    ("", 7): "published",
    ("", 8): "published",
    ("", 9): "appended",
    ("", 10): "",
    ("", 11): "",
    ("attention", 4): "heads prepared",
    ("attention", 6): "scanned",
    ("attention", 7): "a barrier later",
}

STAGE, VECTOR, SCAN = (
    "native/monokernel/stages.cuh",
    "native/monokernel/gemv.cuh",
    "native/monokernel/attention.cuh",
)
BLOCK, RING = "native/monokernel/block.cuh", "native/platform/cuda_ring.cuh"
PLACES = [  # (file, a piece of it, the same with marks)
    (
        BLOCK,
        "#define TWIN_EACH",
        f"""extern "C" __device__ u32 stage_log[{STEPS} * {WORKERS} * {STAGES} * {MARKS}];
__device__ __forceinline__ void inside(const Block& b, int k) {{
  const int worker = b.block + b.rank * b.plan.blocks;
  const int at = (((b.at.step & 3) * {WORKERS} + worker) * {STAGES} + b.now) * {MARKS} + k;
  if (b.core.thread() == 0) stage_log[at] = u32(now_ns());
}}
#define TWIN_EACH""",
    ),
    (BLOCK, "  int half;  ", "  int half = 0, now = 0;  "),
    (
        "native/monokernel/kernel.cuh",
        "  b.core.forget();\n",
        "  b.core.forget();\n  b.now = index;\n  inside(b, 0);\n",
    ),
    (
        STAGE,
        "  Core::Hidden x = Core::Hidden::in(b.input, b.plan.hidden);\n  if (meeting",
        "  inside(b, 1);\n  Core::Hidden x = Core::Hidden::in(b.input, b.plan.hidden);\n"
        "  if (meeting",
    ),
    (
        STAGE,
        "  begin(b, index, stage);\n  if (!needed)",
        "  inside(b, 2);\n  begin(b, index, stage);\n  inside(b, 3);\n  if (!needed)",
    ),
    (
        STAGE,
        "  if (!take_heads(b, index, stage, x)) return false;\n  begin(b, index, stage);",
        "  inside(b, 1);\n  if (!take_heads(b, index, stage, x)) return false;\n  inside(b, 2);\n"
        "  begin(b, index, stage);\n  inside(b, 3);",
    ),
    (
        STAGE,
        "    if (!gather_vector(b, index, b.plan.reads_at(i), x)) return false;\n"
        "  begin(b, index, stage);\n  // not before",
        "    if (!gather_vector(b, index, b.plan.reads_at(i), x)) return false;\n"
        "  inside(b, 2);\n  begin(b, index, stage);\n  inside(b, 3);\n  // not before",
    ),
    (
        STAGE,
        "  begin(b, index, stage);\n  // blocks without items",
        "  inside(b, 2);\n  begin(b, index, stage);\n  inside(b, 3);\n  // blocks without items",
    ),
    (
        STAGE,
        "  if (any && b.core.gave_up()) return false;\n",
        "  inside(b, 4);\n  if (any && b.core.gave_up()) return false;\n",
    ),
    (
        VECTOR,
        "batch, ahead);\n    b.core.barrier();",
        "batch, ahead);\n    inside(b, 4);\n    b.core.barrier();\n    inside(b, 5);",
    ),
    (VECTOR, "      b.core.cleared();\n", "      b.core.cleared();\n      inside(b, 6);\n"),
    (
        VECTOR,
        "at + unit - 1, batch));\n    }\n",
        "at + unit - 1, batch));\n    }\n    inside(b, 7);\n",
    ),
    (
        SCAN,
        "      b.core.barrier();\n      b.core.cleared();\n      merge(",
        "      inside(b, 6);\n      b.core.barrier();\n      inside(b, 7);\n"
        "      b.core.cleared();\n      merge(",
    ),
    (
        SCAN,
        "      if (set + SETS >= Sets::COUNT) append(b);",
        "      inside(b, 8);\n      if (set + SETS >= Sets::COUNT) append(b);",
    ),
    (
        SCAN,
        "      leave_last(b.core, holds);\n",
        "      leave_last(b.core, holds);\n      inside(b, 9);\n",
    ),
    (
        RING,
        "namespace twin {\n",  # tile, looked for a slot, had it, asked for the copy
        f'extern "C" __device__ uint4 tile_log[{WORKERS} * {TILES}];\nnamespace twin {{\n',
    ),
    (
        RING,
        "the window lets it follow; the other loader's tile is there.\n"
        "    Turn used = now.before(ring.full, Ring::SLOTS);\n    used.at += Turn::ROUND;\n"
        "    if (!wait(used) ||",
        "the window lets it follow; the other loader's tile is there.\n"
        "    Turn used = now.before(ring.full, Ring::SLOTS);\n    used.at += Turn::ROUND;\n"
        "    const u32 began = u32(now_ns());\n    if (!wait(used)) return false;\n"
        "    const u32 had = u32(now_ns());\n    if (",
    ),
    (
        RING,
        "    expect_copies(now.at, values",
        f"    tile_log[blockIdx.x * {TILES} + (tile & {TILES - 1})] = uint4{{tile, began, had, "
        f"u32(now_ns())}};\n    expect_copies(now.at, values",
    ),
    (
        "twin/engine/cuda.py",
        "    def _abort_address",
        """    def logged(self, name: bytes, shape: tuple[int, ...]) -> NDArray[np.uint32]:
        return self._gpus[0].read_symbol(name).view(np.uint32).reshape(shape)

    def _abort_address""",
    ),
]


def make_tree(folder: Path) -> None:
    for name in ("twin", "native", "hwmodels", "studies/h200-history"):
        shutil.copytree(
            ROOT / name,
            folder / name,
            ignore=shutil.ignore_patterns("__pycache__"),
            dirs_exist_ok=True,
        )
    shutil.copy(ROOT / "pyproject.toml", folder)
    for file, old, new in PLACES:
        text = (folder / file).read_text(encoding="utf-8")
        try:
            made = replaced(text, old, new)
        except ConfigError as error:
            sys.exit(f"{file}: {error}; move the mark in {Path(__file__).name}")
        (folder / file).write_text(made, encoding="utf-8")


def measure(out: Path, names: list[str]) -> None:
    from twin.bench.tuning import SEED, Vectors, plan_of
    from twin.engine.cuda import CudaEngine

    out.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(names):
        plan = plan_of(name)
        prompt = [
            int(t)
            for t in np.random.default_rng(SEED).integers(
                0, plan.spec.vocab, max(8, plan.options.context - TOKENS)
            )
        ]
        with CudaEngine(
            plan, Vectors(plan.spec, plan.options.weight_dtype), random_streams=SEED, trace=True
        ) as engine:
            engine.generate(prompt[:4], max_tokens=4)
            made = engine.generate(prompt, max_tokens=TOKENS)
            logs: Any = engine
            stages = logs.logged(b"stage_log", (STEPS, WORKERS, STAGES, MARKS))[
                :, :, : len(plan.stages)
            ]
            tiles = logs.logged(b"tile_log", (WORKERS, TILES, 4))
        step_us = float(np.median(made.step_ns[8:])) / 1e3
        full = ring_full_us(tiles[: plan.ranks * plan.blocks], step_us)
        np.savez_compressed(
            out / f"{number}.npz",
            name=name,
            stages=stages,
            tiles=tiles[:KEPT],
            step_us=step_us,
            ring_full_us=full,
        )
        print(f"{name}: {step_us:.1f} us a step with marks -> {out / f'{number}.npz'}", flush=True)


def table(path: Path) -> None:
    from twin.bench.tuning import plan_of

    stored = np.load(path)
    name, step_us = str(stored["name"]), float(stored["step_us"])
    plan = plan_of(name)
    workers = plan.ranks * plan.blocks
    # [steps][workers][stages][marks] us
    log = stored["stages"][:, :workers].astype(np.float64) / 1e3
    log = np.where(log > 0, log, np.nan).reshape(
        log.shape[0], plan.ranks, plan.blocks, *log.shape[2:]
    )
    kinds = [stage.kind.value for stage in plan.stages]
    ends = log[..., PUBLISHED].copy()  # [steps][ranks][blocks][stages]
    for at in (n for n, kind in enumerate(kinds) if kind == "attention"):
        ends[..., at] = log[..., at, ATTENTION_DONE[PUBLISHED]]
    # marks that a stage does not have
    with warnings.catch_warnings(action="ignore", category=RuntimeWarning):
        last = np.nanmax(ends, axis=2)
        chained = [n for n in range(len(kinds)) if np.isfinite(last[..., n]).any()]
        print(
            f"{name}: {step_us:.1f} us a step; us after the rank's last block published the stage "
            "before: first, median, last block"
        )
        for kind in dict.fromkeys(kinds[n] for n in chained):
            pairs = [(a, b) for a, b in pairwise(chained) if kinds[b] == kind]
            if not pairs:
                continue
            print(
                f"{kind:10s} {len(pairs):3d}   "
                f"{np.nanmean([last[..., b] - last[..., a] for a, b in pairs]):8.2f} from last to "
                "last"
            )
            for mark in range(MARKS):
                since = np.array([log[..., b, mark] - last[..., None, a] for a, b in pairs])
                if np.isfinite(since).any():
                    row = [
                        np.nanmean(how(since, axis=-1))
                        for how in (np.nanmin, np.nanmedian, np.nanmax)
                    ]
                    print(
                        f"    {NAMES.get((kind, mark), NAMES['', mark]):32s} "
                        + " ".join(f"{value:8.2f}" for value in row)
                    )
    if "ring_full_us" in stored:
        print(f"ring full: {float(stored['ring_full_us']):.0f} us a step, mean of the blocks")


def ring_full_us(tiles: NDArray[np.uint32], step_us: float) -> float:
    """In which a block's loaders wait for a slot, of a step; `tiles` [blocks][TILES][tile, looked
    for a slot, had it, asked].
    """
    order = np.argsort(tiles[..., 0], axis=1)
    times = np.take_along_axis(tiles, order[..., None], axis=1).astype(np.int64)
    before = np.concatenate([times[:, :1, 3], times[:, :-1, 3]], axis=1)
    waited = np.clip(times[..., 2] - np.maximum(times[..., 1], before), 0, None).sum(axis=1)
    share: float = (waited / (times[:, -1, 3] - times[:, 0, 3])).mean()
    return share * step_us


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("tree", "measure", "table"))
    parser.add_argument(
        "path", type=Path, help="a folder to make; a folder for NUMBER.npz; one of these"
    )
    parser.add_argument("names", nargs="*", help="plans to measure")
    args = parser.parse_intermixed_args()
    if args.what == "tree":
        make_tree(args.path)
    elif args.what == "measure":
        measure(args.path, args.names)
    else:
        table(args.path)


if __name__ == "__main__":
    main()
