"""Numbers of a part that nobody measured there: those of a part that somebody did, by one rule
each.

A device file that says `like` may leave out any number of FOLLOWS. A rule compares what is
published of both parts (their files, so a pointer chase with a pointer chase) and is applied to the
other part's number as it is best known, which may be a fit: `follow` is asked again with the fitted
part (twin.calibrate.node), so a new fit needs no change of any file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from twin.data import did_you_mean
from twin.errors import HardwareError
from twin.hardware.override import IDLE as IDLE
from twin.hardware.override import apply_fit, numbers
from twin.hardware.types import Device, Kind, Like, Number
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
# of a time here, or of one over a rate, over that there
COSTS: dict[str, Callable[[Device, Device], float]] = {
    CYCLES: _cycles,
    EXCHANGE: _exchange,
    SHARE: _share,
    MEMORY: _memory,
}
MEANING = {
    CYCLES: "the same cycles at this clock",
    EXCHANGE: "as many loads under way, by the latency of the cache where blocks exchange",
    SHARE: "copies as much larger as a block's share of the stream",
    MEMORY: "by memory latency",
    QUEUE: "the same wait behind the same queue",
}
FOLLOWS = {
    **dict.fromkeys(
        (
            "block.fp16_bytes_per_s",
            "block.bf16_bytes_per_s",
            "block.fp32_bytes_per_s",
            "block.row_s",
            "block.element_s",
            "block.stage_s",
            "block.kv_bytes_per_s",
            "warps.slice_s",
            "warps.reduction_s",
            "warps.item_s",
            "warps.vector_s",
            "warps.quads_s",
            "warps.ahead_s",
            "warps.group_s",
            "warps.tile_s",
            "warps.heads_s",
            "warps.round_s",
            "warps.unit_s",
            "warps.leave_s",
            "warps.split_s",
            "warps.int8_bytes_per_s",
            "warps.fp8_bytes_per_s",
            "warps.int4_bytes_per_s",
            "warps.fp4_bytes_per_s",
            "warps.whole_s",
            "warps.step_s",
            "warps.state_s",
            "warps.state_element_s",
            "warps.compare_s",
            "warps.settle_s",
            "l2.latency_s",
            "handoff.hop_s",
            "handoff.atomic_s",
            "handoff.fence_s",
        ),
        CYCLES,
    ),
    **dict.fromkeys(
        ("block.sample_element_s", "warps.gather_bytes_per_s", "warps.crowd_s"), EXCHANGE
    ),
    **dict.fromkeys(("warps.copy_s", "warps.watch_s"), SHARE),
    **dict.fromkeys(("launch.state_s", "warps.jitter_s"), MEMORY),
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


@dataclass(frozen=True, slots=True)
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
        section, leaf = path.split(".")
        inner = filled.get(section, {})
        if path in kinship.without or not isinstance(inner, Mapping) or leaf in inner:
            continue
        if path not in known:
            raise HardwareError(
                f"{reference.name} has no {path}: a part can only be like one whose warps are on "
                "file, such as h200-sxm"
            )
        like = Like(reference.name, rule, kinship.low, kinship.high)
        filled[section] = {
            **inner,
            leaf: Number(known[path].value, Kind.ASSUMED, known[path].source, like=like),
        }
    return filled


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
