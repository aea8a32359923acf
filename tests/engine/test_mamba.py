"""Mamba-2, layers of one half, and feed-forward layers of two matrices on the CPU engine: the
reference's numbers from every plan, and what the proof refuses.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.engine.hf_cases import FAMILIES
from tests.engine.small_engine import (
    LIMITS,
    LLAMA,
    SEED,
    TOKENS,
    error,
    expected,
    first,
    found,
    planned,
)
from tests.engine.test_packed_experts import write_safetensors
from tests.engine.test_prompt_chunks import CHUNK, LENGTHS
from tests.engine.test_prompt_chunks import error as passes_error
from twin.data import data_dir, read_yaml
from twin.engine.host import HostEngine
from twin.engine.weights import format_of, open_checkpoint, random_weights
from twin.errors import ConfigError
from twin.models.feeds import DenseFeed, ExpertFeed, Feed, NoFeed, Scoring
from twin.models.layers import Layer
from twin.models.load import from_config, load_model, tensors
from twin.models.mixers import GroupedAttention, Mamba2, NoMixer
from twin.models.spec import DType, ModelSpec, Rope
from twin.models.variant import Activation, Variant
from twin.plan.catalogue import StageKind
from twin.plan.delta_shards import channels_of_rank, projected_rows
from twin.plan.options import Execution
from twin.plan.shards import Array
from twin.proof.prove import prove, violations
from twin.reference.step import Reference
from twin.schedule.plans import build

MAMBA = Mamba2(key_heads=4, key_dim=12, value_heads=8, value_dim=8, conv=4)
ATTENTION = GroupedAttention(heads=8, kv_heads=4, head_dim=8)
EXPERTS = ExpertFeed(
    experts=6,
    top_k=3,
    width=40,
    shared_width=80,
    scoring=Scoring.SIGMOID,
    scaling=2.5,
    choice_bias=True,
    gated=False,
)


def mixed(mamba: Mamba2 = MAMBA, feed: Feed = EXPERTS) -> ModelSpec:
    """Mamba-2, experts, Mamba-2, attention, a dense feed-forward layer, experts."""
    dense = DenseFeed(width=96, gated=False)
    layers = (
        Layer(mamba, NoFeed()),
        Layer(NoMixer(), feed),
        Layer(mamba, NoFeed()),
        Layer(ATTENTION, NoFeed()),
        Layer(NoMixer(), dense),
        Layer(NoMixer(), feed),
    )
    return replace(
        LLAMA,
        name="mixed",
        family="nemotron_h",
        layers=6,
        windows=(0,) * 6,
        rope=Rope(1e4),
        ropes=(None,) * 6,
        layout=layers,
        variant=Variant(activation=Activation.RELU2),
    )


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("mamba", "feed"),
    [
        (replace(MAMBA, conv=2, conv_bias=False), EXPERTS),
        (replace(MAMBA, key_heads=1, value_heads=3, value_dim=16), EXPERTS),
        (replace(MAMBA, least_step=0.6, most_step=0.8), EXPERTS),
        (MAMBA, replace(EXPERTS, shared_width=104)),  # whose stages are their own
    ],
    ids=("two taps", "three heads", "steps clamped", "shared width"),
)
def test_other_states_and_experts_match_the_reference(mamba: Mamba2, feed: Feed) -> None:
    for blocks in (4, 20):
        plan = planned(mixed(mamba, feed), blocks=blocks)
        prove(plan)
        assert error(plan) < 1e-5


def test_a_layer_has_the_stages_of_what_it_has() -> None:
    plan = planned(mixed())
    kinds = [[s.kind for s in plan.stages if s.layer == layer] for layer in range(5)]
    states = [StageKind.DELTA_IN, StageKind.DELTA, StageKind.O_PROJ]
    experts = [StageKind.ROUTER, StageKind.ROUTE, StageKind.ROUTED_UP, StageKind.ROUTED_DOWN]
    attends = [StageKind.QKV, StageKind.ATTENTION, StageKind.O_PROJ]
    dense = [StageKind.GATE_UP, StageKind.DOWN]
    assert kinds == [states, experts, states, attends, dense]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "more",
    [
        {},
        {"blocks": 35, "prompt_chunk": 3},  # blocks without an item; shorter than a history
        {"gpus": 2, "blocks": 3},
        {"execution": Execution.GRAPH},
    ],
    ids=str,
)
def test_passes_carry_states_on_as_steps_do(more: dict[str, Any]) -> None:
    plan = planned(mixed(), **({"prompt_chunk": CHUNK} | more))
    prove(plan)
    assert plan.options.prompt_chunk > 1
    assert passes_error(plan, LENGTHS) < 1e-5


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("mamba", "feed"),
    [
        (replace(MAMBA, conv=2, conv_bias=False), replace(EXPERTS, shared_width=104)),
        (replace(MAMBA, key_heads=1, value_heads=3, value_dim=16, least_step=0.6), EXPERTS),
    ],
    ids=("shared width, two taps", "three heads, steps clamped"),
)
def test_passes_of_other_states_and_experts_match_the_reference(mamba: Mamba2, feed: Feed) -> None:
    plan = planned(mixed(mamba, feed), blocks=20, prompt_chunk=CHUNK)
    assert passes_error(plan, LENGTHS) < 1e-5


VECTORS = ("conv", "conv_bias", "decay", "step_bias", "skip", "gated_norm", "state_in", "o")


@pytest.mark.few(3)
@pytest.mark.parametrize("name", VECTORS)
def test_a_wrong_weight_of_a_state_is_noticed(name: str) -> None:
    class Turned:
        def __init__(self, spec: ModelSpec) -> None:
            self.spec, self.dtype = spec, DType.FP32
            self.random = random_weights(spec, SEED, DType.FP32)

        def __getitem__(self, wanted: str) -> Array:
            made = self.random[wanted]
            return np.roll(made, 1, axis=-1) if wanted == f"layers.2.{name}" else made

    plan = planned(mixed(), blocks=3)
    wanted = expected(plan, TOKENS)
    with HostEngine(plan, Turned(mixed())) as running:
        assert np.abs(running.logits(TOKENS) - wanted).max() > 1e-3 * np.abs(wanted).max()


# ---- what the proof refuses ----------------------------------------------------------------------


def test_planted_faults_of_states_are_refused() -> None:
    plan = planned(mixed(), blocks=16)
    state, made = first(plan, StageKind.DELTA), first(plan, StageKind.DELTA_IN)
    scan, read, matrix = state.scan, state.reads[0], made.matrix
    assert scan is not None
    assert matrix is not None
    # the block of item 0 has no time step, or no gates, of it
    steps, gates = (
        replace(read, spans=(read.spans[0][:4] + read.spans[0][5:], *read.spans[1:])),
        replace(read, spans=(read.spans[0][:3] + read.spans[0][4:], *read.spans[1:])),
    )
    wrong = {
        "and does not read it": [replace(state, reads=(steps,)), replace(state, reads=(gates,))],
        "bytes of states": [replace(state, scan=replace(scan, held_bytes=scan.held_bytes - 4))],
        "entries of": [replace(state, scan=replace(scan, entry_bytes=16))],
    }
    for says, stages in wrong.items():
        for stage in stages:
            assert any(says in one for one in found(plan, stage)), (says, found(plan, stage))


def test_the_proof_refuses_gates_of_rows_that_have_none() -> None:
    plan = planned(mixed(), blocks=4)
    for kind in (StageKind.GATE_UP, StageKind.ROUTED_UP):
        stage = first(plan, kind)
        assert stage.matrix is not None
        assert found(plan, replace(stage, matrix=replace(stage.matrix, unit=2)))


def test_what_the_kernel_has_no_code_for_is_refused_by_name() -> None:
    for mamba in (replace(MAMBA, conv=1), replace(MAMBA, key_dim=6), replace(MAMBA, value_dim=10)):
        reason = mixed(mamba).runnable_reason()
        assert reason is not None
        assert "Mamba-2" in reason
    gated = replace(EXPERTS, gated=True)
    assert mixed(feed=gated).runnable_reason() is not None  # next to a dense layer without a gate


def test_an_nvidia_block_takes_the_published_widths() -> None:
    """Output projections of Mamba-2 and of attention multiply as many columns in Nemotron, where
    they share an input, and not in Granite 4.
    """
    gpu = replace(LIMITS, teams=True)
    for value_dim, inputs in ((8, {"heads"}), (16, {"states", "heads"})):
        spec = mixed(replace(MAMBA, value_dim=value_dim))
        plan = build(spec, planned(spec).options, gpu)
        assert not violations(plan)
        outputs = [stage for stage in plan.stages if stage.kind is StageKind.O_PROJ]
        assert {plan.input_of(stage) for stage in outputs} == inputs


# ---- rows and configurations ---------------------------------------------------------------------


def test_rows_of_a_rank_follow_each_other_by_what_they_are() -> None:
    kind = Mamba2(key_heads=2, key_dim=2, value_heads=4, value_dim=3, conv=4)
    # gates 0..11, x 12..23, B 24..27, C 28..31, steps 32..35
    ((name, rows),) = projected_rows(kind, 2, 1)
    assert name == "state_in"
    assert rows.tolist() == [30, 31, 26, 27, *range(18, 24), *range(6, 12), 34, 35]
    assert channels_of_rank(kind, 2, 1).tolist() == [18, 19, 14, 15, *range(6, 12)]


def test_the_published_model_has_the_layers_of_its_pattern() -> None:
    spec = load_model("nemotron-3-nano-30b-a3b")
    mixers = [type(layer.mixer) for layer in spec.layout]
    assert [mixers.count(kind) for kind in (Mamba2, GroupedAttention, NoMixer)] == [23, 6, 23]
    assert [at for at, kind in enumerate(mixers) if kind is GroupedAttention] == [
        *(5, 12, 19, 26, 33, 42)
    ]
    assert spec.shared_like_routed == 2
    assert spec.rotations == (None,)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"use_bias": True}, "use_bias"),
        ({"moe_latent_size": 24}, "moe_latent_size"),
        ({"sliding_window": 7}, "sliding_window"),
        ({"mlp_hidden_act": "silu"}, "mlp_hidden_act"),
        ({"hybrid_override_pattern": "MEX"}, "hybrid_override_pattern"),
        ({"num_hidden_layers": 5}, "num_hidden_layers"),
        ({"layers_block_type": ["moe"] * 6}, "hybrid_override_pattern"),
        ({"n_shared_experts": 2}, "n_shared_experts"),
        ({"time_step_limit": [0.5, 0.1]}, "time_step_limit"),
    ],
)
def test_what_is_not_described_is_refused_by_its_field(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        from_config(FAMILIES["nemotron-h"] | changes, "case")


@pytest.mark.parametrize("end", [float("inf"), 1e308, "Infinity", {"__float__": "Infinity"}])
def test_time_steps_without_an_upper_end(end: object) -> None:
    """As Python's JSON, as others write it, and as transformers 5 does."""
    spec = from_config(FAMILIES["nemotron-h"] | {"time_step_limit": [0.25, end]}, "case")
    assert isinstance(spec.recurrence, Mamba2)
    assert (spec.recurrence.least_step, spec.recurrence.most_step) == (0.25, None)


# ---- checkpoints ---------------------------------------------------------------------------------


def in_fp8(config: dict[str, Any], kept: list[int]) -> dict[str, Any]:
    """As NVIDIA's ModelOpt writes it: layers `kept`, convolutions and the head stay in 16 bits."""
    modules = ("in_proj", "out_proj", "q_proj", "k_proj", "v_proj", "o_proj")
    layers = range(len(config["hybrid_override_pattern"]))
    left_out = [f"backbone.layers.{layer}.mixer.{name}" for layer in kept for name in modules]
    convolutions = [f"backbone.layers.{layer}.mixer.conv1d" for layer in layers]
    quantization = {
        "quant_method": "modelopt",
        "quant_algo": "FP8",
        "ignore": ["lm_head", *left_out, *convolutions],
        "config_groups": {
            "group_0": {
                "input_activations": {"dynamic": False, "num_bits": 8, "type": "float"},
                "weights": {"dynamic": False, "num_bits": 8, "type": "float"},
                "targets": ["Linear"],
            }
        },
    }
    return config | {"torch_dtype": "bfloat16", "quantization_config": quantization}


def test_layers_of_the_published_fp8_that_stay_in_16_bits() -> None:
    """Attention, and the Mamba-2 layer before each."""
    file = data_dir("hwmodels") / "models" / "nemotron-3-nano-30b-a3b.yaml"
    config: Any = read_yaml(file)["config"]
    kept = [4, 5, 11, 12, 18, 19, 25, 26, 32, 33, 41, 42]
    spec = from_config(in_fp8({**config}, kept), "case")
    assert spec.runnable_reason() is None
    forms = [{w.name: w.format.name for w in spec.layer_weights(at)} for at in range(52)]
    assert [at for at in range(52) if forms[at].get("o") == "bf16"] == kept
    assert {forms[at]["state_in"] for at in (4, 41)} == {"bf16"}
    assert {forms[at]["state_in"] for at in (0, 2, 7, 50)} == {"fp8"}
    assert forms[1] == {
        "router": "bf16",
        **dict.fromkeys(("shared_up", "shared_down", "up", "down"), "fp8"),
    }
    assert spec.shared_like_routed == 2


def test_experts_of_which_some_stay_in_16_bits_are_refused() -> None:
    config = in_fp8(FAMILIES["nemotron-h"], [])
    config["quantization_config"]["ignore"].append("backbone.layers.1.mixer.experts.0.up_proj")
    with pytest.raises(ConfigError, match="one format for all matrices of a kind"):
        from_config(config, "case")


def test_a_checkpoint_in_fp8_is_read_and_run(tmp_path: Path) -> None:
    """With a scale for each matrix, and scales of activations, which are read over."""
    # low-bit plans have one width of heads' outputs
    config = in_fp8(FAMILIES["nemotron-h"] | {"hidden_size": 96, "mamba_head_dim": 16}, [2])
    spec = from_config(config, "case")
    random, stored = random_weights(spec, SEED, DType.BF16), dict[str, Array]()
    coded = [name for name in tensors(spec) if format_of(spec, name).name == "fp8"]
    for name, tensor in tensors(spec).items():
        if name not in coded:
            array = random[name].astype(np.float32)
            stored[tensor.name] = array.reshape(tensor.shape).astype(ml_dtypes.bfloat16)
            continue
        module = tensor.name.removesuffix("weight")
        stored[tensor.name] = random[f"{name}.codes"].view(ml_dtypes.float8_e4m3fn)
        stored[f"{module}weight_scale"] = np.array(2.0**-9, np.float32)
        stored[f"{module}input_scale"] = np.array(0.5, np.float32)
    write_safetensors(tmp_path / "model.safetensors", stored)
    (tmp_path / "config.json").write_text(json.dumps(config))
    opened = open_checkpoint(tmp_path)
    assert {"layers.0.state_in", "layers.0.o", "layers.1.experts.7.up"} <= set(coded)
    assert not {"layers.2.q", "layers.2.o", "layers.0.conv", "layers.1.router"} & set(coded)
    for name in coded:
        assert np.array_equal(opened.weights[f"{name}.codes"], random[f"{name}.codes"]), name
        assert (opened.weights[f"{name}.scales"] == 2.0**-9).all(), name
    plan = planned(opened.spec, blocks=5, slot_bytes=4096, weight_dtype=DType.BF16)
    prove(plan)
    wanted = np.stack([Reference(plan, opened.weights).step(token) for token in TOKENS[:1]])
    with HostEngine(plan, opened.weights) as running:
        found = running.logits(TOKENS[:1])
    assert np.abs(found - wanted).max() < 1e-5 * np.abs(wanted).max()
