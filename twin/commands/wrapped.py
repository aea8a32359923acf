"""Help as wide as the terminal."""

from __future__ import annotations

import argparse
import re
import textwrap

_ITEM = re.compile(r"- |\d+\. ")


class Wrapped(argparse.RawDescriptionHelpFormatter):
    """A paragraph is one text, as wide as the terminal; lists and examples keep their lines."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines: list[str] = []
        for line in text.splitlines():
            if lines and _goes_on(lines[-1], line):
                lines[-1] += f" {line.strip()}"
            else:
                lines.append(line)
        return "\n".join(indent + one for line in lines for one in _wrapped(line, width))


def _goes_on(text: str, line: str) -> bool:
    """Whether the line is of the same paragraph or item of a list as the text above it."""
    if not text or not line or text.startswith(" ") or _ITEM.match(line):
        return False
    return not line.startswith(" ") or bool(_ITEM.match(text))


def _wrapped(line: str, width: int) -> list[str]:
    if line.startswith(" "):
        return [line]
    hanging = _ITEM.match(line)
    return textwrap.wrap(
        line,
        width,
        subsequent_indent=" " * len(hanging[0]) if hanging else "",
        break_long_words=False,
        break_on_hyphens=False,
    ) or [""]
