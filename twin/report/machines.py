"""A machine for people and for other programs: its numbers, its speeds next to the published ones,
what is left out.
"""

from __future__ import annotations

from typing import Any

from twin.errors import HardwareError
from twin.hardware.override import interval
from twin.machines.cell import Cell, cell, error
from twin.machines.types import Machine
from twin.models.load import load_model, model_names
from twin.report.sources import HEAD, Sources, number_rows, with_sources
from twin.report.tables import hanging, table

CONTEXT = 1024  # positions of the speeds shown


def described(machine: Machine) -> dict[str, Any]:
    """Everything as plain values."""
    numbers = {}
    for name, number in machine.numbers().items():
        low, high = interval(number)
        numbers[name] = {
            "value": number.value,
            "low": low,
            "high": high,
            "kind": number.kind.value,
            "source": number.source,
        }
    published = [
        {
            "model": row.model,
            "context": row.context,
            "tokens_per_s": row.tokens_per_s,
            "error": error(machine, row),
            "use": row.use.value,
            "kind": row.kind.value,
            "source": row.source,
            "conditions": row.conditions,
        }
        for row in machine.published
    ]
    cells = [
        {
            "model": c.model,
            "tokens_per_s": c.tokens_per_s,
            "low": c.low_tokens_per_s,
            "high": c.high_tokens_per_s,
            "units": c.units,
            "steps": c.steps,
            "binding": c.binding,
        }
        for c in cells_of(machine)
    ]
    return {
        "name": machine.name,
        "title": machine.title,
        "numbers": numbers,
        "published": published,
        "context": CONTEXT,
        "models": cells,
        "not_modelled": list(machine.not_modelled),
    }


def shown(machine: Machine, width: int) -> str:
    """The same as text for a terminal of `width` columns."""
    sources = Sources()
    parts = [
        machine.title,
        table(HEAD, number_rows(machine.numbers(), sources), text_columns=5),
    ]
    if machine.published:
        parts.append(_published(machine, sources))
    parts += [
        f"one request, {CONTEXT:,} cached positions\n\n{_cells(machine)}",
        "not modelled:\n" + "\n".join(hanging("- ", t, width) for t in machine.not_modelled),
    ]
    return with_sources("\n\n".join(parts), sources, width)


def cells_of(machine: Machine) -> list[Cell]:
    """The models on file that the machine can hold."""
    found = []
    for name in model_names():
        try:
            found.append(cell(machine, load_model(name), CONTEXT))
        except HardwareError:
            continue
    return found


def _published(machine: Machine, sources: Sources) -> str:
    rows = [
        (
            row.model,
            f"{row.tokens_per_s:,.0f}",
            f"{row.tokens_per_s * (1 + error(machine, row)):,.0f}",
            f"{error(machine, row):+.0%}",
            row.use.value,
            row.kind.value,
            sources.cite(f"{row.source}; {row.conditions}" if row.conditions else row.source),
        )
        for row in machine.published
    ]
    return table(
        ("model", "published tok/s", "predicted", "error", "use", "kind", "source"),
        rows,
        text_columns=(0, 4, 5, 6),
    )


def _cells(machine: Machine) -> str:
    rows = [
        (
            c.model,
            f"{c.tokens_per_s:,.0f}",
            f"{c.low_tokens_per_s:,.0f} .. {c.high_tokens_per_s:,.0f}",
            c.units,
            c.steps,
            c.binding,
        )
        for c in cells_of(machine)
    ]
    return table(
        ("model", "tokens/s", "range", f"{machine.unit}s", "steps", "longest term"),
        rows,
        text_columns=(0, 5),
    )
