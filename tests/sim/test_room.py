"""Memory of compiled runs is lent from one to the next, and never to two at once."""

from __future__ import annotations

import numpy as np

from tests.sim.machines import node_of, plan_for, usual
from twin.plan.options import CollectiveKind, Options
from twin.sim.compiled.room import Room, lent
from twin.sim.run import simulate

OPTIONS = Options(
    gpus=2, blocks=4, slot_bytes=512, tile_rows=2, max_context=256, collective=CollectiveKind.PUSH
)


def test_what_lay_in_a_room_does_not_matter() -> None:
    node = node_of(usual(dies=2, per_die=2, io_dies=2), 2)
    plan = plan_for(node, OPTIONS)
    before = simulate(plan, node)
    with lent() as room:
        for array in room._held.values():
            array[:] = 0x5A
    assert simulate(plan, node) == before
    assert simulate(plan, node, trace=True).trace == simulate(plan, node, trace=True).trace


def test_two_runs_at_once_have_two_rooms() -> None:
    with lent() as one, lent() as other:
        assert one is not other


def test_a_name_has_its_memory_again() -> None:
    room = Room()
    dtype = np.dtype(np.int64)
    first = room.take("a", 8, dtype)
    assert np.shares_memory(first, room.take("a", 4, dtype))
    assert not np.shares_memory(first, room.take("b", 4, dtype))
    assert len(room.take("a", 16, dtype)) == 16
