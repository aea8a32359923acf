"""Measured runs on disk: calibration/runs/<node>/<date>-<name>/{meta.yaml,samples.csv},
append-only; fits next to them.

A node of one device is called by the device, as on the command line: 1xh200-sxm lies in h200-sxm.
"""

from __future__ import annotations

import csv
import io
import json
import os
import platform
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

import yaml
from msgspec import Meta

from twin import files
from twin.data import data_dir, read_yaml
from twin.errors import CalibrationError, ConfigError, HardwareError
from twin.files import MOST_RECORD_BYTES
from twin.frozen import frozen
from twin.hardware.moved import refuse
from twin.hardware.number import Kind, Number
from twin.reading import read
from twin.text import shown

FIELDS = ("probe", "repeat", "seconds_per_step")
STAGE_FIELDS = ("run", "stage", "span_s", "wait_s", "work_s")
STAGES = "stages.csv"
KERNEL_ID = "kernel_id"  # in the meta data of a record
SCHEDULES = "schedules"  # the same: the id of each run's schedule, by name
SAMPLES = "samples.csv"
OF_KERNEL = "kernel."  # before the paths of a kernel's costs
COSTS = "kernel_costs"  # in a fit's file: the id of the kernel whose costs belong to it
UNKNOWN = "unknown"  # the kernel of a run without an id
BULK = ("residuals", "together", "cross", "moved_by")  # of a fit, what no prediction reads
PATH_SHOWN = 200  # characters of a path in a message
HOME_VARIABLE = "MONOTWIN_CALIBRATION"
STATED = ("fits", "held-out")  # folders
STAMP = "%Y-%m-%dT%H%M%S"

Samples = dict[str, list[float]]  # seconds per step of each repeat, by probe or engine run


@frozen
class StageTimes:
    """One kind of stage in a traced step, its layers added up; medians over steps."""

    run: str
    stage: str  # kind
    # from the last block's end of the stage before to the last block's end of this one: spans add
    # up to the step
    span_s: float
    wait_s: float  # mean over blocks: until all inputs are there
    work_s: float  # mean over blocks: from there to the end


@frozen
class Run:
    """All samples of one probing session: seconds per step, one per repeat."""

    folder: Path
    meta: dict[str, Any]
    samples: Samples
    stages: tuple[StageTimes, ...] = ()  # of engine runs that were traced

    @property
    def id(self) -> str:
        return self.folder.name


def home() -> Path:
    """The calibration folder: MONOTWIN_CALIBRATION, else the checkout's, else the user's data
    folder.
    """
    chosen = os.environ.get(HOME_VARIABLE)
    if chosen:
        return Path(chosen)
    checkout = Path(__file__).resolve().parents[2]
    if (checkout / "pyproject.toml").is_file():
        return checkout / "calibration"
    data = os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share"
    return Path(data) / "monotwin" / "calibration"


def name_of(node: str) -> str:
    """A node's name on disk."""
    return node.removeprefix("1x")


def runs_folder(node: str) -> Path:
    return home() / "runs" / name_of(node)


def fit_file(node: str) -> Path:
    return home() / "fits" / f"{name_of(node)}.yaml"


def measured_on(meta: dict[str, Any]) -> str:
    """The node of a run or a fit; those of 2026-11 name the device of a node of one."""
    return name_of(str(meta.get("node", meta.get("device"))))


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
    """The checkout's commit; None outside a checkout, or without git."""
    folder = Path(__file__).resolve().parents[2]
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), "rev-parse", "HEAD"],
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError:
        return None
    return done.stdout.strip() or None


def save_run(
    folder: Path, meta: dict[str, Any], samples: Samples, stages: Sequence[StageTimes] = ()
) -> Run:
    """Write a run's files into `folder`, over those of an earlier state of the same run."""
    from twin.calibrate.published import is_published  # who reads a fit needs no runs

    rows = [
        (name, repeat, f"{value:.9g}")
        for name, seconds in samples.items()
        for repeat, value in enumerate(seconds)
    ]
    contents = {folder / "meta.yaml": yaml.safe_dump(meta, sort_keys=False)}
    if not is_published(meta):  # whose figures are in the meta data
        contents[folder / SAMPLES] = files.csv_text(FIELDS, rows)
    if stages:
        traced = [
            (s.run, s.stage, *(f"{seconds:.6g}" for seconds in (s.span_s, s.wait_s, s.work_s)))
            for s in stages
        ]
        contents[folder / STAGES] = files.csv_text(STAGE_FIELDS, traced)
    files.write(contents)
    return Run(folder, meta, samples, tuple(stages))


def new_folder(node: str, name: str) -> Path:
    """An empty folder for a run that begins now; an existing one is never touched."""
    return files.new_folder(runs_folder(node), datetime.now(UTC).strftime(STAMP), name)


def adopt_run(folder: Path, node: str, name: str) -> Run:
    """A run that was measured elsewhere, copied among the runs of `node` under its own date; one
    that is there already is used as it is.

    Raises CalibrationError when the folder holds no run of this node.
    """
    run = read_run(folder)
    if measured_on(run.meta) != name_of(node):
        raise CalibrationError(
            f"{folder} was measured on {measured_on(run.meta)}, not on {name_of(node)}: name that "
            "node, or another folder"
        )
    if not run.samples:
        raise CalibrationError(f"{folder} holds no samples: measure again with --measure-only")
    if folder.resolve().parent == runs_folder(node).resolve():
        return run
    try:
        stamp = datetime.fromisoformat(str(run.meta["date"])).astimezone(UTC).strftime(STAMP)
    except (KeyError, ValueError) as error:
        raise CalibrationError(
            f"{folder / 'meta.yaml'}: no date in ISO format; measure again with --measure-only"
        ) from error
    parent = runs_folder(node)
    # others may have begun in the same second
    for folder in sorted([*parent.glob(f"{stamp}-{name}"), *parent.glob(f"{stamp}-*-{name}")]):
        if (there := read_run(folder)).samples == run.samples:
            return there
    made = files.new_folder(parent, stamp, name)
    return save_run(made, run.meta, run.samples, run.stages)


def pooled(run: Run, others: Sequence[Run]) -> Run:
    """A run of the same probes on several devices of one name: samples of all, marks of the first.
    What only others hold is left out.
    """
    samples = {
        name: values + [value for other in others for value in other.samples.get(name, [])]
        for name, values in run.samples.items()
    }
    return replace(run, samples=samples)


def read_run(folder: Path) -> Run:
    """Load a stored run, a packed one too. Raises CalibrationError when a file is missing or a row
    is not a sample.
    """
    # who reads a fit needs no runs
    from twin.calibrate.packed import unpacked
    from twin.calibrate.published import is_published, samples_of

    here = unpacked(folder)
    try:
        meta = _read_yaml(here / "meta.yaml", "measure again with `twin calibrate`")
        if is_published(meta):
            return Run(folder, meta, samples_of(folder, meta))
        rows = _read_table(here / SAMPLES)
        traced = _read_table(here / STAGES) if (here / STAGES).is_file() else []
    except OSError as error:
        raise CalibrationError(
            f"{folder} is not a run: {error.strerror} ({error.filename}); probe again with `twin "
            "calibrate`"
        ) from error
    samples: Samples = {}
    for line, row in enumerate(rows, start=2):
        with _table_line(folder / SAMPLES, line, FIELDS):
            samples.setdefault(row["probe"], []).append(float(row["seconds_per_step"]))
    stages = []
    for line, row in enumerate(traced, start=2):
        with _table_line(folder / STAGES, line, STAGE_FIELDS):
            stages.append(
                StageTimes(
                    row["run"],
                    row["stage"],
                    float(row["span_s"]),
                    float(row["wait_s"]),
                    float(row["work_s"]),
                )
            )
    return Run(folder, meta, samples, tuple(stages))


def _read_table(file: Path) -> list[dict[str, str]]:
    try:
        with file.open(newline="", encoding="utf-8") as table:
            return list(csv.DictReader(table))
    except (csv.Error, ValueError) as error:
        raise CalibrationError(
            f"{shown(file, PATH_SHOWN)}: is damaged ({error}); measure again with `twin calibrate`"
        ) from error


@contextmanager
def _table_line(file: Path, line: int, fields: Sequence[str]) -> Iterator[None]:
    """Says which line of a table cannot be read."""
    try:
        yield
    except (KeyError, TypeError, ValueError) as error:
        raise CalibrationError(
            f"{file} line {line}: expected the columns {', '.join(fields)}"
        ) from error


def kernel_file(node: str, kernel: str) -> Path:
    """Where a fit's costs of a kernel stand."""
    return home() / "kernels" / kernel / f"{name_of(node)}.yaml"


def write_fit(node: str, numbers: dict[str, Number], meta: dict[str, Any]) -> Path:
    """Store fitted numbers with their intervals: those of the hardware in fits/, costs of the
    kernel that was probed in kernels/<its id>/, and what only intervals and later fits read in a
    JSON file next to the fit. The only writer of these.
    """
    file = fit_file(node)
    costs = {
        path.removeprefix(OF_KERNEL): _entry(n)
        for path, n in numbers.items()
        if path.startswith(OF_KERNEL)
    }
    rest = {path: _entry(n) for path, n in numbers.items() if not path.startswith(OF_KERNEL)}
    about = {name: value for name, value in meta.items() if name not in (*BULK, COSTS)}
    contents = {}
    if costs:
        kernel = str(meta.get(KERNEL_ID) or meta.get(COSTS) or UNKNOWN)
        about[COSTS] = kernel
        contents[kernel_file(node, kernel)] = _fit_text(
            {"node": node, "kernel": kernel, "run": meta.get("run"), "numbers": costs}
        )
    bulk = {name: meta[name] for name in BULK if name in meta}
    beyond = file.with_suffix(".json")
    if bulk or beyond.exists():
        contents[beyond] = json.dumps(bulk) + "\n"
    contents[file] = _fit_text({"node": node, **about, "numbers": rest})
    files.write(contents)
    return file


def _fit_text(content: dict[str, Any]) -> str:
    return yaml.safe_dump(content, sort_keys=False, default_flow_style=None, width=140)


def read_fit(node: str) -> tuple[dict[str, Number], dict[str, Any]] | None:
    """The fitted numbers of a node, its kernel's costs among them, and the fit's context: this
    user's, else the package's; None when there is no fit.

    Raises CalibrationError for a file that holds none.
    """
    file = _own_or_shipped(fit_file(node))
    if file is None:
        return None
    numbers, meta = _fit(file, name_of(node), state_of(file))
    return dict(numbers), dict(meta)


def state_of(file: Path) -> tuple[int, int, int] | None:
    """What changes with a file; None where there is none."""
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


@lru_cache(maxsize=64)
def _fit(file: Path, name: str, state: Any) -> tuple[dict[str, Number], dict[str, Any]]:
    """The content of a file in a state, which a prediction reads some thirty times."""
    advice = f"remove it, or fit again with `twin calibrate {name}`"
    content = _read_yaml(file, advice)
    numbers = _fitted(file, content, advice)
    if kernel := content.pop(COSTS, None):
        costs = file.parents[1] / "kernels" / str(kernel) / file.name
        if not costs.is_file():
            raise CalibrationError(
                f"{shown(file, PATH_SHOWN)}: its kernel's costs are missing, in "
                f"{shown(costs, PATH_SHOWN)}; {advice}"
            )
        found = _fitted(costs, _read_yaml(costs, advice), advice)
        numbers |= {f"{OF_KERNEL}{path}": number for path, number in found.items()}
        content[COSTS] = kernel
    bulk = file.with_suffix(".json")
    if bulk.is_file():
        try:
            content |= files.read_json(bulk, MOST_RECORD_BYTES)
        except ConfigError as error:
            raise CalibrationError(f"{error}; {advice}") from error
    return numbers, content


def _fitted(file: Path, content: dict[str, Any], advice: str) -> dict[str, Number]:
    found = read(
        content.pop("numbers", None),
        dict[str, _Fitted],
        shown(file, PATH_SHOWN),
        refusal=CalibrationError,
        at="numbers",
        advice=advice,
    )
    try:
        refuse(found, shown(file, PATH_SHOWN), "kernels/<kernel id>")
    except HardwareError as error:
        raise CalibrationError(f"{error}; {advice}") from error
    return {path: one.number() for path, one in found.items()}


def held_out_file(node: str) -> Path:
    return home() / "held-out" / f"{name_of(node)}.yaml"


def write_held_out(node: str, about: dict[str, Any], runs: Sequence[Mapping[str, str]]) -> Path:
    """Store how far a node's fit was from its held-out runs, and next to it a table of these; the
    only writer of held-out/.
    """
    file = held_out_file(node)
    table = io.StringIO()
    if runs:
        writer = csv.DictWriter(table, list(runs[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(runs)
    files.write(
        {file: yaml.safe_dump(about, sort_keys=False), file.with_suffix(".csv"): table.getvalue()}
    )
    return file


def held_out_of(node: str) -> Path | None:
    """What write_held_out stored: this user's, else the package's; None when nothing is."""
    return _own_or_shipped(held_out_file(node))


def read_held_out(file: Path) -> tuple[dict[str, Any], list[dict[str, str]]]:
    """What such a file says, and the table of its runs. Raises CalibrationError for damaged
    ones.
    """
    about = _read_yaml(file, _again(file))
    with damaged(file), file.with_suffix(".csv").open(encoding="utf-8", newline="") as table:
        names, *rows = csv.reader(table)
        return about, [dict(zip(names, row, strict=True)) for row in rows]


@contextmanager
def damaged(file: Path) -> Iterator[None]:
    """Refuses runs that are none. Raises CalibrationError."""
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, AttributeError, csv.Error) as error:
        raise CalibrationError(
            f"{shown(file.with_suffix('.csv'), PATH_SHOWN)}: holds no held-out runs ({error}); "
            f"{_again(file)}"
        ) from error


def _again(file: Path) -> str:
    return f"remove {file.stem}.yaml, or validate again with `twin validate {file.stem}`"


def held_out_names() -> list[str]:
    """Names on disk of the nodes of which write_held_out, here or for the package, stored
    something.
    """
    shipped = [] if os.environ.get(HOME_VARIABLE) else [data_dir("calibration") / "held-out"]
    return sorted(
        {file.stem for one in (home() / "held-out", *shipped) for file in one.glob("*.yaml")}
    )


def version() -> tuple[Any, ...]:
    """What changes with any fit or held-out run, here or in the package."""
    folders = {folder / name for folder in (home(), data_dir("calibration")) for name in STATED}
    return tuple((file, state_of(file)) for one in sorted(folders) for file in _files(one))


def _files(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _own_or_shipped(own: Path) -> Path | None:
    """This user's file of that folder and name, else the package's."""
    shipped = (
        []
        if os.environ.get(HOME_VARIABLE)
        else [data_dir("calibration") / own.parent.name / own.name]
    )
    return next((file for file in (own, *shipped) if file.is_file()), None)


def _entry(number: Number) -> dict[str, Any]:
    said: dict[str, Any] = {
        "value": number.value,
        "low": number.low,
        "high": number.high,
        "source": number.source,
    }
    return said if number.kind is Kind.FITTED else said | {"kind": number.kind.value}


# a whole number stays one: digests of fits distinguish them
Finite = int | Annotated[float, Meta(ge=-1e300, le=1e300)]


@frozen
class _Fitted:
    """What _entry makes of a number."""

    value: Finite
    low: Finite | None
    high: Finite | None
    source: str
    kind: Kind = Kind.FITTED

    def number(self) -> Number:
        return Number(self.value, self.kind, self.source, self.low, self.high)


def _read_yaml(file: Path, advice: str) -> dict[str, Any]:
    """One of our own YAML files. Raises CalibrationError for one that is damaged, and OSError for
    one that is missing.
    """
    file.stat()
    try:
        content = read_yaml(file)
    except ConfigError as error:
        raise CalibrationError(f"{error}; {advice}") from error
    if not content:
        raise CalibrationError(f"{shown(file, PATH_SHOWN)}: is empty; {advice}")
    return content
