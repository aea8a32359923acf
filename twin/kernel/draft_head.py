"""Where a head that drafts has its weights and numbers: in a rank's memory for prompts, by floats.

Rows of its matrices lie as native/monokernel/draft_head.cuh multiplies them: two that are needed
together are neighbours.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from twin.kernel.packing import STORAGE
from twin.models.spec import DraftHead
from twin.plan.catalogue import StageKind
from twin.plan.shards import Weights, rope_table
from twin.plan.types import Plan
from twin.schedule.block import LINE_FLOATS, up
from twin.schedule.passes import Passes

HEAD_FIRST = LINE_FLOATS  # floats before the norms' weights: epsilon
GAINS = ("input_norm", "hidden_norm", "post_norm", "norm")
TABLES = ("fc", "qkv", "o", "gate_up", "down", "lm")
# what is not weights, in the order in which it lies there
NUMBERS = ("states", "state", "input", "query", "out", "sum", "last", "gated", "own", "best")
SHAPE = ("heads", "kv_heads", "dim", "ffn", "vocab", *(f"taken{i}" for i in range(3)))
OFFSETS = (*TABLES, "gains", "turns", "ids", "embed", *NUMBERS, "wanted", "cache")
FIELDS = tuple(f"draft_{name}" for name in (*SHAPE, *OFFSETS))
WANTED_WORDS = 4


def draft_sizes(plan: Plan, passes: Passes, at: int) -> tuple[dict[str, int], int]:
    """(sizes and offsets of a plan's head, from float `at` on; where it ends)."""
    head = plan.spec.draft_head if plan.spec else None
    if head is None or not passes.rounds:
        return {}, at
    floats = _weight_floats(plan, head) | _number_floats(plan, passes, head)
    made = dict(
        zip(SHAPE, (head.heads, head.kv_heads, head.head_dim, head.ffn, head.vocab), strict=False)
    ) | {f"taken{i}": _qkv_index(plan, layer) for i, layer in enumerate(head.taken)}
    for name in OFFSETS:
        made[name] = at if floats[name] else -1
        at += up(floats[name], LINE_FLOATS)
    return {f"draft_{name}": value for name, value in made.items()}, at


def draft_floats(plan: Plan, passes: Passes) -> dict[str, int]:
    """Of each part, by the name of its offset; none of a plan without a head."""
    head = plan.spec.draft_head if plan.spec else None
    if head is None or not passes.rounds:
        return {}
    floats = _weight_floats(plan, head) | _number_floats(plan, passes, head)
    return {f"draft_{name}": size for name, size in floats.items() if size}


def _qkv_index(plan: Plan, layer: int) -> int:
    return next(s.index for s in plan.stages if s.kind is StageKind.QKV and s.layer == layer)


def _weight_floats(plan: Plan, head: DraftHead) -> dict[str, int]:
    size, matrices = plan.options.weight_dtype.bytes, dict(head.matrices)
    rows, cols = matrices.pop("head")
    matrices["lm"] = (up(rows, 2), cols)
    found = {name: rows * cols * size // 4 for name, (rows, cols) in matrices.items()}
    assert plan.spec is not None
    table = plan.spec.vocab * head.hidden * size // 4 if head.own_table else 0
    turns = plan.options.max_context * head.head_dim
    gains = HEAD_FIRST + len(GAINS) * head.hidden
    return found | {"gains": gains, "turns": turns, "ids": head.vocab, "embed": table}


def _number_floats(plan: Plan, passes: Passes, head: DraftHead) -> dict[str, int]:
    hidden, blocks = head.hidden, plan.blocks
    return {
        "states": passes.chunk * len(head.taken) * hidden,
        "state": passes.chunk * hidden,
        "input": passes.chunk * head.input,
        "query": head.q_size,
        "out": head.q_size,
        "sum": hidden,
        "last": hidden,
        "gated": head.ffn,
        "own": blocks * head.input,
        "best": blocks * 2,
        "wanted": WANTED_WORDS,
        "cache": plan.options.max_context * 2 * head.kv_size,
    }


def packed_head(
    plan: Plan, sizes: Mapping[str, int | float], weights: Weights
) -> Iterator[tuple[int, NDArray[np.uint8]]]:
    """(first float, bytes) of each part of the head's weights."""
    assert plan.spec is not None
    head = plan.spec.draft_head
    assert head is not None

    def rows(name: str) -> NDArray[np.float32]:
        return np.asarray(weights[f"draft.{name}"]).astype(np.float32)

    keys, half = head.kv_heads, head.head_dim // 2
    tables = {
        "fc": rows("fc"),
        "qkv": np.concatenate(
            [_pairs(rows("k"), keys, half), rows("v"), _pairs(rows("q"), head.heads, half)]
        ),
        "o": rows("o"),
        "gate_up": np.stack([rows("gate"), rows("up")], 1).reshape(2 * head.ffn, head.hidden),
        "down": rows("down"),
        "lm": np.pad(rows("lm_head"), ((0, head.vocab % 2), (0, 0))),
    }
    if head.own_table:
        tables["embed"] = rows("embed")
    for name, table in tables.items():
        stored = np.ascontiguousarray(table.astype(STORAGE[plan.options.weight_dtype]))
        yield int(sizes[f"draft_{name}"]), stored.reshape(-1).view(np.uint8)
    gains = np.zeros(HEAD_FIRST, np.float32)
    gains[0] = head.norm_eps
    whole = np.concatenate([gains, *(rows(name) for name in GAINS)])
    yield int(sizes["draft_gains"]), whole.view(np.uint8)
    cos, sin = rope_table(plan.spec, plan.options.max_context, head.rope, dim=head.head_dim)
    turns = np.stack([cos, sin], 2).astype(np.float32)
    yield int(sizes["draft_turns"]), turns.reshape(-1).view(np.uint8)
    ids = np.asarray(weights["draft.ids"]).astype(np.int32)
    yield int(sizes["draft_ids"]), ids.view(np.uint8)


def _pairs(rows: NDArray[np.float32], heads: int, half: int) -> NDArray[np.float32]:
    """Elements i and i + half of each head next to each other."""
    split = rows.reshape(heads, 2, half, -1)
    return split.transpose(0, 2, 1, 3).reshape(rows.shape)
