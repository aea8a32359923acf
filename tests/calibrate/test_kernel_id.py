"""The kernel of a record: what changes its id, and that the kernels of all records are on file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from twin.calibrate import kernel_id, store
from twin.calibrate.kernel_id import CHANGES, KERNEL_ID, kernel_of, kernels
from twin.data import data_dir
from twin.hardware.load import load_node

MAIN = "platform/main.cu"
SOURCES = {
    MAIN: '#include "../monokernel/a.cuh"\nint main;  // starts\n',
    "monokernel/a.cuh": '#include "b.cuh"\n#include "plan.h"\nint a;\n',
    "monokernel/b.cuh": "int b;\n",
    "platform/other.h": "int other;\n",
}
HEADER = {"header.py": "x = 1  # one\n"}
OWN = kernel_id._id_of(MAIN, SOURCES, HEADER)


@pytest.mark.parametrize("name", [MAIN, "monokernel/a.cuh", "monokernel/b.cuh"])
def test_an_included_source_changes_the_id_and_its_comments_do_not(name: str) -> None:
    changed = {**SOURCES, name: SOURCES[name] + "int c;\n"}
    assert kernel_id._id_of(MAIN, changed, HEADER) != OWN
    said = {**SOURCES, name: f"/* a\n note */\n{SOURCES[name]}\n// another\n"}
    assert kernel_id._id_of(MAIN, said, HEADER) == OWN


def test_a_source_that_is_not_included_changes_nothing() -> None:
    changed = {**SOURCES, "platform/other.h": "int changed;\n"}
    assert kernel_id._id_of(MAIN, changed, HEADER) == OWN


def test_who_makes_the_header_changes_the_id() -> None:
    assert kernel_id._id_of(MAIN, SOURCES, {"header.py": "x = 2\n"}) != OWN
    assert kernel_id._id_of(MAIN, SOURCES, {"header.py": "x = 1\n\n"}) == OWN


def test_devices_have_kernels_of_their_own() -> None:
    found = {kernel_id.kernel_id(load_node(name).device) for name in ("1xh200", "1xmi300x")}
    assert len(found) == 2
    assert kernel_id.kernel_id(load_node("1xh100").device) in found


def test_the_kernel_of_every_record_is_on_file() -> None:
    runs, known = data_dir("calibration") / "runs", {row.id for row in kernels()}
    named = 0
    for file in sorted(runs.glob("*/*/meta.yaml")):
        if file.parent.parent.name != "host":
            # two of its hundred lines: reading all of all records takes two seconds
            said = file.read_text(encoding="utf-8")
            meta = dict(re.findall(rf"^(commit|{KERNEL_ID}): (\S+)$", said, re.MULTILINE))
            if meta.get("commit", "null") != "null":
                named += 1
                assert kernel_of(store.Run(file.parent, meta, {})) in known, file
    assert named > 10


def test_what_a_kernel_lacks_is_known_by_name() -> None:
    assert {name for row in kernels() for name in row.lacks} == set(CHANGES)


def test_an_id_counts_before_a_commit_and_an_unknown_kernel_is_the_one_in_force() -> None:
    first, second = kernels()[:2]
    meta = {"commit": first.commits[0]}
    assert kernel_of(store.Run(Path("x"), meta, {})) == first.id
    assert kernel_of(store.Run(Path("x"), {**meta, KERNEL_ID: second.id}, {})) == second.id
    assert kernel_of(store.Run(Path("x"), {"commit": "none"}, {})) == ""
