"""Every mistake of a new user ends with exit code 2, nothing on stdout, and a message that says the
value, the limit and the next step.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.command_line import TINY, Twin
from tests.refusals import refused_command
from twin.data import data_dir
from twin.engine.save import INDEX, SINGLE, save_checkpoint
from twin.engine.tokenizer import make_byte_tokenizer
from twin.engine.weights import random_weights

LANES = ("laneformer-2b", "8xh200")


@dataclass(frozen=True, slots=True)
class Mistake:
    name: str
    words: tuple[str, ...]
    says: tuple[str, ...]  # parts of the message


MISTAKES = [
    Mistake(
        "a model that nobody knows",
        ("plan", "gpt-9", "8xh200"),
        ("'gpt-9'", "config.json", "gpt-oss-20b"),
    ),
    Mistake(
        "a model's name mistyped",
        ("plan", "laneformer-2c", "8xh200"),
        ("'laneformer-2c'", "did you mean laneformer-2b"),
    ),
    Mistake(
        "a node that nobody knows", ("plan", "laneformer-2b", "8xtpu"), ("unknown node '8xtpu'",)
    ),
    Mistake(
        "a node with too many GPUs",
        ("plan", "laneformer-2b", "9xh200"),
        ("'9xh200'", "allowed: 1xh200-sxm, 2xh200-sxm, 4xh200-sxm, 8xh200-sxm"),
    ),
    Mistake(
        "a device's name mistyped", ("hardware", "mi300y"), ("'mi300y'", "did you mean mi300x")
    ),
    Mistake(
        "GPUs that do not divide the heads",
        ("plan", "qwen2.5-coder-1.5b", "8xh200"),
        ("12 attention heads", "8 ranks", "choose"),
    ),
    Mistake(
        "a negative bandwidth",
        ("whatif", *LANES, "--set", "memory.stream=-5 TB/s"),
        ("'-5 TB/s'", "not negative", "4.8 TB/s"),
    ),
    Mistake(
        "a factor of zero",
        ("whatif", *LANES, "--set", "memory.stream=x0"),
        ("stream_bytes_per_s", "greater than zero"),
    ),
    Mistake(
        "an unknown hardware path",
        ("whatif", *LANES, "--set", "memory.strem=x2"),
        ("'memory.strem'", "did you mean", "memory.stream"),
    ),
    Mistake(
        "a wrong unit",
        ("whatif", *LANES, "--set", "memory.stream=5 TBps"),
        ("'TBps'", "allowed", "TB/s"),
    ),
    Mistake(
        "a change without a value",
        ("whatif", *LANES, "--set", "handoff"),
        ("'handoff'", "name=value"),
    ),
    Mistake(
        "an option's value mistyped",
        ("whatif", *LANES, "--set", "handoff=gird"),
        ("'gird'", "did you mean grid"),
    ),
    Mistake("a what-if without a question", ("whatif", *LANES), ("--set", "--sensitivity")),
    Mistake(
        "context beyond its own capacity",
        ("plan", *LANES, "--context", "2000", "--max-context", "1000"),
        ("2000", "max_context=1000"),
    ),
    Mistake(
        "context beyond the model's",
        ("plan", *LANES, "--context", "5000"),
        ("context=5000", "4096"),
    ),
    Mistake(
        "a ring larger than on-chip memory",
        ("plan", *LANES, "--ring-slots", "100"),
        ("232448", "ring_slots"),
    ),
    Mistake("more blocks than SMs", ("plan", *LANES, "--blocks", "500"), ("500", "132")),
    Mistake("no blocks", ("plan", *LANES, "--blocks", "0"), ("blocks=0", "at least 1")),
    Mistake(
        "a library inside a resident kernel",
        ("plan", *LANES, "--collective", "library"),
        ("library", "resident", "push"),
    ),
    Mistake(
        "ranks that never meet",
        ("plan", *LANES, "--collective", "none"),
        ("collective=none", "push or library"),
    ),
    Mistake(
        "a delay for a model without lanes",
        ("plan", "llama-3.1-8b", "8xh200", "--delay", "2"),
        ("delay=2", "not trained"),
    ),
    Mistake(
        "an unknown type of weights",
        ("plan", *LANES, "--dtype", "fp8"),
        ("'fp8'", "MODEL@fp8"),
    ),
    Mistake(
        "a number that is none", ("plan", *LANES, "--blocks", "many"), ("'many'", "whole number")
    ),
    Mistake(
        "a single simulated step", ("simulate", *LANES, "--steps", "1"), ("--steps 1", "at least 2")
    ),
    Mistake("an unknown command", ("simulat",), ("simulat", "simulate")),
    Mistake(
        "a shape without weights",
        ("run", "laneformer-2b", "--prompt", "hi"),
        ("without weights", "--random"),
    ),
    Mistake(
        "a missing checkpoint",
        ("run", "./nowhere", "--prompt", "hi"),
        ("nowhere", "not a directory", "Hugging Face"),
    ),
    Mistake(
        "a model larger than this computer",
        ("run", "llama-3.1-70b", "--random", "1", "--prompt", "hi"),
        ("GB", "memory"),
    ),
    Mistake(
        "a GPU that is not here", ("calibrate", "h200-sxm"), ("h200-sxm", "twin calibrate host")
    ),
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda m: m.name)
def test_mistake_is_explained(mistake: Mistake, twin: Twin) -> None:
    refused_command(twin, *mistake.words, says=mistake.says)


GENERATION = [
    Mistake("a negative temperature", ("--temperature", "-1"), ("temperature=-1", "at least 0")),
    Mistake("top-p of zero", ("--temperature", "1", "--top-p", "0"), ("top_p=0", "above 0")),
    Mistake(
        "a negative top-k", ("--temperature", "1", "--top-k", "-3"), ("top_k=-3", "at least 0")
    ),
    Mistake("nothing to generate", ("--max-tokens", "0"), ("--max-tokens 0", "at least 1")),
    Mistake(
        "more positions than the model knows",
        ("--max-tokens", "300"),
        ("302 positions", "context is 256", "shorten"),
    ),
    Mistake("an odd number of GPUs", ("--gpus", "3"), ("3xhost", "allowed: 1xhost, 2xhost")),
    Mistake("GPUs that do not divide the heads", ("--gpus", "8"), ("4 attention heads", "8 ranks")),
    Mistake("a stop token out of the vocabulary", ("--stop", "320"), ("--stop 320", "0 to 319")),
]


@pytest.mark.parametrize("mistake", GENERATION, ids=lambda m: m.name)
def test_generation_mistake_is_explained(mistake: Mistake, twin: Twin, checkpoint: Path) -> None:
    refused_command(twin, "run", checkpoint, "--prompt", "ab", *mistake.words, says=mistake.says)


@pytest.mark.parametrize(
    ("ids", "says"),
    [
        ("1,320", ("320", "0 to 319")),
        ("-1", ("-1",)),
        ("a,b", ("'a,b'", "1,2,3")),
        (" ", ("empty",)),
    ],
)
def test_prompt_tokens_are_checked(
    ids: str, says: tuple[str, ...], twin: Twin, checkpoint: Path
) -> None:
    refused_command(twin, "run", checkpoint, f"--prompt-tokens={ids}", says=says)


def test_prompt_file_must_exist(twin: Twin, checkpoint: Path) -> None:
    refused_command(
        twin,
        "run",
        checkpoint,
        "--prompt-file",
        "nowhere.txt",
        says=("nowhere.txt", "cannot be read"),
    )


# ---- damaged checkpoints -------------------------------------------------------------------------


def corrupt(folder: Path) -> None:
    (folder / SINGLE).write_bytes(b"\xff" * 100)


def truncate(folder: Path) -> None:
    data = (folder / SINGLE).read_bytes()
    (folder / SINGLE).write_bytes(data[: len(data) // 2])


def other_config(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 256}))


def unknown_family(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": "lama"}))


def no_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


def pickled(folder: Path) -> None:
    (folder / SINGLE).rename(folder / "pytorch_model.bin")


def broken_json(folder: Path) -> None:
    (folder / "config.json").write_text("{")


DAMAGES: list[tuple[Callable[[Path], None], tuple[str, ...]]] = [
    (corrupt, (SINGLE,)),
    (truncate, (SINGLE,)),
    (other_config, ("shape", "[256, 64]", "config.json")),
    (unknown_family, ("'lama'", "did you mean llama")),
    (no_tokenizer, ("tokenizer.json", "--prompt-tokens")),
    (pickled, ("pickled", "safetensors")),
    (broken_json, ("config.json", "JSON")),
]


@pytest.mark.parametrize(("damage", "says"), DAMAGES, ids=lambda x: getattr(x, "__name__", ""))
def test_damaged_checkpoint_is_refused(
    damage: Callable[[Path], None],
    says: tuple[str, ...],
    twin: Twin,
    checkpoint: Path,
    tmp_path: Path,
) -> None:
    folder = tmp_path / "damaged"
    shutil.copytree(checkpoint, folder)
    damage(folder)
    refused_command(twin, "run", folder, "--prompt", "ab", says=says)


def test_truncated_shard_is_named(twin: Twin, tmp_path: Path) -> None:
    save_checkpoint(tmp_path, random_weights(TINY, 1), shards=3)
    make_byte_tokenizer(tmp_path)
    shard = (
        tmp_path / sorted(set(json.loads((tmp_path / INDEX).read_text())["weight_map"].values()))[1]
    )
    shard.write_bytes(shard.read_bytes()[:-64])
    refused_command(twin, "run", tmp_path, "--prompt", "ab", says=(shard.name,))


# ---- the computer and our own files --------------------------------------------------------------


def test_missing_compiler_is_named(
    twin: Twin, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    refused_command(
        twin, "run", checkpoint, "--prompt", "ab", says=("no C++ compiler", "apt-get install g++")
    )


def test_unknown_key_in_a_device_file_is_named(
    twin: Twin, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    shutil.copytree(data_dir("hwmodels"), tmp_path / "hwmodels")
    file = tmp_path / "hwmodels" / "devices" / "mi300x.yaml"
    file.write_text(file.read_text().replace("  latency_s:", "  latencie_s:", 1))
    monkeypatch.setattr("twin.hardware.load.data_dir", lambda name: tmp_path / name)
    refused_command(
        twin, "hardware", "mi300x", says=("mi300x.yaml", "latencie_s", "did you mean latency_s")
    )


def test_a_message_never_hides_a_bug(twin: Twin, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: object) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("twin.commands.models.load_model", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        twin("models", "laneformer-2b")
