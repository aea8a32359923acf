"""`twin demo`: the whole idea on this computer, without a GPU, in about three minutes.

The model runs between the probes, a few tokens in every round: a virtual machine's speed changes by
a third within a minute, and what is compared must have seen the same minutes. The fit still takes
the probes alone.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from twin.calibrate.busy import COUNTED, busy
from twin.calibrate.experiment import Experiment
from twin.calibrate.node import calibrated_node, uncalibrated_node
from twin.calibrate.reading import quiet
from twin.calibrate.store import conditions, fit_file, runs_folder
from twin.calibrate.validate import Validation
from twin.commands.arguments import Subparsers, command, folder_to_write
from twin.commands.calibrate import fit_and_store, measure
from twin.commands.demo_model import DemoModel, demo_model
from twin.commands.output import done, emit, progress, say
from twin.commands.run import show_piece
from twin.commands.simulate import engines_text, headline
from twin.engine.generate import Request, complete
from twin.engine.host import HostEngine
from twin.engine.opening import check_fits
from twin.errors import CalibrationError
from twin.files import check_file, check_folder
from twin.hardware.activity import free, look, usable
from twin.hardware.load import load_node
from twin.hardware.override import apply_fit
from twin.hardware.types import Node
from twin.models.load import load_model
from twin.plan.options import Execution, HandOffKind
from twin.plan.types import Plan
from twin.report import pages
from twin.report.html import Page, Section
from twin.report.step import traced_blocks
from twin.report.tables import count, percent, table
from twin.sim.run import Result, simulate
from twin.study.case import Case
from twin.study.engines import compare_engines

TOKENS = 64  # of the answer
TOKENS_A_ROUND = 17
STUDIED = "laneformer-2b"
NODES = ("8xh200", "8xmi300x")
LOOK_S = 1.0  # for which it is watched who else uses the cores
GRID, GRAPH = {"handoff": HandOffKind.GRID}, {"execution": Execution.GRAPH}
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
        text="1. fetches SmolLM2-135M-Instruct (93 MB, once) and lets it answer a question;\n"
        "   without a network random weights take its place\n"
        "2. runs each probe on this CPU, with runs of the model between the probes,\n"
        "   fits the twin to the probes alone, predicts the runs and compares;\n"
        "   where something else uses the computer it says busy instead of an error\n"
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
    check_file(fit_file("1xhost"))
    check_folder(runs_folder("1xhost"))
    with _free_cores() as others:
        compared, model = _this_computer(args, others)
    say(f"3/4 simulating {STUDIED} on {', '.join(NODES)} (some seconds)")
    studies = {name: _study(name) for name in NODES}
    say("4/4 writing the report")
    report = page(compared, model, studies, found).write(args.out / "report.html")
    emit(
        args,
        to_json(compared, studies, report) | {"conditions": found},
        text(model, compared, studies, report),
    )
    return 0


@contextmanager
def _free_cores() -> Iterator[int]:
    """Only on cores that nobody else needs; how many others have."""
    before, mine = look(), sorted(usable())
    time.sleep(LOOK_S)
    chosen = free(look().since(before), mine)
    others = len(mine) - len(chosen)
    if not others or not hasattr(os, "sched_setaffinity"):
        yield 0
        return
    say(
        f"other programs use {others} of {len(mine)} cores: measuring on the other {len(chosen)}, "
        "and this fit is not kept"
    )
    os.sched_setaffinity(0, chosen)
    try:
        yield others
    finally:
        os.sched_setaffinity(0, mine)


def _this_computer(args: argparse.Namespace, others: int) -> tuple[Validation, DemoModel]:
    """Probes and runs in turn, then the fit, then what it predicts."""
    say("1/4 a small model (some seconds, the first time a minute)")
    show = progress()
    model = demo_model(args.out / "checkpoint", show)
    done()
    say(model.note)
    if model.question and not args.json:
        write(model)
    say("2/4 probing this CPU, with the model's runs between the probes (one to two minutes)")
    node = load_node("1xhost")
    with ExitStack() as engines:
        runs = [Measured.opened(model, node, *way, engines) for way in ways(node.device.blocks)]
        probed = measure(node, None, quick=True, between=[one.again for one in runs])
    say("fitting the twin to the probes (half a minute)")
    try:
        fit = fit_and_store(node, probed, keep=not others)
        why, known = busy(probed.meta), apply_fit(uncalibrated_node("1xhost"), fit.numbers)
    except CalibrationError as error:
        say(str(error))
        why = busy(probed.meta) or "the probes' times do not belong together"
        known = calibrated_node("1xhost")
    rounds = probed.meta[COUNTED]
    ran = tuple(one.compared(known, rounds) for one in runs)
    return Validation(ran, node="1xhost", fit=probed.id, busy=why), model


def ways(cores: int) -> list[tuple[str, dict[str, Any]]]:
    """Names and options of the engines that are compared."""
    all_of_them = f"all {cores} cores" if cores > 1 else "one core"
    found: list[tuple[str, dict[str, Any]]] = [("one core", {"blocks": 1})]
    found += [(all_of_them, {})] if cores > 1 else []
    return [*found, (f"{all_of_them}, grid barriers", GRID), (f"{all_of_them}, graph", GRAPH)]


def write(model: DemoModel) -> None:
    """Question and answer, token by token."""
    with HostEngine(_case(model, load_node("1xhost"), {}).plan(), model.weights) as engine:
        print(f"\n{model.question}\n", flush=True)
        complete(
            engine,
            model.tokenizer,
            Request(model.prompt, TOKENS, stop_tokens=model.tokenizer.stop),
            show_piece,
        )
        print(" ...\n", flush=True)


def _case(model: DemoModel, node: Node, chosen: dict[str, Any], tokens: int = TOKENS) -> Case:
    positions = len(model.prompt) + tokens
    return Case(
        model.spec,
        node,
        {"context": len(model.prompt) + tokens // 2, "max_context": positions, **chosen},
    )


@dataclass(frozen=True, slots=True)
class Measured:
    """One engine that decodes some tokens in every round of probes."""

    way: str
    plan: Plan
    engine: HostEngine
    prompt: list[int]
    step_s: list[float] = field(default_factory=list)  # of each round

    @classmethod
    def opened(
        cls, model: DemoModel, node: Node, way: str, chosen: dict[str, Any], engines: ExitStack
    ) -> Self:
        case = _case(model, node, chosen, TOKENS_A_ROUND)
        plan = case.plan()
        check_fits(plan, case.node, case.options())
        return cls(way, plan, engines.enter_context(HostEngine(plan, model.weights)), model.prompt)

    def again(self) -> None:
        """Steps are read as those of probes are."""
        made = self.engine.generate(self.prompt, max_tokens=TOKENS_A_ROUND)
        if made.stop_reason == "cancelled":
            raise KeyboardInterrupt
        self.step_s.append(quiet(made.step_ns[1:] * 1e-9))

    def compared(self, node: Node, rounds: Sequence[int]) -> Experiment:
        assert self.plan.spec is not None
        return Experiment(
            self.way,
            self.plan.spec,
            self.plan.options,
            len(self.prompt),
            TOKENS_A_ROUND,
            predicted_tokens_per_s=simulate(self.plan, node).tokens_per_s,
            samples=tuple(self.step_s[at] for at in rounds),
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
        ("busy", f"{compared.busy}: run it again when the computer is idle")
        if compared.busy
        else (
            percent(compared.median),
            "median error of the predictions for this computer",
        )
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
    result = simulate(plan, node, trace=True, blocks=traced_blocks(plan.options.blocks))
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
            pages.error_of(compared, r),
            percent(r.spread),
        )
        for r in compared.runs
    ]
    head = ("engine", "predicted tokens/s", "measured tokens/s", "error", "spread of repeats")
    parts = [
        f"{model.title} on this computer\n\n{table(head, rows)}",
        f"busy: {compared.busy}, so no error is shown. Try `twin demo` again when it is quieter"
        if compared.busy
        else f"median error {percent(compared.median)}; these runs were not used in the fit",
    ]
    for node, results in studies.values():
        parts.append(
            f"{STUDIED} on {node.gpus} x {node.device.title}, predicted\n\n{engines_text(results)}"
        )
    parts.append(
        f"report: {report}\nnext: open it in a browser; `twin simulate {STUDIED} {NODES[0]}` "
        "predicts one node, `twin run FOLDER` runs a model of yours"
    )
    return "\n\n".join(parts)
