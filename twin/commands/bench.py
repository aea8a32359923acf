"""`twin bench`: the engine's speed, with its results checked in the same run."""

from __future__ import annotations

import argparse
import statistics
from functools import partial
from pathlib import Path
from typing import Any

from twin.bench import record, result
from twin.bench.machine import Clocks, commit, gpu_states
from twin.bench.measure import Bench, Settings, check_logits
from twin.bench.plans import make_plans
from twin.bench.rounds import Rounds, check_accepted, time_rounds
from twin.bench.source import find_source
from twin.calibrate import store
from twin.calibrate.node import calibrated_node
from twin.commands.arguments import (
    Subparsers,
    add_engine_options,
    add_model,
    chosen_options,
    command,
    folder_to_write,
    whole,
)
from twin.commands.drafts import add_draft, headed
from twin.commands.output import Progress, done, emit, progress, say, warn_if_busy
from twin.cost.drafting import Drafter, drafting_s
from twin.cost.rounds import round_time
from twin.engine.choose import check_present, compile_all, open_engine
from twin.engine.opening import check_runs_here, open_source, plan_run
from twin.engine.session import Session
from twin.errors import ConfigError, EngineError, ToolchainError
from twin.files import check_folder
from twin.hardware.types import HOST, Node
from twin.plan.types import Plan
from twin.report.tables import count, facts, percent, table
from twin.text import shown
from twin.units import format_quantity

# the model's context is the limit; this one only keeps numbers that no list could hold away
MOST_TOKENS = 2**31 - 1
MOST_REPEATS = 10_000
DRAFTS = 7  # of a round, where --force-acceptance is given alone
NOT_MET = 1  # exit code when what was measured does not keep its promises
# a longer one is judged only on demand: the engine's logits of all positions must fit in memory
FIDELITY_CONTEXT = 1024
HOST_DEFAULTS = {"context": 16, "tokens": 48}
GPU_DEFAULTS = {"context": 128, "tokens": 500}
GPU_ONLY = ("fidelity", "fidelity_context", "determinism", "peers", "fill", "out", "commit")
EXAMPLES = """\
  twin bench ./my-checkpoint
  twin bench llama-3.2-1b --random 1 --tokens 32 --repeats 3
  twin bench ./my-checkpoint --node h200-sxm --context 1024
  twin bench llama-3.2-1b --random 1 --node 2xh100
  twin bench smollm2-360m --random 1 --draft lookup:3 --force-acceptance 2.7
  twin bench laneformer-2b --random 1 --node h200-sxm --context 32 --dtype fp16 --determinism"""


def add(commands: Subparsers) -> None:
    parser = command(
        commands,
        "bench",
        run,
        usage="MODEL [--node NODE] [options]",
        summary="measure the engine's speed, with correctness checked in the same run",
        text="Compares logits with the NumPy reference first, then times greedy decoding: every "
        "repeat must give the same tokens.\n"
        "On this computer's CPU (default) and on an AMD GPU: the median and the spread with the "
        "memory's ceiling and the twin's prediction.\n"
        "On an NVIDIA GPU: judges the timed outputs against an FP32 reference and Hugging "
        "Face in the same 16-bit type, times engine,\n"
        "graph mode, Hugging Face eager and in a captured CUDA graph, and the ceiling probe "
        "in alternating order, and records it all.\n"
        "On several NVIDIA GPUs also: the kernel's all-reduce, NCCL's of the same size in a CUDA "
        "graph, and Hugging Face's tensor parallelism.",
        examples=EXAMPLES,
    )
    add_model(parser)
    parser.add_argument(
        "--node",
        default=HOST,
        metavar="NODE",
        help="host (default), 1xh200 for this computer's NVIDIA GPU, 2xh200 for two of them, "
        "1xmi300x for an AMD GPU",
    )
    parser.add_argument(
        "--context",
        "--prompt-length",
        type=whole,
        metavar="N",
        help="positions cached before timing (host 16, GPU 128)",
    )
    parser.add_argument(
        "--tokens",
        type=whole,
        metavar="N",
        help="tokens decoded and timed a repeat (host 48, GPU 500)",
    )
    parser.add_argument(
        "--repeats",
        type=whole,
        default=5,
        metavar="N",
        help="repeats after one to warm up (default %(default)s)",
    )
    parser.add_argument(
        "--check",
        type=whole,
        default=4,
        metavar="N",
        help="positions compared with the NumPy reference (default %(default)s)",
    )
    parser.add_argument(
        "--random",
        type=whole,
        metavar="SEED",
        help="random weights instead of a checkpoint: text without sense, true speed",
    )
    parser.add_argument(
        "--gpus",
        type=whole,
        metavar="N",
        help="emulated GPUs on this CPU: 1, 2, 4 or 8 (default 1)",
    )
    parser.add_argument(
        "--force-acceptance",
        type=float,
        metavar="TOKENS",
        help="time rounds with drafts instead of steps: so many tokens of a round count, whatever "
        f"the model says (drafts: --draft, default lookup:{DRAFTS})",
    )
    add_gpu_options(parser)
    add_draft(parser)
    add_engine_options(parser, without=("gpus", "context", "sampling", "draft", "lookup"))


def add_gpu_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("on a GPU")
    group.add_argument(
        "--fidelity",
        type=whole,
        metavar="N",
        help="prompts whose outputs are judged against FP32 (default 8)",
    )
    group.add_argument(
        "--fidelity-context",
        type=whole,
        metavar="N",
        help=f"their prompt tokens (default: --context, at most {FIDELITY_CONTEXT})",
    )
    group.add_argument(
        "--determinism",
        action="store_true",
        default=None,
        help="five runs of 1,000 tokens must agree bit by bit; the cache is made large enough for "
        "them",
    )
    group.add_argument(
        "--peers",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="Hugging Face next to the engine, and its logits (default: yes)",
    )
    group.add_argument(
        "--fill",
        choices=("prompt", "steps"),
        metavar="{prompt,steps}",
        help="cached positions come from a prompt, or are generated one by one (default prompt)",
    )
    group.add_argument(
        "--out",
        type=folder_to_write,
        metavar="FOLDER",
        help="where the record's folder is made (default calibration/runs/NODE)",
    )
    group.add_argument(
        "--commit", metavar="ID", help="the code's commit, where it is no git checkout"
    )


def run(args: argparse.Namespace) -> int:
    node = calibrated_node(args.node)
    # on AMD's GPUs as on a CPU: graphs, and Hugging Face next to the engine, are NVIDIA's alone
    forced = args.force_acceptance is not None
    simple = node.device.isa == HOST or node.device.amd or forced
    for name, value in (HOST_DEFAULTS if simple else GPU_DEFAULTS).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    return next_to_reference(args, node) if simple else on_gpu(args, node)


# ---- this computer's CPU, an AMD GPU, rounds with drafts -----------------------------------------


def next_to_reference(args: argparse.Namespace, node: Node) -> int:
    from twin.sim.run import simulate  # a GPU machine needs no simulator

    given = [name for name in GPU_ONLY if getattr(args, name) is not None]
    if given:
        option = f"--{given[0].replace('_', '-')}"
        raise ConfigError(
            f"{option} is for NVIDIA GPUs: leave it out"
            if node.device.amd
            else f"{option} needs a GPU: name it with --node"
            if node.device.isa == HOST
            else f"{option}: not with --force-acceptance"
        )
    for name, least, most in (
        ("context", 1, MOST_TOKENS),
        ("tokens", 2, MOST_TOKENS),
        ("repeats", 1, MOST_REPEATS),
        ("check", 1, MOST_TOKENS),
    ):
        if not least <= getattr(args, name) <= most:
            raise ConfigError(
                f"--{name} {shown(getattr(args, name))}: at least {least}, at most {most}"
            )
    if args.gpus is not None:
        if node.device.isa != HOST:
            check_unnamed(args, node)
        node = calibrated_node(f"{args.gpus}x{HOST}")
    check_runs_here(node)
    chosen = chosen_options(args)
    if args.force_acceptance is not None:
        chosen = {"lookup": DRAFTS} | chosen
        check_accepted(args.force_acceptance, chosen["lookup"])
    opened = open_source(args.model, args.random, chosen.get("weight_dtype"), text=False)
    source = headed(opened, args.draft_head)
    plan = plan_run(source.spec, node, chosen, positions=args.context + args.tokens, greedy=True)
    prompt = [(7 + 13 * at) % source.spec.vocab for at in range(args.context)]
    show = progress()
    warn_if_busy()
    try:
        with open_engine(node.device, plan, source.weights) as engine:
            show(f"comparing {args.check} positions with the reference")
            found = check_logits(engine, plan, source.weights, prompt[: args.check])
            if args.force_acceptance is not None:
                rounds = time_rounds(
                    engine,
                    prompt,
                    tokens=args.tokens,
                    repeats=args.repeats,
                    accepted=args.force_acceptance,
                    show=show,
                )
                data = rounds_json(plan, node, rounds) | {"logit_difference": found.difference}
                emit(args, data, rounds_text(data))
                return 0
            samples = time_host(engine, prompt, args.tokens, args.repeats, show)
        show("predicting")
        predicted = simulate(plan, node)
    finally:
        done()
    median = statistics.median(samples)
    data = {
        "model": source.spec.name,
        "tokens_per_s": median,
        "samples": samples,
        "spread": (max(samples) - min(samples)) / median,
        "stream_bytes_per_s": plan.bytes_per_step() * median,
        "stream_fraction": predicted.floor_s * median,
        "predicted_tokens_per_s": predicted.tokens_per_s,
        "prediction_error": predicted.tokens_per_s / median - 1,
        "logit_difference": found.difference,
        "blocks_per_gpu": plan.options.blocks,
        "gpus": plan.options.gpus,
    }
    emit(args, data, host_text(data, predicted.stream_bytes_per_s))
    return 0


def rounds_json(plan: Plan, node: Node, made: Rounds) -> dict[str, Any]:
    """What was timed, and what the twin predicts of it."""
    context = plan.options.context - 1
    by_head = plan.spec is not None and plan.spec.draft_head is not None
    drafter = Drafter.EAGLE3 if by_head else Drafter.LOOKUP
    guess = round_time(
        plan, node, context=max(0, context - made.drafts), tokens=made.drafts + 1
    ).seconds + drafting_s(plan, node, drafter, drafts=made.drafts, accepted=made.tokens_per_round)
    median = statistics.median(made.samples)
    return {
        "model": plan.spec.name if plan.spec else plan.name,
        "tokens_per_s": median,
        "samples": list(made.samples),
        "spread": (max(made.samples) - min(made.samples)) / median,
        "drafts": made.drafts,
        "tokens_per_round": made.tokens_per_round,
        "round_s": made.round_s,
        "step_s": made.step_s,
        "verify_cost": made.round_s / made.step_s,
        "predicted_round_s": guess,
        "prediction_error": guess / made.round_s - 1,
    }


def rounds_text(data: dict[str, Any]) -> str:
    return facts(
        [
            (
                "tokens/s",
                f"{count(data['tokens_per_s'])}  (measured, median of {len(data['samples'])}, "
                f"spread {percent(data['spread'])}; {data['tokens_per_round']:.2f} tokens a round "
                "are taken for accepted)",
            ),
            (
                "a round",
                f"{format_quantity(data['round_s'], 's')} of {data['drafts'] + 1} tokens, "
                f"{data['verify_cost']:.2f} steps of {format_quantity(data['step_s'], 's')}",
            ),
            (
                "predicted",
                f"{format_quantity(data['predicted_round_s'], 's')} a round, "
                f"{percent(data['prediction_error'], signed=True)}",
            ),
            (
                "logits",
                f"within {data['logit_difference']:.1e} of the reference, relative; all repeats "
                "gave the same tokens",
            ),
        ]
    )


def time_host(
    engine: Session, prompt: list[int], tokens: int, repeats: int, show: Progress
) -> list[float]:
    """Tokens per second of each repeat, after one to warm up. Raises EngineError when repeats
    disagree.
    """
    first = engine.generate(prompt, max_tokens=tokens)
    samples = []
    for repeat in range(repeats):
        show(f"repeat {repeat + 1}/{repeats}")
        made = engine.generate(prompt, max_tokens=tokens)
        if made.stop_reason == "cancelled":
            raise KeyboardInterrupt
        if made.tokens != first.tokens:
            raise EngineError(
                f"repeat {repeat + 1} gave other tokens than the first: the engine is not "
                "deterministic here, report this plan"
            )
        samples.append(made.tokens_per_s)
    return samples


def host_text(data: dict[str, Any], ceiling: float) -> str:
    return facts(
        [
            (
                "tokens/s",
                f"{count(data['tokens_per_s'])}  (measured, median of {len(data['samples'])}, "
                f"spread {percent(data['spread'])})",
            ),
            (
                "streaming",
                f"{format_quantity(data['stream_bytes_per_s'], 'B/s')} of "
                f"{format_quantity(ceiling, 'B/s')}",
            ),
            ("stream fraction", percent(data["stream_fraction"])),
            (
                "predicted",
                f"{count(data['predicted_tokens_per_s'])} tokens/s, "
                f"{percent(data['prediction_error'], signed=True)}",
            ),
            (
                "logits",
                f"within {data['logit_difference']:.1e} of the reference, relative; all repeats "
                "gave the same tokens",
            ),
        ]
    )


# ---- a GPU ---------------------------------------------------------------------------------------


def on_gpu(args: argparse.Namespace, node: Node) -> int:
    """Everything that can be refused is, before the weights are made."""
    check_unnamed(args, node)
    check_present(node.device, node.gpus)
    settings = settings_of(args)
    out = args.out or check_folder(store.runs_folder(node.name))
    code = commit(Path(__file__).resolve().parents[2], args.commit)
    chosen = chosen_options(args)
    found = find_source(args.model, args.random)
    settings.check_for(found.spec)
    plans = make_plans(
        found.spec,
        node,
        chosen,
        context=settings.context,
        tokens=settings.tokens,
        positions=settings.positions,
    )
    driver = str(gpu_states()[0]["driver"])
    show, clocks = progress(), Clocks(node.gpus)
    try:
        guess = predicted(plans.resident, node, show)
        refused = compile_all(node.device, plans.all(), show)
        if refused:
            raise ToolchainError(next(iter(refused.values())))
        show("making the weights")
        source = found.load(plans.resident.options.weight_dtype)
        measured = Bench(
            source,
            plans,
            settings,
            make_engine=partial(open_engine, node.device),
            watch=clocks,
            show=show,
        ).run()
    finally:
        done()
    made = result.build(
        measured, source, plans, settings, node, clocks=clocks.to_json(), driver=driver, commit=code
    )
    if guess is not None:
        made |= {
            "predicted_tokens_per_s": guess,
            "prediction_error": guess / made["tokens_per_s"] - 1,
        }
    folder = record.write(out, made, measured.samples, measured.judged)
    emit(args, made | {"record": str(folder)}, gpu_text(made))
    say(f"recorded in {folder}")
    missed = result.shortfalls(made)
    for line in missed:
        say(f"not met: {line}")
    return NOT_MET if missed else 0


def check_unnamed(args: argparse.Namespace, node: Node) -> None:
    if args.gpus is not None:
        raise ConfigError(
            f"--gpus {args.gpus} is for this CPU: name the GPUs as {args.gpus}x{node.device.name}"
        )


def predicted(plan: Plan, node: Node, show: Progress) -> float | None:
    """The twin's tokens per second, before anything is measured; None where the simulator is not
    installed.
    """
    try:
        from twin.sim.run import simulate
    except ModuleNotFoundError as error:
        if error.name != "simpy":
            raise
        return None
    show("predicting")
    return simulate(plan, node).tokens_per_s


def settings_of(args: argparse.Namespace) -> Settings:
    return Settings(
        context=args.context,
        tokens=args.tokens,
        repeats=args.repeats,
        check=args.check,
        prompts=8 if args.fidelity is None else args.fidelity,
        fidelity_context=min(args.context, FIDELITY_CONTEXT)
        if args.fidelity_context is None
        else args.fidelity_context,
        determinism=bool(args.determinism),
        peers=args.peers is not False,
        fill_by_steps=args.fill == "steps",
    )


def gpu_text(made: dict[str, Any]) -> str:
    variants = made["variants"].items()
    rows = [
        (
            name,
            count(v["us_per_token"]),
            count(v["tokens_per_s"]),
            percent(v["spread"]),
            f"{v['us_per_token'] / made['us_per_token']:.2f}",
        )
        for name, v in variants
        if "tokens_per_s" in v
    ]
    head = table(("variant (measured)", "us/token", "tokens/s", "spread", "x engine"), rows)
    fidelity = made["fidelity"]
    lines: list[tuple[str, object]] = [
        (
            "streaming",
            f"{format_quantity(made['bytes_per_step'] * made['tokens_per_s'], 'B/s')}, "
            f"{format_quantity(float(made['bytes_per_step']), 'B')} a step at context "
            f"{made['context']}",
        ),
        (
            "ceiling",
            f"{format_quantity(made['ceiling_bytes_per_s'], 'B/s')} (measured)"
            + (f", of each of {made['gpus']} GPUs" if made["gpus"] > 1 else ""),
        ),
        ("stream fraction", percent(made["stream_fraction"])),
        ("MBU", percent(made["mbu"])),
        (
            "logits",
            f"within {fidelity['numpy_logit_difference']:.1e} of the NumPy reference, relative",
        ),
    ]
    if "kl_engine" in fidelity:
        engine, peer = fidelity["kl_engine"], fidelity["kl_peer"]
        lines += [
            ("KL, mean", f"{engine['mean']:.3g} nats; {fidelity['peer']}: {peer['mean']:.3g}"),
            ("KL, max", f"{engine['max']:.3g} nats; {fidelity['peer']}: {peer['max']:.3g}"),
            (
                "greedy",
                f"{fidelity['decided_mismatches']} of {fidelity['decided_positions']} decided "
                "tokens differ from FP32",
            ),
        ]
    if "kl_hf_tp" in fidelity:
        lines.append(
            (
                "KL, Hugging Face on all GPUs",
                f"mean {fidelity['kl_hf_tp']['mean']:.3g} nats over "
                f"{fidelity['kl_hf_tp']['positions']} positions",
            )
        )
    if "determinism" in fidelity:
        same = "bitwise equal" if fidelity["determinism"]["bitwise_equal"] else "NOT equal"
        lines.append(
            (
                "determinism",
                f"{fidelity['determinism']['runs']} runs of {fidelity['determinism']['tokens']} "
                f"tokens: {same}",
            )
        )
    if "all_reduce" in made:
        lines += [
            (f"us of {name}", f"{us:.2f}  ({made['all_reduce']['elements']} elements, measured)")
            for name, us in made["all_reduce"]["us"].items()
        ]
    if "predicted_tokens_per_s" in made:
        lines.append(
            (
                "predicted",
                f"{count(made['predicted_tokens_per_s'])} tokens/s, "
                f"{percent(made['prediction_error'], signed=True)}",
            )
        )
    lines += [(f"left out: {name}", why) for name, why in made["left_out"].items()]
    lines += [(name.replace("_", " "), value) for name, value in made["notes"].items()]
    return f"{head}\n\n{facts(lines)}"
