"""`frozen` makes what dataclasses make with frozen=True and slots=True."""

from __future__ import annotations

import copy
import pickle
from dataclasses import FrozenInstanceError, asdict, dataclass, field, fields, replace
from typing import Any

import pytest

from twin.errors import ConfigError
from twin.frozen import FEW, frozen


@frozen
class Ours:
    a: int
    b: tuple[int, ...] = (1, 2)
    c: list[int] = field(default_factory=list, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Theirs:
    a: int
    b: tuple[int, ...] = (1, 2)
    c: list[int] = field(default_factory=list, compare=False, repr=False)


@frozen(kw_only=True)
class Named:
    low: int
    high: int = 3

    def __post_init__(self) -> None:
        if self.low > self.high:
            raise ConfigError("low is above high: swap them")


@frozen
class Nothing:
    pass


@frozen
class More(Ours):
    d: str = "x"


@pytest.mark.parametrize("given", [(1,), (2, (3,)), (1, (), [4])])
def test_a_frozen_class_is_the_librarys(given: tuple[Any, ...]) -> None:
    ours, theirs = Ours(*given), Theirs(*given)
    assert asdict(ours) == asdict(theirs)
    assert repr(ours).replace("Ours", "Theirs") == repr(theirs)
    assert hash(ours) == hash(theirs)
    assert [f.name for f in fields(ours)] == [f.name for f in fields(theirs)]
    assert (ours == Ours(1)) == (theirs == Theirs(1))
    assert not hasattr(ours, "__dict__")


def test_instances_before_and_behind_the_constructors_compiling_are_alike() -> None:
    @frozen
    class Fresh(Ours):
        d: str = "x"

    made = [Fresh(1, c=[2], d=str(number // 2)) for number in range(2 * FEW)]
    assert made[::2] == made[1::2]
    assert [one.b for one in made] == [(1, 2)] * len(made)
    for given, named in (((), {}), ((1, 2, 3, 4, 5), {}), ((1,), {"a": 1}), ((1,), {"e": 1})):

        @frozen
        class Other(Ours):
            d: str = "x"

        with pytest.raises(TypeError, match="argument"):
            Other(*given, **named)


def test_its_instances_do_not_change() -> None:
    one = Ours(1)
    with pytest.raises(FrozenInstanceError, match="cannot assign to field 'a'"):
        one.a = 2  # type: ignore[misc]
    with pytest.raises(FrozenInstanceError, match="cannot delete field 'a'"):
        del one.a
    assert replace(one, a=5) == Ours(5)
    assert one.c is not Ours(1).c


def test_they_are_copied_and_pickled() -> None:
    for one in (Ours(1, (7,), [8]), Named(low=1), Nothing(), More(2, d="y")):
        assert copy.deepcopy(one) == one
        again = pickle.loads(pickle.dumps(one))
        assert again == one
        assert repr(again) == repr(one)


def test_names_alone_give_what_is_given_by_name() -> None:
    assert Named(low=2) == Named(high=3, low=2)
    with pytest.raises(TypeError):
        Named(2)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="swap them"):
        replace(Named(low=2), low=9)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'a'"):
        Ours()  # type: ignore[call-arg]


def test_a_class_adds_to_those_that_it_inherits_from() -> None:
    assert More(1, d="z") == More(1, (1, 2), [], "z")
    assert More(1) != Ours(1)
    assert {Nothing(), Nothing()} == {Nothing()}


@frozen
class Wide:
    """With more fields than are assigned one by one, of names that a constructor has itself."""

    own: int
    cls: int
    assign: int = 3
    MISSING: list[int] = field(default_factory=list)
    default_own: int = 5


class Inherits(Wide):
    """Not made by `frozen`."""


@pytest.mark.parametrize("kind", [Wide, Inherits])
def test_a_constructor_fills_any_field_of_its_class_and_of_those_that_inherit(
    kind: type[Wide],
) -> None:
    for number in range(3 * FEW):
        made = kind(number, 2)
        assert (made.own, made.cls, made.assign, made.MISSING, made.default_own) == (
            number,
            2,
            3,
            [],
            5,
        )
        assert type(made) is kind
        with pytest.raises(FrozenInstanceError):
            made.own = 1  # type: ignore[misc]
