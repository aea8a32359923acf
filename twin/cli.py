"""The command line. Results on stdout, talk on stderr; exit code 2 for a user's mistake, 130 after Ctrl-C."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from twin.errors import TwinError

COMMANDS = ("plan", "simulate", "run", "bench", "calibrate", "validate", "trace", "whatif", "project", "models", "hardware", "demo")
USER_MISTAKE = 2
INTERRUPTED = 130

DESCRIPTION = """\
MonoTwin: LLM decoding for one user as a single resident GPU kernel, and a twin that predicts its speed.

One plan of a decode step is run by the engine and timed by a discrete-event simulation of the hardware, so that
each claim about speed can be measured, explained and projected.
"""
EXAMPLES = """\
first steps:
  twin demo                                    probe this computer, predict, run, compare (about three minutes)
  twin simulate laneformer-2b 8xmi300x         tokens/s of a 2B model on eight MI300X, and where the time goes
  twin whatif laneformer-2b 8xh200 --set link.hop=x0.5
  twin run ./my-checkpoint --prompt "Once upon a time"

Each command explains itself: twin COMMAND --help
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit code."""
    words = sys.argv[1:] if argv is None else list(argv)
    named = words[:1] if words and words[0] in COMMANDS else COMMANDS
    args = build_parser(named).parse_args(words)
    try:
        code: int = args.run(args)
        return code
    except TwinError as error:
        print(f"twin: {error}", file=sys.stderr)
        return USER_MISTAKE
    except KeyboardInterrupt:
        print("twin: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader (head, less) has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def build_parser(named: Sequence[str] = COMMANDS) -> argparse.ArgumentParser:
    """The command line with a sub-parser for each command named: only their modules are loaded, some are slow to."""
    parser = argparse.ArgumentParser(
        prog="twin", usage="twin [-h] COMMAND ...", description=DESCRIPTION, epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )  # fmt: skip
    # The spare width keeps argparse from breaking the line of the longest command.
    commands = parser.add_subparsers(title="commands", metavar="COMMAND [...]", prog="twin", required=True)
    for name in named:
        import_module(f"twin.commands.{name}").add(commands)
    return parser


if __name__ == "__main__":
    sys.exit(main())
