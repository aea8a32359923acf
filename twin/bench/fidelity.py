"""How far logits are from an FP32 reference: KL divergence, and greedy tokens wherever the
reference is sure of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from twin.errors import EngineError

Logits = NDArray[np.float32]  # [positions, vocab]
Values = NDArray[np.float64]  # [positions]
Tokens = NDArray[np.int64]  # [positions]

ROWS = 16  # positions judged by a thread at a time
KL_SAME = 1e-9  # nats: means this close are rounding of the sums, not fidelity


@dataclass(frozen=True, slots=True)
class Judged:
    """The engine and a peer in the same 16-bit type next to the FP32 reference, by position."""

    engine_kl: Values  # KL(reference || engine) in nats
    peer_kl: Values
    margin: Values  # of the reference: its best logit less its second best
    noise: Values  # largest |peer - reference| over the vocabulary: what the type alone does
    engine_noise: Values
    expected: Tokens  # the reference's greedy token
    engine_best: Tokens  # of the engine's logits
    peer_best: Tokens
    chosen: Tokens  # what the engine generated


def kl_divergence(reference: Logits, other: Logits) -> Values:
    """[positions] KL(reference || other) of the softmax distributions, in nats."""
    p, q = _log_softmax(reference), _log_softmax(other)
    found: Values = (np.exp(p) * (p - q)).sum(axis=-1)
    return found


def judge(reference: Logits, engine: Logits, peer: Logits, chosen: Sequence[int]) -> Judged:
    """All [positions, vocab], for the same tokens before each position. Raises EngineError where a
    logit is not finite.
    """
    if not reference.shape == engine.shape == peer.shape or len(chosen) != len(reference):
        raise EngineError(
            f"logits of {reference.shape}, {engine.shape} and {peer.shape} for {len(chosen)} "
            "tokens do not belong together; report this"
        )
    spans = [slice(lo, lo + ROWS) for lo in range(0, len(reference), ROWS)]
    tokens = np.array(chosen, np.int64)
    with ThreadPoolExecutor() as pool:
        parts = list(
            pool.map(lambda at: _judge(reference[at], engine[at], peer[at], tokens[at]), spans)
        )
    return joined(parts)


def joined(parts: Sequence[Judged]) -> Judged:
    """Several stretches of positions as one."""
    return Judged(
        *(np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(Judged))
    )


def summary(judged: Judged) -> dict[str, Any]:
    """Both laws with what they rest on: no larger mean KL than the peer's, and no other token where
    the margin exceeds the noise.
    """
    decided = judged.margin > judged.noise
    missed = decided & (judged.chosen != judged.expected)
    engine, peer = _spread(judged.engine_kl), _spread(judged.peer_kl)
    return {
        "positions": len(judged.margin),
        "kl_engine": engine,
        "kl_peer": peer,
        "kl_not_worse": engine["mean"] <= peer["mean"] + KL_SAME,
        "decided_positions": int(decided.sum()),
        "decided_mismatches": int(missed.sum()),
        "peer_decided_mismatches": int((decided & (judged.peer_best != judged.expected)).sum()),
        "greedy_agrees": not missed.any(),
        "greedy_equal_anywhere": float((judged.chosen == judged.expected).mean()),
        "peer_greedy_equal_anywhere": float((judged.peer_best == judged.expected).mean()),
        "replay_mismatches": int((judged.chosen != judged.engine_best).sum()),
        "noise": _spread(judged.noise),
        "engine_noise": _spread(judged.engine_noise),
        "margin_median": float(np.median(judged.margin)),
    }


def rows(judged: Judged, prompt: int) -> Iterator[tuple[object, ...]]:
    """(prompt, position, each field ...) for a table."""
    for at, values in enumerate(
        zip(*(getattr(judged, field.name).tolist() for field in fields(Judged)), strict=True)
    ):
        yield (
            prompt,
            at,
            *(f"{value:.9g}" if isinstance(value, float) else value for value in values),
        )


def _judge(reference: Logits, engine: Logits, peer: Logits, chosen: Tokens) -> Judged:
    for name, logits in (("reference", reference), ("engine", engine), ("peer", peer)):
        if not np.isfinite(logits).all():
            raise EngineError(
                f"the {name}'s logits are not finite; check the weights, or report this"
            )
    best = np.partition(reference, -2, axis=-1)[:, -2:].astype(np.float64)
    return Judged(
        engine_kl=kl_divergence(reference, engine),
        peer_kl=kl_divergence(reference, peer),
        margin=best[:, 1] - best[:, 0],
        noise=_largest_difference(peer, reference),
        engine_noise=_largest_difference(engine, reference),
        expected=reference.argmax(axis=-1),
        engine_best=engine.argmax(axis=-1),
        peer_best=peer.argmax(axis=-1),
        chosen=chosen,
    )


def _largest_difference(a: Logits, b: Logits) -> Values:
    found: Values = np.abs(a - b).max(axis=-1).astype(np.float64)
    return found


def _log_softmax(logits: Logits) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return shifted


def _spread(values: Values) -> dict[str, float]:
    return {"mean": float(values.mean()), "max": float(values.max())}
