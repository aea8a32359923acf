"""Sets published figures of MI300X next to the twin's, and takes the published engine's techniques
away one by one: `python studies/mi300x-publications/page.py`.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from studies.common.blocks import Stamp, markdown_table, table_of
from studies.common.inputs import files_digest, fits_on_file, numbers_digest
from studies.common.study_page import write_page
from twin.calibrate import store
from twin.calibrate.published import Figure
from twin.calibrate.published_plans import compared, predicted_s
from twin.calibrate.recorded import options_of
from twin.hardware.derive import CYCLES
from twin.hardware.override import numbers
from twin.hardware.types import Node
from twin.models.load import load_model
from twin.sim.batch import planned
from twin.sim.run import Result, simulate
from twin.study.hardware import Setting, node_on_file, with_settings
from twin.study.interval import Draws, settings
from twin.study.outcome import Bars, Series
from twin.workers import each

HERE = Path(__file__).resolve().parent
RUNS = store.runs_folder("mi300x")
INPUTS, HELD_OUT = (RUNS / f"2026-11-23T145500-published{end}" for end in ("-inputs", ""))
MODEL, NODE = "laneformer-2b", "8xmi300x"
NODES = (NODE, "1xmi300x", "1xmi355x")
CHOSEN: dict[str, Any] = {"weight_dtype": "fp16"}  # as published
US = 1e6
DRAWS, LEVELS = Draws(12, 1), (0.1, 0.9)
ENGINE = "laneformer-2b-delay-2"  # the published engine's figure
# what the technique is, options on top of those before, weights ahead of their stage
RUNGS: tuple[tuple[str, dict[str, Any], bool], ...] = (
    ("a launch for each operation", {"execution": "stream", "placement": "flat", "delay": 0}, True),
    ("one graph of kernels", {"execution": "graph"}, True),
    ("resident, one counter a barrier", {"execution": "resident", "handoff": "grid"}, False),
    ("data is the flag", {"handoff": "sentinel"}, False),
    ("weights and blocks by die", {"placement": "die-aware"}, False),
    # from here on as our kernel on several GPUs: it knows no page's stack
    ("weights ahead across stages", {"placement": "flat"}, True),
    ("exchange 2 layers late", {"delay": 2}, True),
)
FREE = "x1000"  # of a rate
HOPS: tuple[Setting, ...] = (
    ("handoff.hop_s", 0.0),
    ("handoff.cross_die_s", 0.0),
    ("handoff.poll_s", 0.0),
    ("handoff.loaded_hop_s", 0.0),
)
COSTS: tuple[tuple[str, tuple[Setting, ...]], ...] = (
    ("hand-offs: hops, crossings, polls", HOPS),
    (
        "a stage's start and end in a block",
        (("kernel.stage_s", 0.0), ("kernel.tile_s", 0.0), ("kernel.leave_s", 0.0)),
    ),
    (
        "vectors gathered and normed by every block",
        (
            ("kernel.vector_s", 0.0),
            ("kernel.gather_bytes_per_s", FREE),
            ("kernel.crowd_s", 0.0),
            ("kernel.element_s", 0.0),
            ("llc.latency_s", 0.0),
            ("slices.bytes_per_s", FREE),
        ),
    ),
    (
        "rows: waits, products, sums",
        (
            ("kernel.fp16_bytes_per_s", FREE),
            ("kernel.row_s", 0.0),
            ("kernel.slice_s", 0.0),
            ("kernel.reduction_s", 0.0),
        ),
    ),
    (
        "attention, and links to other GPUs",
        (
            ("kernel.item_s", 0.0),
            ("kernel.heads_s", 0.0),
            ("kernel.round_s", 0.0),
            ("kernel.unit_s", 0.0),
            ("kernel.kv_bytes_per_s", FREE),
            ("link.hop_s", 0.0),
            ("link.loaded_hop_s", 0.0),
            ("link.bytes_per_s", FREE),
        ),
    ),
)


@dataclass(frozen=True, slots=True)
class Rung:
    name: str
    result: Result


def stamp() -> Stamp:
    inputs = files_digest([INPUTS / "meta.yaml", HELD_OUT / "meta.yaml"])
    return Stamp(fits_on_file(*NODES), numbers_digest(NODES, inputs))


def main() -> None:
    record = store.read_run(HELD_OUT)
    found = compared(record, lambda said: None)
    published = next(one for one in found if one.name == ENGINE)
    climbed = list(rungs())
    bodies = {
        "figures": figures_table(compared(store.read_run(INPUTS), lambda said: None), found),
        "waterfall": waterfall_table(climbed, published),
        "lost": lost_table(climbed[-1].result),
        "clock": clock_table(),
    }
    write_page(HERE, stamp(), bodies, chart(climbed, published))
    print(summary(found))


def summary(found: list[Figure]) -> str:
    inside = sum(one.inside for one in found)
    worst = max(found, key=lambda one: abs(one.error))
    middle = statistics.median(abs(one.error) for one in found)
    return (
        f"{len(found)} held-out figures: {inside} inside what was published; median error "
        f"{middle:.1%}, worst {worst.error:+.1%} ({worst.name})"
    )


def drawn(figure: Figure) -> tuple[float, float]:
    """p10 and p90 in the figure's unit, over draws of all hardware numbers."""
    node = node_on_file(figure.node)
    found = [
        figure.in_unit(predicted_s(figure, with_settings(node, changes)))
        for changes in settings(node, DRAWS)
    ]
    low, high = np.quantile(found, LEVELS)
    return float(low), float(high)


def figures_table(inputs: list[Figure], found: list[Figure]) -> str:
    ends = dict(zip((one.name for one in found), each(drawn, found), strict=True))
    columns = {
        "figure": "{r.name}",
        "role": lambda one: "held out" if one.name in ends else "input",
        "published by": "{r.publication}",
        "published": lambda one: one.shown(),
        "the twin": "{r.predicted:,.4g}",
        "p10-p90": lambda one: " to ".join(f"{end:,.4g}" for end in ends.get(one.name, ())),
        "error": lambda one: "inside" if one.inside else f"{one.error:+.1%}",
    }
    held = sum(
        ends[one.name][0] <= max(one.values) and min(one.values) <= ends[one.name][1]
        for one in found
    )
    table = table_of([*inputs, *found], columns, texts=3)
    return f"{table}\n\n{summary(found)}; p10-p90 holds {held} of {len(found)}."


# ---- from launches to the published engine -------------------------------------------------------


def rungs() -> Iterator[Rung]:
    chosen = dict(CHOSEN)
    for name, options, ahead in RUNGS:
        chosen |= options
        node = node_on_file(NODE)
        yield Rung(name, run(node if ahead else on_demand(node), chosen))


def run(node: Node, chosen: dict[str, Any]) -> Result:
    return simulate(planned(load_model(MODEL), node, **options_of(chosen)), node)


def on_demand(node: Node) -> Node:
    """Nothing is fetched before its stage has its inputs."""
    block = dataclasses.replace(node.device.block, loading="on-demand")
    return dataclasses.replace(node, device=dataclasses.replace(node.device, block=block))


def waterfall_table(climbed: list[Rung], published: Figure) -> str:
    head = ("engine", "us a step", "tokens/s", "gain", "of the ceiling", "mostly")
    last, step_s = climbed[-1].result, published.middle_s
    rows: list[tuple[object, ...]] = []
    for before, rung in zip([None, *climbed], climbed, strict=False):
        result = rung.result
        cause, seconds = max(result.attribution.items(), key=lambda item: item[1])
        rows.append(
            (
                rung.name,
                f"{result.step_s * US:,.0f}",
                f"{result.tokens_per_s:,.0f}",
                f"{before.result.step_s / result.step_s - 1:+.1%}" if before else "",
                f"{result.stream_fraction:.1%}",
                f"{cause.replace('_', '-')} {seconds / result.step_s:.1%}",
            )
        )
    speeds = f"{step_s * US:,.0f}", f"{1 / step_s:,.0f}", f"{last.step_s / step_s - 1:+.1%}"
    rows.append((f"published, {published.shown()}", *speeds, f"{last.floor_s / step_s:.1%}", ""))
    return markdown_table(head, rows)


def chart(climbed: list[Rung], published: Figure) -> Bars:
    """A step's microseconds by cause, rung after rung; the published engine's whole."""
    causes = [
        cause
        for cause in climbed[0].result.attribution
        if any(rung.result.attribution[cause] for rung in climbed)
    ]
    names = (*(rung.name for rung in climbed), "published engine")
    series = [
        Series(
            cause.replace("_", "-"),
            (*(rung.result.attribution[cause] * US for rung in climbed), None),
        )
        for cause in causes
    ]
    whole = (*(None for _ in climbed), published.middle_s * US)
    return Bars(names, (*series, Series("published", whole)), "microseconds a step", stacked=True)


# ---- what the rest of the bandwidth is lost to ---------------------------------------------------


def lost_table(last: Result) -> str:
    """Each cost taken away alone, then one after the other down to what is left."""
    node, chosen = node_on_file(NODE), dict(CHOSEN)
    rows: list[tuple[object, ...]] = []
    so_far, before_s = node, last.step_s
    for name, gone in COSTS:
        alone = run(with_settings(node, gone), chosen).step_s
        so_far = with_settings(so_far, gone)
        left_s = run(so_far, chosen).step_s
        rows.append(
            (
                name,
                f"{round((before_s - left_s) * US):,}",
                f"{max(0.0, (before_s - left_s) / last.step_s):.1%}",
                f"{1 / alone:,.0f}",
                f"{1 / left_s:,.0f}",
            )
        )
        before_s = left_s
    rest_s = before_s - last.floor_s
    rows += [
        ("what is left above the floor", *_share(rest_s, last), "", ""),
        ("the floor: bytes at the ceiling", *_share(last.floor_s, last), "", ""),
    ]
    head = (
        "taken away",
        "us of the step",
        "share",
        "tokens/s without it alone",
        "tokens/s without it and all above",
    )
    return markdown_table(head, rows)


def _share(seconds: float, last: Result) -> tuple[str, str]:
    return f"{seconds * US:,.0f}", f"{seconds / last.step_s:.1%}"


# ---- the clock under the power cap ---------------------------------------------------------------


def clock_table() -> str:
    """Steps at the peak clock, which the twin takes, and at the clock seen while streaming flat
    out.
    """
    cases: tuple[tuple[str, str, dict[str, Any]], ...] = (
        (MODEL, NODE, CHOSEN),
        ("llama-3.1-8b", "1xmi300x", {"weight_dtype": "fp16"}),
    )
    rows = []
    for model, name, chosen in cases:
        node = node_on_file(name)
        capped = node.device.power.streaming_clock_hz
        assert capped is not None
        cycles = node.device.block.clock_hz.value / capped.value
        plan = planned(load_model(model), node, **options_of(chosen))
        peak = simulate(plan, node)
        slow = simulate(plan, with_settings(node, slower(node, cycles)))
        rows.append(
            (
                f"{model} on {name}",
                f"{peak.stream_fraction:.1%}",
                f"{peak.tokens_per_s:,.0f}",
                f"{slow.tokens_per_s:,.0f}",
                f"{slow.tokens_per_s / peak.tokens_per_s - 1:+.1%}",
            )
        )
    head = ("step", "of the ceiling", "tokens/s at 2.1 GHz", "at 1.25 GHz", "change")
    return markdown_table(head, rows)


def slower(node: Node, cycles: float) -> list[Setting]:
    """What the twin takes to be a number of cycles. Rates of loads and products stay: they were
    measured under load.
    """
    return [
        (path, f"x{cycles}")
        for path, number in numbers(node).items()
        if number.like
        and number.like.rule == CYCLES
        and path.endswith("_s")
        and "per_s" not in path
    ]


if __name__ == "__main__":
    main()
