"""How much the server takes. Each number bounds what one client can cost the others."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    body_bytes: int = 4 * 2**20
    # of a body, also in its texts: while JSON of a million small values is read, no stream moves
    colons: int = 2**17
    commas: int = 2**19
    body_s: float = 10.0  # for all of a request's body to arrive
    unread_s: float = 1.0  # for one that nobody reads, as of a refused request
    head_bytes: int = 32 * 1024  # of a request's first line and headers
    head_s: float = 10.0  # for these to arrive
    write_s: float = 30.0  # for a client to take what was sent
    connections: int = 256
    waiting: int = 32  # requests in the queue, without the one that runs
    choices: int = 8  # `n` times the prompts of one request
    stops: int = 16  # stop texts of a request
    stop_characters: int = 256  # of one of them
    logprobs: int = 20  # of the most probable tokens at each place, as OpenAI's API allows
    messages: int = 1024
    text_per_token: int = 128  # characters: longer prompts are refused before they are tokenized
    long_bytes: int = 2**16  # of a request's body, from which on texts are encoded in turn
    tokens: int = 2**18  # to be detokenized: more would hold up other answers
    # between two pieces of a stream, each of which takes its part of a core (studies/server)
    gap_s: float = 0.008
    ping_s: float = 10.0  # of silence before a comment that keeps proxies from closing a stream
    stall_s: float = 30.0  # without a token, after which the engine counts as stalled
