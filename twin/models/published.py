"""Published parameter counts: rounded, with or without the embedding table. The configuration must
give them, or say why not.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Annotated

from twin.errors import ConfigError
from twin.frozen import frozen
from twin.models.spec import ModelSpec
from twin.reading import Check
from twin.text import shown

_SCALES = {"B": 10**9, "T": 10**12, "M": 10**6}
_PRINTED = re.compile(r"[0-9]{1,12}(\.[0-9]{1,12})? [BTM]\Z")


def _check_printed(text: str) -> None:
    if not _PRINTED.match(text):
        raise ConfigError(f"{shown(text)} must be a number and M, B or T, such as '116.8 B'")


@frozen
class Published:
    """`total`, `active`: as printed ("116.8 B"), each good to half of its last digit. `embedding`:
    whether active counts the embedding table.
    """

    total: Annotated[str, Check(_check_printed)]
    active: Annotated[str, Check(_check_printed)]
    embedding: bool = False
    difference: str = ""


def check_published(published: Published, spec: ModelSpec) -> None:
    """Refuse counts that the configuration does not give, unless `difference` explains them; refuse
    an explanation of nothing.
    """
    table = spec.vocab * spec.hidden if published.embedding and not spec.tied else 0
    counts = (
        ("total", published.total, spec.parameters),
        ("active", published.active, spec.active_parameters + table),
    )
    wrong = [
        f"{name} {printed} but config gives {count}"
        for name, printed, count in counts
        if not agrees(printed, count)
    ]
    if wrong and not published.difference:
        raise ConfigError(f"{'; '.join(wrong)}; correct the wrong one, or explain it in difference")
    if not wrong and published.difference:
        raise ConfigError("difference explains counts that agree; remove it")


def agrees(text: str, count: int) -> bool:
    """Whether a count rounds to the printed one."""
    number, _, scale = text.partition(" ")
    exponent = -len(number.partition(".")[2])
    least = Decimal(5).scaleb(exponent - 1)
    return abs(Decimal(count) / _SCALES[scale] - Decimal(number)) <= least
