"""`twin chat`: talk to a model in the terminal."""

from __future__ import annotations

import argparse
import json
import re
import sys
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING

from twin.commands.arguments import (
    Subparsers,
    add_model,
    add_most_probable,
    chosen_options,
    command,
    whole,
)
from twin.commands.output import done, progress, say
from twin.commands.run import add_machine, chosen_node, settled_node, show_piece
from twin.commands.serve import add_where, add_words, check_libraries, source_of, template_values
from twin.engine.sampling import SamplingParams
from twin.errors import ConfigError, EngineError, TwinError
from twin.text import shown

if TYPE_CHECKING:
    from twin.server.talk import Talk

PROMPT = "> "
COMMANDS = ("/reset", "/stats", "/help", "/quit", "/exit")
COMMAND = re.compile("/[a-z]+")
HELP = "/reset forgets the conversation, /stats shows the last answer's speed, /quit ends"
EXAMPLES = """\
  twin chat ./my-checkpoint
  twin chat ./my-checkpoint --node 1xh200 --system "Answer in one sentence." --temperature 0.7"""


def add(commands: Subparsers) -> None:
    parser = command(
        commands,
        "chat",
        run,
        usage="MODEL [options]",
        summary="talk to a model in the terminal",
        text="Each turn reads only what is new: keys and values of the conversation are kept.\n"
        f"{HELP}. Ctrl-C ends an answer, not the program.",
        examples=EXAMPLES,
    )
    add_model(parser)
    group = parser.add_argument_group("conversation")
    group.add_argument("--system", metavar="TEXT", help="what the model reads before all else")
    group.add_argument(
        "--max-tokens",
        type=whole,
        default=1024,
        metavar="N",
        help="most tokens of an answer (default %(default)s)",
    )
    group.add_argument(
        "--temperature",
        type=float,
        metavar="T",
        help="0 takes the most probable token (default 1; with --greedy 0)",
    )
    add_most_probable(group)
    group.add_argument(
        "--seed",
        type=whole,
        metavar="N",
        help="the same seed and words give the same answers (default: a new one)",
    )
    add_words(parser)
    add_machine(parser)
    add_where(parser)


def run(args: argparse.Namespace) -> int:
    check_libraries()
    from twin.server.open import opened
    from twin.server.talk import Talk

    if args.max_tokens < 1:
        raise ConfigError(f"--max-tokens {shown(args.max_tokens)}: at least 1")
    temperature = float(not args.greedy) if args.temperature is None else args.temperature
    if temperature and args.greedy:
        raise ConfigError(f"--temperature {temperature} and --greedy contradict each other")
    SamplingParams(temperature, args.top_k, args.top_p, args.seed or 0, args.min_p)
    node, chosen = chosen_node(args), chosen_options(args)
    source = source_of(args, node)
    node = settled_node(args, node, source.spec)
    with opened(
        source,
        Path(args.model),
        node,
        chosen,
        progress(),
        greedy=args.greedy,
        template=args.chat_template,
        values=template_values(args),
    ) as (model, session, _):
        done()
        if model.conversation is None:
            raise ConfigError(
                f"{model.name} has no chat template: give one with --chat-template FILE"
            )
        talk = Talk(
            model,
            session,
            args.max_tokens,
            temperature,
            args.top_k,
            args.top_p,
            args.seed,
            args.system,
            args.min_p,
        )
        say(f"{model.name}, context {model.context}: {HELP}")
        _converse(talk, as_json=args.json)
    return 0


def _converse(talk: Talk, *, as_json: bool) -> None:
    """Until /quit or the end of the input. Ctrl-C drops what was typed."""
    if isinstance(sys.stdin, TextIOWrapper):  # bytes that are no UTF-8 end a line, not the program
        sys.stdin.reconfigure(errors="surrogateescape")
    going = True
    while going:
        try:
            going = _turn(talk, as_json=as_json)
        except KeyboardInterrupt:
            print(file=sys.stderr)
            say("/quit or Ctrl-D ends the program")


def _turn(talk: Talk, *, as_json: bool) -> bool:
    """False: that was the last one."""
    line = _line()
    match line.strip() if line is not None else "/quit":
        case "":
            pass
        case "/quit" | "/exit":
            return False
        case "/reset":
            talk.reset()
            say("a new conversation")
        case "/stats":
            say(talk.stats())
        case "/help":
            say(HELP)
        case text if not _is_text(text):
            say("this is no UTF-8 text; type it again")
        case text if wrong := _misspelt(text):
            say(f"{wrong}; {HELP}")
        case text:
            _answer(talk, text, as_json=as_json)
    return True


def _is_text(line: str) -> bool:
    try:
        line.encode()
    except UnicodeEncodeError:
        return False
    return True


def _misspelt(text: str) -> str:
    """What is wrong with a command; empty for words that are meant for the model."""
    word = text.split()[0]
    if not COMMAND.fullmatch(word) or (word != text and word not in COMMANDS):
        return ""
    return f"{word} takes nothing behind it" if word in COMMANDS else f"{word} is no command"


def _answer(talk: Talk, text: str, *, as_json: bool) -> None:
    """Ctrl-C reaches the session, which ends the answer."""
    try:
        made = talk.say(text, lambda piece: None if as_json else show_piece(piece))
    except EngineError:
        raise
    except TwinError as error:
        say(str(error))
        return
    said = json.dumps({"text": made.text, "stop_reason": made.stop.value}) if as_json else ""
    print(said, flush=True)


def _line() -> str | None:
    """The next line of input; None at its end."""
    if not sys.stdin.isatty():
        return sys.stdin.readline() or None
    try:
        return input(PROMPT)
    except EOFError:
        print(file=sys.stderr)
        return None
