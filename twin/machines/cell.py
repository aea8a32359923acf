"""A token's time on a machine: pure functions from (machine, model, context) to named terms."""

from __future__ import annotations

import dataclasses
import math

from twin.errors import HardwareError
from twin.frozen import frozen
from twin.hardware.number import Kind
from twin.hardware.override import interval
from twin.machines.steps import dependent_steps
from twin.machines.types import Machine, Published, Spread
from twin.models.formats import format_named
from twin.models.load import load_model
from twin.models.quantized import requantized
from twin.models.spec import ModelSpec
from twin.units import format_quantity

CACHE_ELEMENT_BYTES = 2  # caches in 16 bits


@frozen(kw_only=True)
class Terms:
    """Seconds of one step of one request. They follow one another: no term hides another."""

    weights_s: float  # active weights read where they lie
    caches_s: float  # caches and states read and written
    steps_s: float  # dependent steps waited for
    crossings_s: float  # from unit to unit

    @property
    def total_s(self) -> float:
        return self.weights_s + self.caches_s + self.steps_s + self.crossings_s


@frozen(kw_only=True)
class Cell:
    """The prediction for a model on a machine, with what it rests on."""

    machine: str
    model: str
    context: int
    units: int  # that hold the model
    steps: int  # dependent steps of a token
    terms: Terms
    low_tokens_per_s: float  # every number of the machine at its slow end
    high_tokens_per_s: float  # and at its fast end
    assumed: tuple[str, ...]  # names of the numbers that nobody measured
    not_modelled: tuple[str, ...]
    published: tuple[Published, ...]  # of this model on this machine

    @property
    def step_s(self) -> float:
        return self.terms.total_s

    @property
    def tokens_per_s(self) -> float:
        return 1 / self.step_s

    @property
    def binding(self) -> str:
        """The longest term: weights, caches, steps or crossings."""
        longest = max(
            dataclasses.fields(self.terms), key=lambda field: float(getattr(self.terms, field.name))
        )
        return longest.name.removesuffix("_s")


def cell(machine: Machine, model: str | ModelSpec, context: int) -> Cell:
    """Predict a decode step of one request with `context` cached positions.

    Raises HardwareError when the machine cannot hold the model (or is another model's), ConfigError
    for an unknown model.
    """
    spec = load_model(model) if isinstance(model, str) else model
    if not 0 <= context <= spec.context:
        raise HardwareError(
            f"context {context} is outside 0 to {spec.context}, what {spec.name} was trained for; "
            "shorten it"
        )
    if machine.only and spec.name.partition("@")[0] != machine.only:
        raise HardwareError(
            f"{machine.name} is hard-wired: it runs {machine.only} and not {spec.name}; choose "
            "another machine or that model"
        )
    held = _as_stored(machine, spec)
    ends = [_at(machine, held, context, end) for end in (0, 1)]
    return Cell(
        machine=machine.name,
        model=spec.name,
        context=context,
        units=units_for(machine, held, context),
        steps=dependent_steps(spec),
        terms=terms(machine, held, context),
        low_tokens_per_s=1 / max(ends),
        high_tokens_per_s=1 / min(ends),
        assumed=tuple(
            name for name, number in machine.numbers().items() if number.kind is Kind.ASSUMED
        ),
        not_modelled=machine.not_modelled,
        published=tuple(row for row in machine.published if row.model == spec.name),
    )


def terms(machine: Machine, spec: ModelSpec, context: int) -> Terms:
    """The time of a step from the machine's own values. `spec` as the machine stores it."""
    units, moved = units_for(machine, spec, context), spec.traffic(context, CACHE_ELEMENT_BYTES)
    rate = (
        _working(machine.spread, units, spec.layers) * machine.bytes_per_s.value
        if machine.bytes_per_s
        else math.inf
    )
    # the last one leads back to the first
    crossings = units if units > 1 and machine.crossing_s else 0
    return Terms(
        weights_s=spec.streamed_bytes / rate,
        caches_s=(moved.read_bytes + moved.written_bytes) / rate,
        steps_s=dependent_steps(spec) * machine.step_s.value,
        crossings_s=crossings * machine.crossing_s.value if machine.crossing_s else 0.0,
    )


def units_for(machine: Machine, spec: ModelSpec, context: int) -> int:
    """Units that hold weights and one request's caches. Raises HardwareError when there are not
    enough.
    """
    if machine.usable_bytes is None:
        return int(machine.units.value) if machine.units else 1
    needed_bytes = spec.stored_bytes + spec.held_bytes(context, CACHE_ELEMENT_BYTES)
    needed = math.ceil(needed_bytes / machine.usable_bytes.value)
    most = machine.units or machine.most_units
    if most and needed > most.value:
        size, each = (
            format_quantity(needed_bytes, "B"),
            format_quantity(machine.usable_bytes.value, "B"),
        )
        raise HardwareError(
            f"{spec.name} needs {size} and so {needed} times a {machine.unit} of {each}; "
            f"{machine.name} has at most {most.value:.0f}; choose a smaller model, or a smaller "
            "format (NAME@FORMAT)"
        )
    return int(machine.units.value) if machine.units else needed


def error(machine: Machine, row: Published) -> float:
    """Relative error of the prediction against a published speed: +0.1 is 10 % too fast."""
    return cell(machine, row.model, row.context).tokens_per_s / row.tokens_per_s - 1


def _as_stored(machine: Machine, spec: ModelSpec) -> ModelSpec:
    return requantized(spec, format_named(machine.stored)) if machine.stored else spec


def _working(spread: Spread, units: int, layers: int) -> float:
    """How many units' memories are read at a time."""
    if spread is Spread.TOGETHER:
        return float(units)
    share = units / layers
    return share if spread is Spread.REGIONS else max(1.0, share)


def _at(machine: Machine, spec: ModelSpec, context: int, end: int) -> float:
    """Seconds of a step with the machine's times and rates at their slow (0) or fast (1) end; the
    number of units stays.
    """

    changed = {}
    for name, number in machine.numbers().items():
        if name in ("step_s", "crossing_s", "bytes_per_s"):
            slow_to_fast = interval(number) if name == "bytes_per_s" else interval(number)[::-1]
            changed[name] = dataclasses.replace(number, value=slow_to_fast[end])
    return terms(dataclasses.replace(machine, **changed), spec, context).total_s  # type: ignore[arg-type]
