"""The explorer's answers over HTTP."""

from __future__ import annotations

import asyncio
import csv
import logging
import math
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import ClassVar

import httpx
import pytest

from tests.explore.serving import SHORT, Running, running
from tests.patience import PATIENCE_S
from twin.explore import answers
from twin.explore.answers import LONG_S, Answer, _whole_s
from twin.explore.desk import Desk, Work
from twin.explore.pareto import Choice, front, rounding
from twin.explore.processes import Processes
from twin.explore.tables import TABLES
from twin.study.depth import Depths
from twin.study.optimise import TIE
from twin.study.point import Point, Row, compute

LONG = "llama-3.1-70b 8xmi300x"


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("explore")
    with running(folder) as server:
        yield server


def test_a_case_is_answered_part_by_part_and_the_second_time_from_memory(live: Running) -> None:
    parts = live.parts("answer", case=SHORT)
    names = [part["part"] for part in parts if part["part"] != "progress"]
    assert names == ["speed", "engines", "rests", "ladder", "interval"]
    by = {part["part"]: part for part in parts}
    speed = by["speed"]
    assert speed["interval"][0] < speed["tokens_per_s"] < speed["floor_tokens_per_s"]
    assert sum(speed["causes"].values()) == pytest.approx(1e6 * speed["step_s"])
    kinds = sum(us for causes in speed["kinds"].values() for us in causes.values())
    assert kinds == pytest.approx(1e6 * speed["step_s"])
    assert by["ladder"]["rungs"][-1][1] == speed["tokens_per_s"]
    assert {line[1] for line in by["rests"]["numbers"]} > {"assumed", "fitted", "datasheet"}
    computed = live.app.rows.computed
    again = live.parts("answer", case=SHORT)
    assert [part for part in again if part["part"] != "progress"] == [
        part for part in parts if part["part"] != "progress"
    ]
    assert live.app.rows.computed == computed


def test_a_case_on_several_gpus_ends_with_its_best_plan(live: Running) -> None:
    parts = live.parts("answer", case="llama-3.2-1b 2xh200 layers=1 blocks=8")
    standard, best = [part for part in parts if part["part"] == "speed"]
    assert standard["plan"].startswith("default options")
    assert best["plan"].startswith("the best of ")
    assert best["tokens_per_s"] >= standard["tokens_per_s"] * (1 - TIE)
    assert parts[-1]["part"] == "interval"
    named = live.parts("answer", case="llama-3.2-1b 2xh200 layers=1 blocks=8 residual=replicated")
    (only,) = [part for part in named if part["part"] == "speed"]
    assert only["plan"] == "", "the user named a plan"


def test_a_deep_model_s_speed_is_estimated_before_all_of_it_is_simulated(
    live: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = {"case": "llama-3.2-1b 1xh200 blocks=8"}
    monkeypatch.setattr(answers, "LONG_S", -math.inf)
    parts = [part for part in live.parts("answer", **case) if part["part"] != "progress"]
    about, speed = parts[:2]
    assert (about["part"], speed["part"]) == ("about", "speed")
    assert about["layers"] == [1, 2, 16]
    assert about["title"] == speed["title"]
    for name in ("tokens_per_s", "step_s"):
        assert about[name] == pytest.approx(speed[name], rel=0.02)
    assert about["floor_tokens_per_s"] == pytest.approx(speed["floor_tokens_per_s"], rel=1e-6)
    assert about["interval"] == pytest.approx(speed["interval"], rel=0.02)
    again = live.parts("answer", **case)
    assert "about" not in {part["part"] for part in again}, "it is known"
    wrong = live.parts("answer", case="llama-3.1-405b 1xh200")
    assert [part["part"] for part in wrong if part["part"] != "progress"] == ["problem"]


def test_a_sweep_and_stages_side_by_side(live: Running) -> None:
    (part,) = (
        one
        for one in live.parts("sweep", case=SHORT, sweep="clock=x0.5,x1")
        if one["part"] == "sweep"
    )
    slow, fast = (cell["tokens_per_s"] for cell in part["cells"])
    assert slow < fast
    two = live.parts("stages", case=[SHORT, f"{SHORT} handoff=grid"])[-1]
    assert two["sides"] == 2
    assert {one["kind"] for one in two["stages"]} >= {"qkv", "lm_head"}
    assert all(len(one["us"]) == 2 for one in two["stages"])


def test_no_machine_of_the_front_is_beaten_by_another() -> None:
    fast, cheap, both, slow = (
        Choice("n", "", speed, usd, 1.0, 0.0)
        for speed, usd in ((9.0, 5.0), (5.0, 1.0), (9.0, 6.0), (4.0, 2.0))
    )
    assert front([slow, cheap, both, fast]) == [fast, cheap]
    assert front([fast, fast]) == [fast, fast]


def test_rounding_grows_as_bits_go() -> None:
    found = [rounding(form) for form in ("bf16", "fp8-128x128", "int4-g128")]
    assert found == sorted(found)
    assert found[0] == 0 < found[1]


@pytest.mark.slow
def test_machines_for_a_case_have_a_front(live: Running) -> None:
    (part,) = (
        one
        for one in live.parts("pareto", case="llama-3.2-1b 1xh200 layers=1 blocks=8")
        if one["part"] == "pareto"
    )
    best = [one for one in part["choices"] if one["front"]]
    assert max(one["tokens_per_s"] for one in best) == max(
        one["tokens_per_s"] for one in part["choices"]
    )
    assert min(one["usd"] for one in best) == min(one["usd"] for one in part["choices"])
    # FP8 saves a tenth of so short a model, whose head keeps its type: too little to be one more
    assert {one["format"] for one in part["choices"]} == {"its own", "int4-g128", "mxfp4"}


@pytest.mark.few(2)
@pytest.mark.parametrize("table", TABLES)
def test_every_table_is_csv(live: Running, table: str) -> None:
    answer = live.get("csv", table=table, case=SHORT, sweep="clock=x0.5,x1")
    assert answer.headers["content-type"].startswith("text/csv")
    head, *lines = csv.reader(answer.text.splitlines())
    assert lines
    assert all(len(line) == len(head) for line in lines), answer.text


@pytest.mark.parametrize(
    ("path", "query", "status", "says"),
    [
        ("answer", {}, 400, "0 cases"),
        ("answer", {"case": "llama-9 1xh200"}, 400, "did you mean"),
        ("answer", {"case": "llama-3.2-1b 1xh200 handoff=gird"}, 400, "did you mean grid"),
        ("answer", {"case": [SHORT, SHORT]}, 400, "one at a time"),
        ("sweep", {"case": SHORT}, 400, "no sweep"),
        ("csv", {"case": SHORT, "table": "x"}, 400, "one of cases"),
        ("csv", {"case": SHORT}, 400, "give one table"),
        ("commands", {"case": SHORT, "colour": "red"}, 400, "unknown in an address"),
        ("hardware", {"node": "1xh201"}, 400, "did you mean"),
        ("hardware", {"node": "/etc/passwd"}, 400, "no node of that name"),
        ("reports/..%2f..%2fetc", {}, 404, "no report"),
        ("nowhere", {}, 404, "no such path"),
    ],
)
def test_what_is_wrong_gets_one_clear_error(
    live: Running, path: str, query: dict[str, str], status: int, says: str
) -> None:
    answer = live.get(path, **query)
    assert answer.status_code == status, answer.text
    message = answer.json()["error"]["message"]
    assert says in message
    assert message.isprintable()


def test_a_plan_that_cannot_be_is_a_problem_of_its_case(live: Running) -> None:
    (part,) = (
        one for one in live.parts("answer", case=f"{SHORT} blocks=500") if one["part"] != "progress"
    )
    assert part["part"] == "problem"
    assert "500" in part["message"]


def test_foreign_pages_names_and_methods_are_refused(live: Running) -> None:
    for headers in ({"Host": "evil.example"}, {"Origin": "http://evil.example"}):
        answer = httpx.get(f"{live.url}/choices", headers=headers, verify=False)
        assert answer.status_code == 403
    assert httpx.post(f"{live.url}/answer", verify=False).status_code == 405


def test_the_page_names_no_foreign_host_and_every_control_has_a_label(live: Running) -> None:
    answer = live.get("")
    assert not re.findall(r"(?:https?:)?//[\w-]+\.\w+", answer.text)
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert "prefers-color-scheme: dark" in answer.text
    page = answer.text.split("<script>")[0]
    controls = re.findall(r"<(?:select|input)[^>]*>", page)
    assert controls
    for control in controls:
        assert re.search(r"<label>[^<]*" + re.escape(control), page), control


def test_reports_are_listed_and_shown_without_rights(live: Running) -> None:
    folder = live.app.folder / "mine"
    folder.mkdir(parents=True)
    text = "<title>What it &lt;is</title><p>a report"
    (folder / "report.html").write_text(text)
    found = live.get("reports").json()["reports"]
    assert [(one["name"], one["title"]) for one in found] == [("mine", "What it <is")]
    (live.app.folder / "report.html").write_text(text + " of --out FOLDER")
    found = live.get("reports").json()["reports"]
    assert {one["name"] for one in found} == {"mine", "report.html"}
    for name, said in (("mine", text), ("report.html", text + " of --out FOLDER")):
        answer = live.get(f"reports/{name}")
        assert answer.text == said
        assert "sandbox" in answer.headers["content-security-policy"]


def test_choices_offer_what_is_on_file_and_nodes_of_ones_own(tmp_path: Path) -> None:
    with running(tmp_path, own={"1xmine": "1xh200-sxm"}) as server:
        found = server.get("choices").json()
        assert {"llama-3.1-8b", "gpt-oss-120b"} < {model["name"] for model in found["models"]}
        assert found["devices"]["h200-sxm"]["nodes"]["8"] == "8xh200-sxm"
        assert found["devices"]["1xmine"]["nodes"] == {"1": "1xmine"}
        handoff = next(one for one in found["options"] if one["name"] == "handoff")
        assert "grid" in handoff["values"]
        speed = server.parts("answer", case="llama-3.2-1b 1xmine layers=1")[1]
        assert speed["part"] == "speed"


def test_one_client_may_ask_for_so_much_and_no_more(tmp_path: Path) -> None:
    with running(tmp_path, Work(at_once=0)) as server:
        answer = server.get("answer", case=SHORT)
        assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
    with running(tmp_path, Work(seconds=0)) as server:
        assert "not done after 0 s" in server.get("answer", case=SHORT).text


@pytest.fixture
def logged() -> Iterator[BufferingHandler]:
    """What any logger says."""
    kept, root = BufferingHandler(1000), logging.getLogger()
    root.addHandler(kept)
    yield kept
    root.removeHandler(kept)


def test_who_leaves_before_its_turn_counts_no_more_and_all_learn_of_an_end(
    tmp_path: Path, logged: BufferingHandler
) -> None:
    class Never(Processes):
        def submit(self, point: Point) -> Future[Row]:
            return Future()

    turn, held = threading.Event(), threading.Event()

    def holds() -> Answer:
        held.set()
        turn.wait(PATIENCE_S)
        yield {"part": "held"}

    async def leaves(desk: Desk) -> None:
        desk.begin("me", holds)
        await asyncio.to_thread(held.wait, 20)
        for _ in range(5):
            desk.leave(desk.begin("me", holds))
        turn.set()

    with running(tmp_path, Work(at_once=2), processes=Never()) as server:
        asyncio.run(leaves(server.app.worker))
        query = {"case": SHORT, "sweep": "clock=x0.5,x1"}
        with httpx.stream("GET", f"{server.url}/sweep", params=query, verify=False) as answer:
            lines = answer.iter_lines()
            assert any("progress" in line for line in lines)
            server.app.worker.close()
            assert any("the server is ending" in line for line in lines)
    assert not logged.buffer


def test_idle_processes_begin_with_what_a_first_answer_needs_and_it_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Helper(Processes):
        """A process that has begun and has nothing to do."""

        taken: ClassVar[list[Point]] = []

        def idle(self) -> int:
            return 1

        def submit(self, point: Point) -> Future[Row]:
            self.taken.append(point)
            future = Future[Row]()
            future.set_result(compute([point])[0])
            return future

    deep, helper = "llama-3.2-1b 1xh200 blocks=8", Helper()
    monkeypatch.setattr(answers, "LONG_S", -math.inf)
    with running(tmp_path / "helped", processes=helper) as server:
        helped = server.parts("answer", case=deep)
    with running(tmp_path / "alone") as server:
        alone = server.parts("answer", case=deep)
    taken = dict(helper.taken[0].options)
    assert taken["layers"] == 1, "the shallow one, while the deep one is simulated"
    about = [[part for part in parts if part["part"] == "about"] for parts in (helped, alone)]
    assert about[0] == about[1] != []


def test_a_simulation_is_long_whatever_slowed_down_the_shorter_one() -> None:
    depths = Depths(1, 2)
    assert _whole_s(80, depths, 0.1, 0.15) == pytest.approx(0.15 + 78 * 0.05)
    for few_s in (0.15, 0.4):  # another program took the core meanwhile
        assert _whole_s(80, depths, few_s, 0.15) > LONG_S


@pytest.mark.slow
def test_a_long_question_holds_up_no_first_answer_and_lost_processes_nothing(
    tmp_path: Path,
) -> None:
    """The ladder and the draws are simulated in other processes, and give what they give here."""
    processes = Processes()
    with running(tmp_path, processes=processes) as server:
        speeds = server.parts("sweep", case=SHORT, sweep="clock=x0.5,x1,x2")[-1]["cells"]
        with running(tmp_path / "other") as alone:
            again = alone.parts("sweep", case=SHORT, sweep="clock=x0.5,x1,x2")[-1]["cells"]
        assert speeds == again
        long = threading.Thread(
            target=server.get, args=["sweep"], kwargs={"case": LONG, "sweep": "clock=x0.5,x1,x2"}
        )
        long.start()
        time.sleep(0.5)
        query = {"case": f"{SHORT} context=64"}
        with httpx.stream("GET", f"{server.url}/answer", params=query, verify=False) as answer:
            assert any('"speed"' in line for line in answer.iter_lines())
            assert long.is_alive()
        assert processes._pool is not None
        for worker in processes._pool._processes.values():
            worker.kill()
        long.join(PATIENCE_S)
        assert server.parts("sweep", case=SHORT, sweep="clock=x3,x4")[-1]["part"] == "sweep"
