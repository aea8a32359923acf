"""What the command-line tests share: a tiny model, and the command line called in this process."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from twin.cli import main
from twin.engine.save import save_checkpoint
from twin.engine.tokenizer import make_byte_tokenizer
from twin.engine.weights import random_weights
from twin.models.spec import ModelSpec, Rope

TINY = ModelSpec(
    name="tiny", family="llama", layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=128, vocab=320, context=256, norm_eps=1e-5,
    rope=Rope(10000.0), windows=(0, 0),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Outcome:
    code: int
    out: str
    err: str


class Twin:
    """Calls the command line as a user does, and keeps what it printed."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys

    def __call__(self, *words: object) -> Outcome:
        try:
            code = main([str(word) for word in words])
        except SystemExit as ended:  # argparse's own way out
            code = ended.code if isinstance(ended.code, int) else 1
        out, err = self.capsys.readouterr()
        return Outcome(code, out, err)


@pytest.fixture()
def twin(capsys: pytest.CaptureFixture[str]) -> Twin:
    return Twin(capsys)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A real, tiny Hugging Face folder with random weights and a byte tokenizer. Copy it before damaging it."""
    folder = tmp_path_factory.mktemp("checkpoint") / "tiny"
    save_checkpoint(folder, random_weights(TINY, 1))
    make_byte_tokenizer(folder)
    return folder
