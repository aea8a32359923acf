"""Records the logits of transformers for tests/engine/test_huggingface.py: python -m tests.data.make_hf_goldens.

Needs the extra 'hf'. The recorded files change only with a stated reason.
"""

from __future__ import annotations

import json

import numpy as np

from tests.engine.hf_cases import CASES, tokens, weights
from tests.engine.test_huggingface import GOLDENS, hf_logits


def main() -> None:
    GOLDENS.mkdir(exist_ok=True)
    for name, config in CASES.items():
        prompt = tokens(config)
        logits = hf_logits(config, weights(config), prompt)
        np.savez_compressed(GOLDENS / f"{name}.npz", config=json.dumps(config), tokens=np.array(prompt), logits=logits)
        print(name, logits.shape, np.abs(logits).max())


if __name__ == "__main__":
    main()
