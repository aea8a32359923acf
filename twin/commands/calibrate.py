"""`twin calibrate`: measure each probe on the device and fit the twin's numbers to the
answers.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twin.calibrate import store
from twin.calibrate.busy import busy
from twin.calibrate.fitted import MOVES
from twin.calibrate.measure import Keep, Progress, measure_probes, of_groups
from twin.calibrate.node import uncalibrated_node
from twin.calibrate.probes import Probe
from twin.calibrate.published import FIGURES, figures, is_published
from twin.calibrate.recipe import fitted_by, recipe_of
from twin.commands.arguments import (
    Subparsers,
    add_measuring,
    check_compiler,
    command,
    measured_folder,
    removed,
)
from twin.commands.output import done, emit, progress, say, warn_if_busy
from twin.errors import CalibrationError, ConfigError
from twin.files import check_file, check_folder
from twin.hardware.load import load_node
from twin.hardware.number import Number
from twin.hardware.override import apply_fit, numbers
from twin.hardware.types import Node
from twin.report.tables import percent, table
from twin.schedule.ring import limits_of
from twin.units import format_quantity, unit_of

if TYPE_CHECKING:
    from twin.calibrate.by_runs import Moved
    from twin.calibrate.fit import Fit

ADDED = "added"  # in a fit's file: the run behind a group, where it is another one
NAME = "probes"
QUICK_NAME = "quick"
EXAMPLES = """\
  twin calibrate host            probe and fit this computer's CPU (some minutes)
  twin calibrate host --quick    fewer samples: enough for a first look
  twin calibrate 1xh200          probe and fit this computer's GPU
  twin calibrate 1xh200 --measure-only --out probes    only probe; copy the folder to the fit:
  twin calibrate 1xh200 --from probes
  twin calibrate 1xh200 --groups decoding,routing --measure-only --out few-bits    some probes
  twin calibrate 1xh200 --runs calibration/runs/h200-sxm/shapes-24-seed-51646    move the fit"""


def add(commands: Subparsers) -> None:
    parser = command(
        commands,
        "calibrate",
        run,
        usage="NODE [--quick] [--groups GROUPS] [--measure-only --out FOLDER | --from FOLDER | "
        "--runs FOLDER] [--json]",
        summary="measure a node with probes and fit the twin to them",
        text="Each probe measures one thing (stream bandwidth, hand-off, attention, launch ...) "
        "and is itself a plan that the twin\n"
        "can run. Fitting makes simulated probes take as long as measured ones. Engine runs "
        "are not fitted, but for `link.fence_s`:\n`twin validate` predicts them. The fit is stored "
        "and used by all commands from then on: that of one device holds for\n"
        "every node of such devices. A number that its probes do not bind keeps the hardware "
        "file's value and kind.",
        examples=EXAMPLES,
    )
    parser.add_argument(
        "node",
        metavar="NODE",
        help="what to measure: host, h200 or 1xh200; it must be in this computer",
    )
    parser.add_argument("--quick", action="store_true", help="every question, fewer samples")
    parser.add_argument(
        "--groups",
        metavar="GROUP[,GROUP]",
        help="only the probes of these groups, such as decoding,routing, of what is measured or of "
        "--from; the numbers of the others stay as the fit on file has them",
    )
    add_measuring(parser)
    removed(
        parser,
        "--judge",
        "every fit says which numbers its probes bind: `twin hardware NODE` shows them, "
        "`twin calibrate NODE --from FOLDER` fits the probes on file again",
    )
    parser.add_argument(
        "--runs",
        metavar="FOLDER",
        type=Path,
        action="append",
        default=[],
        help="measure nothing: move the fit on file by engine runs of shapes that a seed drew, as "
        "little as the probes' own uncertainty allows; they are not held out any more; may be "
        "given several times",
    )
    parser.add_argument(
        "--also",
        metavar="FOLDER",
        type=Path,
        action="append",
        default=[],
        help="probes of another device of this name, pooled with those of --from: two of one name "
        "may differ by 2 %%; may be given several times",
    )


def run(args: argparse.Namespace) -> int:
    node = load_node(args.node)
    folder = measured_folder(args)
    if args.also and args.measured is None:
        raise ConfigError("--also FOLDER adds to what --from FOLDER names: give both")
    if args.runs:
        others = {
            "--groups": args.groups,
            "--from": folder,
            "--quick": args.quick,
        }
        others["--measure-only"] = args.measure_only
        if wrong := [name for name, value in others.items() if value]:
            raise ConfigError(
                f"--runs moves the fit on file and measures nothing: leave out {wrong[0]}"
            )
        moved = move_and_store(node, args.runs)
        emit(args, moved_json(node, moved), moved_text(node, moved))
        return 0
    groups = tuple(args.groups.split(",")) if args.groups else ()
    if args.measure_only:
        made = measure(node, folder, quick=args.quick, groups=groups)
        emit(args, measured_json(made), measured_text(made))
        return 0
    check_file(store.fit_file(node.name))
    run = (
        measure(node, None, quick=args.quick, groups=groups)
        if folder is None
        else store.adopt_run(folder, node.name, NAME)
    )
    also = [store.adopt_run(one, node.name, NAME) for one in args.also]
    fit = fit_and_store(node, run, also, groups)
    why = busy(run.meta)
    emit(args, to_json(node, fit) | {"busy": why}, text(node, fit, why))
    return 0


def measure(
    node: Node,
    folder: Path | None,
    *,
    quick: bool,
    groups: Collection[str] = (),
    between: Sequence[Callable[[], None]] = (),
) -> store.Run:
    """Probe the device, with progress on stderr; what is known after each round lies in `folder`,
    else among the device's runs. Each of `between` is called once a round, between the probes.
    """
    recipe_of(
        node.device, node.gpus
    )  # refuses a device that has none before a folder is made for it
    return kept(
        node,
        folder,
        QUICK_NAME if quick else NAME,
        lambda show, keep: measure_probes(
            node, show, keep, quick=quick, groups=groups, also=between
        ),
    )


def kept(
    node: Node,
    folder: Path | None,
    name: str,
    measured: Callable[[Progress, Keep], tuple[store.StageTimes, ...]],
) -> store.Run:
    """What is `measured`, a call with where progress is shown and what keeps the samples so far;
    they lie in `folder`, else in one with such a name among the device's runs.
    """
    check_compiler(node)
    check_folder(folder or store.runs_folder(node.name))
    warn_if_busy()
    chosen: list[Path] = [folder] if folder else []
    made: list[store.Run] = []

    def keep(meta: dict[str, Any], samples: store.Samples) -> None:
        if not chosen:
            chosen.append(store.new_folder(node.name, name))
        made[:] = [store.save_run(chosen[0], meta, samples)]

    try:
        stages = measured(progress(), keep)
    finally:
        done()
    return store.save_run(chosen[0], made[0].meta, made[0].samples, stages)


def fit_and_store(
    node: Node,
    run: store.Run,
    also: Sequence[store.Run] = (),
    groups: Collection[str] = (),
    *,
    keep: bool = True,
) -> Fit:
    """Fit what a run holds, or some `groups` of it, and `also` of other devices of this name, and
    put it on file, if `keep` says so. Raises CalibrationError for a fit that says nothing.
    """
    # not above: a computer that only measures needs neither SciPy nor the simulator
    from twin.calibrate.fit import fit_node
    from twin.calibrate.trusted import check

    held: list[str] = run.meta.get("groups") or []
    if missing := [group for group in groups if held and group not in held]:
        raise CalibrationError(f"{run.id} has no probes of {missing[0]}, only of {', '.join(held)}")
    chosen = list(groups) or held
    probes = of_groups(probes_of(node, run), chosen)
    kept = store.read_fit(node.name) if chosen else None
    if chosen and kept is None:
        raise CalibrationError(
            f"{run.id} has probes of {', '.join(chosen)} alone, and no fit of {node.name} is on "
            f"file for the other numbers: run `twin calibrate {node.name}` first"
        )
    begin = uncalibrated_node(node.name)
    try:
        pooled = store.pooled(run, also)
        fit = fit_node(_kept_with(begin, kept, chosen), probes, pooled, progress())
    finally:
        done()
    check(fit, pooled, probes, fitted_by(pooled, node), node.name)
    for name, said in fit.failed.items():
        say(f"the probe {name} did not run and was left out: {said}")
    conditions = {
        name: value
        for name, value in run.meta.items()
        if name not in ("device", "node", "steps", "failed", FIGURES)
    }
    found = {
        "run": fit.run,
        "binding": _rounded(fit.binding),
        "residuals": fit.residuals,
        "together": fit.together,
    }
    if also:
        found["also"] = [one.id for one in also]
    if not keep:
        return fit
    if kept is None:
        store.write_fit(node.name, fit.numbers, conditions | found | _cross(fit))
    else:
        _add_to(node, kept, fit, chosen)
    return fit


def _kept_with(
    begin: Node, kept: tuple[dict[str, Number], dict[str, Any]] | None, groups: Sequence[str]
) -> Node:
    """What a fit of some groups begins with: the numbers of the others as they are on file."""
    if kept is None:
        return begin
    own = _settled_by(begin, groups)
    return apply_fit(begin, {path: number for path, number in kept[0].items() if path not in own})


def _settled_by(node: Node, groups: Sequence[str]) -> set[str]:
    known = recipe_of(node.device, node.gpus).groups
    return {path for group in groups for path in known.get(group, ())}


def _add_to(
    node: Node,
    kept: tuple[dict[str, Number], dict[str, Any]],
    fit: Fit,
    groups: Sequence[str],
) -> None:
    """Puts a fit of some groups next to the numbers of the others, which stay as they are on
    file.
    """
    own = _settled_by(node, groups)
    numbers = {path: number for path, number in kept[0].items() if path not in own} | fit.numbers
    meta = {name: value for name, value in kept[1].items() if name not in ("node", "device")}
    for name, made in (
        ("binding", _rounded(fit.binding)),
        ("residuals", fit.residuals),
        ("together", fit.together),
    ):
        old = dict(meta.get(name) or {})
        meta[name] = {path: value for path, value in old.items() if path not in own} | made
    meta[ADDED] = {**(meta.get(ADDED) or {}), **dict.fromkeys(groups, fit.run)}
    store.write_fit(node.name, numbers, meta | _cross(fit))


def _cross(fit: Fit) -> dict[str, Any]:
    """Errors of designed shapes that are left out, where the fit has these."""
    errors, along = fit.cross.errors, list(fit.cross.along)
    return {"cross": {"errors": errors, "along": along}} if errors else {}


def probes_of(node: Node, run: store.Run) -> list[Probe]:
    """What a run measures: figures of others as they say, else the device's probes."""
    if is_published(run.meta):
        from twin.calibrate.published_plans import probe  # plans need the simulator's packages

        return [probe(one) for one in figures(run.folder, run.meta)]
    return recipe_of(node.device, node.gpus).probes(limits_of(node), bool(run.meta.get("quick")))


def move_and_store(node: Node, folders: Sequence[Path]) -> Moved:
    """Moves the fit on file by records of drawn shapes. Raises CalibrationError without a fit, or
    for one that was moved before: the same runs would count twice.
    """
    from twin.calibrate.by_runs import move  # as above

    if node.gpus > 1:
        raise ConfigError(
            f"--runs moves what layers cost on one device, and {node.name} has {node.gpus}: name "
            f"1x{node.device.name}"
        )
    found = store.read_fit(node.name)
    if found is None:
        raise CalibrationError(f"no fit of {node.name}: run `twin calibrate {node.name}` first")
    numbers, meta = found
    if meta.get(MOVES):
        raise CalibrationError(
            f"the fit of {node.name} was moved by {', '.join(meta[MOVES])} before, and runs would "
            f"count twice: fit its probes again (`twin calibrate {node.name} --from ...`), then "
            "name all records together"
        )
    try:
        records = [store.read_run(folder) for folder in folders]
        moved = move(
            uncalibrated_node(node.name), (numbers, meta.get("together") or {}), records, progress()
        )
    finally:
        done()
    kept = {name: value for name, value in meta.items() if name not in ("node", "device")}
    left_out = {
        record: {name: round(error, 6) for name, error in errors.items()}
        for record, errors in moved.left_out.items()
    }
    store.write_fit(node.name, moved.numbers, kept | {"together": moved.together, MOVES: left_out})
    return moved


def moved_json(node: Node, moved: Moved) -> dict[str, Any]:
    return {
        "node": node.name,
        "numbers": {path: one.value for path, one in moved.numbers.items()},
        "before": moved.before,
        "after": moved.after,
        "left_out": moved.left_out,
    }


def moved_text(node: Node, moved: Moved) -> str:
    rows = []
    for record in moved.before:
        parts = [found[record] for found in (moved.before, moved.after, moved.left_out)]
        cells = [
            f"{percent(statistics.median(map(abs, one.values())))}, "
            f"{percent(max(one.values(), key=abs), signed=True)}"
            for one in parts
        ]
        rows.append((record, len(parts[0]), *cells))
    head = ("record", "runs", "median, worst before", "after", "by the other runs alone")
    again = "repeat `twin validate` of every record of this node, so that errors are of this fit"
    return f"fit of {node.name}, moved\n\n{table(head, rows)}\n\nnext: {again}"


def _rounded(strengths: dict[str, float]) -> dict[str, float]:
    return {path: float(f"{strength:.3g}") for path, strength in strengths.items()}


def measured_json(run: store.Run) -> dict[str, Any]:
    return {"folder": str(run.folder), "meta": run.meta, "samples": run.samples}


def measured_text(run: store.Run) -> str:
    rows = []
    for name, seconds in run.samples.items():
        middle = sorted(seconds)[len(seconds) // 2]
        rows.append(
            (
                name,
                format_quantity(middle, "s"),
                percent((max(seconds) - min(seconds)) / middle),
                len(seconds),
            )
        )
    failed: dict[str, str] = run.meta.get("failed") or {}
    lost = "".join(f"\n{name} failed: {said.splitlines()[0]}" for name, said in failed.items())
    return (
        f"{table(('measured', 'seconds a step', 'spread', 'repeats'), rows)}{lost}\n\n"
        f"samples: {run.folder}"
    )


def to_json(node: Node, fit: Fit) -> dict[str, Any]:
    fitted = {
        path: {"value": n.value, "low": n.low, "high": n.high} for path, n in fit.numbers.items()
    }
    return {
        "node": node.name,
        "run": fit.run,
        "numbers": fitted,
        "binding": fit.binding,
        "residuals": fit.residuals,
        "groups": fit.groups,
        "failed": fit.failed,
    }


def text(node: Node, fit: Fit, why_busy: str | None = None) -> str:
    from twin.calibrate.fit import full_path  # as above

    before = numbers(uncalibrated_node(node.name))
    rows = []
    for path, number in fit.numbers.items():
        unit = unit_of(path.rsplit(".", 1)[-1])
        low, high = (
            format_quantity(end if end is not None else number.value, unit)
            for end in (number.low, number.high)
        )
        rows.append(
            (
                path,
                format_quantity(before[full_path(path)].value, unit),
                format_quantity(number.value, unit),
                f"{low} .. {high}",
            )
        )
    settled = fit.settled
    groups = [
        (
            group if group in settled else f"{group}, not fitted",
            sum(g == group for g in fit.groups.values()),
            percent(fit.rms(group)),
            *_worst_of(fit, group),
        )
        for group in sorted(
            set(fit.groups.values()), key=lambda group: (group not in settled, group)
        )
    ]
    head = f"fit of {node.name} to {len(fit.residuals)} probes, run {fit.run}"
    fitted = table(("number", "before", "fitted", "interval"), rows)
    misfit = table(("probes", "count", "rms misfit", "worst", "which"), groups)
    parts = [head, fitted, misfit]
    loose = [path for path, strength in fit.binding.items() if strength < 1]
    if as_filed := [path for path in loose if path not in fit.numbers]:
        parts.append(
            f"not bound by their probes, so as the hardware file says: {', '.join(as_filed)}"
        )
    if unbound := [path for path in loose if path in fit.numbers]:
        parts.append(
            f"not bound, but the probes refuse what the hardware file says: {', '.join(unbound)}"
        )
    if fit.cross.errors:
        parts.append(fit.cross.said())
    if why_busy:
        parts.append(
            f"busy: {why_busy} while it was measured; what is fitted is slower than this computer "
            "by itself. Close other programs and calibrate again"
        )
    return "\n\n".join([*parts, f"next: twin validate {node.name}"])


def _worst_of(fit: Fit, group: str) -> tuple[str, str]:
    """Simulated against measured of the group's worst probe, and its name."""
    name, left = max(
        ((n, left) for n, left in fit.residuals.items() if fit.groups[n] == group),
        key=lambda item: abs(item[1]),
    )
    return percent(left, signed=True), name
