"""Measures the four changes on a GPU, each checked first; needs no simulator. See README.md.

python studies/h200-changes/measure.py measured.json [--repeats 5] [--device host]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from twin.bench.changes import BASE, PROMPT, TOKENS, Case, cases
from twin.bench.shapes import Bench, FilledWeights, conditions, prompt_of
from twin.engine.session import Session

WARMUP = 16  # steps after the prompt that are not counted
FIRST_TOKENS = 16  # compared
# of the largest logit: other splits add in another order, and a cached value may round to its
# neighbour
LOGITS_TOLERANCE = 1.2e-2


def first_tokens(bench: Bench, case: Case, weights: FilledWeights) -> tuple[list[int], Any]:
    """Tokens and logits of the change on few layers, with the same weights whatever the layout."""
    prompt = prompt_of(case.checked, PROMPT)
    with bench.engine(case.checked, weights=weights) as engine:
        return engine.generate(prompt, max_tokens=FIRST_TOKENS).tokens, engine.logits(prompt[:8])


def check(bench: Bench, chosen: list[Case]) -> dict[str, Any]:
    """Every change gives the first tokens of its base plan. Ends the program when one does not: its
    time would mean nothing.
    """
    facts: dict[str, Any] = {}
    for model in dict.fromkeys(case.model for case in chosen):
        own = [case for case in chosen if case.model == model]
        spec = own[0].checked.spec
        assert spec is not None
        weights = FilledWeights(spec, own[0].checked.options.weight_dtype)
        expected, logits = first_tokens(bench, own[0], weights)
        for case in own[1:]:
            tokens, others = first_tokens(bench, case, weights)
            away = float(np.abs(others - logits).max() / np.abs(logits).max())
            facts[case.name] = {"tokens": tokens, "logits_relative_difference": away}
            if tokens != expected or not away <= LOGITS_TOLERANCE:
                sys.exit(
                    f"{case.name}: tokens {tokens}, expected {expected}; logits differ by "
                    f"{away:.1e}: wrong, so not timed"
                )
            print(
                f"checked {case.name}: same {FIRST_TOKENS} tokens, logits within {away:.1e}",
                flush=True,
            )
    return facts


def same_streams(case: Case, base: Case) -> bool:
    """Do both lay their weights out alike? Then the streams filled on the device are the same
    weights.
    """
    ours, theirs = ([stage.matrix for stage in one.plan.stages] for one in (case, base))
    return ours == theirs


def measure(bench: Bench, chosen: list[Case], repeats: int, tokens: int) -> dict[str, Any]:
    """Medians of each repeat, all changes in turn in every round, so that a slow minute is
    everybody's.
    """
    rows: dict[str, Any] = {}
    for model in dict.fromkeys(case.model for case in chosen):
        own = [case for case in chosen if case.model == model]
        prompt = prompt_of(own[0].plan, PROMPT)
        with ExitStack() as stack:
            engines: dict[str, Session] = {
                case.name: stack.enter_context(bench.engine(case.plan)) for case in own
            }
            expected = engines[own[0].name].generate(prompt, max_tokens=tokens).tokens
            samples: dict[str, list[float]] = {name: [] for name in engines}
            for turn in range(repeats):
                for case in own if turn % 2 == 0 else own[::-1]:
                    made = engines[case.name].generate(prompt, max_tokens=tokens)
                    if same_streams(case, own[0]) and made.tokens != expected:
                        sys.exit(
                            f"{case.name}: other tokens than {own[0].name} in round {turn}: "
                            "wrong, so not timed"
                        )
                    samples[case.name].append(
                        float(np.median(made.step_ns[min(WARMUP, tokens // 2) :])) / 1e3
                    )
        base = statistics.median(samples[own[0].name])
        for case in own:
            us = statistics.median(samples[case.name])
            same = same_streams(case, own[0])
            rows[case.name] = {
                "us_per_token": us,
                "change": us / base - 1,
                "samples_us": samples[case.name],
                "all_tokens_compared": same,
            }
            print(f"{case.name:48} {us:9.1f} us {us / base - 1:+7.1%}", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument(
        "--device",
        choices=("cuda", "host"),
        default="cuda",
        help="host: small stand-ins, to try this script",
    )
    args = parser.parse_args()
    bench = Bench(args.device)
    chosen = cases(bench)
    before = conditions()
    bench.compile([plan for case in chosen for plan in (case.plan, case.checked)])
    checks = check(bench, chosen)
    rows = measure(bench, chosen, args.repeats, args.tokens)
    about = {
        "device": args.device,
        "base": BASE,
        "tokens": args.tokens,
        "repeats": args.repeats,
        "before": before,
        "after": conditions(),
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(
        json.dumps({"about": about, "checks": checks, "rows": rows}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
