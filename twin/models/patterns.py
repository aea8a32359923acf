"""Which modules a quantization leaves out: names, globs, and regular expressions behind "re:".

The expressions come with a checkpoint, and Python's matcher takes exponential time for some. So
they are counted before they are compiled: every repeat may end at any character of a module's name,
every alternative doubles the ways, and a repeated group is refused.
"""

from __future__ import annotations

import fnmatch
import re
import warnings
from collections.abc import Sequence

from twin.errors import ConfigError
from twin.text import shown

LONGEST_MODULE = 64  # characters; the modules that the families name are shorter
MOST_WAYS = 10**7  # 1 s of matching, all patterns of a configuration together
COMPILED = 2_000  # what compiling a pattern costs, in ways
# An escape, a class, the start of a group with its kind, a repeat with its suffix, or any other
# character.
_TOKEN = re.compile(
    r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\((?:\?(?:[:=!]|<[=!]))?|(?:[*+?]|\{[0-9,]+\})[?+]?|.",
    re.DOTALL,
)


class Patterns:
    """The exceptions of one configuration, `owner` in errors. Raises ConfigError for an expression
    that is wrong or takes too long.
    """

    def __init__(self, owner: str, texts: Sequence[str]) -> None:
        self._names = {
            text for text in texts if not text.startswith("re:") and not set(text) & set("*?[")
        }
        others = [text for text in dict.fromkeys(texts) if text not in self._names]
        ways = sum(
            COMPILED + (_ways(owner, text) if text.startswith("re:") else 0) for text in others
        )
        if ways > MOST_WAYS:
            limit = f"patterns that match in up to {MOST_WAYS} ways together"
            raise ConfigError(
                f"{owner}: {len(others)} exceptions such as {shown(others[0])}; allowed: {limit}; "
                "write names instead"
            )
        self._compiled = [_compiled(owner, text) for text in others]

    def match(self, module: str) -> bool:
        """Whether an exception names the module or one of its parents."""
        parts = module.split(".")
        if any(".".join(parts[: n + 1]) in self._names for n in range(len(parts))):
            return True
        return any(pattern.match(module) for pattern in self._compiled)


def _compiled(owner: str, text: str) -> re.Pattern[str]:
    expression = (
        text[3:]
        if text.startswith("re:")
        else f"{fnmatch.translate(text)}|{fnmatch.translate(text + '.*')}"
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python's own plans for its syntax
            return re.compile(expression)
    except (re.error, OverflowError, RecursionError) as error:
        raise _refusal(owner, text, f"a regular expression ({shown(str(error))})") from error


def _ways(owner: str, text: str) -> int:
    """How many ways the matcher may try at most for one module, counted up to MOST_WAYS."""
    ways, before = 1, ""
    for token in _TOKEN.findall(text.removeprefix("re:")):
        if before == "(" and token[0] == "?":
            raise _refusal(
                owner, text, "groups, lookarounds, repeats of one character or class, alternatives"
            )
        if token[0] in "*+?" or (token[0] == "{" and len(token) > 1):
            if before == ")":
                raise _refusal(owner, text, "expressions without a repeated group")
            ways *= 2 if token[0] == "?" else LONGEST_MODULE
        elif token == "|":
            ways *= 2
        before = token
        if ways > MOST_WAYS:
            break
    return ways


def _refusal(owner: str, text: str, allowed: str) -> ConfigError:
    return ConfigError(
        f"{owner}: the exception {shown(text)}; allowed: {allowed}; write names instead of patterns"
    )
