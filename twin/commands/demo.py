"""`twin demo`: the whole idea on this computer, without a GPU, in about three minutes."""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

from twin.calibrate.store import conditions
from twin.calibrate.validate import Compared, Validation, calibrated_node
from twin.commands.arguments import Subparsers, command, folder_to_write
from twin.commands.calibrate import calibrate_host
from twin.commands.demo_model import DemoModel, demo_model
from twin.commands.output import Progress, done, emit, progress, say, warn_if_busy
from twin.commands.run import show_piece
from twin.commands.simulate import engines_text, headline
from twin.engine.generate import Request, complete
from twin.engine.host import HostEngine
from twin.engine.opening import check_fits
from twin.hardware.types import Node
from twin.models.load import load_model
from twin.plan.types import Execution, HandOffKind
from twin.report import pages
from twin.report.html import Page, Section
from twin.report.tables import count, percent, table
from twin.sim.run import Result, simulate
from twin.study.case import Case
from twin.study.engines import compare_engines

TOKENS = 64
REPEATS = 5
STUDIED = "laneformer-2b"
NODES = ("8xh200", "8xmi300x")
WAYS: dict[str, dict[str, Any]] = {
    "one block": {"blocks": 1},
    "all cores": {},
    "all cores, grid barriers": {"handoff": HandOffKind.GRID},
    "all cores, graph": {"execution": Execution.GRAPH},
}
EXAMPLES = """\
  twin demo
  twin demo --out results"""


def add(commands: Subparsers) -> None:
    parser = command(
        commands,
        "demo",
        run,
        usage="[--out FOLDER] [--json]",
        summary="probe this computer, predict, run, compare; then look at big GPUs",
        text="1. asks this CPU each probe's question and fits the twin to the answers\n"
        "2. fetches SmolLM2-135M-Instruct (93 MB, once), predicts its speed, then lets it "
        "answer a question and compares;\n"
        "   without a network random weights take its place\n"
        f"3. simulates {STUDIED} on {' and '.join(NODES)}, four ways to run a step each\n"
        "4. writes a report that opens without a network",
        examples=EXAMPLES,
    )
    parser.add_argument(
        "--out",
        metavar="FOLDER",
        type=folder_to_write,
        default="out",
        help="where the checkpoint and the report go (default %(default)s)",
    )


def run(args: argparse.Namespace) -> int:
    found = conditions()
    warn_if_busy()
    say("1/4 probing this CPU and fitting the twin to it (about a minute)")
    fit = calibrate_host(quick=True)
    say("2/4 a small model: predict, run, compare")
    show = progress()
    model = demo_model(args.out / "checkpoint", show)
    done()
    say(model.note)
    if model.question and not args.json:
        write(model)
    compared = Validation(
        "1xhost", fit.run, tuple(_compare(model, way, chosen, show) for way, chosen in WAYS.items())
    )
    done()
    say(f"3/4 simulating {STUDIED} on {', '.join(NODES)}")
    studies = {name: _study(name) for name in NODES}
    say("4/4 writing the report")
    report = page(compared, model, studies, found).write(args.out / "report.html")
    emit(
        args,
        to_json(compared, studies, report) | {"conditions": found},
        text(model, compared, studies, report),
    )
    return 0


def write(model: DemoModel) -> None:
    """Question and answer, token by token."""
    with HostEngine(_case(model, {}).plan(), model.weights) as engine:
        print(f"\n{model.question}\n", flush=True)
        complete(
            engine,
            model.tokenizer,
            Request(model.prompt, TOKENS, stop_tokens=model.tokenizer.stop),
            show_piece,
        )
        print(" ...\n", flush=True)


def _case(model: DemoModel, chosen: dict[str, Any]) -> Case:
    positions = len(model.prompt) + TOKENS
    return Case(
        model.spec,
        calibrated_node("1xhost"),
        {"context": len(model.prompt) + TOKENS // 2, "max_context": positions, **chosen},
    )


def _compare(model: DemoModel, way: str, chosen: dict[str, Any], show: Progress) -> Compared:
    """Predict first, then run, and compare."""
    case = _case(model, chosen)
    plan = case.plan()
    check_fits(plan, case.node, case.options())
    show(f"{way}: predicting")
    predicted = simulate(plan, case.node).tokens_per_s
    show(f"{way}: running")
    with HostEngine(plan, model.weights) as engine:
        engine.generate(model.prompt, max_tokens=TOKENS)
        speeds = []
        for _ in range(REPEATS):
            made = engine.generate(model.prompt, max_tokens=TOKENS)
            if made.stop_reason == "cancelled":
                raise KeyboardInterrupt
            speeds.append(made.tokens_per_s)
    median = statistics.median(speeds)
    return Compared(
        way, predicted, median, (max(speeds) - min(speeds)) / median, plan.options.blocks
    )


def _study(name: str) -> tuple[Node, dict[str, Result]]:
    show = progress()
    node = calibrated_node(name)
    try:
        return node, compare_engines(Case(load_model(STUDIED), node, {}), show)
    finally:
        done()


def page(
    compared: Validation,
    model: DemoModel,
    studies: dict[str, tuple[Node, dict[str, Result]]],
    found: dict[str, Any],
) -> Page:
    """The report: what was measured here, where a step's time goes here, then what was only
    predicted.
    """
    cards = [
        (percent(compared.median_abs_error), "median error of the predictions for this computer")
    ]
    sections = [pages.validation(compared), *_step_here(model)]
    for node, results in studies.values():
        best = max(results.values(), key=lambda r: r.tokens_per_s)
        cards.append((count(best.tokens_per_s), f"tokens/s of {STUDIED} on {node.name}, predicted"))
        sections.append(
            pages.engines(results, f"{STUDIED} on {node.gpus} x {node.device.title}: predicted")
        )
        sections.append(pages.rests_on(node, best))
    subtitle = (
        f"Measured: only the runs on this computer's CPU ({found['cpu']}, {found['cores']} cores, "
        f"load {found['load_before']:.1f} before). Everything about GPUs is predicted from the "
        "numbers listed below."
    )
    return Page("MonoTwin demo", subtitle, tuple(cards), tuple(sections))


def _step_here(model: DemoModel) -> list[Section]:
    """Timeline and attribution of a step of the small checkpoint on all cores of this computer, as
    the twin sees it.
    """
    node = calibrated_node("1xhost")
    plan = Case(model.spec, node, {"context": TOKENS}).plan()
    result = simulate(plan, node, trace=True, blocks=pages.traced_blocks(plan))
    return [*pages.timeline(plan, result), pages.attribution(result)]


def to_json(
    compared: Validation, studies: dict[str, tuple[Node, dict[str, Result]]], report: Path
) -> dict[str, Any]:
    engines = {
        name: {engine: headline(r) for engine, r in results.items()}
        for name, (_, results) in studies.items()
    }
    return {"host": compared.to_json(), "studies": engines, "report": str(report)}


def text(
    model: DemoModel,
    compared: Validation,
    studies: dict[str, tuple[Node, dict[str, Result]]],
    report: Path,
) -> str:
    rows = [
        (
            r.name,
            count(r.predicted_tokens_per_s),
            count(r.measured_tokens_per_s),
            percent(r.error, signed=True),
            percent(r.spread),
        )
        for r in compared.runs
    ]
    head = ("engine", "predicted tokens/s", "measured tokens/s", "error", "spread of repeats")
    parts = [
        f"{model.title} on this computer\n\n{table(head, rows)}",
        f"median error {percent(compared.median_abs_error)}; these runs were not used in the fit",
    ]
    for node, results in studies.values():
        parts.append(
            f"{STUDIED} on {node.gpus} x {node.device.title}, predicted\n\n{engines_text(results)}"
        )
    parts.append(f"report: {report}")
    return "\n\n".join(parts)
