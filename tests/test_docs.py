"""The documents tell the truth: their commands run, and what is generated is up to date."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.command_line import Twin
from twin.cli import COMMANDS, build_parser
from twin.commands import whatif
from twin.commands.arguments import option_value
from twin.commands.reference import reference, subparsers
from twin.study.whatif import changed, parse_axes, parse_changes, sweep

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"```sh\n(.*?)```", re.DOTALL)
GPU = re.compile(r"--node|llama-3.2-1b --random|--sensitivity|--draft ")  # a GPU, 2.5 GB of random weights, or minutes of simulation
MINUTES = ("twin calibrate", "twin validate", "twin demo")  # parsed here, run by their own tests or by hand


def shell_lines(document: str) -> list[str]:
    return [line for block in BLOCK.findall((ROOT / document).read_text()) for line in block.splitlines() if line]


def quick() -> list[str]:
    return [line for line in shell_lines("README.md") if line.startswith("twin ") and not line.startswith(MINUTES)]


@pytest.mark.parametrize("line", quick())
def test_readme_command_runs(line: str, twin: Twin, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(checkpoint, tmp_path / "my-checkpoint")
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
    lines = [example.split("   ")[0].strip() for p in subparsers(build_parser()).values() for example in (p.epilog or "").splitlines()[1:]]
    return [line for line in lines if not line.startswith((*MINUTES, "twin project", "twin bench", "twin trace")) and not GPU.search(line)]


@pytest.mark.slow
@pytest.mark.parametrize("line", runnable())
def test_every_example_of_help_works(line: str, twin: Twin, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(checkpoint, tmp_path / "my-checkpoint")
    (tmp_path / "question.txt").write_text("Why?")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("twin.commands.run.check_memory", lambda plan: None)
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
    planned = subprocess.run(["make", "-n", *targets], cwd=ROOT, capture_output=True, text=True, check=False)
    assert planned.returncode == 0, planned.stderr


def test_command_reference_is_up_to_date() -> None:
    assert (ROOT / "docs" / "commands.md").read_text() == reference(), "run `make generated`"


def test_linked_files_exist() -> None:
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", (ROOT / "README.md").read_text()):
        assert (ROOT / target).exists(), target
