"""The choices of blocks whose threads share no rows of a tile: a core, or an AMD block."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import lru_cache

from twin.models.spec import ModelSpec
from twin.plan.attention import Attention
from twin.plan.matrix import Matrix
from twin.plan.options import Options
from twin.plan.types import Plan
from twin.schedule.chosen import multiplied
from twin.schedule.homes import Home, NormOrder, Residual
from twin.schedule.memory import simulated_memory, threads_memory
from twin.schedule.pass_memory import TOKENS
from twin.schedule.passes import passes_of
from twin.schedule.scan import cache_scans
from twin.schedule.tiles import Cutter, cutter_of
from twin.schedule.types import BlockOfWarps, Schedule
from twin.schedule.warp_memory import NO_WARPS
from twin.schedule.warps import work_of_warps


class CoreChooser:
    even_shares = True
    decodes = False
    code_rows = 1

    def loads(self, matrix: Matrix, element_bytes: int) -> int:
        return 1

    def most_splits(self, *, slides: bool) -> int | None:
        return None

    def first_positions(self, options: Options, *, group: int, head_dim: int) -> int:
        """Nobody knows what another order than in turn would bring."""
        return 0

    def tensor_scan(self, options: Options, *, group: int, head_dim: int) -> bool:
        return False

    def scan_heads(self, own: Attention) -> int:
        return 1

    def cached_slot_bytes(self, own: Attention | None, options: Options) -> int:
        return 0

    def prompt_chunk(
        self, spec: ModelSpec, own: Attention, options: Options, *, blocks: int, room: int
    ) -> int:
        return TOKENS

    def own_head_window(self, spec: ModelSpec) -> bool:
        return False

    def cutter(self, plan: Plan) -> Cutter:
        return cutter_of(plan)

    def schedule(self, plan: Plan) -> Schedule:
        return _schedule(plan)

    def priced(self, plan: Plan) -> BlockOfWarps:
        return _priced(plan)

    def check_plan(self, plan: Plan) -> None:
        """Such blocks run every plan that the engine runs."""


CORES = CoreChooser()


@lru_cache(maxsize=64)
def _schedule(plan: Plan) -> Schedule:
    matrices = multiplied(plan)
    if plan.without_code():
        memory = simulated_memory(plan, in_registers=False)
    else:
        memory = threads_memory(plan, matrices)
    scans, passes = cache_scans(plan, CORES), passes_of(plan, CORES)
    return Schedule(plan, matrices, scans, passes, memory, NO_WARPS, NormOrder(), spare_warp=False)


@lru_cache(maxsize=64)
def _priced(plan: Plan) -> BlockOfWarps:
    """An AMD block's waves share no rows: the twin prices them as teams that prefetch, without what
    NVIDIA's kernel alone does.
    """
    own = _schedule(plan)
    like = work_of_warps(plan, own.matrices, short_ahead=True)
    stand_in = replace(
        like,
        residual=Residual(Home.REGISTERS),
        ffn=replace(like.ffn, rounds=1),
        several_parts=False,
    )
    base = {field.name: getattr(own, field.name) for field in fields(own)}
    return BlockOfWarps(**base, warps=stand_in)
