from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from twin.data import data_dir, read_yaml
from twin.errors import ConfigError, HardwareError
from twin.hardware.load import device_names, load_device, load_node, node_names, read_device, read_family
from twin.hardware.override import assumed, numbers
from twin.hardware.types import Kind

DEVICES = ["b200", "b300", "h100-sxm", "h200-sxm", "mi300x", "mi325x", "mi355x", "mi455x", "rubin-r200"]


def test_every_device_is_there() -> None:
    assert device_names() == ["host", *DEVICES]


@pytest.mark.parametrize("name", node_names())
def test_every_number_of_every_node_has_a_source_and_a_range(name: str) -> None:
    node = load_node(name)
    for path, number in numbers(node).items():
        assert number.source.strip(), path
        if number.kind is Kind.ASSUMED:
            assert number.low is not None, path
            assert number.high is not None, path
            assert number.low <= number.value <= number.high, path
    assert (node.link is None) == (node.gpus == 1)
    assert f"{node.gpus}x{node.device.name}" == name


@pytest.mark.parametrize("name", DEVICES)
def test_every_source_is_listed(name: str) -> None:
    known = read_yaml(data_dir("hwmodels") / "sources.yaml")
    for path, number in numbers(load_node(f"8x{name}")).items():
        words = number.source.split(":")[0].split(", ")
        assert all(word.split(";")[0] in known for word in words), f"{path}: {number.source}"


@pytest.mark.parametrize("name", DEVICES)
def test_only_what_this_project_probed_is_measured(name: str) -> None:
    for path, number in numbers(load_node(f"8x{name}")).items():
        assert (number.kind is Kind.MEASURED) == number.source.startswith("H200-PROBES"), path


@pytest.mark.parametrize(
    ("alias", "name"),
    [("8xh200", "8xh200-sxm"), ("1xh100", "1xh100-sxm"), ("8xrubin", "8xrubin-r200"), ("host", "1xhost"), ("h200", "1xh200-sxm")],
)
def test_aliases_name_the_same_node(alias: str, name: str) -> None:
    assert load_node(alias) == load_node(name)
    assert load_node(alias).name == name


def test_a_device_alias_is_the_device() -> None:
    assert load_device("h200") == load_device("h200-sxm")


@pytest.mark.parametrize("wrong", ["8xh20", "3xh200", "16xmi300x", "h2oo", "", "x", "8x", "-1xh200"])
def test_an_unknown_node_lists_known_ones(wrong: str) -> None:
    with pytest.raises(HardwareError, match=r"did you mean|allowed"):
        load_node(wrong)


def test_an_unknown_device_gives_the_closest() -> None:
    with pytest.raises(HardwareError, match="did you mean mi300x"):
        load_device("mi300")


def test_all_reduce_grows_with_the_gpus() -> None:
    for name in DEVICES:
        times = [link.library_allreduce_s.value for n in (2, 4, 8) if (link := load_node(f"{n}x{name}").link)]
        assert times == sorted(times)
        assert len(times) == 3


def test_the_measured_ceiling_of_the_h200() -> None:
    device = load_device("h200")
    assert device.memory.stream_bytes_per_s.value == 4.61e12
    assert device.memory.stream_bytes_per_s.kind is Kind.MEASURED
    assert device.blocks == 132
    assert device.fabric is None
    assert device.llc is None


def test_assumed_numbers_are_listed() -> None:
    assert "block.stage_s" in assumed(load_device("h200"))
    assert "memory.stream_bytes_per_s" not in assumed(load_device("h200"))


@pytest.fixture
def h200() -> dict[str, Any]:
    return read_yaml(data_dir("hwmodels") / "devices" / "h200-sxm.yaml")


def _read(data: dict[str, Any], folder: Path, name: str = "h200-sxm") -> None:
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(data))
    read_device(path)


def _change(data: dict[str, Any], dotted: str, value: object) -> None:
    *head, last = dotted.split(".")
    for key in head:
        data = data[key]
    if value is None:
        del data[last]
    else:
        data[last] = value


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("memory.stream_bytes_per_s.value", "4.6 TB", "memory.stream_bytes_per_s: unit 'TB'"),
        ("memory.stream_bytes_per_s.value", 4.6e12, "must be text with its unit"),
        ("memory.stream_bytes_per_s.value", "0 TB/s", "greater than zero"),
        ("memory.stream_bytes_per_s.value", "-4 TB/s", "not negative"),
        ("memory.stream_bytes_per_s.value", "4.9 TB/s", "low <= value <= high"),
        ("memory.stream_bytes_per_s.kind", "guess", "kind: 'guess'"),
        ("memory.stream_bytes_per_s.kind", None, "memory.stream_bytes_per_s.kind: missing"),
        ("memory.stream_bytes_per_s.source", None, "source: missing"),
        ("memory.stream_bytes_per_s.source", " ", "not empty"),
        ("memory.stream_bytes_per_s", None, "memory.stream_bytes_per_s: missing"),
        ("memory.stream_bytes_per_s", "4.6 TB/s", "must be a mapping"),
        ("memory.speed", {}, "memory.speed: unknown key"),
        ("memory.stream_bytes_per_s.unit", "TB", "unit: unknown key"),
        ("memory", None, "memory: missing"),
        ("structure.dies.value", "1.5", "must be whole"),
        ("structure.dies.value", True, "must be text"),
        ("block.stage_s.low", None, "needs low and high"),
        ("name", "h300", "must be the file's name"),
        ("nmae", "x", "did you mean name"),
    ],
)
def test_a_wrong_file_names_the_file_and_the_key(h200: dict[str, Any], tmp_path: Path, key: str, value: object, told: str) -> None:
    _change(h200, key, value)
    with pytest.raises(HardwareError, match=r"h200-sxm\.yaml") as error:
        _read(h200, tmp_path)
    assert told in str(error.value)


def test_a_stream_cannot_beat_the_datasheet(h200: dict[str, Any], tmp_path: Path) -> None:
    h200["memory"]["stream_bytes_per_s"] = {"value": "5 TB/s", "kind": "vendor", "source": "x"}
    with pytest.raises(HardwareError, match="cannot beat the datasheet"):
        _read(h200, tmp_path)


def test_a_key_given_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("name: a\nname: b\n")
    with pytest.raises(HardwareError, match="given twice"):
        read_device(path)


@pytest.mark.parametrize("text", ["- a\n", "a: [\n", ""])
def test_a_broken_file_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"x\.yaml"):
        read_yaml(path)


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("gpus", [1, 3], "out of 1, 2, 4, 8"),
        ("gpus", [], "out of 1, 2, 4, 8"),
        ("aliases", "h200", "list of names"),
        ("device", "h100-sxm", "must be the file's name"),
        ("link.topology", "ring", "allowed: mesh, switch, memory"),
        ("link.hop_s", None, "link.hop_s: missing"),
        ("link.latency", {}, "link.latency: unknown key"),
        ("link.library_allreduce_s.8", None, "8 is missing"),
        ("link.hop_s.value", "1 GB", "link.hop_s: unit"),
    ],
)
def test_a_wrong_node_file_names_the_key(tmp_path: Path, key: str, value: object, told: str) -> None:
    data: dict[str, Any] = dict(read_yaml(data_dir("hwmodels") / "nodes" / "h200-sxm.yaml"))
    if key.endswith(".8"):
        del data["link"]["library_allreduce_s"][8]
    else:
        _change(data, key, value)
    path = tmp_path / "h200-sxm.yaml"
    path.write_text(yaml.safe_dump(data))
    with pytest.raises(HardwareError, match=r"h200-sxm\.yaml") as error:
        read_family(path)
    assert told in str(error.value)


def test_missing_data_says_where_it_looked() -> None:
    with pytest.raises(ConfigError, match="reinstall"):
        data_dir("no-such-folder")
