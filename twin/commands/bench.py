"""`twin bench`: the engine's speed, with its results checked in the same run."""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import numpy as np

from twin.calibrate.validate import calibrated_node
from twin.commands.arguments import Subparsers, add_model, command
from twin.commands.output import done, emit, progress, warn_if_busy
from twin.commands.run import add_machine, open_source, plan_run, tokens_per_s
from twin.engine.host import HostEngine
from twin.errors import ConfigError, EngineError
from twin.plan.reference import Reference
from twin.plan.shards import Weights
from twin.plan.types import Plan
from twin.report.tables import count, facts, percent
from twin.sim.run import simulate
from twin.units import format_quantity

TOLERANCE = 2e-2  # largest difference of logits from the reference, relative to the largest logit: a few BF16 roundings of the cache
EXAMPLES = """\
  twin bench ./my-checkpoint
  twin bench llama-3.2-1b --random 1 --tokens 32 --repeats 3"""


def add(commands: Subparsers) -> None:
    parser = command(
        commands, "bench", run, usage="MODEL [options]", summary="measure the engine's speed, with correctness checked in the same run",
        text="Compares logits with the NumPy reference first, then times greedy decoding: every repeat must give the same tokens.\n"
        "Reports the median and the spread beside the ceiling of this computer's memory and the twin's prediction.",
        examples=EXAMPLES,
    )  # fmt: skip
    add_model(parser)
    parser.add_argument("--prompt-length", type=int, default=16, metavar="N", help="prompt tokens (default %(default)s)")
    parser.add_argument("--tokens", type=int, default=48, metavar="N", help="tokens decoded and timed a repeat (default %(default)s)")
    parser.add_argument("--repeats", type=int, default=5, metavar="N", help="repeats after one to warm up (default %(default)s)")
    parser.add_argument("--check", type=int, default=4, metavar="N", help="positions compared with the reference (default %(default)s)")
    add_machine(parser)
    parser.set_defaults(prompt_tokens="")


def run(args: argparse.Namespace) -> int:
    for name, least in (("prompt_length", 1), ("tokens", 2), ("repeats", 1), ("check", 1)):
        if getattr(args, name) < least:
            raise ConfigError(f"--{name.replace('_', '-')} {getattr(args, name)}: at least {least}")
    source = open_source(args)
    prompt = [(7 + 13 * at) % source.spec.vocab for at in range(args.prompt_length)]
    plan = plan_run(args, source.spec, positions=args.prompt_length + args.tokens, greedy=True)
    show = progress()
    warn_if_busy()
    try:
        with HostEngine(plan, source.weights) as engine:
            show(f"comparing {args.check} positions with the reference")
            difference = check(engine, plan, source.weights, prompt[: args.check])
            samples = measure(engine, prompt, args.tokens, args.repeats, show)
        show("predicting")
        predicted = simulate(plan, calibrated_node(f"{args.gpus}xhost"))
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
        "logit_difference": difference,
        "blocks_per_gpu": plan.options.blocks,
        "gpus": plan.options.gpus,
    }
    emit(args, data, text(data, predicted.stream_bytes_per_s))
    return 0


def check(engine: HostEngine, plan: Plan, weights: Weights, tokens: list[int]) -> float:
    """Largest difference of the engine's logits from the reference, relative. Raises EngineError beyond TOLERANCE."""
    reference = Reference(plan, weights)
    expected = np.array([reference.step(token) for token in tokens])
    difference = float(np.max(np.abs(engine.logits(tokens) - expected)) / np.max(np.abs(expected)))
    if not difference <= TOLERANCE:
        raise EngineError(
            f"logits differ from the reference by {difference:.2g} of the largest, allowed are {TOLERANCE:g}; report this plan"
        )
    return difference


def measure(engine: HostEngine, prompt: list[int], tokens: int, repeats: int, show: Any) -> list[float]:
    """Tokens per second of each repeat, after one to warm up. Raises EngineError when repeats disagree."""
    first = engine.generate(prompt, max_tokens=tokens)
    samples = []
    for repeat in range(repeats):
        show(f"repeat {repeat + 1}/{repeats}")
        made = engine.generate(prompt, max_tokens=tokens)
        if made.stop_reason == "cancelled":
            raise KeyboardInterrupt
        if made.tokens != first.tokens:
            raise EngineError(
                f"repeat {repeat + 1} gave other tokens than the first: the engine is not deterministic here, report this plan"
            )
        samples.append(tokens_per_s(made))
    return samples


def text(data: dict[str, Any], ceiling: float) -> str:
    return facts(
        [
            ("tokens/s", f"{count(data['tokens_per_s'])}  (measured, median of {len(data['samples'])}, spread {percent(data['spread'])})"),
            ("streaming", f"{format_quantity(data['stream_bytes_per_s'], 'B/s')} of {format_quantity(ceiling, 'B/s')}"),
            ("stream fraction", percent(data["stream_fraction"])),
            ("predicted", f"{count(data['predicted_tokens_per_s'])} tokens/s, {percent(data['prediction_error'], signed=True)}"),
            ("logits", f"within {data['logit_difference']:.1e} of the reference, relative; all repeats gave the same tokens"),
        ]
    )
