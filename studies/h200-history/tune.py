"""Times a step of variants on a GPU, plans by option and sources by patch; see README.md:

python studies/h200-history/tune.py OUT.json MODEL[,OPTION=VALUE...]... [--node 1xh200]
    [--patch LABEL=FILE:OLD=>NEW]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from studies.common.rows import alike, first_tokens, repeated, step_ns
from twin.engine.choose import compile_all
from twin.hardware.load import load_node
from twin.hardware.types import Node
from twin.models.load import load_model
from twin.plan.types import Plan
from twin.proof.prove import prove
from twin.schedule.options import plan_for
from twin.study.options import option_name, option_value

ROOT = Path(__file__).resolve().parents[2]
PROMPT, TOKENS, WARM_UP = 32, 320, 8


def plan_of(text: str, node: Node) -> Plan:
    """`llama-3.2-1b@int8,slot_bytes=8192,attention_splits=4`: what is not named is the default.
    Prompts are read by steps.
    """
    model, *words = text.split(",")
    chosen: dict[str, Any] = {
        "context": PROMPT + TOKENS // 2,
        "max_context": PROMPT + TOKENS,
        "prompt_chunk": 1,
    }
    for name, _, value in (word.partition("=") for word in words):
        if (option := option_name(name)) is None:
            raise SystemExit(f"{text}: no option {name}; see `twin plan --help`")
        chosen[option] = option_value(option, value)
    plan = plan_for(load_model(model), node, **chosen)
    prove(plan)
    return plan


def measure(names: list[str], node: Node) -> dict[str, dict[str, Any]]:
    plans = {name: plan_of(name, node) for name in names}
    refused = compile_all(node.device, list(plans.values()), print)
    found: dict[str, dict[str, Any]] = {}
    for at, (name, plan) in enumerate(plans.items()):
        if at in refused:
            found[name] = {"refused": refused[at]}
            continue
        assert plan.spec is not None
        prompt = first_tokens(plan.spec.vocab, PROMPT)
        runs = repeated(node.device, plan, prompt, TOKENS)
        steps_us = [step_ns(run, WARM_UP) / 1e3 for run in runs[1:]]
        found[name] = {
            "step_us": statistics.median(steps_us),
            "samples_us": steps_us,
            "bytes_per_step": plan.bytes_per_step(),
            "same_tokens": alike(runs),
            "slots": plan.options.ring_slots,
        }
        print(f"{name:60s} {found[name]['step_us']:8.1f} us", flush=True)
    return found


def measure_patched(patch: str, words: list[str]) -> None:
    """This script's own run in a copy of the sources."""
    label, _, rest = patch.partition("=")
    file, _, change = rest.partition(":")
    old, _, new = change.partition("=>")
    tree = Path(tempfile.mkdtemp()) / label
    shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".git", ".venv", "out"))
    source = tree / "native" / file
    text = source.read_text(encoding="utf-8")
    if text.count(old) != 1:
        raise SystemExit(f"{label}: {file} holds {old!r} {text.count(old)} times, not once")
    source.write_text(text.replace(old, new), encoding="utf-8")
    print(f"--- {label}", flush=True)
    command = [sys.executable, str(tree / "studies/h200-history/tune.py"), *words]
    subprocess.run(command, env={**os.environ, "PYTHONPATH": str(tree)}, check=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("names", nargs="+")
    parser.add_argument("--node", default="1xh200")
    parser.add_argument("--patch", action="append", default=[], help="LABEL=FILE:OLD=>NEW")
    args = parser.parse_args()
    found = measure(args.names, load_node(args.node))
    args.out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    for patch in args.patch:
        out = args.out.with_suffix(f".{patch.partition('=')[0]}.json").resolve()
        measure_patched(patch, [str(out), *args.names, "--node", args.node])


if __name__ == "__main__":
    main()
