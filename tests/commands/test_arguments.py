"""What help says of an option is the comment on its field."""

from __future__ import annotations

from twin.commands.arguments import _comments


class Options:
    """Has fields."""

    behind: int = 1  # how many
    # a reason that is too long for
    # the end of a line
    above: tuple[int, ...] = ()
    silent: str = ""

    # not of a field

    def method(self) -> None: ...


def test_a_comment_stands_behind_a_field_or_above_it() -> None:
    assert _comments(Options) == {
        "behind": "how many",
        "above": "a reason that is too long for the end of a line",
    }
