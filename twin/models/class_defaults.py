"""What a key means that a configuration leaves out: the value that the family's configuration class
in transformers gives it (hwmodels/configurations/defaults.csv;
`tests/models/test_class_defaults.py` compares all of them).

Sizes that no published configuration leaves out are not here: readers require them by name. Null is
no missing key, and keeps the meaning that the family's code gives it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from twin.data import cell, read_table


def completed(kind: str, config: Mapping[str, object]) -> dict[str, object]:
    """The configuration of a `model_type` with what its class gives to keys that it leaves out."""
    return {**_defaults().get(kind, {}), **config}


@lru_cache(maxsize=1)
def _defaults() -> dict[str, dict[str, object]]:
    """By model_type."""
    found: dict[str, dict[str, object]] = {}
    for row in read_table("hwmodels", "configurations", "defaults.csv"):
        found.setdefault(row["model_type"], {})[row["key"]] = cell(row["value"])
    return found
