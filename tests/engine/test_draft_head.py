"""EAGLE-3 on this computer: a head drafts inside the kernel, and changes no token."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from studies.common.rows import first_tokens
from tests.command_line import Twin
from tests.engine.families import TOGETHER
from tests.engine.small_engine import LLAMA, QWEN3, TOKENS, planned
from tests.engine.test_prompt_chunks import needs_gpu
from tests.engine.test_routed_prompts import FAMILIES
from tests.native.test_warps import build_warps
from twin.calibrate.node import calibrated_node
from twin.engine import host
from twin.engine.choose import open_engine
from twin.engine.draft_head import _NAMES, PREFIX, with_head
from twin.engine.generation import Drafting
from twin.engine.host import HostEngine
from twin.engine.sampling import SamplingParams
from twin.engine.standin import StandIn
from twin.engine.weights import random_weights, save_checkpoint
from twin.errors import PlanError, TwinError
from twin.kernel.draft_head import draft_floats, packed_head
from twin.kernel.prompt import ROUND_FIRST
from twin.kernel.tables import layout
from twin.models.depth import first_layers
from twin.models.eagle3 import published
from twin.models.load import load_model
from twin.models.spec import DType, ModelSpec, Rope
from twin.plan.options import Sampling
from twin.plan.shards import Weights
from twin.plan.types import Plan
from twin.reference.eagle3 import Watched, drafts
from twin.schedule.options import plan_for

MOST, SEED = 5, 1


def headed(spec: ModelSpec = LLAMA, **chosen: Any) -> ModelSpec:
    deep = replace(spec, layers=7, windows=(0, 5, 0, 0, 0, 0, 0)) if not spec.layout else spec
    return replace(deep, draft_head=replace(published(deep), **({"vocab": 60} | chosen)))


def deep_gpt_oss() -> ModelSpec:
    """Its layers twice."""
    spec = FAMILIES["gpt_oss"]
    return replace(
        spec,
        layers=2 * spec.layers,
        windows=spec.windows * 2,
        layout=spec.layout * 2,
        ropes=spec.ropes * 2,
    )


def drafting(spec: ModelSpec, **chosen: Any) -> Plan:
    return planned(spec, **({"prompt_chunk": 16, "lookup": MOST} | chosen))


class Repeating:
    """Weights of a model whose layers add nothing, so that a token follows itself, and of a head
    that finds the same.
    """

    def __init__(self, made: Weights) -> None:
        self._made, self.spec, self.dtype = made, made.spec, made.dtype

    def __getitem__(self, name: str) -> Any:
        found, leaf = self._made[name], name.rpartition(".")[2]
        if name == f"{PREFIX}fc":  # the last of the three states
            hidden = self.spec.hidden
            return np.hstack([np.zeros((hidden, 2 * hidden)), np.eye(hidden)]).astype(found.dtype)
        if name == f"{PREFIX}lm_head":
            return self._made["embed"][self._made[f"{PREFIX}ids"]]
        return found * 0 if leaf in ("o", "down") else found


def last_drafts(running: HostEngine, plan: Plan) -> list[int]:
    words = running._memory.prompts[0].view(np.int32)
    first = int(layout(plan).sizes["round_round"]) + ROUND_FIRST + 1
    return [int(token) for token in words[first : first + MOST]]


@pytest.mark.few(3)
@pytest.mark.parametrize(
    ("spec", "chosen"),
    [
        (LLAMA, {}),
        (LLAMA, {"blocks": 3}),
        (QWEN3, {}),
        (TOGETHER, {}),
        (LLAMA, {"prompt_chunk": 32}),
    ],
    ids=str,
)
def test_a_head_drafts_what_its_paper_says(spec: ModelSpec, chosen: dict[str, Any]) -> None:
    a_head_drafts_what_its_paper_says(spec, chosen)


def a_head_drafts_what_its_paper_says(spec: ModelSpec, chosen: dict[str, Any]) -> None:
    """Rounds of which one token counts each. The last that has room for i drafts leaves its i-th
    one in memory.
    """
    plan, made = drafting(headed(spec), **chosen), 9
    assert plan.spec is not None
    weights = random_weights(plan.spec, SEED, plan.options.weight_dtype)
    with HostEngine(plan, weights) as running:
        found = running.generate(TOKENS, max_tokens=made, drafting=Drafting(accepted=1.0))
        drafted = last_drafts(running, plan)
    alike = Watched(plan, weights)
    assert alike.generate(TOKENS, max_tokens=made) == found.tokens
    whole = [*TOKENS, *found.tokens]
    for i, token in enumerate(drafted, 1):
        known = whole[: len(whole) - 1 - i]
        assert drafts(weights, alike.watched[: len(known) - 1], known, i)[-1] == token


@pytest.mark.few(2)
@pytest.mark.parametrize("spec", [LLAMA, QWEN3, deep_gpt_oss()], ids=lambda s: s.name)
def test_drafts_of_a_head_change_no_token(spec: ModelSpec) -> None:
    plan = drafting(headed(spec))
    assert plan.spec is not None
    with HostEngine(plan, random_weights(plan.spec, SEED, plan.options.weight_dtype)) as running:
        plain = running.generate(TOKENS, max_tokens=30, drafting=Drafting(0)).tokens
        for most in (1, MOST):
            made = running.generate(TOKENS, max_tokens=30, drafting=Drafting(most))
            assert made.tokens == plain
        rejected = running.generate(TOKENS, max_tokens=30, drafting=Drafting(accepted=1.0))
        assert rejected.tokens == plain
        assert len(rejected.round_ns) == 30


@pytest.mark.few(2)
@pytest.mark.parametrize("chosen", [{}, {"blocks": 3}, {"sampling": Sampling.FULL}], ids=str)
def test_good_drafts_are_accepted(chosen: dict[str, Any]) -> None:
    spec = replace(headed(replace(LLAMA, tied=True)), qkv_bias=False)
    plan = drafting(spec, **chosen)
    weights = Repeating(random_weights(spec, SEED, plan.options.weight_dtype))
    start = int(weights[f"{PREFIX}ids"][7])
    with HostEngine(plan, weights) as running:
        made = running.generate([3, start], max_tokens=40)
        assert made.tokens == [start] * 40
        assert made.tokens_per_round > 4
        stopped = running.generate([3, start], max_tokens=40, stop={start})
        assert stopped.tokens == [start]
        if plan.options.draws:
            drawn = running.generate(
                [3, start], max_tokens=40, sampling=SamplingParams(0.7, seed=5)
            )
            alone = running.generate(
                [3, start],
                max_tokens=40,
                sampling=SamplingParams(0.7, seed=5),
                drafting=Drafting(0),
            )
            assert drawn.tokens == alone.tokens


def test_what_no_head_drafts_for_is_refused() -> None:
    with pytest.raises(PlanError, match="a head drafts on one GPU"):
        drafting(headed(), gpus=2)


def test_weights_of_16_bits_have_heads_too() -> None:
    plan = drafting(headed(), weight_dtype=DType.BF16, kv_dtype=DType.BF16)
    assert plan.spec is not None
    with HostEngine(plan, random_weights(plan.spec, SEED, DType.BF16)) as running:
        one = running.generate(TOKENS, max_tokens=30)
        assert one.tokens == running.generate(TOKENS, max_tokens=30).tokens


def test_blocks_of_many_warps_and_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a GPU's: a warp's threads share a row, warps the rows and the positions."""
    monkeypatch.setattr(host, "build_host", build_warps)
    a_head_drafts_what_its_paper_says(LLAMA, {"slot_bytes": 512, "prompt_chunk": 16, "blocks": 2})


@pytest.mark.parametrize("made", [random_weights, StandIn], ids=lambda m: m.__name__)
def test_a_head_fills_its_place(made: Any) -> None:
    plan = drafting(headed(vocab=61), weight_dtype=DType.BF16)
    sizes, passes = layout(plan).sizes, layout(plan).schedule.of_passes()
    floats = draft_floats(plan, passes)
    found = {
        first: part.size / 4
        for first, part in packed_head(plan, sizes, made(plan.spec, SEED, DType.BF16))
    }
    assert found == {int(sizes[name]): floats[name] for name in floats if sizes[name] in found}
    assert len(found) == 9


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("repeating", [False, True])
def test_a_gpu_drafts_by_a_head(repeating: bool) -> None:
    whole = replace(first_layers(load_model("llama-3.2-1b"), 7), vocab=8192)
    spec = replace(whole, draft_head=published(whole))
    node, made = calibrated_node("1xh200"), random_weights(spec, SEED, DType.BF16, keep=10**6)
    plan = plan_for(spec, node, context=160, max_context=256, lookup=MOST)
    prompt = first_tokens(spec.vocab, 20)
    with open_engine(node.device, plan, Repeating(made) if repeating else made) as running:
        rejected = running.generate(prompt, max_tokens=40, drafting=Drafting(accepted=1.0))
        for most in (1, 3, MOST):
            drafted = running.generate(prompt, max_tokens=40, drafting=Drafting(most))
            assert drafted.tokens == rejected.tokens
        assert not repeating or drafted.tokens_per_round > 4


# ---- checkpoints ---------------------------------------------------------------------------------


def published_head(folder: Path, spec: ModelSpec, **changed: Any) -> Weights:
    """A folder in the published layout, and the weights in it."""
    head = spec.draft_head
    assert head is not None
    weights = random_weights(spec, SEED)
    layer = "midlayer."
    names = {leaf: text.format(layer=layer) for leaf, text in _NAMES.items()}
    tensors = {
        text: np.asarray(weights[f"{PREFIX}{leaf}"]).astype(np.float32)
        for leaf, text in names.items()
    }
    ids = weights[f"{PREFIX}ids"]
    known = np.zeros(spec.vocab, bool)
    known[ids] = True
    shifts = {"d2t": ids - np.arange(len(ids)), "t2d": known}
    folder.mkdir(exist_ok=True)
    save_file(tensors | shifts, folder / "model.safetensors")
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "hidden_size": spec.hidden,
        "vocab_size": spec.vocab,
        "draft_vocab_size": head.vocab,
        "num_attention_heads": head.heads,
        "num_key_value_heads": head.kv_heads,
        "head_dim": head.head_dim,
        "intermediate_size": head.ffn,
        "rms_norm_eps": head.norm_eps,
        "rope_theta": head.rope.theta,
        "rope_scaling": None,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [one - 1 for one in head.taken]},
    }
    (folder / "config.json").write_text(json.dumps(config | changed), encoding="utf-8")
    return weights


def test_a_published_head_is_read_as_it_is_stored(tmp_path: Path) -> None:
    spec = headed(replace(LLAMA, rope=Rope(10000.0)))
    made = published_head(tmp_path / "head", spec)
    plain = replace(spec, draft_head=None)
    found = with_head(random_weights(plain, SEED), plain, tmp_path / "head")
    assert found.spec == spec
    for leaf in (*_NAMES, "ids"):
        assert np.array_equal(
            np.asarray(found[PREFIX + leaf], np.float32),
            np.asarray(made[PREFIX + leaf], np.float32),
        )
    assert np.array_equal(found["layers.0.q"], made["layers.0.q"])


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "Eagle3"),
        ({"hidden_size": 32}, "drafts for the model"),
        ({"draft_vocab_size": 59}, r"allowed: .*\[59, 64\]"),
        ({"norm_before_residual": True}, "norm_before_residual"),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [4, 1, 2]}},
            "three layers in",
        ),
    ],
    ids=str,
)
def test_another_head_is_refused(tmp_path: Path, changed: dict[str, Any], says: str) -> None:
    spec = headed(replace(LLAMA, rope=Rope(10000.0)))
    published_head(tmp_path / "head", spec, **changed)
    plain = replace(spec, draft_head=None)
    with pytest.raises(TwinError, match=says):
        with_head(random_weights(plain, SEED), plain, tmp_path / "head")


def test_the_command_line_drafts_by_a_head(twin: Twin, tmp_path: Path) -> None:
    spec = headed(replace(LLAMA, name="deep", rope=Rope(10000.0)))
    folder = tmp_path / "model"
    save_checkpoint(folder, random_weights(replace(spec, draft_head=None, windows=(0,) * 7), SEED))
    published_head(tmp_path / "head", spec)
    words = ("run", folder, "--prompt-tokens", "5,74,0,33", "--max-tokens", 12, "--json")
    plain = json.loads(twin(*words).out)
    drafted = json.loads(twin(*words, "--draft", f"eagle3:{tmp_path / 'head'}:3").out)
    assert drafted["tokens"] == plain["tokens"]
    assert "eagle3:FOLDER" in twin(*words, "--draft", "eagle3:").err
