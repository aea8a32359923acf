"""The command line. Results on stdout, talk on stderr; exit code 2 for a user's mistake, 130 after
Ctrl-C.
"""

from __future__ import annotations

import argparse
import io
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from importlib import import_module
from typing import Any, NoReturn

from twin.commands.output import error_text, one_line
from twin.commands.wrapped import Wrapped
from twin.errors import TwinError
from twin.text import shown

COMMANDS = (
    "plan",
    "simulate",
    "optimise",
    "run",
    "chat",
    "serve",
    "bench",
    "calibrate",
    "validate",
    "trace",
    "whatif",
    "diff",
    "fit-for",
    "inverse",
    "surrogate",
    "probe-plan",
    "explore",
    "project",
    "models",
    "hardware",
    "demo",
)
WITH_WEIGHTS = ("run", "chat", "serve")  # the others read a model's description alone
USER_MISTAKE = 2
MOST_UNKNOWN, LONGEST = 5, 100  # words in one refusal, characters compared
INTERRUPTED = 130

DESCRIPTION = """\
MonoTwin: LLM decoding for one user as a single resident GPU kernel, and a twin that predicts its
speed.

One plan of a decode step is run by the engine and timed by a discrete-event simulation of the
hardware, so that each claim about speed can be measured, explained and projected.
"""
EXAMPLES = """\
first steps:
  twin demo                              probe this computer, predict, run, compare (three minutes)
  twin simulate laneformer-2b 8xmi300x   tokens/s of a 2B model on eight MI300X, and why
  twin whatif laneformer-2b 8xh200 --set link.hop=x0.5
  twin run ./my-checkpoint --prompt "Once upon a time"

Each command explains itself: twin COMMAND --help
"""


class Parser(argparse.ArgumentParser):
    """argparse whose refusals are bounded, show no control characters and name what may have been
    meant, and which takes `--name=--` at its word.
    """

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        found, left = super().parse_known_args(args, namespace)
        if left:  # here, where a command's own options are known
            # a word behind an unknown option may be its value
            unknown = [word for word in left if word.startswith("-")] or left
            self.error("; ".join(self._unknown(word) for word in unknown[:MOST_UNKNOWN]))
        return found, left

    def _unknown(self, word: str) -> str:
        option = word.partition("=")[0]
        if not option.startswith("-"):
            return f"{shown(word)}: one word too many"
        close = get_close_matches(option[:LONGEST], list(self._option_string_actions), n=2)
        hint = f"did you mean {' or '.join(close)}?" if close else f"see {self.prog} --help"
        return f"unknown option {shown(option)}; {hint}"

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            from twin.data import did_you_mean  # YAML's library is slow to load

            hint = did_you_mean(value, map(str, action.choices))
            raise argparse.ArgumentError(action, f"{shown(value)} is unknown; {hint}")

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(USER_MISTAKE, f"twin: {one_line(message)}\n")

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        """argparse drops "--" even where it is the value itself, and then fails for want of one
        (mended in Python 3.13).
        """
        if action.option_strings and action.nargs is None and arg_strings == ["--"]:
            value = self._get_value(action, "--")
            self._check_value(action, value)
            return value
        return super()._get_values(action, arg_strings)


class Version(argparse.Action):
    """Looked up when it is needed: the library that knows it takes as long to load as a plan to
    build.
    """

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        print(f"twin {_version()}")
        parser.exit()


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit code; argparse itself ends the program for --help and
    for words that it does not know.
    """
    try:
        for output in (sys.stdout, sys.stderr):
            # a result with a sign that this terminal's encoding lacks is shown all the same
            if isinstance(output, io.TextIOWrapper):
                output.reconfigure(errors="backslashreplace")
        return _run(sys.argv[1:] if argv is None else list(argv))
    except BrokenPipeError:  # the reader (head, less) has seen enough
        _abandon_output()
        return 0
    except KeyboardInterrupt:
        return _ended("interrupted", INTERRUPTED)
    except TwinError as error:
        return _ended(error_text(error), USER_MISTAKE)
    except OSError as error:
        return _ended(_system_text(error), USER_MISTAKE)
    except MemoryError:
        return _ended(
            "not enough memory for this: choose a smaller model, context or study", USER_MISTAKE
        )
    except RecursionError:
        return _ended("an input is nested too deeply: simplify it", USER_MISTAKE)


def _run(words: list[str]) -> int:
    named: Sequence[str] = COMMANDS
    if words[:1] == ["--version"]:
        named = ()  # which needs no command
    elif words and words[0] in COMMANDS:
        named = words[:1]
    with _interrupted_afterwards():
        parser = build_parser(named)
    args = parser.parse_args(words)
    model = getattr(args, "model", None)
    if isinstance(model, str) and model.startswith("hf:"):
        from twin.engine.hub import local  # which few commands need

        weights = words[0] in WITH_WEIGHTS and getattr(args, "random", None) is None
        args.model = local(model, weights=weights)
    code: int = args.run(args)
    return code


@contextmanager
def _interrupted_afterwards() -> Iterator[None]:
    """Ctrl-C waits for the imports inside: amid them, C code of numpy turns it into an ImportError
    with a traceback.
    """
    signals: list[int] = []
    before = signal.getsignal(signal.SIGINT)
    if (
        threading.current_thread() is not threading.main_thread()
        or before is not signal.default_int_handler
    ):
        yield  # no other thread may set a handler, and whoever has set one knows why
        return
    signal.signal(signal.SIGINT, lambda number, _: signals.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if signals:
        raise KeyboardInterrupt


def _ended(message: str, code: int) -> int:
    """Says why on stderr, if anybody still reads it."""
    with suppress(OSError):
        print(f"twin: {message}", file=sys.stderr, flush=True)
    _abandon_output()
    return code


def _system_text(error: OSError) -> str:
    """What the operating system refused, and of which file."""
    of = f"{shown(error.filename)}: " if error.filename is not None else ""
    return one_line(
        f"{of}{error.strerror or error or type(error).__name__}; check the path, its permissions "
        "and the space on the disk"
    )


def _abandon_output() -> None:
    """What cannot be written any more must not be tried again when Python ends."""
    gone = (OSError, ValueError, AttributeError)  # full, closed, or never there
    try:
        sys.stdout.flush()
    except gone:
        with suppress(*gone):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _version() -> str:
    """Of the installed package."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("monotwin")
    except PackageNotFoundError:
        return "of a checkout that is not installed"


def build_parser(named: Sequence[str] = COMMANDS) -> argparse.ArgumentParser:
    """The command line with a sub-parser for each command named: only their modules are loaded,
    some are slow to.
    """
    parser = Parser(
        prog="twin",
        usage="twin [-h] COMMAND ...",
        description=DESCRIPTION,
        epilog=EXAMPLES,
        formatter_class=Wrapped,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=Version, nargs=0, help="show the version and exit")
    # The spare width keeps argparse from breaking the line of the longest command.
    commands = parser.add_subparsers(
        title="commands", metavar="COMMAND [...]", prog="twin", required=True
    )
    for name in named:
        import_module(f"twin.commands.{name.replace('-', '_')}").add(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
