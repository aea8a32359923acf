"""Does a change of the code leave alone what the program computes? Compares two trees:
`python -m tests.identity COMMIT`.

Of every case: the plan's image, the header that a device's kernel is compiled with, the twin's
result and its trace. The sources of the kernel are compared as well: the same header and the same
sources but for comments are the same machine code. The other tree is checked out next to this one
for as long as it takes; what it computes is kept under build/identity for the next comparison.
Fields of a prediction that a change was meant to change are left out by `--without`.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import io
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
COMMENT = re.compile(r"//[^\n]*")
HERE = Path(__file__).resolve()
ONLY = "MONOTWIN_IDENTITY_ONLY"  # how a comparison tells its processes which cases to compute
WITHOUT = "MONOTWIN_IDENTITY_WITHOUT"  # and which fields of a prediction to leave out
DENSE = ("laneformer-2b", "llama-3.2-1b", "qwen2.5-coder-1.5b", "qwen3-8b", "llama-3.1-8b")
LARGE = ("llama-3.1-70b",)
SIMULATED = (
    "gpt-oss-20b",
    "qwen3-30b-a3b",
    "deepseek-v3",
    "qwen3-coder-next",
    "deepseek-v4-flash",
    "gemma-4-31b",
    "mixtral-8x7b",
)
NODES = ("1xh200", "1xh100", "1xmi300x")
CHOICES: tuple[tuple[str, ...], ...] = (
    (),
    ("--context", "2000", "--max-context", "4096"),
    ("--handoff", "counter"),
    ("--execution", "graph"),
    ("--sampling", "full"),
)


def cases() -> Iterator[tuple[str, ...]]:
    """MODEL NODE and options, as on the command line."""
    yield from (
        (model, node, *chosen) for model, node, chosen in itertools.product(DENSE, NODES, CHOICES)
    )
    several = itertools.product((*DENSE, *LARGE), ("2xh200", "8xh200"))
    # its 12 heads do not divide
    yield from (case for case in several if case != ("qwen2.5-coder-1.5b", "8xh200"))
    yield from ((model, "8xh200") for model in SIMULATED)
    yield ("laneformer-2b", "8xmi300x")


def module(*names: str) -> Any:
    """The first of these modules that the tree has: rooms have moved."""
    for name in names:
        with contextlib.suppress(ModuleNotFoundError):
            return importlib.import_module(name)
    raise SystemExit(f"none of {', '.join(names)} is in {sys.path[0]}")


def code_of(text: str) -> bytes:
    """Source text without its comments."""
    return "\n".join(
        filter(None, (COMMENT.sub("", line).rstrip() for line in text.splitlines()))
    ).encode()


def digest(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def digests(folder: Path, only: str = "") -> dict[str, dict[str, str]]:
    """Of the tree that Python imports from."""
    tables = module("twin.kernel.tables", "twin.kernel.layout", "twin.plan.layout")
    header = module("twin.kernel.header", "twin.plan.header")
    defaults = module("twin.schedule.options", "twin.kernel.defaults", "twin.plan.defaults")
    load_model = module("twin.models.load").load_model
    load_node = module("twin.hardware.load").load_node
    toolchain = module("twin.toolchain")
    found = {
        "the kernel's sources": {
            path.name: digest(code_of(path.read_text(encoding="utf-8")))
            for path in toolchain.native_sources()
        }
    }
    for words in cases():
        case = " ".join(words)
        if not re.search(only, case):
            continue
        found[case] = _simulated(words, folder)
        plan = defaults.plan_for(load_model(words[0]), load_node(words[1]), **_options(words[2:]))
        if plan.simulation_only() is None:
            found[case]["image"] = digest(_image(tables, plan).tobytes())
            found[case]["header"] = digest(code_of(header.header(plan)))
        print(case, file=sys.stderr, flush=True)
    return found


def _image(tables: Any, plan: Any) -> Any:
    """Of this tree, or of one where it was a function."""
    made = tables.layout(plan)
    return made.image() if hasattr(made, "image") else tables.image(plan)


def _options(words: tuple[str, ...]) -> dict[str, Any]:
    types = module("twin.plan.options", "twin.plan.types")
    kinds = {"handoff": types.HandOffKind, "execution": types.Execution, "sampling": types.Sampling}
    named = {
        name.removeprefix("--").replace("-", "_"): value
        for name, value in zip(words[::2], words[1::2], strict=True)
    }
    return {
        name: kinds[name](value) if name in kinds else int(value) for name, value in named.items()
    }


def _simulated(words: tuple[str, ...], folder: Path) -> dict[str, str]:
    """What `twin simulate` prints of the default plan, and the trace that it writes."""
    trace = folder / "trace.json"
    said = io.StringIO()
    # where it would search for a better one, for minutes
    fixed = ["--plan", "fixed"] if find_spec("twin.commands.best") else []
    line = ["simulate", *words, *fixed, "--json", "--trace", str(trace)]
    with contextlib.redirect_stdout(said):
        code = module("twin.cli").main(line)
    if code:
        raise SystemExit(f"twin simulate {' '.join(words)} ended with {code}")
    result = json.loads(said.getvalue())
    for name in ("trace", "trace_file", "wall_s", *os.environ.get(WITHOUT, "").split(",")):
        *path, last = name.split(".")
        reduce(dict.__getitem__, path, result).pop(last, None)
    made = {
        "prediction": digest(json.dumps(result, sort_keys=True).encode()),
        "trace": digest(trace.read_bytes()),
    }
    trace.unlink()
    return made


def compared(theirs: dict[str, dict[str, str]], ours: dict[str, dict[str, str]]) -> list[str]:
    """Where the trees differ."""
    return [
        f"{case}: {what}: {theirs.get(case, {}).get(what)} there, {ours.get(case, {}).get(what)} "
        "here"
        for case in {**theirs, **ours}
        for what in sorted({*theirs.get(case, {}), *ours.get(case, {})})
        if theirs.get(case, {}).get(what) != ours.get(case, {}).get(what)
    ]


def digests_of(tree: Path, only: str = "") -> dict[str, dict[str, str]]:
    """In a process that imports from `tree`."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "digests.json"
        environment = os.environ | {"PYTHONPATH": str(tree), ONLY: only}
        subprocess.run(
            [sys.executable, str(HERE), "--digest", str(out)], cwd=tree, env=environment, check=True
        )
        found: dict[str, dict[str, str]] = json.loads(out.read_text())
    return found


def digests_of_commit(commit: str, only: str = "") -> dict[str, dict[str, str]]:
    """Computed once for a commit: this file's text, the commit's name and what is left out are the
    key.
    """
    name = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", commit], check=True, capture_output=True, text=True
    ).stdout.strip()
    key = digest(HERE.read_bytes(), os.environ.get(WITHOUT, "").encode(), only.encode())
    kept = ROOT / "build" / "identity" / f"{name[:12]}-{key}.json"
    if not kept.exists():
        with tempfile.TemporaryDirectory() as folder:
            other = Path(folder) / "tree"
            subprocess.run(
                [
                    "git",
                    "-C",
                    str(ROOT),
                    "worktree",
                    "add",
                    "--quiet",
                    "--detach",
                    str(other),
                    name,
                ],
                check=True,
            )
            try:
                found = digests_of(other, only)
            finally:
                subprocess.run(
                    ["git", "-C", str(ROOT), "worktree", "remove", "--force", str(other)],
                    check=True,
                )
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.write_text(json.dumps(found))
    known: dict[str, dict[str, str]] = json.loads(kept.read_text())
    return known


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("commit", nargs="?", help="the tree to compare with")
    parser.add_argument(
        "--only", default="", metavar="REGEX", help="cases that hold this, such as '1xh200$'"
    )
    parser.add_argument(
        "--without",
        metavar="FIELDS",
        help="of a prediction, that were meant to change, such as floor_s,options.lookup",
    )
    parser.add_argument("--digest", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.without:
        os.environ[WITHOUT] = chosen.without
    if chosen.digest:
        with tempfile.TemporaryDirectory() as folder:
            chosen.digest.write_text(json.dumps(digests(Path(folder), os.environ.get(ONLY, ""))))
        return 0
    with ThreadPoolExecutor(2) as both:
        there, here = (
            both.submit(digests_of_commit, chosen.commit, chosen.only),
            both.submit(digests_of, ROOT, chosen.only),
        )
        theirs, ours = there.result(), here.result()
    differences = compared(theirs, ours)
    print("\n".join(differences))
    plans = len(ours) - 1
    print(
        f"{plans} plans compared with {chosen.commit}: "
        f"{'identical' if not differences else f'{len(differences)} differences'}"
    )
    return int(bool(differences))


if __name__ == "__main__":
    sys.exit(main())
