"""The read ceiling of a device, and the floor that follows from it: every floor, stream fraction
and share is taken from here.

There are two rates. `memory.ceiling_bytes_per_s` is what plain reads were measured to reach,
the denominator of a stream fraction. `memory.stream_bytes_per_s` is the rate of the pipe by which
the twin serves a stream: it is fitted together with latencies and windows, so it is a number of the
model and not of the memory. On an H200 they differ by half a percent.
"""

from __future__ import annotations

from twin.hardware.number import Number
from twin.hardware.types import Device, Node


def ceiling(device: Device) -> Number:
    """The rate at which the device's memory is read at most.

    A file without a measured ceiling means the rate of the pipe. So does a pipe that is faster than
    the ceiling's range, such as a what-if's: a step that the twin serves by it would else take less
    time than its floor. A fitted one within that range says no other than the measurement.
    """
    measured, pipe = device.memory.ceiling_bytes_per_s, device.memory.stream_bytes_per_s
    if measured is None:
        return pipe
    most = measured.value if measured.high is None else measured.high
    return pipe if pipe.value > most else measured


def floor_s(device: Device, gpus: int, moved_bytes: float) -> float:
    """Seconds in which `gpus` devices read so many bytes together, each at its ceiling."""
    return moved_bytes / (gpus * ceiling(device).value)


def exchange_floor_s(node: Node) -> float:
    """Seconds that an exchange between the node's GPUs takes at least, however few bytes it has.

    It is one store into another GPU's memory, and two round trips to the second-level cache: the
    poll that finds it, and the load of what lies next to it. 0 for one GPU.

    The form is that of a published model (arXiv 2607.16100: 0.792 + 2 x 0.306 us on GB200, at any
    number of GPUs); the numbers are the node's own.
    """
    if node.link is None:
        return 0.0
    trip = node.device.exchange.latency_s
    return node.link.hop_s.value + 2 * (trip.value if trip is not None else 0.0)
