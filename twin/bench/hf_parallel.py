"""Hugging Face's own tensor parallelism, decoding as Hugging Face on one GPU is timed: `python -m
twin.bench.hf_parallel`, one process a GPU, started by `ranks.run_ranks`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np

from twin.bench import peers, ranks
from twin.bench.peers import Decoder, torch_module
from twin.bench.ranks import Rank

EAGER, CAPTURED = "hf-tp-eager", "hf-tp-captured"
FOLLOWED = "followed.npy"  # [1 + tokens, vocab] in the folder of the run
WARM_UP = 3


def work(rank: Rank, request: dict[str, Any]) -> None:
    """Answers ns and tokens of each step by variant and repetition. The eager ones are answered
    before a step is captured: a capture that fails may take the process along.
    """
    decoder = Decoder(_model(rank, request), int(request["capacity"]))
    prompts, tokens = request["prompts"], int(request["tokens"])
    about = {"versions": peers.versions(), "captured": ""}
    made = {EAGER: _timed(decoder, prompts, tokens, captured=False)}
    followed = decoder.follow(request["follow"], request["forced"], captured=False)
    if rank.number == 0:
        np.save(rank.folder / FOLLOWED, followed)
    rank.answer({**about, "made": made, "captured": "the capture of a step did not end"})
    try:
        decoder.capture(prompts[0])
    except Exception as error:
        rank.answer({**about, "made": made, "captured": str(error)})
        return
    made[CAPTURED] = _timed(decoder, prompts, tokens, captured=True)
    rank.answer({**about, "made": made})


def _model(rank: Rank, request: dict[str, Any]) -> Any:
    """The checkpoint's class, its matrices divided over the ranks as its configuration says."""
    torch, transformers = torch_module(), import_module("transformers")
    try:
        config = import_module("transformers.distributed").DistributedConfig(tp_size=rank.count)
        chosen: dict[str, Any] = {"distributed_config": config}
    except (ImportError, AttributeError, TypeError):  # releases before 5.18
        chosen = {"tp_plan": "auto"}
    made = transformers.AutoModelForCausalLM.from_pretrained(
        request["folder"],
        dtype=getattr(torch, request["dtype"]),
        attn_implementation="sdpa",
        **chosen,
    )
    return made.eval()


def _timed(
    decoder: Decoder, prompts: list[list[int]], tokens: int, *, captured: bool
) -> list[dict[str, list[int]]]:
    run: Callable[..., Any] = decoder.run
    run(prompts[0], min(WARM_UP, tokens), captured=captured)
    runs = [run(prompt, tokens, captured=captured) for prompt in prompts]
    return [{"ns": steps.ns.tolist(), "tokens": list(steps.tokens)} for steps in runs]


if __name__ == "__main__":
    sys.exit(ranks.main(work, sys.argv[1:]))
