"""Plans of one model that differ in everything that its numbers must not depend on."""

from __future__ import annotations

from typing import Any

from twin.plan.options import CollectiveKind, Common, Execution, HandOffKind, Sampling


def plans(*, many: int, on_four: int) -> dict[str, dict[str, Any]]:
    """Options by name. `many`: blocks of which some have nothing to do; `on_four`: blocks of each
    of four GPUs.
    """
    return {
        "four GPUs": {"gpus": 4, "blocks": on_four, "handoff": HandOffKind.GRID},
        "splits": {"blocks": 5, "attention_splits": 2},
        "many blocks": {"blocks": many},
        "small tiles": {"blocks": 3, "slot_bytes": 256, "tile_rows": 4},
        "two GPUs": {"gpus": 2, "blocks": 3},
        "replicated": {"gpus": 2, "common": Common.REPLICATED, "sampling": Sampling.FULL},
        "counters": {"handoff": HandOffKind.COUNTER, "sampling": Sampling.FULL},
        "graph": {"execution": Execution.GRAPH},
        "launches": {
            "gpus": 2,
            "execution": Execution.LAUNCHES,
            "collective": CollectiveKind.LIBRARY,
        },
    }
