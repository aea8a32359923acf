"""An all-reduce of NCCL, timed in a captured CUDA graph: `python -m twin.bench.nccl`, one process a
GPU, started by `ranks.run_ranks`.

A graph holds many of them one after another, so an all-reduce's time includes the edge between two
kernels of a graph. What an edge takes with a kernel over one element is timed alike, as `edge`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from twin.bench import ranks
from twin.bench.peers import torch_module
from twin.bench.ranks import Rank
from twin.errors import EngineError

EDGE = "edge"
TYPES = {"bf16": "bfloat16", "fp32": "float32"}
IN_A_GRAPH, REPLAYS = 500, 20  # all-reduces; replays of a repetition
WARM_UP = 5
# A power of two that so many sums over 2, 4 or 8 ranks keep within both types: each is exact.
CHECKED, CHECKED_VALUE = 40, 2.0**-60


def work(rank: Rank, request: dict[str, Any]) -> None:
    """Answers ns of an all-reduce of `elements` by variant, repetition and replay; a replay holds
    `times` of them.
    """
    torch, elements = torch_module(), int(request["elements"])
    times, replays = int(request["times"]), int(request["replays"])
    reduce = torch.distributed.all_reduce
    made: dict[str, list[list[int]]] = {}
    timed: list[tuple[str, Callable[[], object]]] = []
    for name, dtype in TYPES.items():
        values = torch.zeros(elements, dtype=getattr(torch, dtype), device=rank.device)
        _check(rank, values)
        values.zero_()
        timed.append((f"nccl-{name}", partial(reduce, values)))
    timed.append((EDGE, partial(torch.zeros(1, device=rank.device).add_, 0.0)))
    runs = [(name, _repeated(rank, call, times)) for name, call in timed]
    for _, run in runs:
        for _ in range(WARM_UP):
            run()
    meet = partial(reduce, torch.zeros(1, device=rank.device))
    for _ in range(int(request["repeats"])):
        for name, run in runs:
            spans = [_span_ns(rank, run, meet) for _ in range(replays)]
            made.setdefault(name, []).append([max(1, ns // times) for ns in spans])
    rank.answer({"ns": made, "captured": rank.on_gpu, "versions": _versions(rank)})


def _check(rank: Rank, values: Any) -> None:
    """Sums of sums, in a graph as they are timed, must be exact."""
    values.fill_(CHECKED_VALUE)
    run = _repeated(rank, lambda: torch_module().distributed.all_reduce(values), CHECKED)
    values.fill_(CHECKED_VALUE)  # the warm-up has summed already
    run()
    expected = CHECKED_VALUE * float(rank.count) ** CHECKED
    if not bool((values == expected).all()):
        raise EngineError(
            f"all_reduce over {rank.count} ranks gave {float(values[0])!r}, expected {expected!r}; "
            "report this with NCCL's version"
        )


def _repeated(rank: Rank, call: Callable[[], object], times: int) -> Callable[[], object]:
    """`times` calls as one: on GPUs a graph's replay."""
    torch = torch_module()

    def calls() -> None:
        for _ in range(times):
            call()

    if not rank.on_gpu:
        return calls
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()  # communicators are made by the first one
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # NCCL's watchdog asks for events meanwhile, which a global capture forbids
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        calls()

    replay: Callable[[], object] = graph.replay
    return replay


def _span_ns(rank: Rank, run: Callable[[], object], meet: Callable[[], object]) -> int:
    """The device's time on GPUs, else the host's; from a moment when the ranks have met."""
    torch = torch_module()
    meet()
    if not rank.on_gpu:
        begin = time.perf_counter_ns()
        run()
        return time.perf_counter_ns() - begin
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    run()
    last.record()
    last.synchronize()
    elapsed_ms: float = first.elapsed_time(last)
    return round(elapsed_ms * 1e6)


def _versions(rank: Rank) -> dict[str, str]:
    torch = torch_module()
    found = {"torch": str(torch.__version__)}
    if rank.on_gpu:
        found["nccl"] = ".".join(str(part) for part in torch.cuda.nccl.version())
    return found


if __name__ == "__main__":
    sys.exit(ranks.main(work, sys.argv[1:]))
