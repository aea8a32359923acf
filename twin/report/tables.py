"""Plain text for terminals: tables and bars."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Collection, Mapping, Sequence

BAR_WIDTH = 60
PAGE_WIDTH = 100  # columns where nothing says how wide the terminal is
LEAST_WIDTH = 40
BAR_SIGNS = "█▓▒░▚▞▤▥"


def table(
    header: Sequence[str],
    rows: Sequence[Sequence[object]],
    *,
    text_columns: int | Collection[int] = 1,
) -> str:
    """Columns wide enough for their cells: the first `text_columns`, or those of these places, to
    the left, numbers to the right.

    A cell that is None stays empty.
    """
    cells = [
        [str(h) for h in header],
        *([("" if c is None else str(c)) for c in row] for row in rows),
    ]
    texts = range(text_columns) if isinstance(text_columns, int) else text_columns
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = []
    for row in cells:
        padded = [
            c.ljust(w) if i in texts else c.rjust(w)
            for i, (c, w) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(padded).rstrip())
    lines.insert(1, "  ".join("-" * w for w in widths))
    return "\n".join(lines)


def terminal_width() -> int:
    """Columns of the terminal that stdout is, by COLUMNS where that is set."""
    return max(LEAST_WIDTH, shutil.get_terminal_size((PAGE_WIDTH, 24)).columns)


def hanging(mark: str, text: str, width: int) -> str:
    """`text` behind its mark, in lines of at most `width` columns that begin below its first
    word.
    """
    return textwrap.fill(
        text,
        width,
        initial_indent=mark,
        subsequent_indent=" " * len(mark),
        break_on_hyphens=False,
    )


def facts(pairs: Sequence[tuple[str, object]]) -> str:
    """Name and value, one a line."""
    width = max(len(name) for name, _ in pairs)
    return "\n".join(f"{name.ljust(width)}  {value}" for name, value in pairs)


def bar(parts: Mapping[str, float], *, width: int = BAR_WIDTH) -> str:
    """Shares of a whole as one bar and its legend, the largest first. Parts below half a character
    stay in the legend.
    """
    total = sum(parts.values())
    if total <= 0:
        return ""
    ordered = sorted(parts.items(), key=lambda item: -item[1])
    signs = {name: BAR_SIGNS[i % len(BAR_SIGNS)] for i, (name, _) in enumerate(ordered)}
    drawn = "".join(signs[name] * round(width * value / total) for name, value in ordered)
    legend = "   ".join(
        f"{signs[name]} {name} {percent(value / total)}" for name, value in ordered if value > 0
    )
    return f"[{drawn[:width].ljust(width)}]\n {legend}"


def percent(fraction: float, *, signed: bool = False) -> str:
    return f"{100 * fraction:+.1f}%" if signed else f"{100 * fraction:.1f}%"


def count(value: float) -> str:
    """A rate or a count for people: thousands separated, three digits below 100."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
