"""What C++ and Python agree on: enums, struct sizes, tables, and where each weight lies in a
stream.
"""

from __future__ import annotations

import ctypes
import re
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.draws import drawn
from twin.engine.weights import random_weights
from twin.errors import PlanError
from twin.hardware.load import load_node
from twin.kernel.fields import FIELDS, record
from twin.kernel.header import ENUMS, Control, RankMemory, Request, header
from twin.kernel.packing import pack
from twin.kernel.runs import runs
from twin.kernel.streams import PAGE_BYTES
from twin.kernel.tables import layout
from twin.models.load import load_model
from twin.models.spec import WEIGHT_TYPES, DType, Lanes, ModelSpec, Rope
from twin.plan.catalogue import StageKind
from twin.plan.matrices import stage_matrix
from twin.plan.matrix import tiles
from twin.plan.options import CollectiveKind, Execution, HandOffKind, Limits, Options
from twin.plan.types import Plan
from twin.schedule.options import plan_for
from twin.schedule.plans import build
from twin.schedule.ring import limits_of
from twin.schedule.scan import check_cache_tiles
from twin.toolchain import build_host

LIMITS = Limits(64, 1, 2**30, 2**40, True)
SPEC = ModelSpec(
    name="tiny",
    family="llama",
    layers=2,
    hidden=40,
    heads=4,
    kv_heads=2,
    head_dim=8,
    ffn=56,
    vocab=33,
    context=64,
    norm_eps=1e-5,
    rope=Rope(10000.0),
    windows=(0, 0),
    qkv_bias=True,
)


def planned(**chosen: object) -> Plan:
    base = {
        "context": 8,
        "max_context": 32,
        "kv_page": 4,
        "weight_dtype": DType.FP32,
        "slot_bytes": 512,
        "blocks": 3,
    }
    return build(SPEC, Options(**(base | chosen)), LIMITS)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["StageKind", "Parts", "HandOff", "Type", "Status", "Gate"])
def test_the_header_numbers_enums_as_python_does(name: str) -> None:
    found = re.search(rf"enum class {name} : int {{ (.*) }};", header(planned()))
    assert found is not None
    assert found[1] == ", ".join(f"{member.name} = {at}" for at, member in enumerate(ENUMS[name]))


def expanded(numbers: list[float]) -> list[float]:
    """As native/platform/tables.h says."""
    words: list[float] = []
    at = 0
    while at < len(numbers):
        count, distance = int(numbers[at]), int(numbers[at + 1])
        for i in range(count):
            step = numbers[at + 2 + (0 if distance else i)]
            words.append(words[-distance] + step if distance else step)
        at += 3 if distance else 2 + count
    return words


@drawn(50)
@given(
    st.lists(st.integers(-3, 3), min_size=1, max_size=8),
    st.lists(st.tuples(st.integers(1, 40), st.integers(-2, 2)), max_size=8),
)
def test_runs_expand_to_the_numbers_that_they_were_made_of(
    first: list[int], pieces: list[tuple[int, int]]
) -> None:
    numbers = [float(one) for one in first]
    for count, step in pieces:
        numbers += [numbers[-1] + step * (i + 1) for i in range(count)]
    made = runs(np.array(numbers))
    assert expanded(made) == numbers
    assert len(made) <= len(numbers) + 2


def test_every_plan_has_the_same_names() -> None:
    """So the kernel asks nobody whether a name is there."""

    def names(text: str) -> list[str]:
        declared = re.findall(
            r"^  (?:static constexpr )?(?:int|float|bool|Gate) (\w+)(?: = .*)?;", text, re.M
        )
        return sorted(declared) + re.findall(r"^struct \w+|^constexpr \w+ [A-Z_]+", text, re.M)

    gpt_oss = plan_for(load_model("gpt-oss-20b"), load_node("1xh200"))
    assert names(header(gpt_oss)) == names(header(planned()))


def test_a_header_has_some_hundreds_of_lines() -> None:
    plan = plan_for(load_model("qwen3-coder-next"), load_node("1xh200"))
    assert len(header(plan).splitlines()) < 1100


@pytest.mark.parametrize(
    ("head_dim", "slot_bytes", "said"),
    [
        (8, 1024, ""),
        (4, 1024, "head_dim=4: a cached key of 8 bytes is no multiple of 16"),
        (
            256,
            512,
            "slot_bytes=512 holds no cached key and value of 512 bytes each: use at least 1024",
        ),
    ],
)
def test_cached_rows_fit_the_ring_of_an_nvidia_block(
    head_dim: int, slot_bytes: int, said: str
) -> None:
    options = Options(
        context=8,
        max_context=32,
        slot_bytes=slot_bytes,
        weight_dtype=DType.FP16,
        kv_dtype=DType.FP16,
    )
    plan = build(replace(SPEC, head_dim=head_dim), options, LIMITS)
    with pytest.raises(PlanError, match=said) if said else nullcontext():
        check_cache_tiles(plan)


def test_only_gate_up_makes_one_element_of_two_rows() -> None:
    """from_residual in stages.cuh takes it for granted, and spares a look at the table behind the
    hand-off.
    """
    for stage in build(SPEC, Options(blocks=2, slot_bytes=1024), LIMITS).stages:
        assert stage.matrix is None or stage.matrix.unit == (
            2 if stage.kind is StageKind.GATE_UP else 1
        )


def test_the_same_plan_gives_the_same_header() -> None:
    assert header(planned()) == header(planned())
    assert header(planned(), embedded=False) == header(planned(blocks=2), embedded=False), (
        "plans share host binaries"
    )
    assert header(planned()) != header(planned(blocks=2))


def test_structs_have_the_size_that_the_compiler_gives_them() -> None:
    plan = planned(kv_dtype=DType.FP32)  # shares its binary with the engine's tests
    library = ctypes.CDLL(str(build_host(header(plan, embedded=False))))
    words = len(layout(plan).sizes)
    assert [library.twin_sizes(i) for i in range(4)] == [
        *(ctypes.sizeof(s) for s in (RankMemory, Request, Control)),
        4 * words,
    ]


def test_the_image_holds_every_table_row_by_row() -> None:
    plan = planned(handoff=HandOffKind.SENTINEL)
    made = layout(plan)
    words = made.image()
    for at, (name, table) in enumerate(made.tables.items(), start=1):
        fields = FIELDS[name][1]
        rows = words[words[at] :][: len(table) * len(fields)].reshape(-1, len(fields))
        assert [len(r) for r in table] == [len(fields)] * len(table)
        if "scale" not in fields:
            assert rows.tolist() == [list(r) for r in table]
    kinds = [row[0] for row in made.stages]
    assert [list(StageKind)[k] for k in kinds] == [s.kind for s in plan.stages]


@drawn(25)
@given(
    blocks=st.integers(1, 5),
    slot=st.sampled_from([256, 512, 1024, 16384]),
    rows=st.sampled_from([2, 4, 8]),
    dtype=st.sampled_from(WEIGHT_TYPES),
)
def test_a_stream_is_its_stages_tiles_back_to_back(
    blocks: int, slot: int, rows: int, dtype: DType
) -> None:
    plan = planned(blocks=blocks, slot_bytes=slot, tile_rows=rows, weight_dtype=dtype)
    weights = random_weights(SPEC, 1, dtype)
    made = layout(plan)
    out = np.zeros(int(made.sizes["stream_pages"]) * PAGE_BYTES, np.uint8)
    pack(plan, made.weights, weights, 0, out)
    for block in range(blocks):
        expected = b""
        for stage in plan.stages:
            if not stage.matrix:
                continue
            matrix = np.asarray(stage_matrix(plan, stage, 0, weights))
            parts = [
                matrix[r[0] : r[1], c[0] : c[1]].tobytes() for r, c in tiles(stage.matrix, block)
            ]
            assert max(len(p) for p in parts) <= slot
            expected += b"".join(parts)
        start = int(made.streams[block][0]) * PAGE_BYTES
        assert len(expected) == made.weights.block_bytes[block]
        assert out[start : start + len(expected)].tobytes() == expected


def test_starts_are_where_each_stages_tiles_begin() -> None:
    plan = planned(execution=Execution.GRAPH)
    made = layout(plan)
    at = [0] * plan.blocks
    for stage in plan.stages:
        for block in range(plan.blocks):
            assert made.starts[stage.index * plan.blocks + block] == (at[block] // 16,)
            if stage.matrix is None:
                continue
            for rows, cols in tiles(stage.matrix, block):
                at[block] += plan.stored_bytes(stage.matrix, rows[1] - rows[0], cols[1] - cols[0])
    assert layout(planned()).starts == []


def test_constants_lie_where_the_stage_table_says() -> None:
    plan = planned()
    weights = random_weights(SPEC, 1, DType.FP32)
    constants = layout(plan).constants.pack(weights, 0)
    fields = FIELDS["stages"][1]
    row = layout(plan).stages[1]  # QKV of layer 0
    norm = row[fields.index("norm")]
    assert np.array_equal(
        constants[norm : norm + SPEC.hidden], weights["layers.0.attn_norm"].astype(np.float32)
    )
    assert row[fields.index("bias")] >= 0
    assert row[fields.index("q_norm")] == -1


@pytest.mark.parametrize("node", ["1xh200", "1xmi300x", "1xhost"])
def test_only_teams_of_warps_have_norms_in_another_order(node: str) -> None:
    """An MI300X's and a CPU's blocks read a norm's weights from the first on."""
    limits = limits_of(load_node(node))
    spec = replace(SPEC, hidden=2048, head_dim=64, ffn=128)
    plan = build(
        spec,
        Options(blocks=4, context=8, max_context=32, slot_bytes=4096, weight_dtype=DType.FP16),
        limits,
    )
    weights = random_weights(spec, 1, DType.FP16)
    at = layout(plan).stages[1][FIELDS["stages"][1].index("norm")]
    lies = layout(plan).constants.pack(weights, 0)[at : at + 2048]
    given = weights["layers.0.attn_norm"].astype(np.float32)
    assert np.array_equal(np.sort(lies), np.sort(given))
    assert np.array_equal(lies, given) == (not limits.teams)


def test_counters_wait_for_all_writers_of_the_copy() -> None:
    """Each value's arrivals follow those of the value that used its copy before."""
    spec = replace(
        SPEC,
        layers=8,
        windows=(0,) * 8,
        heads=4,
        kv_heads=4,
        ffn=64,
        hidden=48,
        qkv_bias=False,
        lanes=Lanes(2, 1),
    )
    options = Options(
        blocks=4,
        context=8,
        max_context=32,
        collective=CollectiveKind.PUSH,
        handoff=HandOffKind.COUNTER,
    )
    plan = build(spec, options, LIMITS)
    fields = FIELDS["values"][1]
    by_counter: dict[int, list[tuple[int, int, int]]] = {}
    for value, row in zip(plan.values, layout(plan).values, strict=True):
        named = dict(zip(fields, row, strict=True))
        writers = sum(lo < hi for lo, hi in value.owned)
        by_counter.setdefault(int(named["counter"]), []).append(
            (int(named["arrivals"]), writers, int(named["arrivals_per_step"]))
        )
    for arrivals in by_counter.values():
        assert [a for a, _, _ in arrivals] == list(np.cumsum([w for _, w, _ in arrivals]))
        assert {p for _, _, p in arrivals} == {arrivals[-1][0]}


@pytest.mark.parametrize("named", [{"value": 1}, {"value": 1, "previous_step": 0, "later": 2}])
def test_a_row_names_every_field_of_its_struct_and_no_other(named: dict[str, int]) -> None:
    assert record("resets", previous_step=3, value=1) == (1, 3)
    with pytest.raises(KeyError):
        record("resets", **named)
