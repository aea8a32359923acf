"""What goes on a page: sections made from results."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from twin.cost.causes import CAUSES
from twin.hardware.number import Kind
from twin.hardware.override import numbers
from twin.hardware.types import Node
from twin.plan.types import Plan
from twin.report import figures
from twin.report.html import Chip, Page, Section, folded, html_table, words_section
from twin.report.sources import HEAD, Sources, number_rows
from twin.report.step import by_kind, ordered_causes, slowest_stages, spoken
from twin.report.tables import count, percent
from twin.sim.run import Result
from twin.sim.trace import CRITICAL
from twin.units import format_quantity

if TYPE_CHECKING:  # pages of one simulation need neither
    from twin.calibrate.experiment import Experiment
    from twin.calibrate.validate import Validation
    from twin.study.compared import Comparison
    from twin.study.sensitivity import Effect

US = 1e6  # microseconds per second
SLOWEST = 12
STRONGEST = 20


def simulation_page(
    plan: Plan,
    node: Node,
    result: Result,
    *extra: Section,
    what_if: str = "",
    cards: Sequence[tuple[str, str]] = (),
    others: Comparison | None = None,
) -> Page:
    """One simulated step; `extra` sections stand before the numbers and conditions, or first where
    the page is about a change.

    `what_if`: the changes that were made, where the page is about them; `cards` then say first what
    they did. `others`: our interval and the other engines, for the card of the speed.
    """
    name = f"{plan.spec.name if plan.spec else plan.name} on {node.gpus} x {node.device.title}"
    step = (*timeline(plan, result), attribution(result), slowest(result))
    stated = (*extra, *step) if what_if else (*step, *extra)
    return Page(
        title=f"What if {what_if}? {name}" if what_if else name,
        subtitle="Predicted by MonoTwin's discrete-event twin. Nothing on this page was measured "
        "on that node unless it says so.",
        cards=(*cards, *headline(result, others)),
        sections=(*stated, rests_on(node, result), conditions(plan, node), words_section()),
    )


def headline(result: Result, others: Comparison | None = None) -> tuple[tuple[str, str], ...]:
    lines = ["tokens/s, predicted", *(engine_lines(others) if others else ())]
    return (
        (count(result.tokens_per_s), "\n".join(lines)),
        (format_quantity(result.step_s, "s"), "a token"),
        (count(1 / result.floor_s), "tokens/s at the floor: all bytes at the ceiling"),
        (percent(result.stream_fraction), "stream fraction: floor / predicted time"),
        (percent(result.mbu), "MBU: the same against the datasheet"),
    )


def engine_lines(found: Comparison) -> Iterator[str]:
    """Our interval, then a line for each other engine."""
    ours, *others = found.rows
    if ours.low is None or ours.high is None:
        yield "no interval: no held-out runs"
    else:
        yield f"interval {count(ours.low)} .. {count(ours.high)}"
    for row in others:
        span = (
            ""
            if row.low is None or row.high is None
            else f" ({count(row.low)} .. {count(row.high)})"
        )
        yield f"{row.engine}: {count(row.tokens_per_s)}{span}"


def timeline(plan: Plan, result: Result) -> Iterator[Section]:
    """The critical path of the whole step, and a few blocks over its middle layer. Needs a traced
    result.
    """
    if result.trace is None:
        return
    path, blocks = _spans(result)
    layer = max((s.layer for s in plan.stages), default=0) // 2
    inside = [span for span in path if span.label.endswith(f"[{layer}]")]
    shown = [figures.timeline(path)]
    if inside:
        low, high = inside[0].start_us, inside[-1].end_us
        shown.append(figures.timeline(list(_clipped([*inside, *blocks], low, high))))
    yield Section(
        "Timeline of one step",
        "Above: the chain of work and waits that decides the step's time, over the whole step. "
        f"Below: the same and some blocks of the first GPU, over layer {layer} alone. With a "
        "mouse, drag to zoom and double-click to return.",
        tuple(shown),
    )


def attribution(result: Result) -> Section:
    """Where the critical path's time goes, by kind of stage."""
    kinds = by_kind(result)
    rows = [
        (spoken(cause), f"{seconds * US:.1f}", percent(seconds / result.step_s))
        for cause, seconds in ordered_causes(result)
    ]
    return Section(
        "Where the time goes",
        "Each microsecond of the step on the critical path has one cause: bytes that had not "
        "arrived, a hand-off or another GPU that was waited for, arithmetic, a launch.",
        (figures.figure(figures.causes_chart(kinds)),),
        html_table(("cause", "us a step", "share"), rows),
    )


def slowest(result: Result) -> Section:
    stages = slowest_stages(result, SLOWEST)
    rows = [
        (
            s.name,
            f"{s.seconds * US:.2f}",
            percent(s.seconds / result.step_s),
            spoken(s.dominant),
        )
        for s in stages
    ]
    return Section("Slowest stages", "", (), html_table(("stage", "us", "share", "mostly"), rows))


def engines(
    results: Mapping[str, Result], title: str = "Four ways to run the same step"
) -> Section:
    """Launch by launch, as a graph, resident with barriers, resident with data as its own flag."""
    parts = {
        name: {cause: seconds * US for cause, seconds in r.attribution.items()}
        for name, r in results.items()
    }
    rows = [
        (
            name,
            count(r.tokens_per_s),
            f"{r.step_s * US:.1f}",
            percent(r.stream_fraction),
            spoken(ordered_causes(r)[0][0]),
        )
        for name, r in results.items()
    ]
    head = ("engine", "tokens/s, predicted", "us a step", "stream fraction", "mostly")
    return Section(
        title, "", (figures.figure(figures.causes_chart(parts)),), html_table(head, rows)
    )


def validation(result: Validation) -> Section:
    """Predicted against measured, run by run."""
    runs = result.runs
    predicted, measured = (
        [r.predicted_tokens_per_s for r in runs],
        [r.measured_tokens_per_s for r in runs],
    )
    figure = figures.comparison([r.name for r in runs], predicted, measured)
    rows = [
        (r.name, count(guess), count(truth), error_of(result, r), percent(r.spread))
        for r, guess, truth in zip(runs, predicted, measured, strict=True)
    ]
    errors = (
        f"Busy: {result.busy}, so no error is stated."
        if result.busy
        else f"Median error {percent(result.median)}, worst {percent(abs(result.worst))}."
    )
    text = f"Engine runs that no number was fitted to. {errors} The band is +-15%."
    table = html_table(
        ("run", "predicted tokens/s", "measured tokens/s", "error", "spread of repeats"), rows
    )
    return Section("Prediction against measurement", text, (figure,), table)


def error_of(result: Validation, run: Experiment) -> str:
    """A run's error as it is shown."""
    return "busy" if result.busy else percent(run.error, signed=True)


def validation_page(result: Validation, conditions: Mapping[str, object]) -> Page:
    """`conditions`: of the computer at the runs, as they were recorded."""
    cards = (
        (percent(result.median), "median error"),
        (percent(abs(result.worst)), "worst error"),
        (str(len(result.runs)), "held-out runs"),
    )
    return Page(
        f"Predicted and measured on {result.node}",
        f"Fit of run {result.fit}.",
        cards,
        (validation(result), _measured_under(conditions)),
    )


def _measured_under(conditions: Mapping[str, object]) -> Section:
    """What was recorded about the computer; lists and mappings stay in the record."""
    stated = {
        name: value for name, value in conditions.items() if isinstance(value, str | int | float)
    }
    rows = [
        (name.replace("_", " "), f"{value:.4g}" if isinstance(value, float) else value)
        for name, value in stated.items()
    ]
    return Section(
        "Measured under",
        "As recorded with the runs.",
        (),
        html_table(("what", "value"), rows, text_columns=2),
    )


def sensitivity(effects: Sequence[Effect], step: float) -> Section:
    """What each number alone does to the speed."""
    from twin.study.sensitivity import effects_chart  # as above

    strong = [e for e in effects if e.tokens_per_s is not None and abs(e.effect) >= 5e-5][
        :STRONGEST
    ]
    figure = figures.figure(effects_chart(strong, step))
    rest = len(effects) - len(strong)
    text = (
        f"Each hardware number and engine option raised by {100 * step:.0f}%, one at a time; "
        f"{rest} others change it less, or not at all."
    )
    return Section("Sensitivity", text, (figure,))


def rests_on(node: Node, result: Result) -> Section:
    """The numbers behind the prediction: assumed ones first."""
    order = [
        Kind.ASSUMED,
        Kind.UNBOUND,
        Kind.VENDOR,
        Kind.THIRD_PARTY,
        Kind.FITTED,
        Kind.MEASURED,
        Kind.DATASHEET,
    ]
    listed = sorted(
        numbers(node).items(),
        key=lambda item: (item[0] not in result.assumed, order.index(item[1].kind)),
    )
    used = {
        path: number
        for path, number in listed
        # the others this plan does not touch
        if number.kind not in (Kind.ASSUMED, Kind.UNBOUND) or path in result.assumed
    }
    sources = Sources()
    rows = [
        (name, value, span, Chip(kind), mark)
        for name, value, span, kind, mark in number_rows(used, sources)
    ]
    text = (
        f"{len(result.assumed)} of these numbers are assumed or unbound: no measurement gives "
        "them, and the prediction is no better than they are."
    )
    body = html_table(HEAD, rows, text_columns=5)
    body += html_table(("", "source"), sources.listed(), text_columns=2)
    title = f"{len(rows)} numbers with kind, range and source"
    return Section("What the numbers rest on", text, (), folded(title, body), long=True)


def conditions(plan: Plan, node: Node) -> Section:
    options = plan.options
    rows = [
        ("node", node.name),
        ("ranks", plan.ranks),
        ("stages", len(plan.stages)),
        ("launches a step", plan.launches()),
    ]
    for field in fields(options):
        value = getattr(options, field.name)
        rows.append((field.name.replace("_", " "), getattr(value, "value", value)))
    table = html_table(("what", "value"), rows, text_columns=2)
    return Section("Conditions", "", (), folded("the plan and the engine options", table))


def _spans(result: Result) -> tuple[list[figures.Span], list[figures.Span]]:
    """The last step of a trace as (critical path, blocks of the first GPU), in microseconds since
    that step began.
    """
    assert result.trace is not None
    begin_ps = result.step_ends_ps[-2] if len(result.step_ends_ps) > 1 else 0
    begin = begin_ps / US
    names: dict[object, str] = {}
    stage: dict[object, str] = {}
    path: list[figures.Span] = []
    blocks: list[figures.Span] = []
    events: Sequence[dict[str, Any]] = result.trace.events
    for event in events:
        tid = event.get("tid")
        if event["ph"] == "M" and event["name"] == "thread_name" and event["pid"] == 0:
            names[tid] = str(event["args"]["name"])
        # a stage and its parts end at the same picosecond
        if event["ph"] != "X" or round((event["ts"] + event["dur"]) * US) <= begin_ps:
            continue
        start, end = event["ts"] - begin, event["ts"] + event["dur"] - begin
        if event["pid"] == CRITICAL:
            path.append(
                figures.Span("critical path", start, end, str(event["cat"]), str(event["name"]))
            )
        elif event["pid"] == 0 and event["cat"] == "stage":
            stage[tid] = str(event["name"])
        elif event["pid"] == 0 and event["cat"] in CAUSES:
            blocks.append(
                figures.Span(
                    names[tid].removesuffix(".consumer"), start, end, str(event["cat"]), stage[tid]
                )
            )
    return path, blocks


def _clipped(spans: Sequence[figures.Span], low: float, high: float) -> Iterator[figures.Span]:
    for span in spans:
        start, end = max(span.start_us, low), min(span.end_us, high)
        if start < end:
            yield figures.Span(span.row, start, end, span.cause, span.label)
