"""Everything that only an MI300X can tell, in one command for whoever has one; see README.md.

python studies/mi300x/run.py OUT            again after a failure: what is done is not done again
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import io
import json
import os
import platform
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from twin.calibrate.held_out import SMALL, TINY  # noqa: E402
from twin.calibrate.store import HOME_VARIABLE  # noqa: E402
from twin.cli import main as twin  # noqa: E402
from twin.engine.choose import check_present, open_engine  # noqa: E402
from twin.engine.hip import HipEngine  # noqa: E402
from twin.engine.hip_build import cached_code_object  # noqa: E402
from twin.engine.hip_driver import open_hip  # noqa: E402
from twin.engine.opening import plan_run  # noqa: E402
from twin.engine.places import Places, io_dies_of  # noqa: E402
from twin.engine.weights import random_weights  # noqa: E402
from twin.errors import TwinError  # noqa: E402
from twin.files import csv_text, write  # noqa: E402
from twin.hardware.load import load_node  # noqa: E402
from twin.models.load import load_model  # noqa: E402
from twin.models.spec import DType, ModelSpec  # noqa: E402
from twin.plan.options import HandOffKind, Options, Placement  # noqa: E402
from twin.plan.types import Plan  # noqa: E402
from twin.reference.step import Reference  # noqa: E402
from twin.schedule.probe import hop_probe  # noqa: E402
from twin.schedule.ring import limits_of  # noqa: E402

DONE, FAILED, WAITS = "done", "FAILED", "not run"
STATE = "state.json"
SEED = 1
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
MADE = 64  # tokens of a run that has to repeat itself
REPEATS = 5
CLOSE = 2e-2  # of the largest logit, in 16-bit types
HOPS = 12  # of a step of a probe
HOP_STEPS, HOP_WARMUP = 400, 50
MODELS = ("qwen2.5-coder-1.5b", "llama-3.2-1b", "laneformer-2b")
ABOUT = (  # what a machine does not say is left out
    ("rocminfo",),
    ("rocm-smi", "--showproductname", "--showclocks", "--showpower", "--showmeminfo", "vram"),
    ("rocm-smi", "--showcomputepartition", "--showmemorypartition"),
    ("rocm-smi", "--showtopo"),
    ("hipconfig", "--full"),
    ("cat", "/opt/rocm/.info/version"),
    ("uname", "-a"),
)


class Failed(Exception):
    """What a step found is not what has to be."""


@dataclass(frozen=True)
class Setup:
    out: Path
    node: str = "1xmi300x"
    quick: bool = False  # a probe of each question, one model
    blocks: int | None = None  # as many as the node has; fewer to try the script without one
    specs: tuple[ModelSpec, ...] = (TINY, SMALL)  # compared with the reference
    models: tuple[str, ...] = MODELS

    def plan(self, spec: ModelSpec, **chosen: Any) -> Plan:
        base: dict[str, Any] = {"weight_dtype": DType.FP16, "kv_dtype": DType.FP16}
        if self.blocks:
            base["blocks"] = self.blocks
        positions = len(PROMPT) + MADE
        return plan_run(spec, load_node(self.node), base | chosen, positions=positions, greedy=True)


# ---- steps ---------------------------------------------------------------------------------------


def about(setup: Setup) -> Any:
    """The computer, its GPUs, driver and software."""
    device = load_node(setup.node).device
    driver = open_hip()
    gpus = [dataclasses.asdict(driver.about(n)) for n in range(driver.count())]
    said = {" ".join(command): _said(command) for command in ABOUT}
    versions = {}
    for package in ("monotwin", "hip-python", "numpy"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    found = {
        "gpus": gpus,
        "versions": versions,
        "python": platform.python_version(),
        "commands": {name: text for name, text in said.items() if text},
    }
    _keep(setup, "about.json", found)
    check_present(device)
    return {"gpus": len(gpus), "name": gpus[0]["name"]}


def _said(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout


def build(setup: Setup) -> Any:
    """The kernels of the checks and of the models; no register may live in memory."""
    plans = _checked(setup) | {name: setup.plan(load_model(name)) for name in setup.models}
    isa = load_node(setup.node).device.isa
    assert isa is not None
    found = {}
    for name, plan in plans.items():
        report = cached_code_object(plan, isa)
        file = setup.out / "code" / f"{name}.hsaco"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(report.code_object)
        found[name] = {
            key: value for key, value in dataclasses.asdict(report).items() if key != "code_object"
        }
    _keep(setup, "code/reports.json", found)
    spilled = [name for name, one in found.items() if one["scratch_bytes"] or one["vgpr_spills"]]
    if spilled:
        raise Failed(f"registers of {', '.join(spilled)} live in memory")
    return {"kernels": len(found), "most_vgprs": max(one["vgprs"] for one in found.values())}


def _checked(setup: Setup) -> dict[str, Plan]:
    """Each kind of hand-off, and blocks numbered by die."""
    chosen: dict[str, dict[str, Any]] = {kind.value: {"handoff": kind} for kind in HandOffKind}
    chosen["by-die"] = {"placement": Placement.BY_DIE}
    return {
        f"{spec.name}-{name}": setup.plan(spec, **options)
        for spec in setup.specs
        for name, options in chosen.items()
    }


def check(setup: Setup) -> Any:
    """Logits next to the reference's, plan by plan; the same bits from each repeat."""
    device = load_node(setup.node).device
    found = {}
    for name, plan in _checked(setup).items():
        assert plan.spec is not None
        weights = random_weights(plan.spec, SEED, plan.options.weight_dtype)
        reference = Reference(plan, weights)
        wanted = np.stack([reference.step(token).copy() for token in PROMPT])
        with open_engine(device, plan, weights) as engine:
            logits = [engine.logits(PROMPT) for _ in range(REPEATS)]
            tokens = [engine.generate(PROMPT, max_tokens=MADE).tokens for _ in range(REPEATS)]
        found[name] = {
            "difference": float(np.abs(logits[0] - wanted).max() / np.abs(wanted).max()),
            "same_bits": all(np.array_equal(logits[0], other) for other in logits),
            "same_tokens": all(tokens[0] == other for other in tokens),
        }
        _keep(setup, "checks.json", found)
    wrong = [name for name, one in found.items() if not one["difference"] < CLOSE]
    loose = [n for n, one in found.items() if not (one["same_bits"] and one["same_tokens"])]
    if wrong or loose:
        raise Failed(f"other logits than the reference: {wrong}; repeats that differ: {loose}")
    return {"plans": len(found), "worst": max(one["difference"] for one in found.values())}


def places(setup: Setup) -> Any:
    """Die of each block, run after run; I/O die of each die, by hand-offs between every two; do
    neighbours share a die where the plan wants that?
    """
    node = load_node(setup.node)
    dies = int(node.device.structure.dies.value)
    runs, numbered = (
        _ran_at(setup.plan(setup.specs[0], placement=placement))
        for placement in (Placement.FLAT, Placement.BY_DIE)
    )
    runs[0].check(dies)
    hops: dict[tuple[int, int], float] = {}
    for a, b in combinations(sorted(set(runs[0].dies)), 2):
        pair = runs[0].pair_on(a, b)
        assert pair is not None
        options = Options(
            blocks=len(runs[0].dies), ring_slots=2, window_slots=2, placement=Placement.FLAT
        )
        probe = hop_probe(options, limits_of(node), pair=pair, hops=HOPS)
        with HipEngine(probe, None) as engine:
            engine.fill_random(0)
            seconds = engine.step_seconds(steps=HOP_STEPS, warmup=HOP_WARMUP)
            if {engine.places[0].dies[block] for block in pair} == {a, b}:
                hops[a, b] = float(np.median(seconds))
    io_dies = io_dies_of(hops) if hops else None
    _rows(setup, "places.csv", ("block", "die", "io_die"), runs[0].table(io_dies))
    _rows(setup, "hops.csv", ("die", "other", "step_s"), [(*p, s) for p, s in hops.items()])
    return {
        "blocks_of_die": runs[0].blocks_of_die,
        "round_robin": runs[0].round_robin,
        "same_in_every_run": all(run == runs[0] for run in runs),
        "neighbours_by_die": all(run.neighbours for run in numbered),
        "io_dies": io_dies,
    }


def _ran_at(plan: Plan) -> list[Places]:
    """Where the blocks of some runs were."""
    assert plan.spec is not None
    with HipEngine(plan, random_weights(plan.spec, SEED, plan.options.weight_dtype)) as engine:
        found = []
        for _ in range(REPEATS):
            engine.generate(PROMPT, max_tokens=2)
            found.append(engine.places[0])
    return found


def probes(setup: Setup) -> Any:
    """What the twin is fitted to."""
    quick = ("--quick",) if setup.quick else ()
    _twin("calibrate", setup.node, "--measure-only", "--out", _new(setup, "probes"), *quick)


def engine_runs(setup: Setup) -> Any:
    """What the twin has to predict: runs that nothing is fitted to."""
    _twin("validate", setup.node, "--measure-only", "--out", _new(setup, "engine"))


def bench(setup: Setup) -> Any:
    """Published models with random weights, their logits checked in the same run."""
    found = {}
    for name in setup.models[:1] if setup.quick else setup.models:
        said = _twin("bench", name, "--random", SEED, "--node", setup.node, "--json")
        found[name] = json.loads(said)
        _keep(setup, "bench.json", found)
    return {name: one["tokens_per_s"] for name, one in found.items()}


def fit(setup: Setup) -> Any:
    """The twin's numbers from the probes."""
    said = _twin("calibrate", setup.node, "--from", setup.out / "probes", "--json")
    _keep(setup, "fit.json", json.loads(said))


def validate(setup: Setup) -> Any:
    """The fitted twin against the engine's runs."""
    page = setup.out / "validation.html"
    words = ("--from", setup.out / "engine", "--report", page, "--json")
    _keep(setup, "validation.json", json.loads(_twin("validate", setup.node, *words)))


def _twin(*words: Any) -> str:
    """What a command printed. Raises Failed when it failed."""
    said = io.StringIO()
    with redirect_stdout(said):
        code = twin([str(word) for word in words])
    if code:
        raise Failed(f"twin {' '.join(str(word) for word in words)}: exit code {code}")
    return said.getvalue()


def _new(setup: Setup, name: str) -> Path:
    """A folder that is not there; one of a try before makes room."""
    folder = setup.out / name
    if folder.exists():
        tries = sum(1 for _ in setup.out.glob(f"{name}-try*"))
        folder.rename(setup.out / f"{name}-try{tries + 1}")
    return folder


def _keep(setup: Setup, name: str, found: Any) -> None:
    write({setup.out / name: json.dumps(found, indent=1) + "\n"})


def _rows(setup: Setup, name: str, head: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    write({setup.out / name: csv_text(head, rows)})


# ---- one after the other -------------------------------------------------------------------------


@dataclass(frozen=True)
class Step:
    run: Callable[[Setup], Any]
    limit_s: float  # then it is ended: a kernel may hang
    needs: tuple[str, ...] = ()


STEPS = {
    "about": Step(about, 300),
    "build": Step(build, 1800),
    "check": Step(check, 1800, ("about", "build")),
    "places": Step(places, 1800, ("check",)),
    "probes": Step(probes, 7200, ("check",)),
    "engine": Step(engine_runs, 7200, ("check",)),
    "bench": Step(bench, 7200, ("check",)),
    "fit": Step(fit, 7200, ("probes",)),
    "validate": Step(validate, 7200, ("fit", "engine")),
}


def run_step(name: str, setup: Setup) -> dict[str, Any]:
    """One step here and now; what came of it."""
    begun = time.monotonic()
    os.environ[HOME_VARIABLE] = str(setup.out / "calibration")
    try:
        found = STEPS[name].run(setup)
    except (TwinError, Failed) as error:
        return {"result": FAILED, "why": str(error), "seconds": time.monotonic() - begun}
    return {"result": DONE, "found": found, "seconds": time.monotonic() - begun}


def in_a_process(name: str, setup: Setup) -> dict[str, Any]:
    """The same in a process of its own, which a kernel that hangs or a runtime that aborts takes
    along.
    """
    words = [sys.executable, __file__, str(setup.out), "--node", setup.node, "--step", name]
    log = setup.out / "logs" / f"{name}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    with log.open("a", encoding="utf-8") as file:
        try:
            done = subprocess.run(
                [*words, *(["--quick"] if setup.quick else [])],
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                timeout=STEPS[name].limit_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            said = f"not over after {STEPS[name].limit_s:g} s"
            return {"result": FAILED, "why": said, "seconds": time.monotonic() - begun}
    try:
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        said = f"the process ended with code {done.returncode}; see logs/{name}.log"
        return {"result": FAILED, "why": said, "seconds": time.monotonic() - begun}
    return found


def run_all(
    setup: Setup,
    show: Callable[[str], None],
    one: Callable[[str, Setup], dict[str, Any]] = in_a_process,
    again: Sequence[str] = (),
) -> bool:
    """Every step that is not done yet, as far as its needs are. True: all of them are."""
    setup.out.mkdir(parents=True, exist_ok=True)
    state = _state(setup)
    for name in again:
        state["steps"].pop(name, None)
    for name, step in STEPS.items():
        known = state["steps"].get(name, {})
        if known.get("result") == DONE:
            show(f"{name:9} done before")
            continue
        missing = [n for n in step.needs if state["steps"].get(n, {}).get("result") != DONE]
        if missing:
            known = {"result": WAITS, "why": f"needs {', '.join(missing)}"}
        else:
            show(f"{name:9} {step.run.__doc__}")
            known = one(name, setup)
        state["steps"][name] = known
        _keep(setup, STATE, state)
        took = f" in {known['seconds']:.0f} s" if "seconds" in known else ""
        show(f"{name:9} {known['result']}{took} {known.get('why') or known.get('found') or ''}")
    packed = pack(setup)
    show(f"please send back {packed}")
    return all(known["result"] == DONE for known in state["steps"].values())


def _state(setup: Setup) -> dict[str, Any]:
    """What earlier calls did. Raises Failed for a folder of another commit or node."""
    file = setup.out / STATE
    own = {
        "commit": _said(("git", "-C", str(ROOT), "rev-parse", "HEAD")).strip(),
        "node": setup.node,
        "quick": setup.quick,
    }
    if not file.is_file():
        return {**own, "steps": {}}
    known: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    other = [name for name in own if known.get(name) != own[name]]
    if other:
        raise Failed(
            f"{setup.out} holds a run with another {', '.join(other)}: name a new folder, or go "
            f"back to {', '.join(str(known.get(name)) for name in other)}"
        )
    return known


def pack(setup: Setup) -> Path:
    """All of the folder in one file next to it."""
    made = setup.out.with_name(f"{setup.out.name}.tar.gz")
    with tarfile.open(made, "w:gz") as archive:
        archive.add(setup.out, arcname=setup.out.name)
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "out",
        type=Path,
        help="a folder for what is found; the same one again goes on where it stopped",
    )
    parser.add_argument("--node", default="1xmi300x", help="default %(default)s")
    parser.add_argument("--quick", action="store_true", help="fewer probes, one model: 10 minutes")
    parser.add_argument(
        "--again",
        action="append",
        default=[],
        choices=[*STEPS],
        metavar="STEP",
        help="do a step again that is done",
    )
    parser.add_argument("--step", choices=[*STEPS], help=argparse.SUPPRESS)
    args = parser.parse_args()
    setup = Setup(args.out.resolve(), args.node, args.quick)
    if args.step:
        print(json.dumps(run_step(args.step, setup)))
        return 0
    try:
        return 0 if run_all(setup, lambda line: print(line, flush=True), again=args.again) else 1
    except Failed as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
