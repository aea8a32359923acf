from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import yaml

from tests.rows import every
from twin.data import data_dir, read_yaml
from twin.errors import ConfigError, HardwareError, TwinError
from twin.hardware.load import (
    _Sizes,
    device_names,
    load_device,
    load_node,
    node_names,
    read_device,
    read_family,
)
from twin.hardware.number import Kind
from twin.hardware.override import assumed, numbers
from twin.hardware.stated import stated_file
from twin.hardware.types import Device, Node
from twin.plan.ranges import GPUS

DEVICES = [
    "a100-sxm",
    "b200",
    "b300",
    "gb200",
    "gh200",
    "h100-sxm",
    "h20",
    "h200-sxm",
    "l40s",
    "mi300x",
    "mi325x",
    "mi355x",
    "mi455x",
    "rtx-pro-6000",
    "rubin-r200",
]
LARGEST = {"gh200": 1}  # GPUs of a node, where not 8


def largest(name: str) -> Node:
    return load_node(f"{LARGEST.get(name, 8)}x{name}")


def test_every_device_is_there() -> None:
    assert device_names() == ["host", *DEVICES]


@every("name", node_names())
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
    for path, number in numbers(largest(name)).items():
        words = number.source.split(":")[0].split(", ")
        assert all(word.split(";")[0] in known for word in words), f"{path}: {number.source}"


OURS = ("H200-PROBES", "H200-LAWS", "H200-PROMPTS", "XEON-CODES")


@pytest.mark.parametrize("name", DEVICES)
def test_only_what_this_project_probed_is_measured(name: str) -> None:
    for path, number in numbers(largest(name)).items():
        if number.kind is Kind.MEASURED:
            assert number.source.startswith(OURS), path
        assert not number.source.startswith("H200-PROBES") or number.kind is Kind.MEASURED, path


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("8xh200", "8xh200-sxm"),
        ("1xh100", "1xh100-sxm"),
        ("8xrubin", "8xrubin-r200"),
        ("host", "1xhost"),
        ("h200", "1xh200-sxm"),
    ],
)
def test_aliases_name_the_same_node(alias: str, name: str) -> None:
    assert load_node(alias) == load_node(name)
    assert load_node(alias).name == name


def test_a_device_alias_is_the_device() -> None:
    assert load_device("h200") == load_device("h200-sxm")


@pytest.mark.parametrize(
    "wrong", ["8xh21", "3xh200", "16xmi300x", "h2oo", "", "x", "8x", "-1xh200"]
)
def test_an_unknown_node_lists_known_ones(wrong: str) -> None:
    with pytest.raises(HardwareError, match=r"did you mean|allowed"):
        load_node(wrong)


def test_an_unknown_device_gives_the_closest() -> None:
    with pytest.raises(HardwareError, match="did you mean mi300x"):
        load_device("mi300")


def test_all_reduce_grows_with_the_gpus() -> None:
    for name in (one for one in DEVICES if one not in LARGEST):
        times = [
            link.library_allreduce_s.value
            for n in (2, 4, 8)
            if (link := load_node(f"{n}x{name}").link)
        ]
        assert times == sorted(times)
        assert len(times) == 3


def test_the_measured_stream_of_the_h200() -> None:
    device = load_device("h200")
    assert device.memory.stream_bytes_per_s.value == 4.61e12
    assert device.memory.stream_bytes_per_s.kind is Kind.MEASURED
    assert device.blocks == 132
    assert device.fabric is None
    assert device.llc is None


def test_assumed_numbers_are_listed() -> None:
    assert "kernel.stage_s" in assumed(load_device("h200"))
    assert "memory.stream_bytes_per_s" not in assumed(load_device("h200"))


@pytest.fixture
def h200() -> dict[str, Any]:
    """With its kernel's costs, as a file of one's own has them."""
    kernel = read_yaml(stated_file("h200-sxm"))
    return {**read_yaml(data_dir("hwmodels") / "devices" / "h200-sxm.yaml"), "kernel": kernel}


def _read(data: dict[str, Any], folder: Path, name: str = "h200-sxm") -> Device:
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(data))
    return read_device(path)


def _change(data: dict[str, Any], dotted: str, value: object) -> None:
    *head, last = dotted.split(".")
    for key in head:
        data = data[key]
    if value is None:
        del data[last]
    else:
        data[last] = value


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("memory.stream_bytes_per_s.value", "4.6 TB", "memory.stream_bytes_per_s.value: unit 'TB'"),
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
        ("kernel.stage_s.low", None, "kernel.stage_s.low: missing; an assumed number needs"),
        ("name", "h300", "must be the file's name"),
        ("nmae", "x", "did you mean name"),
        ("block.loading", "later", "block.loading: 'later' is unknown"),
        ("block.inputs", "elsewhere", "block.inputs: 'elsewhere' is unknown"),
        ("l2.retention", "most", "l2.retention: 'most' is unknown"),
        ("title", "red\x1b[31m", "must be a line of text"),
        ("structure.dies.value", 10**18, "structure.dies: value 1e+18 is out of range"),
        ("structure.dies.value", "1e999", "out of range"),
        ("memory.stream_bytes_per_s.high", "1e19 B/s", "high 1e+19 B/s is out of range"),
        ("memory.latency_s.value", "9" * 5000 + " s", "is not a quantity"),
        ("memory.latency_s.value", "² s", "is not a quantity"),
        ("memory.latency_s.value", [["x"] * 9] * 9, "must be text with its unit"),
        ("memory.latency_s.kind", ["measured"], "is unknown"),
        ("handoff.loaded_hop_s.value", "0.2 us", "low <= value <= high"),
        (
            "handoff.loaded_hop_s",
            {"value": "0.2 us", "kind": "vendor", "source": "x"},
            "is less than handoff.hop_s, 300 ns",
        ),
    ],
)
def test_a_wrong_file_names_the_file_and_the_key(
    h200: dict[str, Any], tmp_path: Path, key: str, value: object, message: str
) -> None:
    _change(h200, key, value)
    with pytest.raises(HardwareError, match=r"h200-sxm\.yaml") as error:
        _read(h200, tmp_path)
    assert message in str(error.value)


def test_a_capability_decides_and_not_the_vendor(h200: dict[str, Any], tmp_path: Path) -> None:
    h200["vendor"] = "somebody else"
    assert _read(h200, tmp_path).teams
    del h200["block"]["inputs"]
    other = tmp_path / "other"  # a path is read once
    other.mkdir()
    assert not _read(h200, other).teams


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
    ("key", "value", "message"),
    [
        ("gpus", [1, 3], "gpus[1]: 3 is unknown; allowed: 1, 2, 4, 8, 16, 32, 64, 72"),
        ("gpus", [], "gpus: [] must be a list, with at least one entry"),
        ("gpus", [1.0], "gpus[0]: 1.0 is unknown"),
        ("link.topology", ["mesh"], "allowed: mesh, switch, memory"),
        (
            "link.loaded_hop_s",
            {"value": "0.5 us", "kind": "vendor", "source": "x"},
            "link.loaded_hop_s: 500 ns is less than",
        ),
        ("aliases", "h200", "aliases: 'h200' must be a list"),
        ("device", "h100-sxm", "must be the file's name"),
        ("link.topology", "ring", "allowed: mesh, switch, memory"),
        ("link.hop_s", None, "link.hop_s: missing"),
        ("link.peer_s", None, "link.peer_s: missing"),
        ("link.like", "h1OO", "link.like: unknown device 'h1OO'"),
        ("link.latency", {}, "link.latency: unknown key"),
        ("link.library_allreduce_s.8", None, "8 is missing"),
        ("link.hop_s.value", "1 GB", "link.hop_s.value: unit"),
    ],
)
def test_a_wrong_node_file_names_the_key(
    tmp_path: Path, key: str, value: object, message: str
) -> None:
    data: dict[str, Any] = dict(read_yaml(data_dir("hwmodels") / "nodes" / "h200-sxm.yaml"))
    if key.endswith(".8"):
        del data["link"]["library_allreduce_s"][8]
    else:
        _change(data, key, value)
    path = tmp_path / "h200-sxm.yaml"
    path.write_text(yaml.safe_dump(data))
    with pytest.raises(HardwareError, match=r"h200-sxm\.yaml") as error:
        read_family(path)
    assert message in str(error.value)


@pytest.mark.parametrize(
    "name", ["9" * 5000 + "xh200", "²xh200", "8xh\x1b[2J", "x" * 10**6, "٨xh200"]
)
def test_a_hostile_node_name_is_refused_in_a_line(name: str) -> None:
    for load in (load_node, load_device):
        with pytest.raises(HardwareError, match="unknown") as error:
            load(name)
        assert len(str(error.value)) < 3000
        assert str(error.value).isprintable()


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{b}: &{b} [{', '.join(['*' + a] * 9)}]\n" for a, b in pairwise("abcdefghi")
)
HOSTILE = {
    "a list as a key": ("? [a, b]\n: c\n", "a key must be a name"),
    "a mapping as a key": ("{{a: b}: c}\n", "a key must be a name"),
    "aliases of aliases": (BOMB, "behind aliases counted"),
    "an alias of itself": ("a: &a [*a]\n", "inside of what it means"),
    "brackets without end": ("a: " + "[" * 100_000, "nested more than"),
    "dashes without end": ("- " * 1000 + "a\n", "nested more than"),
    "sixty thousand entries": ("a: [" + "a," * 60_000 + "]\n", "more than 50000 entries"),
    "a long file": ("# " + "x" * 10**6 + "\n", "more than 1000000 bytes"),
    "a whole number of thousands of digits": ("a: " + "9" * 5000 + "\n", "no whole number"),
    "a whole number of 64 bits": ("a: 9223372036854775808\n", "no whole number"),
    "a prefix without digits": ("a: 0b_\n", "no whole number"),
    "another type": ("a: !!python/object:os.system x\n", "only plain data"),
    "a truth value that is none": ("a: !!bool maybe\n", "only plain data"),
    "a date that is none": ("a: !!timestamp x\n", "only plain data"),
    "a merge of no mapping": ("a: {<<: b}\n", "not valid YAML"),
    "an unknown alias": ("a: *" + "b" * 5000 + "\n", "not valid YAML"),
    "a control character": ("a: \x1b[2J\n", "not valid YAML"),
    "a control character as a key twice": ('"\\e[2J": 1\n"\\e[2J": 2\n', "given twice"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused_in_a_line(tmp_path: Path, name: str) -> None:
    text, message = HOSTILE[name]
    path = tmp_path / "x.yaml"
    path.write_text(text)
    for read in (read_yaml, read_device, read_family):
        with pytest.raises(TwinError, match=r"x\.yaml") as error:
            read(path)
        assert message in str(error.value)
        assert len(str(error.value)) < 400
        assert str(error.value).isprintable()


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_bytes(b"name: \xff\xfe\n")
    with pytest.raises(ConfigError, match="save it as UTF-8"):
        read_yaml(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_yaml(Path("a\0b"))


def test_a_date_is_text_even_where_there_is_no_such_day(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("day: 2026-02-31\nother: 2026-02-28\n")
    assert read_yaml(path) == {"day": "2026-02-31", "other": "2026-02-28"}


def test_a_part_is_like_one_on_file_only(h200: dict[str, Any], tmp_path: Path) -> None:
    h200["like"] = {"device": "../nodes/h200-sxm", "low": "x0.5", "high": "x2"}
    with pytest.raises(HardwareError, match="unknown device"):
        _read(h200, tmp_path)


def test_missing_data_says_where_it_looked() -> None:
    with pytest.raises(ConfigError, match="reinstall"):
        data_dir("no-such-folder")


def test_a_device_without_a_node_names_the_file_that_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("twin.hardware.load.device_names", lambda: ["lonely"])
    with pytest.raises(HardwareError, match=r"hwmodels/nodes/lonely\.yaml"):
        load_node("1xlonely")


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("1xH200", "1xh200-sxm"),
        ("H200x8", "8xh200-sxm"),
        ("h200:8", "8xh200-sxm"),
        ("8x-mi300x", "8xmi300x"),
        ("8 x MI300X", "8xmi300x"),
        ("MI300Xx8", "8xmi300x"),
        ("NVIDIA H200 SXM", "1xh200-sxm"),
        ("AMD Instinct MI300X", "1xmi300x"),
        ("2×H100", "2xh100-sxm"),
    ],
)
def test_a_node_is_known_however_it_is_written(written: str, meant: str) -> None:
    assert load_node(written).name == meant


def test_every_name_on_file_is_known_in_capitals_and_with_its_count_behind() -> None:
    for name in node_names():
        count, _, device = name.partition("x")
        assert load_node(name.upper()).name == name
        assert load_node(f"{device}x{count}").name == name


@pytest.mark.parametrize("name", ["3xh200", "H200x16", "0xh200"])
def test_a_wrong_count_names_those_that_there_are(name: str) -> None:
    with pytest.raises(HardwareError, match="allowed: 1xh200-sxm, 2xh200-sxm"):
        load_node(name)


def test_a_node_may_have_as_many_gpus_as_a_plan() -> None:
    kind, _ = get_args(get_type_hints(_Sizes, include_extras=True)["gpus"])
    assert get_args(get_args(kind)[0]) == GPUS
