"""Pieces of a source replaced by others, for kernels with marks or with something left out: however
the source is laid out.
"""

from __future__ import annotations

import re
from itertools import pairwise

from twin.errors import ConfigError


def replaced(text: str, old: str, new: str) -> str:
    """`text` with `new` for `old`, which it holds once but for blanks and ends of lines. Raises
    ConfigError otherwise.
    """
    tokens = re.findall(r"\w+|[^\w\s]", old)
    gaps = (
        r"\s+" if re.match(r"\w{2}", one[-1] + two[0]) else r"\s*" for one, two in pairwise(tokens)
    )
    pattern = re.compile(
        "".join(re.escape(token) + gap for token, gap in zip(tokens, (*gaps, ""), strict=True))
    )
    found = list(pattern.finditer(text))
    if len(found) != 1:
        raise ConfigError(
            f"{old!r} is there {len(found)} times, not once; name a piece that is there once"
        )
    (at,) = found
    return text[: at.start()] + new.strip(" ") + text[at.end() :]
