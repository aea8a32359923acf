"""What one run of an engine made, and how long its steps took."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class Drafting:
    """What a request says of drafts."""

    most: int | None = None  # tokens drafted at most; None: the plan's `lookup`
    accepted: float = 0.0  # for timing: tokens a pass that count on average; 0: as the model says


@dataclass(frozen=True, slots=True)
class Generation:
    """What one run made, and how long each step took."""

    tokens: list[int]  # a stop token included
    step_ns: NDArray[np.int64]  # [tokens] duration of the step that generated each
    prompt_ns: int  # from the start to the step of the first token
    stop_reason: str  # "length", "stop" or "cancelled"
    # [steps after the passes][ranks][blocks][stages][inputs ready, finished] ns since the start
    trace: NDArray[np.int64] | None = None
    # [passes] duration of each prompt pass
    pass_ns: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    # [rounds] duration of each pass that verified drafts; none where tokens came from steps
    round_ns: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    kept: int = 0  # tokens of the prompt that were not read again
    reread: int = 0  # tokens read once more, because LongRoPE's factors changed behind them

    @property
    def first_ns(self) -> int:
        """From the start to the first token: of the prompt's last token and of those before it that
        were not kept.
        """
        return self.prompt_ns + int(self.step_ns[:1].sum())

    @property
    def tokens_per_round(self) -> float:
        """Tokens of a pass over the weights, drafts that were accepted among them; 1 of steps."""
        return len(self.tokens) / len(self.round_ns) if len(self.round_ns) else 1.0

    @property
    def tokens_per_s(self) -> float:
        """Of the steps after the prompt; 0 when there are none."""
        total = float(self.step_ns[1:].sum())
        return (len(self.step_ns) - 1) / total * 1e9 if total else 0.0

    @property
    def remark(self) -> str:
        """What a user should know of it, as a clause; empty where there is nothing."""
        said = ""
        if len(self.round_ns):
            said = f"; {self.tokens_per_round:.2f} tokens a pass, with drafts"
        if self.reread:
            said += (
                f"; {self.reread} tokens were read again with LongRoPE's long factors, since the "
                "sequence outgrew the short ones"
            )
        return said


def joined(made: Generation, rest: Generation, reread: int) -> Generation:
    """A sequence of which `reread` tokens were read again after `made`."""
    steps = rest.step_ns.copy()
    steps[:1] += rest.prompt_ns  # what reading it again took
    return Generation(
        tokens=made.tokens + rest.tokens,
        step_ns=np.concatenate([made.step_ns, steps]),
        prompt_ns=made.prompt_ns,
        stop_reason=rest.stop_reason,
        trace=None
        if made.trace is None or rest.trace is None
        else np.concatenate([made.trace, rest.trace]),
        pass_ns=np.concatenate([made.pass_ns, rest.pass_ns]),
        round_ns=np.concatenate([made.round_ns, rest.round_ns]),
        kept=made.kept,
        reread=reread,
    )
