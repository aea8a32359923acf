"""Which errors make an interval: those of runs alike, and what comes on top where nothing alike
ran; and whether it holds what it says.
"""

from __future__ import annotations

import csv
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from studies.common.measured import collected, text_of
from studies.common.prompts import predicted_s
from tests.calibrate.ran import seen
from tests.draws import drawn
from twin.calibrate.known_error import evidence, known_error, stage_levels
from twin.calibrate.node import calibrated_node
from twin.calibrate.on_record import rows
from twin.calibrate.prompt_error import known, prompt_error
from twin.calibrate.seen import Evidence, Seen, few_shapes
from twin.data import data_dir
from twin.hardware.load import load_node, node_names
from twin.models.kind import ModelKind
from twin.models.load import load_model

ROOT = Path(__file__).resolve().parents[2]
errors = st.floats(-0.5, 1.0)
times = st.floats(1e-6, 1e-3)
runs = st.builds(
    seen,
    st.text("xyz", min_size=1),
    errors,
    record=st.sampled_from("abc"),
    layer_s=times,
    handoff=st.sampled_from(["sentinel", "counter", "grid"]),
    gpus=st.sampled_from([1, 2, 4, 8]),
    kind=st.sampled_from(list(ModelKind)),
    parts=st.sampled_from([("bf16",), ("mxfp4", "experts"), ()]),
)


@drawn(60)
@given(st.lists(runs, max_size=40), runs, times)
def test_a_prediction_lies_inside_its_own_interval(
    some: list[Seen], other: Seen, layer_s: float
) -> None:
    low, high = Evidence(some).levels(other.features, layer_s)
    assert 0 < low <= 1 <= high < math.inf


def test_errors_of_runs_alike_make_an_interval() -> None:
    small = [seen(f"s{at}-1", e, layer_s=2e-5) for at, e in enumerate((-0.1, 0.1) * 20)]
    large = [seen(f"s{at}-2", e, layer_s=3e-4) for at, e in enumerate((-0.01, 0.01) * 20)]
    known = Evidence([*small, *large])
    wide, narrow = (known.levels(small[0].features, layer_s) for layer_s in (2e-5, 3e-4))
    assert wide[0] < 0.92 < 0.98 < narrow[0]
    assert narrow[1] < 1.02 < 1.08 < wide[1]


def test_runs_of_the_same_hand_off_count_more() -> None:
    own = [seen(f"s{at}-1", 0.01) for at in range(40)]
    other = [seen(f"s{at}-2", 0.2, handoff="grid") for at in range(20)]
    known = Evidence([*own, *other])
    assert known.levels(own[0].features, 5e-5)[0] > 0.97
    assert known.levels(other[0].features, 5e-5)[0] < 0.86


def test_what_never_ran_makes_intervals_wider() -> None:
    known = Evidence([seen(f"s{at}-1", 0.01) for at in range(40)])
    about = known.runs[0].features
    usual = known.levels(about, 5e-5)
    for new, said in (
        (replace(about, parts=("bf16", "compressed attention")), ["compressed attention"]),
        (replace(about, gpus=8), ["dense on 8 GPUs"]),
        (replace(about, context=1024), ["more than 128 positions"]),
        (replace(about, tokens=8), ["8 tokens a step"]),
        (replace(about, device="another"), ["another"]),
    ):
        low, high = known.levels(new, 5e-5)
        assert low < usual[0] * 0.97
        assert high > usual[1] * 1.03
        assert known.unseen(new) == said
    assert known.unseen(about) == []
    assert known.news(replace(about, tokens=8)) > known.news(replace(about, tokens=2))


def test_a_shape_that_ran_leaves_less_new() -> None:
    some = [seen(f"s{at}-1", 0.01) for at in range(40)]
    first = [seen(f"m{at}", 0.01, parts=("bf16", "lanes")) for at in range(3)]
    about = first[0].features
    counts = [Evidence([*some, *first[:at]]).news(about) for at in range(4)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] - counts[3] == pytest.approx(0.75)


def test_fewer_shapes_make_wider_intervals() -> None:
    by_count = [few_shapes(count) for count in (2, 5, 10, 30)]
    assert by_count == sorted(by_count, reverse=True)
    assert 1 < by_count[-1] < 1.05


@pytest.mark.few(1)
@pytest.mark.parametrize("device", ["h200-sxm", "h100-sxm"])
def test_eight_of_ten_models_of_the_readme_lie_inside_their_interval(device: str) -> None:
    """Each without its own runs."""
    runs = evidence().runs
    public = [run for run in runs if run.public and run.features.gpus == 1]
    own = [run for run in public if run.features.device == device]
    inside = []
    for run in own:
        known = Evidence([one for one in runs if one.shape != run.shape])
        low, high = known.levels(run.features, run.layer_s)
        inside.append(low <= run.factor <= high)
    assert len(inside) > 40
    assert 0.7 <= sum(inside) / len(inside) <= 0.95


def test_no_bin_of_the_page_is_far_from_eight_of_ten() -> None:
    """By earlier runs and left out, of forty runs and more; of several GPUs there are few cards."""
    page = (ROOT / "studies" / "intervals" / "README.md").read_text(encoding="utf-8")
    lines = [line.strip("| ").split(" | ") for line in page.splitlines() if line.count("|") > 11]
    shares = [
        (line[0], line[1], float(share.rstrip("%")) / 100)
        for line in lines[2:]
        for count, share in ((line[5], line[6]), (line[8], line[9]))
        if count.strip() and int(count) >= 40
    ]
    assert len(shares) > 30
    for name, place, share in shares:
        assert 0.66 <= share <= 0.9, (name, place)


def test_no_device_has_another_ones_errors(tmp_path: Path) -> None:
    """A part like a fitted one has its numbers by rules, and nobody knows how wrong these are."""
    measured = {"h100-sxm", "h200-sxm"}
    for name in node_names():
        if "host" in name:
            continue
        node = load_node(name)
        assert (known_error(node) is not None) == (node.device.name in measured), name
    text = (data_dir("hwmodels") / "devices" / "h100-sxm.yaml").read_text(encoding="utf-8")
    link = (data_dir("hwmodels") / "nodes" / "h200-sxm.yaml").read_text(encoding="utf-8")
    indented = "".join(f"  {line}\n" for line in link[link.index("gpus:") :].splitlines())
    file = tmp_path / "my-gpu.yaml"
    file.write_text(text.replace("name: h100-sxm", "name: my-gpu") + f"node:\n{indented}")
    for name in (str(file), f"8x{file}"):
        assert known_error(calibrated_node(name), load_model("llama-3.2-1b")) is None


def test_nodes_of_a_measured_device_are_known_by_their_own_runs_first() -> None:
    spec = load_model("llama-3.1-70b")
    nodes = (("2xh200", "2xh200-sxm"), ("4xh200", "4xh200-sxm"), ("8xh200", "4xh200-sxm"))
    for name, of in nodes:
        known_there = known_error(calibrated_node(name), spec)
        assert known_there is not None
        assert known_there.node == of
        low, high = known_there.interval(100.0)
        assert low < 99 < 101 < high


def test_runs_on_record_are_those_of_the_studies() -> None:
    found = collected(ROOT / "studies")
    on_file = (ROOT / "calibration" / "measured.csv").read_text(encoding="utf-8")
    assert on_file == text_of(found), "python -m studies.common.measured"
    assert {run.node for run in rows()} >= {"1xh200-sxm", "1xh100-sxm", "2xh200-sxm", "4xh200-sxm"}


def test_prompts_of_experts_are_known_to_take_longer() -> None:
    """GPT-OSS-20B: 512 tokens are predicted in 29 ms and took 41."""
    known_there = prompt_error(load_model("gpt-oss-20b"), calibrated_node("1xh200"))
    assert known_there is not None
    assert known_there.high > 41 / 29
    dense = prompt_error(load_model("llama-3.1-8b"), calibrated_node("1xh200"))
    assert dense is not None
    assert 0.85 < dense.low <= 1 <= dense.high < 1.15
    assert prompt_error(load_model("llama-3.1-8b"), calibrated_node("1xmi300x")) is None


def test_prompts_on_file_are_what_the_twin_predicts() -> None:
    (row,) = (r for r in known() if r["model"] == "llama-3.1-8b" and r["tokens"] == "128")
    run = next(r for r in rows() if r.model == "llama-3.1-8b" and r.context == 128 and r.prompt_s)
    assert predicted_s(run) == pytest.approx(float(row["predicted_s"]), rel=1e-3), (
        "python -m studies.common.prompts"
    )


def test_stages_of_traced_runs_have_levels_of_their_own() -> None:
    levels = stage_levels(calibrated_node("1xh200"))
    assert levels.keys() >= {"qkv", "attention", "o_proj", "gate_up", "down", "lm_head"}
    assert levels["qkv"][0] < 1 / 1.15  # 21 % too slow in Llama-3.2-1B
    assert not stage_levels(calibrated_node("1xmi300x"))


def test_measured_csv_reads_as_written() -> None:
    with (ROOT / "calibration" / "measured.csv").open(encoding="utf-8", newline="") as table:
        assert len(list(csv.DictReader(table))) == len(rows())
