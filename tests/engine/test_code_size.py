"""How much code a layer is: by stage, of kernels of a few instructions; and of real ones, against
the cache that should hold it.
"""

from __future__ import annotations

import pytest

from studies.common.cuda_lines import Called, Kernel, Place, Row
from tests.engine.code_size import LAYER, code_size, function_name, measured
from tests.native.test_device_builds import H200, NAMES, planned
from twin.engine.cuda_build import compile_cubin
from twin.errors import ToolchainError

# bytes, of an H200's block: past it instructions take two to four times as long
# (studies/h200-history)
INSTRUCTION_CACHE = 128 * 1024


# Builds of test_device_builds. Of Qwen3-8B other contexts and rings make a difference of 2 KiB at
# most.
@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("llama-3.2-1b", "defaults"),
        pytest.param("laneformer-2b", "lanes on one", marks=pytest.mark.slow),
        pytest.param("qwen3-8b", "prompts", marks=pytest.mark.slow),
    ],
)
def test_the_instruction_cache_holds_a_layer(model: str, name: str) -> None:
    try:
        report = compile_cubin(planned(model, H200, **NAMES[name]), lines=True)
    except ToolchainError as error:
        if "installed" not in str(error) and "loaded" not in str(error):
            raise
        pytest.skip(str(error))
    size = code_size(report)
    if missing := set(LAYER) - set(size.stage_bytes):
        raise ToolchainError(f"no code of {missing}: say in code_size.py what a layer is made of")
    assert size.layer_bytes <= INSTRUCTION_CACHE, size.stage_bytes


# ---- the count, on kernels of a few instructions -------------------------------------------------


def kernel(*callers: str, called: tuple[Called, ...] = ()) -> Kernel:
    """An instruction for each: `_ZN4twin4downEv < ...`, innermost first."""
    rows: list[Row] = []
    for number, chain in enumerate(callers):
        rows.append(Row(16 * number, Place("cuda_main.cu", 1, ""), 0))
        for function in reversed(chain.split(" < ")):
            if function:
                rows.append(Row(16 * number, Place("stages.cuh", 1, function), len(rows)))
    return Kernel(bytes(16 * len(callers)), tuple(rows), called)


DOWN, EMBED, DOT, HANG = (
    "_ZN4twin4downEv",
    "_ZN4twin5embedEv",
    "_ZN4twin4Core9dot_tilesIfEEvv",
    "_ZN4twin11report_hangEv",
)
STAGE = "_ZN4twin9run_stageERNS_5BlockEi"


def test_an_instruction_counts_once_for_its_stage() -> None:
    size = measured(
        kernel(
            "",
            f"{DOT} < {DOWN} < {STAGE}",
            f"{DOWN} < {STAGE}",
            STAGE,
            f"{DOT} < {EMBED} < {STAGE}",
        )
    )
    assert size.stage_bytes == {"down": 32, "run_stage": 16, "embed": 16}
    assert (size.kernel_bytes, size.layer_bytes) == (80, 48)


def test_what_is_seldom_executed_is_none_of_a_layer() -> None:
    size = measured(kernel(f"{HANG} < {DOWN} < {STAGE}", f"{DOWN} < {STAGE}"))
    assert (size.seldom_bytes, size.layer_bytes) == ({"report_hang": 16}, 16)


def test_a_function_that_is_called_counts_once_for_the_layer() -> None:
    """Not so the compiler's own, which the rows take for what lies before them."""
    called = (Called(16, 48, DOT), Called(48, 64, "__cuda_sm3x_div_rn_noftz_f32_slowpath"))
    size = measured(kernel(DOWN, "", HANG, DOWN, called=called))
    assert (size.stage_bytes, size.seldom_bytes) == (
        {"down": 16, "Core::dot_tiles": 16},
        {"report_hang": 16},
    )
    assert size.layer_bytes == 32
    assert measured(kernel(DOWN, "", called=(Called(16, 32, EMBED),))).layer_bytes == 16


def test_without_lines_nothing_is_counted() -> None:
    with pytest.raises(ToolchainError, match="lines=True"):
        measured(Kernel(bytes(16), ()))


@pytest.mark.parametrize(
    ("mangled", "name"),
    [
        ("_ZN4twin5embedERNS_5BlockEiRKNS_5StageE", "embed"),
        ("_ZN4twin4Core4bestIPFbRKNS_9CandidateES4_EEES2_S2_T_", "Core::best"),
        ("_ZNK4twin4Ring7acquireEj", "Ring::acquire"),
        ("_ZN4twin10TeamVectorILi4096ELi8EE4loadEi", "TeamVector"),
        ("_ZZN4twin10keep_houseERKNS_6LaunchEENKUlPfiE_clES1_i", "keep_house"),
        ("_Z5outerv", "outer"),
        ("_ZStplv", ""),
        ("twin_kernel", ""),
        ("", ""),
    ],
)
def test_a_mangled_name_is_read_up_to_its_template_arguments(mangled: str, name: str) -> None:
    assert function_name(mangled) == name
