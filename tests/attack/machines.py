"""Attacks the twin with random machines, settings and device files.

A machine is a node on file with any of its numbers changed, a little or to the ends of their
ranges; a plan on it is refused with one TwinError, or simulated. Judged of what is simulated: the
result is finite and its causes sum to the step; both executors agree to the picosecond, also in
what they refuse; no step is faster than its floor; and a single better number costs at most 3 %
(Graham's anomaly). Texts of settings and device files are drawn from what people mistype and what
attackers write: refused in one short line, or read.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from tests.attack.defect import Defect
from tests.sim.machines import LANES, MODEL
from twin.calibrate.node import calibrated_node
from twin.data import data_dir
from twin.errors import TwinError
from twin.hardware.load import node_names, read_device, read_family
from twin.hardware.override import numbers, with_number, with_numbers
from twin.hardware.schema import limits
from twin.hardware.types import Node
from twin.models.load import load_model
from twin.models.spec import ModelSpec
from twin.plan.options import Execution, HandOffKind, Placement, Sampling
from twin.plan.types import Plan
from twin.proof.prove import prove
from twin.schedule.options import plan_for
from twin.sim.executor import Executor
from twin.sim.run import Result, simulate
from twin.units import unit_of

NAME = "machines"
ANOMALY = 1.03
IMPROVEMENTS = 4  # of a machine
SHORT = 1000  # characters of a refusal
SMALL = 15_000  # slots and stages of all blocks that SimPy walks in a second
LARGE = 150_000  # and compiled code
STEPS = 3
Setting = tuple[str, str | float]

SHIPPED = ("llama-3.2-1b", "laneformer-2b", "gpt-oss-20b", "qwen3-coder-next")
# larger is another plan, or only a denominator
NOT_THE_PLANS = ("capacity_bytes", "reserved_bytes", "on_chip_bytes", "peak_bytes_per_s")
MORE_IS_BETTER = ("load_latency_s",)  # more bytes in flight
UNUSED = ("power.", "device.power.")
NUMBERS = (
    "0",
    "1",
    "-1",
    "1.5",
    "²",
    "٣",
    "1_0",
    "nan",
    "inf",
    "-inf",
    "1e999",
    "-1e999",
    "1e-999",
    "9" * 5000,
    "0." + "0" * 5000 + "1",
    "1e",
    ".",
    "",
    " ",
    "0x10",
    "1,5",
    "1e1000000000",
    "\x1b[31m1",
    "1\n2",
    "½",
    "True",
    "None",
    "x",
    "1e18",
    "1e300",
    "0.000001",
    "1000000",
)
UNITS = (
    "",
    "s",
    "us",
    "µs",
    "B/s",
    "TB/s",
    "B",
    "GiB",
    "Hz",
    "GHz",
    "W",
    "%",
    "²",
    "S",
    "tb/s",
    "\x00",
    "s s",
    "x" * 3000,
)
SIGNS = ("", "", "x", "*", "+", "-", "x ", "+-", "xx")
LEAVES: tuple[Any, ...] = (
    None,
    True,
    0,
    -1,
    3,
    10**18,
    10**400,
    1.5,
    math.inf,
    math.nan,
    "",
    " ",
    "x",
    "\x1b[2J",
    "1 s",
    "4.8 TB/s",
    "9" * 5000,
    [],
    {},
    [[]],
    {"a": {}},
    ["x"] * 1000,
    {"value": "1 s"},
    {"value": 1, "kind": "vendor", "source": "x"},
    {"value": "1 us", "kind": ["x"], "source": {}},
)
LINES = (
    "? [a, b]\n: c",
    "{a: b}: c",
    "a: *a",
    "b: &b [*b]",
    "c: &c {d: *c}",
    "day: 2026-02-31",
    "t: !!timestamp x",
    "n: !!bool x",
    "o: !!python/object:x y",
    "i: 0b_",
    "j: " + "9" * 5000,
    "k: 1:2:3:4:5:6:7:8:9",
    "f: 1e999",
    "g: .inf",
    "m: {<<: x}",
    "m: {<<: {name: y}}",
    "%YAML 3.0",
    "--- \n---",
    "\x1b[2J: 1",
    '"\\e[2J": 1',
    "- " * 2000 + "x",
    "x: " + "[" * 5000,
    "y: " + "{" * 5000,
    "z: [" + "a," * 3000 + "]",
    "\tq: 1",
    "name: x\nname: y",
    "'",
    "&",
    "*",
    "|",
    ">",
    "\ud800".encode("utf-8", "surrogatepass").decode("latin-1"),
    "#" * 10_000,
    "v: " + "v" * 100_000,
    "=: 1",
    "~: 1",
    "null: 1",
    "1: 1",
    "1.5: 1",
)


def attack(chance: random.Random, folder: Path) -> str:
    """One case drawn from `chance`, in the empty scratch `folder`. Returns the outcome's word for
    the tally. Raises Defect.
    """
    return chance.choices((_machine, _text, _file, _bytes), (5, 2, 3, 1))[0](chance, folder)


# ---- machines ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """Enough to repeat it."""

    model: str
    node: str
    options: tuple[tuple[str, Any], ...]
    settings: tuple[Setting, ...]

    def __str__(self) -> str:
        chosen = ", ".join(f"{name}={value}" for name, value in self.options)
        return (
            f"{self.model} on {self.node} with {chosen or 'default options'}; settings "
            f"{list(self.settings)}"
        )


def _machine(chance: random.Random, folder: Path) -> str:
    case = _case(chance)
    try:
        node = with_numbers(_node(case.node), case.settings)
        plan = plan_for(_spec(case.model), node, **dict(case.options))
        prove(plan)
    except TwinError as error:
        return _refused(error, str(case), "machine")
    if _work(plan) > LARGE:
        return "machine left out, its plan is long"
    try:
        result = _judged(plan, node, case)
    except TwinError as error:
        _same_refusal(plan, node, case, str(error))
        return _refused(error, str(case), "simulation")
    _improve(chance, plan, node, case, result)
    return "machine simulated"


def _case(chance: random.Random) -> Case:
    name = chance.choice(_names())
    model = chance.choice(SHIPPED) if chance.random() < 0.15 else f"tiny-{chance.randrange(12)}"
    return Case(model, name, tuple(_options(chance, model)), tuple(_settings(chance, _node(name))))


@lru_cache(maxsize=1)
def _names() -> list[str]:
    # which is another computer elsewhere
    return [name for name in node_names() if not name.endswith("host")]


@lru_cache(maxsize=64)
def _node(name: str) -> Node:
    return calibrated_node(name)


@lru_cache(maxsize=64)
def _spec(model: str) -> ModelSpec:
    """A shipped model's first and last layers, or a tiny model by its number."""
    if not model.startswith("tiny-"):
        spec = load_model(model)
        kept = [0, *range(spec.layers - (3 if spec.lanes else 1), spec.layers)]
        layout = tuple(spec.layout[layer] for layer in kept) if spec.layout else ()
        return replace(
            spec,
            layers=len(kept),
            windows=tuple(spec.windows[layer] for layer in kept),
            layout=layout,
        )
    chance = random.Random(model)
    layers, width = chance.choice((1, 2, 4)), chance.choice((64, 256, 1024))
    lanes = (
        replace(LANES, count=chance.choice((2, 4, 8)), early_exchange=chance.random() < 0.5)
        if layers == 4
        else None
    )
    return replace(
        MODEL,
        name=model,
        layers=layers,
        windows=(0,) * layers,
        hidden=width,
        ffn=2 * width,
        vocab=chance.choice((96, 4096)),
        lanes=lanes,
        context=4096,
    )


def _options(chance: random.Random, model: str) -> Iterator[tuple[str, Any]]:
    """What a user might choose; the rest is by default."""
    if chance.random() < 0.8:
        yield "blocks", chance.choice((1, 2, 4, 8, 12, 16))
    if chance.random() < 0.5:
        slots = chance.choice((1, 2, 3, 6, 13))
        yield "ring_slots", slots
        yield "window_slots", chance.randint(1, slots)
    if model not in SHIPPED and chance.random() < 0.5:
        yield "slot_bytes", chance.choice((512, 2048, 16384))
    if chance.random() < 0.4:
        yield "handoff", chance.choice(list(HandOffKind))
    if chance.random() < 0.3:
        yield "execution", chance.choice(list(Execution))
    if chance.random() < 0.3:
        yield "placement", chance.choice(list(Placement))
    if chance.random() < 0.3:
        yield "sampling", chance.choice(list(Sampling))
    if chance.random() < 0.5:
        yield "context", chance.choice((0, 1, 40, 300, 3000))


def _settings(chance: random.Random, node: Node) -> Iterator[Setting]:
    """Changes of some numbers: mostly ordinary ones, sometimes far off, sometimes to the ends of
    what is allowed and a little beyond.
    """
    known = numbers(node)
    spread = chance.choice((0.3, 1.0, 1.0, 2.5))
    for path in chance.sample(sorted(known), chance.choice((0, 1, 1, 2, 4, 8, 20))):
        least, most = limits(path)
        unit = unit_of(path.rsplit(".", 1)[-1])
        way = chance.random()
        if way < 0.06:
            yield (
                path,
                chance.choice(
                    (least, most, least * 0.99, most * 1.01, math.nextafter(most, math.inf))
                ),
            )
        elif not unit:
            yield path, float(chance.choice((1, 2, 4, 8)))
        elif way < 0.12 and unit == "s":
            yield path, 0.0
        else:
            yield path, f"x{10 ** chance.uniform(-spread, spread):.4g}"


def _judged(plan: Plan, node: Node, case: Case) -> Result:
    """The result, by the laws of a single machine."""
    result = simulate(plan, node, steps=STEPS, executor=Executor.COMPILED)
    times = (result.step_ps, *result.step_ends_ps)
    if min(times) <= 0 or not all(
        math.isfinite(value) for value in (result.tokens_per_s, result.floor_s, result.mbu)
    ):
        raise Defect(
            f"{case}: a step of {result.step_ps} ps and a floor of {result.floor_s} s are no result"
        )
    if (
        sum(result.attribution_ps.values()) != result.step_ps
        or min(result.attribution_ps.values()) < 0
    ):
        raise Defect(f"{case}: causes {result.attribution_ps} do not sum to {result.step_ps} ps")
    if result.consumed_bytes + result.in_ring_bytes != result.delivered_bytes:
        raise Defect(
            f"{case}: {result.delivered_bytes} bytes delivered, {result.consumed_bytes} consumed, "
            f"{result.in_ring_bytes} in rings"
        )
    _above_the_floor(result, case)
    if _work(plan) <= SMALL:
        _equal(result, simulate(plan, node, steps=STEPS, executor=Executor.SIMPY), case)
    return result


def _above_the_floor(result: Result, case: Case) -> None:
    """From the start; a single step may be ahead by what the rings held when it began. Steps that
    differ by their routing: the first.
    """
    count = 1 if result.routing else STEPS
    for step, end in enumerate(result.step_ends_ps[:count]):
        if not result.routing and end + 1 < (step + 1) * result.floor_s * 1e12:
            raise Defect(
                f"{case}: {step + 1} steps end at {end} ps, before {step + 1} floors of "
                f"{result.floor_s} s"
            )


def _work(plan: Plan) -> int:
    """Slots and stages of a step, about."""
    slots = plan.bytes_per_step() // plan.options.slot_bytes
    return slots + len(plan.stages) * plan.blocks * plan.ranks * (2 + plan.ranks // 4)


def _equal(one: Result, two: Result, case: Case) -> None:
    first, second = (json.loads(result.to_json()) | {"executor": ""} for result in (one, two))
    if first != second:
        differ = [name for name in first if first[name] != second[name]]
        raise Defect(
            f"{case}: executors differ in {differ}: {[first[d] for d in differ]} and "
            f"{[second[d] for d in differ]}"
        )


def _same_refusal(plan: Plan, node: Node, case: Case, said: str) -> None:
    if _work(plan) > SMALL:
        return
    try:
        simulate(plan, node, steps=STEPS, executor=Executor.SIMPY)
    except TwinError as error:
        if str(error) != said:
            raise Defect(f"{case}: compiled code says {said!r}, SimPy {str(error)!r}") from error
        return
    raise Defect(f"{case}: compiled code refuses ({said!r}), SimPy does not")


def _improve(chance: random.Random, plan: Plan, node: Node, case: Case, before: Result) -> None:
    """Single numbers made better, one at a time, each from the same machine."""
    possible = [path for path in sorted(numbers(node)) if _improvable(path)]
    for path in chance.sample(possible, IMPROVEMENTS):
        better = chance.choice((2.0, 4.0, 10.0))
        leaf = path.rsplit(".", 1)[-1]
        factor = 1 / better if unit_of(leaf) == "s" and leaf not in MORE_IS_BETTER else better
        try:
            improved = with_number(node, path, f"x{factor:g}")
            after = simulate(plan, improved, steps=STEPS, executor=Executor.COMPILED)
        except TwinError as error:
            _refused(error, f"{case}; {path} x{factor:g}", "improvement")
            continue
        slower = after.step_ends_ps[-1] / before.step_ends_ps[-1]
        if slower > ANOMALY:
            raise Defect(
                f"{case}; then {path} x{factor:g} is {slower - 1:.1%} slower: "
                f"{before.step_ends_ps} and {after.step_ends_ps} ps"
            )
        _above_the_floor(after, replace(case, settings=(*case.settings, (path, f"x{factor:g}"))))


def _improvable(path: str) -> bool:
    leaf = path.rsplit(".", 1)[-1]
    return (
        unit_of(leaf) in ("s", "B/s", "Hz")
        and leaf not in NOT_THE_PLANS
        and not path.startswith(UNUSED)
    )


# ---- texts ---------------------------------------------------------------------------------------


def _text(chance: random.Random, folder: Path) -> str:
    """Numbers, units, factors and paths that nobody should write."""
    node = _node(chance.choice(_names()))
    path = chance.choice(sorted(numbers(node)))
    if chance.random() < 0.15:
        path = chance.choice(
            (
                path[:-2],
                path.upper(),
                "",
                "x" * 10**5,
                "\x1b[2J",
                "..",
                "name",
                path + ".value",
                "²",
            )
        )
    value: str | float = "".join(chance.choice(part) for part in (SIGNS, NUMBERS, ("", " "), UNITS))
    if chance.random() < 0.2:
        value = chance.choice(
            (math.nan, math.inf, -math.inf, 1e308, -0.0, 5e-324, 1e-300, 10**30, 0.5, True)
        )
    case = f"{node.name}: --set {path!r:.200} = {value!r:.200}"
    try:
        changed = with_number(node, path, value)
    except TwinError as error:
        return _refused(error, case, "text")
    for where, number in numbers(changed).items():
        least, most = limits(where)
        if not all(
            least <= end <= most
            for end in (number.low, number.value, number.high)
            if end is not None
        ):
            raise Defect(f"{case}: accepted, and {where} is {number.value}")
    return "text accepted"


# ---- files ---------------------------------------------------------------------------------------


def _file(chance: random.Random, folder: Path) -> str:
    """A shipped device or node file with a leaf, a line or a name changed."""
    kind = chance.choice(("devices", "devices", "nodes"))
    original = chance.choice(
        [
            file
            for file in sorted((data_dir("hwmodels") / kind).glob("*.yaml"))
            if file.stem != "host"
        ]
    )
    lines = original.read_text(encoding="utf-8").splitlines()
    for _ in range(chance.choice((1, 1, 2, 5))):
        at = chance.randrange(len(lines))
        way = chance.randrange(5)
        if way == 0:
            lines.insert(at, chance.choice(("", "  ", "    ")) + chance.choice(LINES))
        elif way == 1:
            lines[at] = lines[at].partition(":")[0] + ": " + _leaf(chance)
        elif way == 2:
            lines[at] = _other_number(chance, lines[at])
        elif way == 3:
            del lines[at]
            lines = lines or [""]
        else:
            lines[at] = lines[at].replace(
                chance.choice((":", '"', "{", ",", "value", "kind", " ")),
                chance.choice(("", "\t", "[", "&a ", "*a", "!!", "²", "\x07")),
                1,
            )
    file = folder / original.name
    file.write_bytes("\n".join(lines).encode("utf-8", "surrogatepass"))
    return _read(chance, file, "device file" if kind == "devices" else "node file")


def _leaf(chance: random.Random) -> str:
    """Of JSON, which is YAML."""
    return json.dumps(chance.choice(LEAVES))


def _other_number(chance: random.Random, line: str) -> str:
    """Another quantity in the first quotes."""
    before, quote, rest = line.partition('"')
    return (
        f'{before}"{chance.choice(NUMBERS)} {chance.choice(UNITS)}"{rest.partition(quote)[2]}'
        if quote
        else line + chance.choice(NUMBERS)
    )


def _bytes(chance: random.Random, folder: Path) -> str:
    """What is no device file at all."""
    file = folder / "h200-sxm.yaml"
    way = chance.randrange(4)
    if way == 0:
        file.write_bytes(chance.randbytes(chance.choice((0, 1, 100, 10_000))))
    elif way == 1:
        anchors = "".join(
            f"{b}: &{b} [{', '.join(['*' + a] * 9)}]\n"
            for a, b in zip("abcdefgh", "bcdefghi", strict=True)
        )
        file.write_text(
            f"a: &a [x, x, x]\n{anchors}"
            + chance.choice(("", "name: *i\n", "block: *h\n", "like: *i\n"))
        )
    elif way == 2:
        file.write_text(
            "\n".join(chance.choice(LINES) for _ in range(chance.randrange(1, 20))),
            encoding="utf-8",
            errors="replace",
        )
    else:
        file.write_bytes(
            chance.choice((b"[", b"- ", b"a: ", b"{a: ", b'"', b"\xff", b"? ", b"&a "))
            * chance.choice((1, 50, 5000, 400_000))
        )
    return _read(chance, file, "bytes")


def _read(chance: random.Random, file: Path, what: str) -> str:
    """As a device or as a node."""
    content = file.read_bytes()
    case = f"{what} {file.name} of {len(content)} bytes: {content[:2000]!r}"
    read_device.cache_clear()
    read_family.cache_clear()
    read: Any = read_family if what == "node file" else read_device
    try:
        made = read(file)
    except TwinError as error:
        return _refused(error, case, what)
    if what == "device file":
        outside = [
            path
            for path, number in numbers(made).items()
            if not limits(path)[0] <= number.value <= limits(path)[1]
        ]
        if outside:
            raise Defect(f"{case}: read, and {outside} are out of range")
    return f"{what} read"


def _refused(error: TwinError, case: str, what: str) -> str:
    said = str(error)
    if len(said) > SHORT or not said.isprintable():
        raise Defect(
            f"{case}: refused with {len(said)} characters, not a short line: {said[:SHORT]!r}"
        )
    return f"{what} refused"
