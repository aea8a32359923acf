"""Plain data of a YAML or JSON file as the dataclasses that describe it. msgspec converts and
checks every value; a refusal names all that is wrong with the file, not the first of it.

A field's type says what it may be: `Annotated[int, msgspec.Meta(ge=1, le=8)]`, a Literal, an Enum,
another dataclass, a list or a mapping of these. A plain `str` is a line of text that is not empty.
`Parse` and `Check` say what types cannot. Laws of several fields stand in `__post_init__`, which
raises FieldError.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Collection, Iterable, Mapping
from enum import Enum
from functools import lru_cache, reduce
from operator import or_
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import msgspec

from twin.data import LONGEST_NAME, did_you_mean
from twin.errors import ConfigError, TwinError
from twin.frozen import frozen
from twin.text import shown
from twin.units import format_quantity, parse_quantity, unit_of

T = TypeVar("T")
Own = Mapping[Any, "Callable[[Reader, Any, str], Any]"]
MOST_WRONG, LONGEST_WRONG = 12, 600  # things and characters of one refusal
LONGEST_TEXT = 10_000  # characters
_TEXT = msgspec.Meta(min_length=1, max_length=LONGEST_TEXT)
SOME = msgspec.Meta(min_length=1)  # entries of a list
MOST_PLACES = 16  # of one thing that is wrong
REFUSED: Any = object()  # in place of a value that was


class FieldError(ConfigError):
    """A field is wrong because of another one."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field, self.reason = field, reason


@frozen
class Parse:
    """In an annotation: what makes a value of the file's, whose dotted place it is given. Raises
    TwinError.
    """

    call: Callable[[Any, str], Any]


@frozen
class Check:
    """In an annotation: raises TwinError for a value that its type allows, such as a name that
    nothing has.
    """

    call: Callable[[Any], object]


def one_of(known: Callable[[], Iterable[str]]) -> Check:
    """A name out of those that are known when a file is read."""

    def check(name: str) -> None:
        if name not in (names := list(known())):
            raise ConfigError(f"{shown(name)} is unknown; {did_you_mean(name, names)}")

    return Check(check)


def quantity(low: float, high: float, unit: str | None = None) -> Parse:
    """Text with its unit ("4.5 us"): `unit`, else the one that the field's name ends in."""
    known = unit

    def parse(data: Any, at: str) -> float:
        unit = unit_of(at.rpartition(".")[2]) if known is None else known
        if not isinstance(data, str):
            raise ConfigError(f"{shown(data)} must be text with its unit")
        found = parse_quantity(data, unit)
        if not low <= found <= high:
            ends = " to ".join(format_quantity(end, unit) for end in (low, high))
            raise ConfigError(f"{shown(data)} is out of range; give {ends}")
        return found

    return Parse(parse)


def read(
    data: Any,
    kind: type[T],
    file: Path | str,
    *,
    refusal: type[TwinError] = ConfigError,
    own: Own | None = None,
    at: str = "",
    advice: str = "",
    strict: bool = True,
    others: bool = False,
) -> T:
    """`data` of `file`, or of its part `at`, as `kind`. Raises `refusal` with everything that is
    wrong, and with `advice` at its end.

    `own`: readers of types that msgspec does not know. `strict`: numbers are no text. `others`:
    keys that no field has are left unread.
    """
    reader = Reader(own or {}, strict, others)
    found: T = reader.value(data, kind, at)
    reader.refuse(file, refusal, advice)
    return found


class Reader:
    """What has been found wrong so far with one file."""

    def __init__(self, own: Own, strict: bool = True, others: bool = False) -> None:
        self.own, self.strict, self.others = own, strict, others
        self.wrong: dict[str, list[str]] = {}  # places by what is wrong with them

    def refuse(
        self, file: Path | str, refusal: type[TwinError] = ConfigError, advice: str = ""
    ) -> None:
        """Raises `refusal` if anything is."""
        if self.wrong:
            wrong = [f"{_listed(places)}: {reason}" for reason, places in self.wrong.items()]
            raise refusal(f"{file}: {together(wrong)}{advice and f'; {advice}'}")

    def note(self, place: str, reason: str) -> None:
        """Keeps what is wrong with a place."""
        self.wrong.setdefault(reason, []).append(place or "top level")

    def value(self, data: Any, kind: Any, at: str) -> Any:
        """`data` as `kind`; what is wrong is kept, and the result then means nothing."""
        origin, parts = _made_of(kind)
        plain, *notes = parts if origin is Annotated else (kind,)
        if len(self.wrong) > MOST_WRONG:  # nobody reads more, and hints take milliseconds
            return REFUSED
        with self.at(at):
            for note in notes:
                data = note.call(data, at) if isinstance(note, Parse) else data
            found = self._plain(data, plain, [n for n in notes if isinstance(n, msgspec.Meta)], at)
            for note in notes:
                if isinstance(note, Check) and found is not REFUSED:
                    note.call(found)
            return found
        return REFUSED

    def at(self, place: str) -> _At:
        """Keeps a refusal as one of that place, and goes on behind the block."""
        return _At(self, place)

    def _plain(self, data: Any, kind: Any, metas: list[msgspec.Meta], at: str) -> Any:
        if kind in self.own:
            return self.own[kind](self, data, at)
        origin, parts = _made_of(kind)
        if origin in (Union, types.UnionType):
            return self._one_of(data, parts, metas, at)
        if isinstance(kind, type) and hasattr(kind, "__dataclass_fields__"):
            return self._fields(data, kind, at)
        if kind is str and not metas:
            return _line(data)
        holder = origin if origin in (list, tuple, dict) else kind
        whole = _converted(data, holder, metas, self.strict)
        if origin in (list, tuple):
            if parts[0] is int and ... in parts and set(map(type, whole)) <= {int}:
                return whole  # the windows of a model's layers
            kinds = parts if ... not in parts and origin is tuple else (parts[0],) * len(whole)
            found = [self.value(data[i], one, f"{at}[{i}]") for i, one in enumerate(kinds)]
            return REFUSED if REFUSED in found else origin(found)
        if origin is dict:
            for key in whole:
                if parts[0] is str and not isinstance(key, str):
                    raise ConfigError(f"key {shown(key)} must be text; put it in quotes")
            pairs = {key: self.value(v, parts[1], join(at, key)) for key, v in whole.items()}
            return REFUSED if REFUSED in pairs.values() else pairs
        return whole

    def _one_of(self, data: Any, kinds: tuple[Any, ...], metas: list[Any], at: str) -> Any:
        """A value of the kinds that have no fields, or a mapping of those that have."""
        if data is None and type(None) in kinds:
            return None
        kinds = tuple(kind for kind in kinds if kind is not type(None))
        if len(kinds) > 1:
            fields = [kind for kind in kinds if dataclasses.is_dataclass(kind)]
            if fields and (isinstance(data, Mapping) or not isinstance(data, str | int | float)):
                kinds = (fields[0],)
            else:
                kinds = tuple(kind for kind in kinds if kind not in fields)
        if len(kinds) == 1:
            return self.value(data, Annotated[kinds[0], *metas] if metas else kinds[0], at)
        return _converted(data, reduce(or_, kinds), metas, self.strict)

    def _fields(self, data: Any, kind: Any, at: str) -> Any:
        fields = _layout(kind)
        if not isinstance(data, Mapping):
            raise ConfigError(f"must be a mapping with {', '.join(fields)}, not {shown(data)}")
        unknown = [] if self.others else [key for key in data if key not in fields]
        for key in unknown[:MOST_PLACES]:
            if isinstance(key, str):
                self.note(join(at, key), f"unknown key; {did_you_mean(key, fields)}")
            else:
                self.note(at, f"key {shown(key)} must be text; put it in quotes")
        if len(unknown) > MOST_PLACES:
            self.note(at, f"{len(unknown) - MOST_PLACES} more unknown keys")
        missing = [name for name, (_, must) in fields.items() if must and name not in data]
        for name in missing:
            self.note(join(at, name), "missing; add it")
        values = {
            name: self.value(data[name], hint, join(at, name))
            for name, (hint, _) in fields.items()
            if name in data
        }
        return REFUSED if missing or REFUSED in values.values() else kind(**values)


class _At:
    """A block whose refusal is kept: a class, for a generator takes three times as long, and a file
    has thousands of values.
    """

    __slots__ = ("place", "reader")

    def __init__(self, reader: Reader, place: str) -> None:
        self.reader, self.place = reader, place

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, FieldError):
            self.reader.note(join(self.place, error.field), error.reason)
        elif isinstance(error, TwinError):
            self.reader.note(self.place, str(error))
        return isinstance(error, TwinError)


@lru_cache(maxsize=1024)
def _made_of(kind: Any) -> tuple[Any, tuple[Any, ...]]:
    """What a type was made of: `list[int]` of list and (int,)."""
    return get_origin(kind), get_args(kind)


@lru_cache(maxsize=128)
def _layout(kind: Any) -> dict[str, tuple[Any, bool]]:
    """The type of each field of a dataclass, and whether a file must give it."""
    hints = get_type_hints(kind, include_extras=True)
    nothing = dataclasses.MISSING
    return {
        field.name: (hints[field.name], field.default is field.default_factory is nothing)
        for field in dataclasses.fields(kind)
        if field.init
    }


def _line(data: Any) -> str:
    """Text, which will be printed: its words with a space between them."""
    text = " ".join(_converted(data, str, [_TEXT], True).split())
    if not text or not text.isprintable():
        raise ConfigError(f"{shown(data)} must be a line of text, not empty")
    return text


def _converted(data: Any, kind: Any, metas: Collection[msgspec.Meta], strict: bool) -> Any:
    kind = Annotated[kind, *metas] if metas else kind
    try:
        return msgspec.convert(data, kind, strict=strict)
    except (msgspec.ValidationError, UnicodeError):  # of half a character, too
        raise ConfigError(f"{shown(data)} {_limit(data, kind)}") from None


def _limit(data: Any, kind: Any) -> str:
    """What a value must be, in words."""
    kind, *metas = get_args(kind) if get_origin(kind) is Annotated else (kind,)
    if get_origin(kind) is Literal or (isinstance(kind, type) and issubclass(kind, Enum)):
        names = get_args(kind) or [member.value for member in kind]
        return f"is unknown; {did_you_mean(data, map(str, names))}"
    if kind is str:
        return f"must be text of at most {LONGEST_TEXT:,} characters, not empty"
    kinds = (get_args(one)[0] if get_origin(one) is Annotated else one for one in get_args(kind))
    word = " or ".join(_WORDS.get(one, str(one)) for one in list(kinds) or [kind])
    limits = ""
    for meta in metas:
        if meta.min_length is not None:
            limits = ", with at least one entry"
        elif meta.gt is not None:
            limits = f", above {meta.gt:g}"
        elif meta.le is not None:
            limits = f", {meta.ge:g} to {meta.le:g}"
        else:
            limits = f", at least {meta.ge:g}"
    return f"must be {word}{limits}"


_WORDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    list: "a list",
    tuple: "a list",
    dict: "a mapping",
}


def _listed(places: Collection[str]) -> str:
    """All of them if they are few."""
    some = list(places)[:MOST_PLACES]
    more = f" and {len(places) - len(some)} more" if len(places) > len(some) else ""
    return ", ".join(some) + more


def together(wrong: Collection[str]) -> str:
    """What is wrong with one file, as one text."""
    some = list(wrong)[:MOST_WRONG]
    while len(some) > 1 and len("; ".join(some)) > LONGEST_WRONG:
        some.pop()
    more = "; and more" if len(wrong) > len(some) else ""
    return "; ".join(some) + more


def join(at: str, key: object) -> str:
    """The dotted place of a key; what is no short name comes in quotes."""
    short = isinstance(key, str | int) and str(key).isprintable() and len(str(key)) <= LONGEST_NAME
    name = str(key) if short else shown(key)
    return f"{at}.{name}" if at else name
