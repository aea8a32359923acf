"""The command line as a user calls it, and a tiny model to call it on."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from twin.cli import main
from twin.models.spec import ModelSpec, Rope

TINY = ModelSpec(
    name="tiny",
    family="llama",
    layers=2,
    hidden=64,
    heads=4,
    kv_heads=2,
    head_dim=16,
    ffn=128,
    vocab=320,
    context=256,
    norm_eps=1e-5,
    rope=Rope(10000.0),
    windows=(0, 0),
)


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
