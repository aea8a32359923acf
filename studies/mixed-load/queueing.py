"""Requests that arrive at random, wait, and are served one at a time or in batches: a SimPy
simulation of a group of nodes.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import simpy

from twin.batching.prices import HOUR_S
from twin.errors import ConfigError
from twin.frozen import frozen

Process = Generator[simpy.Event, Any, Any]
# sequences in the batch -> seconds of a step that gives each of them one token
StepTime = Callable[[int], float]
FIXED: Final = "fixed"
EXPONENTIAL: Final = "exponential"
DRAWS = 1024  # random numbers at a time: one by one they take most of the run
# part of the time whose requests count: before it the queue still fills, after it the last ones
# must end under load
COUNTED = (0.1, 0.75)


@frozen
class Traffic:
    """Requests of one class: a Poisson process, and the tokens that each requests."""

    name: str
    per_s: float
    tokens: float  # mean
    distribution: str = EXPONENTIAL  # of the tokens: FIXED or EXPONENTIAL


@dataclass(slots=True)
class Request:
    traffic: str
    arrived: float
    tokens: float
    begun: float = float("nan")  # of its first step
    done: float = float("nan")

    @property
    def waited(self) -> float:
        return self.begun - self.arrived

    @property
    def took(self) -> float:
        return self.done - self.arrived

    @property
    def tokens_per_s(self) -> float:
        """As its user sees it, waiting included."""
        return self.tokens / self.took


@dataclass(slots=True)
class Served:
    """What a group of nodes did during the counted part of the time."""

    requests: list[Request]  # that arrived in it, in order
    elapsed_s: float
    busy_s: float  # node-seconds with at least one sequence
    tokens: float  # generated

    def waits(self, traffic: str) -> npt.NDArray[np.float64]:
        return self._each(traffic, "waited")

    def took(self, traffic: str) -> npt.NDArray[np.float64]:
        return self._each(traffic, "took")

    def speeds(self, traffic: str) -> npt.NDArray[np.float64]:
        return self._each(traffic, "tokens_per_s")

    def _each(self, traffic: str, what: str) -> npt.NDArray[np.float64]:
        return np.array(
            [getattr(request, what) for request in self.requests if request.traffic == traffic]
        )


@dataclass(slots=True)
class _Node:
    """Continuous batching: up to `most` sequences advance together, one token a step, at the pace
    of the batch.

    All sequences are equally fast, so one counter of tokens per sequence is enough: a request ends
    when it has advanced by its tokens.
    """

    env: simpy.Environment
    step_s: StepTime
    most: int
    counter: float = 0.0  # tokens per sequence since the beginning
    since: float = 0.0  # time of that counter
    busy_s: float = 0.0
    tokens: float = 0.0  # of all sequences
    # heap: (counter at the end, serial, request)
    ends: list[tuple[float, int, Request]] = field(default_factory=list)
    serial: int = 0
    changed: simpy.Event = field(init=False)

    def __post_init__(self) -> None:
        self.changed = self.env.event()

    @property
    def free(self) -> bool:
        return len(self.ends) < self.most

    def advance(self) -> None:
        """The counter up to now, at the pace of the batch that has been running."""
        passed = self.env.now - self.since
        if self.ends:
            steps = passed / self.step_s(len(self.ends))
            self.counter += steps
            self.tokens += steps * len(self.ends)
            self.busy_s += passed
        self.since = self.env.now

    def begin(self, request: Request) -> None:
        self.advance()
        request.begun = self.env.now
        self.serial += 1
        heapq.heappush(self.ends, (self.counter + request.tokens, self.serial, request))
        changed, self.changed = self.changed, self.env.event()
        changed.succeed()

    def run(self, finished: Callable[[Request], None]) -> Process:
        """Sleeps until the next sequence ends or another joins."""
        while True:
            if not self.ends:
                yield self.changed
                continue
            left = max(0.0, self.ends[0][0] - self.counter) * self.step_s(len(self.ends))
            changed = self.changed
            yield self.env.timeout(left) | changed
            if changed.processed:
                continue
            self.advance()
            end, _, request = heapq.heappop(self.ends)
            self.counter = max(self.counter, end)  # no rounding error outlives a sequence
            request.done = self.env.now
            finished(request)


def serve(
    traffic: Sequence[Traffic], *, nodes: int, batch: int, step_s: StepTime, hours: float, seed: int
) -> Served:
    """First come, first served: a request starts on the emptiest node with a free place, or waits.

    `batch` 1 is one node per request. Requests arrive for `hours`; the part COUNTED of them is
    reported. The same seed gives the same arrivals and lengths whatever serves them. Raises
    ConfigError.
    """
    if nodes < 1 or batch < 1 or hours <= 0 or not traffic:
        raise ConfigError(
            f"nodes={nodes}, batch={batch}, hours={hours:g}: at least one node, one place on it, "
            "some time and some traffic"
        )
    begin, end = (part * hours * HOUR_S for part in COUNTED)
    arrivals = list(
        heapq.merge(
            *(_arrivals(users, hours * HOUR_S, seed) for users in traffic),
            key=lambda request: request.arrived,
        )
    )
    counted = [request for request in arrivals if begin <= request.arrived < end]
    if not counted:
        raise ConfigError(
            f"hours={hours:g}: nobody arrives between {begin:.0f} and {end:.0f} s; simulate "
            "longer or more traffic"
        )
    group = _Group(simpy.Environment(), nodes, batch, step_s)
    return group.serve(arrivals, counted, begin, end)


class _Group:
    """Equal nodes behind one queue."""

    def __init__(self, env: simpy.Environment, nodes: int, batch: int, step_s: StepTime) -> None:
        self.env = env
        self.nodes = [_Node(env, step_s, batch) for _ in range(nodes)]
        self.waiting: deque[Request] = deque()

    def serve(
        self, arrivals: Sequence[Request], counted: Sequence[Request], begin: float, end: float
    ) -> Served:
        """Until the last of `counted` is done; busy time and tokens between `begin` and `end`."""
        left = {id(request) for request in counted}
        over = self.env.event()

        def finished(request: Request) -> None:
            self._place()
            left.discard(id(request))
            if not left and not over.triggered:
                over.succeed()

        for node in self.nodes:
            self.env.process(node.run(finished))
        self.env.process(self._arrive(arrivals))
        readings: list[tuple[float, float]] = []
        self.env.process(self._read(begin, readings))
        self.env.run(until=over & self.env.process(self._read(end, readings)))
        (busy, tokens), (busy_end, tokens_end) = readings
        return Served(list(counted), end - begin, busy_end - busy, tokens_end - tokens)

    def _place(self) -> None:
        while self.waiting:
            node = min(self.nodes, key=lambda node: len(node.ends))
            if not node.free:
                return
            node.begin(self.waiting.popleft())

    def _arrive(self, arrivals: Sequence[Request]) -> Process:
        for request in arrivals:
            yield self.env.timeout(request.arrived - self.env.now)
            self.waiting.append(request)
            self._place()

    def _read(self, time: float, readings: list[tuple[float, float]]) -> Process:
        """Notes busy node-seconds and tokens of all nodes up to a time."""
        yield self.env.timeout(time)
        for node in self.nodes:
            node.advance()
        readings.append(
            (sum(node.busy_s for node in self.nodes), sum(node.tokens for node in self.nodes))
        )


def _arrivals(users: Traffic, until_s: float, seed: int) -> Iterator[Request]:
    """Requests of one class in the order of time. They depend on the seed and the class alone, so
    policies are compared on equal ones.
    """
    if users.per_s <= 0 or users.tokens <= 0 or users.distribution not in (FIXED, EXPONENTIAL):
        raise ConfigError(
            f"{users.name}: {users.per_s:g} requests/s of {users.tokens:g} tokens, "
            f"{users.distribution}: rates and tokens are positive, lengths {FIXED} or {EXPONENTIAL}"
        )
    random = np.random.default_rng([seed, *users.name.encode()])
    time = 0.0
    while True:
        pauses, lengths = (
            random.exponential(1 / users.per_s, DRAWS).tolist(),
            random.exponential(users.tokens, DRAWS).tolist(),
        )
        for pause, length in zip(pauses, lengths, strict=True):
            time += pause
            if time >= until_s:
                return
            yield Request(
                users.name,
                time,
                max(1.0, length if users.distribution == EXPONENTIAL else users.tokens),
            )
