"""What becomes known of an answer at once."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Delta:
    """What became known at once; one of the texts is not empty, or a call begins."""

    content: str = ""
    reasoning: str = ""
    arguments: str = ""  # of call `call`, JSON in pieces
    call: int = -1
    begins: str = ""  # the name of a function whose call begins here
    id: str = ""

    @property
    def reads(self) -> tuple[bool, bool]:
        """As reasoning, as the beginning of a call."""
        return bool(self.reasoning), bool(self.begins)


def merged(deltas: Iterable[Delta]) -> list[Delta]:
    """What says the same with fewer of them."""
    made: list[Delta] = []
    for one in deltas:
        last = made[-1] if made else None
        if last and not one.begins and last.call == one.call and last.reads == one.reads:
            made[-1] = replace(
                last,
                content=last.content + one.content,
                reasoning=last.reasoning + one.reasoning,
                arguments=last.arguments + one.arguments,
            )
        else:
            made.append(one)
    return made
