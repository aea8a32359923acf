"""Does a change of the native sources leave the machine code alone? Compares two trees:
`python -m tests.machine_code COMMIT`.

Of every case: the sections with instructions and constants of the cubin for sm_90a, and of the host
engine's object file. A host object names files and lines only where a law of the layout is broken;
paths are cut off, line numbers are compared. The other tree is checked out next to this one for
as long as it takes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve()
ROOT = HERE.parents[1]
DEVICE = (  # MODEL NODE and options
    ("llama-3.2-1b", "1xh200"),
    ("qwen3-8b", "1xh200"),
    ("laneformer-2b", "8xh200"),
    ("laneformer-2b", "1xh200"),
    ("llama-3.2-1b", "1xh200", "graph"),
)
HOST = (("llama-3.2-1b", "1xh200"), ("laneformer-2b", "8xh200"))
CODE = re.compile(r"\.(text|rodata|data|nv\.constant|nv\.global|nv\.shared)")


def sections(elf: bytes) -> Iterator[tuple[str, bytes]]:
    """Name and content of the sections of a 64-bit little-endian ELF file that hold code and
    constants.
    """
    (table,) = struct.unpack_from("<Q", elf, 40)
    size, count, names_at = struct.unpack_from("<HHH", elf, 58)
    rows = [struct.unpack_from("<IIQQQQ", elf, table + size * i) for i in range(count)]
    names = rows[names_at][4]
    for name, kind, _, _, start, length in rows:
        called = elf[names + name : elf.index(b"\0", names + name)].decode()
        if CODE.match(called):
            # 8: SHT_NOBITS, no bytes in the file
            yield called, elf[start : start + length] if kind != 8 else b""


def digests_of_code(elf: bytes) -> dict[str, str]:
    return {
        name: f"{hashlib.sha256(content).hexdigest()[:16]} ({len(content)} bytes)"
        for name, content in sections(elf)
    }


def planned(case: tuple[str, ...]) -> object:
    from tests.identity import module
    from twin.hardware.load import load_node
    from twin.models.load import load_model
    from twin.plan.options import Execution

    options = module("twin.schedule.options", "twin.kernel.defaults")
    chosen = {"execution": Execution.GRAPH} if "graph" in case else {}
    return options.plan_for(load_model(case[0]), load_node(case[1]), **chosen)


def device_code(case: tuple[str, ...]) -> bytes:
    from twin.engine.cuda_build import compile_cubin

    return compile_cubin(planned(case)).cubin  # type: ignore[arg-type]


def host_code(case: tuple[str, ...]) -> bytes:
    """The unlinked object: what it calls is named, not addressed."""
    from twin.data import data_dir
    from twin.kernel.header import header
    from twin.toolchain import FLAGS, host_compiler

    native = data_dir("native")
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "plan.h").write_text(
            header(planned(case), embedded=False), encoding="utf-8"
        )  # type: ignore[arg-type]
        flags = [
            *(f for f in FLAGS if f != "-shared"),
            "-march=native",
            f"-ffile-prefix-map={native}=native",
        ]
        source, made = native / "platform" / "host_main.cpp", Path(folder) / "engine.o"
        subprocess.run(
            [host_compiler(), *flags, f"-I{folder}", "-c", str(source), "-o", str(made)], check=True
        )
        return made.read_bytes()


def digests(only: str) -> dict[str, dict[str, str]]:
    """Of the tree that Python imports from."""
    work: dict[str, tuple[Callable[[tuple[str, ...]], bytes], tuple[str, ...]]] = {}
    work |= {f"host {' '.join(case)}": (host_code, case) for case in HOST}
    work |= {f"sm_90a {' '.join(case)}": (device_code, case) for case in DEVICE}
    found = {}
    for name, (compiled, case) in work.items():
        if re.search(only, name):
            found[name] = digests_of_code(compiled(case))
            print(name, file=sys.stderr, flush=True)
    return found


def digests_of(tree: Path, only: str) -> dict[str, dict[str, str]]:
    """In a process that imports from `tree`."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "digests.json"
        command = [sys.executable, str(HERE), "--digest", str(out), "--only", only]
        subprocess.run(command, cwd=tree, env=os.environ | {"PYTHONPATH": str(tree)}, check=True)
        found: dict[str, dict[str, str]] = json.loads(out.read_text())
    return found


def digests_of_commit(commit: str, only: str) -> dict[str, dict[str, str]]:
    with tempfile.TemporaryDirectory() as folder:
        other = Path(folder) / "tree"
        subprocess.run(
            ["git", "-C", str(ROOT), "worktree", "add", "--quiet", "--detach", str(other), commit],
            check=True,
        )
        try:
            return digests_of(other, only)
        finally:
            subprocess.run(
                ["git", "-C", str(ROOT), "worktree", "remove", "--force", str(other)], check=True
            )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("commit", nargs="?", default="HEAD", help="what to compare this tree with")
    parser.add_argument(
        "--only", default="", metavar="REGEX", help="compare only the cases whose name it finds"
    )
    parser.add_argument("--digest", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.digest:
        args.digest.write_text(json.dumps(digests(args.only)))
        return 0
    with ThreadPoolExecutor(max_workers=2) as pool:
        here, there = (
            pool.submit(digests_of, ROOT, args.only),
            pool.submit(digests_of_commit, args.commit, args.only),
        )
        ours, theirs = here.result(), there.result()
    differ = [
        f"{case}: {name}: {theirs[case].get(name)} there, {ours[case].get(name)} here"
        for case in ours
        for name in sorted({*ours[case], *theirs[case]})
        if ours[case].get(name) != theirs[case].get(name)
    ]
    print(
        "\n".join(differ)
        or f"{len(ours)} builds, {sum(map(len, ours.values()))} sections of code and constants: "
        "equal"
    )
    return int(bool(differ) or not ours)


if __name__ == "__main__":
    raise SystemExit(main())
