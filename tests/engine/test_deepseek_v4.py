"""DeepSeek-V4's checkpoints as they are published: E4M3 in blocks with exponents, experts of four
bits in signed bytes, tables of experts, vectors in FP32.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from tests.engine.hf_cases import FAMILIES, Table, tokens
from tests.engine.hf_cases import plan as planned
from tests.refusals import refused
from twin.engine.host import HostEngine
from twin.engine.weights import open_checkpoint, random_weights
from twin.errors import CheckpointError
from twin.hardware.load import load_node
from twin.kernel.room import smallest_node
from twin.models.experts import CHOSEN
from twin.models.load import from_config, load_model, tensors
from twin.models.spec import DType, ModelSpec
from twin.plan.catalogue import StageKind
from twin.plan.options import Common, Sampling
from twin.plan.types import Plan
from twin.proof.prove import prove, violations
from twin.reference.step import Reference

CONFIG = FAMILIES["deepseek-v4"] | {
    "hidden_size": 128,
    "moe_intermediate_size": 64,
    "q_lora_rank": 48,
    "o_lora_rank": 24,  # of tiles that groups divide
    "torch_dtype": "bfloat16",
}
PUBLISHED = {
    "expert_dtype": "fp4",
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "scale_fmt": "ue8m0",
        "weight_block_size": [128, 128],
    },
}
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
EIGHT_BITS = ("q_a", "q_b", "kv", "o_a", "o", "index_q", "shared_gate", "shared_up", "shared_down")
FP32 = ("hyper", "sinks", "norm", "_bias")
Stored = dict[str, tuple[str, NDArray[Any]]]


def made(spec: ModelSpec) -> tuple[Stored, dict[str, NDArray[np.float32]]]:
    """A checkpoint's tensors by their names, and what they mean, word by word and not by the code
    that reads them.
    """
    random, chance = random_weights(spec, 4, DType.BF16), np.random.default_rng(5)
    stored: Stored = {}
    meant: dict[str, NDArray[np.float32]] = {}
    for name, tensor in tensors(spec).items():
        leaf, array = name.rpartition(".")[2], random[name]
        if leaf == CHOSEN:
            stored[tensor.name], meant[name] = ("I64", array.astype(np.int64)), array
        elif ".experts." in name:
            rows, cols = array.shape
            codes = chance.integers(16, size=array.shape, dtype=np.uint8)
            scales = chance.integers(119, 122, size=(rows, cols // 32), dtype=np.uint8)
            stored[tensor.name] = ("I8", codes[:, 0::2] | codes[:, 1::2] << 4)
            stored[tensor.name.replace("weight", "scale")] = ("F8_E8M0", scales)
            values = np.where(codes & 8, -1.0, 1.0) * np.take(E2M1, codes & 7)
            meant[name] = values * np.repeat(np.exp2(scales - 127.0), 32, axis=1)
        elif leaf in EIGHT_BITS:
            rows, cols = array.shape
            blocks = (-(-rows // 128), -(-cols // 128))
            scales = chance.integers(118, 121, size=blocks, dtype=np.uint8)
            wide = np.kron(np.exp2(scales - 127.0), np.ones((128, 128)))[:rows, :cols]
            codes = (array.astype(np.float32) / wide).astype(ml_dtypes.float8_e4m3fn)
            stored[tensor.name] = ("F8_E4M3", codes)
            stored[tensor.name.replace("weight", "scale")] = ("F8_E8M0", scales)
            meant[name] = codes.astype(np.float32) * wide
        elif any(part in leaf for part in FP32):
            meant[name] = array.astype(np.float32)
            stored[tensor.name] = ("F32", meant[name])
        else:
            stored[tensor.name], meant[name] = ("BF16", array), array
    return stored, {n: a if n.endswith(CHOSEN) else a.astype(np.float32) for n, a in meant.items()}


def write(folder: Path, stored: Stored) -> Path:
    (folder / "config.json").write_text(json.dumps(CONFIG | PUBLISHED))
    header, data = {}, b""
    for name, (kind, array) in stored.items():
        raw = np.ascontiguousarray(array).tobytes()
        offsets = [len(data), len(data) + len(raw)]
        header[name] = {"dtype": kind, "shape": array.shape, "data_offsets": offsets}
        data += raw
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    return folder


def plan_of(spec: ModelSpec, blocks: int = 3, **more: Any) -> Plan:
    made = planned(spec, 1, blocks, 2, 4, Sampling.FULL, kv_dtype=DType.FP32, **more)
    prove(made)
    return made


def test_the_published_layout_means_what_it_says(tmp_path: Path) -> None:
    plain = from_config(CONFIG, "plain")
    stored, meant = made(plain)
    prompt = tokens(CONFIG)
    reference = Reference(plan_of(plain, weight_dtype=DType.FP32), Table(plain, meant))
    wanted = np.stack([reference.step(token).copy() for token in prompt])
    opened = open_checkpoint(write(tmp_path, stored))
    plan = plan_of(opened.spec)
    kinds = {stage.kind for stage in plan.stages}
    assert {StageKind.COMPRESS, StageKind.SHARED_UP, StageKind.INDEX} <= kinds
    formats = {m.format.name for s in plan.stages for m in s.matrices if m.format}
    assert formats == {"fp8-128x128", "mxfp4"}
    computed = Reference(plan, opened.weights)
    found = np.stack([computed.step(token).copy() for token in prompt])
    assert np.abs(found - wanted).max() < 1e-4 * np.abs(wanted).max()
    with HostEngine(plan, opened.weights) as engine:
        logits = engine.logits(prompt)
        again = engine.logits(prompt)
    assert np.abs(logits - wanted).max() < 1e-4 * np.abs(wanted).max()
    assert np.array_equal(logits, again)


def test_layers_that_only_draft_are_left_out(tmp_path: Path) -> None:
    stored, _ = made(from_config(CONFIG, "plain"))
    stored["mtp.0.e_proj.weight"] = ("BF16", np.zeros((4, 4), ml_dtypes.bfloat16))
    assert open_checkpoint(write(tmp_path, stored)).spec.hyper is not None


def numbered(stored: Stored, row: list[int]) -> Stored:
    name = "layers.1.ffn.gate.tid2eid"
    table = stored[name][1].copy()
    table[7] = row
    return stored | {name: ("I64", table)}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda s: numbered(s, [0, 1, 8]), "names expert 8 of token 7; allowed: 0 to 7"),
        (lambda s: numbered(s, [0, 1, 1]), "names an expert twice for token 7"),
        (
            lambda s: s | {"layers.0.attn.wkv.scale": ("F32", np.ones((1, 1), np.float32))},
            "is F32 [1, 1], expected [1, 1] of F8_E8M0",
        ),
        (
            lambda s: s | {"layers.0.hc_attn_fn": ("BF16", np.zeros((24, 4), ml_dtypes.bfloat16))},
            "has shape [24, 4], expected [24, 512]",
        ),
    ],
)
def test_what_is_wrong_with_a_checkpoint_is_said(
    change: Callable[[Stored], Stored], said: str, tmp_path: Path
) -> None:
    stored, _ = made(from_config(CONFIG, "plain"))
    folder = write(tmp_path, change(stored))
    refused(CheckpointError, lambda: open_checkpoint(folder).weights[f"layers.1.{CHOSEN}"], said)


# ---- plans ---------------------------------------------------------------------------------------


def broken(plan: Plan, kind: StageKind, layer: int, **fields: Any) -> list[str]:
    """What the proof says of a stage with other fields."""
    stages = list(plan.stages)
    at = next(s for s in stages if s.kind is kind and s.layer == layer)
    stages[at.index] = replace(at, **fields)
    return [one.message for one in violations(replace(plan, stages=tuple(stages)))]


def test_faults_of_the_new_stages_are_found() -> None:
    plan = plan_of(from_config(CONFIG, "plain"))
    stages = {(s.kind, s.layer): s for s in plan.stages}
    # a mix of another layer's residuals
    mixed, other = (stages[StageKind.LATENT, layer] for layer in (1, 2))
    assert broken(plan, StageKind.LATENT, 1, reads=other.reads)
    # a compressor that does not see a position's gates
    attends = stages[StageKind.ATTENTION, 2]
    latents = attends.reads[1]
    fewer = tuple(tuple((lo, hi - 1) for lo, hi in spans) for spans in latents.spans)
    short = replace(latents, spans=fewer)
    assert broken(plan, StageKind.ATTENTION, 2, reads=(attends.reads[0], short))
    # entries that are chosen before their scores are there
    chooses = stages[StageKind.ATTENTION, 1]
    assert broken(plan, StageKind.ATTENTION, 1, reads=chooses.reads[:-1])
    # keys whose blocks do not score them
    scores = stages[StageKind.INDEX, 1]
    assert broken(plan, StageKind.INDEX, 1, items=tuple(reversed(scores.items)))
    # entries dealt to other splits than the kernel's
    assert chooses.scan is not None
    dealt = replace(chooses.scan, splits=3)
    assert broken(plan, StageKind.ATTENTION, 1, scan=dealt)
    assert mixed.reads != other.reads


def test_gpus_simulate_what_cpus_run() -> None:
    spec = from_config(CONFIG, "plain")
    cpu = plan_of(spec)
    gpu = planned(spec, 1, 3, 2, 4, Sampling.FULL, limits=replace(cpu.limits, oversubscribe=False))
    assert cpu.simulation_only() is None
    assert "on CPUs" in (gpu.simulation_only() or "")


def test_no_node_is_named_that_only_simulates_the_model() -> None:
    named = {"weight_dtype": DType.BF16}
    flash, llama = load_model("deepseek-v4-flash"), load_model("llama-3.1-405b")
    assert smallest_node(flash, load_node("1xhost"), named) is None
    assert "2xh200" in (smallest_node(flash, load_node("1xh200"), named) or "")
    assert "smallest node on file" in (smallest_node(llama, load_node("1xhost"), named) or "")


def test_ranks_share_nothing_of_the_latents_on_the_engine() -> None:
    spec = from_config(CONFIG, "plain")
    made = planned(spec, 2, 3, 2, 4, Sampling.FULL)
    assert made.options.common is Common.REPLICATED
    shared = planned(spec, 2, 3, 2, 4, Sampling.FULL, common=Common.SHARDED)
    assert "common=replicated" in (shared.simulation_only() or "")
