"""`frozen`: what `dataclass(frozen=True, slots=True)` makes, in a tenth of the time.

The library compiles six methods for each class, 0.5 ms of a start; a prediction loads some 150
classes. Here all classes share their methods but the constructor, which is compiled for classes of
which more than a few instances are made. `replace`, `fields` and `asdict` of dataclasses work as
ever. Classes with a field that their constructor does not take stay with the library.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, FrozenInstanceError, dataclass, field, fields
from operator import attrgetter
from typing import Any, TypeVar, dataclass_transform, overload

T = TypeVar("T")
_assign = object.__setattr__
# instances of a class before its constructor is compiled, 0.35 ms: of 118 classes of a prediction
# 70 have no more
FEW = 8
# fields from which on a constructor fills an instance while it is of an open class: assigning ten
# takes half as long as past the frozen class's refusal
MANY = 4


@overload
def frozen(cls: type[T]) -> type[T]: ...
@overload
def frozen(*, kw_only: bool) -> Callable[[type[T]], type[T]]: ...
@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def frozen(cls: type[T] | None = None, *, kw_only: bool = False) -> Any:
    """A class decorator, alone or with its option. Its class inherits from none, or from others
    that are `frozen`.
    """
    return _made(cls, kw_only) if cls else lambda cls: _made(cls, kw_only)


def _made(cls: type[T], kw_only: bool) -> type[T]:
    own = vars(cls)
    cls.__doc__ = cls.__doc__ or cls.__name__  # else the library spells out a signature
    options = {"init": False, "repr": False, "eq": False, "slots": True, "kw_only": kw_only}
    made: Any = dataclass(**options)(cls)
    values = _getter([one.name for one in fields(made) if one.compare])

    def equal(self: object, other: object) -> Any:
        if other.__class__ is not self.__class__:
            return NotImplemented
        return values(self) == values(other)

    left = FEW

    def first(self: object, *given: Any, **named: Any) -> None:
        nonlocal left
        left -= 1
        if left < 0 or not _filled(self, made, given, named):
            made.__init__ = _constructor(made)
            made.__init__(self, *given, **named)

    made.__init__ = first
    made.__setattr__, made.__delattr__ = _set, _delete
    made.__getstate__, made.__setstate__ = _state, _restore
    if "__repr__" not in own:
        made.__repr__ = _text
    if "__eq__" not in own:
        made.__eq__ = equal
        if own.get("__hash__") is None:
            made.__hash__ = lambda self: hash(values(self))
    found: type[T] = made
    return found


def _getter(names: list[str]) -> Callable[[object], Any]:
    """The values of some fields, as a tuple."""
    if len(names) > 1:
        return attrgetter(*names)
    return lambda self: tuple(getattr(self, name) for name in names)


def _filled(self: Any, cls: Any, given: tuple[Any, ...], named: dict[str, Any]) -> bool:
    """Assign all fields; False where the arguments do not fit, and a constructor says why."""
    every = fields(cls)
    values = dict(zip((one.name for one in every if not one.kw_only), given, strict=False))
    if len(values) < len(given) or values.keys() & named.keys():
        return False
    values |= named
    for one in every:
        if one.name not in values:
            if one.default is MISSING and one.default_factory is MISSING:
                return False
            made = one.default if one.default_factory is MISSING else one.default_factory()
            values[one.name] = made
        _assign(self, one.name, values.pop(one.name))
    if values:
        return False
    if hasattr(cls, "__post_init__"):
        self.__post_init__()
    return True


def _constructor(cls: Any) -> Any:
    """Compiled: a loop over fields takes ten times as long for every instance."""
    # no field is called as one of these
    known: dict[str, Any] = {"__assign": _assign, "__MISSING": MISSING}
    given: list[str] = ["self"]
    values: list[tuple[str, str]] = []
    # those that are given by name alone come last, behind a star
    for one in sorted(fields(cls), key=lambda one: one.kw_only is True):
        name, default = one.name, f"__default_{one.name}"
        value = name
        if one.default is not MISSING:
            known[default], name = one.default, f"{name}={default}"
        elif one.default_factory is not MISSING:
            known[default], name = one.default_factory, f"{name}=__MISSING"
            value = f"{default}() if {value} is __MISSING else {value}"
        if one.kw_only and "*" not in given:
            given.append("*")
        given.append(name)
        values.append((one.name, value))
    if len(values) < MANY:
        lines = [f"    __assign(self, {name!r}, {value})" for name, value in values]
    else:
        known |= {"__closed": cls, "__open": _open(cls)}
        lines = [
            "    if self.__class__ is __closed:",
            "        __assign(self, '__class__', __open)",
        ]
        lines += [f"        self.{name} = {value}" for name, value in values]
        lines += ["        self.__class__ = __closed", "    else:"]
        lines += [f"        __assign(self, {name!r}, {value})" for name, value in values]
    if hasattr(cls, "__post_init__"):
        lines.append("    self.__post_init__()")
    code = f"def __init__({', '.join(given)}):\n" + ("\n".join(lines) or "    pass")
    exec(code, known)  # of names of fields alone
    return known["__init__"]


def _open(cls: Any) -> Any:
    """A class of the same layout whose fields can be assigned as those of any other."""
    own = {"__slots__": cls.__dict__["__slots__"], "__setattr__": object.__setattr__}
    return type(cls.__name__, cls.__bases__, own)


def _text(self: Any) -> str:
    shown = (f"{one.name}={getattr(self, one.name)!r}" for one in fields(self) if one.repr)
    return f"{type(self).__qualname__}({', '.join(shown)})"


def _set(self: object, name: str, value: object) -> None:
    raise FrozenInstanceError(f"cannot assign to field {name!r}")


def _delete(self: object, name: str) -> None:
    raise FrozenInstanceError(f"cannot delete field {name!r}")


def _state(self: Any) -> list[Any]:
    return [getattr(self, one.name) for one in fields(self)]


def _restore(self: Any, state: list[Any]) -> None:
    for one, value in zip(fields(self), state, strict=True):
        _assign(self, one.name, value)
