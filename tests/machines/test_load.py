"""Machine files: sources, and every mistake with its place."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from twin.data import data_dir, read_yaml
from twin.errors import HardwareError
from twin.machines.load import load_machine, machine_names, read_machine

FOLDER = data_dir("hwmodels") / "machines"


@pytest.mark.parametrize("name", machine_names())
def test_every_source_is_listed(name: str) -> None:
    known = {*read_yaml(data_dir("hwmodels") / "sources.yaml")}
    machine = load_machine(name)
    for source in (
        *(n.source for n in machine.numbers().values()),
        *(row.source for row in machine.published),
    ):
        assert source.partition(":")[0] in known, source


def changed(tmp_path: Path, **changes: Any) -> Path:
    data: dict[str, Any] = copy.deepcopy(read_yaml(FOLDER / "cerebras-cs3.yaml"))
    data.update(changes)
    path = tmp_path / "cerebras-cs3.yaml"
    path.write_text(yaml.safe_dump({key: value for key, value in data.items() if value is not ...}))
    return path


ROW = {"model": "kimi-k2.6", "tokens_per_s": 981, "kind": "measured", "source": "AA", "use": "fit"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "other"}, "must be the file's name"),
        ({"colour": "blue"}, "colour: unknown key"),
        ({"step_s": ...}, "step_s: missing"),
        ({"spread": "diagonal"}, "spread: 'diagonal' is unknown"),
        (
            {"bytes_per_s": {"value": "-1 TB/s", "kind": "vendor", "source": "CEREBRAS"}},
            "out of range",
        ),
        ({"usable_bytes": ...}, "usable_bytes: a hard-wired machine names its model"),
        ({"units": {"value": 3, "kind": "vendor", "source": "CEREBRAS"}}, "one of the two"),
        ({"published": []}, "0 figures of use fit"),
        ({"published": [ROW, ROW]}, "2 figures of use fit"),
        ({"published": [{**ROW, "model": "kimi-k3"}]}, "published[0].model: 'kimi-k3'"),
        ({"published": [{**ROW, "tokens_per_s": -1}]}, "tokens_per_s: -1"),
        ({"published": [{**ROW, "context": 0}]}, "context: 0"),
        ({"published": [{**ROW, "kind": "heard"}]}, "kind: 'heard' is unknown"),
        ({"published": "none"}, "published: 'none' must be a list"),
        ({"not_modelled": [""]}, "not_modelled[0]: '' must be text"),
    ],
)
def test_a_wrong_machine_file_is_named(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(HardwareError, match=r"cerebras-cs3\.yaml") as error:
        read_machine(changed(tmp_path, **changes))
    assert message in str(error.value)


def test_a_mistyped_machine_gives_the_closest() -> None:
    with pytest.raises(HardwareError, match="did you mean cerebras-cs3"):
        load_machine("cerebras-cs33")
