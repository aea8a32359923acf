"""What every engine does alike: checks a request, starts the kernel, passes tokens on, explains a
failure.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import operator
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Self

import numpy as np
from numpy.typing import DTypeLike, NDArray

from twin.engine.bias import Bias, GivenBias
from twin.engine.failures import raise_failure, status_of
from twin.engine.generation import Drafting, Generation, joined
from twin.engine.sampling import SamplingParams
from twin.errors import EngineError
from twin.kernel.header import MAX_RANKS, Control, DraftingRequest, Request, Status
from twin.kernel.packing import STORAGE
from twin.kernel.tables import layout
from twin.plan.options import Sampling
from twin.plan.shards import factors_change
from twin.plan.types import Plan

PROBE_SCALE = 0.02  # spread of a probe's random weights
PROBE_VALUES = 1 << 20  # random values made; the rest repeats them
MOST_WATCHDOG_S = 1e9  # the kernel counts nanoseconds in 64 bits
# Steps whose logits wait for the host: at 2,000 tokens/s it may do something else for 3 ms.
LOGIT_ROWS = 8
# A sequence that is read again draws from here on: its kernel counts its draws anew.
LONG_SEED = 0x6C6F6E67726F7065
# Rows of any request, however short: before a step's token is handed out the kernel waits for the
# row of the step after it, which with one row only that token could free.
FEWEST_ROWS = 2


class Cancelled(EngineError):
    """By Ctrl-C or `Session.cancel`, where no part of the work is worth having."""


class Session(ABC):
    """A plan and its weights, ready to generate. A context manager.

    One request runs at a time: a second one, from another thread or from within `on_token`, raises
    EngineError.
    """

    plan: Plan
    _trace: bool
    _watchdog_ns: int
    _control: Control
    gives_logits = False  # while the kernel runs
    drafts_drawn = True  # are drafts of requests with a temperature verified, too?

    def __init__(self, plan: Plan, *, trace: bool, watchdog_s: float) -> None:
        if reason := plan.simulation_only():
            raise EngineError(reason)
        if plan.ranks > MAX_RANKS:
            raise EngineError(
                f"{plan.ranks} ranks: the kernel addresses at most {MAX_RANKS}; use fewer GPUs or "
                "lanes"
            )
        if not 0 < watchdog_s <= MOST_WATCHDOG_S:
            raise EngineError(
                f"watchdog_s={watchdog_s}: must lie above 0 and at most {MOST_WATCHDOG_S:g}"
            )
        self.plan = plan
        self._trace = trace
        self._watchdog_ns = int(watchdog_s * 1e9)
        self._in_use = threading.Lock()
        self._cancelled = False  # the present request
        self._held: list[int] = []  # tokens whose keys and values the cache holds, from position 0
        # the longest sequence with LongRoPE's short factors, where the plan reaches beyond it
        last = factors_change(plan.spec) if plan.spec else None
        self._short = last if last is not None and last < plan.options.max_context else None
        self._long = True  # as the constants are packed

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the device's state; the engine cannot run afterwards. Raises EngineError while a
        request runs.
        """
        with self._alone("close"):
            self._close()

    @property
    def held(self) -> int:
        """Tokens whose keys and values are kept for a request that begins with them."""
        return len(self._held)

    def cancel(self) -> None:
        """End the present request at once, keeping what it generated. May be called from a signal
        handler or another thread.

        From the moment at which `generate` was called: what comes before the kernel's start counts
        as well.
        """
        self._cancelled = True  # before the word that a start clears
        self._control.abort = 1

    @contextmanager
    def _alone(self, what: str) -> Iterator[None]:
        """The engine belongs to one request at a time: its memory, its threads and its control
        words are there once.
        """
        if not self._in_use.acquire(blocking=False):
            raise EngineError(
                f"{what}: the engine runs a request already; wait until it ends or cancel it, or "
                "make another engine"
            )
        self._cancelled = False
        try:
            yield
        finally:
            self._in_use.release()

    def generate(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int,
        sampling: SamplingParams = SamplingParams(),  # noqa: B008  # frozen
        stop: Iterable[int] = frozenset(),
        on_token: Callable[[int], None] | None = None,
        on_logits: Callable[[NDArray[np.float32]], None] | None = None,
        reuse: bool = False,
        bias: Bias | None = None,
        drafting: Drafting = Drafting(),  # noqa: B008  # frozen
    ) -> Generation:
        """Up to `max_tokens` tokens after `prompt`. Ctrl-C returns what was generated so far.

        `reuse`: of a prompt that begins as the request before did, only the rest is read, but of
        models with recurrent states, which read all of it. A pass
        and a step round differently, so what a step wrote may differ from a pass in the last bits.
        A sequence that outgrows LongRoPE's short factors is read again with the long ones, as
        transformers does (`Generation.reread`), and the rest of it drawn with a seed derived from
        the sampling's.
        `on_logits`: gets the logits [vocab] of each token before `on_token` gets the token. The
        kernel waits for who is LOGIT_ROWS tokens behind, but no longer than half its watchdog.
        `bias`: added to the logits before a token is chosen; `on_logits` gets them without it. The
        kernel waits as long for each token's, which is written after `on_token`.
        `drafting`: of a plan with `lookup`. Tokens then come from passes that verify drafts, of a
        request without logits and bias. Passes sum in an order of their own, so a token whose logit
        is almost that of another one may differ from a step's; which drafts there were makes no
        difference.

        Raises EngineError for a wrong request, for one while another runs, and when the kernel
        hangs or finds no token to choose.
        """
        with self._alone("generate"):
            self._check(prompt, max_tokens, stop)
            stops = frozenset(stop)
            # the last token is never read
            if self._short is None or not (
                len(prompt) <= self._short < len(prompt) + max_tokens - 1
            ):
                return self._generate(
                    prompt, max_tokens, sampling, stops, on_token, on_logits, reuse, bias, drafting
                )
            before = self._short + 1 - len(prompt)
            made = self._generate(
                prompt, before, sampling, stops, on_token, on_logits, reuse, bias, drafting
            )
            if made.stop_reason != "length":
                return made
            drawn = replace(sampling, seed=sampling.seed ^ LONG_SEED)
            whole, left = [*prompt, *made.tokens], max_tokens - before
            rest = self._generate(
                whole, left, drawn, stops, on_token, on_logits, False, bias, drafting, made.tokens
            )
            return joined(made, rest, len(prompt) + before)

    def _generate(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        sampling: SamplingParams,
        stop: frozenset[int],
        on_token: Callable[[int], None] | None,
        on_logits: Callable[[NDArray[np.float32]], None] | None,
        reuse: bool,
        bias: Bias | None,
        drafting: Drafting,
        before: Sequence[int] = (),  # made by this request already
    ) -> Generation:
        if not sampling.greedy and self.plan.options.sampling is Sampling.GREEDY:
            raise EngineError(
                f"temperature={sampling.temperature}: this plan samples greedily in every block; "
                "plan with sampling=full, or use temperature 0"
            )
        self._turn(len(prompt))
        # a recurrent state cannot be taken back to where two prompts part
        kept = _agreeing(self._held, prompt[:-1]) if reuse and not self.plan.kernel_recurs else 0
        self._held = list(prompt[:kept])  # whatever comes of this request
        plain = on_logits is None and bias is None and (sampling.greedy or self.drafts_drawn)
        most = self.plan.options.lookup
        lookup = (most if drafting.most is None else min(drafting.most, most)) if plain else 0
        request, stamps_of_passes = self._read_request(
            prompt, max_tokens, stop, kept=kept, drafts=lookup
        )
        if lookup:
            assert isinstance(request, DraftingRequest)
            request.drafts, request.accepted = lookup, drafting.accepted
        passes = len(stamps_of_passes) - (max_tokens if lookup else 0)
        pass_stamps, round_stamps = np.split(stamps_of_passes, [passes])
        steps, ordinary = request.steps, request.forced - 1  # steps before that of the first token
        request.seed, request.temperature = sampling.seed, sampling.temperature
        request.top_k, request.top_p = sampling.top_k, sampling.top_p
        request.margin = sampling.margin
        tokens, stamps = self._zeros(steps, np.int32), self._zeros(steps, np.uint64)
        request.tokens, request.stamps = address(tokens), address(stamps)
        trace = self._trace_memory(request, steps)
        if on_logits is not None:
            on_token = self._with_logits(request, on_logits, on_token)
        if bias is not None:
            on_token = self._with_bias(request, bias, on_token, prompt, before)
        cancelled = self._run(request, tokens, on_token)
        made = self._control.emitted
        if made and not self.plan.kernel_recurs:  # the last token was not read
            self._held = [*prompt, *(int(token) for token in tokens[: made - 1])]
        rounds = np.concatenate(
            [[self._control.started], pass_stamps[-1:], round_stamps[round_stamps > 0]]
        ).astype(np.int64)
        times = np.concatenate(
            [[self._control.started], pass_stamps, stamps[: ordinary + made]]
        ).astype(np.int64)
        first = len(pass_stamps) + ordinary
        if trace is not None:
            starts = self._starts()[None, :, None, None, None]
            trace = np.where(trace > 0, trace.astype(np.int64) - starts, 0)[: ordinary + made]
        return Generation(
            tokens=[int(t) for t in tokens[:made]],
            step_ns=np.diff(times)[first:],
            prompt_ns=int(times[first] - times[0]) if made else 0,
            pass_ns=np.diff(times)[: len(pass_stamps)] if made else np.zeros(0, np.int64),
            round_ns=np.diff(rounds)[int(passes > 0) :],
            stop_reason="stop"
            if status_of(self._control) is Status.STOP
            else "cancelled"
            if cancelled and made < max_tokens
            else "length",
            trace=trace,
            kept=kept,
        )

    def _with_logits(
        self,
        request: Request,
        on_logits: Callable[[NDArray[np.float32]], None],
        on_token: Callable[[int], None] | None,
    ) -> Callable[[int], None]:
        """The kernel leaves logits next to its tokens; returns what takes each token."""
        if not self.gives_logits:
            raise EngineError(
                f"{type(self).__name__} gives no logits while this plan runs: request none, plan "
                "with sampling=full for an NVIDIA GPU, or use `logits` afterwards"
            )
        assert self.plan.spec is not None
        count = min(LOGIT_ROWS, max(FEWEST_ROWS, request.steps))
        rows = self._zeros((count, self.plan.spec.vocab), np.float32)
        request.logits, request.logit_rows = address(rows), count
        steps = itertools.count(request.forced - 1)

        def taken(token: int) -> None:
            row = rows[next(steps) % count].copy()
            self._taken()
            on_logits(row)
            if on_token is not None:
                on_token(token)

        return taken

    def _with_bias(
        self,
        request: Request,
        bias: Bias,
        on_token: Callable[[int], None] | None,
        prompt: Sequence[int],
        made: Sequence[int],
    ) -> Callable[[int], None] | None:
        """The kernel adds `bias`; returns what takes each token."""
        if self.plan.options.sampling is Sampling.GREEDY:
            raise EngineError(
                "a bias needs a plan that samples from all logits: plan with sampling=full"
            )
        assert self.plan.spec is not None
        rows = self._zeros((GivenBias.count(bias), self.plan.spec.vocab), np.float32)
        request.bias, request.bias_rows = address(rows), len(rows)
        request.repetition = bias.repetition
        given = GivenBias(bias, rows, prompt, made)
        if len(rows) == 1:
            return on_token

        def taken(token: int) -> None:
            if on_token is not None:
                on_token(token)
            self._biased(given.push(token))

        return taken

    def logits(self, tokens: Sequence[int], *, after: Sequence[int] = ()) -> NDArray[np.float32]:
        """[len(tokens), vocab]: the logits after each of the given tokens, which follow the tokens
        `after`.

        `after` is read like a prompt; the tokens themselves are always read one a step.
        """
        with self._alone("logits"):
            return self._logits(tokens, after)

    def _logits(self, tokens: Sequence[int], after: Sequence[int]) -> NDArray[np.float32]:
        self._check(tokens, 1)
        whole = [*after, *tokens]
        self._check(whole, 1)
        assert self.plan.spec is not None
        self._held = []
        self._turn(len(whole))
        request, _ = self._read_request(whole, 1, (), most=len(after))
        out = self._zeros((request.forced, self.plan.spec.vocab), np.float32)
        out[:] = np.nan
        stamps = self._zeros(request.forced, np.uint64)
        request.every_position, request.logits, request.stamps = 1, address(out), address(stamps)
        self._trace_memory(request, request.forced)
        if self._run(request, np.zeros(0, np.int32), None):
            raise Cancelled("cancelled before all positions were computed")
        return out[-len(tokens) :].copy()

    def run_steps(self, steps: int) -> NDArray[np.int64]:
        """Probes: run, and return when the slowest block ended each step, [steps] in ns since the
        start.
        """
        if self.plan.spec is not None:
            raise EngineError(f"{self.plan.name} is a model's plan, not a probe: use generate")
        if not 1 <= steps < 2**31:
            raise EngineError(f"steps={steps}: a run of a probe has 1 to 2**31 - 1")
        with self._alone("run_steps"):
            return self._run_steps(steps)

    def _run_steps(self, steps: int) -> NDArray[np.int64]:
        request = self._request((), steps, ())
        workers = self.plan.ranks * self.plan.blocks
        stamps = self._zeros((steps, workers), np.uint64)
        checksums = self._zeros(workers, np.float32)
        request.block_stamps, request.checksums = address(stamps), address(checksums)
        request.temperature = 1.0  # a probe of the sampler draws from the whole vocabulary
        self._trace_memory(request, steps)
        if self._run(request, np.zeros(0, np.int32), None):
            raise EngineError(f"cancelled before all {steps} steps of {self.plan.name} were run")
        if not np.isfinite(checksums).all():
            raise EngineError(f"{self.plan.name}: a block computed {checksums}; report this")
        since = stamps.astype(np.int64) - np.repeat(self._starts(), self.plan.blocks)
        ends: NDArray[np.int64] = since.max(axis=1)
        return ends

    def step_seconds(self, *, steps: int, warmup: int) -> NDArray[np.float64]:
        """Probes: seconds of each of `steps` steps, after `warmup` steps."""
        ends = self.run_steps(warmup + steps)
        seconds: NDArray[np.float64] = np.diff(np.concatenate([[0], ends]))[warmup:] / 1e9
        return seconds

    # ---- one run ---------------------------------------------------------------------------------

    def _turn(self, present: int) -> None:
        """LongRoPE's tables for a sequence of `present` tokens; keys turned by others are not kept.
        Beyond the positions of the short factors a table never changes.
        """
        if self._short is None or self._long == (present > self._short):
            return
        self._held = []
        for at, table in layout(self.plan).constants.rope_vectors(self._short, present=present):
            self._write_constants(at, table)
        self._long = not self._long

    def _check(self, prompt: Sequence[int], max_tokens: int, stop: Iterable[int] = ()) -> None:
        if self.plan.spec is None:
            raise EngineError(f"{self.plan.name} is a probe: it generates nothing; use run_steps")
        if not len(prompt):
            raise EngineError("the prompt is empty: give at least one token")
        if not _all_within(prompt, self.plan.spec.vocab):
            for at, token in enumerate(prompt):
                _check_token(f"prompt token {at}", token, self.plan.spec.vocab)
        for token in stop:
            _check_token("a stop token", token, 2**31)  # one beyond the vocabulary never comes
        if max_tokens < 1:
            raise EngineError(f"max_tokens={max_tokens}: must be at least 1")
        limit = self.plan.options.max_context
        if len(prompt) + max_tokens > limit + 1:  # the last token is never read
            raise EngineError(
                f"{len(prompt)} prompt tokens and max_tokens={max_tokens} exceed "
                f"max_context={limit}: shorten them, or plan a larger max_context"
            )

    def _read_request(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        stop: Iterable[int],
        most: int | None = None,
        kept: int = 0,
        drafts: int = 0,
    ) -> tuple[Request, NDArray[Any]]:
        """A request whose prompt is read in passes but for its last token, or up to `most` tokens;
        and the passes' time stamps, behind them those of as many rounds as may have `drafts`.

        The first `kept` tokens are not read: their keys and values are there.
        """
        chunk = self.plan.options.prompt_chunk
        read = (len(prompt) - 1 if most is None else most) if chunk > 1 else kept
        request = self._request(prompt[read:], len(prompt) - read + max_tokens - 1, stop)
        rounds = max_tokens if drafts else 0
        stamps = self._zeros(-(-(read - kept) // chunk) + rounds, np.uint64)
        request.read, request.kept = read, kept
        if read > kept or drafts:
            request.chunks, request.pass_stamps = (
                self._give(np.array(prompt if drafts else prompt[:read], np.int32)),
                address(stamps),
            )
        return request, stamps

    def _request(self, prompt: Sequence[int], steps: int, stop: Iterable[int]) -> Request:
        forced, stops = np.array(prompt, np.int32), np.array(sorted(stop), np.int32)
        request = (DraftingRequest if self.plan.options.lookup else Request)(
            forced=len(forced),
            steps=steps,
            stop_count=len(stops),
            watchdog_ns=self._watchdog_ns,
            top_p=1.0,
            margin=math.inf,
        )
        request.prompt, request.stop, request.abort = (
            self._give(forced),
            self._give(stops),
            self._abort_address(),
        )
        return request

    def _trace_memory(self, request: Request, steps: int) -> NDArray[Any] | None:
        if not self._trace:
            return None
        trace = self._zeros(
            (steps, self.plan.ranks, self.plan.blocks, len(self.plan.stages), 2), np.uint64
        )
        request.trace = address(trace)
        return trace

    def _run(
        self, request: Request, tokens: NDArray[np.int32], on_token: Callable[[int], None] | None
    ) -> bool:
        """Start all blocks and stay until they have left. True when the run was cancelled."""
        self._start(request)
        if self._cancelled:  # the start cleared the word
            self._control.abort = 1
        seen, cancelled = 0, False
        try:
            while True:
                try:
                    left = self._wait(seen)
                    emitted = self._control.emitted
                    while on_token and seen < emitted:
                        seen += 1
                        on_token(int(tokens[seen - 1]))
                    seen = emitted
                except KeyboardInterrupt:
                    cancelled = True
                    self.cancel()
                    continue
                if left and seen == self._control.emitted:
                    break
        except BaseException:
            self.cancel()
            raise
        finally:
            self._join()
        raise_failure(self.plan, self._control, request, cancelled=self._cancelled)
        return cancelled or bool(self._control.abort)

    def _taken(self) -> None:
        """The logits of one more token: their row may be written again."""
        self._control.taken += 1

    def _biased(self, given: int) -> None:
        """So many rows of the bias behind the first one are written."""
        self._control.biased = given

    # ---- what an engine has to say ---------------------------------------------------------------

    @abstractmethod
    def _close(self) -> None:
        """Release the device's state; closing again does nothing."""

    @abstractmethod
    def _zeros(self, shape: int | tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
        """An array of the present run that the kernel writes."""

    @abstractmethod
    def _give(self, array: NDArray[Any]) -> int:
        """The address at which the kernel reads an array of the present run."""

    def _abort_address(self) -> int:
        """Where the blocks look whether to leave."""
        return ctypes.addressof(self._control) + Control.abort.offset

    def _starts(self) -> NDArray[np.int64]:
        """[ranks] when the run began, in ns of the clock that stamps the rank's times."""
        return np.full(self.plan.ranks, self._control.started, np.int64)

    @abstractmethod
    def _write_constants(self, at: int, vector: NDArray[np.float32]) -> None:
        """Between runs: the constants of all ranks from float `at` on. Does nothing without
        weights.
        """

    @abstractmethod
    def fill_random(self, seed: int) -> None:
        """Random weights in every stream."""

    @abstractmethod
    def _start(self, request: Request) -> None:
        """Forget the run before, then start all blocks."""

    @abstractmethod
    def _wait(self, seen: int) -> bool:
        """Sleep a little, or until more than `seen` tokens are there. True: all blocks have
        left.
        """

    @abstractmethod
    def _join(self) -> None:
        """Stay until all blocks have left."""


def _all_within(tokens: Sequence[int], vocab: int) -> bool:
    """At the speed of C: 8,192 tokens one by one take 3 ms of a first token's time."""
    found = np.asarray(tokens)
    return found.dtype.kind in "iu" and bool(found.min() >= 0 and found.max() < vocab)


def _check_token(name: str, token: int, vocab: int) -> None:
    try:
        operator.index(token)
    except TypeError:
        raise EngineError(f"{name} is {token!r}: must be a whole number") from None
    if not 0 <= token < vocab:
        raise EngineError(f"{name} is {token}: must lie between 0 and {vocab - 1}")


def _agreeing(held: Sequence[int], prompt: Sequence[int]) -> int:
    """How many tokens both begin with."""
    both = min(len(held), len(prompt))
    differ = np.flatnonzero(np.asarray(held[:both]) != np.asarray(prompt[:both]))
    return int(differ[0]) if len(differ) else both


def address(array: NDArray[Any]) -> int:
    return int(array.ctypes.data)


def random_pattern(plan: Plan, seed: int) -> NDArray[np.uint8]:
    """Random weights to repeat over a stream: the values do not matter, but denormals would."""
    values = np.random.default_rng(seed).standard_normal(PROBE_VALUES, np.float32) * np.float32(
        PROBE_SCALE
    )
    pattern: NDArray[np.uint8] = values.astype(STORAGE[plan.options.weight_dtype]).view(np.uint8)
    return pattern
