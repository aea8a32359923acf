"""Published parameter counts: rounded, with or without the embedding table. The configuration must
give them, or say why not.
"""

from __future__ import annotations

import re
from decimal import Decimal

from twin.errors import ConfigError
from twin.models.config import Config
from twin.models.spec import ModelSpec
from twin.text import shown

_SCALES = {"B": 10**9, "T": 10**12, "M": 10**6}
_NUMBER = re.compile(r"[0-9]{1,12}(\.[0-9]{1,12})?")
_KEYS = ("total", "active", "embedding", "difference")


def check_published(fields: Config, spec: ModelSpec) -> None:
    """Refuse counts that the configuration does not give, unless `difference` explains them; refuse
    an explanation of nothing.

    `total`, `active`: as printed ("116.8 B"), each good to half of its last digit. `embedding`:
    whether active counts the embedding table.
    """
    for key in fields.values:
        if key not in _KEYS:
            raise ConfigError(
                f"{fields.name}: {shown(key)}: unknown key; allowed: {', '.join(_KEYS)}"
            )
    table = 0 if spec.tied or not fields.flag("embedding", False) else spec.vocab * spec.hidden
    computed = {"total": spec.parameters, "active": spec.active_parameters + table}
    wrong = [
        f"{key} {fields.text(key)} but config gives {computed[key]}"
        for key in computed
        if not agrees(fields, key, computed[key])
    ]
    if wrong and "difference" not in fields:
        raise ConfigError(
            f"{fields.name}: {'; '.join(wrong)}; correct the wrong one, or explain it in difference"
        )
    if not wrong and "difference" in fields:
        raise ConfigError(f"{fields.name}: difference explains counts that agree; remove it")


def agrees(fields: Config, key: str, count: int) -> bool:
    """Whether a count rounds to the printed one."""
    text = fields.text(key)
    number, _, scale = text.partition(" ")
    if scale not in _SCALES or not _NUMBER.fullmatch(number):
        raise fields.refuse(key, "a number and M, B or T, such as '116.8 B'")
    printed = Decimal(number)
    exponent = -len(number.partition(".")[2])
    return abs(Decimal(count) / _SCALES[scale] - printed) <= Decimal(5).scaleb(exponent - 1)
