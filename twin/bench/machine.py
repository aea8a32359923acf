"""The GPU's state while it is measured, by read-only queries, and the code's commit."""

from __future__ import annotations

import shutil
import statistics
import subprocess
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from twin.errors import ConfigError, EngineError

QUERY = {  # our name -> nvidia-smi's
    "gpu": "name",
    "driver": "driver_version",
    "sm_mhz": "clocks.sm",
    "memory_mhz": "clocks.mem",
    "max_sm_mhz": "clocks.max.sm",
    "max_memory_mhz": "clocks.max.mem",
    "power_w": "power.draw",
    "temperature_c": "temperature.gpu",
}
TEXTS = ("gpu", "driver")
SAMPLED = ("sm_mhz", "memory_mhz", "power_w", "temperature_c")

State = dict[str, Any]


def gpu_states(gpus: int = 1) -> list[State]:
    """The present states of the first GPUs; a number that the driver does not tell is None."""
    done = subprocess.run(_command(gpus), capture_output=True, text=True, check=False)
    if done.returncode:
        raise EngineError(
            f"nvidia-smi failed: {(done.stderr or done.stdout).strip()[:200]}; is the driver "
            "loaded?"
        )
    states = parse_states(done.stdout)
    if len(states) != gpus:
        raise EngineError(
            f"nvidia-smi said {done.stdout[:200]!r}, expected {gpus} lines of {len(QUERY)} "
            "columns; report this"
        )
    return states


def parse_states(text: str) -> list[State]:
    """One state a line of nvidia-smi's CSV without header and units; other lines, such as warnings,
    are left out.
    """
    states = []
    for line in text.splitlines():
        words = [word.strip() for word in line.split(",")]
        if len(words) == len(QUERY):
            states.append(
                {
                    name: word if name in TEXTS else _number(word)
                    for name, word in zip(QUERY, words, strict=True)
                }
            )
    return states


@dataclass(slots=True)
class Clocks:
    """What the clocks of all GPUs were, under load and right after each round."""

    gpus: int = 1
    under_load: list[State] = field(default_factory=list)
    after_rounds: list[State] = field(default_factory=list)
    _leave: threading.Event = field(default_factory=threading.Event)
    _watching: threading.Thread | None = None

    def __enter__(self) -> Clocks:
        """Look again and again until the end of the block: for warming up, never for timing."""
        self._leave.clear()
        self._watching = threading.Thread(target=self._look, daemon=True)
        self._watching.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._leave.set()
        assert self._watching is not None
        self._watching.join()

    def _look(self) -> None:
        while not self._leave.is_set():
            self.under_load += gpu_states(self.gpus)

    def after_round(self) -> None:
        self.after_rounds += gpu_states(self.gpus)

    def to_json(self) -> dict[str, Any]:
        first = (self.under_load + self.after_rounds or [{}])[0]
        return {
            "under_load": _spreads(self.under_load),
            "after_rounds": _spreads(self.after_rounds),
            "max_sm_mhz": first.get("max_sm_mhz"),
            "max_memory_mhz": first.get("max_memory_mhz"),
        }


def commit(folder: Path, given: str | None) -> str:
    """The code's commit, "-dirty" when files differ from it; `given` where there is no repository.
    Raises ConfigError.
    """
    if given is not None:
        return given
    head = _git(folder, "rev-parse", "HEAD")
    if head is None:
        raise ConfigError(
            f"{folder} is no git checkout, and a record names the code it measured: give --commit "
            "ID"
        )
    return head + ("-dirty" if _git(folder, "status", "--porcelain") else "")


def _git(folder: Path, *words: str) -> str | None:
    if shutil.which("git") is None:
        return None
    done = subprocess.run(
        ["git", "-C", str(folder), *words], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() if done.returncode == 0 else None


def _command(gpus: int) -> list[str]:
    found = shutil.which("nvidia-smi")
    if found is None:
        raise EngineError(
            "nvidia-smi is not here, so neither are clocks and driver: run on a computer with an "
            "NVIDIA GPU"
        )
    return [
        found,
        f"--id={','.join(str(number) for number in range(gpus))}",
        f"--query-gpu={','.join(QUERY.values())}",
        "--format=csv,noheader,nounits",
    ]


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:  # "[N/A]"
        return None


def _spreads(states: Sequence[State]) -> dict[str, Any]:
    """Lowest, median and highest of each number."""
    out: dict[str, Any] = {}
    for name in SAMPLED:
        values = [state[name] for state in states if state[name] is not None]
        out[name] = (
            {"low": min(values), "median": statistics.median(values), "high": max(values)}
            if values
            else None
        )
    return out
