"""Keys of a configuration that no family reads: those known to change nothing that is computed or
counted, and the values at which others change nothing (hwmodels/configurations/unread.csv). Every
other key is refused by its name.

A key that a family reads is never looked up here. So a key stands here only if no family could
mean something else by it.
"""

from __future__ import annotations

from functools import lru_cache

from twin.data import cell, read_table
from twin.errors import ConfigError
from twin.models.config import Config, spelt
from twin.text import shown

_MOST_NAMED = 5


def refuse_unread(config: Config, kind: str) -> None:
    """Raises ConfigError for keys that the family of this model_type did not read, and that are not
    known to change nothing.
    """
    left = [
        (where.name.removeprefix(f"{config.name}: "), spelt(key), where.values[key])
        for where, key in config.unread()
        if not _passes(key, where.values[key])
    ]
    if left:
        named = [
            f"{key if where == config.name else f'{where}.{key}'} is {shown(value)}"
            for where, key, value in left[:_MOST_NAMED]
        ]
        more = f" and {len(left) - _MOST_NAMED} more" if len(left) > _MOST_NAMED else ""
        raise ConfigError(
            f"{config.name}: {'; '.join(named)}{more}; allowed: keys that a {kind} model has, "
            "because what others change is not described; remove a key that changes nothing, or "
            "use another model"
        )


def _passes(key: str, value: object) -> bool:
    """Does a key change nothing, at any value or at this one?"""
    if key not in (known := _known()):
        return False
    if key == "layer_types":
        return isinstance(value, list | tuple) and set(map(str, value)) <= {"full_attention"}
    allowed = known[key]
    return allowed is None or any(type(value) is type(one) and value == one for one in allowed)


@lru_cache(maxsize=1)
def _known() -> dict[str, list[object] | None]:
    """The values at which each key changes nothing; None: it never does."""
    return {
        row["key"]: cell(row["values"]) if row["values"] else None
        for row in read_table("hwmodels", "configurations", "unread.csv")
    }
