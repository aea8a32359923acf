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
from twin.commands.reference import reference, subparsers

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"```sh\n(.*?)```", re.DOTALL)
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
