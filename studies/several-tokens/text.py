"""Prompt lookup on real text on this computer's CPU: SmolLM2-135M-Instruct as `twin demo` has it,
`python studies/several-tokens/text.py OUT.csv`.

Each prompt is answered twice by steps and twice by rounds, in turn; times are the faster ones.
Prompts
that edit code repeat most of it; prose repeats next to nothing.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

from twin.calibrate.node import calibrated_node
from twin.commands.demo_model import fetch
from twin.engine.choose import open_engine
from twin.engine.generation import Drafting, Generation
from twin.engine.opening import open_source, plan_run
from twin.engine.session import Session

HEAD = (
    "kind",
    "prompt",
    "tokens",
    "drafts",
    "tokens_per_round",
    "tokens_per_s",
    "by_steps",
    "same",
)
LOOKUP, TOKENS, REPEATS = 7, 96, 2
CODE = {
    "rename": (
        "Rename the variable total to result and repeat the whole function:\n\ndef mean(values):\n"
        "    total = 0\n    for value in values:\n        total = total + value\n"
        "    return total / len(values)\n"
    ),
    "comment": (
        "Repeat this function and add a comment above each line:\n\ndef area(width, height):\n"
        "    if width < 0 or height < 0:\n        raise ValueError('negative')\n"
        "    return width * height\n"
    ),
    "type hints": (
        "Repeat this code with type hints:\n\ndef join(words, separator):\n    text = ''\n"
        "    for word in words:\n        text = text + separator + word\n"
        "    return text[len(separator):]\n"
    ),
    "fix": (
        "Fix the missing colon and print the program again:\n\nfor number in range(10)\n"
        "    if number % 2 == 0:\n        print('even', number)\n    else:\n"
        "        print('odd', number)\n"
    ),
}
PROSE = {
    "sea": "Why is the sea salty?",
    "letter": "Write a short letter to a friend who moved to another city.",
    "story": "Tell a story about a clockmaker and a fox.",
    "advice": "How do I learn to cook?",
}


def prompt_of(text: str) -> str:
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


def once(running: Session, prompt: list[int], stop: set[int], drafts: int) -> Generation:
    return running.generate(prompt, max_tokens=TOKENS, stop=stop, drafting=Drafting(drafts))


def main() -> None:
    source = open_source(str(fetch(print)))
    assert source.tokenizer is not None
    plan = plan_run(
        source.spec, calibrated_node("1xhost"), {"lookup": LOOKUP}, positions=512, greedy=True
    )
    stop = set(source.encode("<|im_end|>"))
    with (
        open_engine(calibrated_node("1xhost").device, plan, source.weights) as running,
        Path(sys.argv[1]).open("w", encoding="utf-8", newline="") as file,
    ):
        rows = csv.writer(file)
        rows.writerow(HEAD)
        for kind, prompts in (("code", CODE), ("prose", PROSE)):
            for name, text in prompts.items():
                prompt = source.encode(prompt_of(text))
                made: dict[int, list[Generation]] = {0: [], LOOKUP: []}
                for _ in range(REPEATS):
                    for drafts, found in made.items():
                        found.append(once(running, prompt, stop, drafts))
                steps, rounds = made[0], made[LOOKUP]
                row = (
                    *(kind, name, len(rounds[0].tokens), LOOKUP),
                    f"{rounds[0].tokens_per_round:.3f}",
                    *(f"{max(one.tokens_per_s for one in of):.2f}" for of in (rounds, steps)),
                    rounds[0].tokens == steps[0].tokens,
                )
                rows.writerow(row)
                file.flush()
                print(*row)


if __name__ == "__main__":
    main()
