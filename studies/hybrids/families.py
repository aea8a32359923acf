"""Small models of today's families. On this computer's GPU, or its cores, each makes a long
sequence, five equal runs and a judged sequence. This one is then compared with transformers in FP32
and in 16 bits, the first logits with the reference's: that names the choices of experts that
rounding decided.

    python -m studies.hybrids.families run FOLDER NODE TOKENS [NAME...]     1xh200-sxm 50000
    python -m studies.hybrids.families judge FOLDER    where torch and transformers are

Random weights in BF16, drawn from a seed, so that both sides have the same. `judge` writes
families.csv and choices.csv, of which page.py makes tables.
"""

from __future__ import annotations

import csv
import hashlib
import json
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

import numpy as np

from studies.common.rows import EQUAL_RUNS, KEPT, first_tokens
from twin.bench import fidelity
from twin.bench.choices import Agreement, agreement
from twin.bench.measure import LOGIT_TOLERANCE, reference_logits
from twin.calibrate.node import calibrated_node
from twin.engine import safetensors
from twin.engine.choose import compile_all, open_engine
from twin.engine.safetensors import NUMPY
from twin.engine.session import Session
from twin.engine.weights import RandomWeights, random_weights
from twin.errors import TwinError
from twin.files import write
from twin.models.load import checkpoint, from_config, stored
from twin.models.spec import DType
from twin.plan.types import Plan
from twin.schedule.options import plan_for

HERE = Path(__file__).resolve().parent
TABLE, CHOICES = HERE / "families.csv", HERE / "choices.csv"
SEED = 1
PROMPT, JUDGED = 200, 128  # tokens read at once, and greedy ones behind them
EQUAL_TOKENS = 200
CHECKED = 90  # first tokens, read one a step, whose logits are compared with the reference

SIZES: dict[str, Any] = {
    "vocab_size": 2048,
    "hidden_size": 512,
    "intermediate_size": 1056,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 65_536,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
THETA = {"rope_theta": 1e6}
ALPHA = {"rope_theta": 1e4, "rope_scaling": {"type": "dynamic", "alpha": 1000.0, "factor": 1.0}}
WINDOWS = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]


def _without(*names: str) -> dict[str, Any]:
    return {name: value for name, value in SIZES.items() if name not in names}


FAMILIES: Mapping[str, dict[str, Any]] = {
    "lfm2_moe": {
        **_without("rms_norm_eps", "head_dim"),
        **THETA,
        "layer_types": ["conv", "conv", "full_attention", "conv"],
        "moe_intermediate_size": 208,
        "num_dense_layers": 1,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "use_expert_bias": True,
        "norm_topk_prob": True,
        "conv_L_cache": 3,
        "norm_eps": 1e-5,
    },
    "qwen3_5_moe_text": {
        **SIZES,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "mrope_interleaved": True,
            "mrope_section": [4, 2, 2],
        },
        "linear_num_key_heads": 8,
        "linear_key_head_dim": 64,
        "linear_num_value_heads": 16,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": 4,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 208,
        "shared_expert_intermediate_size": 208,
    },
    "gemma4_text": {  # heads as wide as the published ones
        **SIZES,
        "vocab_size": 4096,
        "hidden_size": 1024,
        "intermediate_size": 528,
        "num_hidden_layers": 6,
        "num_key_value_heads": 4,
        "num_global_key_value_heads": 1,
        "head_dim": 256,
        "global_head_dim": 512,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
        "sliding_window": 64,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
        "hidden_activation": "gelu_pytorch_tanh",
        "final_logit_softcapping": 30.0,
        "rms_norm_eps": 1e-6,
        "enable_moe_block": True,
        "num_experts": 12,
        "top_k_experts": 4,
        "moe_intermediate_size": 176,
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": 0.25,
                "rope_theta": 1e6,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "glm4_moe": {
        **SIZES,
        **THETA,
        "partial_rotary_factor": 0.5,
        "attention_bias": True,
        "use_qk_norm": False,
        "moe_intermediate_size": 208,
        "n_routed_experts": 16,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
    },
    "minimax_m2": {
        **SIZES,
        **THETA,
        "rotary_dim": 32,
        "intermediate_size": 208,
        "num_local_experts": 16,
        "num_experts_per_tok": 4,
    },
    "seed_oss": {**SIZES, **THETA},
    "olmo3": {
        **_without("head_dim"),
        "rope_theta": 5e5,
        "sliding_window": 128,
        "layer_types": WINDOWS,
    },
    "exaone4": {
        **SIZES,
        **THETA,
        "sliding_window": 128,
        "sliding_window_pattern": 4,
        "layer_types": WINDOWS,
    },
    "ernie4_5": {**SIZES, **THETA},
    "ernie4_5_moe": {
        **SIZES,
        **THETA,
        "moe_intermediate_size": 208,
        "moe_num_experts": 16,
        "moe_num_shared_experts": 1,
        "moe_k": 4,
        "moe_layer_start_index": 1,
        "moe_layer_end_index": -1,
    },
    "hunyuan_v1_dense": {**SIZES, **ALPHA},
    "hunyuan_v1_moe": {
        **SIZES,
        **ALPHA,
        "intermediate_size": 208,
        "num_experts": 16,
        "moe_topk": 4,
    },
    "granitemoehybrid": {  # states make more outputs than heads
        **SIZES,
        "intermediate_size": 208,
        "shared_intermediate_size": 416,
        "num_local_experts": 16,
        "num_experts_per_tok": 4,
        "position_embedding_type": "nope",
        "layer_types": ["mamba", "mamba", "attention", "mamba"],
        "mamba_n_heads": 16,
        "mamba_n_groups": 1,
        "mamba_d_state": 128,
        "mamba_d_head": 64,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "attention_multiplier": 0.015625,
        "logits_scaling": 6.0,
    },
}

HEAD = (
    *("family", "node", "tokens_soaked", "equal_runs", "kl_engine", "kl_transformers", "not_worse"),
    *("decided", "mismatches", "positions", "difference", "unfollowed", "choices"),
)
CHOICES_HEAD = (
    "family",
    "node",
    "token",
    "layer",
    "instead",
    "expert",
    "margin",
    "before",
    "after",
)


def plan_of(name: str, node: str, soak: int) -> Plan:
    spec = from_config({"model_type": name, **FAMILIES[name]}, name)
    room = PROMPT + max(soak, JUDGED) + 8
    return plan_for(spec, calibrated_node(node), context=PROMPT + JUDGED, max_context=room)


def weights_of(plan: Plan) -> RandomWeights:
    assert plan.spec is not None
    return random_weights(plan.spec, SEED, DType.BF16, keep=KEPT)


# ---- on a GPU ------------------------------------------------------------------------------------


def run(folder: Path, node: str, soak: int, names: Sequence[str]) -> None:
    """FOLDER/NAME.npz and what was seen of the runs, FOLDER/runs.json."""
    device = calibrated_node(node).device
    plans = {name: plan_of(name, node, soak) for name in names}
    refused = compile_all(device, list(plans.values()), lambda said: None)
    seen: dict[str, Any] = {}
    for at, (name, plan) in enumerate(plans.items()):
        start = time.monotonic()
        try:
            if at in refused:
                raise TwinError(refused[at])
            with open_engine(device, plan, weights_of(plan)) as engine:
                made = _one(engine, plan, soak, folder / f"{name}.npz")
            seen[name] = {"node": node, **made}
        except TwinError as error:
            seen[name] = {"failed": str(error)}
        print(name, seen[name], f"{time.monotonic() - start:.1f} s", flush=True)
        write({folder / "runs.json": json.dumps(seen, indent=1) + "\n"})


def _one(engine: Session, plan: Plan, soak: int, file: Path) -> dict[str, Any]:
    assert plan.spec is not None
    words = first_tokens(plan.spec.vocab, PROMPT)
    runs = [engine.generate(words, max_tokens=EQUAL_TOKENS).tokens for _ in range(EQUAL_RUNS)]
    made = runs[0][:JUDGED]
    judged = [*words, *made]
    logits = [engine.logits(judged[PROMPT - 1 : -1], after=words[:-1]) for _ in range(EQUAL_RUNS)]
    equal = len({hashlib.sha256(one.tobytes()).hexdigest() for one in logits}) == 1
    soaked = engine.generate(words, max_tokens=soak)
    np.savez(file, tokens=judged, logits=logits[0], first=engine.logits(words[:CHECKED]))
    return {
        "tokens_soaked": len(soaked.tokens),
        "equal_runs": EQUAL_RUNS if equal and all(one == runs[0] for one in runs) else 0,
        # the long sequence begins as the short ones do
        "soak_begins_alike": soaked.tokens[:EQUAL_TOKENS] == runs[0],
    }


# ---- next to transformers ------------------------------------------------------------------------


def judge(folder: Path) -> None:
    """TABLE and CHOICES, of all families that ran; rows of other nodes stay."""
    rows: list[tuple[Any, ...]] = []
    choices: list[tuple[Any, ...]] = []
    for name, seen in json.loads((folder / "runs.json").read_text(encoding="utf-8")).items():
        if "failed" in seen:
            print(name, seen["failed"], flush=True)
            continue
        made = np.load(folder / f"{name}.npz")
        plan = plan_of(name, seen["node"], seen["tokens_soaked"])
        found, compared = _judged(name, plan, made), _compared(plan, made)
        print(name, found, compared, flush=True)
        rows.append(
            (
                name,
                seen["node"],
                seen["tokens_soaked"] if seen["soak_begins_alike"] else 0,
                seen["equal_runs"],
                found["kl_engine"]["mean"],
                found["kl_peer"]["mean"],
                found["kl_not_worse"],
                found["decided_positions"],
                found["decided_mismatches"],
                found["positions"],
                compared.difference,
                compared.unfollowed,
                len(compared.followed),
            )
        )
        choices += [(name, seen["node"], *astuple(one)) for one in compared.followed]
    ran = {row[:2] for row in rows}
    for table, head, lines in ((TABLE, HEAD, rows), (CHOICES, CHOICES_HEAD, choices)):
        kept = [row for row in _lines(table)[1:] if row[:2] not in ran]
        with table.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([head, *kept, *lines])


def _lines(table: Path) -> list[tuple[str, ...]]:
    """Of a file that may not be there yet, its head first."""
    if not table.exists():
        return []
    with table.open(encoding="utf-8", newline="") as file:
        return [tuple(row) for row in csv.reader(file)]


def _compared(plan: Plan, made: Mapping[str, Any]) -> Agreement:
    """The first logits with those of the NumPy reference."""
    words = [int(token) for token in made["tokens"][:CHECKED]]
    weights, found = weights_of(plan), made["first"]
    wanted = reference_logits(plan, weights, words)
    return agreement(plan, weights, words, found, wanted, beyond=LOGIT_TOLERANCE / 2)


def _judged(name: str, plan: Plan, made: Mapping[str, Any]) -> dict[str, Any]:
    tokens = [int(token) for token in made["tokens"]]
    with tempfile.TemporaryDirectory() as folder:
        _save(Path(folder), name, plan)
        exact, half = (_followed(folder, dtype, tokens) for dtype in ("float32", "bfloat16"))
    return fidelity.summary(fidelity.judge(exact, made["logits"], half, tokens[PROMPT:]))


def _save(folder: Path, name: str, plan: Plan) -> None:
    """A checkpoint that transformers opens."""
    weights = weights_of(plan)
    arrays = {
        tensor.name: np.asarray(stored(weights.spec, names, weights))
        .astype(NUMPY[DType.BF16])
        .reshape(tensor.shape)
        for tensor, names in checkpoint(weights.spec).items()
    }
    safetensors.write(folder / "model.safetensors", arrays)
    config = {"model_type": name, **FAMILIES[name]}
    write({folder / "config.json": json.dumps(config) + "\n"})


def _followed(folder: str, dtype: str, tokens: Sequence[int]) -> Any:
    """[JUDGED, vocab] after each of the judged tokens' predecessors."""
    import torch
    import transformers

    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=dtype
    )
    model.eval()
    with torch.no_grad():
        made = model(torch.tensor([tokens[:-1]])).logits[0, PROMPT - 1 :]
    return made.float().numpy()


def main() -> None:
    what, folder, *more = sys.argv[1:]
    if what == "judge":
        return judge(Path(folder))
    node, soak, *names = more
    run(Path(folder), node, int(soak), names or list(FAMILIES))


if __name__ == "__main__":
    main()
