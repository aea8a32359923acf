"""Two trees of MonoTwin in turn on one GPU: `python studies/filled-splits/measure.py NODE --base
FOLDER --out FILE`.

FOLDER holds the other tree, the package `twin` with its data beside it. This tree's small models
are compared with the NumPy reference first, at each position. Then both trees time the same models,
one after the other, round after round. `--predict` asks both trees' twins instead and needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TOKENS, WARM_UP, ROUNDS = 64, 8, 3
LONG = 200  # positions of a small model that are compared
SEED = 1


# ---- what is asked -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Row:
    model: str
    room: int  # positions
    contexts: tuple[int, ...]


ROWS = (
    Row("llama-3.2-1b", 432, (32, 300)),
    Row("llama-3.2-1b", 1024, (300, 900)),
    Row("llama-3.2-1b", 8192, (32, 300, 900, 1500, 4000)),
    Row("llama-3.1-8b", 432, (32, 300)),
    Row("llama-3.1-8b", 8192, (32, 300, 1500)),
    Row("qwen2.5-0.5b", 432, (32, 300)),
    Row("gemma-3-1b", 432, (32, 300)),
    Row("gemma-3-1b", 8192, (300, 1500)),
    Row("attention 512 wide", 432, (32, 300)),
)


def specs() -> dict[str, Any]:
    """By name; the last one has an output projection of 512 columns."""
    from twin.models.load import load_model

    sys.path.insert(0, str(ROOT / "studies" / "zoo"))
    from shapes import shapes

    llama = load_model("llama-3.2-1b")
    narrow = replace(
        llama, name="narrow", layers=16, hidden=3072, heads=8, kv_heads=8, head_dim=64, ffn=8192
    )
    found = {name: load_model(name) for name in ("llama-3.2-1b", "llama-3.1-8b", "gemma-3-1b")}
    found["qwen2.5-0.5b"] = next(spec for spec in shapes() if spec.name == "qwen2.5-0.5b")
    return found | {"attention 512 wide": narrow}


def small(spec: Any, heads: int) -> Any:
    """Layers of the same heads that a NumPy reference computes position by position."""
    kv_heads = max(1, heads * spec.kv_heads // spec.heads)
    windows = (0, 48) if any(spec.windows) else (0, 0)
    return replace(
        spec, layers=2, hidden=512, ffn=1024, vocab=1056, heads=heads, kv_heads=kv_heads,
        windows=windows,
    )  # fmt: skip


# name, model, heads, options: where splits fill, how a prompt is read
CHECKS = (
    ("heads of 64, splits of 16", "llama-3.2-1b", 16, {"split_positions": 16}),
    ("the same, in steps", "llama-3.2-1b", 16, {"split_positions": 16, "prompt_chunk": 1}),
    ("all splits at once", "llama-3.2-1b", 16, {"split_positions": 0}),
    ("heads of 128", "llama-3.1-8b", 8, {"split_positions": 32}),
    ("heads of 256, windows", "gemma-3-1b", 4, {"split_positions": 16}),
    ("biases, seven query heads", "qwen2.5-0.5b", 14, {"split_positions": 16}),
    ("attention 512 wide", "attention 512 wide", 8, {"split_positions": 16}),
)


def timed_plan(spec: Any, node: Any, row: Row, context: int) -> Any:
    from twin.kernel.defaults import plan_for

    return plan_for(spec, node, context=context, max_context=row.room)


def checked_plans(found: dict[str, Any], node: Any) -> Iterator[tuple[str, Any]]:
    from twin.kernel.defaults import plan_for

    for name, model, heads, options in CHECKS:
        spec = small(found[model], heads)
        sizes = {"context": LONG // 2, "max_context": 2 * LONG, "attention_splits": 12}
        if node.device.nvidia or options["split_positions"] == 0:
            yield name, plan_for(spec, node, **sizes, **options)


# ---- a tree's side -------------------------------------------------------------------------------


class Worker:
    """Does what it is told, by a tree's own package."""

    def __init__(self, node: str, shrunk: bool) -> None:
        from twin.calibrate.node import calibrated_node
        from twin.hardware.load import load_node

        self.node = load_node(node) if shrunk else calibrated_node(node)
        self.specs = specs()
        if shrunk:
            self.specs = {name: small(spec, 14 if "qwen" in name else 8)
                          for name, spec in self.specs.items()}  # fmt: skip
        self.stack, self.engine = ExitStack(), None

    def plan(self, row: int, context: int = 128) -> Any:
        asked = ROWS[row]
        return timed_plan(self.specs[asked.model], self.node, asked, context)

    def compile(self, checks: bool, rows: Sequence[int]) -> dict[str, Any]:
        from twin.engine.choose import compile_all
        from twin.proof.prove import prove

        plans = [self.plan(row) for row in rows]
        if checks:
            plans += [plan for _, plan in checked_plans(self.specs, self.node)]
        for plan in plans:
            prove(plan)
        refused = compile_all(self.node.device, plans, lambda said: None)
        if refused:
            raise SystemExit(f"refused: {refused}")
        own = [plan.kernel_attention() for plan in plans]
        return {"splits": [each.splits for each in own]}

    def check(self) -> dict[str, float]:
        from twin.bench.rows import first_tokens, logit_difference, prepared

        made = {}
        for name, plan in checked_plans(self.specs, self.node):
            tokens = first_tokens(plan.spec.vocab, LONG)
            made[name] = logit_difference(self.node.device, prepared(plan, tokens, keep=10**6))
            print(f"{name}: logits within {made[name]:.1e}", file=sys.stderr, flush=True)
        return made

    def open(self, row: int) -> dict[str, Any]:
        from twin.engine.choose import open_random

        self.stack = ExitStack()
        self.engine = self.stack.enter_context(open_random(self.node.device, self.plan(row), SEED))
        return {}

    def run(self, row: int, context: int) -> dict[str, Any]:
        from twin.bench.rows import first_tokens

        prompt = first_tokens(self.engine.plan.spec.vocab, context)
        made = self.engine.generate(prompt, max_tokens=TOKENS)
        return {
            "us": statistics.median(made.step_ns[WARM_UP:]) / 1e3,
            "prompt_us": made.prompt_ns / 1e3,
            "tokens": made.tokens,
        }

    def close(self) -> dict[str, Any]:
        self.stack.close()
        return {}

    def predict(self, row: int, context: int) -> dict[str, Any]:
        from twin.sim.run import simulate

        plan = self.plan(row, context + TOKENS // 2)
        return {"us": simulate(plan, self.node).step_s * 1e6}


def serve(node: str, shrunk: bool) -> None:
    worker, answers = Worker(node, shrunk), os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whoever prints does not answer
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(getattr(worker, asked.pop("do"))(**asked)), file=answers, flush=True)


# ---- both sides ----------------------------------------------------------------------------------


class Tree:
    def __init__(self, folder: Path, node: str, shrunk: bool) -> None:
        command = [sys.executable, str(Path(__file__).resolve()), node, "--serve"]
        self.process = subprocess.Popen(
            command + ["--shrunk"] * shrunk,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(folder.resolve())},
        )

    def tell(self, do: str, **asked: Any) -> None:
        assert self.process.stdin
        print(json.dumps({"do": do, **asked}), file=self.process.stdin, flush=True)

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            sys.exit("a tree's process has ended: see above")
        return dict(json.loads(line))

    def ask(self, do: str, **asked: Any) -> dict[str, Any]:
        self.tell(do, **asked)
        return self.answer()


def timed(trees: Sequence[Tree], row: int) -> dict[str, Any]:
    """Medians of each context, both trees in turn in every round."""
    for tree in trees:
        tree.ask("open", row=row)
    made: dict[str, Any] = {}
    for context in ROWS[row].contexts:
        runs: list[list[dict[str, Any]]] = [[] for _ in trees]
        for turn in range(ROUNDS + 1):  # the first is not timed
            for at in (0, 1) if turn % 2 else (1, 0):
                runs[at].append(trees[at].ask("run", row=row, context=context))
        for own in runs:
            if any(run["tokens"] != own[0]["tokens"] for run in own):
                sys.exit(f"{ROWS[row]}, {context} positions: runs gave other tokens")
        base, ours = ([run["us"] for run in own[1:]] for own in runs)
        prompts = [statistics.median(run["prompt_us"] for run in own[1:]) for own in runs]
        alike = [a == b for a, b in zip(runs[0][0]["tokens"], runs[1][0]["tokens"], strict=True)]
        made[str(context)] = {
            "base_us": base,
            "us": ours,
            "prompts_us": prompts,
            "same_tokens": sum(alike) / len(alike),
        }
    for tree in trees:
        tree.ask("close")
    return made


def table(rows: dict[str, Any], predicted: dict[str, Any]) -> Iterator[str]:
    yield (
        f"{'model':20} {'room':>5} {'context':>7} {'base us':>9} {'us':>9} {'change':>7} "
        f"{'told':>7} {'prompt':>7}  same tokens"
    )
    for row, asked in enumerate(ROWS):
        for context, made in rows.get(str(row), {}).items():
            base, ours = (statistics.median(made[name]) for name in ("base_us", "us"))
            told = predicted.get(str(row), {}).get(context)
            foretold = f"{told['us'] / told['base_us'] - 1:+7.1%}" if told else ""
            first, then = made["prompts_us"]
            yield (
                f"{asked.model:20} {asked.room:5} {context:>7} {base:9.1f} {ours:9.1f} "
                f"{ours / base - 1:+7.1%} {foretold:>7} {then / first - 1:+7.1%}  "
                f"{made['same_tokens']:.0%}"
            )


def predictions(trees: Sequence[Tree]) -> dict[str, Any]:
    return {
        str(row): {
            str(context): dict(
                zip(
                    ("base_us", "us"),
                    (tree.ask("predict", row=row, context=context)["us"] for tree in trees),
                    strict=True,
                )
            )
            for context in asked.contexts
        }
        for row, asked in enumerate(ROWS)
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("node")
    parser.add_argument("--base", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--predict", action="store_true")
    every = range(len(ROWS))
    parser.add_argument("--rows", type=int, nargs="+", choices=every, default=every, metavar="ROW")
    parser.add_argument("--shrunk", action="store_true", help="small stand-ins, to try this script")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        return serve(args.node, args.shrunk)
    began = time.monotonic()
    trees = [Tree(folder, args.node, args.shrunk) for folder in (args.base, ROOT)]
    if args.predict:
        args.out.write_text(json.dumps(predictions(trees), indent=1) + "\n", encoding="utf-8")
        return None
    for tree, checks in zip(trees, (False, True), strict=True):
        tree.tell("compile", checks=checks, rows=args.rows)
    splits = [tree.answer()["splits"] for tree in trees]
    print(f"{time.monotonic() - began:4.0f} s  compiled; splits {splits}", flush=True)
    made: dict[str, Any] = {"node": args.node, "checks": trees[1].ask("check"), "rows": {}}
    print(f"{time.monotonic() - began:4.0f} s  checked", made["checks"], flush=True)
    file = Path(__file__).with_name("predictions.json")
    told = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    for row in args.rows:
        made["rows"][str(row)] = timed(trees, row)
        print(f"{time.monotonic() - began:4.0f} s  {ROWS[row].model}, {ROWS[row].room}", flush=True)
        if args.out:
            args.out.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    print(*table(made["rows"], told), sep="\n")


if __name__ == "__main__":
    main()
