"""One simulation of a study: what it is made of, the key of its content, and its result."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import twin
from twin.cost.acceptance import Acceptance, read_acceptance
from twin.cost.drafting import Drafter, drafted, read_drafter
from twin.cost.routing import Routing, RoutingKind, read_routing
from twin.data import data_dir
from twin.errors import ConfigError, TwinError
from twin.hardware.number import Number
from twin.hardware.types import Node
from twin.models.depth import first_layers
from twin.models.load import load_model
from twin.models.spec import ModelSpec
from twin.plan.catalogue import StageKind
from twin.sim.run import simulate
from twin.sim.speculation import Speculation
from twin.study.case import Case
from twin.study.hardware import Setting, node_on_file, with_settings
from twin.study.options import CONDITIONS, Plain, option_value

D = TypeVar("D")

OWN = ("case.py", "hardware.py", "options.py", "point.py")  # of this package
# what decides a result
CODE = (
    "units.py",
    "hardware",
    "models",
    "plan",
    "schedule",
    "kernel",
    "proof",
    "cost",
    "sim",
    *(f"study/{name}" for name in OWN),
)
SOURCES = (".py", ".h", ".cpp")
NATIVE = "simulator"  # and its compiled half, in native/


@dataclass(frozen=True, slots=True)
class Point:
    """A model on a node. Plain values only: a point travels between processes and computers.

    `settings` are (name, change) pairs of hardware numbers, made in order on the node as it is on
    file, with its device's fit. `steps` 0 only asks whether it can be planned and fits.
    """

    model: str
    node: str
    # values of Options fields and of CONDITIONS, by name
    options: tuple[tuple[str, Plain], ...] = ()
    settings: tuple[Setting, ...] = ()
    steps: int = 2
    # one GPU of several is simulated and stands for all (`simulate`): for searches and for ratios
    representative: bool = False

    def with_options(self, **options: Plain) -> Point:
        return dataclasses.replace(
            self, options=tuple(sorted((dict(self.options) | options).items()))
        )

    def with_settings(self, *settings: Setting) -> Point:
        return dataclasses.replace(self, settings=(*self.settings, *settings))

    def on_node(self) -> Node:
        """Its node with all settings made."""
        return with_settings(node_on_file(self.node), self.settings)

    def case(self) -> Case:
        """Raises TwinError for whatever it names that does not exist."""
        return Case(self.spec(), self.on_node(), self.chosen())

    def chosen(self) -> dict[str, Any]:
        """Values of Options fields, by name."""
        found = {
            name: option_value(name, value)
            for name, value in self.options
            if name not in CONDITIONS
        }
        if self.drafter():
            found.pop("draft", None)
        return found

    def drafter(self) -> Drafter | None:
        """None where drafts are steps of their own, or there are none. Raises ConfigError."""
        named = self.condition("drafter", "")
        return read_drafter(f"{named}:1")[0] if named else None

    def drafts(self) -> int:
        """That a round of the engine verifies."""
        return int(dict(self.options).get("draft") or 0) if self.drafter() else 0

    def spec(self) -> ModelSpec:
        """The model in the chosen format, with as many layers as chosen."""
        chosen, layers = self.condition("format", ""), self.condition("layers", 0)
        spec = _model(f"{self.model.partition('@')[0]}@{chosen}" if chosen else self.model)
        return first_layers(spec, layers) if layers else spec

    def condition(self, name: str, default: D) -> D:
        """A condition of the simulation, if it was chosen."""
        return (
            option_value(name, dict(self.options)[name]) if name in dict(self.options) else default
        )

    def routing(self) -> Routing:
        return read_routing(
            self.condition("routing", RoutingKind.UNIFORM.value), self.condition("seed", 0)
        )

    def speculation(self) -> Speculation | None:
        """None unless something was said about drafts that are steps of their own."""
        acceptance, draft_step_s = (
            self.condition("acceptance", -1.0),
            self.condition("draft_step_s", 0.0),
        )
        curve = self.condition("curve", "")
        if self.drafter() or (acceptance < 0 and not draft_step_s and not curve):
            return None
        return Speculation(acceptance=max(0.0, acceptance), draft_step_s=draft_step_s, curve=curve)

    def acceptance(self) -> Acceptance:
        """Of a round's drafts. Raises ConfigError where nothing says how many are accepted."""
        curve, rate = self.condition("curve", ""), self.condition("acceptance", -1.0)
        if not curve and rate < 0:
            raise ConfigError(
                f"draft={self.drafts()}: say how often drafts are accepted, by acceptance (0 to 1) "
                "or curve, or use draft=0"
            )
        return read_acceptance(curve or str(rate))


def _model(name: str) -> ModelSpec:
    """Of a checkpoint read once as long as its file stays as it is: a study has hundreds of points
    of one model, each of which needs it three times.
    """
    place = Path(name.rpartition("@")[0] or name)
    file = place / "config.json" if place.is_dir() else place
    try:
        about = file.stat()
    except OSError:  # one on file, which is kept
        return load_model(name)
    return _read(name, about.st_mtime_ns, about.st_size)


@lru_cache(maxsize=16)
def _read(name: str, changed_ns: int, size: int) -> ModelSpec:
    return load_model(name)


@dataclass(frozen=True, slots=True)
class Row:
    """The result of a point. With a `problem` (why it cannot be planned) there are no numbers: they
    are 0 and empty.
    """

    key: str
    problem: str = ""
    step_s: float = 0.0
    floor_s: float = 0.0  # bytes per step / (packages x read ceiling)
    bytes_per_step: int = 0
    stream_bytes_per_s: float = 0.0  # of the pipes of all packages
    peak_bytes_per_s: float = 0.0  # datasheet, all packages
    # seconds of the critical path by cause
    attribution: dict[str, float] = field(default_factory=dict)
    kinds: dict[str, dict[str, float]] = field(default_factory=dict)  # the same by kind of stage
    assumed: tuple[str, ...] = ()  # paths of the assumed numbers it rests on
    # of every step after the first: they differ where experts are routed
    step_times_s: tuple[float, ...] = ()
    tokens_per_step: float = 1.0  # of one sequence
    draft_s: float = 0.0  # before each step
    sequences: int = 1  # decoded together
    # where compiled code could not do it, which is a hundred times faster
    why_simpy: str = field(default="", compare=False)
    wall_s: float = field(default=0.0, compare=False)  # spent on it, by whoever computed it

    @property
    def tokens_per_s(self) -> float:
        """Of one sequence; 0 with a problem."""
        if self.problem:
            return 0.0
        return self.tokens_per_step / (self.step_s + self.draft_s)

    @property
    def total_tokens_per_s(self) -> float:
        """Of all sequences."""
        return self.sequences * self.tokens_per_s

    @property
    def stream_fraction(self) -> float:
        return self.floor_s / self.step_s if self.step_s else 0.0


def key_of(point: Point) -> str:
    """The content of a point: its plan's inputs, its hardware numbers, and the code that plans and
    simulates.

    Two points with the same key have the same result, whatever they are called; an edited file or a
    renewed fit gives another key.
    """
    case = point.case()
    content: list[Any] = [
        code_version(),
        plain(case.spec),
        plain(case.node),
        {k: plain(v) for k, v in case.chosen.items()},
        point.steps,
    ]
    content += [plain(point.routing()), plain(point.speculation()), point.representative]
    if point.drafts():
        content += [plain(point.drafter()), point.drafts(), str(point.acceptance())]
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:40]


def compute(points: Sequence[Point]) -> list[Row]:
    """Results in order; a point that cannot be planned says so in its row."""
    return list(_computed(points))


def _computed(points: Sequence[Point]) -> Iterator[Row]:
    for point in points:
        key = key_of(point)
        try:
            yield _row(key, point)
        except TwinError as error:
            yield Row(key, problem=str(error))


def _row(key: str, point: Point) -> Row:
    case = point.case()
    if not point.steps:
        case.check()
        return Row(key)
    result = simulate(
        case.plan(),
        case.node,
        steps=point.steps,
        routing=point.routing(),
        speculation=point.speculation(),
        representative=point.representative,
    )
    kinds: dict[str, dict[str, float]] = {kind.value: {} for kind in StageKind}
    for stage in result.stages:
        for cause, ps in stage.causes_ps.items():
            if ps:
                kinds[stage.kind][cause] = kinds[stage.kind].get(cause, 0.0) + ps / 1e12
    row = Row(
        key,
        step_s=result.step_s,
        floor_s=result.floor_s,
        bytes_per_step=result.bytes_per_step,
        stream_bytes_per_s=result.stream_bytes_per_s,
        peak_bytes_per_s=result.peak_bytes_per_s,
        attribution={cause: seconds for cause, seconds in result.attribution.items() if seconds},
        kinds={kind: causes for kind, causes in kinds.items() if causes},
        assumed=result.assumed,
        step_times_s=result.step_times_s,
        tokens_per_step=result.tokens_per_step,
        draft_s=result.draft_s,
        sequences=result.sequences,
        why_simpy=result.why_simpy,
        wall_s=result.wall_s,
    )
    return _of_rounds(row, point, case) if point.drafts() else row


def _of_rounds(row: Row, point: Point, case: Case) -> Row:
    """The row of a step as that of a round with drafts."""
    drafter = point.drafter()
    assert drafter is not None
    worth = drafted(
        case.plan(),
        case.node,
        drafter,
        point.acceptance(),
        step_s=row.step_s,
        drafts=point.drafts(),
    )
    return dataclasses.replace(
        row,
        step_s=worth.round.seconds,
        step_times_s=(worth.round.seconds,),
        floor_s=worth.round.floor_s,
        bytes_per_step=worth.round.weight_bytes,
        attribution=worth.round.causes,
        kinds={},
        tokens_per_step=worth.tokens,
        draft_s=worth.draft_s,
    )


@lru_cache(maxsize=1)
def code_version() -> str:
    """A digest of the sources that decide a result, so that a changed simulator computes again."""
    root, native = Path(twin.__file__).parent, data_dir("native")
    digest = hashlib.sha256()
    for base, place in [*((root, root / name) for name in CODE), (native, native / NATIVE)]:
        for file in (
            sorted(one for one in place.rglob("*") if one.suffix in SOURCES)
            if place.is_dir()
            else [place]
        ):
            digest.update(f"{file.relative_to(base)}\n".encode())
            digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def plain(item: Any) -> Any:
    """Nested dataclasses as JSON values: of a hardware number its value and kind, not what people
    wrote about it.
    """
    if isinstance(item, Number):
        return [item.value, item.kind.value]
    if dataclasses.is_dataclass(item):
        return {field.name: plain(getattr(item, field.name)) for field in dataclasses.fields(item)}
    if isinstance(item, Enum):
        return item.value
    if isinstance(item, tuple | list):
        return [plain(entry) for entry in item]
    if isinstance(item, dict):
        return {str(key): plain(value) for key, value in item.items()}
    return item
