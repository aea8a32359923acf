"""Hardware of one's own: a file takes the place of a name."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.command_line import Twin
from tests.refusals import refused, refused_command
from twin.calibrate.node import calibrated_node
from twin.errors import HardwareError, TwinError
from twin.hardware import load
from twin.hardware.load import load_node
from twin.hardware.override import numbers
from twin.hardware.template import template
from twin.hardware.types import Kind
from twin.study.hardware import with_setting


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(load, "_own", {})
    file = tmp_path / "my-gpu.yaml"
    file.write_text(template(file, "h200"))
    return file


@pytest.mark.parametrize("like", ["h200-sxm", "b200", "mi300x", "gh200"])
def test_a_new_file_has_the_numbers_of_what_it_is_like(tmp_path: Path, like: str) -> None:
    file = tmp_path / f"own-{like}.yaml"
    file.write_text(template(file, like))
    mine, its = (numbers(calibrated_node(name)) for name in (str(file), f"1x{like}"))
    for path, number in mine.items():
        if number.like is None and its[path].kind not in (Kind.FITTED, Kind.UNBOUND):
            assert number.value == pytest.approx(its[path].value), path
            assert number.kind is Kind.ASSUMED


def test_a_file_stands_where_a_name_does_and_counts_its_gpus(own: Path) -> None:
    assert load_node(str(own)).name == "1xmy-gpu"
    four = load_node(f"4x{own}")
    assert four.gpus == 4
    assert four.link is not None
    assert with_setting(four, "gpus", 2).name == "2xmy-gpu"


def test_a_node_file_names_a_device_file_beside_it(own: Path) -> None:
    node = own.with_name("pair.yaml")
    node.write_text("device: my-gpu.yaml\ngpus: [1]\n")
    assert load_node(str(node)).device.name == "my-gpu"
    refused(HardwareError, lambda: load_node(f"2x{node}"), "a node has 1 of my-gpu, not 2")
    node.write_text("device: h200\ngpus: [2]\n")
    refused(HardwareError, lambda: load_node(str(node)), "pair.yaml: link: missing")


@pytest.mark.parametrize(
    ("before", "after", "says"),
    [
        ('"4.8 TB/s"', '"4.8 TB"', "memory.peak_bytes_per_s: unit 'TB'"),
        ('kind: "assumed"', 'kind: "guess"', ".kind: 'guess' is not a kind"),
        ("name: my-gpu", "name: h200-sxm", "must be the file's name"),
        ("gpus: [1, 2, 4, 8]", "gpus: [1, 3]", "out of 1, 2, 4, 8"),
        ("node:", "nodes:", "nodes: unknown key"),
        ("topology:", "topolgy:", "did you mean topology"),
    ],
)
def test_a_wrong_field_is_refused_with_file_and_reason(
    own: Path, before: str, after: str, says: str
) -> None:
    own.write_text(own.read_text().replace(before, after))
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
