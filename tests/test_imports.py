"""Imports go one way: no module waits for itself, and no package for one above it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache, lru_cache
from pathlib import Path

from tests.rows import every

ROOT = Path(__file__).resolve().parents[1]
LAYERS = (  # a package imports from its own line and from those below
    ("cli", "commands", "__main__"),
    ("api", "explore", "report", "server"),
    ("bench", "study"),
    ("calibrate",),
    ("batching", "machines"),
    ("engine", "sim"),
    ("cost", "proof", "reference"),
    ("kernel",),
    ("schedule",),
    ("plan",),
    ("hardware", "models"),
    ("toolchain",),
    ("reading",),
    ("data", "files", "units", "workers"),
    ("text",),
    ("errors", "frozen"),
)
HEIGHT = {name: -line for line, names in enumerate(LAYERS) for name in names}


@lru_cache(maxsize=1)
def modules() -> dict[str, Path]:
    found = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): path
        for path in (ROOT / "twin").rglob("*.py")
    }
    return {
        name.removesuffix(".__init__"): path for name, path in found.items() if "_data" not in name
    }


def statements(block: ast.AST) -> Iterator[ast.AST]:
    """Those in it and in the blocks of these: expressions, most of a tree, import nothing."""
    for name in ("body", "handlers", "orelse", "finalbody", "cases"):
        for one in getattr(block, name, ()):
            yield one
            yield from statements(one)


@cache
def imports(path: Path) -> frozenset[str]:
    """Modules of ours that a file imports, anywhere in it: also those for annotations alone."""
    known, found = modules(), set()
    for node in statements(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "twin":
            names = (f"{node.module}.{alias.name}" for alias in node.names)
            found |= {name if name in known else node.module for name in names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.split(".")[0] == "twin"}
    return frozenset(found - {"twin"})


def test_no_module_imports_itself_by_way_of_others() -> None:
    known = modules()
    left = {name: imports(path) for name, path in known.items()}
    while free := [name for name, needs in left.items() if not needs & left.keys()]:
        for name in free:
            del left[name]
    assert not left, f"a circle among {', '.join(sorted(left))}"


@every("package", sorted(HEIGHT))
def test_a_package_imports_only_from_below(package: str) -> None:
    known = modules()
    for name, path in known.items():
        if name.split(".")[1:2] != [package]:
            continue
        for other in imports(path):
            needed = other.split(".")[1]
            assert HEIGHT[needed] <= HEIGHT[package], f"{name} imports {other}, which lies above it"


def test_every_package_has_its_layer() -> None:
    assert {name.split(".")[1] for name in modules() if "." in name} <= HEIGHT.keys()
