"""How families of models write calls of tools and reasoning, found by their chat templates.

Each format is what the family's published template writes for a call; its source is that template.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

THINK = ("<think>", "</think>")
QUOTE = '<|"|>'  # around a text, in Gemma's arguments
HARMONY_ENDS = ("<|end|>", "<|call|>", "<|return|>")
HARMONY_BODY = "<|message|>"
_DSML = "｜DSML｜"


class Body(Enum):
    """How calls are written between a format's marks."""

    JSON = "json"  # {"name": ..., "arguments": {...}}, or a list of these
    NAMED_JSON = "named-json"  # a name, a separator, the arguments as JSON
    TAGS = "tags"  # a tag for the function, a tag for each argument
    PAIRS = "pairs"  # a name, then tags of keys and of values (GLM)
    BRACES = "braces"  # call:name{key:value} (Gemma)
    PYTHON = "python"  # [name(key=value)] (LFM2)
    HARMONY = "harmony"  # channels and recipients (GPT-OSS)


@dataclass(frozen=True, slots=True)
class Tags:
    """How a function and its arguments are tagged; each ends the text of what it opens."""

    function: tuple[str, str]  # before and behind its name
    function_end: str
    argument: tuple[str, str]
    argument_end: str


@dataclass(frozen=True, slots=True)
class Format:
    """How a family of models writes calls of tools and reasoning."""

    name: str
    body: Body
    open: str = ""  # before a call; empty: an answer that begins with JSON is one
    close: str = ""  # behind it; empty: its own end is known
    separator: str = ""  # behind a name
    tags: Tags | None = None
    thought: tuple[str, str] | None = None  # around reasoning
    surround: tuple[str, ...] = ()  # marks around several calls, which say nothing

    def begun(self, prompt: str) -> bool:
        """Whether a prompt ends within reasoning."""
        return self.thought is not None and prompt.rstrip().endswith(self.thought[0])

    def marks(self) -> tuple[str, ...]:
        """Texts that may be special tokens of a vocabulary, which have no text of their own."""
        own = (self.open, self.close, self.separator, *(self.thought or ()), *self.surround)
        if self.body is Body.HARMONY:
            own += (*HARMONY_ENDS, "<|start|>", "<|channel|>", "<|constrain|>", HARMONY_BODY)
        if self.body is Body.BRACES:
            own += (QUOTE,)
        return tuple(mark for mark in own if mark)


# The first whose mark stands in a template is the family's: (mark, format).
FORMATS: tuple[tuple[str, Format], ...] = (
    ("<|channel|>", Format("gpt-oss", Body.HARMONY)),
    (
        _DSML,  # DeepSeek V3.2 and V4
        Format(
            "deepseek-v4",
            Body.TAGS,
            f"<{_DSML}function_calls>",
            f"</{_DSML}function_calls>",
            tags=Tags(
                (f"<{_DSML}invoke name=", ">"),
                f"</{_DSML}invoke>",
                (f"<{_DSML}parameter name=", ">"),
                f"</{_DSML}parameter>",
            ),
            thought=THINK,
        ),
    ),
    (
        "<｜tool▁call▁begin｜>",
        Format(
            "deepseek",
            Body.NAMED_JSON,
            "<｜tool▁call▁begin｜>",
            "<｜tool▁call▁end｜>",
            "<｜tool▁sep｜>",
            thought=THINK,
            surround=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
        ),
    ),
    (
        "[TOOL_CALLS]",
        Format(
            "mistral",
            Body.NAMED_JSON,
            "[TOOL_CALLS]",
            separator="[ARGS]",
            thought=("[THINK]", "[/THINK]"),
        ),
    ),
    (
        "<minimax:tool_call>",
        Format(
            "minimax",
            Body.TAGS,
            "<minimax:tool_call>",
            "</minimax:tool_call>",
            tags=Tags(
                ("<invoke name=", ">"), "</invoke>", ("<parameter name=", ">"), "</parameter>"
            ),
            thought=THINK,
        ),
    ),
    (
        "<|tool_call>",
        Format(
            "gemma",
            Body.BRACES,
            "<|tool_call>",
            "<tool_call|>",
            thought=("<|channel>thought", "<channel|>"),
        ),
    ),
    (
        "<|tool_call_start|>",
        Format("lfm2", Body.PYTHON, "<|tool_call_start|>", "<|tool_call_end|>", thought=THINK),
    ),
    ("<arg_key>", Format("glm", Body.PAIRS, "<tool_call>", "</tool_call>", thought=THINK)),
    (
        "<function=",  # Qwen3-Coder, Qwen3.5 and later, Nemotron 3
        Format(
            "qwen3-coder",
            Body.TAGS,
            "<tool_call>",
            "</tool_call>",
            tags=Tags(("<function=", ">"), "</function>", ("<parameter=", ">"), "</parameter>"),
            thought=THINK,
        ),
    ),
    ("<tool_call>", Format("hermes", Body.JSON, "<tool_call>", "</tool_call>", thought=THINK)),
    ("<|python_tag|>", Format("llama", Body.JSON)),
    ('"parameters": ', Format("llama", Body.JSON)),
)
PLAIN = Format("plain", Body.JSON)  # of a text without a conversation
# Of a template that has no tools: they are described in a system message, as Hermes has them.
GENERIC = Format("hermes", Body.JSON, "<tool_call>", "</tool_call>", thought=THINK)


def format_of(template: str) -> Format:
    """How a model with this chat template writes; `GENERIC` where it says nothing of tools."""
    if "tools" not in template:
        return GENERIC
    return next((one for mark, one in FORMATS if mark in template), GENERIC)
