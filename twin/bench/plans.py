"""The plans that one benchmark runs: the model resident and as a graph, a pure stream as the
ceiling, and on several GPUs an all-reduce of the model's size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from twin.calibrate.peer_probes import idle_exchange, loaded_exchange, stream_alone
from twin.errors import ConfigError, PlanError
from twin.hardware.types import Node
from twin.kernel.room import TO_RUN, check_room
from twin.models.spec import DType, ModelSpec
from twin.plan.options import CollectiveKind, Execution, Options, Sampling
from twin.plan.peer_probes import over_gpus
from twin.plan.types import Plan
from twin.proof.prove import prove
from twin.schedule.choose import schedule_of
from twin.schedule.options import plan_for
from twin.schedule.probe import stream_probe
from twin.schedule.ring import limits_of

PROBE_STAGES, PROBE_COLS = 4, 4096
# an all-reduce of the kernel's alone, next to a stream, and that stream without it
IDLE, LOADED, UNDISTURBED = "reduce-idle", "reduce-loaded", "reduce-stream"
# least: far beyond any cache; most: memory, and time a step
PROBE_BYTES = (1_000_000_000, 8_000_000_000)


@dataclass(frozen=True, slots=True)
class Plans:
    resident: Plan
    graph: Plan
    # streams on one GPU as many bytes as a GPU holds of the model's weights, within PROBE_BYTES
    ceiling: Plan
    # of several GPUs: STAGES all-reduces of the model's size a step, by what they are timed as
    exchanges: dict[str, Plan] = field(default_factory=dict)

    @property
    def gpus(self) -> int:
        return self.resident.options.gpus

    def all(self) -> list[Plan]:
        return [self.resident, self.graph, self.ceiling, *self.exchanges.values()]


def make_plans(
    spec: ModelSpec,
    node: Node,
    chosen: Mapping[str, Any],
    *,
    context: int,
    tokens: int,
    positions: int,
) -> Plans:
    """Proven plans for `tokens` timed steps after `context` cached positions, with room for
    `positions`.

    `chosen` holds values of Options fields. Raises ConfigError, PlanError or InvalidPlan.
    """
    for name in ("execution", "sampling", "context"):
        if name in chosen:
            raise ConfigError(
                f"--{name} {getattr(chosen[name], 'value', chosen[name])}: a benchmark on a GPU "
                "settles it; leave it out"
            )
    if positions > spec.context:
        raise ConfigError(
            f"the benchmark needs {positions} positions, {spec.name} reaches {spec.context}: "
            "lower --context or --tokens"
        )
    settled = {
        "max_context": positions,
        "context": context + tokens // 2,
        "sampling": Sampling.GREEDY,
        # graphs, too: no other collective exchanges between NVIDIA GPUs
        **({"collective": CollectiveKind.PUSH} if node.gpus > 1 else {}),
        **chosen,
    }
    if "weight_dtype" in chosen and "kv_dtype" not in chosen:
        # one 16-bit type for all, as the peers have it
        settled["kv_dtype"] = chosen["weight_dtype"]
    if settled["max_context"] < positions:
        raise ConfigError(
            f"--max-context {settled['max_context']}: the benchmark needs {positions} positions"
        )

    def planned(execution: Execution) -> Plan:
        options = {**settled, "execution": execution}
        made = fitted(lambda ring: plan_for(spec, node, **{**options, **ring}), chosen)
        check_room(made, node, options, advice=TO_RUN)
        prove(made)
        return made

    resident = planned(Execution.RESIDENT)
    graph, ceiling = planned(Execution.GRAPH), ceiling_probe(node, resident)
    return Plans(resident, graph, ceiling, exchange_probes(node, resident))


def exchange_probes(node: Node, plan: Plan) -> dict[str, Plan]:
    """All-reduces of as many FP32 as the plan's residual has, by as many blocks. None on one GPU;
    none next to a stream where vectors of that size leave no room for its ring.
    """
    gpus = plan.options.gpus
    if gpus == 1 or plan.spec is None:
        return {}
    limits = replace(limits_of(node), blocks=plan.options.blocks)
    hidden = plan.spec.hidden
    made = {IDLE: over_gpus(idle_exchange(limits, hidden), gpus)}
    loaded = over_gpus(loaded_exchange(limits, hidden), gpus)
    if schedule_of(loaded).block_bytes <= limits.on_chip_bytes:
        made |= {LOADED: loaded, UNDISTURBED: stream_alone(limits)}
    for probe in made.values():
        prove(probe)
    return made


def ceiling_probe(node: Node, plan: Plan) -> Plan:
    """A stream of a GPU's share of the model and of its type, read by every block of one device."""
    limits = limits_of(node)
    blocks = plan.options.blocks if limits.oversubscribe else limits.blocks
    base = Options(
        blocks=blocks, weight_dtype=plan.options.weight_dtype, slot_bytes=Options().slot_bytes
    )
    share = plan.weight_bytes() // plan.options.gpus
    wanted = min(max(share, PROBE_BYTES[0]), PROBE_BYTES[1])
    grain = blocks * base.tile_rows
    rows = -(-wanted // (PROBE_STAGES * PROBE_COLS * base.weight_dtype.bytes * grain)) * grain

    def make(ring: Mapping[str, Any]) -> Plan:
        return stream_probe(
            replace(base, **ring), limits, rows=rows, cols=PROBE_COLS, stages=PROBE_STAGES
        )

    room = max(1, limits.on_chip_bytes // base.slot_bytes)
    made = fitted(lambda ring: make({"ring_slots": room, "window_slots": room, **ring}), {})
    prove(made)
    return made


def fitted(make: Callable[[Mapping[str, Any]], Plan], chosen: Mapping[str, Any]) -> Plan:
    """The plan with as many ring slots as its kernel's shared memory leaves room for; a chosen ring
    is left alone.
    """
    plan = make({})
    over = schedule_of(plan).block_bytes - plan.limits.on_chip_bytes
    if over <= 0 or "ring_slots" in chosen:
        return plan
    slots = plan.options.ring_slots - -(-over // plan.options.slot_bytes)
    if slots < 1:
        raise PlanError(
            f"{plan.name}: its vectors leave {plan.limits.on_chip_bytes - over} of "
            f"{plan.limits.on_chip_bytes} bytes of shared memory, no slot of "
            f"{plan.options.slot_bytes} fits: choose smaller --slot-bytes"
        )
    return make(
        {"ring_slots": slots, "window_slots": min(slots, chosen.get("window_slots", slots))}
    )


def shape_peer(spec: ModelSpec, dtype: DType) -> ModelSpec:
    """What transformers times for the model: itself, or for lanes a Llama of the same dimensions,
    with full attention.
    """
    if spec.lanes is None:
        return replace(spec, dtype=dtype)
    rope = replace(spec.rope, style=type(spec.rope.style).HALF)
    return replace(
        spec,
        name=f"{spec.name} as a Llama",
        family="llama",
        lanes=None,
        windows=(0,) * spec.layers,
        rope=rope,
        dtype=dtype,
    )
