"""What the server counts, as Prometheus text: vLLM's names, and ours for the twin."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from twin.engine.generate import Completion, Request, Stop
from twin.server.expected import Expectation
from twin.server.job import Job

TOKEN_S = (
    0.0001,
    0.0002,
    0.0003,
    0.0005,
    0.00075,
    0.001,
    0.0015,
    0.002,
    0.003,
    0.005,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1.0,
    2.5,
)
FIRST_S = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
)
REQUEST_S = (
    0.01,
    0.03,
    0.1,
    0.3,
    0.5,
    0.8,
    1.0,
    1.5,
    2.0,
    2.5,
    5.0,
    10.0,
    15.0,
    20.0,
    30.0,
    40.0,
    60.0,
)
TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
ENOUGH = 16  # tokens of a prompt whose time says something of one
REASONS = {Stop.LENGTH: "length", Stop.TOKEN: "stop", Stop.TEXT: "stop", Stop.CANCELLED: "abort"}


@dataclass(slots=True)
class Histogram:
    buckets: Sequence[float]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.buckets) + 1)

    def add(self, value: float) -> None:
        self.counts[bisect_left(self.buckets, value)] += 1
        self.total += value

    def add_all(self, values: np.typing.NDArray[np.float64]) -> None:
        places = np.searchsorted(self.buckets, values, side="left")
        for at, more in enumerate(np.bincount(places, minlength=len(self.counts))):
            self.counts[at] += int(more)
        self.total += float(values.sum())

    def lines(self, name: str, label: str) -> Iterable[str]:
        seen = 0
        for bound, count in zip([*map(str, self.buckets), "+Inf"], self.counts, strict=True):
            seen += count
            yield f'{name}_bucket{{{label},le="{bound}"}} {seen}'
        yield f"{name}_sum{{{label}}} {self.total:.9g}"
        yield f"{name}_count{{{label}}} {seen}"


_HISTOGRAMS: dict[str, tuple[Sequence[float], str]] = {
    "request_prompt_tokens": (TOKENS, "prompt tokens of a request"),
    "request_generation_tokens": (TOKENS, "generated tokens of a request"),
    "time_to_first_token_seconds": (FIRST_S, "from a request's arrival to its first token"),
    "inter_token_latency_seconds": (TOKEN_S, "between two tokens, by the kernel's clock"),
    "e2e_request_latency_seconds": (REQUEST_S, "from a request's arrival to its end"),
    "request_queue_time_seconds": (REQUEST_S, "in the queue"),
    "request_prefill_time_seconds": (REQUEST_S, "reading the prompt, by the kernel's clock"),
    "request_decode_time_seconds": (REQUEST_S, "making tokens, by the kernel's clock"),
}


class Metrics:
    """Written by the worker's thread alone; a page read meanwhile may be one request behind."""

    def __init__(self, model: str, predicted: Expectation) -> None:
        quoted = model.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
        self._label = f'model_name="{quoted}"'
        self._predicted = predicted
        self._histograms = {name: Histogram(how[0]) for name, how in _HISTOGRAMS.items()}
        self._counts = {
            "prompt_tokens_total": 0.0,
            "generation_tokens_total": 0.0,
            "prefix_cache_queries_total": 0.0,
            "prefix_cache_hits_total": 0.0,
        }
        self._finished = dict.fromkeys([*REASONS.values(), "error"], 0)
        self._rounds = self._accepted = 0  # passes that verified drafts; drafts that counted
        self._saved_s = 0.0
        self._token_s = 0.0  # least time of a prompt's token so far, in requests that kept nothing
        self.refused = 0

    # ---- the worker's thread -------------------------------------------------------------------

    def ended(self, job: Job, request: Request, completion: Completion, tokens: int) -> float:
        """Returns what kept tokens saved, in seconds."""
        made, prompt = completion.made, len(request.prompt)
        self._finished[REASONS[completion.stop]] += 1
        counts = self._counts
        counts["prompt_tokens_total"] += prompt
        counts["generation_tokens_total"] += tokens
        counts["prefix_cache_queries_total"] += prompt
        counts["prefix_cache_hits_total"] += made.kept
        saved_s = self._saved(prompt, completion)
        self._saved_s += saved_s
        times = made.step_ns[1:] / 1e9
        now = self._histograms
        now["request_prompt_tokens"].add(prompt)
        now["request_generation_tokens"].add(tokens)
        now["inter_token_latency_seconds"].add_all(times)
        now["request_queue_time_seconds"].add(job.queued_s)
        now["request_prefill_time_seconds"].add(made.first_ns / 1e9)
        now["request_decode_time_seconds"].add(float(times.sum()))
        now["e2e_request_latency_seconds"].add(job.age_s)
        if job.first_s is not None:
            now["time_to_first_token_seconds"].add(job.first_s - job.born_s)
        rounds = len(made.round_ns)
        if rounds:  # the twin predicts steps
            self._rounds += rounds
            self._accepted += len(made.tokens) - rounds
        else:
            self._predicted.measured(times, prompt + tokens / 2)
        return saved_s

    def _saved(self, prompt: int, completion: Completion) -> float:
        """Kept tokens at the least time that one took when all were read; 0 before there was one.

        The least: a pass reads all weights whatever its tokens, so short prompts tell too much.
        """
        made = completion.made
        if not made.kept and prompt >= ENOUGH and made.prompt_ns:
            each_s = made.prompt_ns / 1e9 / prompt
            self._token_s = min(self._token_s or each_s, each_s)
        return made.kept * self._token_s

    def failed(self) -> None:
        self._finished["error"] += 1

    # ---- the page ------------------------------------------------------------------------------

    def text(self, *, running: int, waiting: int, kv_usage: float) -> str:
        return "\n".join([*self._lines(running, waiting, kv_usage), ""])

    def _lines(self, running: int, waiting: int, kv_usage: float) -> Iterable[str]:
        label = self._label
        gauges = {
            "vllm:num_requests_running": (running, "requests in the kernel: one at most"),
            "vllm:num_requests_waiting": (waiting, "requests in the queue"),
            "vllm:kv_cache_usage_perc": (kv_usage, "share of the context that is held (1 = all)"),
        } | self._predicted.gauges()
        for name, (value, about) in gauges.items():
            yield from (f"# HELP {name} {about}", f"# TYPE {name} gauge")
            yield f"{name}{{{label}}} {value:.9g}"
        for name, value in self._counts.items():
            yield from (f"# TYPE vllm:{name} counter", f"vllm:{name}{{{label}}} {value:.0f}")
        yield "# TYPE monotwin:prefix_saved_seconds_total counter"
        yield f"monotwin:prefix_saved_seconds_total{{{label}}} {self._saved_s:.9g}"
        for name, value in (("rounds", self._rounds), ("drafts_accepted", self._accepted)):
            yield f"# TYPE monotwin:{name}_total counter"
            yield f"monotwin:{name}_total{{{label}}} {value}"
        yield "# TYPE monotwin:requests_refused_total counter"
        yield f"monotwin:requests_refused_total{{{label}}} {self.refused}"
        yield "# TYPE monotwin:predictions_parted_total counter"
        yield f"monotwin:predictions_parted_total{{{label}}} {self._predicted.partings}"
        yield "# TYPE vllm:request_success_total counter"
        for reason, count in self._finished.items():
            yield f'vllm:request_success_total{{{label},finished_reason="{reason}"}} {count}'
        for name, histogram in self._histograms.items():
            yield f"# HELP vllm:{name} {_HISTOGRAMS[name][1]}"
            yield f"# TYPE vllm:{name} histogram"
            yield from histogram.lines(f"vllm:{name}", label)
