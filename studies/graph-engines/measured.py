"""Writes measured.csv: engines measured end to end at low concurrency, as bundled with NVIDIA's
AIConfigurator (Apache-2.0).

    python studies/graph-engines/measured.py SAMPLE > studies/graph-engines/measured.csv

SAMPLE is aic/aiconfigurator_core/systems/silicon_sample.csv, unpacked as extract.py says.

Nothing that predicts was taken from these rows: they are whole servers under a constant number of
requests. Kept are plain tensor parallelism on H100 and H200, prompts of 1,024 tokens, at most eight
requests, and models whose attention has grouped queries. The context is the one halfway through the
answer.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pandas as pd

MODELS = {
    "openai/gpt-oss-120b": ("gpt-oss-120b", "as stored", "bf16"),
    "deepseek-ai/DeepSeek-V3": ("deepseek-v3", "as stored", "bf16"),
    "deepseek-ai/DeepSeek-R1": ("deepseek-v3", "as stored", "bf16"),  # the same configuration
    "moonshotai/Kimi-K2.5": ("kimi-k2.6", "as stored", "bf16"),  # the same text model
    "meta-llama/Llama-3.1-70B": ("llama-3.1-70b", "fp8", "fp8"),
    "meta-llama/Llama-3.1-8B": ("llama-3.1-8b", "as stored", "bf16"),
    "meta-llama/Llama-3.1-8B-Instruct": ("llama-3.1-8b", "as stored", "bf16"),
}
DEVICES = {"h100_sxm": "h100-sxm", "h200_sxm": "h200-sxm"}
UNDATED = "date not recorded"
MOST_REQUESTS = 8


def main(sample: Path) -> None:
    frame = pd.read_csv(sample)
    plain = (
        (frame["mode"] == "agg")
        & frame.attention_dp_size.isin((1, float("nan")))
        & (frame.moe_ep_size.fillna(1) == 1)
    )
    small = (
        (frame.batch_size <= MOST_REQUESTS)
        & (frame.isl == 1024)
        & (frame.tp_size <= 8)
        & (frame.pp_size.fillna(1) == 1)
    )
    kept = frame[plain & small & frame.model_path.isin(MODELS) & frame.system.isin(DEVICES)]
    lines = sorted({_line(row) for row in kept.itertuples()})
    dated = {_setting(line) for line in lines if UNDATED not in line}
    # the others are rounded copies
    lines = [line for line in lines if UNDATED not in line or _setting(line) not in dated]
    print("model,node,stack,weights,kv,sequences,context,ms,source")
    print("\n".join(lines))


def _setting(line: str) -> tuple[str, ...]:
    return tuple(line.split(",")[:7])


def _line(row: object) -> str:
    get = row.__getattribute__
    model, weights, kv = MODELS[get("model_path")]
    if model == "llama-3.1-8b" and get("backend") == "vllm":
        weights = "fp8"
    version = (
        get("backend_version")
        if isinstance(get("backend_version"), str)
        else "version not recorded"
    )
    when = next(
        (
            part.split("=")[1][:10]
            for part in get("silicon_data_source").split("; ")
            if part.startswith("measured=")
        ),
        "date not recorded",
    )
    context = int(get("isl") + get("osl") / 2)
    node = f"{int(get('tp_size'))}x{DEVICES[get('system')]}"
    source = f"AIConfigurator sample: {version} {when}; in {int(get('isl'))} out {int(get('osl'))}"
    batch, tpot_ms = int(get("batch_size")), f"{get('silicon_tpot_ms'):.3f}"
    return ",".join(
        map(str, (model, node, get("backend"), weights, kv, batch, context, tpot_ms, source))
    )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
