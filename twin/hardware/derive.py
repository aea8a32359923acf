"""Numbers of a part that nobody measured there: those of a part that somebody did, by one rule
each.

A device file that says `like` may leave out any number of FOLLOWS. A rule compares what is
published of both parts (their files, so a pointer chase with a pointer chase) and is applied to the
other part's number as it is best known, which may be a fit: `follow` is called again with the
fitted part (twin.calibrate.node), so a new fit needs no change of any file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, get_args, get_type_hints

from twin.data import did_you_mean
from twin.errors import HardwareError
from twin.frozen import frozen
from twin.hardware.kernel import WarpKernel
from twin.hardware.number import Kind, Like, Number
from twin.hardware.override import IDLE as IDLE
from twin.hardware.override import apply_fit, numbers
from twin.hardware.types import Device
from twin.reading import Check, Parse
from twin.text import shown
from twin.units import unit_of


def _cycles(here: Device, there: Device) -> float:
    return there.block.clock_hz.value / here.block.clock_hz.value


def _exchange(here: Device, there: Device) -> float:
    """By the latency of what is exchanged; where it follows itself, as it does."""
    mine, its = here.exchange.latency_s, there.exchange.latency_s
    return _cycles(here, there) if mine.like else mine.value / its.value


def _share(here: Device, there: Device) -> float:
    """Fewer and larger copies where a block's share of the stream is larger."""
    mine, its = (device.memory.stream_bytes_per_s.value / device.blocks for device in (here, there))
    return min(1.0, its / mine)


def _memory(here: Device, there: Device) -> float:
    return here.memory.latency_s.value / there.memory.latency_s.value


CYCLES, EXCHANGE, SHARE, MEMORY, QUEUE = "cycles", "exchange", "share", "memory", "queue"
SAME = "same"
# of a time here, or of one over a rate, over that there
COSTS: dict[str, Callable[[Device, Device], float]] = {
    CYCLES: _cycles,
    EXCHANGE: _exchange,
    SHARE: _share,
    MEMORY: _memory,
    SAME: lambda here, there: 1.0,
}
MEANING = {
    CYCLES: "the same cycles at this clock",
    EXCHANGE: "by the latency of the cache where blocks exchange",
    SHARE: "copies as much larger as a block's share of the stream",
    MEMORY: "by memory latency",
    QUEUE: "the same wait behind the same queue",
    SAME: "the same",
}
KERNEL = "kernel"  # the section of a device's numbers that are its kernel's
# rules for costs of a kernel that are not CYCLES in seconds, nor SAME in any other unit
_OF_KERNEL = {
    **dict.fromkeys(("sample_element_s", "gather_bytes_per_s", "crowd_s"), EXCHANGE),
    **dict.fromkeys(("copy_s", "watch_s"), SHARE),
    "border_s": MEMORY,
    "prompt.fetched_bytes_per_s": SAME,
}


def _of_kernel(path: str) -> str:
    """The rule for a cost of a block of warps."""
    if path in _OF_KERNEL:
        return _OF_KERNEL[path]
    return CYCLES if unit_of(path.rpartition(".")[2]) in ("s", "B/s") else SAME


def _leaves(kind: Any, at: str) -> Iterator[str]:
    """Dotted paths of all numbers of a dataclass."""
    for name, hint in get_type_hints(kind).items():
        inner = next(
            (one for one in (hint, *get_args(hint)) if dataclasses.is_dataclass(one)), Number
        )
        if inner is Number:
            yield f"{at}{name}"
        else:
            yield from _leaves(inner, f"{at}{name}.")


FOLLOWS = {
    **dict.fromkeys(("l2.latency_s", "handoff.atomic_s", "handoff.fence_s"), CYCLES),
    # a store to the cache where blocks exchange, and the load that finds it
    "handoff.hop_s": EXCHANGE,
    "memory.jitter_s": MEMORY,
    **{f"{KERNEL}.{path}": _of_kernel(path) for path in _leaves(WarpKernel, "")},
    "l2.loaded_latency_s": QUEUE,
    "handoff.loaded_hop_s": QUEUE,
}


def _factor(data: Any, at: str) -> float:
    try:
        if isinstance(data, str) and data.startswith("x"):
            return float(data[1:])
    except ValueError:
        pass
    raise HardwareError(f"{shown(data)} must be a factor, such as 'x0.7'")


def _follows(path: str) -> None:
    if path not in FOLLOWS:
        raise HardwareError(f"{shown(path)} follows nothing; {did_you_mean(path, FOLLOWS)}")


@frozen
class Kinship:
    """`like` of a device file."""

    device: str
    low: Annotated[float, Parse(_factor)]
    high: Annotated[float, Parse(_factor)]
    # numbers that the part has no need of: what is measured on it holds them already
    without: tuple[Annotated[str, Check(_follows)], ...] = ()

    def __post_init__(self) -> None:
        if not 0 < self.low <= 1 <= self.high:
            raise HardwareError(
                f"low x{self.low:g} and high x{self.high:g} are factors of a cost: 0 < low <= 1 "
                "<= high"
            )


def with_followers(data: Mapping[str, Any], kinship: Kinship, reference: Device) -> dict[str, Any]:
    """A device file's content, with the reference's own numbers in the places left out; `follow`
    makes them this part's.

    Raises HardwareError where the reference has none.
    """
    known = numbers(reference)
    filled = dict(data)
    for path, rule in FOLLOWS.items():
        if path in kinship.without or _stated(filled, path.split(".")):
            continue
        if path not in known:
            raise HardwareError(
                f"{reference.name} has no {path}: a part can only be like one whose warps are on "
                "file, such as h200-sxm"
            )
        ends = (1.0, 1.0) if rule == SAME else (kinship.low, kinship.high)
        like = Like(reference.name, rule, *ends)
        number = Number(known[path].value, Kind.ASSUMED, known[path].source, like=like)
        filled = _with(filled, path.split("."), number)
    return filled


def _stated(data: Any, keys: Sequence[str]) -> bool:
    """Does a file give a number, or something that is no mapping in its section's place?"""
    for key in keys:
        if not isinstance(data, Mapping):
            return True
        if key not in data:
            return False
        data = data[key]
    return True


def _with(data: Mapping[str, Any], keys: Sequence[str], number: Number) -> dict[str, Any]:
    key, *rest = keys
    return {**data, key: _with(data.get(key, {}), rest, number) if rest else number}


def follow(device: Device, reference: Device, on_file: Device) -> Device:
    """The device with every number that is like the reference's made from what the reference has
    now.

    `on_file`: the reference as published, with which the device is compared.
    """
    known = numbers(reference)
    likes = {
        path: n.like
        for path, n in numbers(device).items()
        if n.like and n.like.device == reference.name
    }
    waits = {path: like for path, like in likes.items() if like.rule == QUEUE}
    costs = {
        path: COSTS[like.rule](device, on_file) for path, like in likes.items() if path not in waits
    }
    device = apply_fit(
        device,
        {path: _scaled(path, known[path], likes[path], cost) for path, cost in costs.items()},
    )
    own = numbers(device)
    return apply_fit(
        device,
        {path: _behind_queue(path, known, like, own[IDLE[path]]) for path, like in waits.items()},
    )


def followed(device: Device) -> list[str]:
    """The parts that numbers of the device are like."""
    return sorted({number.like.device for number in numbers(device).values() if number.like})


def _scaled(path: str, number: Number, like: Like, cost: float) -> Number:
    """A time grows with the cost, a rate falls."""
    if unit_of(path.rsplit(".", 1)[-1]) == "s":
        value = number.value * cost
        return _assumed(value, value * like.low, value * like.high, number, like)
    value = number.value / cost
    return _assumed(value, value / like.high, value / like.low, number, like)


def _behind_queue(path: str, known: Mapping[str, Number], like: Like, idle: Number) -> Number:
    wait = max(0.0, known[path].value - known[IDLE[path]].value)
    return _assumed(
        idle.value + wait,
        idle.value + wait * like.low,
        idle.value + wait * like.high,
        known[path],
        like,
    )


def _assumed(value: float, low: float, high: float, number: Number, like: Like) -> Number:
    like = dataclasses.replace(like, fitted=number.kind in (Kind.FITTED, Kind.UNBOUND))
    return Number(
        value,
        Kind.ASSUMED,
        f"derived: as {like.device} ({number.source}), {MEANING[like.rule]}",
        low,
        high,
        like,
    )
