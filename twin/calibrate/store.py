"""Measured runs on disk: calibration/runs/<device>/<date>-<name>/{meta.yaml,samples.csv}, append-only; fits beside them."""

from __future__ import annotations

import csv
import os
import platform
import subprocess
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from twin.errors import CalibrationError
from twin.hardware.types import Kind, Number

FIELDS = ("probe", "repeat", "seconds_per_step")


@dataclass(frozen=True, slots=True)
class Run:
    """All samples of one probing session: seconds per step, one per repeat."""

    folder: Path
    meta: dict[str, Any]
    samples: dict[str, list[float]]

    @property
    def id(self) -> str:
        return self.folder.name


def home() -> Path:
    """The calibration folder: MONOTWIN_CALIBRATION, else the checkout's, else the user's data folder."""
    chosen = os.environ.get("MONOTWIN_CALIBRATION")
    if chosen:
        return Path(chosen)
    checkout = Path(__file__).resolve().parents[2]
    if (checkout / "pyproject.toml").is_file():
        return checkout / "calibration"
    data = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(data) / "monotwin" / "calibration"


def runs_folder(device: str) -> Path:
    return home() / "runs" / device


def fit_file(device: str) -> Path:
    return home() / "fits" / f"{device}.yaml"


def conditions() -> dict[str, Any]:
    """What a later reader must know about the machine and the code."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "commit": _commit(),
        "load_before": os.getloadavg()[0],
        "clock_mhz": _clock_mhz(),
    }


def cpu_name() -> str:
    lines = _read("/proc/cpuinfo").splitlines()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _clock_mhz() -> float | None:
    lines = [line for line in _read("/proc/cpuinfo").splitlines() if line.startswith("cpu MHz")]
    return float(lines[0].split(":")[1]) if lines else None


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""


def _commit() -> str | None:
    """The checkout's commit; None outside a checkout."""
    folder = Path(__file__).resolve().parents[2]
    done = subprocess.run(["git", "-C", str(folder), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or None


def write_run(device: str, name: str, meta: dict[str, Any], samples: dict[str, list[float]]) -> Run:
    """Store a run under a new folder; an existing folder is never touched."""
    stamp = datetime.now(UTC).strftime("%Y-%m-%dT%H%M%S")
    folder = runs_folder(device) / f"{stamp}-{name}"
    folder.mkdir(parents=True, exist_ok=False)
    (folder / "meta.yaml").write_text(yaml.safe_dump(meta, sort_keys=False))
    with (folder / "samples.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(FIELDS)
        for probe, seconds in samples.items():
            writer.writerows((probe, repeat, f"{value:.9g}") for repeat, value in enumerate(seconds))
    return Run(folder, meta, samples)


def read_run(folder: Path) -> Run:
    """Load a stored run. Raises CalibrationError when a file is missing or a row is not a sample."""
    try:
        meta = yaml.safe_load((folder / "meta.yaml").read_text())
        with (folder / "samples.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
    except OSError as error:
        raise CalibrationError(f"{folder} is not a run: {error.strerror} ({error.filename}); probe again with `twin calibrate`") from error
    samples: dict[str, list[float]] = {}
    for line, row in enumerate(rows, start=2):
        try:
            samples.setdefault(row["probe"], []).append(float(row["seconds_per_step"]))
        except (KeyError, TypeError, ValueError) as error:
            raise CalibrationError(f"{folder / 'samples.csv'} line {line}: expected the columns {', '.join(FIELDS)}") from error
    return Run(folder, meta, samples)


def latest_run(device: str, prefix: str) -> Run:
    """The newest run whose name starts with `prefix`."""
    folder = runs_folder(device)
    found = sorted(p for p in folder.glob(f"*-{prefix}*") if p.is_dir())
    if not found:
        raise CalibrationError(f"no {prefix} run of {device} under {folder}: run `twin calibrate {device}` first")
    return read_run(found[-1])


def write_fit(device: str, numbers: dict[str, Number], meta: dict[str, Any]) -> Path:
    """Store fitted numbers with their intervals; the only writer of fits/."""
    file = fit_file(device)
    file.parent.mkdir(parents=True, exist_ok=True)
    entries = {path: {"value": n.value, "low": n.low, "high": n.high, "source": n.source} for path, n in numbers.items()}
    file.write_text(yaml.safe_dump({"device": device, **meta, "numbers": entries}, sort_keys=False))
    return file


def read_fit(device: str) -> tuple[dict[str, Number], dict[str, Any]] | None:
    """The fitted numbers of a device and the fit's context; None when there is no fit."""
    file = fit_file(device)
    if not file.is_file():
        return None
    content = yaml.safe_load(file.read_text())
    numbers = {
        path: Number(entry["value"], Kind.FITTED, entry["source"], entry["low"], entry["high"])
        for path, entry in content.pop("numbers").items()
    }
    return numbers, content
