"""One decode step of an ordinary engine: kernel after kernel, as a CUDA graph or launched one by
one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from twin.batching.costs import KV_BYTES, Costs, Ideal, Load, Measured
from twin.batching.kernels import (
    QUANTISED,
    AllReduce,
    Attention,
    Experts,
    HeadProduct,
    LatentScan,
    Product,
    Row,
    Work,
    check_memory,
    launched,
)
from twin.batching.tables import load_tables, stack_names
from twin.errors import ConfigError
from twin.hardware.types import Node
from twin.models.spec import ModelSpec

IDEAL = "ideal"
GRAPH, EAGER = "graph", "eager"
KIND: dict[type, str] = {
    Product: "product",
    HeadProduct: "product",
    Experts: "experts",
    Attention: "attention",
    LatentScan: "attention",
    Row: "row",
    AllReduce: "allreduce",
}


@dataclass(frozen=True)
class Step:
    """The kernels of one step and their times. The slowest GPU is any of them: all do the same."""

    kernels: tuple[tuple[Work, float], ...]  # (work, seconds) in order
    load: Load
    launch_s: float  # from one launch by the host to its next
    rests_on: str
    prompts_s: float = 0.0  # that it waits for other users' prompts, on average

    @cached_property
    def graph_s(self) -> float:
        """As a CUDA graph: each time already holds the border to the kernel before it."""
        return sum(seconds for _, seconds in self.kernels)

    @property
    def served_s(self) -> float:
        """Between two tokens of one of several users: a step, and its share of their prompts."""
        return self.graph_s + self.prompts_s

    @cached_property
    def eager_s(self) -> float:
        """Launched one by one: a kernel starts when it has been launched and the one before it is
        done.
        """
        end = 0.0
        for index, (_, seconds) in enumerate(self.kernels):
            end = max(end, (index + 1) * self.launch_s) + seconds
        return end

    def seconds(self, execution: str = GRAPH) -> float:
        return self.graph_s if execution == GRAPH else self.eager_s

    def tokens_per_s(self, execution: str = GRAPH) -> float:
        """Of one sequence."""
        return 1 / self.seconds(execution)

    def by_kind(self) -> dict[str, float]:
        """Seconds a step by what the kernels do, in the words of KIND."""
        times: dict[str, float] = defaultdict(float)
        for work, seconds in self.kernels:
            times[KIND[type(work)]] += seconds
        return dict(times)


def costs_of(node: Node, stack: str) -> Costs:
    """The times of a stack's kernels on a node. Raises ConfigError and HardwareError for what was
    not measured.
    """
    if stack == IDEAL:
        return Ideal(node)
    return Measured(load_tables(node.device.name, stack), node.gpus)


@lru_cache(maxsize=512)
def predict(
    spec: ModelSpec, node: Node, stack: str, load: Load, weights: str = "as stored"
) -> Step:
    """One decode step of `stack` on all GPUs of the node.

    `stack`: one of stack_names(), or "ideal" for kernels without loss. `weights`: "as stored", or
    "fp8" for 16-bit matrices made FP8. Raises ConfigError, PlanError or HardwareError for what
    cannot be served or was not measured.
    """
    for name, value, allowed in (
        ("weights", weights, QUANTISED),
        ("kv", load.kv, KV_BYTES),
        ("stack", stack, [*stack_names(), IDEAL]),
    ):
        if value not in allowed:
            raise ConfigError(f"{name}={value!r}: allowed are {', '.join(allowed)}")
    if load.sequences < 1 or not 1 <= load.context <= spec.context:
        raise ConfigError(
            f"{load.sequences} sequences of {load.context} positions: at least one sequence, and "
            f"1 to {spec.context} positions"
        )
    check_memory(spec, node, weights=weights, sequences=load.sequences, context=load.context)
    costs = costs_of(node, stack)
    rope = int(costs.tables.stack.rope_kernels.value) if isinstance(costs, Measured) else 1
    work = tuple(launched(spec, node.gpus, rope_kernels=rope, weights=weights))
    known: dict[Work, float] = {}
    kernels = []
    for item in work:
        if item not in known:
            known[item] = costs.seconds(item, load)
        kernels.append((item, known[item]))
    launch_s = node.device.launch.stream_s.value
    return Step(tuple(kernels), load, launch_s, costs.rests_on(), _prompts_s(costs, work, load))


def _prompts_s(costs: Costs, work: Sequence[Work], load: Load) -> float:
    """Each other user's answer is as many of these steps as it has tokens, then its next prompt is
    read once.
    """
    if not load.prompt or not load.answer:
        return 0.0
    read_s = sum(costs.prompt_s(one, load.prompt) for one in work)
    return (load.sequences - 1) * read_s / load.answer
