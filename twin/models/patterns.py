"""Which modules a quantization names, by the rule of the library that its method comes from.

Lists come with a checkpoint, and Python's matcher takes exponential time for some expressions. So
the ways to match are counted before anything is compiled: a repeat may end at any character of a
module's name, every alternative doubles the ways, and a repeated group is refused.
"""

from __future__ import annotations

import fnmatch
import re
import warnings
from collections.abc import Sequence
from enum import Enum

from twin.errors import ConfigError
from twin.text import shown

LONGEST_MODULE = 64  # characters; the modules that the families name are shorter
MOST_WAYS = 3 * 10**7  # of all names and patterns of a configuration together: 1 s of matching
COMPILED = 6_000  # what compiling a pattern costs, in ways
# An escape, a class, the start of a group with its kind, a repeat with its suffix, or any other
# character.
_TOKEN = re.compile(
    r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\((?:\?(?:[:=!]|<[=!]))?|(?:[*+?]|\{[0-9,]+\})[?+]?|.",
    re.DOTALL,
)
_TRAILING = re.compile(r"(?:\.\*)+\$?\Z")  # matches whatever is left, and is never tried again
_PLAIN = re.compile(r"[\w.-]*\Z")  # a text that is no expression, but for its dots
_BOUNDARY = r"(?:(?<=\.)|(?=\.|$))"


class Style(Enum):
    """Whose rule says what a text names."""

    NAMES = "names and globs"  # ModelOpt: of a module or of what it is in; "re:" as elsewhere
    EXACT = "exact names"  # compressed-tensors: or an expression behind "re:"
    # transformers: expressions from the start up to a module's end, or the end of a name
    BOUNDED = "bounded expressions"
    EXPRESSIONS = "expressions"  # GPTQModel: from the start of a name


class Patterns:
    """The texts of one list, `owner` in errors. `tried`: names that it will meet. Raises
    ConfigError for an expression that is wrong or takes too long.
    """

    def __init__(
        self, owner: str, texts: Sequence[str], style: Style = Style.NAMES, tried: int = 1
    ) -> None:
        self.style = style
        self.texts = tuple(dict.fromkeys(texts))
        expressions = {text: _expression(owner, text, style) for text in self.texts}
        self._names = {text for text, expression in expressions.items() if expression is None}
        self._ends = tuple(expressions) if style is Style.BOUNDED else ()
        others = {text: found for text, found in expressions.items() if found is not None}
        ways = sum(COMPILED + tried * _ways(owner, text, found) for text, found in others.items())
        if ways > MOST_WAYS:
            limit = f"patterns that match in up to {MOST_WAYS} ways together"
            raise ConfigError(
                f"{owner}: {len(others)} exceptions such as {shown(next(iter(others)))}; allowed: "
                f"{limit}; write names instead"
            )
        self._compiled = [_compiled(owner, text, found) for text, found in others.items()]

    def match(self, module: str) -> bool:
        """Whether the list names a module."""
        if self._names and self._named(module):
            return True
        if self._ends and module.endswith(self._ends):
            return True
        return any(pattern.match(module) for pattern in self._compiled)

    def any(self, names: Sequence[str]) -> bool:
        """Whether it names a module by one of its names."""
        return any(map(self.match, names))

    def _named(self, module: str) -> bool:
        if self.style is Style.EXACT:
            return module in self._names
        parts = module.split(".")
        return any(".".join(parts[: n + 1]) in self._names for n in range(len(parts)))


# What follows "layers." is the number of a layer. Any other number, and what may stand for a part
# of one, could be that of an expert.
_LAYER_NUMBER = re.compile(r"layers\\?\.(?:\d+|\((?:\?:)?[\d|]+\)|\[[\d-]+\]\+?|\\d\+?|\*)(?!\w)")
_NUMBER = r"(?<![\w-])\d|experts?\W*\d"
_IN_GLOB = re.compile(rf"{_NUMBER}|[?\[]")
_IN_EXPRESSION = re.compile(rf"{_NUMBER}|\\[dDwWsS]|(?<!\\)\.(?![*\w])|\[[^\]]*[\d\\^][^\]]*\]")


def names_single_experts(texts: Sequence[str], style: Style) -> bool:
    """Whether a list could name some experts of a layer and not others."""

    def names_one(text: str) -> bool:
        glob = style in (Style.NAMES, Style.EXACT) and not text.startswith("re:")
        search = _IN_GLOB if glob else _IN_EXPRESSION
        return search.search(_LAYER_NUMBER.sub("layers", text)) is not None

    return any(map(names_one, texts))


def _expression(owner: str, text: str, style: Style) -> str | None:
    """The regular expression that a text means; None: it is a name."""
    if style is Style.BOUNDED:
        if text.startswith("re:"):
            raise _refusal(owner, text, "expressions without 're:', as transformers reads them")
        return None if _PLAIN.match(text) else f"(?:{text}){_BOUNDARY}"
    if style is Style.EXPRESSIONS:
        return text
    if text.startswith("re:"):
        return text[3:]
    if style is Style.EXACT or not set(text) & set("*?["):
        return None
    return f"{fnmatch.translate(text)}|{fnmatch.translate(text + '.*')}"


def _compiled(owner: str, text: str, expression: str) -> re.Pattern[str]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python's own plans for its syntax
            return re.compile(expression)
    except (re.error, OverflowError, RecursionError) as error:
        raise _refusal(owner, text, f"a regular expression ({shown(str(error))})") from error


def _ways(owner: str, text: str, expression: str) -> int:
    """How many ways the matcher may try at most for one module, counted up to MOST_WAYS."""
    if expression.startswith("(?s:"):  # a glob's
        stars = len(text.rstrip("*").split("*")) - 1
        return 2 * min(_of_repeats(stars), MOST_WAYS)
    source = text.removeprefix("re:")
    ways, repeats, before = 1, 0, ""
    for token in _TOKEN.findall(_TRAILING.sub("", source)):
        if before == "(" and token[0] == "?":
            raise _refusal(
                owner, text, "groups, lookarounds, repeats of one character or class, alternatives"
            )
        if token[0] in "*+?" or (token[0] == "{" and len(token) > 1):
            if before == ")":
                raise _refusal(owner, text, "expressions without a repeated group")
            if token[0] == "?":
                ways *= 2
            else:
                repeats += 1
        elif token == "|":
            ways *= 2
        before = token
        if ways * _of_repeats(repeats) > MOST_WAYS:
            break
    return ways * _of_repeats(repeats)


def _of_repeats(count: int) -> int:
    """Places where so many repeats may end in a name: they end one after the other."""
    ways = 1
    for number in range(1, min(count, 12) + 1):
        ways = ways * (LONGEST_MODULE + number) // number
    return ways


def _refusal(owner: str, text: str, allowed: str) -> ConfigError:
    return ConfigError(
        f"{owner}: the exception {shown(text)}; allowed: {allowed}; write names instead of patterns"
    )
