"""What a grammar costs an answer: the engine in this process, plain, with an equal bias for every
token, and with a mask for each: `python studies/structured/run.py OUT.csv NODE MODEL ...`.

Rows are written as they come. A vocabulary of made-up words has the model's size: bytes, words of
2 to 9 letters with and without a space, and pairs of signs, as published vocabularies do.
"""

from __future__ import annotations

import csv
import itertools
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from studies.common.rows import first_tokens
from twin.calibrate.node import calibrated_node
from twin.engine.bias import Bias
from twin.engine.choose import open_random
from twin.engine.sampling import SamplingParams
from twin.engine.session import Session
from twin.models.load import load_model
from twin.plan.options import Sampling
from twin.schedule.options import plan_for
from twin.server.bias import Adjustment
from twin.server.grammar import Allowed

MADE, PROMPT, REPEATS, SKIPPED = 192, 32, 3, 8
HEAD = ("node", "model", "vocabulary", "what", "us_a_token", "host_us", "tokens", "holds")
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 40},
        "tags": {"type": "array", "items": {"type": "string"}, "minItems": 90},
        "age": {"type": "integer"},
    },
    "required": ["name", "tags", "age"],
    "additionalProperties": False,
}
TOOL = '{"name": "search", "arguments": '


def vocabulary(size: int) -> list[bytes]:
    """The last one ends an answer."""
    rng = random.Random(1)
    made = dict.fromkeys(bytes([byte]) for byte in range(256))
    signs = '{}[]",:._-+=/\\()<> \n'
    made |= dict.fromkeys("".join(pair).encode() for pair in itertools.product(signs, repeat=2))
    while len(made) < size - 1:
        word = "".join(rng.choices("etaoinshrdlucmfwypvbgkjqxz", k=rng.randint(2, 9)))
        made[(rng.choice(["", " "]) + word).encode()] = None
    return [*[*made][: size - 1], b"<end>"]


class Words:
    """A vocabulary as llguidance reads it."""

    bos_token_id = None

    def __init__(self, tokens: list[bytes]) -> None:
        self.tokens, self.eos_token_id = tokens, len(tokens) - 1
        self.special_token_ids = [self.eos_token_id]

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


@dataclass(slots=True)
class Timed:
    """A bias, and how long the host took for each of its rows."""

    bias: Bias
    host_s: list[float] = field(default_factory=list)

    @property
    def steady(self) -> bool:
        return self.bias.steady

    @property
    def repetition(self) -> float:
        return self.bias.repetition

    def write(self, row: NDArray[np.float32], made: Sequence[int]) -> None:
        begun = time.perf_counter()
        self.bias.write(row, made)
        self.host_s.append(time.perf_counter() - begun)


def kinds(vocab: int) -> dict[str, Callable[[], Bias] | None]:
    import json

    import llguidance

    words = llguidance.LLTokenizer(llguidance.TokenizerWrapper(Words(vocabulary(vocab))))

    def by(lark: str) -> Callable[[], Bias]:
        matcher = llguidance.LLMatcher(words, llguidance.LLMatcher.grammar_from_lark(lark))
        assert not matcher.is_error(), matcher.get_error()
        return lambda: Allowed(matcher.deep_copy(), [vocab - 1])

    schema = json.dumps(PERSON | {"x-guidance": {"whitespace_flexible": False}})
    even = Adjustment(np.zeros(1, np.int64), np.zeros(1, np.float32))
    call = f'start: {json.dumps(TOOL)} args "}}"\nargs: %json {schema}\n'
    return {
        "plain": None,
        "the same bias": lambda: even,
        "a schema": by(f"start: %json {schema}\n"),
        "a call": by(call),
    }


def measured(session: Session, make: Callable[[], Bias] | None, vocab: int) -> dict[str, Any]:
    """Medians over repeats of the median step. `holds`: the same tokens each time, all allowed."""
    params = SamplingParams(temperature=0.7, top_k=50, seed=5)
    words = first_tokens(vocab, PROMPT)
    steps, host, answers = list[float](), list[float](), list[list[int]]()
    for _ in range(REPEATS):
        bias = None if make is None else Timed(make())
        made = session.generate(
            words, max_tokens=MADE, sampling=params, stop=[vocab - 1], bias=bias
        )
        steps.append(float(np.median(made.step_ns[SKIPPED:])) / 1e3)
        answers.append(made.tokens)
        if bias is not None:
            host.append(statistics.median(bias.host_s) * 1e6)
    holds = all(answer == answers[0] for answer in answers)
    if make is not None and not make().steady:
        row, checked = np.zeros(vocab, np.float32), make()
        for at, token in enumerate(answers[0]):
            checked.write(row, answers[0][:at])
            holds &= bool(row[token] == 0)
    return {
        "us_a_token": round(statistics.median(steps), 1),
        "host_us": round(statistics.median(host), 1) if host else "",
        "tokens": len(answers[0]),
        "holds": holds,
    }


def main() -> None:
    out, name, *models = sys.argv[1:]
    node = calibrated_node(name)
    with Path(out).open("w", encoding="utf-8", newline="") as file:
        table = csv.DictWriter(file, HEAD)
        table.writeheader()
        for model in models:
            plan = plan_for(
                load_model(model),
                node,
                context=PROMPT + MADE,
                max_context=PROMPT + MADE,
                sampling=Sampling.FULL,
            )
            assert plan.spec is not None
            vocab = plan.spec.vocab
            with open_random(node.device, plan, 1) as session:
                for what, make in kinds(vocab).items():
                    row = {"node": name, "model": model, "vocabulary": vocab, "what": what}
                    row |= measured(session, make, vocab)
                    table.writerow(row)
                    file.flush()
                    print(row, flush=True)


if __name__ == "__main__":
    main()
