"""The structs of the tables that the kernel walks, field by field, and the numbers that stand for
kinds in them.

All fields take 4 bytes, so that a table can be compiled in (`header`) or passed at run time
(`tables.image`): the same structs either way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from twin.plan.catalogue import StageKind
from twin.plan.types import Parts

Table = list[tuple[int | float, ...]]
# table -> (struct, fields); a field is an int unless in FLOATS
FIELDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "stages": (
        "Stage",
        (
            "kind",
            "layer",
            "first_read",
            "reads",
            "first_reset",
            "resets",
            "publishes",
            "rows",
            "cols",
            "unit",
            "tile_rows",
            "tile_cols",
            "tile_inverse",
            "batch",
            "owned",
            "items",
            "window",
            "kv",
            "norm",
            "bias",
            "q_norm",
            "k_norm",
            "pushes",
            "next",
        ),
    ),
    "reads": (
        "Read",
        ("value", "parts", "pass_parts", "spans", "previous_step", "residual", "scale"),
    ),
    "resets": ("Reset", ("value", "previous_step")),
    "values": (
        "Value",
        (
            "offset",
            "part_stride",
            "parts",
            "elements",
            "pushed",
            "owned",
            "counter",
            "arrivals",
            "arrivals_per_step",
            "prompt",
        ),
    ),
    "owned": ("Span", ("lo", "hi")),
    "rows": ("SpanRow", ("first", "count")),
    "spans": ("Span", ("lo", "hi")),
    "streams": ("StreamStart", ("page",)),
    "starts": ("StageStart", ("units",)),
}
# of a stage: vectors; where its caches begin, positions of an entry, windows that it mixes, entries
# of an item
COMPRESSED_VECTORS = ("mix_base", "mix_scale", "compress_bias", "compress_norm", "chosen")
COMPRESSED_NUMBERS = ("cached", "ratio", "overlap", "page")
COMPRESSED = (*COMPRESSED_VECTORS, *COMPRESSED_NUMBERS)
# where the model norms what modules add; where layers are rotated differently; where heads have
# sinks; where some layers have recurrent states; where the choice of experts has biases; where a
# layer ends with a factor of the residual; where heads have two shapes; where caches have scales;
# where experts stand next to a dense MLP; where blocks multiply routers with rows of their own;
# where attention is of compressed entries, behind hyper-connections
STAGE_EXTRAS = (
    *("post_norm", "rope", "sinks", "taps", "decays", "gated_norm", "choice_bias"),
    *("layer_scalar", "heads", "cache_scales"),
    *("expert_scales", "shared_post_norm", "experts_post_norm"),
    *("own_norm", "columns"),
    *COMPRESSED,
)
# of a plan with coded weights: twin/kernel/packing.py
CODED_FIELDS = ("code", "row_bytes", "last_bytes", "row_scales", "last_scales")
# of a stage's fields
SHAPE = ("rows", "cols", "unit", "tile_rows", "tile_cols", "tile_inverse", "batch")
FLOATS = {"scale", "norm_eps"}
NUMBERS = {kind: at for at, kind in enumerate(StageKind)}
PARTS = {parts: at for at, parts in enumerate(Parts)}


def record(table: str, **named: int | float) -> tuple[Any, ...]:
    return in_order(FIELDS[table][1], named)


def in_order(fields: Sequence[str], named: Mapping[str, int | float]) -> tuple[Any, ...]:
    """A record in the order of its struct. Raises KeyError unless it names every field, and no
    other.
    """
    if unknown := named.keys() - set(fields):
        raise KeyError(f"no such fields: {', '.join(sorted(unknown))}")
    return tuple(named[field] for field in fields)
