"""Hardware of one's own: a file takes the place of a name."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from tests.command_line import Twin
from tests.refusals import refused, refused_command
from twin.calibrate.node import calibrated_node
from twin.data import data_dir
from twin.errors import HardwareError, TwinError
from twin.hardware import load
from twin.hardware.load import load_node, read_device
from twin.hardware.number import Kind
from twin.hardware.override import numbers, with_numbers
from twin.hardware.template import template
from twin.study.hardware import with_setting


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(load, "_own", {})
    file = tmp_path / "my-gpu.yaml"
    file.write_text(template(file, "h200"))
    return file


@pytest.mark.parametrize("like", ["h200-sxm", "b200", "mi300x", "gh200"])
def test_a_new_file_has_the_numbers_of_what_it_is_like_with_its_fit(
    tmp_path: Path, like: str
) -> None:
    file = tmp_path / f"own-{like}.yaml"
    file.write_text(template(file, like))
    mine, its = (numbers(calibrated_node(name)) for name in (str(file), f"1x{like}"))
    assert {path: n.value for path, n in mine.items()} == {p: n.value for p, n in its.items()}
    assert {number.kind for number in mine.values()} == {Kind.ASSUMED}


def test_what_is_set_means_what_a_what_if_means(own: Path) -> None:
    changes = {"memory.stream": "6 TB/s", "memory.peak": "7 TB/s", "block.clock": "x1.1"}
    own.write_text(template(own, "h200", [f"{path}={value}" for path, value in changes.items()]))
    mine = numbers(calibrated_node(str(own)))
    wanted = numbers(with_numbers(calibrated_node("1xh200"), list(changes.items())))
    assert {path: n.value for path, n in mine.items()} == {p: n.value for p, n in wanted.items()}
    assert mine["device.memory.stream_bytes_per_s"].source == "as my-gpu.yaml says"


def test_a_number_of_an_overlay_may_say_how_it_is_known(own: Path) -> None:
    known = '{value: "7 TB/s", kind: vendor, source: "announced", low: "6 TB/s", high: "8 TB/s"}'
    own.write_text(own.read_text().replace("set: {}", f"set:\n  memory.peak: {known}"))
    number = numbers(load_node(str(own)))["device.memory.peak_bytes_per_s"]
    assert (number.value, number.kind, number.low) == (7e12, Kind.VENDOR, 6e12)


def test_links_of_an_overlay_are_those_of_what_it_is_like(own: Path) -> None:
    mine, its = (calibrated_node(name).link for name in (f"2x{own}", "2xh200"))
    assert mine is not None
    assert its is not None
    assert mine.hop_s.value == its.hop_s.value
    node = "node:\n  gpus: [1]\n"
    own.write_text(own.read_text() + node)
    refused(HardwareError, lambda: load_node(f"2x{own}"), "a node has 1 of my-gpu, not 2")


def test_everything_that_is_wrong_with_a_file_is_said_at_once(own: Path) -> None:
    own.write_text(template(own, "h200", ["memory.steam=1 TB/s", "block.clock=3", "l2.latency=x2"]))
    refused(
        HardwareError,
        lambda: load_node(str(own)),
        "or memory.stream_bytes_per_s",
        "unit '' of '3'",
    )
    own.write_text("like: h200\nsets: {}\n")
    refused(HardwareError, lambda: load_node(str(own)), "sets: unknown key", "name: missing")
    own.write_text("name: my-gpu\nlike: h2000\n")
    refused(HardwareError, lambda: load_node(str(own)), "unknown device 'h2000'; did you mean")


def test_a_whole_file_names_all_keys_that_it_lacks(own: Path) -> None:
    whole = yaml.safe_load((data_dir("hwmodels") / "devices" / "a100-sxm.yaml").read_text())
    whole |= {"name": "my-gpu"}
    del whole["title"], whole["memory"]["latency_s"], whole["l2"]["capacity_bytes"]
    own.write_text(yaml.safe_dump(whole))
    refused(
        HardwareError,
        lambda: load_node(str(own)),
        "title, memory.latency_s, l2.capacity_bytes: missing",
    )
    whole["title"] = "mine"
    own.write_text(yaml.safe_dump(whole))
    read_device.cache_clear()
    refused(
        HardwareError,
        lambda: load_node(str(own)),
        "memory.latency_s, l2.capacity_bytes: missing; add it",
    )


def test_a_file_stands_where_a_name_does_and_counts_its_gpus(own: Path) -> None:
    assert load_node(str(own)).name == "1xmy-gpu"
    four = load_node(f"4x{own}")
    assert four.gpus == 4
    assert four.link is not None
    assert with_setting(four, "gpus", 2).name == "2xmy-gpu"


def test_a_node_file_names_a_device_file_next_to_it(own: Path) -> None:
    node = own.with_name("pair.yaml")
    node.write_text("device: my-gpu.yaml\ngpus: [1]\n")
    assert load_node(str(node)).device.name == "my-gpu"
    refused(HardwareError, lambda: load_node(f"2x{node}"), "a node has 1 of my-gpu, not 2")
    node.write_text("device: h200\ngpus: [2]\n")
    refused(HardwareError, lambda: load_node(str(node)), "pair.yaml: link: missing")


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        ("4.8 TB/s", "4.8 TB", "memory.peak_bytes_per_s.value: unit 'TB'"),
        ("kind: datasheet", "kind: guess", ".kind: 'guess' is unknown"),
        ("name: my-gpu", "name: h200-sxm", "must be the file's name"),
        ("gpus: [1, 2]", "gpus: [1, 3]", "node.gpus[1]: 3 is unknown"),
        ("node:", "nodes:", "nodes: unknown key"),
    ],
)
def test_a_wrong_field_is_refused_with_file_and_reason(
    own: Path, before: str, after: str, says: str
) -> None:
    whole = (data_dir("hwmodels") / "devices" / "h200-sxm.yaml").read_text()
    whole = whole.replace("name: h200-sxm", "name: my-gpu")
    whole += "\nkernel: h200\nnode:\n  gpus: [1, 2]\n"
    assert before in whole
    own.write_text(whole.replace(before, after))
    refused(TwinError, lambda: load_node(str(own)), "my-gpu.yaml", says)


def test_a_part_on_file_is_not_described_again(tmp_path: Path) -> None:
    refused(HardwareError, lambda: template(tmp_path / "b200.yaml", "h200"), "on file already")
    refused(HardwareError, lambda: load_node(str(tmp_path / "no.yaml")), "cannot be read")
    refused(HardwareError, lambda: template(tmp_path / "x.txt", "h200"), "ends in .yaml")
    refused(HardwareError, lambda: template(tmp_path / "x.yaml", "host"), "a device on file")


def test_the_command_writes_a_file_and_never_over_one(twin: Twin, tmp_path: Path) -> None:
    file = tmp_path / "part.yaml"
    assert twin("hardware", "--new", file, "--like", "h20").code == 0
    assert "part" in twin("hardware", f"8x{file}").out
    refused_command(twin, "hardware", "--new", file, "--like", "h20", says=("is there already",))
    refused_command(twin, "hardware", "--new", file, says=("belong together",))
