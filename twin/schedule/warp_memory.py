"""What NVIDIA's warps need of a block's scratch, and what the generated header says of them."""

from __future__ import annotations

from collections.abc import Sequence

from twin.models.formats import PACK, UNIT_BYTES
from twin.plan.attention import PARTIAL_EXTRA, Attention
from twin.plan.catalogue import ALWAYS, INPUTS
from twin.plan.matrix import Matrix
from twin.plan.types import Plan
from twin.schedule.block import LINE_FLOATS, TEAM_WARPS, WARP, up
from twin.schedule.homes import Home
from twin.schedule.memory import OfWarps
from twin.schedule.products import tensor_products
from twin.schedule.scan import CacheScan
from twin.schedule.teams import Team
from twin.schedule.types import WarpSchedule

HEAD_PACK, NARROW_PACK = 8, 4  # of one attention head: PACK in cuda_layout.cuh


def needs_of(
    plan: Plan, matrices: tuple[Matrix | None, ...], warps: WarpSchedule, scans: Sequence[CacheScan]
) -> OfWarps:
    """`matrices`: [stages] as a block multiplies them."""
    hidden, units = warps.teams["hidden"], _tensor_units(matrices)
    in_memory = warps.residual.home is Home.SHARED
    return OfWarps(
        partials=tuple(scan.partials for scan in scans),
        exchange=warps.residual.exchange_floats,
        combined=_combined_floats(plan, warps),
        held=hidden.portions * hidden.vector * hidden.warps * WARP if in_memory else 0,
        whole=_whole_floats(plan, warps, units),
        whole_units=units,
    )


def _combined_floats(plan: Plan, warps: WarpSchedule) -> int:
    """Where threads that hold the same columns meet when they have combined attention's splits
    (combine.cuh).
    """
    makers = zip(("heads", "other"), plan.attentions, strict=False)
    return max((_combined_by(warps.teams[name], own) for name, own in makers), default=0)


def _combined_by(team: Team, own: Attention) -> int:
    if team.slices == 0 or team.groups == 1:
        return 0
    pack = min(team.vector, HEAD_PACK) if own.head_dim % team.vector == 0 else NARROW_PACK
    record = team.vector // pack * (pack + PARTIAL_EXTRA)
    return team.groups * record * team.slices * team.size * WARP


def _whole_floats(plan: Plan, warps: WarpSchedule, units: int) -> int:
    """The widest input of a matrix that tensor cores multiply as whole numbers, and zeros for what
    a tile's last columns lack; or what of one is too wide for registers.
    """
    team, ffn = warps.teams["ffn"], warps.ffn
    # two bytes of each element, a scale of each unit; a load of zeros
    tensor = units * (2 * PACK // 4 + 1) + UNIT_BYTES // 4 if units else 0
    wide = _wide_units(plan, warps) * (2 * PACK // 4 + 2)  # a scale and a sum of each unit
    # elements for which threads have no registers: of whole slices
    spilled = (team.portions - ffn.in_registers) * team.vector * team.warps * WARP
    return up(max(tensor, wide, spilled), LINE_FLOATS)


def _wide_units(plan: Plan, warps: WarpSchedule) -> int:
    """Of PACK elements, that a feed-forward's input has in shared memory: a thread's parts of all
    slices, those of threads without columns too. None where tensor cores have theirs.
    """
    if not warps.ffn.in_memory:
        return 0
    ffn = (s.matrix for s in plan.stages if s.matrix and plan.input_of(s) == "ffn")
    if any(map(tensor_products, ffn)):
        return 0
    team = warps.teams["ffn"]
    return team.portions * team.warps * WARP


def _tensor_units(matrices: tuple[Matrix | None, ...]) -> int:
    """Of PACK elements, that an input of tensor cores has, with those that fill the last load of
    their scales: zeros follow, and a load of them is aligned.
    """
    wide = [-(-m.cols // PACK) for m in matrices if m and tensor_products(m)]
    return up(max(wide, default=0), UNIT_BYTES // 4)


def warp_sizes(plan: Plan, warps: WarpSchedule, scans: Sequence[CacheScan]) -> dict[str, int]:
    """Of the generated header: warps that compute, how they share the matrices of each input."""
    portions, scan = warps.teams["hidden"].portions, scans[0]
    sizes = {
        "consumer_warps": TEAM_WARPS,
        "scan_heads": scan.heads,
        "cache_tile": scan.positions,
        "tensor_scan": int(scan.tensor),
        "wide_ffn": int(warps.ffn.in_memory),
        "ffn_in_registers": warps.ffn.in_registers,
        "ffn_at_once": warps.ffn.at_once,
        "residual_shared": int(warps.residual.home is Home.SHARED),
        "residual_by_fours": int(warps.residual.home is Home.BY_FOURS),
        "parts_together": warps.parts_together(portions, coded=plan.coded),
    }
    if len(scans) > 1:
        other = scans[1]
        sizes |= {
            "other_scan_heads": other.heads,
            "other_cache_tile": other.positions,
            "other_tensor_scan": int(other.tensor),
        }
    used = {plan.input_of(stage) for stage in plan.stages}
    for name in (name for name in INPUTS if name in ALWAYS or name in used):
        team, prefetch = warps.teams[name], warps.prefetch[name]
        sizes |= {
            f"{name}_cols": team.cols,
            f"{name}_tile": team.tile,
            f"{name}_vector": team.vector,
            f"{name}_team": team.size,
            f"{name}_ahead_chunks": prefetch.portions,
            f"{name}_ahead_groups": prefetch.groups,
        }
    return sizes


# what the header says of blocks without such warps
NO_WARPS = dict.fromkeys(
    (
        "consumer_warps",
        "scan_heads",
        "cache_tile",
        "tensor_scan",
        "wide_ffn",
        "ffn_in_registers",
        "ffn_at_once",
        "residual_shared",
        "residual_by_fours",
        "parts_together",
        *(
            f"{use}_{what}"
            for use in ALWAYS
            for what in ("cols", "tile", "vector", "team", "ahead_chunks", "ahead_groups")
        ),
    ),
    0,
)
