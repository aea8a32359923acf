"""What `pip install monotwin` gives works without a checkout: built, installed and used afresh."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import tarfile
import urllib.request
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[1]
NAMED = re.compile(r"(?:monotwin|pip install '\.)\[(\w+)\]")
SECONDS = 400  # for what an index on a slow network takes


@dataclass(frozen=True, slots=True)
class Installed:
    """An environment of its own with the wheel in it, and an empty folder to work in."""

    bin: Path
    work: Path
    built: Path  # the sdist, and the wheel that was made of it

    def __call__(self, *words: object) -> subprocess.CompletedProcess[str]:
        return run(self.bin / str(words[0]), *words[1:], cwd=self.work, env=self.environment())

    def environment(self) -> dict[str, str]:
        kept = {name: os.environ[name] for name in ("PATH", "CXX", "HOME") if name in os.environ}
        return kept | {"XDG_CACHE_HOME": str(self.work / "cache")}


def run(
    *words: object, cwd: Path, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess:
    command = [str(word) for word in words]
    done = subprocess.run(
        command, cwd=cwd, env=env, capture_output=True, text=True, check=False, timeout=SECONDS
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
    return done


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    place = tmp_path_factory.mktemp("wheel")
    venv.create(place / "venv", with_pip=True)
    found = Installed(place / "venv" / "bin", place / "work", place / "built")
    found.work.mkdir()
    python, pip = found.bin / "python", (found.bin / "python", "-m", "pip")
    try:
        run(*pip, "install", "--quiet", "hatchling>=1.26,<2", cwd=place)
    except AssertionError as error:
        pytest.skip(f"no package index: {error}")
    run(python, "-m", "hatchling", "build", "-t", "sdist", "-d", found.built, cwd=ROOT)
    sdist = next(found.built.glob("*.tar.gz"))
    run(*pip, "wheel", "--quiet", "--no-deps", "-w", found.built, sdist, cwd=place)
    wheel = next(found.built.glob("*.whl"))
    run(*pip, "install", "--quiet", f"{wheel}[serve]", cwd=place)
    return found


def test_the_wheel_has_every_module_and_all_data(installed: Installed) -> None:
    with zipfile.ZipFile(next(installed.built.glob("*.whl"))) as wheel:
        names = set(wheel.namelist())
    package = {
        file.relative_to(ROOT).as_posix()
        for file in (ROOT / "twin").rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    data = {
        f"twin/_data/{file.relative_to(ROOT).as_posix()}"
        for folder in ("hwmodels", "native")
        for file in (ROOT / folder).rglob("*")
        if file.is_file() and "__pycache__" not in file.parts
    }
    assert package | data <= names
    assert not any("host.yaml" in name for name in names if "calibration" in name)
    with tarfile.open(next(installed.built.glob("*.tar.gz"))) as sdist:
        inside = {name.partition("/")[2] for name in sdist.getnames()}
    assert {"README.md", "LICENSE", "NOTICE", "CHANGELOG.md", "docs/python.md"} <= inside


def test_its_commands_work_without_a_checkout(installed: Installed) -> None:
    assert installed("twin", "--version").stdout.startswith("twin 0.")
    assert "predict" in installed("twin", "demo", "--help").stdout
    said = json.loads(installed("twin", "simulate", "llama-3.2-1b", "1xh200", "--json").stdout)
    assert said["tokens_per_s"] > 0
    assert said["held_out"], "the fit and its errors are in the wheel"
    assert "lanes" in installed("twin", "project", "--help").stdout
    code = "import twin; print(twin.__file__); print(twin.simulate('llama-3.2-1b', '1xh200').mbu)"
    place, mbu = installed("python", "-c", code).stdout.split()
    assert not place.startswith(str(ROOT / "twin"))
    assert 0 < float(mbu) < 1


def test_its_engine_runs_and_serves_a_checkpoint(installed: Installed, checkpoint: Path) -> None:
    words = ("--prompt", "hi", "--max-tokens", 5, "--ignore-eos", "--json")
    ran = json.loads(installed("twin", "run", checkpoint, *words).stdout)
    assert len(ran["tokens"]) == 5
    serve = [installed.bin / "twin", "serve", checkpoint, "--port", "0"]
    process = subprocess.Popen(
        serve, cwd=installed.work, env=installed.environment(), stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout
        url = process.stdout.readline().split()[-1]
        assert json.load(urllib.request.urlopen(f"{url}/health", timeout=PATIENCE_S)) == {
            "status": "ok"
        }
        assert b"<title>MonoTwin" in urllib.request.urlopen(url, timeout=PATIENCE_S).read()
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(PATIENCE_S) in (0, 130)


def test_its_extras_are_those_that_the_documents_name(installed: Installed) -> None:
    code = (
        "from importlib.metadata import metadata\n"
        "print(*metadata('monotwin').get_all('Provides-Extra'))"
    )
    extras = installed("python", "-c", code).stdout.split()
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "deploy").iterdir()]
    sources = [*pages, *(ROOT / "twin").rglob("*.py")]
    texts = [file.read_text(encoding="utf-8") for file in sources]
    named = {extra for text in texts for extra in NAMED.findall(text)}
    assert named >= {"amd", "cuda", "gguf", "serve"}
    assert named <= set(extras)


def test_its_cuda_extra_compiles_the_kernel_without_a_toolkit(installed: Installed) -> None:
    wheel = next(installed.built.glob("*.whl"))
    installed("python", "-m", "pip", "install", "--quiet", f"{wheel}[cuda]")
    code = (
        "import shutil\n"
        "shutil.which = lambda *_: None  # no nvcc\n"
        "import twin\n"
        "from twin.engine.cuda_build import compile_cubin\n"
        "made = compile_cubin(twin.make_plan('llama-3.2-1b', '1xh200'))\n"
        "print(made.compiler, len(made.cubin))"
    )
    compiler, size = installed("python", "-c", code).stdout.split()
    assert compiler == "NVRTC"
    assert int(size) > 100_000
