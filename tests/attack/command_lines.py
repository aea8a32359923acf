"""Command lines drawn from the real parser: valid, boundary and hostile values, mostly one hostile
value in an otherwise good line.

Laws: exit code 0 with the result on stdout, or 2 with nothing on stdout and one bounded message
without control characters on stderr; files are only made where the line says so, and nothing
half-written is left. Only refusals ever come out as exceptions of argparse.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from tests.attack.calling import called
from tests.attack.defect import Defect
from tests.command_line import TINY
from twin.cli import build_parser
from twin.commands.output import LONGEST_MESSAGE
from twin.commands.reference import subparsers
from twin.engine.save import save_checkpoint
from twin.engine.tokenizer import make_byte_tokenizer
from twin.engine.weights import random_weights
from twin.files import TEMPORARY

NAME = "command lines"
FIRST = 52  # two are accepted
ENGINE = ("run", "bench")  # these compile an engine: the few lines that reach it cost a second
# minutes of measuring, or until somebody ends them: only lines that are surely refused
SLOW = ("demo", "calibrate", "validate", "chat", "serve", "explore", "fit-for")
ENGINE_SHARE = 0.04
NUMBERS = (
    "0",
    "-1",
    "1",
    "2",
    "3",
    "7",
    "8",
    "16",
    "64",
    "100",
    "128",
    "256",
    "257",
    "1000",
    "4096",
)
HUGE = (
    "99999999999999999999",
    "-99999999999999999999",
    "9" * 5000,
    "1e400",
    "4294967296",
    "9223372036854775808",
    "1000000",
    "2147483647",
)
WORDS = (
    "",
    " ",
    "--",
    "-",
    "²",
    "٣",
    "½",
    "1_000",
    "0x10",
    "1.5",
    "nan",
    "inf",
    "-inf",
    "x" * 100_000,
    "a\nb",
    "\x1b[2J\x1b[31mred",
    "\x07\x08\r",
    "\u202eevil",
    "\x9b31m",
    "\udcff",
    "%s%n",
    "{0}",
    "None",
    "null",
    "true",
    "'",
    '"',
    "$(id)",
    "; rm",
    "*",
    "~",
    "@x",
    "=",
    "==",
    ",",
    ",,",
)
PLACES = (
    ".",
    "..",
    "/",
    "/dev/null",
    "/dev/full",
    "/dev/zero",
    "/proc/self/mem",
    "/proc/x/y",
    "missing/file",
    "file/below",
    "n" * 300,
    "d/" * 2500 + "x",
    "folder",
    "file",
    "file\nname",
    "\x1b]0;t\x07",
    "fresh",
    "fresh/deep/er",
    "link",
    "dangling",
    "loop",
)
MODELS = ("llama-3.2-1b", "laneformer-2b", "qwen3-30b-a3b", "llama-3.2-1b@mxfp4")
NO_MODELS = ("gpt-9", "llama-3.2-1b@", "@", "@mxfp4", "llama-3.2-1b@\x1b[2J")
NODES = (
    "1xh200",
    "2xh200",
    "8xh200",
    "1xhost",
    "2xhost",
    "1xmi300x",
    "h200",
    "host",
    "9xh200",
    "0xh200",
    "²xh200",
    "99999999999999999999xh200",
)
CHANGES = (
    "handoff=grid",
    "link.hop=x0.5",
    "memory.stream=5 TB/s",
    "memory.stream=x0",
    "memory.stream=+10%",
    "gpus=2",
    "gpus=1e9",
    "clock=x0.6",
    "blocks=4",
    "context=8",
    "context=2",
    "seed=1",
    "seed=-1",
    "layers=1",
    "layers=0",
    "acceptance=2",
    "draft_step=1us",
    "routing=zipf:1",
    "format=mxfp4",
    "clock=",
    "=",
    "a=b",
    "memory.stream=1e400 B/s",
    "memory.stream=x1e400",
    "clock=xnan",
    "slot-bytes=0",
    "structure.dies=x1000",
)
SWEEPS = (
    "context=1,2",
    "context=1,1",
    "clock=x1,x0.9",
    "blocks=",
    "blocks=4,8",
    "context=" + ",".join(map(str, range(3000))),
    "handoff=grid,grid",
)


def attack(chance: random.Random, folder: Path) -> str:
    """One command line, run in `folder`."""
    tiny, context64 = _checkpoints()
    words = _line(chance, [tiny, tiny, tiny, context64])
    _furnish(folder)
    before = _names(folder)
    code, out, err = called(words, folder, f"twin {_said(words)}")
    _judge(words, code, out, err, before, _names(folder))
    return "accepted" if code == 0 else "refused"


# ---- drawing -------------------------------------------------------------------------------------


def _line(chance: random.Random, models: list[str]) -> list[str]:
    parsers = _parsers()
    name = chance.choice([one for one in parsers if one not in (*ENGINE, *SLOW)])
    if chance.random() < 0.15:
        name = chance.choice((*ENGINE, *SLOW))
    reaches = name in ENGINE and chance.random() < ENGINE_SHARE
    hostile = 0 if reaches else chance.choice((0, 1, 1, 1, 1, 2, 3))
    if name in SLOW or (name in ENGINE and not reaches):
        hostile = max(1, hostile)
    positionals = [
        _positional(chance, name, action, models)
        for action in parsers[name]._actions
        if not action.option_strings
    ]
    flags = [
        action
        for action in parsers[name]._actions
        if action.option_strings and action.dest != "help"
    ]
    good = list(_good(chance, name, flags))
    bad = [
        word
        for action in chance.sample(flags, min(hostile, len(flags)))
        for word in _hostile(chance, action)
    ]
    if hostile and chance.random() < 0.15 and positionals:
        positionals[chance.randrange(len(positionals))] = chance.choice((*WORDS, *PLACES))
    if name in SLOW or (name in ENGINE and not reaches):
        bad += ["--no-such-option"]
    words = [name, *positionals, *good, *bad]
    if chance.random() < 0.02:
        words.insert(chance.randrange(len(words)), chance.choice(WORDS))
    return words


def _positional(
    chance: random.Random, name: str, action: argparse.Action, models: list[str]
) -> str:
    if action.dest == "model":
        # a large model takes half a minute there
        others = NO_MODELS if name in ("simulate", "whatif") else (*NO_MODELS, *MODELS)
        return chance.choice(models) if chance.random() < 0.8 else chance.choice(others)
    if action.dest in ("node", "device"):
        return chance.choice(NODES[:8]) if chance.random() < 0.8 else chance.choice(NODES)
    if action.dest == "study":
        return chance.choice(("study", "study/study.yaml", "lanez", "fresh"))
    return chance.choice(PLACES)


def _good(chance: random.Random, name: str, flags: list[argparse.Action]) -> Iterator[str]:
    """What makes a line meaningful, small and cheap."""
    if name in ("plan", "simulate", "whatif"):
        yield from ("--blocks", chance.choice(("2", "4", "8")))
    if name == "whatif":
        yield from (
            "--store",
            "store",
            *chance.choice(
                (
                    ("--set", chance.choice(CHANGES)),
                    ("--sweep", chance.choice(SWEEPS)),
                    ("--draws", "4"),
                )
            ),
        )
    if name in ("whatif", "project"):
        yield from ("--workers", "1")  # a process for each would take seconds
    if name == "project":
        yield from ("--store", "store", "--out", chance.choice(("fresh", "folder", "fresh/deep")))
    if name == "run":
        yield from (
            "--prompt-tokens",
            "1,2,3",
            "--max-tokens",
            "4",
            "--node",
            "1xhost",
            "--blocks",
            "2",
        )
    if name == "bench":
        yield from ("--context", "4", "--tokens", "2", "--repeats", "1", "--blocks", "2")
    for action in chance.sample(flags, min(len(flags), chance.choice((0, 0, 1, 2)))):
        if action.nargs == 0:
            yield action.option_strings[0]
        elif action.choices:
            yield from (action.option_strings[0], str(chance.choice(list(action.choices))))


def _hostile(chance: random.Random, action: argparse.Action) -> list[str]:
    if action.nargs == 0:
        return (
            [f"{action.option_strings[0]}={chance.choice(WORDS)}"]
            if chance.random() < 0.5
            else [action.option_strings[0]] * 2
        )
    pools = {
        "changes": CHANGES,
        "sweeps": SWEEPS,
        "draft_model": NO_MODELS,
        "node": NODES,
        "routing": ("zipf:1", "zipf:", "zipf:nan", "zipf:1e400", "file"),
    }
    pool = chance.choice((pools.get(action.dest, NUMBERS), NUMBERS, HUGE, WORDS, PLACES))
    if action.dest == "draws":
        pool = chance.choice((("0", "3", "4", "10001"), HUGE, WORDS))
    if action.dest == "workers":
        # those that are accepted start processes
        pool = chance.choice((("0", "-1", "1025"), HUGE, WORDS))
    if action.dest == "scheduler":
        pool = ("", "tcp://", "x" * 5000, "\x1b[2J")  # a network's patience is 15 s
    value = chance.choice(pool)
    if "/dev/zero" in value and action.dest != "prompt_file":
        # what reads it is judged by the attack on prompts alone: elsewhere it would fill the memory
        value = "/dev/null"
    return (
        [f"{action.option_strings[-1]}={value}"]
        if chance.random() < 0.7
        else [action.option_strings[-1], value]
    )


@lru_cache(maxsize=1)
def _parsers() -> dict[str, argparse.ArgumentParser]:
    return subparsers(build_parser())


@lru_cache(maxsize=1)
def _checkpoints() -> tuple[str, str]:
    """A tiny model with weights, and one of 64 positions without; kept while this program runs."""
    folder = Path(tempfile.mkdtemp(prefix="twin-attack-"))
    save_checkpoint(folder / "tiny", random_weights(TINY, 1))
    make_byte_tokenizer(folder / "tiny")
    config = json.loads((folder / "tiny" / "config.json").read_text())
    (folder / "short").mkdir()
    (folder / "short" / "config.json").write_text(
        json.dumps(config | {"max_position_embeddings": 64})
    )
    return str(folder / "tiny"), str(folder / "short")


def _furnish(folder: Path) -> None:
    """What the lines name."""
    (folder / "folder").mkdir()
    (folder / "file").write_text("kept")
    (folder / "link").symlink_to("file")
    (folder / "dangling").symlink_to("nowhere")
    (folder / "loop").symlink_to("loop")
    (folder / "study").mkdir()
    (folder / "study" / "study.yaml").write_text(
        f"kind: projection\ntitle: t\nquestion: q\nmodels: ['{_checkpoints()[0]}']\n"
        f"nodes: [1xh200]\noptions: {{blocks: 4, context: 8}}\n"
    )


# ---- running and judging -------------------------------------------------------------------------


def _judge(
    words: list[str], code: int, out: str, err: str, before: dict[str, str], after: dict[str, str]
) -> None:
    if code not in (0, 2):
        raise Defect(f"exit code {code} of twin {_said(words)}: {err[-500:]}")
    if code == 0 and not out and "--help" not in words:
        raise Defect(f"success without a result: twin {_said(words)}")
    if code == 2 and out:
        raise Defect(f"a refusal with output: twin {_said(words)}: {err[-500:]}")
    if code == 2 and not err.strip():
        raise Defect(f"a refusal without a word: twin {_said(words)}")
    last = err.rstrip("\n").rsplit("\n", 1)[-1]
    if code == 2 and (
        not last.startswith("twin: ")
        or len(last) > LONGEST_MESSAGE + len("twin: ")
        or "Traceback" in err
    ):
        raise Defect(f"no message of one bounded line: twin {_said(words)}: {err[-500:]!r}")
    for text in (out, err):
        if any(not letter.isprintable() and letter != "\n" for letter in text):
            raise Defect(
                f"control characters on the terminal: twin {_said(words)}: "
                f"{[c for c in text if not c.isprintable()][:20]}"
            )
    if any(TEMPORARY in name for name in after):
        raise Defect(f"something half-written is left: twin {_said(words)}: {sorted(after)}")
    if code == 2 and _but_results(after) != before:
        raise Defect(
            f"a refusal that changed files: twin {_said(words)}: "
            f"{sorted(set(after) ^ set(before))}, {err[-300:]}"
        )
    if after.get("file") != "kept" and not any("file" in word or "link" in word for word in words):
        raise Defect(f"another file was overwritten: twin {_said(words)}")


def _but_results(names: dict[str, str]) -> dict[str, str]:
    """Without the stores of points, where also what cannot be planned is kept."""
    stores = {str(Path(name).parent) for name in names if name.endswith(".parquet")} | {"store"}
    parents = {str(parent) for store in stores for parent in Path(store).parents}
    return {
        name: text
        for name, text in names.items()
        if not name.endswith(".parquet") and name not in stores | parents
    }


def _names(folder: Path) -> dict[str, str]:
    """Every file, link and folder below, with the text of the small ones."""
    found = {}
    for root, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(root) / name
            text = (
                path.read_text(errors="replace")[:100]
                if path.is_file() and not path.is_symlink()
                else ""
            )
            found[str(path.relative_to(folder))] = text
    return found


def _said(words: list[str]) -> str:
    """The case, so that it can be repeated."""
    return repr(
        [word if len(word) <= 200 else f"{word[:40]}... ({len(word)} characters)" for word in words]
    )
