"""What a pass over several tokens costs next to a step, and what drafts are worth: the engine in
this process, `python studies/several-tokens/run.py OUT.csv NODE MODEL ...`.

Rows are written as they come. The weights are random, of the models' true shapes, so drafts are
made and verified, and as many count as a row says.
"""

from __future__ import annotations

import csv
import statistics
import sys
from pathlib import Path

from studies.common.rows import first_tokens
from twin.calibrate.node import calibrated_node
from twin.engine.choose import compile_all, open_random
from twin.engine.generation import Drafting
from twin.engine.session import Session
from twin.models.load import load_model
from twin.schedule.options import plan_for

PRODUCTS = "by hand-offs"
HEAD = ("products", "node", "model", "after", "tokens", "predicted_us", "us", "step_us", "equal")
POSITIONS, WIDTHS, LOOKUP, SKIPPED = (32, 4096), (1, 2, 4, 8), 7, 4
ROUNDS, STEPS, COMPARED = 24, 64, 96


def equal(running: Session, vocab: int) -> bool:
    """Does a generation with drafts make the tokens of one whose drafts are all rejected?"""
    prompt = first_tokens(vocab, 40)
    rejected = running.generate(prompt, max_tokens=COMPARED, drafting=Drafting(accepted=1.0)).tokens
    lookups = (1, 3, LOOKUP)
    found = [
        running.generate(prompt, max_tokens=COMPARED, drafting=Drafting(n)).tokens for n in lookups
    ]
    return all(tokens == rejected for tokens in found)


def round_us(running: Session, prompt: list[int], tokens: int) -> float:
    """Of a round of so many tokens."""
    if tokens == 1:  # a prompt without repetition drafts next to nothing
        made = running.generate(prompt, max_tokens=ROUNDS, drafting=Drafting(1))
    else:
        made = running.generate(
            prompt, max_tokens=ROUNDS * tokens, drafting=Drafting(tokens - 1, float(tokens))
        )
    return statistics.median(made.round_ns[SKIPPED:]) / 1e3


def main() -> None:
    out, node, models = Path(sys.argv[1]), calibrated_node(sys.argv[2]), sys.argv[3:]
    plans = {
        name: plan_for(load_model(name), node, context=160, max_context=5000, lookup=LOOKUP)
        for name in models
    }
    compile_all(node.device, list(plans.values()), lambda line: None)
    with out.open("w", encoding="utf-8", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(HEAD)
        for name, plan in plans.items():
            assert plan.spec is not None
            vocab = plan.spec.vocab
            with open_random(node.device, plan, 1) as running:
                same = equal(running, vocab)
                for after in POSITIONS:
                    prompt = first_tokens(vocab, after)
                    steps = running.generate(prompt, max_tokens=STEPS, drafting=Drafting(0)).step_ns
                    step_us = statistics.median(steps[SKIPPED:]) / 1e3
                    for tokens in WIDTHS:
                        us = round_us(running, prompt, tokens)
                        place = (PRODUCTS, node.name, name, after, tokens, "")
                        rows.writerow([*place, f"{us:.1f}", f"{step_us:.1f}", same])
                        file.flush()
                        print(name, after, tokens, round(us, 1), round(us / step_us, 3), same)


if __name__ == "__main__":
    main()
