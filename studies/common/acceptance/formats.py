"""Models with low-bit weights or experts for what a GPU has to show next to its speed: small ones
of every format and family, and the public ones whose runs repeat bit by bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from studies.common.acceptance.runs import LOGIT_POSITIONS, Failed, repeated_bits, soaked
from studies.common.rows import SEED
from studies.common.shapes import FEW, Bench, cpu_plan, prompt_of
from twin.bench import fidelity
from twin.engine.choose import check_present, open_random
from twin.engine.safetensors import NUMPY
from twin.engine.session import Session
from twin.engine.weights import random_weights
from twin.errors import TwinError
from twin.files import csv_text, write
from twin.hardware.load import load_node
from twin.hardware.types import Node
from twin.models.formats import format_named
from twin.models.load import from_config, load_model
from twin.models.quantized import requantized
from twin.models.spec import DType, ModelSpec
from twin.plan.shards import Array, Weights
from twin.plan.types import Plan
from twin.proof.prove import prove
from twin.reference.step import Reference
from twin.schedule.coded_tiles import coded_slot_bytes
from twin.schedule.options import plan_for

DENSE = ("int8", "fp8", "fp8-128x128", "int4-g128", "int4-g32-zp", "mxfp4", "nvfp4")
MIXTURES = (
    ("mixtral", "bf16"),
    ("mixtral", "int8"),
    ("qwen3_moe", "fp8-128x128"),
    ("mixtral", "int4-g128"),
    ("gpt_oss", "mxfp4"),
    ("qwen3_moe", "nvfp4"),
)
PUBLIC = (
    "llama-3.2-1b@int8",
    "gpt-oss-20b",
    "qwen3-8b@int4-g128",
    "qwen3-30b-a3b@fp8-128x128",
    "llama-3.2-1b@nvfp4",
    "qwen3-8b@fp8-128x128",
    "mixtral-8x7b@int4-g128",
    "llama-3.2-1b@fp8",
)
GPUS = ("1xh200", "1xh100")  # that the kernel has run on
PROMPT, CONTEXT = 32, 1024
JUDGED, PROMPTS = 24, 2  # tokens of each timed output; outputs of a model
TIMED = PROMPT + JUDGED + 16  # positions of such a run, those that warm up among them
# nats: engines this close to the reference need no peer, as where 16 bits hold weights exactly
KL_NEAR = 1e-6


@dataclass(frozen=True, slots=True)
class Size:
    """Of small models; of experts the feed-forward is one expert's width."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int


TINY = Size(2, 128, 4, 2, 32, 256, 320)  # to be watched by a tool, or run by a CPU
SMALL = Size(2, 1024, 16, 4, 64, 1536, 4096)


def small_specs(size: Size) -> list[ModelSpec]:
    """One of each format, then one of each mixture."""
    dense = from_config(_config("llama", size), "dense")
    specs = [
        replace(requantized(dense, format_named(name)), name=f"dense {name}") for name in DENSE
    ]
    for family, name in MIXTURES:
        spec = from_config(_config(family, size), family)
        made = spec if name == "bf16" else requantized(spec, format_named(name))
        specs.append(replace(made, name=f"{family} {name}"))
    return specs


def _config(family: str, size: Size) -> dict[str, Any]:
    config: dict[str, Any] = {
        "model_type": family,
        "num_hidden_layers": size.layers,
        "hidden_size": size.hidden,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "head_dim": size.head_dim,
        "intermediate_size": size.ffn,
        "vocab_size": size.vocab,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "rope_theta": 500_000.0,
    }
    if family == "llama":
        return config
    config |= {"num_experts_per_tok": 2}
    if family == "qwen3_moe":
        own = {"num_experts": 8, "moe_intermediate_size": size.ffn, "norm_topk_prob": True}
        return {**config, **own, "mlp_only_layers": []}
    config |= {"num_local_experts": 8}
    if family == "gpt_oss":
        kinds = ["sliding_attention", "full_attention"] * size.layers
        config |= {"layer_types": kinds[: size.layers], "sliding_window": 128}
        config |= {"attention_bias": True, "swiglu_limit": 7.0}
        config |= {"rope_scaling": {"rope_type": "default"}}  # the class would have YaRN
    return config


def gpu_node() -> Node:
    """That of GPUS which this computer has; without any the first, to compile for."""
    nodes = [load_node(name) for name in GPUS]
    for node in nodes:
        try:
            check_present(node.device)
        except TwinError:
            continue
        return node
    return nodes[0]


def small_plan(bench: Bench, spec: ModelSpec, context: int = CONTEXT, **chosen: Any) -> Plan:
    """Proven; on a CPU with rings of few slots."""
    least = 2048 if bench.device == "host" else 16 << 10
    slot = coded_slot_bytes(spec.coded, least) if spec.coded else least
    wanted = {"slot_bytes": slot, "context": context // 2, "max_context": context}
    wanted |= {"prompt_chunk": 1, **chosen}  # by default without passes, which take long to compile
    made = (
        cpu_plan(spec, wanted) if bench.device == "host" else plan_for(spec, gpu_node(), **wanted)
    )
    prove(made)
    return made


def watched_plans(bench: Bench) -> list[Plan]:
    """Of a few blocks, for a tool that watches every load."""
    few = {**FEW, "slot_bytes": 4096, "prompt_chunk": 16}
    return [small_plan(bench, spec, 64, **few) for spec in small_specs(TINY)]


def open_small(bench: Bench, plan: Plan, weights: Weights | None = None) -> Session:
    if weights is None and bench.device != "host":
        return open_random(gpu_node().device, plan, SEED)
    return bench.engine(plan, weights=weights or random_weights(plan.spec, SEED))  # type: ignore[arg-type]


def run_specs(bench: Bench) -> list[ModelSpec]:
    """The small models that are judged and that run for long."""
    return small_specs(TINY if bench.device == "host" else SMALL)


def small_plans(bench: Bench, context: int) -> list[Plan]:
    return [small_plan(bench, spec, context) for spec in run_specs(bench)]


# ---- five runs, the same bits --------------------------------------------------------------------


def public_plans(bench: Bench, tokens: int) -> dict[str, Plan]:
    """By name; on a CPU small models in their place."""
    if bench.device == "host":
        return {
            spec.name: small_plan(bench, spec, PROMPT + tokens) for spec in small_specs(TINY)[6:9]
        }
    node = gpu_node()
    return {
        name: plan_for(load_model(name), node, context=PROMPT, max_context=PROMPT + tokens)
        for name in PUBLIC
    }


def repeats(bench: Bench, tokens: int) -> dict[str, Any]:
    """Five runs of `tokens` tokens of each public model, and five times the logits of the same
    tokens.
    """
    made = {}
    for name, plan in public_plans(bench, tokens).items():
        with open_small(bench, plan) as engine:
            positions = min(LOGIT_POSITIONS, plan.options.max_context)
            made[name] = repeated_bits(engine, plan, tokens, positions)
    return made


# ---- fidelity ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Rounded:
    """A low-bit model's weights as its 16-bit type holds them."""

    weights: Weights
    spec: ModelSpec  # the model in 16 bits

    @property
    def dtype(self) -> DType:
        return self.spec.dtype

    def __getitem__(self, name: str) -> Array:
        rounded: Array = np.asarray(self.weights[name]).astype(NUMPY[self.dtype])
        return rounded


def judged(bench: Bench, spec: ModelSpec) -> fidelity.Judged:
    """Timed outputs of one model: the engine next to the FP32 reference of the very codes. The peer
    is that reference with weights rounded to 16 bits.
    """
    plan = small_plan(bench, spec, TIMED)
    weights = random_weights(spec, SEED, plan.options.weight_dtype)
    plain = replace(spec, stored=None, name=f"{spec.name}, 16 bits")
    peer_plan = small_plan(bench, plain, TIMED)
    parts = []
    with open_small(bench, plan, weights) as engine:
        for number in range(PROMPTS):
            prompt = prompt_of(plan, PROMPT // 4, number)
            runs = [engine.generate(prompt, max_tokens=JUDGED) for _ in range(3)]
            if any(run.tokens != runs[0].tokens for run in runs):
                raise Failed(f"{spec.name}: timed repeats give different tokens")
            read = [*prompt, *runs[0].tokens[:-1]]
            wanted = _steps(Reference(plan, weights), read)[-JUDGED:]
            peer = _steps(Reference(peer_plan, Rounded(weights, plain)), read)[-JUDGED:]
            made = engine.logits(read)[-JUDGED:]
            parts.append(fidelity.judge(wanted, made, peer, runs[0].tokens))
    return fidelity.joined(parts)


def _steps(reference: Reference, tokens: Sequence[int]) -> fidelity.Logits:
    return np.array([reference.step(token) for token in tokens], np.float32)


def fidelities(bench: Bench, out: Path) -> dict[str, Any]:
    """Of the small models; a file of positions for each. Raises Failed behind the last."""
    made, wrong = {}, []
    for spec in run_specs(bench):
        found = judged(bench, spec)
        said = fidelity.summary(found)
        near = said["kl_engine"]["mean"] <= KL_NEAR
        made[spec.name] = said | {"kl_near": near}
        print(f"  {spec.name}: {made[spec.name]}", flush=True)
        rows = list(fidelity.rows(found, 0))
        heads = ("prompt", "position", *fidelity.Judged.__dataclass_fields__)
        write({out / f"fidelity-{spec.name.replace(' ', '-')}.csv": csv_text(heads, rows)})
        if not (said["kl_not_worse"] or near) or not said["greedy_agrees"]:
            wrong.append(spec.name)
    if wrong:
        raise Failed(f"farther from the reference than 16 bits: {', '.join(wrong)}")
    return made


# ---- soak ----------------------------------------------------------------------------------------


def soak(bench: Bench, tokens: int) -> dict[str, Any]:
    """So many tokens, shared by the small models; every run of a prompt gives its first tokens."""
    made, specs = {}, run_specs(bench)
    for spec in specs:
        plan = small_plan(bench, spec)
        with open_small(bench, plan) as engine:
            made[spec.name] = soaked(engine, plan, -(-tokens // len(specs)))
    return made
