"""The program's first second: what it loads, and what Ctrl-C does meanwhile."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[1]
SLOW = (
    "pandas",
    "pyarrow",
    "plotly",
    "scipy",
    "torch",
    "tokenizers",
    "multiprocessing",
    "twin.engine",
    "twin.models.deepseek_v4",
    "twin.models.gguf_config",
    "twin.study.outcome",
    "twin.study.runner",
)
# of YAML: the model, the node, its device, their fits, costs of our kernel on it (stated, fitted),
# their errors, two of prices and engines
# with what each fit and each record of held-out runs begins with: they make the interval
MOST_FILES = 28
HALTS = '''
import sys, time

class Halt:
    """Stays in the import of one module, having said so."""

    def find_spec(self, name, path=None, target=None):
        if name == {name!r}:
            print("loading", flush=True)
            time.sleep(60)

sys.meta_path.insert(0, Halt())
'''


def test_simulate_loads_no_library_and_no_file_that_it_does_not_need() -> None:
    code = (
        "import sys\nfrom twin.cli import main\n"
        "assert main(['simulate', 'llama-3.2-1b', '1xh200']) == 0\n"
        f"print(sorted(set({SLOW}) & sys.modules.keys()), file=sys.stderr)\n"
        "from twin.data import _parsed\n"
        "print(_parsed.cache_info().misses, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    loaded, files = done.stderr.splitlines()[-2:]
    assert loaded == "[]"
    assert int(files) <= MOST_FILES, "YAML that nobody needs is parsed"


@pytest.mark.parametrize("name", ["twin.cli", "argparse", "twin.commands.output"])
def test_ctrl_c_while_the_program_is_loaded_ends_it_quietly(name: str, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(HALTS.format(name=name))
    process = subprocess.Popen(
        [sys.executable, "-m", "twin", "--version"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        # a background job inherits "ignore"
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    assert process.stdout
    assert process.stdout.readline() == b"loading\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, out, err) == (130, b"", b"")


def test_the_installed_program_starts_where_ctrl_c_is_minded() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"][
        "scripts"
    ]
    assert scripts == {"twin": "twin.__main__:main"}
    module, function = scripts["twin"].split(":")
    assert callable(getattr(import_module(module), function))


def test_the_version_is_said_without_any_command_s_libraries() -> None:
    code = (
        "import sys\nfrom twin.cli import main\n"
        "try:\n    main(['--version'])\nexcept SystemExit:\n    pass\n"
        "print(sorted({'numpy', 'yaml', 'twin.plan'} & sys.modules.keys()), file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stderr.splitlines()[-1] == "[]"


def test_a_module_starts_the_program() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "twin", "--version"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith("twin ")
