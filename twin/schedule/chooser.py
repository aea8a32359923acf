"""What is chosen otherwise for another kind of block: one protocol, for a core or an AMD block,
whose threads share no rows (cores.py), and for an NVIDIA block of warps (warps.py). choose.py says
which of them a device has.
"""

from __future__ import annotations

from typing import Protocol

from twin.models.spec import ModelSpec
from twin.plan.attention import Attention
from twin.plan.matrix import Matrix
from twin.plan.options import Options


class Chooser(Protocol):
    """Of one kind of block; what it chooses of a plan: `PlanChooser` in choose.py."""

    @property
    def even_shares(self) -> bool:
        """Do blocks stay idle so that the others have equal shares?"""

    @property
    def decodes(self) -> bool:
        """Does a prompt pass decode rows before it multiplies them, on tensor cores?"""

    @property
    def code_rows(self) -> int:
        """Rows of codes of four bits that share a load."""

    def loads(self, matrix: Matrix, element_bytes: int) -> int:
        """Of a thread for what it holds of a row: the first ones of all threads lie together."""

    def most_splits(self, *, slides: bool) -> int | None:
        """Of the cached positions of a key head, where no number is given. `slides`: some layer
        has a window. None: as many as suit the blocks.
        """

    def first_positions(self, options: Options, *, group: int, head_dim: int) -> int:
        """Of a split that is full before further splits take any."""

    def tensor_scan(self, options: Options, *, group: int, head_dim: int) -> bool:
        """Do tensor cores compare queries with cached keys?"""

    def scan_heads(self, own: Attention) -> int:
        """Query heads for which a cached key is read once, without tensor cores."""

    def cached_slot_bytes(self, own: Attention | None, options: Options) -> int:
        """Of the least slot that holds cached entries."""

    def prompt_chunk(
        self, spec: ModelSpec, own: Attention, options: Options, *, blocks: int, room: int
    ) -> int:
        """Tokens of a prompt pass: of a rank of `blocks` blocks with `room` bytes each."""

    def own_head_window(self, spec: ModelSpec) -> bool:
        """May the LM head have a window of its own?"""
