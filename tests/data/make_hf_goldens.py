"""Records the logits of transformers for tests/engine/test_huggingface.py: python -m
tests.data.make_hf_goldens [CASE..].

Needs the extra 'hf'. The recorded files change only with a stated reason.
"""

from __future__ import annotations

import json
import sys

import numpy as np

from tests.engine.hf_cases import ALL, tokens, weights
from tests.engine.test_huggingface import GOLDENS, hf_greedy, hf_logits

GREEDY = 8  # tokens after the prompt


def main() -> None:
    GOLDENS.mkdir(exist_ok=True)
    for name in sys.argv[1:] or ALL:
        config = ALL[name]
        prompt = tokens(config)
        logits = hf_logits(config, weights(config), prompt)
        greedy = np.array(hf_greedy(config, weights(config), prompt, GREEDY))
        np.savez_compressed(
            GOLDENS / f"{name}.npz",
            config=json.dumps(config),
            tokens=np.array(prompt),
            logits=logits,
            greedy=greedy,
        )
        print(name, logits.shape, np.abs(logits).max())


if __name__ == "__main__":
    main()
