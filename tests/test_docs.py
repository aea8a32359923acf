"""The documents tell the truth: their commands run, and what is generated is up to date."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from studies.common import readme_figure, svg
from tests.command_line import Twin
from tests.engine.gguf_cases import CONFIGS, write_case
from tests.patience import PATIENCE_S
from twin.cli import COMMANDS, build_parser
from twin.commands import whatif
from twin.commands.arguments import option_value
from twin.commands.reference import reference, subparsers
from twin.engine.cuda import LONG_NAP_S, NAP_S
from twin.hardware.template import template
from twin.server.limits import Limits
from twin.study.whatif import changed, parse_axes, parse_changes, sweep

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"```sh\n(.*?)```", re.DOTALL)
LINKING = (
    "README.md",
    "ARCHITECTURE.md",
    "CHANGELOG.md",
    "studies/h200-history/README.md",
    *(f"docs/{file.name}" for file in (ROOT / "docs").glob("*.md")),
)
PLACES = ("twin", "native", "hwmodels", "tests", "studies")
CHOSEN = re.compile(r"NAME|FAMILY|study\.yaml|meta\.yaml")
# a GPU, 2.5 GB of random weights, or minutes of simulation
GPU = re.compile(r"--node|llama-3.2-1b --random|--sensitivity|--draft ")
# Parsed here, run by their own tests or by hand; a server and a chat end on request.
MINUTES = (
    "twin calibrate",
    "twin validate",
    "twin demo",
    "twin serve",
    "twin chat",
    "twin explore",
    "twin fit-for",
    "twin diff",  # of files that other commands write: tests/commands/test_diff.py
)


def shell_lines(document: str) -> list[str]:
    return [
        line
        for block in BLOCK.findall((ROOT / document).read_text())
        for line in block.splitlines()
        if line
    ]


def quick() -> list[str]:
    return [
        line
        for line in shell_lines("README.md")
        if line.startswith("twin ") and not line.startswith(MINUTES)
    ]


@pytest.mark.parametrize("line", quick())
def test_readme_command_runs(
    line: str, twin: Twin, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(checkpoint, tmp_path / "my-checkpoint")
    write_case(tmp_path / "my-model.Q4_K_M.gguf", CONFIGS["qwen3"], words=True)
    monkeypatch.chdir(tmp_path)
    outcome = twin(*shlex.split(line)[1:])
    assert outcome.code == 0, outcome.err
    assert outcome.out


def test_readme_shows_the_commands_people_start_with() -> None:
    shown = {line.split()[1] for line in quick()}
    assert {"plan", "simulate", "whatif", "run", "bench"} <= shown


@pytest.mark.parametrize("name", COMMANDS)
def test_examples_of_help_are_accepted(name: str) -> None:
    parser = build_parser()
    examples = (subparsers(parser)[name].epilog or "").splitlines()[1:]
    for example in examples:
        words = shlex.split(example.split("   ")[0])
        assert words[:2] == ["twin", name]
        assert parser.parse_args(words[1:]).run


def runnable() -> list[str]:
    """Every example of help that needs neither a GPU nor minutes; the rest is parsed above."""
    lines = [
        example.split("   ")[0].strip()
        for p in subparsers(build_parser()).values()
        for example in (p.epilog or "").splitlines()[1:]
    ]
    return [
        line
        for line in lines
        if not line.startswith((*MINUTES, "twin project", "twin bench", "twin trace"))
        and not GPU.search(line)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("line", runnable())
def test_every_example_of_help_works(
    line: str, twin: Twin, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(checkpoint, tmp_path / "my-checkpoint")
    write_case(tmp_path / "my-model.Q4_K_M.gguf", CONFIGS["qwen3"], words=True)
    (tmp_path / "question.txt").write_text("Why?")
    (tmp_path / "my-gpu.yaml").write_text(template(tmp_path / "my-gpu.yaml", "h200"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("twin.hardware.load._own", {})
    monkeypatch.setattr("twin.engine.opening.free_bytes", lambda: None)
    outcome = twin(*shlex.split(line)[1:])
    assert outcome.code == 0, outcome.err
    assert outcome.out


@pytest.mark.parametrize("line", [line for line in runnable() if line.startswith("twin whatif")])
def test_every_value_that_an_example_of_whatif_gives_is_allowed(line: str) -> None:
    args = build_parser().parse_args(shlex.split(line)[1:])
    base = whatif.point_of(args)
    base.case().check()
    other = changed(base, parse_changes(args.changes, base.on_node(), option_value))
    other.case().check()
    for cell in sweep(other, parse_axes(args.sweeps, other.on_node(), option_value)).cells():
        cell.point.case().check()


def test_readme_make_targets_exist() -> None:
    targets = [line.split()[1] for line in shell_lines("README.md") if line.startswith("make ")]
    assert targets
    planned = subprocess.run(
        ["make", "-n", *targets], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert planned.returncode == 0, planned.stderr


def test_command_reference_is_up_to_date() -> None:
    assert (ROOT / "docs" / "commands.md").read_text() == reference(), "run `make generated`"


def test_the_picture_of_the_readme_is_that_of_the_kept_study() -> None:
    drawn = svg.figure(readme_figure.chart())
    assert (ROOT / "docs" / "compared.svg").read_text() == drawn, "run `make generated`"


@pytest.mark.parametrize("document", LINKING)
def test_linked_files_exist(document: str) -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", (ROOT / document).read_text()):
        file = ((ROOT / document).parent / target).resolve()
        assert file.exists(), target


@pytest.mark.parametrize(
    "document", [document for document in LINKING if document != "docs/commands.md"]
)
def test_named_files_exist(document: str) -> None:
    """`twin/plan/types.py` or only `types.py`; NAME stands for what a reader chooses."""
    known = [
        file.relative_to(ROOT).as_posix()
        for folder in PLACES
        for file in (ROOT / folder).rglob("*.*")
    ]
    for name in set(
        re.findall(r"`([\w/.-]+\.(?:py|cuh|h|cpp|cu|hip|yaml))`", (ROOT / document).read_text())
    ):
        assert CHOSEN.search(name) or any(f"/{file}".endswith(f"/{name}") for file in known), name


def sections() -> dict[str, str]:
    """Of docs/adding.md, those whose commands need something added first, and the others'."""
    parts = re.split(r"^## ", (ROOT / "docs" / "adding.md").read_text(), flags=re.MULTILINE)
    return {part.partition("\n")[0]: part for part in parts[1:]}


RUN = """
import contextlib, io, shlex, sys
from twin.cli import main
for line in sys.argv[1:]:
    with contextlib.redirect_stdout(io.StringIO()) as said:
        code = main(shlex.split(line)[1:])
    if code or not said.getvalue():
        sys.exit(f"{line}: exit code {code}, {said.getvalue()!r}")
    print(line)
"""


def add(tree: Path, kind: str, text: str) -> None:
    """What a block of an example says: a file, or an edit of one place of a file."""
    head, _, body = text.partition("\n")
    file = tree / head.removeprefix("# ")
    if kind != "diff":
        file.parent.mkdir(exist_ok=True)
        file.write_text(body)
        return
    lines = body.splitlines()
    old, new = ("\n".join(line[1:] for line in lines if line[0] != other) for other in "+-")
    before = file.read_text()
    assert before.count(old) == 1, f"{file}: {old!r} is there {before.count(old)} times"
    file.write_text(before.replace(old, new))


@pytest.mark.few(1)
@pytest.mark.parametrize("name", sections())
def test_worked_example_of_an_addition_runs(name: str, tmp_path: Path) -> None:
    for folder in (
        "twin",
        "hwmodels",
        "native",
        "calibration/fits",
        "calibration/kernels",
        "studies/graph-engines",
    ):
        # with what Python has compiled: it sees by itself which files an example changes
        shutil.copytree(ROOT / folder, tmp_path / folder)
    shutil.copy(ROOT / "calibration/measured.csv", tmp_path / "calibration")
    blocks = re.findall(r"```(\w+)\n(.*?)```", sections()[name], re.DOTALL)
    for kind, text in blocks:
        if kind != "sh":
            add(tmp_path, kind, text)
    lines = [line for kind, text in blocks if kind == "sh" for line in text.splitlines()]
    assert lines
    assert all(line.startswith("twin ") for line in lines)
    outcome = subprocess.run(
        [sys.executable, "-c", RUN, *lines],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S,
    )
    assert outcome.returncode == 0, outcome.stderr
    assert outcome.stdout.splitlines() == lines


def test_the_server_s_page_says_how_often_it_looks_and_tells() -> None:
    said = " ".join((ROOT / "docs" / "server.md").read_text(encoding="utf-8").split())
    assert f"resident kernel every {1e3 * LONG_NAP_S:g} ms, and every {1e3 * NAP_S:g} ms" in said
    assert f"and then every {1e3 * Limits().gap_s:g} ms at most" in said
