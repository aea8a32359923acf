"""The choices of an NVIDIA block, whose warps share the rows of a tile and keep activations in
registers.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext, suppress
from functools import lru_cache

from twin.errors import PlanError
from twin.models.formats import UNIT_BYTES
from twin.models.spec import DType, ModelSpec
from twin.plan.attention import Attention
from twin.plan.catalogue import ENGINE_OPTIONS, INPUTS
from twin.plan.matrix import Matrix
from twin.plan.options import Options
from twin.plan.types import Plan
from twin.schedule import homes
from twin.schedule.block import TEAM_WARPS
from twin.schedule.chosen import multiplied
from twin.schedule.memory import simulated_memory, warps_memory
from twin.schedule.pass_memory import check_tensor_cores, fitting_chunk
from twin.schedule.passes import passes_of
from twin.schedule.prefetch import prefetches
from twin.schedule.scan import cache_scans, check_cache_tiles
from twin.schedule.splits import (
    KEPT_HEAD,
    TENSOR_HEADS,
    TENSOR_POSITIONS,
    WIDE_HEADS,
    slot_positions,
    whole_rows,
)
from twin.schedule.teams import NO_TEAM, Team, teams_by_input
from twin.schedule.tiles import Cutter, cutter_of
from twin.schedule.types import BlockOfWarps, WarpSchedule
from twin.schedule.warp_memory import NO_WARPS, needs_of, warp_sizes

MANY_RANKS = 4  # of whose parts a block looks at several together
# Of a split, before further splits take any: on tensor cores, on them of heads of which a ring slot
# holds a single product, and without them. In the twin (fit 2026-11-24T031558 of an H200) a plan of
# Llama-3.2-1B for 8,192 positions then takes 609 us at 300 positions instead of 638, as one for 432
# does, and 636 at 1,024 instead of 641; 128 to 384 positions are within 2 % of each other from 32
# to 8,000.
FIRST_ON_TENSOR_CORES, FIRST_OF_WIDE_HEADS, FIRST_POSITIONS = 256, 128, 64
# Most of a model with windows: these layers' splits hold little, and O_PROJ gathers all of them. In
# the twin, from 8,192 to 131,072 positions, 64 were never slower than more, and up to 16 % faster:
# GPT-OSS-120B on eight H200 with 32,768 positions 478 tokens/s instead of 412, Gemma-3-1B on one
# with 16,384 positions 1,003 instead of 886.
SPLITS_WITH_WINDOWS = 64
WARP_SETS = 2  # of query heads, each by four warps
# positions of an item; measured on an H200: two heads a key cost 1 % at 200 positions of context
# and save 3 % at 16k
LONG_SCAN = 256


class WarpChooser:
    even_shares = False
    decodes = True
    code_rows = 2

    def loads(self, matrix: Matrix, element_bytes: int) -> int:
        return matrix.pack * element_bytes // UNIT_BYTES

    def most_splits(self, *, slides: bool) -> int | None:
        return SPLITS_WITH_WINDOWS if slides else None

    def first_positions(self, options: Options, *, group: int, head_dim: int) -> int:
        if not self.tensor_scan(options, group=group, head_dim=head_dim):
            return FIRST_POSITIONS
        several = slot_positions(options, head_dim) > TENSOR_POSITIONS
        return FIRST_ON_TENSOR_CORES if several else FIRST_OF_WIDE_HEADS

    def tensor_scan(self, options: Options, *, group: int, head_dim: int) -> bool:
        """A product takes 16 positions and up to 4 query heads; two sets of warps make those of 8,
        and with two products a key those of 16. Rows of cached keys are whole 128 bytes, of 8 bits
        64, in which an item's positions are stored swizzled.

        Two sets of heads beyond 128 elements would put 33 KiB of partial outputs in shared memory,
        a slot of the ring less, and their code spilled 32 bytes (Qwen3-Coder-Next).
        """
        most = WARP_SETS * WIDE_HEADS if head_dim <= KEPT_HEAD else TENSOR_HEADS
        return (
            options.kv_dtype is not DType.FP32
            and whole_rows(options, head_dim)
            and group <= most
            and slot_positions(options, head_dim) >= TENSOR_POSITIONS
        )

    def scan_heads(self, own: Attention) -> int:
        """One, so that heads go side by side; two where a block scans long; more where a group has
        more heads than a block has warps.
        """
        sets = -(-own.group // 2) if own.item_positions >= LONG_SCAN else own.group
        return -(-own.group // min(sets, TEAM_WARPS))

    def cached_slot_bytes(self, own: Attention | None, options: Options) -> int:
        """They come through the ring, a key and its value at once."""
        return own.position_bytes(options.kv_dtype) if own else 0

    def prompt_chunk(
        self, spec: ModelSpec, own: Attention, options: Options, *, blocks: int, room: int
    ) -> int:
        """As many as the tensor cores and the shared memory take."""
        return fitting_chunk(
            spec,
            own,
            ranks=options.gpus,
            blocks=blocks,
            room=room,
            dtype=options.weight_dtype,
            kv_bytes=options.kv_dtype.bytes,
        )

    def own_head_window(self, spec: ModelSpec) -> bool:
        return spec.experts is None

    def cutter(self, plan: Plan) -> Cutter:
        run = all(getattr(plan.options, name) <= most for name, most in ENGINE_OPTIONS.items())
        return cutter_of(plan, teams=plan.attention is not None and run)

    def schedule(self, plan: Plan) -> BlockOfWarps:
        return _schedule(plan)

    def priced(self, plan: Plan) -> BlockOfWarps:
        return _schedule(plan)

    def check_plan(self, plan: Plan) -> None:
        check_tensor_cores(plan)
        check_cache_tiles(plan)


WARPS = WarpChooser()


@lru_cache(maxsize=64)
def _schedule(plan: Plan) -> BlockOfWarps:
    matrices, scans = multiplied(plan), cache_scans(plan, WARPS)
    work = work_of_warps(plan, matrices, short_ahead=False)
    sizes, order = NO_WARPS, homes.NormOrder()
    if plan.without_code():
        memory = simulated_memory(plan, in_registers=True)
    else:
        memory = warps_memory(plan, matrices, needs_of(plan, matrices, work, scans))
        sizes = NO_WARPS | warp_sizes(plan, work, scans)
        order = homes.norm_order(work.residual, work.teams["hidden"])
    passes, spare = passes_of(plan, WARPS), plan.options.polled
    return BlockOfWarps(plan, matrices, scans, passes, memory, sizes, order, spare, work)


def work_of_warps(
    plan: Plan, matrices: tuple[Matrix | None, ...], *, short_ahead: bool
) -> WarpSchedule:
    """What the warps of a block do. `matrices`: [stages] as it multiplies them. `short_ahead`: as
    `prefetches` takes it.
    """
    teams = _teams(plan, matrices)
    ffn = homes.feed_forward(plan, teams["ffn"])
    return WarpSchedule(
        teams=teams,
        prefetch={}
        if plan.without_code()
        else prefetches(plan, teams, ffn_in_memory=ffn.in_memory, short_ahead=short_ahead),
        residual=homes.residual(plan, teams["hidden"], ffn),
        ffn=ffn,
        several_parts=_several_parts(plan),
    )


def _teams(plan: Plan, matrices: tuple[Matrix | None, ...]) -> Mapping[str, Team]:
    """No block has to share the tiles of a plan that the kernel has no code for."""
    with suppress(PlanError) if plan.without_code() else nullcontext():
        return teams_by_input(plan, matrices)
    return dict.fromkeys(INPUTS, NO_TEAM)


def _several_parts(plan: Plan) -> bool:
    """Fewer round trips of four GPUs and more, where registers are left: steps with recurrent
    states spilled. Lanes, and AMD, take parts in turn.
    """
    if plan.ranks < MANY_RANKS or plan.spec is None:
        return False
    return not plan.spec.lanes and not plan.spec.recurs
