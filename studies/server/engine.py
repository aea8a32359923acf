"""The engine in a process of its own, as `twin run` uses it: a question on stdin, one line of JSON
on stdout.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from served import SEED, plans_of, repeated, sizes_of

from twin.calibrate.node import calibrated_node
from twin.commands.run import show_piece
from twin.engine.generate import Piece, Request, complete
from twin.engine.opening import Source, open_session, open_source
from twin.engine.session import Session
from twin.hardware.types import Node
from twin.plan.types import Plan

HERE = Path(__file__).resolve().parent


def timed(session: Session, source: Source, request: Request) -> tuple[dict[str, float], str]:
    """Rates of an answer whose text is shown piece by piece, and the text."""
    stamps = list[float]()

    def show(piece: Piece) -> None:
        show_piece(piece)
        if piece.token is not None:
            stamps.append(time.perf_counter())

    began = time.perf_counter()
    ended = complete(session, source.tokenizer, request, show)
    taken = time.perf_counter() - began
    said = {
        "whole": len(stamps) / taken,
        "between": (len(stamps) - 1) / (stamps[-1] - stamps[0]),
        "kernel": ended.made.tokens_per_s,
        "first_token_s": stamps[0] - began,
        "prompt_s": ended.made.prompt_ns / 1e9,
    }
    return said, ended.text


def measured(node: Node, plan: Plan, source: Source, wanted: dict[str, Any]) -> dict[str, Any]:
    sizes, request = sizes_of(node), Request(wanted["prompt"], wanted["tokens"])
    with open_session(node, plan, source, lambda _: None) as session:
        timed(session, source, Request(wanted["prompt"], sizes.warm_up))
        each = repeated(lambda: timed(session, source, request), sizes)
    texts = {text for _, text in each}
    rows = [row for row, _ in each]
    return {
        "samples": {name: [row[name] for row in rows] for name in rows[0]},
        "text": texts.pop() if len(texts) == 1 else None,
    }


def main() -> None:
    wanted = json.load(sys.stdin)
    node = calibrated_node(wanted["node"])
    source = open_source(wanted["model"], SEED)
    plans = plans_of(source, node)
    with open(os.devnull, "w", encoding="utf-8") as nowhere, contextlib.redirect_stdout(nowhere):
        found = {what: measured(node, plans[what], source, wanted) for what in wanted["plans"]}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
