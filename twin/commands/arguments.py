"""Arguments that commands share. Engine options are read off the Options dataclass, so that nothing
is typed twice.
"""

from __future__ import annotations

import argparse
import linecache
import re
import sys
import types
from collections.abc import Callable, Collection
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from twin.commands.wrapped import Wrapped
from twin.data import did_you_mean
from twin.errors import ConfigError, OutputError
from twin.files import check_file, check_folder
from twin.hardware.load import load_node
from twin.hardware.types import HOST, Node
from twin.models.formats import STORED
from twin.models.spec import DType
from twin.plan.options import Options
from twin.schedule.options import FIELDS, SETTLED
from twin.study.options import check_range, members
from twin.text import shown
from twin.toolchain import host_compiler
from twin.units import LONGEST, parse_count, parse_quantity, unit_of

Subparsers = Any  # argparse names the type of add_subparsers() only privately
ALIASES = {"weight_dtype": "--dtype"}
_COMMENT = re.compile(r"^((?: +#.*\n)*) +(\w+) *[:=][^#\n]*(?:#[ ]*(.+))?$", re.MULTILINE)


def command(
    commands: Subparsers,
    name: str,
    run: Callable[[argparse.Namespace], int],
    *,
    usage: str,
    summary: str,
    text: str,
    examples: str,
) -> argparse.ArgumentParser:
    """A sub-command with its examples below its help, and --json."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        usage=f"twin {name} {usage}".rstrip(),
        help=summary,
        description=f"{summary[0].upper()}{summary[1:]}.\n\n{text}",
        epilog=f"examples:\n{examples.rstrip()}\n",
        formatter_class=Wrapped,
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.set_defaults(run=run)
    return parser


def add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL",
        help="a name from `twin models`, a folder or file with a Hugging Face config.json, a GGUF "
        "file, or hf:OWNER/NAME from the Hugging Face Hub",
    )


def add_node(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "node",
        metavar="NODE",
        help="devices and how many of them: 8xh200, 8xmi300x, 1xhost; `twin hardware` lists them; "
        "or a file of your own: my-gpu.yaml, 4xmy-gpu.yaml",
    )


def file_to_write(text: str) -> Path:
    """For `type=`: a file that can be written, or the refusal before any work."""
    return _checked(check_file, text)


def folder_to_write(text: str) -> Path:
    """The same for a folder in which files are made."""
    return _checked(check_folder, text)


def _checked(check: Callable[[Path], Path], text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("an empty name: name a file or a folder")
    try:
        return check(Path(text))
    except OutputError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def removed(parser: argparse.ArgumentParser, option: str, instead: str) -> None:
    """An option that there was, without a value: its error says what to use."""

    class Gone(argparse.Action):
        def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
            parser.error(f"{option} is gone: {instead}")

    parser.add_argument(option, action=Gone, nargs=0, help=argparse.SUPPRESS)


def add_measuring(parser: argparse.ArgumentParser) -> None:
    """Measuring on one computer, the rest on another."""
    group = parser.add_mutually_exclusive_group()
    group.add_argument(
        "--measure-only",
        action="store_true",
        help="only measure, into the folder of --out; needs no simulator",
    )
    group.add_argument(
        "--from",
        dest="measured",
        metavar="FOLDER",
        type=Path,
        help="take what --measure-only wrote instead of measuring here",
    )
    parser.add_argument(
        "--out",
        metavar="FOLDER",
        type=folder_to_write,
        help="with --measure-only: where the samples go; must not exist or be empty",
    )


def measured_folder(args: argparse.Namespace) -> Path | None:
    """The folder of --out or --from, whichever was given. Raises ConfigError when they contradict
    each other.
    """
    if args.measure_only != (args.out is not None):
        raise ConfigError("--measure-only and --out FOLDER belong together: give both, or neither")
    if (
        args.out is not None
        and args.out.exists()
        and (not args.out.is_dir() or any(args.out.iterdir()))
    ):
        raise ConfigError(
            f"--out {shown(args.out)}: is there already; give a new folder, measured runs are "
            "never overwritten"
        )
    chosen: Path | None = args.out or args.measured
    return chosen


def one_device(name: str) -> Node:
    """The node of one device that `name` means: host, h200, h200-sxm, 1xh200. Raises ConfigError
    for several devices.
    """
    node = load_node(name)
    if node.gpus > 1:
        raise ConfigError(
            f"{shown(name)}: {node.gpus} devices, and this command measures one: name "
            f"1x{node.device.name}; studies/many-gpus/run.sh measures several"
        )
    return node


def check_compiler(node: Node) -> None:
    """Raises ToolchainError once, where otherwise each of many runs on this computer's CPU would
    fail for want of a compiler.
    """
    if node.device.isa == HOST:
        host_compiler()


def add_most_probable(group: Any) -> None:
    """Of sampling: how many of the most probable tokens are drawn from."""
    group.add_argument(
        "--top-k",
        type=whole,
        default=0,
        metavar="K",
        help="sample from the K most probable tokens (default: all)",
    )
    group.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="sample from the most probable tokens that reach P (default: all)",
    )
    group.add_argument(
        "--min-p",
        type=float,
        default=0.0,
        metavar="P",
        help="sample from tokens with at least P of the most probable one's probability "
        "(default: all)",
    )


def add_engine_options(parser: argparse.ArgumentParser, *, without: Collection[str] = ()) -> None:
    """One flag for each field of Options, except those that the command takes from elsewhere."""
    group = parser.add_argument_group(
        "engine options", "what is not given is chosen to suit the model and the node"
    )
    hints = get_type_hints(Options)
    comments = _comments(Options)
    for name, field in FIELDS.items():
        if name in without:
            continue
        kind = _plain(hints[name])
        flags = [f"--{name.replace('_', '-')}"] + ([ALIASES[name]] if name in ALIASES else [])
        about = comments.get(name) or _choices_text(kind) or name.replace("_", " ")
        default = (
            ""
            if name in SETTLED or field.default is None
            else f" (default {getattr(field.default, 'value', field.default)})"
        )
        group.add_argument(
            *flags,
            dest=f"option_{name}",
            default=argparse.SUPPRESS,
            type=_reader(name, kind),
            metavar=_metavar(name, kind),
            help=(about + default).replace("%", "%%"),
        )


def chosen_options(args: argparse.Namespace) -> dict[str, Any]:
    """The engine options that the user gave."""
    return {
        key.removeprefix("option_"): value
        for key, value in vars(args).items()
        if key.startswith("option_")
    }


def option_value(name: str, text: str) -> object:
    """`text` as the value of the Options field `name`. Raises ConfigError."""
    kind = _plain(get_type_hints(Options)[name])
    try:
        return _reader(name, kind)(text)
    except argparse.ArgumentTypeError as error:
        raise ConfigError(f"{name}: {error}") from error


def _reader(name: str, kind: Any) -> Callable[[str], object]:
    def read(text: str) -> object:
        if issubclass(kind, Enum):
            return _member(name, kind, text)
        value = _whole(name, text)
        try:
            check_range(name, value)
        except ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from error
        return value

    return read


def _member(name: str, kind: type[Enum], text: str) -> Enum:
    values = [member.value for member in members(name, kind)]
    text = text.lower()
    if text not in values and issubclass(kind, DType) and text in STORED:
        raise argparse.ArgumentTypeError(
            f"{shown(text)} is a stored format: it belongs to the model's name, MODEL@{text}"
        )
    if text not in values:
        raise argparse.ArgumentTypeError(f"{shown(text)} is unknown; {did_you_mean(text, values)}")
    return kind(text)


def _whole(name: str, text: str) -> int:
    """A whole number; sizes in bytes may carry a unit ("16 KiB")."""
    unit = unit_of(name)
    try:
        return parse_count(text)
    except ConfigError as error:
        if not unit or len(text) > LONGEST:
            raise argparse.ArgumentTypeError(str(error)) from error
    try:
        value = parse_quantity(text, unit)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if value != int(value):
        raise argparse.ArgumentTypeError(f"{shown(text)} is not a whole number")
    return int(value)


def whole(text: str) -> int:
    """For `type=`: a whole number, as `parse_count` reads it."""
    return _whole("", text)


@cache
def _comments(cls: type) -> dict[str, str]:
    """The comment behind or above each field or member in the source of a class. `inspect` would
    parse the whole module to find the class.
    """
    lines = "".join(linecache.getlines(sys.modules[cls.__module__].__file__ or ""))
    _, _, own = lines.partition(f"\nclass {cls.__name__}")
    found = _COMMENT.findall(own.partition("\n\n\n")[0])
    return {name: behind or _one_line(above) for above, name, behind in found if behind or above}


def _one_line(comment: str) -> str:
    return " ".join(line.strip().removeprefix("#").strip() for line in comment.splitlines())


def _choices_text(kind: Any) -> str:
    if not issubclass(kind, Enum):
        return ""
    comments = _comments(kind)
    if not any(m.name in comments for m in kind):
        return ""
    return "; ".join(
        f"{m.value}: {comments[m.name]}" if m.name in comments else m.value for m in kind
    )


def _metavar(name: str, kind: Any) -> str:
    if not issubclass(kind, Enum):
        return "N"
    return "{" + ",".join(member.value for member in members(name, kind)) + "}"


def _plain(hint: Any) -> Any:
    """The type inside `X | None`."""
    if get_origin(hint) in (Union, types.UnionType):
        return next(a for a in get_args(hint) if a is not type(None))
    return hint
