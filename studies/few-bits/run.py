"""Runs every row on this computer's GPU: `studies/few-bits/run.sh 1xh200 --out FILE`.

Each row: a model of its layers is compared with the NumPy reference, its logits and tokens over
five runs bit by bit; then the whole model is timed, where all repeats must give the same tokens.
Random weights of the true shapes. What is done is kept after every row, and a row that is in the
file is passed by. Weights of the table are the bytes that are streamed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from rows import (  # noqa: E402, the folder is no package
    PROMPTS,
    ROWS,
    TOKENS,
    WARM_UP,
    checked_plan,
    spec_of,
    timed_plan,
)

from twin.bench.ahead import made_ahead  # noqa: E402
from twin.bench.measure import check_logits, reference_logits  # noqa: E402
from twin.calibrate.node import calibrated_node  # noqa: E402
from twin.engine.choose import (  # noqa: E402
    compile_all,
    gpu_conditions,
    open_engine,
    open_random,
)
from twin.engine.opening import check_runs_here  # noqa: E402
from twin.engine.weights import random_weights  # noqa: E402
from twin.errors import TwinError  # noqa: E402
from twin.hardware.types import Node  # noqa: E402
from twin.plan.shards import Weights  # noqa: E402
from twin.plan.types import Plan  # noqa: E402

REPEATS, RUNS, SEED, CHECKED = 3, 5, 1, 4
KEPT = 10**6  # tensors of a checked model: all of them
PREPARING = 3  # models at once, ahead of the one that runs
PREDICTIONS = HERE / "predictions.json"


def tokens(vocab: int, count: int) -> list[int]:
    return [(7 + 13 * at) % vocab for at in range(count)]


Prepared = tuple[Weights, NDArray[Any]]


def prepared(plan: Plan) -> Prepared:
    """A small model's weights, all kept, and the reference's logits."""
    assert plan.spec is not None
    weights = random_weights(plan.spec, SEED, plan.options.weight_dtype, keep=KEPT)
    return weights, reference_logits(plan, weights, tokens(plan.spec.vocab, CHECKED))


def checked(node: Node, plan: Plan, made: Prepared) -> dict[str, Any]:
    """The largest difference of logits from the reference, relative; whether runs are equal."""
    assert plan.spec is not None
    weights, wanted = made
    prompt = tokens(plan.spec.vocab, CHECKED)
    with open_engine(node.device, plan, weights) as engine:
        difference = check_logits(engine, plan, weights, prompt, wanted)
        seen = set()
        for _ in range(RUNS):
            made = engine.generate(prompt, max_tokens=16).tokens
            logits = engine.logits(prompt)
            seen.add((tuple(made), hashlib.sha256(logits.tobytes()).hexdigest()))
    return {"logit_difference": difference, "bitwise_equal": len(seen) == 1}


def timed(node: Node, plan: Plan, prompt: int) -> dict[str, Any]:
    """Tokens/s of the median step of each repeat. The prompt is read once: repeats find its keys
    and values, and must give the tokens of the first run, which is not timed.
    """
    assert plan.spec is not None
    read = tokens(plan.spec.vocab, prompt)
    with open_random(node.device, plan, SEED) as engine:
        first = engine.generate(read, max_tokens=TOKENS)
        runs = [engine.generate(read, max_tokens=TOKENS, reuse=True) for _ in range(REPEATS)]
    if any(run.tokens != first.tokens for run in runs):
        return {"failed": "the runs gave different tokens"}
    samples = [1e9 / float(statistics.median(run.step_ns[WARM_UP:])) for run in runs]
    bytes_ = plan.bytes_per_step()
    return {
        "tokens_per_s": statistics.median(samples),
        "samples": samples,
        "bytes": bytes_,
        "prompt_s": first.prompt_ns * 1e-9,
    }


def plans_of(name: str, node: Node) -> dict[str, Plan]:
    """By what they are for. Raises TwinError where the node has no room."""
    spec = spec_of(name)
    made = {"check": checked_plan(spec, node)}
    return made | {str(prompt): timed_plan(spec, node, prompt) for prompt in PROMPTS}


def measured(
    node: Node, plans: dict[str, Plan], refused: dict[str, str], ready: Future[Prepared]
) -> dict[str, Any]:
    """What a row's plans give; a refusal is a finding."""
    found: dict[str, Any] = {}
    for what, plan in plans.items():
        try:
            if what in refused:
                found[what] = {"failed": refused[what]}
            elif what == "check":
                found[what] = checked(node, plan, ready.result())
            else:
                found[what] = timed(node, plan, int(what))
        except TwinError as error:
            found[what] = {"failed": str(error)}
    return found


def told(node: Node, rows: dict[str, Any]) -> list[str]:
    """A line for each cell: measured beside predicted."""
    kept = json.loads(PREDICTIONS.read_text(encoding="utf-8"))["rows"]
    lines = []
    for name, found in rows.items():
        check = found.get("check", {})
        for prompt in map(str, PROMPTS):
            speed = found.get(prompt, {}).get("tokens_per_s")
            said = kept.get(name, {}).get(node.name, {}).get(prompt, {})
            guess = (
                f"{said['p50']:,.0f} ({said['p10']:,.0f}-{said['p90']:,.0f})"
                if "p50" in said
                else "-"
            )
            got = (
                f"{speed:,.0f}" if speed else str(found.get(prompt, found).get("failed", "not run"))
            )
            lines.append(f"{name}, after {prompt}: {got} tokens/s, predicted {guess}; {check}")
    return lines


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="studies/few-bits/run.sh", description=__doc__)
    parser.add_argument("node", help="1xh200 or 1xh100")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    args = parser.parse_args(words)
    node = calibrated_node(args.node)
    check_runs_here(node)
    run_rows(node, args.out, lambda said: print(said, file=sys.stderr, flush=True))


def run_rows(node: Node, out: Path, show: Callable[[str], None]) -> None:
    """All rows that are not in the file yet, their kernels compiled first."""
    began = time.monotonic()
    kept = json.loads(out.read_text(encoding="utf-8"))["rows"] if out.is_file() else {}
    plans: dict[str, dict[str, Plan]] = {}
    for name in (row.name for row in ROWS if row.name not in kept):
        try:
            plans[name] = plans_of(name, node)
        except TwinError as error:
            kept[name] = {"failed": str(error)}
    each = [(name, what, plan) for name, of in plans.items() for what, plan in of.items()]
    refused = compile_all(node.device, [plan for *_, plan in each], show)
    ahead = made_ahead(prepared, [of["check"] for of in plans.values()], PREPARING)
    for (name, of), (_, ready) in zip(plans.items(), ahead, strict=True):
        failed = {
            what: refused[at]
            for at, (row, what, _) in enumerate(each)
            if row == name and at in refused
        }
        kept[name] = measured(node, of, failed, ready)
        show(f"{time.monotonic() - began:5.0f} s  {name}: {kept[name]}")
        made = {"node": node.name, "conditions": gpu_conditions(), "rows": kept}
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    print("\n".join(told(node, kept)))


if __name__ == "__main__":
    main()
