"""Studies of kind graph-engines: what vLLM, SGLang and TensorRT-LLM reach, next to what was
published about them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from twin.batching.costs import Load
from twin.batching.step import EAGER, GRAPH, IDEAL, Step, predict
from twin.batching.tables import load_tables, stack_names
from twin.errors import HardwareError
from twin.hardware.load import load_node
from twin.models.load import load_model
from twin.reading import SOME, FieldError, Reader, one_of
from twin.study.fields import Count, Head, ModelName, NodeName, check_context
from twin.study.outcome import Bars, Cell, Column, Lines, Outcome, Part, Series, Shown, Table
from twin.study.point import Point
from twin.study.runner import Runner
from twin.text import shown
from twin.units import format_quantity

from .records import OTHER, Record, errors_of, held_by_others, read_records, spread_of

KINDS = {  # what a kernel does, as people read it
    "product": "matrix products",
    "experts": "routed experts",
    "attention": "attention kernels",
    "row": "norms, rotations, activations",
    "allreduce": "all-reduces",
}
US = 1e6


@dataclass(frozen=True, slots=True)
class Place:
    """A model on a node, with one sequence."""

    model: str
    node: str

    def __str__(self) -> str:
        return f"{self.model} {self.node}"


@dataclass(frozen=True, slots=True)
class GraphEngines:
    places: tuple[Place, ...]
    stacks: tuple[str, ...]
    context: int
    # tabulated from the same kernels: these check what is launched, not what kernels take
    composed: tuple[Record, ...]
    servers: tuple[Record, ...]  # measured end to end: nothing of them is an input
    elsewhere: tuple[Record, ...]  # other engines and devices
    resident: tuple[Place, ...]  # also simulated as one resident kernel

    def run(self, runner: Runner) -> Outcome:
        steps = {
            (place, stack): self._step(place, stack)
            for place in self.places
            for stack in (*self.stacks, IDEAL)
        }
        rows = runner.rows(
            [Point(p.model, p.node, (("context", self.context),)) for p in self.resident],
            "resident kernels",
        )
        ours = {
            place: None if row.problem else row.tokens_per_s
            for place, row in zip(self.resident, rows, strict=True)
        }
        problems = [
            f"{place}, resident: {row.problem}"
            for place, row in zip(self.resident, rows, strict=True)
            if row.problem
        ]
        held_out = errors_of(list(self.servers))
        composed = errors_of(list(self.composed))
        headline = []
        if held_out:
            headline += [
                (
                    f"{100 * held_out.median_size:.1f}%",
                    "median error of the step against servers measured end to end",
                )
            ]
            headline += [
                (
                    f"{100 * held_out.worst:+.1f}%",
                    f"worst of these {held_out.count} errors (above 0: predicted too slow)",
                )
            ]
        if (held := held_by_others(list(self.servers))) is not None:
            said = "of the servers inside p10 to p90 of other models, engines and devices"
            headline.append((f"{held:.0%}", said))
        if composed:
            headline.append(
                (
                    f"{100 * composed.median:+.1f}%",
                    f"median against {composed.count} figures that a tool adds up from the same "
                    "kernels",
                )
            )
        parts = (
            self._one_sequence(steps, ours),
            self._where(steps),
            *self._held_out(),
            *self._elsewhere(),
        )
        return Outcome(tuple(parts), tuple(headline), (*self._notes(), *problems))

    def _step(self, place: Place, stack: str) -> Step | None:
        try:
            return predict(
                load_model(place.model), load_node(place.node), stack, Load(context=self.context)
            )
        except HardwareError:
            return None

    def _tabulated(self, place: Place, stack: str) -> Record | None:
        name = load_node(place.node).name
        return next(
            (
                r
                for r in self.composed
                if (r.model, r.on.name, r.stack) == (place.model, name, stack)
            ),
            None,
        )

    def _one_sequence(
        self, steps: dict[tuple[Place, str], Step | None], ours: dict[Place, float | None]
    ) -> Part:
        columns = (
            Column("model", Shown.TEXT),
            Column("node", Shown.TEXT),
            Column("engine", Shown.TEXT),
            Column("kernels a step"),
            Column("tokens/s"),
            Column("p10"),
            Column("p90"),
            Column("launched one by one"),
            Column("tabulated"),
            Column("error of time", Shown.CHANGE),
            Column("kernels without loss"),
            Column("resident kernel"),
        )
        rows: list[tuple[Cell, ...]] = []
        spread = spread_of(list(self.servers))
        for place in self.places:
            ideal = steps[place, IDEAL]
            for stack in self.stacks:
                step, known = steps[place, stack], self._tabulated(place, stack)
                error = step.graph_s / known.seconds - 1 if step and known else None
                predicted = (
                    len(step.kernels) if step else None,
                    _rate(step),
                    *_ends(step, spread),
                    _rate(step, EAGER),
                )
                rows.append(
                    (
                        place.model,
                        place.node,
                        stack,
                        *predicted,
                        1 / known.seconds if known else None,
                        error,
                        _rate(ideal),
                        ours.get(place),
                    )
                )
        names = tuple(map(str, self.places))
        series = []
        for stack in self.stacks:
            low, high = zip(
                *(_ends(steps[place, stack], spread) for place in self.places), strict=True
            )
            rates = tuple(_rate(steps[place, stack]) for place in self.places)
            series.append(Series(stack, rates, *((low, high) if spread else ())))
        series.append(
            Series(
                "kernels without loss", tuple(_rate(steps[place, IDEAL]) for place in self.places)
            )
        )
        if ours:
            series.append(
                Series("resident kernel", tuple(ours.get(place) for place in self.places))
            )
        for stack in self.stacks:
            listed = [self._tabulated(place, stack) for place in self.places]
            series.append(
                Series(
                    f"{stack}, tabulated",
                    tuple(1 / r.seconds if r else None for r in listed),
                    marks=True,
                )
            )
        return Part(
            f"One sequence, {self.context} cached positions",
            "Tokens per second of CUDA-graph engines, from their own measured kernels. Tabulated: "
            "what NVIDIA's AIConfigurator adds up from the same kernel measurements, so the error "
            "shows what is launched and counted, not how good the kernel times are. Without loss: "
            "kernels that read memory at its ceiling between the borders of a graph. Resident: "
            "our monokernel, simulated. p10 to p90: as if the prediction were as wrong here as "
            "for the servers below.",
            (Bars(names, tuple(series), "tokens/s"),),
            (Table("one-sequence", columns, tuple(rows)),),
        )

    def _where(self, steps: dict[tuple[Place, str], Step | None]) -> Part:
        shown = [
            (f"{place} {stack}", step)
            for (place, stack), step in steps.items()
            if step and stack in (self.stacks[0], IDEAL)
        ]
        times = [
            {KINDS[kind]: seconds * US for kind, seconds in step.by_kind().items()}
            for _, step in shown
        ]
        series = tuple(
            Series(kind, tuple(t.get(kind, 0.0) for t in times)) for kind in KINDS.values()
        )
        columns = (
            Column("case", Shown.TEXT),
            *(Column(f"{kind}, us") for kind in KINDS.values()),
            Column("us a step"),
        )
        rows = tuple(
            (name, *(t.get(kind, 0.0) for kind in KINDS.values()), sum(t.values()))
            for (name, _), t in zip(shown, times, strict=True)
        )
        return Part(
            "Where a step's time goes",
            "More GPUs shorten the products until a kernel is mostly its border and its ramp; all "
            "other kernels stay as long as they were.",
            (Bars(tuple(name for name, _ in shown), series, "microseconds a step", stacked=True),),
            (Table("where", columns, rows, terminal=False),),
        )

    def _held_out(self) -> Iterator[Part]:
        known = [record for record in self.servers if record.predicted]
        if not known:
            return
        groups: dict[tuple[str, str, str], list[Record]] = {}
        for record in known:
            groups.setdefault(record.group, []).append(record)
        columns = (
            Column("model", Shown.TEXT),
            Column("engine", Shown.TEXT),
            Column("device", Shown.TEXT),
            Column("servers"),
            Column("median error", Shown.CHANGE),
            Column("median size", Shown.PERCENT),
            Column("worst", Shown.CHANGE),
        )
        rows = [
            (*name, errors.count, errors.median, errors.median_size, errors.worst)
            for name, group in sorted(groups.items())
            if (errors := errors_of(group))
        ]
        ordered = sorted(known, key=lambda record: record.seconds)
        times = tuple(record.seconds * 1e3 for record in ordered)
        predicted = tuple(
            record.predicted.served_s * 1e3 if record.predicted else None for record in ordered
        )
        chart = Lines(
            times,
            (Series("equal", times), Series("predicted", predicted, marks=True)),
            "measured ms a step",
            "predicted ms a step",
            log_x=True,
            log_y=True,
        )
        yield Part(
            "Held out: servers measured end to end",
            "Time per output token of whole servers with a constant number of requests, bundled "
            "with AIConfigurator. Nothing of them is an input. Other users' prompts are in the "
            "prediction: each answer is followed by the next prompt, which the others wait for. "
            "Measured times hold what we leave out: the host between steps, and what of prompts "
            "and steps runs together.",
            (chart,),
            (Table("held-out", columns, tuple(rows)), _listed("held-out-servers", ordered)),
            long=True,
        )

    def _elsewhere(self) -> Iterator[Part]:
        if not self.elsewhere:
            return
        yield Part(
            "Measured elsewhere, one sequence",
            "Other engines and devices. Where no kernels were tabulated, only kernels without "
            "loss can be compared: they must be faster.",
            tables=(_listed("elsewhere", list(self.elsewhere), terminal=True),),
        )

    def _notes(self) -> Iterator[str]:
        for stack in self.stacks:
            rope = load_tables("h200-sxm", stack).stack.rope_kernels
            yield (
                f"{stack}: kernels between QKV and attention: {rope.value:.0f} ({rope.kind.value}: "
                f"{rope.source})."
            )
        yield (
            "Kernel times: NVIDIA AIConfigurator 0.12.0 (vendor); quantisation kernels stand for "
            "norms, rotations and activations."
        )
        yield (
            "Not modelled: the host between steps, prompts and steps that run together, fused "
            "all-reduce and norm, programmatic launches."
        )
        missing = sorted(
            {
                f"{r.model} {r.node} {r.stack}"
                for r in (*self.servers, *self.elsewhere)
                if r.predicted is None and r.stack != OTHER
            }
        )
        if missing:
            yield f"Not predicted, because kernels were not measured: {', '.join(missing)}."


@dataclass(frozen=True, kw_only=True)
class File(Head):
    """A study file of this kind: models, nodes, stacks and the files of published times."""

    stacks: Annotated[tuple[Annotated[str, one_of(stack_names)], ...], SOME]
    models: Annotated[tuple[ModelName, ...], SOME]
    nodes: Annotated[tuple[NodeName, ...], SOME]
    context: Count
    resident: tuple[str, ...] = ()
    composed: tuple[str, ...] = ()
    servers: tuple[str, ...] = ()
    elsewhere: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for model in self.resident:
            if model not in self.models:
                raise FieldError(
                    "resident", f"{shown(model)} is not among the models; add it or leave it out"
                )

    def asks(self, reader: Reader, folder: Path) -> GraphEngines:
        for model in self.models:
            with reader.at("context"):
                check_context(model, self.context)
        places = tuple(
            Place(model, node)
            for model in self.models
            for node in self.nodes
            if _fits(model, node, self.context)
        )
        if not places:
            raise FieldError("nodes", "no model fits any of them; add larger nodes")

        def records(key: str) -> tuple[Record, ...]:
            files = [folder / name for name in getattr(self, key)]
            with reader.at(key):
                return tuple(record for file in files for record in read_records(file))
            return ()

        simulated = tuple(place for place in places if place.model in self.resident)
        return GraphEngines(
            places,
            self.stacks,
            self.context,
            records("composed"),
            records("servers"),
            records("elsewhere"),
            simulated,
        )


def _fits(model: str, node: str, context: int) -> bool:
    """A node without the memory is left out."""
    try:
        predict(load_model(model), load_node(node), IDEAL, Load(context=context))
    except HardwareError:
        return False
    return True


def _rate(step: Step | None, execution: str = GRAPH) -> float | None:
    return step.tokens_per_s(execution) if step else None


def _ends(
    step: Step | None, spread: tuple[float, float] | None
) -> tuple[float | None, float | None]:
    """The speed if the prediction is as wrong as those of the held-out servers."""
    if step is None or spread is None:
        return None, None
    return step.tokens_per_s() * spread[0], step.tokens_per_s() * spread[1]


def _listed(name: str, records: list[Record], *, terminal: bool = False) -> Table:
    columns = (
        Column("model", Shown.TEXT),
        Column("node", Shown.TEXT),
        Column("engine", Shown.TEXT),
        Column("sequences"),
        Column("context"),
        Column("published ms", Shown.TEXT),
        Column("predicted ms", Shown.TEXT),
        Column("error of time", Shown.CHANGE),
        Column("without loss", Shown.TEXT),
        Column("source", Shown.TEXT),
    )
    rows = tuple(
        (
            r.model,
            r.node,
            r.stack,
            r.load.sequences,
            r.load.context,
            format_quantity(r.seconds, "s"),
            format_quantity(r.predicted.served_s, "s") if r.predicted else None,
            r.error,
            format_quantity(r.ideal.graph_s, "s") if r.ideal else None,
            r.source,
        )
        for r in records
    )
    return Table(name, columns, rows, terminal=terminal)
