"""Configurations as they are published: each is read with the published counts and bytes, or is
refused by the name of a field. None is misread.

`public_configs.jsonl`, one a line: name; source (a key of hwmodels/sources.yaml, or a repository);
config; `side_files`, which say its format; total and active parameters of the model's card
or report; bytes of the weights as published; bytes that a token streams, derived matrix by matrix
from the published lists of what stays in 16 bits. `refused`: what the refusal names; `else`: it may
be refused by this, too. Configurations of towers and tokens are left out, and long lists of modules
where the model_type is refused.
"""

from __future__ import annotations

import json
import re
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from twin.data import data_dir, read_yaml
from twin.errors import ConfigError
from twin.models.load import load_model
from twin.models.spec import ModelSpec

RECORDS = [
    json.loads(line)
    for line in Path(__file__).with_name("public_configs.jsonl").read_text().splitlines()
]
SCALES = {"M": 10**6, "B": 10**9, "GB": 10**9, "T": 10**12}
TOLERANCE = 0.02


def folder(record: dict[str, Any], where: Path) -> Path:
    made = where / record["name"].rpartition("/")[2]
    made.mkdir()
    for name, content in {"config.json": record["config"], **record.get("side_files", {})}.items():
        (made / name).write_text(json.dumps(content))
    return made


def read(path: Path) -> ModelSpec | str:
    """The model, or what the refusal says."""
    try:
        return load_model(path)
    except ConfigError as error:
        return str(error)


def agrees(printed: str, *counts: float) -> bool:
    """Whether one of the counts rounds to the printed one, or is within TOLERANCE of it."""
    number, scale = printed.split()
    value = float(number) * SCALES[scale]
    places = -int(Decimal(number).as_tuple().exponent)
    half = 0.5 * 10.0**-places * SCALES[scale]
    return any(abs(count - value) <= max(half, TOLERANCE * value) for count in counts)


def differences(record: dict[str, Any], spec: ModelSpec) -> list[str]:
    table = spec.vocab * spec.hidden  # which some publishers count as active
    small = 2 * spec.vector_parameters
    found = {
        "total": (spec.parameters,),
        "active": (spec.active_parameters, spec.active_parameters + table),
        "bytes": (spec.stored_bytes + small,),
        "streamed": (spec.streamed_bytes,),
    }
    return [
        f"{key} {record[key]}, read as {', '.join(f'{count:.4g}' for count in counts)}"
        for key, counts in found.items()
        if key in record and not agrees(record[key], *counts)
    ]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: record["name"])
def test_a_public_configuration_is_read_right_or_refused_by_name(
    record: dict[str, Any], tmp_path: Path
) -> None:
    path = folder(record, tmp_path)
    if "refused" in record:
        with pytest.raises(ConfigError, match=re.escape(record["refused"])):
            load_model(path)
        return
    found = read(path)
    if isinstance(found, ModelSpec):
        assert differences(record, found) == []
    else:
        assert "else" in record, found
        assert record["else"] in found


def test_there_are_many_of_every_kind() -> None:
    assert len(RECORDS) >= 120
    assert len({record["name"] for record in RECORDS}) == len(RECORDS)
    read = [record for record in RECORDS if "refused" not in record]
    assert len(read) >= 60
    assert all("total" in record for record in read)
    assert sum("bytes" in record or "streamed" in record for record in read) >= 15
    known = read_yaml(data_dir("hwmodels") / "sources.yaml")
    for record in RECORDS:
        key = record["source"].partition(":")[0]
        assert key in known or key.startswith("github.com/"), key
