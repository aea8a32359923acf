"""Plans of many simulations, which share what does not change between them."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from twin.hardware.types import Node
from twin.kernel.room import check_room
from twin.models.spec import ModelSpec
from twin.plan.types import Plan
from twin.proof.prove import prove
from twin.schedule.options import plan_for
from twin.schedule.ring import limits_of

KEPT = 16  # plans

_kept: OrderedDict[tuple[object, ...], Plan] = OrderedDict()


def planned(spec: ModelSpec, node: Node, *, suggest: bool = False, **chosen: Any) -> Plan:
    """plan_for, proven; the same object for the same model, chosen options and limits of the node.

    `suggest`: what the node does not hold is refused with the smallest node that does.
    Raises PlanError or InvalidPlan; refusals are not remembered.
    """
    key = (spec, node.gpus, limits_of(node), tuple(sorted(chosen.items())))
    if key not in _kept:
        plan = plan_for(spec, node, **chosen)
        # before the proof, which takes longer and counts bytes
        check_room(plan, node, chosen if suggest else None)
        prove(plan)
        _kept[key] = plan
        if len(_kept) > KEPT:
            _kept.popitem(last=False)
    _kept.move_to_end(key)
    return _kept[key]
