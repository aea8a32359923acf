"""What an H200 allows a plan, from its device file."""

from __future__ import annotations

from twin.hardware.load import load_node
from twin.schedule.ring import limits_of

H200 = limits_of(load_node("1xh200"))
