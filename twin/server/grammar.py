"""What an answer may look like: a grammar that allows the tokens which may come next.

The grammars and their masks are llguidance's. A rule for text is in its dialect of Lark:
https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from twin.engine.literal import Spellings
from twin.engine.logprobs import Spelling
from twin.engine.tokenizer import Tokenizer
from twin.server.formats import QUOTE, Body, Format
from twin.server.problem import Problem
from twin.server.schemas import takes_text
from twin.server.tools import Tools, Wanted
from twin.server.wire import NOTHING, Unread, decoded
from twin.text import said, shown

MOST_SCHEMA = 2**16  # bytes of JSON
MOST_KEPT = 8  # grammars
MOST_ITEMS = 2**15  # of a parser's row: each property that may come next takes four
_TEXT = r"/(.|\n)*/"
# Of a schema: its parts have to hold together, or it is no schema.
_WHOLE = frozenset({"allOf", "enum", "const", "default", "examples"})
_OTHERS = frozenset(
    {
        "additionalProperties",
        "patternProperties",
        "unevaluatedProperties",
        "allOf",
        "anyOf",
        "oneOf",
    }
)
_SPACES = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
Marks = Callable[[str], str]  # a mark as a grammar has it
Before = Callable[[str, bool], str]  # what stands before an argument: its name, is it a text
# [bytes of a mask, tokens]: what is added to the logit of a token that may not come, that may.
# Looking bytes up takes 46 us for 152,000 tokens, bits 470 us.
_OUTCOMES = np.where(np.arange(256)[:, None] >> np.arange(8) & 1, 0, -np.inf).astype(np.float32)


class JsonSchema(msgspec.Struct, kw_only=True):
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    type: str
    json_schema: JsonSchema | None = None
    schema: dict[str, Any] | None = None  # llama.cpp's, of a json_object


@dataclass(slots=True)
class Allowed:
    """The bias of one generation that a grammar constrains."""

    matcher: Any
    ends: Sequence[int]
    steady: bool = field(default=False, init=False)
    repetition: float = field(default=1.0, init=False)

    def write(self, row: NDArray[np.float32], made: Sequence[int]) -> None:
        if made and not self.matcher.is_stopped():
            self.matcher.consume_token(made[-1])
        if self.matcher.is_error():
            raise Problem(
                f"the grammar of this request is too much: {_why(self.matcher.get_error())}"
            )
        if self.matcher.is_stopped():
            row[:] = -np.inf
            row[list(self.ends)] = 0
            return
        mask = np.frombuffer(self.matcher.compute_bitmask(), np.uint8)
        whole = len(row) // 8
        # by "clip" numpy writes into the row itself
        np.take(_OUTCOMES, mask[:whole], 0, out=row[: 8 * whole].reshape(-1, 8), mode="clip")
        if rest := len(row) % 8:
            row[-rest:] = _OUTCOMES[mask[whole], :rest]


class Grammars:
    """Of one vocabulary, which `prepare` or the first use reads."""

    def __init__(
        self, tokenizer: Tokenizer, vocab: int, ends: frozenset[int], kept: int = MOST_KEPT
    ) -> None:
        """`kept`: grammars of former requests."""
        self._kept = kept
        self._tokenizer, self._vocab = tokenizer, vocab
        self._ends = sorted(end for end in ends if end < vocab)
        self._turn = threading.Lock()
        self._words: Any = None
        # at their beginnings, by their texts: making one takes 3 ms, and an agent's tools stay
        self._matchers: OrderedDict[str, Any] = OrderedDict()

    def prepare(self) -> None:
        """Reads the vocabulary: the library holds Python's lock for a second meanwhile, in which no
        stream moves.
        """
        with self._turn:
            if self._words is None and self._ends:
                from llguidance import LLTokenizer

                self._words = LLTokenizer(_words(self._tokenizer, self._vocab, self._ends))

    def matcher(self, lark: str, param: str) -> Any:
        """Raises Problem for what cannot be a grammar; `param`: the field that wants it."""
        with self._turn:
            if lark in self._matchers:
                self._matchers.move_to_end(lark)
                return self._matchers[lark]
        made = self._made(lark, param)
        with self._turn:
            self._matchers[lark] = made
            if len(self._matchers) > self._kept:
                self._matchers.popitem(last=False)
        return made

    def _made(self, lark: str, param: str) -> Any:
        import llguidance

        if not self._ends:
            raise Problem(
                f"{param}: no token ends this model's answers, so that none can be complete",
                param=param,
            )
        self.prepare()
        grammar = llguidance.LLMatcher.grammar_from_lark(lark)
        limits = llguidance.LLParserLimits(max_items_in_row=MOST_ITEMS)
        made = llguidance.LLMatcher(self._words, grammar, log_level=0, limits=limits)
        tried = made.deep_copy()
        if not made.is_error():
            tried.compute_bitmask()  # what is too much for the library fails here, not on the way
        if tried.is_error():
            raise Problem(f"{param} cannot be followed: {_why(tried.get_error())}", param=param)
        return made

    def allowed(self, matcher: Any) -> Allowed:
        """For one generation: the matcher itself stays at its beginning."""
        return Allowed(matcher.deep_copy(), self._ends)

    def mark(self, text: str) -> str:
        """A format's mark in a grammar: a special token by its number, other text by itself."""
        special = self._tokenizer.special.get(text)
        return json.dumps(text) if special is None else f"<[{special}]>"


def _why(error: str) -> str:
    """The library's reason without the grammar's own lines, which no client wrote."""
    return said(error.partition("\n")[0].rpartition("failed to compile JSON schema: ")[2])


def _words(tokenizer: Tokenizer, vocab: int, ends: list[int]) -> Any:
    """The vocabulary as llguidance reads it."""
    from llguidance import TokenizerWrapper

    spelling, literal = Spelling(tokenizer), Spellings(tokenizer)

    class Vocabulary:
        eos_token_id = ends[0]
        bos_token_id = None
        tokens = [spelling.bytes_of(token) for token in range(vocab)]  # noqa: RUF012
        special_token_ids = sorted(tokenizer.special.values())

        def __call__(self, text: str) -> list[int]:
            return literal.as_text(text)  # what a schema spells is no special token

    return TokenizerWrapper(Vocabulary())


def schema_of(raw: Unread) -> Mapping[str, Any] | None:
    """The JSON schema that an answer has to follow; None: it may be any text. Raises Problem."""
    if bytes(raw) in (b"", b"null") or raw is NOTHING:
        return None
    if len(bytes(raw)) > MOST_SCHEMA:
        raise Problem(
            f"response_format: {len(bytes(raw))} bytes of JSON; at most {MOST_SCHEMA}",
            param="response_format",
        )
    found = decoded(raw, ResponseFormat, "response_format")
    if found.type == "text":
        return None
    if found.type == "json_object":
        return found.schema or {"type": "object"}
    if found.type != "json_schema":
        raise Problem(
            f"response_format.type is {shown(found.type)}; allowed: text, json_object, json_schema",
            param="response_format.type",
        )
    if found.json_schema is None or found.json_schema.schema is None:
        raise Problem(
            "response_format.json_schema.schema is missing; give a JSON schema",
            param="response_format.json_schema",
        )
    schema: Mapping[str, Any] = found.json_schema.schema
    return schema


def schema_grammar(schema: Mapping[str, Any], form: Format, marks: Marks, *, thinking: bool) -> str:
    """An answer that is JSON of a schema, behind reasoning where the prompt has begun some."""
    lead, rules = _lead(form, marks, "final", thinking=thinking)
    return f"start: {lead}answer\nanswer: {_json(schema)}\n{rules}{_COMMON}"


def calls_grammar(tools: Tools, form: Format, marks: Marks, *, thinking: bool) -> str:
    """An answer that calls one of the functions, or several."""
    assert tools.wanted is Wanted.REQUIRED
    schemas = tools.schemas
    several = "+" if tools.parallel and form.close and form.body is not Body.HARMONY else ""
    before, behind = (" ".join(map(marks, pair)) for pair in _surround(form))
    lead, rules = _lead(form, marks, "", thinking=thinking)
    names = " | ".join(f"call_{at}" for at in range(len(schemas)))
    calls = [
        _call(f"call_{at}", name, schema, form, marks)
        for at, (name, schema) in enumerate(schemas.items())
    ]
    start = f"start: {lead}{before} calls {behind}\ncalls: ({names}){several}\n"
    return "".join([start, rules, *calls, _COMMON])


_COMMON = f"TEXT: {_TEXT}\nSPACE: /[ \\n]?[ \\n]?/\n"


def _json(schema: Any) -> str:
    """JSON of a schema, without spaces and keys that a model could go on with for ever."""
    if isinstance(schema, Mapping):
        schema = {**_closed(schema), "x-guidance": _SPACES}
    return f"%json {json.dumps(schema)}"


def _closed(schema: Any) -> Any:
    """Objects whose properties are listed have no others, unless the schema says so."""
    if isinstance(schema, list):
        return [_closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    made = {key: one if key in _WHOLE else _closed(one) for key, one in schema.items()}
    if isinstance(schema.get("properties"), dict) and not _OTHERS & schema.keys():
        made["additionalProperties"] = False
    return made


def _surround(form: Format) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return (form.surround[:1], form.surround[1:]) if form.surround else ((), ())


def _until(rule: str, end: str, kind: Any = None) -> tuple[str, str]:
    """A text and what ends it, a mark of the grammar: in a rule, and the rules that it needs. Any
    text, or one of those that a schema lists.
    """
    listed = kind.get("enum") if isinstance(kind, dict) else None
    if isinstance(listed, list) and listed:
        return f"({' | '.join(json.dumps(str(one)) for one in listed)}) {end}", ""
    if end.startswith("<["):
        return f"TEXT {end}", ""
    return rule, f"{rule}[suffix={end}]: {_TEXT}\n"


def _lead(form: Format, marks: Marks, channel: str, *, thinking: bool) -> tuple[str, str]:
    """What comes before: reasoning that has begun; of harmony the channel."""
    if form.body is Body.HARMONY:
        thought, rules = _until("thought", marks("<|end|>"))
        begun = (
            f'({marks("<|channel|>")} "analysis" {marks("<|message|>")} {thought} '
            f'{marks("<|start|>")} "assistant")? '
        )
        final = f'{marks("<|channel|>")} "{channel}" {marks("<|message|>")} ' if channel else ""
        return begun + final, rules
    if not thinking or form.thought is None:
        return "", ""
    thought, rules = _until("thought", marks(form.thought[1]))
    return f"{thought} SPACE ", rules


def _call(rule: str, name: str, schema: Mapping[str, Any], form: Format, marks: Marks) -> str:
    """One call of a function as the family writes it; its arguments follow the schema where they
    are JSON, and the schema's names and required ones where they are tagged.
    """
    kind = schema or {"type": "object"}
    arguments = f"{rule}_args: {_json(kind)}\n"
    given, quoted = f"{rule}_args", json.dumps(name)
    opened, close = (
        (marks(form.open) if form.open else ""),
        (marks(form.close) if form.close else ""),
    )
    if form.body is Body.JSON:
        key = "arguments" if form.open else "parameters"
        head = json.dumps(f'{{"name": {quoted}, "{key}": ')
        return f'{rule}: {opened} SPACE {head} {given} "}}" SPACE {close} SPACE\n{arguments}'
    if form.body is Body.NAMED_JSON:
        return f"{rule}: {opened} {quoted} {marks(form.separator)} {given} {close}\n{arguments}"
    if form.body is Body.HARMONY:
        head = json.dumps(f"commentary to=functions.{name} ")
        return (
            f'{rule}: {marks("<|channel|>")} {head} {marks("<|constrain|>")} "json" '
            f"{marks('<|message|>')} {given}\n{arguments}"
        )
    if form.body is Body.TAGS and form.tags is not None:
        return _tagged(rule, name, kind, form, marks)
    if form.body is Body.PAIRS:
        return _paired(rule, name, kind, form, marks)
    if form.body is Body.BRACES:
        pairs, rules = _braced(rule, kind, marks)
        head, tail = json.dumps(f"call:{name}{{"), json.dumps("}")
    else:
        pairs, rules = _keywords(rule, kind)
        head, tail = json.dumps(f"[{name}("), json.dumps(")]")
    return f"{rule}: {opened} {head} {pairs} {tail} {close}\n{rules}"


def _braced(rule: str, schema: Mapping[str, Any], marks: Marks) -> tuple[str, str]:
    """Gemma's arguments: a text stands between marks."""
    items, rules = dict[str, str](), []
    for at, (key, kind, text) in enumerate(_properties(schema)):
        one = f"{rule}_{at}"
        if text:
            value, more = _until(one, marks(QUOTE), kind)
            rules.append(more)
            items[key] = f"{json.dumps(key + ':')} {marks(QUOTE)} {value}"
        else:
            rules.append(f"{one}: {_json(kind)}\n")
            items[key] = f"{json.dumps(key + ':')} {one}"
    return _separated(items, _required(schema)), "".join(rules)


def _keywords(rule: str, schema: Mapping[str, Any]) -> tuple[str, str]:
    """Arguments by keyword, as JSON writes them."""
    items, rules = dict[str, str](), []
    for at, (key, kind, _) in enumerate(_properties(schema)):
        rules.append(f"{rule}_{at}: {_json(kind)}\n")
        items[key] = f"{json.dumps(key + '=')} {rule}_{at}"
    return _separated(items, _required(schema)), "".join(rules)


def _separated(items: Mapping[str, str], required: Set[str]) -> str:
    """Items with commas between them: those that are required, and then any of the others."""
    needed = [items[key] for key in items if key in required]
    others = [items[key] for key in items if key not in required]
    rest = "".join(f' ("," {one})?' for one in others)
    if needed:
        return ' "," '.join(needed) + rest
    firsts = [
        one + "".join(f' ("," {other})?' for other in others[at + 1 :])
        for at, one in enumerate(others)
    ]
    return f"({' | '.join(firsts)})?" if firsts else ""


def _properties(schema: Mapping[str, Any]) -> Iterator[tuple[str, Any, bool]]:
    """Name, schema, and whether it is any text."""
    found = schema.get("properties")
    for key, kind in (found if isinstance(found, dict) else {}).items():
        yield key, kind, isinstance(kind, dict) and takes_text(schema, key)


def _required(schema: Mapping[str, Any]) -> frozenset[str]:
    found = schema.get("required")
    return frozenset(
        filter(lambda one: isinstance(one, str), found if isinstance(found, list) else [])
    )


def _tagged(rule: str, name: str, schema: Mapping[str, Any], form: Format, marks: Marks) -> str:
    tags = form.tags
    assert tags is not None
    quote = '"' if tags.function[0].endswith("name=") else ""
    line = "" if quote else "\n"
    kinds = ' string="{}"' if "DSML" in form.open else ""

    def before(key: str, text: bool) -> str:
        kind = kinds.format(str(text).lower())
        return f"{tags.argument[0]}{quote}{key}{quote}{kind}{tags.argument[1]}{line}"

    body, rules = _arguments(rule, schema, before, f"{line}{tags.argument_end}\n")
    head = json.dumps(f"{tags.function[0]}{quote}{name}{quote}{tags.function[1]}\n")
    end = json.dumps(tags.function_end)
    return (
        f"{rule}: {marks(form.open)} SPACE {head} {body} {end} SPACE {marks(form.close)} SPACE\n"
        f"{rules}"
    )


def _paired(rule: str, name: str, schema: Mapping[str, Any], form: Format, marks: Marks) -> str:
    def before(key: str, text: bool) -> str:
        return f"<arg_key>{key}</arg_key>\n<arg_value>"

    body, rules = _arguments(rule, schema, before, "</arg_value>\n")
    head = json.dumps(f"{name}\n")
    return f"{rule}: {marks(form.open)} {head} {body} {marks(form.close)} SPACE\n{rules}"


def _arguments(
    rule: str, schema: Mapping[str, Any], before: Before, behind: str
) -> tuple[str, str]:
    """Arguments in the schema's order, those that are not required optional; texts as they are."""
    items, rules = [], []
    for at, (key, kind, text) in enumerate(_properties(schema)):
        one = f"{rule}_{at}"
        begin = json.dumps(before(key, text))
        if text:
            value, more = _until(one, json.dumps(behind), kind)
            rules.append(more)
            body = f"{begin} {value}"
        else:
            rules.append(f"{one}: {_json(kind)}\n")
            body = f"{begin} {one} {json.dumps(behind)}"
        items.append(body if key in _required(schema) else f"({body})?")
    return " ".join(items), "".join(rules)
