"""The proof of a head that drafts: what is right is accepted, each planted fault refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.engine.test_draft_head import drafting, headed
from twin.kernel.tables import layout
from twin.proof.draft_head import (
    VERIFIED,
    check_head,
    check_slots,
    check_steps,
    draft_steps,
)
from twin.proof.prove import prove


def test_plans_with_a_head_are_proven() -> None:
    prove(drafting(headed()))


@pytest.mark.parametrize("names", [("qkv", "o"), ("states", "state"), ("wanted", "cache")])
def test_numbers_that_lie_on_others_are_found(names: tuple[str, str]) -> None:
    plan = drafting(headed())
    made = layout(plan)
    below, name = (f"draft_{one}" for one in names)
    wrong = replace(made, sizes=made.sizes | {name: made.sizes[below] + 1})
    assert f"{names[1]} begins" in " ".join(map(str, check_head(plan, wrong)))


def test_states_of_another_stage_are_found() -> None:
    plan = drafting(headed())
    made = layout(plan)
    for at, says in ((made.sizes["draft_taken1"] + 1, "wants the input"), (0, "wants the input")):
        wrong = replace(made, sizes=made.sizes | {"draft_taken1": at})
        assert says in " ".join(map(str, check_head(plan, wrong)))


def test_a_barrier_that_is_left_out_is_found() -> None:
    """Two steps as one: what the first writes the second reads meanwhile."""
    steps = [*VERIFIED, *draft_steps("state")]
    assert not list(check_steps(steps))
    for at in range(len(steps) - 1):
        (one, reads, writes), (other, more, then) = steps[at], steps[at + 1]
        joined = (f"{one} and {other}", reads | more, writes | then)
        assert list(check_steps([*steps[:at], joined, *steps[at + 2 :]]))
    assert "nobody has made" in str(next(check_steps(steps[1:])))


def test_a_draft_sees_no_rejected_one() -> None:
    for lookup in (1, 2, 5, 7):
        assert not list(check_slots(lookup))
    assert "which holds" in str(next(check_slots(3, chains_stay=True)))
