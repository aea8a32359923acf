"""What the compiler made of the kernel for gfx942: no memory for registers, the loads and products
that the source names, and the caches written back and invalidated where a hand-off needs it and
nowhere else.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from tests.gfx942.code import MI300X, Code, code_of, compiled
from tests.gfx942.small import SPEC, STRIPS, small, strips
from twin.engine.hip_build import cached_code_object
from twin.errors import ToolchainError
from twin.models.spec import DType
from twin.plan.options import CollectiveKind, HandOffKind, Placement, Sampling
from twin.schedule.strips import strips_of

VGPRS = 256  # of a lane, with two waves on each of a CU's four SIMDs
ROWS, WORDS = 4, 4  # of a strip, whose loads are under way together; of a load
LANES: dict[str, Any] = {"gpus": 2, "collective": CollectiveKind.PUSH}

PLANS = {
    "sentinel": small(placement=Placement.BY_DIE),
    "flat": small(),
    "counter": small(handoff=HandOffKind.COUNTER),
    "grid": small(handoff=HandOffKind.GRID),
    "two GPUs": small(**LANES),
    "two GPUs, counter": small(handoff=HandOffKind.COUNTER, **LANES),
    "full": small(sampling=Sampling.FULL),
    "BF16": small(weight_dtype=DType.BF16, kv_dtype=DType.BF16),
    "FP8 caches": small(kv_dtype=DType.FP8),
}
SOME = [
    name if name in ("sentinel", "counter") else pytest.param(name, marks=pytest.mark.slow)
    for name in PLANS
]


@pytest.mark.few(1)
@pytest.mark.parametrize("name", SOME)
def test_registers_and_local_memory_suffice(name: str) -> None:
    report = compiled(PLANS[name])
    assert (report.vgpr_spills, report.scratch_bytes) == (0, 0)
    assert report.vgprs <= VGPRS
    code = code_of(PLANS[name])
    assert code.lds_bytes == report.lds_bytes <= MI300X.on_chip_bytes
    assert code.count(r"^(scratch_|buffer_(load|store))") == 0


@pytest.mark.parametrize("name", SOME)
def test_weights_are_streamed_by_loads_of_four_words_that_leave_the_caches_alone(name: str) -> None:
    code = code_of(PLANS[name])
    streaming = code.count(r"^global_load_dwordx4 .* nt$")
    assert streaming > 0
    first = ROWS * strips_of(PLANS[name])  # at the kernel's start; later ones behind the products
    assert streaming % first == 0
    # of FP16 pairs with both parts of the input
    products = 2 * WORDS if PLANS[name].options.weight_dtype is DType.FP16 else 0
    assert code.count("^v_dot2") == products * (streaming - first)
    assert code.count(" nt$") == streaming


@pytest.mark.few(1)
@pytest.mark.parametrize("count", [STRIPS, 1, pytest.param(4, marks=pytest.mark.slow)])
def test_a_wait_for_a_strip_leaves_the_others_under_way(count: int) -> None:
    """Else the stream would stand still while a wave multiplies."""
    plan = small(placement=Placement.BY_DIE, **strips(count))
    assert strips_of(plan) == count
    code = code_of(plan).instructions
    left = []
    for n, one in enumerate(code):
        before = code[n - 40 : n]
        if one.name.startswith("v_dot2") and not any(b.name.startswith("v_dot2") for b in before):
            said = " ".join(
                w.operands for w in (*before, *code[n : n + 20]) if w.name == "s_waitcnt"
            )
            left += [int(count) for count in re.findall(r"vmcnt\((\d+)\)", said)]
    assert left
    assert min(left) >= ROWS * (count - 1)


@pytest.mark.parametrize("name", SOME)
def test_sums_of_a_wave_are_made_by_moves_between_lanes(name: str) -> None:
    code = code_of(PLANS[name])
    for move in (
        r"quad_perm:\[1,0,3,2\]",
        r"quad_perm:\[2,3,0,1\]",
        "row_half_mirror",
        "row_mirror",
        "row_bcast:15",
        "row_bcast:31",
    ):
        assert code.count(f"_dpp .*{move}"), move


@pytest.mark.parametrize("name", SOME)
def test_who_spins_sleeps_between_two_looks(name: str) -> None:
    assert code_of(PLANS[name]).count("^s_sleep 1$")


def test_the_kernel_asks_on_which_die_it_runs() -> None:
    assert (
        code_of(PLANS["counter"]).count(r"^s_getreg_b32 s\d+, hwreg\(HW_REG_XCC_ID, 0, 4\)$") == 1
    )


def caches(code: Code) -> tuple[int, int, int, int]:
    """Invalidations of a CU's and a die's caches, and of those of a GPU; write-backs of a die's for
    a hand-off, and of a GPU's.

    Not those before a word that the host reads: it may only see what was written before.
    """
    writes = {"buffer_wbl2 sc1": 0, "buffer_wbl2 sc0 sc1": 0}
    for n, one in enumerate(code.instructions):
        if one.name != "buffer_wbl2":
            continue
        after = [f"{i.name} {i.operands}" for i in code.instructions[n + 1 : n + 5]]
        published = one.operands == "sc0 sc1" and any(
            "_store_" in i and i.endswith("sc0 sc1") for i in after
        )
        writes[f"buffer_wbl2 {one.operands}"] += not published
    near, far = code.count("^buffer_inv sc1$"), code.count("^buffer_inv sc0 sc1$")
    return near, far, writes["buffer_wbl2 sc1"], writes["buffer_wbl2 sc0 sc1"]


@pytest.mark.parametrize("name", SOME)
def test_caches_are_written_back_and_invalidated_where_a_hand_off_needs_it(name: str) -> None:
    """Sentinels never: their words pass by the caches. Counters write back before the arrivals, on
    some paths behind a wait too, and invalidate behind waits.
    """
    plan, found = PLANS[name], caches(code_of(PLANS[name]))
    if plan.options.sampling is Sampling.FULL:  # logits and their token are in order for the host
        assert found == (0, 2, 0, 2)
        return
    if plan.options.handoff is HandOffKind.SENTINEL:
        assert found == (0, 0, 0, 0)
        return
    near, far, back, back_far = found
    assert near >= 1
    assert 1 <= back <= 3
    assert (far > 0, back_far > 0) == (plan.options.gpus > 1,) * 2


@pytest.mark.parametrize("name", SOME)
def test_no_word_is_exchanged_at_a_wider_scope_than_its_readers_need(name: str) -> None:
    """On one GPU only the host's words pass by its own caches: they lie next to what waits, cancels
    and tells.
    """
    plan, code = PLANS[name], code_of(PLANS[name])
    agent = code.count(r"_load_dword .*(?<!sc0) sc1$")
    system = code.count(r"_load_dword .* sc0 sc1$")
    polls = code.count(r"^s_sleep 1$")
    assert agent > 0
    if plan.options.gpus == 1:
        # what the host says of logits: that they are taken, and biased, and their biases
        said = 3 if plan.options.sampling is Sampling.FULL else 0
        assert system <= polls + 1 + said, (
            "one look at the abort word for each wait, and one at the step's end"
        )


@pytest.mark.parametrize("name", SOME)
def test_no_access_may_be_to_local_or_global_memory(name: str) -> None:
    """Such ones end in no order, so a wait for one of them is a wait for all."""
    assert code_of(PLANS[name]).count("^flat_") == 0


@pytest.mark.slow
def test_the_published_models_kernel_fits() -> None:
    """Laneformer-2B on eight GPUs."""
    from tests.native.test_device_builds import planned

    plan = planned(
        "laneformer-2b",
        MI300X,
        gpus=8,
        blocks=256,
        slot_bytes=4096,
        collective=CollectiveKind.PUSH,
        weight_dtype=DType.FP16,
    )
    report = compiled(plan)
    assert (report.vgpr_spills, report.scratch_bytes) == (0, 0)
    assert report.vgprs <= VGPRS
    assert report.lds_bytes <= MI300X.on_chip_bytes


def test_a_plan_whose_vectors_exceed_local_memory_is_refused() -> None:
    plan = small(replace(SPEC, ffn=16384))
    with pytest.raises(ToolchainError, match="exceed a compute unit's local data share"):
        cached_code_object(plan, "gfx942")
