"""Machines that hold weights on chip, next to a projection's GPUs: a closed form for each, no plan
and no simulation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from twin.errors import TwinError
from twin.machines.cell import Cell, cell
from twin.machines.load import load_machine
from twin.machines.types import Machine
from twin.schedule.options import DEFAULT
from twin.study.grid import Model
from twin.study.outcome import Cell as Entry
from twin.study.outcome import Column, Part, Shown, Table


def part(names: Sequence[str], models: Sequence[Model], options: dict[str, object]) -> Part:
    """A row for each model on each machine that holds it; refusals in a table of their own."""
    context = options.get("context", DEFAULT.context)
    assert isinstance(context, int)
    rows: list[tuple[Entry, ...]] = []
    refused: list[tuple[Entry, ...]] = []
    machines = [load_machine(name) for name in names]
    for model in models:
        for machine in machines:
            try:
                rows += _rows(model.label, machine, cell(machine, model.name, context))
            except TwinError as error:
                refused.append((model.label, machine.title, str(error)))
    head = (
        Column("model", Shown.TEXT),
        Column("machine", Shown.TEXT),
        Column("predicted, tokens/s"),
        Column("slow end"),
        Column("fast end"),
        Column("mostly", Shown.TEXT),
        Column("units"),
        Column("dependent steps"),
        Column("published, tokens/s"),
        Column("as", Shown.CHIP),
        Column("predicted against published", Shown.CHANGE),
    )
    empty = (
        Column("model", Shown.TEXT),
        Column("machine", Shown.TEXT),
        Column("not possible", Shown.TEXT),
    )
    left_out = tuple((machine.title, text) for machine in machines for text in machine.not_modelled)
    tables = [Table("machines", head, tuple(rows))]
    tables += [Table("machines-refused", empty, tuple(refused), terminal=False)] if refused else []
    tables.append(
        Table(
            "machines-left-out",
            (Column("machine", Shown.TEXT), Column("not modelled", Shown.TEXT)),
            left_out,
            terminal=False,
        )
    )
    text = (
        "A closed form with one fitted number for each machine, far coarser than the simulation: "
        "bytes read, dependent steps, units crossed. The ends take all its numbers at their slow "
        "and fast ends. Where a published speed was used to fit, its row has no error."
    )
    return Part("Machines with weights on chip", text, (), tuple(tables), long=True)


def _rows(label: str, machine: Machine, found: Cell) -> Iterator[tuple[Entry, ...]]:
    """The prediction, once for each published speed of that model there, or once."""
    ours: tuple[Entry, ...] = (
        label,
        machine.title,
        found.tokens_per_s,
        found.low_tokens_per_s,
        found.high_tokens_per_s,
        found.binding,
        found.units,
        found.steps,
    )
    for row in found.published:
        error = None if row.use.value == "fit" else found.tokens_per_s / row.tokens_per_s - 1
        yield (*ours, row.tokens_per_s, row.kind.value, error)
    if not found.published:
        yield (*ours, None, None, None)
