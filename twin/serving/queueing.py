"""Requests that arrive at random, wait, and are served one at a time or in batches: a SimPy simulation of a group of nodes."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import simpy

from twin.errors import ConfigError

Process = Generator[simpy.Event, Any, None]
StepTime = Callable[[int], float]  # sequences in the batch -> seconds of a step that gives each of them one token
FIXED, EXPONENTIAL = "fixed", "exponential"
WARM_UP = 0.1  # share of the requests that find the queue still filling; they are served, not counted


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests of one class: a Poisson stream, and the tokens that each asks for."""

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
    """What a group of nodes did."""

    requests: list[Request]  # in the order of arrival, warm-up left out
    busy_s: float  # node-seconds with at least one sequence, from the first arrival to the last departure
    elapsed_s: float
    tokens: float  # generated meanwhile

    def waits(self, traffic: str) -> npt.NDArray[np.float64]:
        return self._each(traffic, "waited")

    def took(self, traffic: str) -> npt.NDArray[np.float64]:
        return self._each(traffic, "took")

    def speeds(self, traffic: str) -> npt.NDArray[np.float64]:
        return self._each(traffic, "tokens_per_s")

    def _each(self, traffic: str, what: str) -> npt.NDArray[np.float64]:
        return np.array([getattr(request, what) for request in self.requests if request.traffic == traffic])


@dataclass(slots=True)
class _Node:
    """Continuous batching: up to `most` sequences advance together, one token a step, at the pace of the batch.

    All sequences are equally fast, so one counter of tokens per sequence is enough: a request ends when it has advanced by its tokens.
    """

    env: simpy.Environment
    step_s: StepTime
    most: int
    counter: float = 0.0  # tokens per sequence since the beginning
    since: float = 0.0  # time of that counter
    busy_s: float = 0.0
    ends: list[tuple[float, int, Request]] = field(default_factory=list)  # heap: (counter at the end, serial, request)
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
            self.counter += passed / self.step_s(len(self.ends))
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


def serve(traffic: Sequence[Traffic], *, nodes: int, batch: int, step_s: StepTime, requests: int, seed: int) -> Served:
    """First come, first served: a request starts on the emptiest node with a free place, or waits.

    `batch` 1 is one node per request. The same seed gives the same arrivals and lengths whatever serves them. Raises ConfigError.
    """
    if nodes < 1 or batch < 1 or requests < 10 or not traffic:
        raise ConfigError(f"nodes={nodes}, batch={batch}, requests={requests}: at least one of each, ten requests, and some traffic")
    arrivals = _arrivals(traffic, requests, seed)
    env = simpy.Environment()
    group = [_Node(env, step_s, batch) for _ in range(nodes)]
    waiting: deque[Request] = deque()
    left = len(arrivals)
    over = env.event()

    def place() -> None:
        while waiting and (free := [node for node in group if node.free]):
            min(free, key=lambda node: len(node.ends)).begin(waiting.popleft())

    def finished(_: Request) -> None:
        nonlocal left
        left -= 1
        place()
        if left == 0:
            over.succeed()

    def arrive() -> Process:
        for request in arrivals:
            yield env.timeout(request.arrived - env.now)
            waiting.append(request)
            place()

    for node in group:
        env.process(node.run(finished))
    env.process(arrive())
    env.run(until=over)
    counted = arrivals[int(WARM_UP * len(arrivals)) :]
    tokens = sum(request.tokens for request in arrivals)
    return Served(counted, sum(node.busy_s for node in group), env.now - arrivals[0].arrived, tokens)


def _arrivals(traffic: Sequence[Traffic], requests: int, seed: int) -> list[Request]:
    """`requests` of all classes together, in proportion to their rates, in the order of time."""
    for stream in traffic:
        if stream.per_s <= 0 or stream.tokens <= 0 or stream.distribution not in (FIXED, EXPONENTIAL):
            raise ConfigError(
                f"{stream.name}: {stream.per_s:g} requests/s of {stream.tokens:g} tokens, {stream.distribution}: rates and tokens are "
                f"positive, lengths {FIXED} or {EXPONENTIAL}"
            )
    random = np.random.default_rng(seed)
    rates = np.array([stream.per_s for stream in traffic])
    times = accumulate(random.exponential(1 / rates.sum(), requests))
    classes = random.choice(len(traffic), requests, p=rates / rates.sum())
    spread = random.exponential(1.0, requests)
    lengths = [traffic[c].tokens * (s if traffic[c].distribution == EXPONENTIAL else 1.0) for c, s in zip(classes, spread, strict=True)]
    return [Request(traffic[c].name, float(time), max(1.0, float(tokens))) for c, time, tokens in zip(classes, times, lengths, strict=True)]
