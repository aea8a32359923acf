"""Engine options that suit a model on a node: what a user gets without choosing anything."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from contextlib import suppress
from functools import lru_cache
from math import gcd
from typing import Any

from twin.errors import ConfigError, PlanError
from twin.hardware.types import Device, Node
from twin.models.formats import format_named
from twin.models.spec import ModelSpec
from twin.plan.options import ENGINE_GPUS, CollectiveKind, Options, Placement, RouterInput
from twin.plan.ranges import GPUS, check_least
from twin.plan.settle import not_by_own_rows
from twin.plan.types import Plan
from twin.schedule.choose import chooser_of
from twin.schedule.coded_tiles import coded_slot_bytes
from twin.schedule.ring import limits_of, ringed
from twin.schedule.rules import architecture_of, rule_for
from twin.schedule.splits import attention_of

SETTLED = (  # fields whose default depends on the model or the node
    "gpus",
    "blocks",
    "slot_bytes",
    "ring_slots",
    "window_slots",
    "head_window_slots",
    "collective",
    "placement",
    "weight_dtype",
    "kv_dtype",
    "max_context",
    "prompt_chunk",
    "lane_stagger_ns",
    "scanning_block_rows",
    "router_input",
)
OF_THE_RING = (
    "slot_bytes",
    "ring_slots",
    "window_slots",
    "head_window_slots",
    "scanning_block_rows",
)
DEFAULT = Options()
FIELDS = {field.name: field for field in dataclasses.fields(Options)}
# of the blocks must stay in use before equal shares are preferred over all blocks (judged, not
# measured)
EVEN_SHARE = 0.8
# of an NVIDIA block: mbarriers and what its warps signal each other take less
SIGNAL_BYTES = 2048


def plan_for(spec: ModelSpec, node: Node, **chosen: Any) -> Plan:
    """The plan of a model on a node with default options, except those given. It still has to pass
    `validate`.
    """
    spec = as_multiplied(spec, node, chosen)
    options = _node_options(spec, node, {**_of_a_rack(spec, node, chosen), **chosen})
    return ringed(spec, node, options, chosen)


def _of_a_rack(spec: ModelSpec, node: Node, chosen: Mapping[str, Any]) -> dict[str, Any]:
    """How many GPUs of a node beyond a board a plan takes: the most over which the model divides.
    Nothing where they were chosen, and on a board, where a plan takes all or is refused.
    """
    if "gpus" in chosen or node.gpus <= ENGINE_GPUS:
        return {}
    return {"gpus": _most_gpus(spec, node, tuple(sorted(chosen.items())))}


@lru_cache(maxsize=256)
def _most_gpus(spec: ModelSpec, node: Node, chosen: tuple[tuple[str, Any], ...]) -> int:
    for gpus in (n for n in reversed(GPUS) if n <= node.gpus):
        with suppress(PlanError):
            return plan_for(spec, node, **dict(chosen), gpus=gpus).options.gpus
    return node.gpus  # refused with the reason


def as_multiplied(spec: ModelSpec, node: Node, chosen: Mapping[str, Any]) -> ModelSpec:
    """The model as the node's engine multiplies it: a GGUF file's blocks stay on a CPU, become what
    ON_GPUS says on a GPU, and the weight type where somebody chose that. Raises ConfigError for
    blocks of no file on another node.
    """
    on_cpu = multiplies_blocks(node.device)
    turned = "weight_dtype" in chosen
    if spec.stored is None or (on_cpu and not turned):
        return spec
    if spec.stored.layers:
        plain = format_named(spec.dtype.value)
        return dataclasses.replace(spec, stored=spec.stored.turned(plain, on_gpus=not turned))
    blocks = [form.name for form in spec.coded if form.interleaved]
    if blocks and not on_cpu:
        raise ConfigError(
            f"{spec.name}: {node.device.name} does not multiply {blocks[0]}, only CPUs do; a GGUF "
            f"file's weights become {spec.dtype.value} there: leave out @{blocks[0]}"
        )
    return spec


def multiplies_blocks(device: Device) -> bool:
    """Does its engine multiply GGUF's blocks as a file stores them? Emulated GPUs are CPUs."""
    return device.sharing is not None


def default_options(spec: ModelSpec, node: Node, **chosen: Any) -> Options:
    """Options of a node: all its devices, one block per SM, CU or core, and a ring that fills the
    shared memory.

    `chosen` holds values of Options fields and always wins. Raises PlanError for a context beyond
    the model's.
    """
    spec = as_multiplied(spec, node, chosen)
    options = _node_options(spec, node, {**_of_a_rack(spec, node, chosen), **chosen})
    found = ringed(spec, node, options, chosen).options
    return dataclasses.replace(options, **{name: getattr(found, name) for name in OF_THE_RING})


def _node_options(spec: ModelSpec, node: Node, chosen: dict[str, Any]) -> Options:
    """All options but the ring's, whose size follows from the plan."""
    reaches = min(spec.context, chosen.get("max_context", spec.context))
    options = Options(
        weight_dtype=spec.dtype,
        kv_dtype=spec.cached or spec.dtype,
        gpus=node.gpus,
        context=max(1, min(DEFAULT.context, reaches)),
    )
    options = dataclasses.replace(
        options, **{"slot_bytes": coded_slot_bytes(spec.coded, DEFAULT.slot_bytes), **chosen}
    )
    check_least(options)
    ranks = spec.lanes.count if spec.lanes else options.gpus
    settled: dict[str, Any] = {
        "max_context": _max_context(spec, options),
        "blocks": _blocks(spec, node, options, ranks),
        "collective": _collective(options, ranks),
        "placement": _placement(node, options, ranks),
        "lane_stagger_ns": _lane_stagger_ns(spec, node, options),
    }
    options = dataclasses.replace(
        options, **{name: value for name, value in settled.items() if name not in chosen}
    )
    if "router_input" not in chosen:
        options = dataclasses.replace(options, router_input=_router_input(spec, node, options))
    if "prompt_chunk" not in chosen:
        options = dataclasses.replace(
            options, prompt_chunk=_prompt_chunk(spec, node, options, ranks)
        )
    return options


def _max_context(spec: ModelSpec, options: Options) -> int:
    if options.context > spec.context:
        raise PlanError(
            f"context={options.context}: {spec.name} reaches {spec.context} positions; choose at "
            "most that many"
        )
    return min(spec.context, max(DEFAULT.max_context, options.context))


def _collective(options: Options, ranks: int) -> CollectiveKind:
    """Between kernels a library does what a resident kernel has to do itself."""
    if ranks == 1:
        return CollectiveKind.NONE
    # lanes of one GPU need no library
    between_kernels = not options.resident and options.gpus > 1
    return CollectiveKind.LIBRARY if between_kernels else CollectiveKind.PUSH


def _router_input(spec: ModelSpec, node: Node, options: Options) -> RouterInput:
    """Each block's own rows where it has code for that: GPT-OSS-20B then takes an H200 1.6 % less
    time, Qwen3-30B-A3B in FP8 3.9 %.
    """
    refused = not_by_own_rows(spec, options, limits_of(node))
    return RouterInput.WHOLE if refused else RouterInput.OWN


def _placement(node: Node, options: Options, ranks: int) -> Placement:
    """On AMD what the kernel can do: nobody knows in which stack a page lies. Numbers by die are
    predicted to gain something only where lanes share a GPU, each of them then on one die.
    """
    if not node.device.amd:
        return options.placement
    return Placement.BY_DIE if ranks > options.gpus else Placement.FLAT


def _lane_stagger_ns(spec: ModelSpec, node: Node, options: Options) -> int:
    """More than 0 where several lanes take turns at one GPU's memory in a resident kernel."""
    share = spec.lanes is not None and spec.lanes.count > options.gpus and options.polled
    rule = rule_for(architecture_of(node.device), "lane_stagger_ns", {"lanes_share": share})
    return int(rule.value) if rule else 0


def _prompt_chunk(spec: ModelSpec, node: Node, options: Options, ranks: int) -> int:
    """As many tokens as the tensor cores and an NVIDIA block's shared memory take.

    A CPU takes any number; 16 were 3.6 times faster than one. On AMD's GPUs prompts are read by
    ordinary steps: nobody has written passes for them.
    """
    if node.device.amd:
        return 1
    limits, blocks = limits_of(node), max(1, options.blocks // max(1, ranks // options.gpus))
    chooser = chooser_of(limits)
    own = attention_of(chooser, limits, spec, options, ranks=ranks, blocks=blocks)
    if not own:  # what the kernel does not run reads prompts by ordinary steps
        return 1
    room = limits.on_chip_bytes - SIGNAL_BYTES
    # plans with heads of several shapes have no passes
    return chooser.prompt_chunk(spec, own[0], options, blocks=blocks, room=room)


def _blocks(spec: ModelSpec, node: Node, options: Options, ranks: int) -> int:
    """One per SM, CU or core; on several dies a few less where that gives every block the same
    share of every matrix.

    The MI300X has 304 CUs: Laneformer's 768, 1,536 and 3,072 outputs divide over 256 of them; such
    a grid was measured elsewhere to stream 4.09 of 4.82 TB/s, so equal shares are judged, not
    measured, to be worth it. On an H200 they were worth nothing: Llama-3.2-1B took 1,347 us on 132
    blocks and 1,338 us on 128; lanes divide its SMs anyway.
    """
    device = node.device
    emulated = device.sharing is not None  # then all GPUs share this computer's cores
    most = max(1, device.blocks // options.gpus) if emulated else device.blocks
    lanes = max(1, ranks // options.gpus)
    per_rank = max(1, most // lanes)
    if spec.lanes is None and not chooser_of(limits_of(node)).even_shares:
        return most
    even = _largest_divisor(_common_outputs(spec, ranks), per_rank)
    return lanes * (even if even >= EVEN_SHARE * per_rank else per_rank)


def _common_outputs(spec: ModelSpec, ranks: int) -> int:
    """Greatest common divisor of the outputs of a layer's matrices on one rank."""
    # Of a layout the sizes that it shows: no kernel of ours runs it, so which blocks suit it is
    # judged.
    heads, kv_heads = (
        max(1, spec.heads // ranks),
        1 if spec.layout else max(1, spec.kv_heads // ranks),
    )
    return gcd(
        (heads + 2 * kv_heads) * spec.head_dim,
        spec.hidden,
        spec.ffn if spec.layout else spec.ffn // ranks,
    )


def _largest_divisor(number: int, most: int) -> int:
    return next(d for d in range(min(number, most), 0, -1) if number % d == 0)
