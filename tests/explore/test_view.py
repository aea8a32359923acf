"""An address is read as what it asks, written as the commands that give the same, or refused."""

from __future__ import annotations

import shlex
from pathlib import Path
from urllib.parse import urlencode

import pytest

from tests.refusals import refused
from twin.cli import build_parser
from twin.commands.inputs import point_of
from twin.cost.routing import DRAWN_STEPS, STEPS
from twin.errors import TwinError
from twin.explore.view import View, ViewCase, read_view
from twin.study.whatif import sweep


def view(*pairs: tuple[str, str]) -> str:
    return urlencode(pairs)


def test_a_case_is_the_point_of_its_command() -> None:
    wanted = ViewCase("qwen3-8b", "8xh200", ("context=1024", "handoff=grid", "weight-dtype=fp16"))
    words = shlex.split(wanted.command())
    assert words[:2] == ["twin", "simulate"]
    assert point_of(build_parser().parse_args(words[1:])) == wanted.point()


def test_what_simulate_has_no_option_for_is_a_what_if() -> None:
    wanted = ViewCase("qwen3-8b", "8xh200", ("context=1024", "link.hop=x0.5", "layers=4"))
    words = shlex.split(wanted.command())
    args = build_parser().parse_args(words[1:])
    assert args.changes == list(wanted.sets)
    point = wanted.point()
    assert dict(point.options) == {"context": 1024, "layers": 4}
    assert [name for name, _ in point.settings] == ["link.hop_s"]


def test_steps_that_differ_by_their_routing_are_as_many_as_simulate_takes() -> None:
    dealt = ViewCase("qwen3-30b-a3b", "8xh200", ("expert_ranks=8", "routing=zipf:1.5"))
    assert dealt.point().steps == DRAWN_STEPS
    assert ViewCase("qwen3-30b-a3b", "8xh200").point().steps == STEPS
    assert ViewCase("llama-3.2-1b", "1xh200", ("batch=4",)).point().steps == STEPS
    swept = View((ViewCase("qwen3-30b-a3b", "8xh200"),), ("expert_ranks=1,8",))
    cells = sweep(swept.cases[0].point(), swept.axes()).cells()
    assert {cell.point.steps for cell in cells} == {DRAWN_STEPS}


def test_an_address_gives_cases_axes_and_a_price() -> None:
    found = read_view(
        view(
            ("case", "llama-3.1-8b 1xh200"),
            ("case", "llama-3.1-8b@fp8 1xh200 context=4096"),
            ("sweep", "context=128,1024"),
            ("sweep", "clock=x0.5,x1"),
            ("usd", "2.5"),
        ).encode()
    )
    assert [case.model for case in found.cases] == ["llama-3.1-8b", "llama-3.1-8b@fp8"]
    assert [axis.name for axis in found.axes()] == ["context", "clock"]
    assert list(found.commands()) == [
        "twin simulate llama-3.1-8b 1xh200 --usd-per-hour 2.5",
        "twin simulate llama-3.1-8b@fp8 1xh200 --context 4096 --usd-per-hour 2.5",
        "twin whatif llama-3.1-8b 1xh200 --sweep context=128,1024 --sweep clock=x0.5,x1",
    ]


@pytest.mark.parametrize(
    ("query", "says"),
    [
        ("", "0 cases; from 1 to 4"),
        (view(*[("case", "llama-3.1-8b 1xh200")] * 5), "5 cases"),
        (view(("case", "llama-3.1-8b")), "write a model, a node"),
        (view(("case", "llama-3.1-8b 1xh200 context")), "write name=value"),
        (view(("case", "/etc/passwd 1xh200")), "by name, no files"),
        (view(("case", ". 1xh200")), "by name, no files"),
        (view(("case", "docs 1xh200")), "by name, no files"),
        (view(("case", "llama-9 1xh200")), "did you mean"),
        (view(("case", "llama-3.1-8b 1xh200"), ("usd", "1"), ("usd", "2")), "given twice"),
        (view(("case", "llama-3.1-8b 1xh200 routing=uniform/../x")), "uniform or zipf"),
        (view(("case", "llama-3.1-8b ./mine.yaml")), "--node when the server starts"),
        (view(("case", "llama-3.1-8b 1xh200 routing=/etc/passwd")), "uniform or zipf"),
        (view(("case", "llama-3.1-8b 1xh200"), ("usd", "-1")), "above 0"),
        (view(("case", "llama-3.1-8b 1xh200"), ("color", "red")), "unknown in an address"),
        (view(("case", "llama-3.1-8b 1xh200"), *[("sweep", "a=1")] * 3), "3 sweeps; at most 2"),
        ("case=%ff", "cannot be read"),
        ("case=" + "x" * 5000, "at most 4096"),
    ],
)
def test_a_wrong_address_is_refused_in_a_line(query: str, says: str) -> None:
    refused(TwinError, lambda: read_view(query.encode()), says)


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        (ViewCase("llama-9", "1xh200"), "did you mean"),
        (ViewCase("llama-3.2-1b", "9xh200"), "allowed: 1xh200-sxm"),
        (ViewCase("llama-3.2-1b", "1xh200", ("memory.steam=x2",)), "did you mean"),
        (ViewCase("llama-3.2-1b", "1xh200", ("handoff=gird",)), "did you mean grid"),
        (ViewCase("llama-3.2-1b", "1xh200", ("context=99999999999999999999",)), "context"),
        (ViewCase("llama-3.2-1b", "1xh200", ("memory.stream=5 GB",)), "memory.stream"),
    ],
)
def test_a_wrong_case_says_what_is_meant(wanted: ViewCase, says: str) -> None:
    refused(TwinError, lambda: wanted.point().case(), says)


@pytest.mark.parametrize("name", ["routing", " routing "])
def test_no_address_reads_a_file(name: str, tmp_path: Path) -> None:
    counts = tmp_path / "counts.json"
    counts.write_text("[1, 2]")
    case = ("case", "qwen3-30b-a3b 8xh200 expert_ranks=8")
    found = read_view(view(case, ("sweep", f"{name}=uniform,{counts}")).encode())
    refused(TwinError, found.axes, "")
    wanted = ViewCase("qwen3-30b-a3b", "8xh200", ("expert_ranks=8", f"{name}={counts}"))
    refused(TwinError, wanted.point, "")


def test_a_sweep_of_too_many_points_is_refused() -> None:
    values = ",".join(str(n) for n in range(1, 200))
    found = read_view(
        view(("case", "llama-3.2-1b 1xh200"), ("sweep", f"context={values}")).encode()
    )
    refused(TwinError, found.axes, "199 points; at most 144")
