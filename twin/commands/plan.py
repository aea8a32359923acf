"""`twin plan`: the schedule of one decode step, its budgets and its floor."""

from __future__ import annotations

import argparse
import dataclasses
from collections import defaultdict
from typing import Any

from twin.commands.arguments import Subparsers, add_engine_options, add_model, add_node, command
from twin.commands.inputs import case_of
from twin.commands.output import emit
from twin.hardware.floor import ceiling, exchange_floor_s, floor_s
from twin.hardware.types import Node
from twin.plan.options import Options
from twin.plan.types import Plan
from twin.report import words
from twin.report.tables import count, facts, percent, table
from twin.schedule.choose import schedule_of
from twin.study.gpus import Offer, compared, default_gpus, offers, said
from twin.units import format_quantity, parse_quantity

EXAMPLES = """\
  twin plan laneformer-2b 8xmi300x
  twin plan qwen3-8b 4xh200 --context 4096 --blocks 128
  twin plan llama-3.1-8b 8xh200 --execution graph --collective library"""

ON_CHIP, MEMORY = IN_BYTES = ("on-chip memory per block", "device memory per GPU")


def add(commands: Subparsers) -> None:
    parser = command(
        commands,
        "plan",
        run,
        usage="MODEL NODE [options]",
        summary="show the schedule of one decode step, its budgets and its floor",
        text="A plan says which block computes, waits for and publishes what. It is proven free of "
        "deadlock and races\nbefore anything runs it; the engine and the twin walk this same "
        "plan." + words.lines(words.OF_A_PLAN),
        examples=EXAMPLES,
    )
    add_model(parser)
    add_node(parser)
    parser.add_argument(
        "--search",
        action="store_true",
        help="also simulate a few other divisions of the model over one NVIDIA GPU (attention "
        "splits), and name the options of a faster one",
    )
    add_engine_options(parser, without=("gpus",))


def run(args: argparse.Namespace) -> int:
    case = case_of(args)
    plan, node = case.plan(), case.node
    data = summary(plan, node)
    if args.search:
        division = case.division()
        data |= {"division": division.reason, "division_options": dict(division.options)}
    if compared(node, plan):
        found = offers(case.spec, node, case.options())
        data |= {"gpus": [dataclasses.asdict(one) for one in found]}
        data |= {"default_gpus": default_gpus(found)}
        bound = plan.awaited_exchanges * exchange_floor_s(node)
        data |= {"exchange_floor_s": bound}
        emit(args, data, "\n\n".join([text(plan, node, data), gpus_text(found, plan, bound)]))
        return 0
    emit(args, data, text(plan, node, data))
    return 0


def gpus_text(found: tuple[Offer, ...], plan: Plan, bound: float) -> str:
    """What each number of GPUs gains against fewer, and which one the engine takes by itself."""
    first = next((one for one in found if one.step_s), None)
    rows = []
    for one in found:
        if first is None or not one.step_s or not first.step_s:
            rows.append((one.gpus, "no plan", "", one.refusal))
            continue
        gain = "" if one is first else f"{first.step_s / one.step_s:.2f}x"
        waits = f"{percent(one.exchange)} of the step waits for other GPUs" if one.gpus > 1 else ""
        rows.append((one.gpus, count(1 / one.step_s), gain, waits))
    about = [("default", said(found))]
    if bound:
        about.append(
            (
                "exchanges",
                f"{plan.awaited_exchanges} a step, {format_quantity(bound, 's')} at least: each a "
                "store into another GPU and two trips to the cache",
            )
        )
    heads = ("GPUs", "tokens/s (predicted)", f"of {first.gpus if first else 1}", "because")
    return "\n\n".join([table(heads, rows), facts(about)])


def summary(plan: Plan, node: Node) -> dict[str, Any]:
    """The plan in numbers, for machines."""
    options, limits = plan.options, plan.limits
    floor = floor_s(node.device, node.gpus, plan.bytes_per_step())
    # over one step: how many, bytes streamed by all GPUs; waits, publications, resets of a rank
    kinds: dict[str, dict[str, int]] = defaultdict(
        lambda: dict.fromkeys(("count", "bytes", "waits", "publishes", "resets"), 0)
    )
    for stage in plan.stages:
        row = kinds[stage.kind.value]
        row["count"] += 1
        row["bytes"] += plan.moved_bytes(stage)
        row["waits"] += len(stage.reads)
        row["publishes"] += stage.publishes is not None
        row["resets"] += len(stage.resets)
    return {
        "name": plan.name,
        "node": node.name,
        "ranks": plan.ranks,
        "blocks_per_gpu": plan.options.blocks,
        "stages": len(plan.stages),
        "launches": plan.launches(),
        "weight_bytes": plan.weight_bytes(),
        "kv_bytes": plan.kv_bytes(),
        "bytes_per_step": plan.bytes_per_step(),
        "floor_s": floor,
        "floor_tokens_per_s": 1 / floor,
        "budgets": {
            name: {"used": used, "limit": limit}
            for name, used, limit in (
                ("blocks per GPU", options.blocks, limits.blocks),
                (ON_CHIP, schedule_of(plan).block_bytes, limits.on_chip_bytes),
                (MEMORY, plan.memory_bytes(), limits.memory_bytes),
                ("KV positions", options.context, options.max_context),
            )
        },
        "stage_kinds": dict(kinds),
        "options": options_json(plan.options),
        "schedule": schedule_of(plan).id,
        "simulation_only": plan.simulation_only(),
        "valid": True,
    }


def options_json(options: Options) -> dict[str, Any]:
    """The engine options in force, as the command line spells their values."""
    return {
        one.name: getattr(value := getattr(options, one.name), "value", value)
        for one in dataclasses.fields(options)
    }


def _division(data: dict[str, Any]) -> str:
    """What the search says, and the options that make what it found."""
    found = data["division_options"]
    words = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in found.items())
    return f"{data['division']}: {words}" if words else str(data["division"])


def text(plan: Plan, node: Node, data: dict[str, Any]) -> str:
    options = plan.options
    head = (
        f"{plan.spec.name if plan.spec else plan.name} on {node.gpus} x {node.device.title}\n"
        f"{len(plan.stages)} stages a step, {plan.ranks} rank{'s' if plan.ranks > 1 else ''} of "
        f"{plan.blocks} blocks, {options.execution.value}, hand-off {options.handoff.value}, "
        f"collective {options.collective.value}"
    )
    rows = [
        (
            kind,
            r["count"],
            f"{r['bytes'] / 1e6:,.1f}" if r["bytes"] else "",
            r["waits"],
            r["publishes"],
            r["resets"],
        )
        for kind, r in data["stage_kinds"].items()
    ]
    used = [
        (name, *_in_one_unit(budget["used"], budget["limit"], "B" if name in IN_BYTES else ""))
        for name, budget in data["budgets"].items()
    ]
    ring = (
        f"{options.ring_slots} slots of {format_quantity(options.slot_bytes, 'B')}, "
        f"{options.window_slots} in flight"
    )
    if options.head_window != options.window_slots:
        ring += f", {options.head_window} in the LM head"
    floor = f"{format_quantity(data['floor_s'], 's')}, {count(data['floor_tokens_per_s'])} tokens/s"
    about = [
        ("ring of a block", ring),
        *([("division", _division(data))] if "division" in data else []),
        ("weights per step", format_quantity(data["weight_bytes"], "B", binary=False)),
        (
            "caches per step",
            f"{format_quantity(data['kv_bytes'], 'B', binary=False)} at {options.context} "
            "positions",
        ),
        (
            "floor",
            f"{floor}: all bytes at {format_quantity(ceiling(node.device).value, 'B/s')} per GPU",
        ),
        ("kernel launches per step", f"{data['launches']}"),
        ("schedule", f"{data['schedule']}, the id that records of its runs have"),
        ("validated", "no deadlock, no race, every output written once, every budget kept"),
        *([("runs on", f"the twin only: {reason}")] if (reason := plan.simulation_only()) else []),
    ]
    kinds = table(("stage", "count", "MB", "waits", "publishes", "resets"), rows)
    return "\n\n".join([head, kinds, table(("budget", "used", "limit"), used), facts(about)])


def _in_one_unit(have: int, limit: int, unit: str) -> tuple[str, str]:
    """Both in the limit's unit, so that they can be compared: 225 of 227 KiB, not 231 kB of 227
    KiB.
    """
    remark = "" if have <= limit else " (shared)"
    if not unit:
        return format_quantity(have, unit), format_quantity(limit, unit) + remark
    said = format_quantity(limit, unit, binary=True)
    word = said.split()[-1]
    return f"{have / parse_quantity(f'1 {word}', unit):,.4g} {word}", said + remark
