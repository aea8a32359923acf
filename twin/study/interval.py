"""Intervals: the numbers that a prediction rests on are drawn from what is known about them, and
simulated again.

low..high of a number is read as its central 90 % (the bootstrap of a fit gives exactly that,
twin.calibrate.fit.INTERVAL); nothing is drawn outside, because the ends are physical limits as
often as percentiles. A number that states no range gets the width of its kind
(twin.hardware.override.SPREAD), for the reasons in WIDTHS.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import numpy.typing as npt
from msgspec import Meta

from twin.calibrate.known_error import KnownError
from twin.calibrate.node import calibrated
from twin.calibrate.seen import wider
from twin.calibrate.store import name_of, read_fit
from twin.hardware.derive import IDLE, QUEUE, followed
from twin.hardware.load import load_device
from twin.hardware.number import Kind, Like, Number
from twin.hardware.override import interval, numbers, resolve
from twin.hardware.types import Node
from twin.reading import FieldError
from twin.study.fields import MOST_WHOLE, Count
from twin.study.hardware import Setting, drawable
from twin.units import unit_of

Floats = npt.NDArray[np.float64]
TAIL = 0.05  # of a number's distribution lies beyond each end of its range, and is not drawn
LEVELS = (0.10, 0.50, 0.90)
FEWEST, MOST = 4, 10_000
TELLING = 8  # draws from which ranks say anything: four agree by chance once in twelve
WIDTHS = {  # why a kind's numbers may be off by what twin.hardware.override.SPREAD says
    Kind.MEASURED: "our own probe on that part: repeats and minutes differ by a few percent",
    Kind.FITTED: "least squares over many probes; a fit on file states its own, wider range",
    Kind.DATASHEET: "a definition of the part, not an estimate",
    Kind.THIRD_PARTY: "somebody else's probe: the load type and the grid alone move a "
    "bandwidth by as much",
    Kind.VENDOR: "announced or measured by who sells it: best case, and not yet repeated",
    Kind.UNBOUND: "its probes hardly see it; a fit on file states its range",
    Kind.ASSUMED: "states its range on file; a what-if of the user is meant exactly",
}
# Numbers of one mechanism are wrong together: an idle and a loaded hop, the arithmetic on each
# stored format.
_MECHANISMS = (
    (re.compile(r"(.*)\b(?:loaded_)?hop_s$"), r"\1hop_s"),
    (re.compile(r"(.*kernel\.)(?:fp16|bf16|fp32)_bytes_per_s$"), r"\1arithmetic"),
    (re.compile(r"(.*launch\.)(?:stream|graph_edge)_s$"), r"\1edge_s"),
)


@dataclass(frozen=True, slots=True)
class Draws:
    """How an interval is made: `draws` simulations for each cell."""

    draws: Annotated[int, Meta(ge=FEWEST, le=MOST)]
    seed: Annotated[int, Meta(ge=0, le=MOST_WHOLE)] = 1
    # two numbers of layers to simulate each draw with, instead of all of them: both multiples of
    # what repeats in the model, or their difference says little
    depths: tuple[Count, ...] = ()

    def __post_init__(self) -> None:
        if self.depths and (len(self.depths) != 2 or self.depths[0] >= self.depths[1]):
            raise FieldError(
                "depths",
                f"{list(self.depths)} must be two numbers of layers, the smaller first, such as "
                "[4, 8]",
            )


@dataclass(frozen=True, slots=True)
class Interval:
    """Tokens per second that eight of ten are between: about the prediction, which is what the
    numbers on file give. Of draws also their speeds, and what carries them: rank correlation of
    each mechanism with the speed, the strongest first.
    """

    p10: float
    p90: float
    rests: str  # what it is from
    speeds: tuple[float, ...] = ()  # of all draws
    carried_by: tuple[tuple[str, float], ...] = ()  # only what can be distinguished from chance


def settings(node: Node, draws: Draws) -> list[tuple[Setting, ...]]:
    """The changes of each draw: Latin hypercube, one stratum for each draw and mechanism.

    A mechanism's draws depend on the seed, the device's name and its own name alone: all cells on a
    device see the same hardware, so that their differences are not noise.
    """
    uncertain = {
        path: number
        for path, number in numbers(node).items()
        if drawable(path) and _width(number) and not number.like
    }
    fitted = _fitted(node, draws)
    columns = {
        path: number.value * fitted[path]
        if path in fitted
        else _values(number, uniforms(f"{node.device.name} {mechanism(path)}", draws))
        for path, number in uncertain.items()
    }
    columns |= _followers(node, draws, columns)
    return [
        tuple(_consistent(node, {path: float(column[i]) for path, column in columns.items()}))
        for i in range(draws.draws)
    ]


def _fitted(node: Node, draws: Draws) -> dict[str, Floats]:
    """Factors on the node's own fitted numbers: those of a node of one, and its own."""
    known = numbers(node)
    names = dict.fromkeys((f"1x{node.device.name}", node.name))
    factors = {
        resolve(node, path): values
        for name in names
        for path, values in _together(name, draws).items()
    }
    return {
        path: values
        for path, values in factors.items()
        if known[path].kind in (Kind.FITTED, Kind.UNBOUND)
    }


def drawn_together(node: Node) -> frozenset[str]:
    """Paths of the numbers that the bootstrap of the node's fits draws together: no one of them
    becomes certain by itself.
    """
    return frozenset(_fitted(node, Draws(FEWEST)))


def _together(node: str, draws: Draws) -> dict[str, Floats]:
    """Factors on the numbers of a node's fit, drawn together by its bootstrap: parts of a sum that
    probes know err oppositely.

    Each draw takes the same one of the fit's draws for all numbers, and for all devices that are
    like this one.
    """
    found = read_fit(node)
    factors = found[1].get("together", {}) if found else {}
    rows = uniforms(f"{name_of(node)} fit", draws)
    return {
        path: np.asarray(values, dtype=np.float64)[(rows * len(values)).astype(np.int64)]
        for path, values in factors.items()
    }


def _followers(node: Node, draws: Draws, drawn: Mapping[str, Floats]) -> dict[str, Floats]:
    """Numbers that are like another part's: drawn with that part's fit, and by what a rule leaves
    open, one draw for all that follow it.
    """
    known = numbers(node)
    together = {device: _together(device, draws) for device in followed(node.device)}
    columns: dict[str, Floats] = {}
    for path, number in known.items():
        if number.like is None:
            continue
        like, leaf = number.like, path.removeprefix("device.")
        cost = _values(
            Number(1.0, Kind.ASSUMED, like.rule, like.low, like.high),
            uniforms(f"{node.device.name} {_rule(like)}", draws),
        )
        if like.rule == QUEUE:
            idle = f"device.{IDLE[leaf]}"
            waits = (
                _waits(leaf, like.device, together[like.device])
                if like.fitted
                else np.asarray(number.value - known[idle].value)
            )
            columns[path] = waits * cost + columns.get(
                idle, drawn.get(idle, np.asarray(known[idle].value))
            )
        else:
            factor = together[like.device].get(leaf, np.ones(1)) if like.fitted else np.ones(1)
            columns[path] = number.value * factor * (cost if unit_of(leaf) == "s" else 1 / cost)
    return columns


def _waits(path: str, device: str, together: Mapping[str, Floats]) -> Floats:
    """Behind QUEUE_S of the stream, in each draw of the device that is followed."""
    known, idle = numbers(calibrated(load_device(device))), IDLE[path]
    loaded_s, idle_s = (known[one].value * together.get(one, np.ones(1)) for one in (path, idle))
    return np.maximum(0.0, loaded_s - idle_s)


def mechanism(path: str) -> str:
    """What a number is wrong together with; mostly only itself."""
    for pattern, common in _MECHANISMS:
        if pattern.match(path):
            return pattern.sub(common, path)
    return path


def _rule(like: Like) -> str:
    """What numbers that follow a rule are wrong together with."""
    return f"as {like.device}: {like.rule}"


def uniforms(name: str, draws: Draws) -> Floats:
    """[draws] numbers in (0, 1), one in each stratum, shuffled by seed and name."""
    generator = np.random.default_rng(
        [draws.seed, int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")]
    )
    within = generator.uniform(0.0, 1.0, draws.draws)
    return np.asarray((generator.permutation(draws.draws) + within) / draws.draws, dtype=np.float64)


def summary(
    node: Node,
    draws: Draws,
    speed: float,
    speeds: Sequence[float],
    touched: Collection[str],
    *,
    new: float,
) -> Interval:
    """The interval of a cell of the predicted `speed` from the speeds of its draws, in order;
    `touched` are the paths that its plan uses, `new` what never ran of it (`first_error`).
    """
    low, high = about(speed, speeds, new)
    carried = tuple(_carriers(node, draws, speeds, touched))
    return Interval(low, high, from_draws(draws.draws), tuple(speeds), carried)


def about(speed: float, speeds: Sequence[float], new: float) -> tuple[float, float]:
    """The ends of eight of ten speeds, and of the prediction: ranges reach further to one side than
    to the other. No range holds what is wrong about what never ran (`first_error`).
    """
    low, high = (float(value) for value in np.quantile(speeds, (LEVELS[0], LEVELS[-1])))
    low, high = wider((min(low / speed, 1.0), max(high / speed, 1.0)), new)
    return speed * low, speed * high


def from_draws(count: int) -> str:
    return f"{count} draws of its numbers"


def held(known: KnownError, speed: float) -> Interval:
    """As far about a predicted speed as held-out engine runs were off."""
    low, high = known.interval(speed)
    return Interval(low, high, from_runs(known))


def from_runs(known: KnownError) -> str:
    return f"held-out runs of {known.node}"


def chance(count: int, tried: int) -> float:
    """The rank correlation that the strongest of `tried` unrelated numbers exceeds once in twenty,
    by Student's t (Bonferroni).
    """
    # slow to load, as all of SciPy: only who asks for an interval waits for it
    from scipy.stats import t as student

    quantile = float(student.ppf(1 - 0.05 / 2 / tried, count - 2))
    return quantile / math.sqrt(count - 2 + quantile**2)


def _carriers(
    node: Node, draws: Draws, speeds: Sequence[float], touched: Collection[str]
) -> Iterator[tuple[str, float]]:
    fitted = _fitted(node, draws)  # drawn together, so no one of them can be distinguished
    names = dict.fromkeys(
        _rule(number.like) if number.like else mechanism(path)
        for path, number in numbers(node).items()
        if path in touched and path not in fitted and drawable(path) and _width(number)
    )
    if max(speeds) == min(speeds) or not names or draws.draws < TELLING:
        return
    left = _centred(np.asarray(speeds, dtype=np.float64))
    ranks = {name: _centred(uniforms(f"{node.device.name} {name}", draws)) for name in names}
    limit = chance(draws.draws, len(names))
    while ranks:
        found = {name: _correlation(rank, left) for name, rank in ranks.items()}
        name = max(found, key=lambda one: abs(found[one]))
        if abs(found[name]) <= limit:
            return
        yield name, found[name]
        # Two numbers' draws may agree by chance: what the first explains is taken out before the
        # next is looked for.
        taken = ranks.pop(name)
        left = _without(left, taken)
        ranks = {other: _without(rank, taken) for other, rank in ranks.items()}


def _centred(values: Floats) -> Floats:
    """Ranks about their mean."""
    from scipy.stats import rankdata

    ranks = rankdata(values)
    return np.asarray(ranks - ranks.mean(), dtype=np.float64)


def _without(values: Floats, taken: Floats) -> Floats:
    return np.asarray(values - taken * (values @ taken) / (taken @ taken), dtype=np.float64)


def _correlation(one: Floats, other: Floats) -> float:
    size = math.sqrt(float(one @ one) * float(other @ other))
    return float(one @ other) / size if size > 1e-9 else 0.0


def _width(number: Number) -> float:
    low, high = interval(number)
    return high - low


def _values(number: Number, uniform: Floats) -> Floats:
    """The number at each quantile: half normal on either side of its value, on a logarithmic scale
    where the range allows.
    """
    from scipy.special import ndtri

    low, high = interval(number)
    z = ndtri(TAIL + (1 - 2 * TAIL) * uniform)
    reach = z / ndtri(1 - TAIL)  # -1 at low, 0 at the value, 1 at high
    if low > 0:
        up, down = math.log(high / number.value), math.log(number.value / low)
        return np.asarray(
            number.value * np.exp(np.where(reach > 0, reach * up, reach * down)), dtype=np.float64
        )
    return np.asarray(
        number.value
        + np.where(reach > 0, reach * (high - number.value), reach * (number.value - low)),
        dtype=np.float64,
    )


def _consistent(node: Node, drawn: Mapping[str, float]) -> Iterator[Setting]:
    """A stream never beats the datasheet, and a loaded hop is never faster than an idle one.

    Unless the node itself says so: a what-if of the user is meant, and its draws lie about it.
    """
    own = {path: number.value for path, number in numbers(node).items()}
    known = own | dict(drawn)
    for path, value in drawn.items():
        if path.endswith("memory.stream_bytes_per_s"):
            peak = path.replace("stream_", "peak_")
            value = min(value, known[peak]) if own[path] <= own[peak] else value
        if path.endswith("loaded_hop_s"):
            idle = path.replace("loaded_hop_s", "hop_s")
            value = max(value, known[idle]) if own[path] >= own[idle] else value
        yield path, value
