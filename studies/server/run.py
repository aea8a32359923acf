"""Measures `twin serve` on this computer's GPU: `studies/server/run.sh 1xh200 --out FILE`.

The real server in a process of its own, a client of the standard library in this one, random
weights of the true shapes. Every cell is kept as soon as it is measured, and a cell that is in the
file is passed by. `--compile-only` compiles the kernels of all plans, needs no GPU, and ends.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from client import Failed, Heard, Server, serving
from served import (
    RUN,
    SEED,
    SERVED,
    Sizes,
    models_of,
    plans_of,
    repeated,
    sizes_of,
)

from twin.calibrate.node import calibrated_node
from twin.engine.choose import compile_all, gpu_conditions
from twin.engine.opening import check_runs_here, open_source
from twin.errors import TwinError
from twin.files import write
from twin.hardware.types import Node

HERE = Path(__file__).resolve().parent

TEMPLATE = HERE / "chat.jinja"
WORDS, STRIDE, BETWEEN = 1500, 13, 101  # of made-up words; from one to the next; between two texts
ENGINE_S = 300
Show = Callable[[str], None]
Message = dict[str, str]


@dataclass(slots=True)
class Record:
    """What was measured, in a file that is whole after every cell."""

    file: Path
    show: Show
    began_s: float = field(default_factory=time.monotonic)
    made: dict[str, Any] = field(default_factory=dict)

    def begin(self, about: dict[str, Any]) -> None:
        if self.file.is_file():
            self.made = json.loads(self.file.read_text(encoding="utf-8"))
        self.made = {"models": {}} | self.made | about

    def has(self, model: str, *cells: str) -> bool:
        there = self.made["models"].get(model, {})
        return all(cell in there and "failed" not in there[cell] for cell in cells)

    def keep(self, model: str, cell: str, make: Callable[[], dict[str, Any]]) -> None:
        """A cell that is not there yet; what fails is kept as such."""
        if self.has(model, cell):
            return
        begun = time.monotonic()
        try:
            found = make()
        except (Failed, TwinError, OSError, ValueError, subprocess.SubprocessError) as error:
            found = {"failed": f"{type(error).__name__}: {error}"}
        found["seconds"] = round(time.monotonic() - begun, 2)
        self.made["models"].setdefault(model, {})[cell] = found
        self.made["seconds"] = round(time.monotonic() - self.began_s, 1)
        write({self.file: json.dumps(self.made, indent=1) + "\n"})
        said = {name: value for name, value in found.items() if name != "prompt"}
        self.show(f"{self.made['seconds']:6.1f} s  {model}, {cell}: {json.dumps(said)[:600]}")


# ---- prompts -------------------------------------------------------------------------------------


def text_of(server: Server, tokens: int, number: int = 0) -> str:
    """Made-up words, a token each; texts of different numbers differ in their first word."""
    made = [(BETWEEN * number + STRIDE * at) % WORDS for at in range(tokens)]
    text: str = server.ask("/detokenize", {"tokens": made})["prompt"]
    return text


def opening(server: Server, tokens: int, number: int = 0) -> list[Message]:
    """A chat of one message whose prompt has exactly so many tokens."""
    around = len(server.count([{"role": "user", "content": ""}]))
    made = [{"role": "user", "content": text_of(server, tokens - around, number)}]
    if (found := len(server.count(made))) != tokens:
        raise Failed(f"a prompt has {found} tokens instead of {tokens}")
    return made


# ---- cells ---------------------------------------------------------------------------------------


def streamed(server: Server, sizes: Sizes) -> dict[str, Any]:
    """Tokens/s of streamed answers, and what the server's process took meanwhile."""
    wanted = opening(server, sizes.prompt)
    server.stream(wanted, sizes.warm_up)
    before, source = server.cpu_s()
    began = time.perf_counter()
    heard = repeated(lambda: server.stream(wanted, sizes.tokens), sizes)
    wall = time.perf_counter() - began
    cpu = server.cpu_s()[0] - before
    tokens = sum(one.tokens for one in heard)
    return rates(heard) | {
        "cpu": {
            "seconds": cpu,
            "wall_s": wall,
            "tokens": tokens,
            "source": source,
            "share": cpu / wall,
            "per_token_s": cpu / tokens,
        },
        "prompt": server.count(wanted),
    }


def rates(heard: Sequence[Heard]) -> dict[str, Any]:
    texts = {one.text for one in heard}
    return {
        "samples": {
            "whole": [one.whole_rate for one in heard],
            "between": [one.between_rate for one in heard],
            "kernel": [one.timings["tokens_per_s"] for one in heard],
            "first_token_s": [one.first_token_s for one in heard],
        },
        "events": [one.events for one in heard],
        "same_each_time": len(texts) == 1,
        "text": digest(texts.pop()) if len(texts) == 1 else None,
    }


def firsts(server: Server, sizes: Sizes) -> dict[str, Any]:
    """Time to the first token of prompts that nothing is kept of."""
    found: dict[str, Any] = {}
    for tokens in sizes.first:
        wanted = opening(server, tokens)
        server.stream(wanted, 1)  # to warm up
        heard = [server.stream(wanted, 1) for _ in range(sizes.firsts)]
        found[str(tokens)] = {
            "first_token_s": [one.first_token_s for one in heard],
            "prompt_s": [one.timings["prompt_ms"] / 1e3 for one in heard],
            "kept": [one.timings["kept_tokens"] for one in heard],
        }
    return {"prompts": found}


def second_turns(server: Server, sizes: Sizes) -> dict[str, Any]:
    """The second turn of chats: to its first token, and what was kept of the first turn."""
    found = []
    for number in range(1, 1 + sizes.chats):
        chat = opening(server, sizes.opening, number)
        first = server.stream(chat, sizes.answer)
        chat += [
            {"role": "assistant", "content": first.text},
            {"role": "user", "content": text_of(server, sizes.follow, number)},
        ]
        second = server.stream(chat, 1)
        found.append(
            {
                "first_token_s": second.first_token_s,
                "prompt_s": second.timings["prompt_ms"] / 1e3,
                "prompt": second.usage["prompt_tokens"],
                "kept": second.usage["prompt_tokens_details"]["cached_tokens"],
            }
        )
    return {"chats": found}


def drawn(server: Server, sizes: Sizes) -> dict[str, Any]:
    """Tokens/s at temperature 1 of a server that was started without --greedy, and at 0."""
    wanted = opening(server, sizes.prompt)
    server.stream(wanted, sizes.warm_up, 1.0)
    return {
        f"temperature {temperature:g}": rates(
            [server.stream(wanted, sizes.tokens, temperature) for _ in range(sizes.drawn)]
        )
        for temperature in (1.0, 0.0)
    }


def in_process(node: str, model: str, sizes: Sizes, stream: dict[str, Any]) -> dict[str, Any]:
    """The stream's prompt through the engine without a server; is the text the server's?"""
    if "prompt" not in stream:
        raise Failed("the stream failed, and its prompt is not known")
    wanted = {
        "node": node,
        "model": model,
        "prompt": stream["prompt"],
        "tokens": sizes.tokens,
        "plans": [SERVED, RUN],
    }
    done = subprocess.run(
        [sys.executable, str(HERE / "engine.py")],
        input=json.dumps(wanted),
        capture_output=True,
        text=True,
        check=False,
        timeout=ENGINE_S,
    )
    if done.returncode:
        raise Failed(done.stderr[-2000:])
    found: dict[str, Any] = json.loads(done.stdout)
    for one in found.values():
        one["text"] = digest(one["text"])
    found["same_text"] = found[SERVED]["text"] == stream["text"] is not None
    return found


def digest(text: str | None) -> str | None:
    return None if text is None else hashlib.sha256(text.encode()).hexdigest()[:12]


# ---- all of them ---------------------------------------------------------------------------------


def run_models(node_name: str, node: Node, out: Path, show: Show) -> None:
    sizes = sizes_of(node)
    record = Record(out, show)
    record.begin(
        {
            "node": node.name,
            "conditions": gpu_conditions(),
            "python": platform.python_version(),
            "seed": SEED,
        }
    )
    with tempfile.TemporaryDirectory() as folder:
        for model, place in models_of(node, Path(folder)).items():
            run_model(record, sizes, node_name, model, place)


def run_model(record: Record, sizes: Sizes, node: str, model: str, place: str) -> None:
    """Three servers in turn, and the engine alone."""
    words = ("--random", str(SEED), "--chat-template", str(TEMPLATE))
    cells: dict[tuple[str, ...], dict[str, Callable[[Server, Sizes], dict[str, Any]]]] = {
        ("--greedy",): {"stream": streamed, "second turn, kept": second_turns},
        ("--greedy", "--no-reuse"): {"first token": firsts, "second turn, read": second_turns},
        (): {"sampler": drawn},
    }
    for options, wanted in cells.items():
        if not record.has(model, *wanted):
            try:
                with serving(place, node, *words, *options) as server:
                    for cell, make in wanted.items():
                        record.keep(model, cell, partial(make, server, sizes))
            except Failed as error:
                for cell in wanted:
                    record.keep(model, cell, partial(dict, failed=str(error)))
        if "stream" in wanted:
            stream = record.made["models"][model]["stream"]
            record.keep(model, "engine", partial(in_process, node, place, sizes, stream))


def compile_plans(node: Node, show: Show) -> int:
    """The kernels of all plans into the cache, on all cores; how many were refused."""
    with tempfile.TemporaryDirectory() as folder:
        places = models_of(node, Path(folder)).values()
        plans = [
            plan
            for place in places
            for plan in plans_of(open_source(place, SEED, text=False), node).values()
        ]
    refused = compile_all(node.device, plans, show)
    for at, said in refused.items():
        show(f"{plans[at].name}: {said}")
    show(f"{len(plans) - len(refused)} of {len(plans)} plans are ready")
    return len(refused)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="studies/server/run.sh", description=__doc__)
    parser.add_argument("node", help="1xh200, 1xh100, or 1xhost to try the script on a CPU")
    parser.add_argument("--out", type=Path, metavar="FILE", help="the record, one JSON file")
    parser.add_argument("--compile-only", action="store_true", help="compile all kernels, and end")
    args = parser.parse_args(words)
    if args.out is None and not args.compile_only:
        parser.error("--out FILE is missing: where the record goes")
    node = calibrated_node(args.node)

    def show(said: str) -> None:
        print(said, file=sys.stderr, flush=True)

    if args.compile_only:
        return int(compile_plans(node, show) > 0)
    check_runs_here(node)
    if compile_plans(node, show):
        return 1
    run_models(args.node, node, args.out, show)
    return 0


if __name__ == "__main__":
    sys.exit(main())
