"""Predicts what run.py measures: `python studies/server/predict.py`.

Writes predictions.json beside itself, once: it was committed before the server ran on a GPU. Rates
and prompts are the twin's; what the server adds is judged from a CPU (JUDGED).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from twin.calibrate.known_error import known_error
from twin.calibrate.node import calibrated_node
from twin.engine.opening import open_source
from twin.hardware.types import Node
from twin.plan.types import Plan
from twin.sim.prompt import prompt_time
from twin.study.case import Case
from twin.study.foretold import fit_of, write_once
from twin.study.served import (
    MODELS,
    RUN,
    SAMPLER,
    SEED,
    SERVED,
    SIZES,
    plans_of,
)

HERE = Path(__file__).resolve().parent

NODE = "1xh200"
# About what two busy cores took: times with a model of two layers, the share with an engine that
# only waits and hands out 2,000 tokens/s.
JUDGED = {
    "first_s": 2.5e-3,  # from the request to the kernel, and from its token to the client
    "first_token_s": 1.2e-6,  # the same for each token of the prompt
    "end_s": 0.5e-3,  # from the last token to the end of the answer
    "engine_s": 0.5e-3,  # around the kernel, without a server
    "share": 0.14,  # of a core, at 2,000 tokens/s
}
AROUND = 17  # tokens that the template puts between an answer and the next one


def main() -> None:
    write_once(HERE, predictions)


def predictions() -> dict[str, Any]:
    node = calibrated_node(NODE)
    return {
        "fit": fit_of(node.device.name),
        "node": node.name,
        "judged": JUDGED,
        "models": {name: predicted(name, node) for name in MODELS},
    }


def predicted(name: str, node: Node) -> dict[str, Any]:
    """Of a model: steps of the three plans, whole answers, first tokens, second turns."""
    plans = plans_of(open_source(name, SEED, text=False), node)
    steps = {what: step_rate(plan, node) for what, plan in plans.items()}
    answers = {
        what: SIZES.tokens / answer_s(plan, node, steps[what]["p50"], server=False)
        for what, plan in plans.items()
    }
    served = plans[SERVED]
    through = SIZES.tokens / answer_s(served, node, steps[SERVED]["p50"], server=True)
    step_s = 1 / steps[SERVED]["p50"]
    held = SIZES.opening + SIZES.answer - 1
    prompt = held + 1 + AROUND + SIZES.follow
    return {
        "steps": steps,
        "answers": answers | {"server": through},
        "of_engine": through / answers[SERVED],
        "of_run": through / answers[RUN],
        "sampler": SIZES.tokens
        / answer_s(plans[SAMPLER], node, steps[SAMPLER]["p50"], server=True),
        "first_token_s": {
            str(tokens): prompt_time(served, node, tokens).seconds + step_s + added_s(tokens)
            for tokens in SIZES.first
        },
        "second_turn": {
            "prompt": prompt,
            "kept": held,
            "kept_s": prompt_time(served, node, prompt - held).seconds + step_s + added_s(prompt),
            "read_s": prompt_time(served, node, prompt).seconds + step_s + added_s(prompt),
        },
    }


def step_rate(plan: Plan, node: Node) -> dict[str, float]:
    """Tokens/s of steps in the middle of the answer, with the interval of the fit's held-out
    runs.
    """
    assert plan.spec is not None
    options = {
        "max_context": plan.options.max_context,
        "sampling": plan.options.sampling,
        "context": SIZES.prompt + SIZES.tokens // 2,
    }
    rate = Case(plan.spec, node, options).simulate().tokens_per_s
    known = known_error(node)
    assert known is not None
    low, high = known.interval(rate)
    return {"p10": low, "p50": rate, "p90": high}


def answer_s(plan: Plan, node: Node, rate: float, *, server: bool) -> float:
    """Seconds of the whole answer; the last token of the prompt is a step."""
    around = added_s(SIZES.prompt) + JUDGED["end_s"] if server else JUDGED["engine_s"]
    return prompt_time(plan, node, SIZES.prompt).seconds + SIZES.tokens / rate + around


def added_s(tokens: int) -> float:
    return JUDGED["first_s"] + tokens * JUDGED["first_token_s"]


if __name__ == "__main__":
    main()
