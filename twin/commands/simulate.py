"""`twin simulate`: tokens per second, and where each microsecond goes."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from twin.batching.prices import Rates
from twin.calibrate.fitted import moved_by
from twin.calibrate.known_error import FEWEST, KnownError, known_error, stage_levels
from twin.calibrate.node import fits_of, other_links
from twin.calibrate.on_record import prompt_of, step_at
from twin.calibrate.prompt_error import prompt_error
from twin.commands import compared, drafts
from twin.commands.arguments import (
    Subparsers,
    add_engine_options,
    add_model,
    add_node,
    command,
    file_to_write,
    whole,
)
from twin.commands.best import add_plan, best_case, plan_fact, plan_json
from twin.commands.inputs import case_of
from twin.commands.output import done, emit, progress, say, underway
from twin.commands.plan import options_json
from twin.cost.acceptance import Acceptance, read_acceptance
from twin.cost.prompt import PromptTime, prompt_time
from twin.cost.routing import DRAWN_STEPS, MOST_STEPS, STEPS, read_routing, usual_steps
from twin.errors import ConfigError
from twin.files import write
from twin.hardware.load import load_node
from twin.hardware.number import Kind
from twin.hardware.override import numbers as hardware_numbers
from twin.hardware.types import Node
from twin.models.kind import ModelKind, kind_of
from twin.models.load import load_model
from twin.models.spec import ModelSpec
from twin.plan.types import Plan
from twin.proof.prove import prove
from twin.report import words
from twin.report.step import by_kind, ordered_causes, slowest_stages, spoken, traced_blocks
from twin.report.tables import bar, count, facts, percent, table
from twin.schedule.options import plan_for
from twin.sim.executor import Executor
from twin.sim.run import Result, simulate
from twin.sim.speculation import Speculation
from twin.study.case import Case
from twin.study.compared import Comparison
from twin.study.gpus import as_if_delayed
from twin.study.options import check_range
from twin.text import shown
from twin.units import format_quantity, parse_quantity

SLOWEST = 6
SEEN = 0.005  # of a floor, below which another one says the same
ASK = "twin whatif MODEL NODE --draws 16"
# said where no runs of the model's kind are on file
OTHERWISE = {
    ModelKind.FEW_BITS: "; none of them has quantised weights",
    ModelKind.EXPERTS: "; none of them has experts",
}
EXAMPLES = """\
  twin simulate laneformer-2b 8xmi300x
  twin simulate llama-3.1-8b 8xh200 --engines
  twin simulate qwen3-8b 1xh200 --context 8192 --report out/qwen.html --trace out/qwen.json
  twin simulate qwen3-30b-a3b 8xh200 --expert-ranks 8 --routing zipf:1.2
  twin simulate llama-3.1-8b 1xh200 --prompt 1000 --usd-per-hour 2.5
  twin simulate llama-3.1-8b 1xh200 --draft eagle3:5 --acceptance minimax-m3-eagle3
  twin simulate llama-3.1-8b 1xh200 --draft 3 --acceptance 0.7 --draft-model llama-3.2-1b"""


def add(commands: Subparsers) -> None:
    parser = command(
        commands,
        "simulate",
        run,
        usage="MODEL NODE [options]",
        summary="predict tokens/s, and show where each microsecond goes",
        text="Simulates decode steps of the plan on the node, "
        "event by event, and reports the last, steady one.\n"
        "The same input gives the same output, byte for "
        "byte." + words.lines(words.OF_A_RESULT),
        examples=EXAMPLES,
    )
    add_model(parser)
    add_node(parser)
    parser.add_argument(
        "--steps",
        type=whole,
        metavar="N",
        help=f"steps to simulate, the first is cold (default {STEPS}, or {DRAWN_STEPS} "
        "where steps differ by which experts they use)",
    )
    parser.add_argument(
        "--routing",
        metavar="HOW",
        default="uniform",
        help="how tokens choose experts: uniform, zipf:EXPONENT, or a JSON "
        "file of recorded counts (default %(default)s)",
    )
    parser.add_argument(
        "--seed", type=whole, default=0, metavar="N", help="of the routing (default %(default)s)"
    )
    parser.add_argument(
        "--draft",
        type=drafts.draft,
        default=0,
        metavar="KIND:K",
        help="also predict rounds that verify up to K drafts, 1 to 7, by lookup, mtp or eagle3; a "
        "number: simulate a step that verifies so many, of another model",
    )
    parser.add_argument(
        "--acceptance",
        metavar="P",
        help="with --draft: how often a drafted token is accepted, 0 to 1, or a curve's name in "
        "hwmodels/acceptance.yaml",
    )
    parser.add_argument(
        "--draft-model",
        metavar="MODEL",
        help="with --draft N: what drafts, simulated on the same node",
    )
    parser.add_argument(
        "--draft-time",
        metavar="TIME",
        help="with --draft N, instead of a model: of one drafted token, such as 80us",
    )
    parser.add_argument(
        "--prompt", type=whole, metavar="N", help="also predict how long a prompt of N tokens takes"
    )
    parser.add_argument(
        "--engines",
        action="store_true",
        help="compare four ways to run the step: stream, graph, resident",
    )
    parser.add_argument(
        "--trace",
        metavar="FILE",
        type=file_to_write,
        help="write a trace of some blocks for ui.perfetto.dev",
    )
    parser.add_argument(
        "--report", metavar="FILE", type=file_to_write, help="write a self-contained HTML page"
    )
    add_plan(
        parser,
        "of several GPUs: the best plan, as `twin optimise` finds it, or default options on all of "
        "them (default: best, and fixed where an option is given that the search would choose)",
    )
    compared.add_rates(parser)
    add_engine_options(parser, without=("gpus", "draft"))


def run(args: argparse.Namespace) -> int:
    rounds = None if isinstance(args.draft, int) else args.draft
    if rounds is None:
        if args.draft:
            args.option_draft = args.draft
    else:
        more = [f"--{name}" for name in ("draft-model", "draft-time") if _given(args, name)]
        accepted = drafts.check_drafts(rounds, args.acceptance, more)
    case = as_if_delayed(case_of(args))
    if args.steps is not None:
        check_steps(args.steps)
    check_range("seed", args.seed)
    with underway(f"planning {case.spec.name} on {case.node.name}"):
        plan = case.plan()
    speculation = speculation_of(args, plan, case.node) if rounds is None else None
    rates, prompt = _rates_and_prompt(args, case, plan)
    case, best = best_case(args, case, speculation)
    if best is not None:
        plan = case.plan()
        rates, prompt = _rates_and_prompt(args, case, plan)
    steps = args.steps if args.steps is not None else usual_steps(plan)
    named = f"{case.spec.name} on {case.node.name}"
    traced = traced_blocks(plan.options.blocks) if args.trace or args.report else None
    with underway(f"simulating {steps} steps of {named}"):
        result = simulate(
            plan,
            case.node,
            steps=steps,
            trace=traced is not None,
            blocks=traced,
            routing=read_routing(args.routing, args.seed),
            speculation=speculation,
        )
    worth = drafts.drafts_of(case, rounds, accepted, result.step_s) if rounds else None
    if result.why_simpy:
        say(f"no compiled code: {result.why_simpy}")
    say(f"{result.simulated_steps_per_s:.2g} simulated steps per second")
    shown_prompt = prompt or compared.usual_prompt(plan, case.node)
    known = known_error(case.node, plan.spec, plan.options)
    with underway(f"other engines with {named}"):
        others = compared.comparison(case, plan, result, rates, shown_prompt, known)
    four = None
    if args.engines:
        from twin.study.engines import compare_engines  # no other result needs its workers

        show = progress()
        four = compare_engines(case, show)
        done()
    if args.trace and result.trace:
        write({args.trace: result.trace.to_json()})
        say(f"trace: {args.trace} (open it in ui.perfetto.dev)")
    if args.report:
        from twin.report import pages  # no other result needs them

        extra = [pages.engines(four)] if four else []
        page = pages.simulation_page(plan, case.node, result, *extra, others=others)
        say(f"report: {page.write(args.report)}")
    if args.json:
        data = to_json(plan, case.node, result, known) | {"compared": others.json()}
        data["chosen_plan"] = plan_json(best)
        if prompt:
            about = prompt_json(plan, case.node, prompt)
            data["prompt"] = asdict(prompt) | {"pass_s": prompt.pass_s} | about
        if worth:
            data["drafts"] = drafts.drafts_json(worth)
        if four:
            data["engines"] = {name: headline(r) for name, r in four.items()}
        emit(args, data, "")
        return 0
    printed = [text(plan, case.node, result, known, others, shown_prompt, plan_fact(best))]
    if worth:
        printed.append(drafts.drafts_text(worth))
    if prompt:
        printed.append(prompt_text(prompt, plan, case.node))
    if four:
        printed.append(engines_text(four))
    emit(args, {}, "\n\n".join(printed))
    return 0


def _rates_and_prompt(
    args: argparse.Namespace, case: Case, plan: Plan
) -> tuple[Rates, PromptTime | None]:
    """What the arguments say of prices and of a prompt, refused before a search takes time."""
    prompt = prompt_time(plan, case.node, args.prompt) if args.prompt is not None else None
    return compared.rates(args, case.node), prompt


def check_steps(steps: int) -> None:
    """Raises ConfigError for fewer than a second, steady one, and for more than MOST_STEPS."""
    if not STEPS <= steps <= MOST_STEPS:
        raise ConfigError(
            f"--steps {shown(steps)}: at least {STEPS}, the first step starts with cold caches, "
            f"and at most {MOST_STEPS}"
        )


def _given(args: argparse.Namespace, name: str) -> bool:
    return getattr(args, name.replace("-", "_")) is not None


def speculation_of(args: argparse.Namespace, plan: Plan, node: Node) -> Speculation | None:
    """What the arguments say about drafted tokens. Raises ConfigError when they contradict each
    other.
    """
    given = [
        name
        for name in ("acceptance", "draft_model", "draft_time")
        if getattr(args, name) is not None
    ]
    if not plan.options.draft and not given:
        return None
    if not plan.options.draft or args.acceptance is None or len(given) != 2:
        raise ConfigError(
            "--draft N, --acceptance P and one of --draft-model or --draft-time belong together: "
            "give all three, or none"
        )
    accepted = read_acceptance(args.acceptance)
    if args.draft_time is not None:
        return _speculation(accepted, parse_quantity(args.draft_time, "s"))
    drafting = plan_for(
        load_model(args.draft_model), node, context=plan.options.context, batch=plan.options.batch
    )
    prove(drafting)
    return _speculation(accepted, simulate(drafting, node).step_s)


def _speculation(accepted: Acceptance, draft_step_s: float) -> Speculation:
    return Speculation(
        acceptance=accepted.rate or 0.0, draft_step_s=draft_step_s, curve=accepted.name
    )


def headline(result: Result) -> dict[str, Any]:
    return {
        "tokens_per_s": result.tokens_per_s,
        "total_tokens_per_s": result.total_tokens_per_s,
        "step_s": result.step_s,
        "floor": result.floor_s,
        "floor_s": result.floor_s,
        "floor_tokens_per_s": 1 / result.floor_s,
        "model_floor_s": result.model_floor_s,
        "model_floor_tokens_per_s": 1 / result.model_floor_s,
        "stream_fraction": result.stream_fraction,
        "mbu": result.mbu,
        "attribution": result.attribution,
    }


def floors(result: Result) -> list[tuple[str, str]]:
    """Of the plan's bytes, and of the model's where a plan moves some of them more than once."""
    found = [("floor", _floor(result.floor_s))]
    if result.model_floor_s < result.floor_s * (1 - SEEN):
        found.append(("floor of the model", f"{_floor(result.model_floor_s)}, each byte once"))
    return found


def _floor(seconds: float) -> str:
    return f"{format_quantity(seconds, 's')}, {count(1 / seconds)} tokens/s"


def to_json(plan: Plan, node: Node, result: Result, known: KnownError | None) -> dict[str, Any]:
    """Everything that the same input reproduces: no clock of this computer is in it."""
    named = {
        "model": plan.spec.name if plan.spec else plan.name,
        "node": node.name,
        "options": options_json(plan.options),
    }
    return (
        named
        | headline(result)
        | {"held_out": held_out_json(result, known)}
        | {"measured": measured_json(plan, node)}
        | {key: value for key, value in result.to_dict().items() if key not in named}
    )


def text(
    plan: Plan,
    node: Node,
    result: Result,
    known: KnownError | None,
    others: Comparison,
    prompt: PromptTime | None,
    taken: str,
) -> str:
    """`prompt`: shown next to the other engines; `taken`: which plan it is."""
    head = (
        f"{plan.spec.name if plan.spec else plan.name} on {node.gpus} x {node.device.title}, at "
        f"{plan.options.context} positions"
    )
    numbers = [
        ("tokens/s", f"{count(result.tokens_per_s)}  (predicted)"),
        *interval_facts(others),
        *measured_facts(plan, node),
        *batch_facts(result),
        ("plan", taken),
        ("step", format_quantity(result.step_s, "s")),
        *([("by routing", routing_text(result))] if result.routing else []),
        *floors(result),
        ("stream fraction", percent(result.stream_fraction)),
        ("MBU", percent(result.mbu)),
    ]
    causes = {spoken(cause): seconds for cause, seconds in ordered_causes(result)}
    levels = stage_levels(node)
    between = ["p10 .. p90"] if levels else []
    kinds = [
        (
            kind,
            sum(s.kind == kind for s in result.stages),
            f"{sum(parts.values()):.1f}",
            *([_between(sum(parts.values()), levels.get(kind))] if levels else []),
            spoken(max(parts, key=lambda c: parts[c])),
        )
        for kind, parts in by_kind(result).items()
    ]
    slow = [
        (s.name, f"{s.seconds * 1e6:.2f}", spoken(s.dominant))
        for s in slowest_stages(result, SLOWEST)
    ]
    by = {Executor.COMPILED.value: "compiled code", Executor.SIMPY.value: "SimPy"}[result.executor]
    numbers_of_node = hardware_numbers(node)  # kinds of work have numbers of their own
    unbound = [
        path
        for path in result.assumed
        if path in numbers_of_node and numbers_of_node[path].kind is Kind.UNBOUND
    ]
    rests = _listed("assumed numbers", [path for path in result.assumed if path not in unbound])
    if unbound:
        rests += f"\n{_listed('numbers that the probes of the fit do not bind', unbound)}"
    return "\n\n".join(
        [
            head,
            facts(numbers),
            "where the step's time goes (critical path)\n" + bar(causes),
            table(("stages", "count", "us", *between, "mostly"), kinds),
            table(("slowest stages", "us", "mostly"), slow),
            compared.text(others, prompt, result.sequences),
            f"{rests}\n{certainty(node, plan.spec, known)}\n"
            f"what the words mean: twin simulate --help\nsimulated by {by}",
        ]
    )


def _between(us: float, levels: tuple[float, float] | None) -> str:
    """Where eight of ten such stages of traced runs lay."""
    return f"{us * levels[0]:.1f} .. {us * levels[1]:.1f}" if levels else ""


def _listed(what: str, paths: Sequence[str]) -> str:
    return (
        f"rests on {len(paths)} {what}: "
        f"{', '.join(path.removeprefix('device.') for path in paths) or 'none'}"
    )


def certainty(node: Node, spec: ModelSpec | None, known: KnownError | None) -> str:
    """What is known about the error of a prediction for this node without simulating it again and
    again.
    """
    fits = fits_of(node)
    if not fits:
        return f"no interval: {node.name} has no fit; for one from the ranges of its numbers: {ASK}"
    if known is None:
        return (
            f"no interval: no held-out runs of the fit of {' and '.join(fits)} are on file; for "
            f"one from the ranges of its numbers: {ASK}"
        )
    moved = moved_by(load_node(known.node)).keys() & set(known.records)
    without = f", {len(moved)} of them by fits without them" if moved else ""
    other = OTHERWISE[kind_of(spec)] if spec and kind_of(spec) is not known.kind else ""
    said = (
        f"held out: the fit of {known.node} ({known.fit}) missed {len(known.every)} engine runs "
        f"that it had not seen (from {len(known.records)} records{without}) by "
        f"{percent(known.median)} in the median, {percent(known.worst, signed=True)} at worst; "
        f"the interval holds eight of ten of those most like it{other}"
    )
    if unseen := known.unseen:
        said += (
            f"\nnever ran on an engine of ours: {', '.join(unseen)}; the interval is wider by what "
            "first predictions were off"
        )
    others = other_links(node)
    link = (
        f", what is assumed of its link is as between {others}"
        if others
        else ""
        if node.link is None or node.name in fits
        else ", its link is not fitted"
    )
    return (
        said
        if known.node == node.name
        else f"{said}\nthey ran on {known.node}, and fewer than {FEWEST} on {node.name}: "
        f"{node.name} has the numbers of its devices from there{link}; for an interval of all "
        f"numbers: {ASK}"
    )


def held_out_json(result: Result, known: KnownError | None) -> dict[str, Any] | None:
    if known is None:
        return None
    low, high = known.interval(result.tokens_per_s)
    return {
        "node": known.node,
        "fit": known.fit,
        "record": known.record,
        "drawn": list(known.drawn),
        "kind": known.kind.value,
        "runs": len(known.every),
        "median_abs_error": known.median,
        "worst_error": known.worst,
        "tokens_per_s": [low, high],
    }


def interval_facts(found: Comparison) -> list[tuple[str, str]]:
    low, high = found.rows[0].low, found.rows[0].high
    if low is None or high is None:
        return []
    return [
        (
            "interval",
            f"{count(low)} .. {count(high)} tokens/s, if it is as wrong as the held-out runs",
        )
    ]


def measured_facts(plan: Plan, node: Node) -> list[tuple[str, str]]:
    """What a run on record of the same model and node came to."""
    run = step_at(plan, node)
    return [("measured", f"{run.speed()} ({run.record})")] if run else []


def measured_json(plan: Plan, node: Node) -> dict[str, Any] | None:
    run = step_at(plan, node)
    if run is None:
        return None
    return {"tokens_per_s": run.tokens_per_s, "context": run.context, "record": run.record}


def batch_facts(result: Result) -> list[tuple[str, str]]:
    """What several sequences and accepted drafts make of a step."""
    found = []
    if result.sequences > 1:
        found.append(
            (
                "of all sequences",
                f"{count(result.total_tokens_per_s)} tokens/s, {result.sequences} together",
            )
        )
    if result.tokens_per_step > 1:
        found.append(
            (
                "a step yields",
                f"{result.tokens_per_step:.3g} tokens, after "
                f"{format_quantity(result.draft_s, 's')} of drafting",
            )
        )
    return found


def routing_text(result: Result) -> str:
    found = result.distribution
    times = ", ".join(
        f"{name} {format_quantity(found[name], 's')}" for name in ("p10", "p50", "p90", "max")
    )
    return f"{times} of {found['steps']} steps ({result.routing}); below is the median one"


def prompt_json(plan: Plan, node: Node, prompt: PromptTime) -> dict[str, Any]:
    """Seconds that eight of ten such prompts took, and what one on record took."""
    assert plan.spec is not None
    known, run = prompt_error(plan.spec, node), prompt_of(plan, node, prompt.tokens)
    ends = [prompt.seconds * end for end in (known.low, known.high)] if known else None
    there = {"seconds": run.prompt_s, "record": run.record} if run else None
    return {"interval_s": ends, "measured": there}


def prompt_facts(plan: Plan, node: Node, prompt: PromptTime) -> list[tuple[str, str]]:
    assert plan.spec is not None
    known, run = prompt_error(plan.spec, node), prompt_of(plan, node, prompt.tokens)
    found = []
    if known:
        low, high = (format_quantity(prompt.seconds * end, "s") for end in (known.low, known.high))
        found.append(
            (
                "interval",
                f"{low} .. {high}, if it is as wrong as {known.prompts} prompts of "
                f"{known.models} models ({known.kind.value})",
            )
        )
    if run and run.prompt_s:
        found.append(("measured", f"{format_quantity(run.prompt_s, 's')} ({run.record})"))
    return found


def prompt_text(prompt: PromptTime, plan: Plan, node: Node) -> str:
    numbers = [
        (
            f"prompt of {prompt.tokens}",
            f"{format_quantity(prompt.seconds, 's')}, then a step  (predicted)",
        ),
        *prompt_facts(plan, node, prompt),
        (
            "passes",
            f"{prompt.passes} of {format_quantity(prompt.pass_s, 's')}, "
            f"{format_quantity(prompt.pass_bytes, 'B')} of weights each",
        ),
        ("floor", format_quantity(prompt.floor_s, "s")),
        *(
            (f"in {name}", format_quantity(seconds, "s"))
            for name, seconds in prompt.waits_s.items()
        ),
    ]
    return facts(numbers)


def engines_text(results: dict[str, Result]) -> str:
    rows = [
        (
            name,
            count(r.tokens_per_s),
            f"{r.step_s * 1e6:.1f}",
            percent(r.stream_fraction),
            spoken(ordered_causes(r)[0][0]),
        )
        for name, r in results.items()
    ]
    return table(("engine", "tokens/s", "us a step", "stream fraction", "mostly"), rows)
