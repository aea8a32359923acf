"""A conversation with an engine of one's own: history, and each answer's figures."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

from twin.engine.generate import Completion, Piece, Request, Stop, complete
from twin.engine.sampling import SamplingParams
from twin.engine.session import Session
from twin.server.problem import Problem
from twin.server.served import Served
from twin.server.wire import Message


@dataclass(slots=True)
class Talk:
    """`say` adds a turn. What an interrupted answer said until then stays in the history."""

    model: Served
    session: Session
    most: int  # tokens of an answer
    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None  # of the first answer; each answer has the next one
    system: str | None = None
    min_p: float = 0.0
    history: list[Message] = field(default_factory=list)
    last: Completion | None = None
    prompt: int = 0  # tokens of the last turn's prompt

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.history = [Message(role="system", content=self.system)] if self.system else []
        self.last = None

    def say(self, text: str, show: Callable[[Piece], None]) -> Completion:
        """Raises Problem where the conversation does not fit any more, TwinError of the engine."""
        turn = Message(role="user", content=text)
        prompt = self.model.chat_prompt([*self.history, turn])
        room = self.model.context + 1 - len(prompt)
        if room < 1:
            raise Problem(
                f"the conversation has {len(prompt)} tokens, the context holds "
                f"{self.model.context}; /reset begins a new one, --max-context makes room"
            )
        request = Request(
            prompt, min(self.most, room), self._sampling(), self.model.ends, reuse=True
        )
        made = complete(self.session, self.model.tokenizer, request, show)
        self.history += [turn, Message(role="assistant", content=made.text)]
        self.last, self.prompt = made, len(prompt)
        return made

    def _sampling(self) -> SamplingParams:
        first = secrets.randbits(63) if self.seed is None else self.seed
        seed = (first + len(self.history)) % 2**64
        return SamplingParams(self.temperature, self.top_k, self.top_p, seed, self.min_p)

    def stats(self) -> str:
        """Of the last answer, by the kernel's clock."""
        if self.last is None:
            return "nothing was said yet"
        made = self.last.made
        read = self.prompt - made.kept
        why = {Stop.LENGTH: "--max-tokens or the context", Stop.CANCELLED: "Ctrl-C"}
        rate = f"{made.tokens_per_s:.0f} tokens/s" if made.tokens_per_s else "too short to time"
        return (
            f"{len(made.tokens)} tokens, {rate}; prompt {self.prompt} tokens, {made.kept} of them "
            f"kept, {read} read in {made.first_ns / 1e6:.2f} ms; ended by "
            f"{why.get(self.last.stop, 'the model')}; {self.session.held} of "
            f"{self.model.context} positions in use{made.remark}"
        )
