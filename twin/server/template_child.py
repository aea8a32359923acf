"""Renders a chat template in a process that may be killed: one JSON object a line in, one out.

A template is code from whoever made the checkpoint. It runs in jinja2's immutable sandbox, with a
limit on memory; the parent ends the process when it takes too long. Imports nothing of ours.
"""

from __future__ import annotations

import json
import resource
import sys
from datetime import datetime
from typing import Any, NoReturn

sys.path += sys.argv[2:]  # where the libraries lie, behind what is found by itself

from jinja2 import Template, nodes
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

NOTHING = {"tools": None, "documents": None}  # templates test whether these are none


class Names(Namespace):
    """A template's own variables. Python looks for names that begin with an underscore by itself,
    so a template may not set them.
    """

    def __init__(*args: Any, **values: Any) -> None:
        self, *given = args  # so that a template may call one of its names self
        found = dict(*given, **values)
        for name in found:
            _allowed(name)
        Namespace.__init__(self, found)

    def __setitem__(self, name: str, value: Any) -> None:
        _allowed(name)
        Namespace.__setitem__(self, name, value)


def _allowed(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"namespace: {name!r} begins with an underscore")


def _dict(*given: Any, **values: Any) -> dict[Any, Any]:
    """Python's `dict` without the attributes of a class."""
    return dict(*given, **values)


class Answers(Extension):
    """`{% generation %}` marks what a model says, for those who train one; here it is only text."""

    tags = {"generation"}  # noqa: RUF012 - as jinja2 declares it

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def compiled(source: str) -> Template:
    """As transformers configures it, so that published templates mean what they mean there."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Answers], autoescape=False
    )
    environment.filters["tojson"] = _tojson
    environment.globals |= {"raise_exception": _refuse, "strftime_now": _now}
    environment.globals |= {"namespace": Names, "dict": _dict}
    return environment.from_string(source)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _refuse(message: str) -> NoReturn:
    raise TemplateError(str(message))


def _now(layout: str) -> str:
    return datetime.now().strftime(layout)


def rendered(template: Template, values: dict[str, Any], most: int) -> str:
    """Raises ValueError as soon as the text is longer than `most` characters."""
    pieces, size = [], 0
    for piece in template.generate(values):
        size += len(piece)
        if size > most:
            raise ValueError(f"it renders more than {most} characters")
        pieces.append(piece)
    return "".join(pieces)


def _limit(memory_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))  # writes no file
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def main() -> None:
    template: Template | None = None
    _limit(int(sys.argv[1]))
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if "template" in request:
                template = compiled(request["template"])
                answer = {"text": ""}
            else:
                assert template is not None
                answer = {"text": rendered(template, NOTHING | request["values"], request["most"])}
        except (Exception, MemoryError) as error:
            answer = {"error": f"{type(error).__name__}: {error}"[:500]}
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
