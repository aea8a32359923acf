"""`twin project`: run a study file and write its tables and report."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from twin.commands.arguments import Subparsers, command, folder_to_write, whole
from twin.commands.output import done, emit, progress, say
from twin.data import data_dir, did_you_mean
from twin.errors import ConfigError
from twin.files import check_folder
from twin.report import outcome as report
from twin.study.kinds import FILE, read_study
from twin.study.runner import Cluster, Progress, Runner
from twin.study.store import Store, default_folder
from twin.text import shown

MOST_WORKERS = 1024  # processes of this computer
EXAMPLES = """\
  twin project lanes
  twin project studies/published-table --out out/published
  twin project my-study.yaml --scheduler tcp://10.0.0.1:8786"""


def add(commands: Subparsers) -> None:
    parser = command(
        commands,
        "project",
        run,
        usage="STUDY [options]",
        summary="run a study: models x nodes x anything, with intervals",
        text="Simulates the study file on all cores and writes report.html, "
        "result.json, tables.md and a CSV for each\n"
        "table. Results are kept by content: what has been computed once is not computed "
        "again, and an interrupted study\ngoes on where it was.",
        examples=EXAMPLES,
    )
    parser.add_argument(
        "study",
        metavar="STUDY",
        help="a folder with study.yaml, a YAML file, or the name of a study that comes with "
        "MonoTwin",
    )
    parser.add_argument(
        "--out",
        metavar="FOLDER",
        type=folder_to_write,
        help="where the files go (default out/NAME)",
    )
    add_running(parser)


def add_running(parser: argparse.ArgumentParser) -> None:
    """Where points are computed and kept."""
    parser.add_argument(
        "--store",
        metavar="FOLDER",
        type=folder_to_write,
        help="where results are kept (default: the user's cache, or MONOTWIN_POINTS)",
    )
    where = parser.add_mutually_exclusive_group()
    where.add_argument(
        "--workers",
        metavar="N",
        type=whole,
        help="processes on this computer (default: one for each core)",
    )
    where.add_argument(
        "--scheduler",
        metavar="ADDRESS",
        help="a Dask cluster instead of this computer, such as tcp://10.0.0.1:8786",
    )


def run(args: argparse.Namespace) -> int:
    study = read_study(place_of(args.study))
    out = args.out or check_folder(_default_folder(study.name))
    with running(args, progress()) as runner:
        answer = study.body.run(runner)
    data = report.to_json(study, answer)
    written = report.write(study, answer, out)
    emit(args, data, report.text(study, answer))
    say(f"{runner.computed} points computed, {runner.found} found; report: {written[0]}")
    return 0


def _default_folder(name: str) -> Path:
    if name in ("", ".", ".."):
        raise ConfigError(
            f"{shown(name)}: no folder below out/ can have the study's name; give one with --out "
            "FOLDER"
        )
    return Path("out") / name


@contextmanager
def running(args: argparse.Namespace, show: Progress) -> Iterator[Runner]:
    """The runner that the arguments name. The progress line is ended whatever happens."""
    if args.workers is not None and not 1 <= args.workers <= MOST_WORKERS:
        raise ConfigError(f"--workers {shown(args.workers)}: from 1 to {MOST_WORKERS}")
    store = Store(args.store or default_folder())
    try:
        if args.scheduler:
            with Cluster(args.scheduler) as cluster:
                yield cluster.runner(store, show)
        else:
            yield Runner.local(store, show, args.workers)
    except KeyboardInterrupt:
        done()
        say(f"what is done is kept in {store.folder}; the same command goes on from there")
        raise
    finally:
        done()


def place_of(name: str) -> Path:
    """A path, or the folder of a shipped study."""
    path = Path(name)
    with suppress(OSError):  # too long to be a path
        if path.exists():
            return path
    studies = data_dir("studies")
    shipped = sorted(file.parent.name for file in studies.glob(f"*/{FILE}"))
    if name in shipped:
        return studies / name
    raise ConfigError(
        f"{shown(name)} is neither a path nor a study that comes with MonoTwin; "
        f"{did_you_mean(name, shipped)}"
    )
