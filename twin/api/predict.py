"""Plan, simulate, and compare with a change."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from twin.api import given
from twin.calibrate.known_error import KnownError, known_error
from twin.calibrate.node import calibrated_node
from twin.cost.prompt import prompt_time
from twin.cost.routing import MOST_STEPS, STEPS, read_routing, usual_steps
from twin.data import did_you_mean
from twin.errors import ConfigError
from twin.hardware.types import Node
from twin.models import load
from twin.models.spec import ModelSpec
from twin.plan.types import Plan
from twin.schedule.options import FIELDS
from twin.sim.run import Result
from twin.sim.run import simulate as simulate_plan
from twin.study.case import Case
from twin.study.hardware import GPUS, setting_path, with_settings
from twin.study.options import option_name, option_value
from twin.text import shown

Model = str | Path | ModelSpec
Where = str | Path | Node


@dataclass(frozen=True, slots=True)
class Prediction:
    """What the twin says of one steady decode step. Every number is predicted, none measured.

    `interval`: tokens/s if the prediction is as wrong as eight of ten engine runs that the node's
    fit had not seen; None where no such runs are on file (`calibration/held-out`).
    """

    model: str
    node: str
    context: int  # positions already in the KV cache
    tokens_per_s: float  # of one sequence
    interval: tuple[float, float] | None
    step_s: float
    floor_s: float  # bytes of the plan's step at the measured read ceiling
    bytes_per_step: int  # of all GPUs: weights and caches
    mbu: float  # model bandwidth utilisation: by the datasheet's bandwidth, 0 to 1
    prompt_s: float | None  # to read the requested prompt
    seconds: Mapping[str, float]  # of the critical path by cause; they sum to step_s
    assumed: tuple[str, ...]  # hardware numbers that nobody measured and that this rests on
    result: Result = field(repr=False)  # everything else: stages, all steps

    @property
    def model_floor_s(self) -> float:
        """Each byte that the model needs once, whatever the plan: no engine is faster."""
        return self.result.model_floor_s

    @property
    def stream_fraction(self) -> float:
        """`floor_s` / `step_s`, 0 to 1."""
        return self.floor_s / self.step_s


@dataclass(frozen=True, slots=True)
class WhatIf:
    """The same case before and after a change."""

    before: Prediction
    after: Prediction

    @property
    def speedup(self) -> float:
        """tokens/s after over before: 1.0 changes nothing."""
        return self.after.tokens_per_s / self.before.tokens_per_s


def load_model(name: str | Path) -> ModelSpec:
    """The shape of a model; no weights are read.

    `name`: one of `twin models`, a folder or file with a Hugging Face config.json, or a GGUF file;
    `NAME@FORMAT` stores the weights otherwise ("llama-3.1-8b@fp8"). Raises ConfigError.
    """
    return load.load_model(given.text("model", name))


def load_node(name: str | Path) -> Node:
    """Devices and how many of them, with the fits that are on file: "8xh200", "1xhost"; or a file
    of your own, "my-gpu.yaml", "4xmy-gpu.yaml".

    `twin hardware` lists the devices; where each number is from, `twin hardware NODE`. Raises
    ConfigError or HardwareError.
    """
    return calibrated_node(given.text("node", name))


def make_plan(model: Model, node: Where, **options: Any) -> Plan:
    """The plan of one decode step, proven free of deadlocks and races.

    `options`: engine options by their names in `twin plan --help`, with `_` for `-`
    (`handoff="grid"`, `context=8192`, `slot_bytes="16 KiB"`); what is left out is chosen to suit
    the model and the node. Raises ConfigError, PlanError or InvalidPlan.
    """
    return _case(model, node, options).plan()


def simulate(
    model: Model,
    node: Where,
    *,
    prompt: int | None = None,
    routing: str = "uniform",
    seed: int = 0,
    steps: int | None = None,
    **options: Any,
) -> Prediction:
    """One steady decode step, simulated event by event; the same input gives the same output.

    `prompt`: also predict how long a prompt of so many tokens takes. `routing`, `seed`: how tokens
    choose experts ("uniform", "zipf:1.2", or a JSON file of counts). `steps`: simulated ones, 2 at
    least because the first is cold, 1,000 at most. `options` as in `make_plan`. Raises ConfigError,
    PlanError or InvalidPlan.
    """
    case = _case(model, node, options)
    plan = case.plan()
    of_prompt = None
    if prompt is not None:
        of_prompt = prompt_time(plan, case.node, given.whole("prompt", prompt, 1, given.MOST))
    count = usual_steps(plan) if steps is None else given.whole("steps", steps, STEPS, MOST_STEPS)
    drawn = given.whole("seed", seed, 0, given.MOST_SEED)
    chosen = read_routing(given.text("routing", routing), drawn)
    result = simulate_plan(plan, case.node, steps=count, routing=chosen)
    found = known_error(case.node, case.spec, plan.options)
    return _prediction(case.spec, plan, result, found, of_prompt.seconds if of_prompt else None)


def what_if(
    model: Model, node: Where, changes: Mapping[str, str | int | float], **options: Any
) -> WhatIf:
    """The case as it is, and with changes made.

    `changes`: engine options (`{"handoff": "grid"}`) and hardware numbers by their paths in
    `twin hardware NODE`, as a quantity, a factor or a percentage (`{"memory.stream": "5 TB/s",
    "link.hop": "x0.5", "clock": "-10%"}`); a bare number is in base units (s, B, B/s). A number
    that was set counts as assumed. Raises ConfigError, HardwareError, PlanError or InvalidPlan.
    """
    if not given.named("changes", changes):
        raise ConfigError("changes is empty: name an option or a hardware number and its new value")
    case = _case(model, node, options)
    chosen, settings = dict(case.chosen), []
    for name, value in changes.items():
        option = option_name(name)
        if option in FIELDS and option != GPUS:
            chosen[option] = option_value(option, value)
        else:
            settings.append((name, value))
    settings.sort(key=lambda setting: setting[0] != GPUS)  # the numbers after it are of that node
    changed = case.node
    for name, value in settings:
        changed = with_settings(changed, [(setting_path(changed, name), value)])
    return WhatIf(simulate(case.spec, case.node, **options), simulate(case.spec, changed, **chosen))


# ---- between names and objects ------------------------------------------------------------------


def _case(model: Model, node: Where, options: Mapping[str, Any]) -> Case:
    spec = model if isinstance(model, ModelSpec) else load_model(model)
    where = node if isinstance(node, Node) else load_node(node)
    return Case(spec, where, chosen_options(options))


def chosen_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Values of Options fields from what a caller gave. Raises ConfigError."""
    chosen = {}
    for name, value in options.items():
        field = option_name(name)
        if field == GPUS:
            raise ConfigError(f"{name}={shown(value)}: nodes say how many GPUs there are (8xh200)")
        if field not in FIELDS:
            known = [name for name in FIELDS if name != GPUS]
            raise ConfigError(f"{shown(name)} is no engine option; {did_you_mean(name, known)}")
        plain = getattr(value, "value", value)  # of an enumeration
        chosen[field] = option_value(field, plain)
    return chosen


def _prediction(
    spec: ModelSpec, plan: Plan, result: Result, known: KnownError | None, prompt_s: float | None
) -> Prediction:
    return Prediction(
        model=spec.name,
        node=result.node,
        context=plan.options.context,
        tokens_per_s=result.tokens_per_s,
        interval=known.interval(result.tokens_per_s) if known else None,
        step_s=result.step_s,
        floor_s=result.floor_s,
        bytes_per_step=result.bytes_per_step,
        mbu=result.mbu,
        prompt_s=prompt_s,
        seconds=result.attribution,
        assumed=result.assumed,
        result=result,
    )
