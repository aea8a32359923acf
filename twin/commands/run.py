"""`twin run`: generate text with the real engine."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from twin.calibrate.node import calibrated_node
from twin.commands.alarm import alarm, predicted_for
from twin.commands.arguments import (
    Subparsers,
    add_engine_options,
    add_model,
    add_most_probable,
    chosen_options,
    command,
    whole,
)
from twin.commands.drafts import add_draft, headed
from twin.commands.output import done, emit, harmless, progress, say
from twin.engine.generate import Completion, Piece, Request, Stop, complete
from twin.engine.generation import Generation
from twin.engine.opening import Source, check_runs_here, open_session, open_source, plan_run
from twin.engine.sampling import SamplingParams
from twin.engine.session import Session
from twin.errors import ConfigError
from twin.files import read_text
from twin.hardware.types import Node
from twin.models.spec import ModelSpec
from twin.plan.types import Plan
from twin.report.tables import count
from twin.schedule.options import multiplies_blocks
from twin.text import shown
from twin.units import format_quantity

DEFAULT_TOKENS = 64
MOST_PROMPT_BYTES = 16 * 2**20  # of text: more than a million positions hold
MOST_DIGITS = 18  # of a token id
INTERRUPTED = 130
EXAMPLES = """\
  twin run ./my-checkpoint --prompt "Once upon a time"
  twin run ./my-model.Q4_K_M.gguf --prompt "Once upon a time"
  twin run ./my-checkpoint --prompt-file question.txt --temperature 0.8 --top-p 0.95
  twin run llama-3.2-1b --random 1 --prompt-tokens 1,2,3 --max-tokens 8
  twin run ./my-checkpoint --prompt Hello --node 1xh200
  twin run ./my-checkpoint --prompt-file code.txt --draft lookup:7
  twin run ./my-checkpoint --prompt "Hello" --draft eagle3:./my-head:5
  twin run laneformer-2b --node 1xh200 --random 1 --prompt-tokens 1,2,3 --max-tokens 500
  twin run llama-3.2-1b --random 1 --prompt-tokens 1,2,3 --gpus 2 --blocks 1 --json"""


def add(commands: Subparsers) -> None:
    parser = command(
        commands,
        "run",
        run,
        usage="MODEL --prompt TEXT [options]",
        summary="generate text with the real engine on this computer",
        text="Loads a Hugging Face folder (config.json, safetensors, tokenizer.json) or a GGUF "
        "file, plans, compiles the\nkernel for this CPU or for the GPU of --node, and "
        "generates: all steps are one launch. Text goes to\n"
        "stdout as it is made, the speed to stderr.",
        examples=EXAMPLES,
    )
    add_model(parser)
    add_prompt(parser)
    group = parser.add_argument_group("generation")
    group.add_argument(
        "--max-tokens",
        type=whole,
        default=DEFAULT_TOKENS,
        metavar="N",
        help="most tokens to generate (default %(default)s)",
    )
    group.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        metavar="T",
        help="0 takes the most probable token (default %(default)s)",
    )
    add_most_probable(group)
    group.add_argument(
        "--seed",
        type=whole,
        default=0,
        metavar="N",
        help="of the sampling; the same seed gives the same text (default 0)",
    )
    group.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TOKEN|TEXT",
        help="end at this token id or text; may be repeated",
    )
    group.add_argument(
        "--ignore-eos", action="store_true", help="do not end at the model's own end token"
    )
    add_machine(parser)
    parser.add_argument(
        "--node",
        metavar="NODE",
        help="where to run: 1xhost (default), 1xh200 for an NVIDIA GPU of this computer, 1xmi300x "
        "for an AMD GPU",
    )


def add_prompt(parser: argparse.ArgumentParser) -> None:
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="what to continue")
    prompt.add_argument("--prompt-file", metavar="FILE", type=Path, help="the same from a file")
    prompt.add_argument("--prompt-tokens", metavar="IDS", help="the same as token ids: 1,2,3")
    parser.add_argument(
        "--tokenizer",
        metavar="FOLDER",
        type=Path,
        help="with another tokenizer.json than the model's own",
    )


def add_machine(parser: argparse.ArgumentParser) -> None:
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
        help="GPUs: emulated ones on this CPU, 1, 2, 4 or 8 (default 1); with --node all of the "
        "node's, instead of as many as are predicted to be worth it",
    )
    add_draft(parser)
    # drafts that are simulated only are no options here
    add_engine_options(parser, without=("gpus", "context", "sampling", "draft", "lookup"))


def run(args: argparse.Namespace) -> int:
    if args.max_tokens < 1:
        raise ConfigError(f"--max-tokens {shown(args.max_tokens)}: at least 1")
    sampling = SamplingParams(args.temperature, args.top_k, args.top_p, args.seed, args.min_p)
    node = chosen_node(args)
    source = headed(source_of(args, node), args.draft_head)
    node = settled_node(args, node, source.spec)
    prompt = read_prompt(args, source)
    plan = plan_run(
        source.spec,
        node,
        chosen_options(args),
        positions=len(prompt) + args.max_tokens,
        greedy=sampling.greedy,
    )
    ids, texts = _stops(args, source)
    request = Request(prompt, args.max_tokens, sampling, frozenset(ids), tuple(texts))
    with _session(node, plan, source) as session:
        ended = complete(session, source.tokenizer, request, None if args.json else show_piece)
    if not args.json:
        print(flush=True)
    said = predicted_for(plan, node, chosen_options(args), len(prompt), ended.made)
    if args.json:
        emit(args, to_json(plan, prompt, ended) | {"predicted": said}, "")
    say(speed_line(plan, len(prompt), ended.made, ending(args, ended)))
    if said and said["parted"]:
        say(alarm(said, ended.made))
    return INTERRUPTED if ended.stop is Stop.CANCELLED else 0


def source_of(args: argparse.Namespace, node: Node) -> Source:
    source = open_source(
        args.model,
        args.random,
        chosen_options(args).get("weight_dtype"),
        text=args.prompt_tokens is None,
        words=args.tokenizer,
        blocks=multiplies_blocks(node.device),
    )
    if source.note:
        say(source.note)
    return source


def _session(node: Node, plan: Plan, source: Source) -> Session:
    try:
        return open_session(node, plan, source, progress())
    finally:
        done()


def show_piece(piece: Piece) -> None:
    """A model's text may hold anything: what could change a terminal is escaped."""
    print(harmless(piece.text, allowed="\t"), end="", flush=True)


def chosen_node(args: argparse.Namespace) -> Node:
    """The node of --node, which must be here; else this computer with as many emulated GPUs as
    --gpus says.
    """
    if args.node is None:
        return calibrated_node(f"{1 if args.gpus is None else args.gpus}xhost")
    node = calibrated_node(args.node)
    if args.gpus not in (None, node.gpus):
        raise ConfigError(
            f"--gpus {args.gpus} and --node {args.node} contradict each other: give one of them"
        )
    check_runs_here(node)
    return node


def settled_node(args: argparse.Namespace, node: Node, spec: ModelSpec) -> Node:
    """The node, or fewer of its GPUs where more gain nothing and nobody named all of them."""
    if args.gpus is not None or node.gpus == 1 or not node.device.nvidia:
        return node
    from twin.study.gpus import default_gpus, offers, said  # one GPU needs no simulator

    found = offers(spec, node, chosen_options(args))
    say(f"GPUs of {node.name}: {said(found)}")
    return calibrated_node(f"{default_gpus(found)}x{node.device.name}")


def read_prompt(args: argparse.Namespace, source: Source) -> list[int]:
    """The prompt as token ids. Raises ConfigError."""
    if args.prompt_tokens is not None:
        return _token_ids(args.prompt_tokens, source.spec)
    return source.encode(
        read_text(args.prompt_file, MOST_PROMPT_BYTES)
        if args.prompt_file is not None
        else args.prompt
    )


def speed_line(plan: Plan, prompt: int, made: Generation, reason: str) -> str:
    first = f"prompt: {prompt} tokens in {format_quantity(made.prompt_ns / 1e9, 's')}"
    if not made.tokens:
        return f"{first}; nothing generated ({reason})"
    speed = made.tokens_per_s
    rate = (
        f"{count(speed)} tokens/s, streaming {plan.weight_bytes() * speed / 1e9:.3g} GB/s"
        if speed
        else "too short to time"
    )
    done = f"{len(made.tokens)} tokens generated, {rate} (measured)"
    return f"{first}; {done}; ended by {reason}{made.remark}"


def ending(args: argparse.Namespace, ended: Completion) -> str:
    """Why the generation ended, for people."""
    match ended.stop:
        case Stop.TEXT:
            return f"the stop text {shown(ended.stop_text)}"
        case Stop.TOKEN:
            token = ended.made.tokens[-1]
            return (
                f"token {token}, "
                f"{'of --stop' if str(token) in args.stop else 'that ends a text of this model'}"
            )
        case Stop.LENGTH:
            return f"--max-tokens {args.max_tokens}"
        case Stop.CANCELLED:
            return "Ctrl-C: cancelled"


def to_json(plan: Plan, prompt: list[int], ended: Completion) -> dict[str, Any]:
    made = ended.made
    return {
        "model": plan.spec.name if plan.spec else plan.name,
        "text": ended.text,
        "tokens": made.tokens,
        "prompt_tokens": prompt,
        "stop_reason": ended.stop.value,
        "tokens_per_s": made.tokens_per_s,
        "prompt_s": made.prompt_ns / 1e9,
        "tokens_per_round": made.tokens_per_round,
        "stream_bytes_per_s": plan.weight_bytes() * made.tokens_per_s,
        "gpus": plan.options.gpus,
        "blocks_per_gpu": plan.options.blocks,
    }


def _stops(args: argparse.Namespace, source: Source) -> tuple[set[int], list[str]]:
    """(token ids, texts) that end the generation."""
    # "²" is a digit, too, but no number
    numbers = [stop for stop in args.stop if stop.isascii() and stop.isdigit()]
    texts = [stop for stop in args.stop if stop not in numbers]
    if "" in texts:
        raise ConfigError(
            "--stop '': an empty text would end every generation before it begins; give a token "
            "id or a text"
        )
    if texts and source.tokenizer is None:
        raise ConfigError(f"--stop {shown(texts[0])}: a text needs a tokenizer; give a token id")
    ids = set()
    for number in numbers:
        if len(number) > MOST_DIGITS or int(number) >= source.spec.vocab:
            said = number if len(number) <= MOST_DIGITS else shown(number)
            raise ConfigError(
                f"--stop {said}: {source.spec.name} knows tokens 0 to {source.spec.vocab - 1}"
            )
        ids.add(int(number))
    if source.tokenizer and not args.ignore_eos:
        ids |= source.tokenizer.stop
    return ids, texts


def _token_ids(text: str, spec: ModelSpec) -> list[int]:
    try:
        tokens = [int(word) for word in text.replace(",", " ").split()]
    except ValueError as error:
        raise ConfigError(
            f"--prompt-tokens {shown(text)}: write token ids such as 1,2,3"
        ) from error
    if not tokens:
        raise ConfigError("--prompt-tokens is empty: give at least one token id")
    for token in tokens:
        if not 0 <= token < spec.vocab:
            raise ConfigError(
                f"--prompt-tokens: token {shown(token)} is unknown, {spec.name} knows 0 to "
                f"{spec.vocab - 1}"
            )
    return tokens
