"""Many clients, wild requests, clients that vanish: nothing is lost or mixed, memory is flat.

The numbers that docs/server.md reports are printed by these (pytest -s).
"""

from __future__ import annotations

import concurrent.futures
import json
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.patience import PATIENCE_S
from tests.server.serving import Running, running
from twin.server.limits import Limits

SLOW = pytest.mark.slow
SECONDS = 120.0  # for each number of clients, where there is time
SAID = {"prompt": "load", "max_tokens": 64, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(checkpoint: Path, template_file: Path) -> Iterator[Running]:
    with running(checkpoint, template_file, limits=Limits(waiting=64)) as found:
        yield found


def resident_bytes() -> int:
    status = Path("/proc/self/status").read_text()
    line = next(line for line in status.splitlines() if line.startswith("VmRSS"))
    return int(line.split()[1]) * 1024


def streamed(client: httpx.Client, body: dict[str, Any]) -> tuple[str, int]:
    """Text and tokens counted in a stream's chunks."""
    text, tokens = "", 0
    with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line[6:])
                text += chunk["choices"][0]["text"]
                tokens += chunk.get("tokens", 0)
    return text, tokens


@pytest.mark.parametrize(
    ("clients", "seconds"),
    [(8, 1.0), *(pytest.param(n, SECONDS, marks=SLOW) for n in (1, 8, 64))],
)
def test_every_client_gets_its_own_tokens_all_of_them(
    clients: int, seconds: float, server: Running
) -> None:
    prompts = [f"client {n}" for n in range(clients)]
    with httpx.Client(base_url=server.url, timeout=PATIENCE_S, verify=False) as client:
        alone = {p: streamed(client, SAID | {"prompt": p}) for p in prompts}
        whole = client.post("/v1/completions", json=SAID | {"prompt": prompts[0]}).json()
        assert whole["choices"][0]["text"] == alone[prompts[0]][0]
    served, begun = Counter[str](), time.monotonic()

    def work(prompt: str) -> None:
        with httpx.Client(base_url=server.url, timeout=PATIENCE_S, verify=False) as client:
            while time.monotonic() - begun < seconds or not served[prompt]:
                assert streamed(client, SAID | {"prompt": prompt}) == alone[prompt]
                served[prompt] += 1

    with concurrent.futures.ThreadPoolExecutor(clients) as pool:
        left = [pool.submit(work, prompt) for prompt in prompts]
        time.sleep(seconds / 2)  # until every client and thread has what it needs
        before = resident_bytes()
        time.sleep(seconds / 2)
        grown = resident_bytes() - before
        for one in left:
            one.result()
    print(
        f"\n{clients} clients, {seconds:.0f} s: {sum(served.values())} answers, "
        f"least {min(served.values())} and most {max(served.values())} a client, "
        f"memory {grown / 2**20:+.1f} MiB in the second half"
    )
    assert len(served) == clients, "nobody starves"
    assert grown < 8 * 2**20 or seconds < SECONDS
    server.wait_idle()


@pytest.mark.parametrize("clients", [100, pytest.param(1000, marks=SLOW)])
def test_vanishing_clients_leave_nothing_behind(clients: int, server: Running) -> None:
    """Connections that are reset at a random moment, eight at a time."""
    text = json.dumps(SAID | {"max_tokens": 200, "stream": True}).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    request = f"{head}Content-Length: {len(text)}\r\n\r\n".encode() + text

    def vanish(number: int) -> None:
        draw = random.Random(number)
        made = socket.create_connection(("127.0.0.1", server.port), timeout=PATIENCE_S)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        made.sendall(request[: draw.randrange(1, len(request))] if draw.random() < 0.3 else request)
        time.sleep(draw.random() * 0.03)
        made.close()  # a reset, as from a process that was killed

    with httpx.Client(base_url=server.url, timeout=PATIENCE_S, verify=False) as client:
        wanted = client.post("/v1/completions", json=SAID).json()["choices"][0]["text"]
        before, threads = resident_bytes(), threading.active_count()
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            list(pool.map(vanish, range(clients)))
        began = time.monotonic()
        server.wait_idle()
        free_s = time.monotonic() - began
        grown = resident_bytes() - before
        print(f"\n{clients} vanished: free after {free_s:.2f} s, {grown / 2**20:+.1f} MiB")
        assert client.post("/v1/completions", json=SAID).json()["choices"][0]["text"] == wanted
        assert client.get("/health").status_code == 200
    assert grown < 48 * 2**20
    assert threading.active_count() <= threads + 8
