"""Times variants of the kernel on one H200: plans by option, sources by patch; see README.md.

python studies/h200-tuning/tune.py OUT.json NAME... [--trace NAME...] [--patch LABEL=FILE:OLD=>NEW]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "studies" / "h200-first-run"))

MODELS = {"llama": ("llama-3.2-1b", 132), "lane": ("laneformer-2b", 128), "qwen8": ("qwen3-8b", 132), "qwen2": ("qwen2-0.5b", 132)}


def plan_of(text: str) -> Any:
    """`llama,slot_bytes=8192,splits=4,blocks=132,handoff=grid`: a model's plan with a ring that fills the block."""
    from first_run import H200, TOKENS, fitted

    from twin.calibrate.gpu_heldout import qwen2_half
    from twin.models.load import load_model
    from twin.models.spec import DType
    from twin.plan.build import build
    from twin.plan.types import CollectiveKind, Execution, HandOffKind, LateParts, Options

    if text.startswith("probe:"):
        from twin.calibrate.gpu_probes import gpu_probes

        return next(probe.plan for probe in gpu_probes(H200, quick=False) if probe.name == text[6:])
    key, *chosen = text.split(",")
    name, blocks = MODELS[key]
    spec = qwen2_half() if key == "qwen2" else load_model(name)
    dtype = DType.FP16 if spec.lanes else DType.BF16
    options: dict[str, Any] = {
        "blocks": blocks, "weight_dtype": dtype, "kv_dtype": dtype, "context": 32 + TOKENS // 2,
        "collective": CollectiveKind.PUSH if spec.lanes else CollectiveKind.NONE,
    }  # fmt: skip
    slot = 16384
    slots = window = None
    for item in chosen:
        field, value = item.split("=")
        if field == "slot_bytes":
            slot = int(value)
        elif field == "ring_slots":
            slots = int(value)
        elif field == "window_slots":
            window = int(value)
        elif field == "splits":
            options["attention_splits"] = int(value)
        elif field == "handoff":
            options["handoff"] = HandOffKind(value)
        elif field == "execution":
            options["execution"] = Execution(value)
        elif field == "late_parts":
            options["late_parts"] = LateParts(value)
        else:
            options[field] = int(value)
    options.setdefault("max_context", int(options["context"]) + 512)

    def make(**ring: int) -> Any:
        return build(spec, Options(**options, **ring), H200)

    if slots:
        return make(slot_bytes=slot, ring_slots=slots, window_slots=window or slots)
    most = fitted(make, slot).options.ring_slots
    return make(slot_bytes=slot, ring_slots=most, window_slots=min(window or most, most))


def measure(names: list[str], traced: list[str]) -> list[dict[str, Any]]:
    from first_run import Case, measure_model, measure_probe, trace_of

    from twin.engine.cuda_build import compile_cubin

    plans = {name: plan_of(name) for name in [*names, *traced]}
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda name: compile_cubin(plans[name]), names))
        list(pool.map(lambda name: compile_cubin(plans[name], trace=True), traced))
    rows = []
    for name in names:
        plan = plans[name]
        if plan.spec is None:
            made = measure_probe(Case("probe", name, plan, 0, tokens=60))
            rows.append({"name": name, "step_us": made["step_s"] * 1e6})
            print(f"{name:60s} {made['step_s'] * 1e6:8.2f} us", flush=True)
            continue
        prompt = max(8, plan.options.context - 160)
        made = measure_model(Case("model", name, plan, prompt))
        gone = plan.bytes_per_step() / made["step_s"] / 1e12
        micro = {key: made[f"{key}_s"] * 1e6 for key in ("step", "p5", "p95")}
        found = {"tb_s": gone, "same": made["same_tokens"], "tokens": made["tokens"], "registers": made["registers"]}
        rows.append({"name": name, **micro, **found, "slots": plan.options.ring_slots})
        spread = f"p5 {micro['p5']:7.1f} p95 {micro['p95']:7.1f}"
        same = f"same {made['same_tokens']} {made['tokens'][:4]} slots {plan.options.ring_slots}"
        print(f"{name:60s} {micro['step']:8.1f} us  {gone:5.2f} TB/s {gone / 4.61:4.0%}  {spread}  {same}", flush=True)
    for name in traced:
        found = trace_of(Case("model", name, plans[name], 32))
        rows.append({"name": name, "trace": found})
        print("trace", name)
        for kind, numbers in found.items():
            print("   ", kind, numbers, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--trace", action="append", default=[])
    parser.add_argument(
        "--patch", action="append", default=[], help="LABEL=FILE:OLD=>NEW; the names run once more with the patched sources"
    )
    args = parser.parse_args()
    if not args.patch:
        args.out.write_text(json.dumps(measure(args.names, args.trace), indent=1) + "\n")
        return
    commands = []
    for patch in args.patch:
        label, rest = patch.split("=", 1)
        tree = Path(tempfile.mkdtemp()) / label
        shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".git", ".venv", "out"))
        for one in rest.split(";;"):
            file, change = one.split(":", 1)
            old, new = change.split("=>", 1)
            source = tree / "native" / file
            text = source.read_text()
            if old not in text:
                raise SystemExit(f"{label}: {file} does not contain {old!r}")
            source.write_text(text.replace(old, new))
        command = [sys.executable, str(tree / "studies/h200-tuning/tune.py"), str(args.out) + f".{label}", *args.names]
        commands.append((label, command, tree))
    for label, command, tree in commands:
        print(f"--- {label}", flush=True)
        subprocess.run(command, cwd=tree, env={**os.environ, "PYTHONPATH": str(tree)}, check=False)


if __name__ == "__main__":
    main()
