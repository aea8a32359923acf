"""What pieces of work cost, and what a plan is compiled to."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest

from tests.sim.machines import (
    MODEL,
    core_kernel,
    fitted,
    ideal,
    limits_of,
    node_of,
    number,
    plan_for,
    warped,
    warps_of,
)
from twin.cost import attention, formats, rests, terms, tiles, vectors
from twin.cost.lowering import compile_plan
from twin.cost.tiles import rolled_rows, team_work
from twin.cost.vectors import partial_alignment, vector_bytes, vector_chunks, vector_rounds
from twin.cost.warp_streams import WarpStreams
from twin.hardware.kernel import Unpacking
from twin.hardware.load import load_device, load_node
from twin.hardware.number import Kind, Number
from twin.hardware.override import apply_fit
from twin.hardware.stated import of_a_core
from twin.hardware.types import Cache, Device
from twin.kernel.experts import compared
from twin.models.formats import DECODED, format_named
from twin.models.load import load_model
from twin.models.spec import DType
from twin.plan.attention import Scan
from twin.plan.catalogue import StageKind
from twin.plan.matrix import Matrix
from twin.plan.options import CollectiveKind, Common, Options, Residual
from twin.plan.types import Plan
from twin.schedule.choose import priced_schedule, schedule_of
from twin.schedule.options import plan_for as default_plan
from twin.schedule.plans import build
from twin.schedule.probe import attention_probe, stream_probe
from twin.sim.run import simulate


def test_a_cost_names_its_terms_and_the_one_that_binds() -> None:
    tile = terms.stage_cost(0.0, 0.0, 10 * 2e-12, 100e-12)
    assert dict(tile.terms) == {"published": 0, "resets": 0, "vector": 20, "stage": 100}
    assert (tile.ps, tile.binding) == (120, "stage")
    assert replace(tile, overlap=True).ps == 100


@pytest.mark.parametrize("name", ["gate_s", "merged_s"])
def test_a_core_pays_for_each_gate_and_each_element_of_a_split_that_it_adds_up(name: str) -> None:
    """One block of one core, so nothing hides it; 40 positions lie in both splits."""
    node = node_of(ideal(per_die=1))
    plan = plan_for(node, Options(blocks=1, attention_splits=2, context=40, max_context=256))
    spec = plan.spec
    assert spec is not None
    merged = 2 * spec.heads * spec.head_dim
    times = {"gate_s": spec.ffn, "merged_s": merged}[name] * spec.layers
    alone, with_it = (
        simulate(plan, replace(node, device=replace(node.device, kernel=kernel))).step_s
        for kernel in (
            node.device.kernel,
            replace(node.device.kernel, **{name: number(1e-6)}),
        )
    )
    assert with_it - alone == pytest.approx(times * 1e-6, rel=2e-3)


def test_the_splits_of_a_head_read_all_its_positions_once() -> None:
    for context, window in ((1, 0), (100, 0), (100, 37), (256, 16)):
        options = Options(
            blocks=4, attention_splits=3, window_splits=2, context=context, max_context=256
        )
        plan = attention_probe(
            options, limits_of(ideal()), heads=4, kv_heads=2, head_dim=16, window=window
        )
        stage, items = plan.stages[0], 4 if window else 6
        assert stage.items[-1][1] == items
        assert (
            sum(attention.item_kv_bytes(plan, stage, item) for item in range(items))
            == plan.kv_bytes()
        )


def test_a_cache_holds_a_step_that_fits_and_nothing_of_one_that_does_not() -> None:
    whole = Cache(number(100), number(1e9), number(0))
    assert [terms.kept_share(size, whole) for size in (0, 100, 101)] == [0, 1, 0]


def test_a_cache_that_loads_do_not_fill_holds_nothing() -> None:
    unfilled = replace(Cache(number(100), number(1e9), number(0)), retention="none")
    assert [terms.kept_share(size, unfilled) for size in (0, 1, 100)] == [0, 0, 0]
    infinity = load_device("mi300x").llc
    assert infinity
    assert terms.kept_share(1, infinity) == 0


def test_a_cache_with_random_replacement_keeps_less_of_a_longer_stream() -> None:
    random = replace(Cache(number(100), number(1e9), number(0)), retention="random")
    shares = [terms.kept_share(size, random) for size in (100, 110, 150, 200, 400)]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] == 1
    assert abs(shares[3] - 0.2032) < 1e-3  # the root of h = exp(-2 (1 - h)) below 1
    assert shares[4] < 0.03


def test_later_steps_stream_from_the_cache_that_holds_them() -> None:
    device = replace(ideal(stream=1e10), llc=Cache(number(1e6), number(1e12), number(0)))
    plan = stream_probe(Options(blocks=4, slot_bytes=512), limits_of(device), rows=64, cols=64)
    result = simulate(plan, node_of(device), steps=3)
    assert result.step_ends_ps[0] == pytest.approx(
        simulate(plan, node_of(device), steps=1).floor_s * 1e12, rel=0.01
    )
    assert result.floor_s == result.bytes_per_step / 1e12
    assert result.step_ps < result.step_ends_ps[0] / 50


def test_parts_of_all_ranks_are_gathered_and_reset() -> None:
    node = node_of(fitted(ideal(), kernel__element_s=1e-9), 2)
    plan = plan_for(
        node,
        Options(
            gpus=2,
            blocks=4,
            slot_bytes=512,
            tile_rows=2,
            max_context=256,
            collective=CollectiveKind.PUSH,
        ),
    )
    program = compile_plan(plan, node.device)
    gate_up = next(stage for stage in plan.stages if stage.kind is StageKind.GATE_UP)
    (read,) = program.stages[0][gate_up.index].reads
    assert read.size == 2 * 64 * 4  # two ranks' partial sums of 64 elements, in FP32
    assert read.cost_ps == 2 * 64 * 1000
    pushed = next(
        s for s in plan.stages for r in s.resets if plan.values[r.value].name == "o_proj[0]"
    )
    others = sum(
        plan.values[r.value].owned[0][1] for r in pushed.resets if not plan.values[r.value].pushed
    )
    fixed = program.stages[0][pushed.index].fixed_ps
    own_publication = 0 if pushed.matrix else plan.values[pushed.publishes or 0].owned[0][1]
    # a core resets a vector of words at once
    resets = (2 * 16 + others) / of_a_core().reset_elements.value
    assert fixed == (resets + own_publication + pushed.vector_elements) * 1000


def test_the_fixed_cost_of_a_row_is_paid_once_however_many_slices_it_has() -> None:
    device = fitted(ideal(per_die=1), kernel__row_s=1e-9)
    for slot_bytes in (128, 4096):
        plan = stream_probe(
            Options(blocks=1, slot_bytes=slot_bytes, tile_rows=2),
            limits_of(device),
            rows=8,
            cols=64,
        )
        (work,) = compile_plan(plan, device).stages[0]
        assert sum(work.slots) - len(work.slots) == 8 * 1000  # a picosecond for each slot's bytes


def test_loads_take_whole_sectors() -> None:
    """Eight elements a thread, 32 bytes: two loads of 16 bytes take each sector twice, four of 8
    bytes four times; of items that begin with a sector threads that load together take it once.
    """
    matrix = (
        stream_probe(Options(blocks=1), limits_of(warped()), rows=8, cols=2048).stages[0].matrix
    )
    assert matrix is not None
    assert [vector_bytes(matrix, aligned=aligned) for aligned in (32, 16, 8)] == [
        4 * 2048,
        2 * 4 * 2048,
        4 * 4 * 2048,
    ]
    assert [partial_alignment(width) for width in (4 * 66, 2 * 66, 3 * 66, 7)] == [32, 16, 8, 4]
    # eight elements of 16 bits are one load
    assert vector_bytes(matrix, aligned=16, element=2) == 2 * 2048


def test_vectors_of_parts_and_splits_are_gathered_in_rounds() -> None:
    """A row of 2,048 columns: one chunk a thread; of 8,192: four."""
    narrow, wide = (
        stream_probe(Options(blocks=1), limits_of(warped()), rows=8, cols=cols).stages[0].matrix
        for cols in (2048, 8192)
    )
    for together, rounds in ((4, [1, 2, 3, 3]), (1, [1, 4, 7, 8])):  # the first part alone
        found = [
            vector_rounds(narrow, parts=parts, splits=0, together=together)
            for parts in (1, 4, 7, 8)
        ]
        assert found == rounds
    assert [vector_rounds(narrow, parts=1, splits=splits) for splits in (1, 8, 16)] == [1, 2, 4]
    # of all chunks together, half as many splits
    assert vector_rounds(wide, parts=1, splits=8) == 4


def test_of_two_gpus_a_block_waits_for_the_other_ones_part_alone() -> None:
    """Its own is there before; of four the others follow one after the other."""
    rounds = []
    for gpus in (2, 4):
        node = load_node(f"{gpus}xh200")
        plan = default_plan(load_model("llama-3.2-1b"), node, context=64)
        works = compile_plan(plan, node.device, steps=1).stages[0]
        gate_up = next(s.index for s in plan.stages if s.kind is StageKind.GATE_UP)
        rounds.append([read.rounds for read in works[gate_up].reads])
    assert rounds == [[0], [1]]


def coded_matrix(cols: int, name: str, *, tile: int = 2048, rows: int = 16) -> Matrix:
    return Matrix(rows, cols, 1, rows, min(tile, cols), ((0, rows),), format_named(name), 16)


def test_splits_are_weighed_in_packs_of_eight_elements() -> None:
    """Of inputs of low-bit weights a thread has two packs in each slice."""
    narrow, wide = coded_matrix(2048, "fp8"), coded_matrix(8192, "fp8")
    assert [vector_chunks(matrix) for matrix in (narrow, wide)] == [2, 4]
    assert [vector_rounds(narrow, parts=1, splits=splits) for splits in (1, 4, 16)] == [1, 2, 8]


def test_tensor_cores_multiply_no_columns_beyond_a_slice() -> None:
    """1,056 columns: 9 chains of 128, of which each of four warps takes three at most. Threads
    multiply those of a whole team.
    """

    def weights(matrix: Matrix) -> float:
        work = team_work(
            warps_of(warped()), matrix, rows=16, cols=matrix.tile_cols, groups=1, dtype=DType.BF16
        )
        return work.weights / 16

    fp4, fp8 = coded_matrix(2112, "mxfp4", tile=1056), coded_matrix(2112, "int4-g32", tile=1056)
    assert weights(fp4) == 3 * 4 * 128
    assert weights(fp8) == 2048
    assert weights(coded_matrix(4096, "nvfp4")) == 2048
    # three slices of two teams: behind the first two one is left, of 832 columns
    assert weights(coded_matrix(4928, "mxfp4")) * 3 == 2 * (2048 + 1024)
    assert weights(coded_matrix(4928, "int4-g32")) * 3 == 2 * (2048 + 2048)


def test_loops_over_rows_pay_each_time() -> None:
    def ends(matrix: Matrix, step_s: float) -> int:
        return team_work(
            warps_of(warped()),
            matrix,
            rows=matrix.tile_rows,
            cols=matrix.tile_cols,
            groups=1,
            dtype=DType.BF16,
            step_s=step_s,
        ).ends_ps

    for matrix, times in (
        (coded_matrix(4096, "fp8", rows=8), 2),
        (coded_matrix(4096, "int4-g128"), 1),
        (coded_matrix(8192, "int4-g128"), 4),
    ):
        assert rolled_rows(matrix) * times == matrix.tile_rows
        more = ends(matrix, 1e-7) - ends(matrix, 0.0)
        assert more == pytest.approx(times * 1e5 / 2, abs=2)  # two teams at once


def test_chosen_experts_are_one_matrix_to_a_block_of_warps() -> None:
    """All their tiles; eight of several tokens are such a matrix twice."""
    node, spec = load_node("1xh200"), load_model("gpt-oss-20b")
    plan, device = default_plan(spec, node), node.device
    streams, several = (
        WarpStreams(schedule_of(default_plan(spec, node, batch=n)), device, warps_of(device))
        for n in (1, 2)
    )
    down = next(stage for stage in plan.stages if stage.kind is StageKind.ROUTED_DOWN)
    assert down.matrix
    for block in (0, 131):
        lo, hi = down.matrix.owned[block]
        found = streams.weights(down, block, (1, 1, 1, 1))
        twice = several.weights(down, block, (2, *[1] * 7))
        groups = -(-(hi - lo) // down.matrix.tile_rows)
        assert len(found.sizes) == 4 * groups * down.matrix.slices
        assert twice.sizes == 2 * found.sizes
        assert twice.costs == 2 * found.costs


def test_heads_of_a_block_are_prepared_a_warp_each() -> None:
    """Four query heads, a key and a value: one round of eight warps; seven query heads: two, the
    second half of six heads' time. Heads of 256 elements take twice as long as of 64, a query head
    alone less.
    """
    warps = warps_of(warped(heads_s=1e-6))
    assert [
        attention.heads_ps(warps, dim, heads)
        for dim, heads in ((64, 3), (64, 6), (128, 6), (256, 6), (64, 9), (64, 17))
    ] == [
        700_000,
        10**6,
        1_333_333,
        2 * 10**6,
        17 * 10**5,
        22 * 10**5,
    ]
    in_step = [attention.heads_ps(warps, 64, heads, in_step=True) for heads in (2, 3, 9, 17)]
    assert in_step == [600_000, 700_000, 700_000, 700_000]


def test_heads_of_narrow_residuals_begin_a_scan_together() -> None:
    """Eight query heads a KV head take no longer to come than two where the residual comes by fours
    of each thread, and longer where it does not.
    """
    node = load_node("1xh200")

    def scan_ps(plan: Plan, heads_s: float) -> int:
        blocks = compile_plan(plan, fitted(node.device, kernel__heads_s=heads_s)).stages
        return max(w.fixed_ps for own in blocks for w in own if w.kind is StageKind.ATTENTION)

    def on_their_way_us(hidden: int, heads: int) -> float:
        spec = load_model("llama-3.2-1b")
        spec = replace(spec, layers=1, windows=(0,), hidden=hidden, heads=heads, kv_heads=2)
        plan = default_plan(spec, node, context=160, max_context=160)
        return (scan_ps(plan, 2e-6) - scan_ps(plan, 1e-6)) / 1e6

    assert on_their_way_us(1024, 16) == on_their_way_us(1024, 4) == 0.7
    assert on_their_way_us(2560, 16) > on_their_way_us(2560, 4) > 0.7


def gathered_splits_us(splits: int, *, heads: int = 64, **numbers: float) -> float:
    """By how much such numbers of a block of warps prolong the output projection's gather. Of 64
    heads each thread has columns of its own, of 16 four threads have the same.
    """
    options = Options(
        blocks=4,
        slot_bytes=512,
        tile_rows=2,
        context=255,
        max_context=256,
        attention_splits=splits,
    )
    plan = build(replace(MODEL, heads=heads), options, limits_of(ideal()))
    without, with_them = (
        next(
            work
            for work in compile_plan(plan, warped(**changed)).stages[0]
            if work.kind is StageKind.O_PROJ
        )
        .reads[0]
        .cost_ps
        for changed in ({}, numbers)
    )
    return (with_them - without) / 1e6


def test_of_fewer_splits_than_are_looked_at_together_the_last_is_loaded_again() -> None:
    """A single split four times, two splits the second of them three times, four each once."""
    took = {splits: gathered_splits_us(splits, crowd_s=1e-6) for splits in (1, 2, 4, 8)}
    assert took == pytest.approx({1: 3.0, 2: 1.0, 4: 0.0, 8: 0.0})


def test_every_split_that_is_looked_at_is_weighed() -> None:
    """Four at once, also where fewer are left."""
    took = {splits: gathered_splits_us(splits, split_s=1e-6) for splits in (1, 4, 6, 8)}
    assert took == pytest.approx({1: 4.0, 4: 4.0, 6: 8.0, 8: 8.0})


def test_threads_with_the_same_columns_share_the_splits() -> None:
    """Each weighs a quarter of them, and then what the four of them found, in half the time; none
    is loaded again.
    """
    took = {splits: gathered_splits_us(splits, heads=16, split_s=1e-6) for splits in (1, 4, 6, 8)}
    assert took == pytest.approx({1: 3.0, 4: 3.0, 6: 4.0, 8: 4.0})
    assert gathered_splits_us(1, heads=16, crowd_s=1e-6) == pytest.approx(0.0)


def test_packs_loops_and_chains_are_those_of_the_kernel() -> None:
    """Numbers that the twin counts by stand in the kernel's source."""
    native = Path(__file__).resolve().parents[2] / "native" / "platform"
    rows = tiles.LOOPED_ROWS  # a step of four-bit weights takes pairs of them
    for file, said in (
        (
            "cuda_core.cuh",
            f"PAIR == 1 ? (Family::GATED ? {rows} : {2 * rows}) : Vector::PORTIONS > 1 ? "
            f"{rows // 2} : {2 * rows})",
        ),
        ("cuda_fragments.cuh", f"CHAIN = {tiles.CHAIN_GROUPS} * UNITS;"),
        (
            "cuda_layout.cuh",
            f"VECTOR < {vectors.PACK_ELEMENTS} ? VECTOR : {vectors.PACK_ELEMENTS};",
        ),
    ):
        assert said in (native / file).read_text(encoding="utf-8"), file


def of_fixed_work(model: str, **changed: float) -> dict[StageKind, int]:
    """A block's time for what a stage does once, by kind of stage."""
    node = load_node("1xh200")
    numbers = {
        f"kernel.{name}": Number(value, Kind.ASSUMED, "test", value, value)
        for name, value in changed.items()
    }
    spec = load_model(model)
    plan = default_plan(replace(spec, layers=2, windows=spec.windows[:2]), node)
    program = compile_plan(plan, apply_fit(node, numbers).device)
    return {work.kind: work.fixed_ps for work in program.variants[0].stages[0]}


def test_inputs_of_low_bit_weights_are_settled_in_every_stage_that_gathers() -> None:
    def longer(model: str) -> set[StageKind]:
        long, short = of_fixed_work(model, settle_s=2e-6), of_fixed_work(model, settle_s=1e-6)
        added = {kind: long[kind] - short[kind] for kind in long}
        assert set(added.values()) <= {0, 10**6}
        return {kind for kind, ps in added.items() if ps}

    assert not longer("llama-3.2-1b")
    gathering = {StageKind.QKV, StageKind.O_PROJ, StageKind.GATE_UP, StageKind.DOWN}
    assert longer("llama-3.2-1b@fp8") == {*gathering, StageKind.LM_HEAD}
    # a chosen expert's rows multiply what ROUTE has gathered
    routed = {StageKind.QKV, StageKind.O_PROJ, StageKind.ROUTE, StageKind.ROUTED_DOWN}
    assert longer("gpt-oss-20b") == {*routed, StageKind.LM_HEAD}


def test_inputs_are_quantised_where_threads_multiply_integers() -> None:
    for model, made in (("int8", True), ("int4-g128", True), ("fp8", False), ("mxfp4", False)):
        name = f"llama-3.2-1b@{model}"
        long, short = of_fixed_work(name, quantise_s=2e-6), of_fixed_work(name, quantise_s=1e-6)
        slices = {kind: (long[kind] - short[kind]) / 1e6 for kind in long}
        assert slices[StageKind.QKV] == int(made)
        assert slices[StageKind.DOWN] == 2 * made  # a team sees two slices of 8,192 columns
        assert slices[StageKind.LM_HEAD] == 0


def test_a_format_takes_the_rate_of_its_element() -> None:
    device, weights = load_node("1xh200").device, 10**6
    for name, form in DECODED.items():
        rate = getattr(device.kernel, formats.RATES[formats.decoded_as(form)]).value
        taken = formats.unpacking_s(device.kernel, form, weights)
        assert taken == weights * form.bits / 8 / rate, name
    core = core_kernel()
    slow = formats.unpacking_s(core, DECODED["int8"], weights)
    assert slow == weights * core.unpacking.int8_ratio.value * 2 / core.bf16_bytes_per_s.value


@pytest.mark.parametrize("name", ["8xh200", "8xb300", "8xmi300x"])
def test_a_projection_decodes_by_the_rates_that_were_probed(name: str) -> None:
    """Of a plan that the engine cannot run, whose matrices are not its tiles."""
    node = load_node(name)
    chosen = {"common": Common.SHARDED, "residual": Residual.SLICED}
    plan = default_plan(load_model("gpt-oss-120b"), node, **chosen)
    forms = {m.format for s in plan.stages for m in s.matrices if m.format and m.format.bits == 4}
    (form,) = forms
    assert not form.coded
    kernel = warps_of(node.device)
    assert "unpacking.mxfp4_ratio" in rests.untouched(plan, kernel)
    assert "fp4_bytes_per_s" not in rests.untouched(plan, kernel)
    probed = 10**6 / 2 / kernel.fp4_bytes_per_s.value
    assert formats.unpacking_s(kernel, form, 10**6) == probed


def test_a_plan_rests_on_the_numbers_of_its_own_formats() -> None:
    node = load_node("1xh200")
    plans = {name: default_plan(load_model(name), node) for name in ("qwen3-8b@fp8", "gpt-oss-20b")}
    kernel = node.device.kernel
    idle = {name: set(rests.untouched(plan, kernel)) for name, plan in plans.items()}
    assert "fp8_bytes_per_s" not in idle["qwen3-8b@fp8"]
    assert idle["qwen3-8b@fp8"] >= {"fp4_bytes_per_s", "step_s", "quantise_s"}
    assert idle["gpt-oss-20b"] >= {"int4_bytes_per_s", "step_s"}
    assert "settle_s" not in idle["qwen3-8b@fp8"] | idle["gpt-oss-20b"]
    dense = rests.untouched(default_plan(load_model("llama-3.2-1b"), node), kernel)
    others = (
        "by_fours_s",
        "quantise_s",
        "step_s",
        "settle_s",
        "state_s",
        "state_element_s",
        "compare_s",
    )
    ratios = {f"unpacking.{field.name}" for field in fields(Unpacking)}
    assert set(dense) == {*formats.RATES.values(), *others, *ratios}
    assert "compare_s" not in idle["gpt-oss-20b"]


def scan_of(model: str, node: str, kind: StageKind) -> tuple[Plan, Scan]:
    plan = default_plan(load_model(model), load_node(node))
    return plan, next(s.scan for s in plan.stages if s.kind is kind and s.scan)


def test_a_recurrent_state_is_one_request() -> None:
    """128 x 32 elements over 256 threads, and three positions of 288 channels."""
    plan, scan = scan_of("qwen3-coder-next@fp8-128x128", "1xh200", StageKind.DELTA)
    device = warped(state_s=3e-6, state_element_s=1e-8)
    entries = list(streams_of(plan, device)._entries(StageKind.DELTA, scan, 0))
    assert entries == [(4 * (128 * 32 + 3 * 288), 3_160_000)]
    assert "state_s" not in rests.untouched(plan, device.kernel)


def test_wide_entries_are_multiplied_by_tensor_cores() -> None:
    """Entries of 576 elements: 16 query heads at once, twice 36 steps of 16 elements against the 8
    of a probed unit; 8 warps take 16 entries each.
    """
    plan, scan = scan_of("deepseek-v3", "8xh200", StageKind.ATTENTION)
    assert (scan.group, scan.dim) == (16, 576)
    device = warped(unit_s=13e-6, item_s=1e-6)
    entries = list(streams_of(plan, device)._entries(StageKind.ATTENTION, scan, 0))
    times = [ps / 1e6 for _, ps in entries]
    assert times[0] == pytest.approx(78.0)
    assert set(times[1:]) <= {77.0}
    assert sum(size for size, _ in entries) == scan.item_bytes(0)
    assert "kernel.unit_s" in {path.removeprefix("device.") for path in rests_on(plan)}


def rests_on(plan: Plan) -> set[str]:
    """Assumed numbers of an H200 without a fit."""
    return set(rests.rests_on(plan, load_node("8xh200")))


def streams_of(plan: Plan, device: Device) -> WarpStreams:
    return WarpStreams(priced_schedule(plan), device, warps_of(device))


@pytest.mark.parametrize(
    ("experts", "top_k", "looks"),
    [(16, 4, 16), (64, 8, 64), (128, 8, 64 + 16), (512, 10, 2 * 64 + 80), (70, 40, 70)],
)
def test_a_thread_looks_at_groups_of_experts(experts: int, top_k: int, looks: int) -> None:
    """Of 70 experts two groups would not hold 40 each."""
    assert compared(experts, top_k, 256) == looks


def test_a_choice_takes_as_long_as_its_looks() -> None:
    long, short = (of_fixed_work("qwen3-30b-a3b", compare_s=one) for one in (2e-8, 1e-8))
    added = {kind: (long[kind] - short[kind]) / 1e6 for kind in long}
    assert {kind: us for kind, us in added.items() if us} == {StageKind.ROUTE: pytest.approx(0.8)}
