"""The CPU engine multiplies a GGUF file's blocks as they are stored: files of one type, mixed ones,
rows of few columns. Judged by the reference, which computes in FP32 with what the blocks mean.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.gguf_cases import named, write_case
from tests.engine.hf_cases import weights
from tests.engine.test_gguf import WIDE, stored
from tests.refusals import refused
from twin.calibrate.node import calibrated_node
from twin.engine.gguf_weights import GgufWeights, open_gguf
from twin.engine.host import HostEngine
from twin.errors import CheckpointError, ConfigError
from twin.hardware.load import load_node
from twin.models.codes import code_of
from twin.models.formats import DECODED, GGUF, ON_GPUS, Role
from twin.models.load import load_model
from twin.models.spec import DType
from twin.plan.catalogue import StageKind
from twin.proof.kernel_rules import check_kernel
from twin.proof.prove import prove
from twin.reference.step import Reference
from twin.schedule.options import plan_for

pytest.importorskip("gguf", reason="gguf is not installed (extra 'gguf')")
NARROW = {
    **WIDE,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
}
TOKENS = [3, 1, 4, 1, 5]
# of the largest logit; scales of any bits make scores of hundreds, which magnify what inputs of 16
# bits leave
TOLERANCE = 1e-3


def llama_cpp_mix(name: str) -> str:
    """As Q4_K_M: values and down projections of some layers in Q6_K, tables, too."""
    if name in ("token_embd.weight", "output.weight"):
        return "Q6_K"
    return "Q6_K" if name in ("blk.1.attn_v.weight", "blk.1.ffn_down.weight") else "Q4_K"


def small_mix(name: str) -> str:
    """As SmolLM2's files: the table in Q8_0; and what llama-quantize makes of narrow rows."""
    if "token_embd" in name or "attn_v" in name:
        return "Q8_0"
    return "Q5_0" if "ffn_up" in name or "attn_k" in name else "Q4_1"


def half(name: str) -> str:
    """Of numbers that GPUs' formats have, too."""
    return "Q8_0" if "attn" in name else "Q4_1"


def odd_mix(name: str) -> str:
    """Types that no matrix of a CPU holds together, and one that it does not multiply."""
    if "attn_q" in name:
        return "Q4_K"
    if "ffn_gate" in name:
        return "F16"
    return "MXFP4" if "output" in name else "Q8_0"


def write(path: Path, config: dict[str, Any], kind: Callable[[str], str]) -> GgufWeights:
    found = named(config, weights(config))
    data = {
        name: stored(kind(name), array, seed)
        for seed, (name, array) in enumerate(found.items())
        if array.ndim > 1
    }
    write_case(path, config, data)
    return open_gguf(path)


def logits(made: GgufWeights, blocks: int, **chosen: Any) -> tuple[Any, Any]:
    """The engine's and the reference's."""
    plan = plan_for(
        made.spec,
        calibrated_node("1xhost"),
        context=8,
        max_context=16,
        blocks=blocks,
        kv_dtype=DType.FP32,
        **chosen,
    )
    prove(plan)
    reference = Reference(plan, made)
    with HostEngine(plan, made) as engine:
        return engine.logits(TOKENS), np.array([reference.step(token) for token in TOKENS])


def judged(made: GgufWeights) -> None:
    one, expected = logits(made, 1)
    assert np.abs(one - expected).max() < TOLERANCE * np.abs(expected).max()
    two, _ = logits(made, 2)
    assert np.array_equal(one, two)


@pytest.mark.few(2)
@pytest.mark.parametrize("kind", [form.name.upper() for form in GGUF])
def test_a_file_of_one_type_is_multiplied_as_it_is(kind: str, tmp_path: Path) -> None:
    made = write(tmp_path / "model.gguf", WIDE, lambda name: kind)
    assert {weight.format.name for weight in made.spec.weights()} == {kind.lower()}
    judged(made)


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_rows_of_few_columns_are_whole_blocks(kind: str, tmp_path: Path) -> None:
    judged(write(tmp_path / "model.gguf", NARROW, lambda name: kind))


def test_a_file_of_k_types_is_multiplied_as_it_is(tmp_path: Path) -> None:
    made = write(tmp_path / "model.gguf", WIDE, llama_cpp_mix)
    forms = [{w.name: w.format.name for w in made.spec.layer_weights(i)} for i in (0, 1)]
    assert forms[0] == dict.fromkeys(("q", "k", "v", "o", "gate", "up", "down"), "q4_k")
    assert forms[1] == forms[0] | dict.fromkeys("qkv", "gguf-mixed-256") | {"down": "q6_k"}
    assert made.spec.formats.of(Role.HEAD).name == "q6_k"
    judged(made)


def test_a_file_of_small_blocks_is_multiplied_as_it_is(tmp_path: Path) -> None:
    made = write(tmp_path / "model.gguf", NARROW, small_mix)
    forms = {w.name: w.format.name for w in made.spec.layer_weights(1)}
    assert (forms["q"], forms["o"], forms["up"]) == ("gguf-mixed-32", "q4_1", "gguf-mixed-32")
    judged(made)


def test_what_no_format_holds_becomes_the_weight_type(tmp_path: Path) -> None:
    made = write(tmp_path / "model.gguf", WIDE, odd_mix)
    forms = {w.name: w.format.name for w in made.spec.layer_weights(0)}
    assert (forms["q"], forms["gate"], forms["down"]) == ("bf16", "bf16", "q8_0")
    assert "q8_0" in made.note
    judged(made)


def test_a_chunk_of_a_prompt_is_what_its_steps_are(tmp_path: Path) -> None:
    made = write(tmp_path / "model.gguf", WIDE, llama_cpp_mix)
    separate, _ = logits(made, 2, prompt_chunk=1)
    together, _ = logits(made, 2, prompt_chunk=4)
    assert np.abs(separate - together).max() < TOLERANCE * np.abs(separate).max()


def test_the_stream_counts_the_bytes_of_the_file(tmp_path: Path) -> None:
    """Those of whole row groups."""
    made = write(tmp_path / "model.gguf", WIDE, lambda name: "Q4_K")
    plan = plan_for(made.spec, calibrated_node("1xhost"), context=8, max_context=16, blocks=1)
    for stage in plan.stages:
        if stage.matrix is not None:
            rows = -(-stage.matrix.rows // 16) * 16
            assert plan.stage_bytes(stage) == rows * stage.matrix.cols // 256 * 144, stage.name


@pytest.mark.few(1)
@pytest.mark.parametrize("kind", ON_GPUS)
def test_gpus_multiply_the_numbers_of_a_file_in_a_format_of_theirs(
    kind: str, tmp_path: Path
) -> None:
    """Exactly these: the engine's sums of both are those of the reference."""
    path, name = tmp_path / "model.gguf", f"{kind.upper()}"
    blocks = write(path, WIDE, lambda _: name)
    made, form = open_gguf(path, blocks=False), ON_GPUS[kind]
    assert {w.format.name for w in made.spec.layer_weights(1)} == {form}
    assert made.spec.formats.of(Role.HEAD).name == "fp16"
    code = code_of(DECODED[form])
    for matrix in ("layers.0.q", "layers.1.down"):
        coded = code.matrix(*(made[f"{matrix}.{part}"] for part in code.parts))
        same = code_of(DECODED[kind]).matrix(blocks[f"{matrix}.blocks"])
        assert np.array_equal(coded.astype(np.float32), same.astype(np.float32))
    found, expected = logits(made, 2)
    assert np.abs(found - expected).max() < TOLERANCE * np.abs(expected).max()


def test_a_gpus_plan_of_a_file_keeps_what_its_formats_hold(tmp_path: Path) -> None:
    """Minima and scales of six bits become 16 bits; so does a file whose type somebody chose."""
    path = tmp_path / "model.gguf"
    for kinds, kept in ((half, {"int8-g32-fp16", "fp16"}), (llama_cpp_mix, {"fp16"})):
        write(path, WIDE, kinds)
        for node in ("1xh200", "1xmi300x"):
            spec = load_model(path)
            plan = plan_for(spec, load_node(node), context=8, max_context=16)
            assert plan.spec is not None
            assert {weight.format.name for weight in plan.spec.weights()} == kept
            assert plan.spec.stored == open_gguf(path, blocks=False).spec.stored
        chosen = plan_for(spec, load_node(node), context=8, weight_dtype=DType.BF16)
        assert not chosen.coded


def test_blocks_of_no_file_are_for_cpus() -> None:
    refused(
        ConfigError,
        lambda: plan_for(load_model("llama-3.2-1b@q4_k"), load_node("1xh200")),
        "@q4_k",
        "CPUs",
    )


def test_a_chosen_weight_type_turns_a_file_into_it(tmp_path: Path) -> None:
    write(tmp_path / "model.gguf", WIDE, lambda name: "Q8_0")
    assert open_gguf(tmp_path / "model.gguf", DType.FP32).spec.stored is None
    spec, node = load_model(tmp_path / "model.gguf"), calibrated_node("1xhost")
    plan = plan_for(spec, node, context=8, max_context=16, weight_dtype=DType.FP32)
    assert not plan.coded


def test_a_scale_that_is_no_number_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    made = write(path, WIDE, lambda name: "Q8_0")
    tensor = made.file.tensors["blk.1.ffn_down.weight"]
    content = bytearray(path.read_bytes())
    content[tensor.begin : tensor.begin + 2] = np.float16(np.nan).tobytes()
    path.write_bytes(content)
    opened = open_gguf(path)
    refused(CheckpointError, lambda: opened["layers.1.down.blocks"], "ffn_down", "finite")


def test_the_proof_refuses_tiles_that_divide_blocks_and_other_nodes(tmp_path: Path) -> None:
    made = write(tmp_path / "model.gguf", WIDE, lambda name: "Q4_K")
    plan = plan_for(made.spec, calibrated_node("1xhost"), context=8, max_context=16, blocks=1)
    at = next(s.index for s in plan.stages if s.kind is StageKind.DOWN)
    matrix = plan.stages[at].matrix
    assert matrix is not None
    cut = replace(plan.stages[at], matrix=replace(matrix, tile_cols=128))
    divided = replace(plan, stages=(*plan.stages[:at], cut, *plan.stages[at + 1 :]))
    assert any("no tile divides" in found.message for found in check_kernel(divided))
    elsewhere = replace(plan, limits=replace(plan.limits, oversubscribe=False))
    assert any("only CPUs" in found.message for found in check_kernel(elsewhere))
