"""Which number of the twin stands in the way of small models: `python studies/zoo/terms.py NODE`.

Each cost of a block and of a hand-off is halved alone (a rate doubled), then all of them together.
"""

from __future__ import annotations

import sys

from shapes import shapes, timed_plan

from twin.hardware.override import numbers, with_number
from twin.hardware.types import Node
from twin.sim.run import simulate
from twin.study.hardware import node_on_file

NAMES = ("smollm2-360m", "qwen2.5-0.5b", "qwen3-0.6b")
PARTS = ("block.", "handoff.", "exchange.", "l2.", "warps.")
RATE = "_per_s"
FEWEST = 0.004  # of a step, to be told


def halved(node: Node, path: str) -> Node:
    return with_number(node, path, "x2" if path.endswith(RATE) else "x0.5")


def main() -> None:
    node = node_on_file(sys.argv[1])
    paths = [path for path in numbers(node) if path.removeprefix("device.").startswith(PARTS)]
    paths = [path for path in paths if path.endswith(("_s", RATE)) and "clock" not in path]
    for spec in (spec for spec in shapes() if spec.name in NAMES):
        plan = timed_plan(spec, node)
        base = simulate(plan, node)
        took = base.step_s
        causes = sorted(base.attribution_ps.items(), key=lambda item: -item[1])
        said = ", ".join(f"{name} {ps / base.step_ps:.0%}" for name, ps in causes[:4])
        print(f"{spec.name}: {took * 1e6:.0f} us, floor {base.floor_s * 1e6:.0f}; {said}")
        gains = {}
        for path in paths:
            gains[path] = took - simulate(plan, halved(node, path)).step_s
        for path, gain in sorted(gains.items(), key=lambda item: -item[1]):
            if gain > FEWEST * took:
                print(f"  {path:32} {gain * 1e6:6.1f} us  {gain / took:.1%}")


if __name__ == "__main__":
    main()
