"""Parts of a tokenizer.json that its library reads without a word and only fails on, or runs away
with, when a text is encoded or decoded.
"""

from __future__ import annotations

import base64
import random
import struct


def _charsmap(chance: random.Random) -> str:
    units = [
        chance.choice((0, 0xFFFFFFFF, 0x80000100, 1 << 10, chance.getrandbits(32)))
        for _ in range(chance.choice((0, 1, 2, 256)))
    ]
    size = chance.choice((4 * len(units), 2**32 - 1, 3, 0))
    return base64.b64encode(
        struct.pack("<I", size)
        + b"".join(struct.pack("<I", unit) for unit in units)
        + bytes(chance.choice((0, 1, 9)))
    ).decode()


_EXPRESSIONS = (
    "(a+)+$",
    "(a|a)*$",
    "(.*)*x",
    "[",
    "(?<=a*)b",
    "",
    "\\p{L}+",
    "((a{1,1000}){1,1000}){1,1000}",
    "a{1,100000}",
    "(?:x|y",
    "^",
    "$",
    ".",
    "\\",
)


def machinery(chance: random.Random) -> dict[str, object]:
    """One part of a tokenizer, replaced by one that its library only checks when it runs."""
    expression = {"Regex": chance.choice(_EXPRESSIONS)}
    template = {
        "type": "TemplateProcessing",
        "pair": [],
        "special_tokens": {
            "X": {"id": "X", "ids": chance.choice(([1], [1, 2], [2**32 - 1], [])), "tokens": ["x"]}
        },
    }
    special, sequence = (
        {"SpecialToken": {"id": chance.choice("XY"), "type_id": 0}},
        {"Sequence": {"id": chance.choice("AB"), "type_id": 0}},
    )
    vocabulary = {"a": chance.choice((0, 1, 2**32 - 1)), "b": chance.choice((0, 5))}
    return chance.choice(
        (
            {
                "pre_tokenizer": {
                    "type": "Split",
                    "pattern": expression,
                    "behavior": "Isolated",
                    "invert": False,
                }
            },
            {"pre_tokenizer": {"type": "FixedLength", "length": chance.choice((0, 1, 2**63))}},
            {
                "normalizer": {
                    "type": "Replace",
                    "pattern": expression,
                    "content": chance.choice(("", "x" * 1_000)),
                }
            },
            {
                "normalizer": {
                    "type": "Replace",
                    "pattern": {"String": chance.choice(("", "a"))},
                    "content": "xy",
                }
            },
            {"normalizer": {"type": "Prepend", "prepend": chance.choice(("", "▁"))}},
            {"normalizer": {"type": "Precompiled", "precompiled_charsmap": _charsmap(chance)}},
            {"decoder": {"type": "Replace", "pattern": expression, "content": "x"}},
            {
                "decoder": {
                    "type": "Strip",
                    "content": chance.choice((" ", "a")),
                    "start": chance.choice((0, 10**9, 2**64 - 1)),
                    "stop": 2**63,
                }
            },
            {
                "decoder": {
                    "type": "CTC",
                    "pad_token": "",
                    "word_delimiter_token": "",
                    "cleanup": True,
                }
            },
            {"decoder": {"type": "WordPiece", "prefix": "", "cleanup": True}},
            {"decoder": None},
            {
                "post_processor": template
                | {
                    "single": chance.choice(
                        ([special], [sequence], [special, sequence], [], [sequence] * 500)
                    )
                }
            },
            {
                "post_processor": {
                    "type": "BertProcessing",
                    "sep": ["x", chance.choice((0, 2**32 - 1))],
                    "cls": ["y", 5],
                }
            },
            {"model": {"type": "WordLevel", "unk_token": "nope", "vocab": vocabulary}},
            {
                "model": {
                    "type": "WordPiece",
                    "unk_token": "a",
                    "continuing_subword_prefix": "",
                    "max_input_chars_per_word": 0,
                    "vocab": vocabulary,
                }
            },
            {
                "model": {
                    "type": "Unigram",
                    "unk_id": chance.choice((None, 0, 9)),
                    "vocab": [["a", chance.choice((0.0, -1e308, 1e308))]],
                    "byte_fallback": True,
                }
            },
            {
                "model": {
                    "type": "BPE",
                    "dropout": chance.choice((0.5, 1.0, 7)),
                    "vocab": vocabulary,
                    "merges": [],
                }
            },
            {
                "model": {
                    "type": "BPE",
                    "unk_token": "b",
                    "vocab": vocabulary,
                    "merges": chance.choice(([["a", "c"]], ["a b"], [["", ""]], [])),
                }
            },
            {
                "added_tokens": [
                    {
                        "id": chance.choice((0, 3, 2**32 - 1)),
                        "content": chance.choice(("", "a", "\x1b[2J")),
                        "special": chance.random() < 0.5,
                        "single_word": False,
                        "lstrip": True,
                        "rstrip": True,
                        "normalized": True,
                    }
                ]
            },
        )
    )
