"""What fences of all GPUs cost by engine runs, where no probe of them has run.

Runs with counters and barriers of shapes that a seed drew are fitted as if they were probes: those
of the shapes with even numbers. The others stay held out, so that they can say how wrong the number
is. Probes of several GPUs (peer_probes.py) take the place of all this once they have run.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from twin.calibrate import store
from twin.calibrate.heldout import HeldOut
from twin.calibrate.peer_probes import FENCES
from twin.calibrate.probes import Probe
from twin.calibrate.recorded import recorded
from twin.errors import CalibrationError
from twin.hardware.types import Node
from twin.plan.types import HandOffKind

DRAWN = "shapes that a seed drew"  # what a record of them says of itself
ADDED = "added"  # in a fit's file: the run behind a group, where it is another one


FENCED = (HandOffKind.COUNTER, HandOffKind.GRID)


def drawn_on_several(meta: Mapping[str, Any], node: Node) -> bool:
    """Does a run hold drawn shapes of several GPUs?"""
    return node.gpus > 1 and meta.get("what") == DRAWN


def fitted(runs: Sequence[HeldOut]) -> list[HeldOut]:
    """Those that the fit takes: every second shape, so that the halves were drawn alike, with every
    hand-off that fences.
    """
    return [run for run in runs if _even(run.name) and run.options.handoff in FENCED]


def _even(name: str) -> bool:
    number = re.match(r"s\d+-(\d+)-", name)
    return number is not None and int(number[1]) % 2 == 0


def probes(node: Node, run: store.Run) -> list[Probe]:
    """A record's fitted runs as probes. Raises CalibrationError where it has none."""
    found = fitted(recorded(run.folder, run.meta) or ())
    if not found:
        raise CalibrationError(
            f"{run.folder}: no run of an even-numbered shape with counters or barriers, which is "
            "what a fit takes of drawn shapes; give a folder of probes"
        )
    return [Probe(one.name, FENCES, one.plan(node.device.name), one.tokens) for one in found]


def no_longer_held_out(node: Node, record: str, runs: Sequence[HeldOut]) -> frozenset[str]:
    """Names of the runs of a record that the fit on file rests on."""
    kept = store.read_fit(node.name)
    rests = (kept[1].get(ADDED) or {}).values() if kept else ()
    return frozenset(run.name for run in fitted(runs)) if record in rests else frozenset()
