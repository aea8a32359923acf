"""Values and arguments as models write them: JSON, Gemma's braces, Python's calls."""

from __future__ import annotations

import ast
import json
import re
from typing import Any

_GEMMA = re.compile(
    r'<\|"\|>(.*?)<\|"\|>|([{\[\]},:]|"(?:[^"\\]|\\.)*")|([^{}\[\],:\s"][^{}\[\],:"]*)', re.DOTALL
)


class Malformed(Exception):
    """This is no call; its text is content."""


def loaded(text: str, otherwise: Any = None) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        if otherwise is None:
            raise Malformed from None
        return otherwise


def of_braces(text: str) -> Any:
    """Gemma's arguments as Python has them: keys without quotes, texts between marks. Raises
    Malformed.
    """
    written = []
    tokens = list(_GEMMA.finditer(text))
    for at, token in enumerate(tokens):
        if token[2]:
            written.append(token[2])
        elif token[1] is not None:
            written.append(json.dumps(token[1]))
        else:
            word = token[3].strip()
            is_key = at + 1 < len(tokens) and tokens[at + 1][2] == ":"
            plain = not is_key and re.fullmatch(
                r"-?\d+(\.\d+)?([eE][+-]?\d+)?|true|false|null", word
            )
            written.append(word if plain else json.dumps(word))
    try:
        return json.loads("".join(written))
    except (ValueError, RecursionError) as error:
        raise Malformed from error


def of_python(text: str) -> list[tuple[str, dict[str | None, Any]]]:
    """Names and arguments of `[name(key=value)]`. Raises Malformed."""
    try:
        tree = _JsonNames().visit(ast.parse(text.strip(), mode="eval")).body
        found = tree.elts if isinstance(tree, ast.List) else [tree]
        calls = [
            (ast.unparse(one.func), {k.arg: ast.literal_eval(k.value) for k in one.keywords})
            for one in found
            if isinstance(one, ast.Call)
        ]
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise Malformed from error
    if not calls:
        raise Malformed
    return calls


class _JsonNames(ast.NodeTransformer):
    """JSON's constants, which models write among Python's."""

    def visit_Name(self, node: ast.Name) -> ast.expr:  # as ast calls it
        names = {"true": True, "false": False, "null": None}
        return ast.Constant(names[node.id]) if node.id in names else node
