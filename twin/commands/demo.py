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
from twin.commands.output import Progress, done, emit, progress, say, warn_if_busy
from twin.commands.simulate import engines_text, headline
from twin.engine.host import HostEngine
from twin.engine.opening import check_fits
from twin.engine.tokenizer import TOKENIZER_CONFIG, make_byte_tokenizer, open_tokenizer
from twin.engine.weights import Checkpoint, open_checkpoint, random_weights, save_checkpoint
from twin.hardware.types import Node
from twin.models.load import load_model
from twin.models.spec import ModelSpec, Rope
from twin.plan.types import Execution, HandOffKind
from twin.report import pages
from twin.report.html import Page, Section
from twin.report.tables import count, percent, table
from twin.sim.run import Result, simulate
from twin.study.case import Case
from twin.study.engines import compare_engines

DEMO = ModelSpec(
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
        "2. writes a small checkpoint in Hugging Face format, predicts its speed, then runs "
        f"it and compares\n3. simulates {STUDIED} on {' and '.join(NODES)}, four ways to run "
        "a step each\n4. writes a report that opens without a network",
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
    say("2/4 a small checkpoint: predict, run, compare")
    checkpoint = make_checkpoint(args.out / "checkpoint")
    show = progress()
    compared = Validation(
        "1xhost",
        fit.run,
        tuple(_compare(checkpoint, way, chosen, show) for way, chosen in WAYS.items()),
    )
    done()
    say(f"3/4 simulating {STUDIED} on {', '.join(NODES)}")
    studies = {name: _study(name) for name in NODES}
    say("4/4 writing the report")
    report = page(compared, checkpoint, studies, found).write(args.out / "report.html")
    emit(
        args,
        to_json(compared, studies, report) | {"conditions": found},
        text(compared, studies, report),
    )
    return 0


def make_checkpoint(folder: Path) -> Checkpoint:
    """A real Hugging Face folder of random weights with a byte tokenizer, written once."""
    # what is written last: an interrupted demo begins again
    if not (folder / TOKENIZER_CONFIG).is_file():
        save_checkpoint(folder, random_weights(DEMO, SEED))
        make_byte_tokenizer(folder)
    return open_checkpoint(folder)


def _compare(checkpoint: Checkpoint, way: str, chosen: dict[str, Any], show: Progress) -> Compared:
    """Predict first, then run, and compare."""
    node = calibrated_node("1xhost")
    prompt = open_tokenizer(checkpoint.path).encode(PROMPT)
    positions = len(prompt) + TOKENS
    case = Case(
        checkpoint.spec,
        node,
        {"context": len(prompt) + TOKENS // 2, "max_context": positions, **chosen},
    )
    plan = case.plan()
    check_fits(plan, node, case.options())
    show(f"{way}: predicting")
    predicted = simulate(plan, node).tokens_per_s
    show(f"{way}: running")
    with HostEngine(plan, checkpoint.weights) as engine:
        engine.generate(prompt, max_tokens=TOKENS)
        speeds = []
        for _ in range(REPEATS):
            made = engine.generate(prompt, max_tokens=TOKENS)
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
    checkpoint: Checkpoint,
    studies: dict[str, tuple[Node, dict[str, Result]]],
    found: dict[str, Any],
) -> Page:
    """The report: what was measured here, where a step's time goes here, then what was only
    predicted.
    """
    cards = [
        (percent(compared.median_abs_error), "median error of the predictions for this computer")
    ]
    sections = [pages.validation(compared), *_step_here(checkpoint)]
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


def _step_here(checkpoint: Checkpoint) -> list[Section]:
    """Timeline and attribution of a step of the small checkpoint on all cores of this computer, as
    the twin sees it.
    """
    node = calibrated_node("1xhost")
    plan = Case(checkpoint.spec, node, {"context": TOKENS}).plan()
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
    compared: Validation, studies: dict[str, tuple[Node, dict[str, Result]]], report: Path
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
        f"{DEMO.name} on this computer\n\n{table(head, rows)}",
        f"median error {percent(compared.median_abs_error)}; these runs were not used in the fit",
    ]
    for node, results in studies.values():
        parts.append(
            f"{STUDIED} on {node.gpus} x {node.device.title}, predicted\n\n{engines_text(results)}"
        )
    parts.append(f"report: {report}")
    return "\n\n".join(parts)
