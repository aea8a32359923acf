"""One benchmark from start to end: what the engine computes is judged first, then everything is
timed in turn.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from twin.bench import fidelity, peers
from twin.bench.choices import Agreement, agreement
from twin.bench.fidelity import Judged, Logits
from twin.bench.lanes import LaneModel, lane_delay
from twin.bench.peers import Decoder
from twin.bench.plans import IDLE, LOADED, UNDISTURBED, Plans, shape_peer
from twin.bench.several import HF_REPEATS, HF_TOKENS, Followed, time_hugging_face, time_nccl
from twin.bench.source import Source, make_prompts
from twin.bench.timing import Sample, Steps, Variant, alternate
from twin.calibrate.gpu_probes import STAGES
from twin.engine.session import Session
from twin.errors import ConfigError, EngineError
from twin.models.spec import DType, ModelSpec
from twin.plan.shards import Weights
from twin.plan.types import Plan
from twin.reference.step import Reference

RESIDENT, GRAPH, EAGER, CAPTURED, CEILING = (
    "resident",
    "graph",
    "hf-eager",
    "hf-captured",
    "ceiling",
)
# largest difference from the NumPy reference, relative to the largest logit: a few BF16 roundings
# of the cache
LOGIT_TOLERANCE = 2e-2
# a static cache has room for so many steps, whatever is timed: capturing takes a few
FEWEST_CACHED = 8
DETERMINISM_RUNS, DETERMINISM_TOKENS, DETERMINISM_PROMPT = 5, 1000, 32
WARM_UP_S, WARM_UP_PROMPT = 1.5, 64  # long enough for the clocks to settle and to be read
PROBE_STEPS, PROBE_WARM_UP = 60, 5
PROBE_SEED = 5
LARGEST_LOGITS_BYTES = 8 * 2**30  # page-locked memory that one replay may take


class Watch(AbstractContextManager["Watch"], Protocol):
    """Reads the clocks: while it is entered, and when a round is over."""

    def after_round(self) -> None: ...

    def to_json(self) -> dict[str, Any]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    context: int  # positions in the cache before the first timed step
    tokens: int = 500  # timed steps of a repetition
    repeats: int = 5
    check: int = 4  # positions compared with the NumPy reference
    prompts: int = 8  # whose outputs are judged
    # prompt tokens of the judged outputs; the timed ones where it equals `context`
    fidelity_context: int
    determinism: bool = False
    peers: bool = True
    # generate the cached positions one by one instead of reading them as a prompt
    fill_by_steps: bool = False

    def check_for(self, spec: ModelSpec) -> None:
        """Raises ConfigError for what cannot be measured, before minutes are spent on it."""
        given = {
            "context": self.context,
            "repeats": self.repeats,
            "check": self.check,
            "fidelity": self.prompts,
        }
        for name, value in {
            **given,
            "fidelity-context": self.fidelity_context,
            "tokens": self.tokens,
        }.items():
            if value < 1:
                raise ConfigError(f"--{name} {value}: at least 1")
        if self.fidelity_context > self.context:
            raise ConfigError(
                f"--fidelity-context {self.fidelity_context}: at most --context {self.context}"
            )
        need = 4 * spec.vocab * (self.fidelity_context + self.tokens)
        if self.peers and need > LARGEST_LOGITS_BYTES:
            raise ConfigError(
                f"the logits of {self.fidelity_context + self.tokens} positions are "
                f"{need / 2**30:.3g} GiB, allowed are {LARGEST_LOGITS_BYTES / 2**30:g}: lower "
                "--fidelity-context or --tokens"
            )

    @property
    def positions(self) -> int:
        """What the engine's cache must hold."""
        long_run = (
            min(self.context, DETERMINISM_PROMPT) + DETERMINISM_TOKENS if self.determinism else 0
        )
        return max(self.context + self.tokens, long_run)


@dataclass(slots=True)
class Measured:
    samples: list[Sample] = field(default_factory=list)
    judged: list[Judged] = field(default_factory=list)
    fidelity: dict[str, Any] = field(default_factory=dict)
    about: dict[str, str] = field(default_factory=dict)  # variant -> what it is
    left_out: dict[str, str] = field(default_factory=dict)  # variant -> why
    notes: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)  # besides those of this process


class Bench:
    """A model's engine, its peers and what they made, for the time of one benchmark."""

    def __init__(
        self,
        source: Source,
        plans: Plans,
        settings: Settings,
        *,
        make_engine: Callable[[Plan, Weights | None], Session],
        watch: Watch,
        show: Callable[[str], None],
    ) -> None:
        self.source, self.plans, self.settings = source, plans, settings
        self._make_engine, self._watch, self._show = make_engine, watch, show
        self._stack = ExitStack()
        self._measured = Measured()
        self._timed: dict[int, list[int]] = {}  # repetition -> its tokens, the cached ones first
        self._known: dict[int, list[int]] = {}  # the same as they were judged
        self._followed: Followed | None = None  # what several GPUs' peers are judged by
        self._dtype = plans.resident.options.weight_dtype
        if settings.peers and self._dtype is DType.FP32:
            raise EngineError(
                "FP32 weights have no 16-bit type whose noise could be the measure: use --dtype "
                "bf16 or fp16, or --no-peers"
            )

    def run(self) -> Measured:
        """Correctness, then time. Raises EngineError when the numbers are wrong beyond any
        rounding.
        """
        with self._stack:
            self._prompts = make_prompts(
                self.source,
                max(self.settings.prompts, self.settings.repeats),
                self.settings.context,
            )
            self._show("loading the engine")
            self._engine = self._open(self.plans.resident, self.source.weights)
            self._check_numbers()
            if self.settings.determinism:
                self._check_determinism()
            self._time(self._judge() if self.settings.peers else None)
        if self._followed is not None and self.plans.gpus > 1:
            self._next_to_processes(self._followed)
        return self._measured

    def _open(self, plan: Plan, weights: Weights | None) -> Session:
        return self._stack.enter_context(self._make_engine(plan, weights))

    # ---- correctness -----------------------------------------------------------------------------

    def _check_numbers(self) -> None:
        self._show(f"comparing {self.settings.check} positions with the NumPy reference")
        tokens = self._prompts[0][: self.settings.check]
        self._measured.fidelity["numpy_positions"] = len(tokens)
        found = check_logits(self._engine, self.plans.resident, self.source.weights, tokens)
        self._measured.fidelity["numpy_logit_difference"] = found.difference
        if found.followed:
            self._measured.fidelity["numpy_choices_followed"] = len(found.followed)

    def _check_determinism(self) -> None:
        """Tokens and logits of several long runs, bit by bit."""
        prompt, tokens = self._prompts[0][:DETERMINISM_PROMPT], DETERMINISM_TOKENS
        seen = set()
        for run in range(DETERMINISM_RUNS):
            self._show(f"{tokens} tokens, run {run + 1}/{DETERMINISM_RUNS}")
            made = generated(self._engine, prompt, tokens)
            logits = self._engine.logits([*prompt, *made.tokens[:-1]])
            seen.add((made.tokens, hashlib.sha256(logits.tobytes()).hexdigest()))
        self._measured.fidelity["determinism"] = {
            "runs": DETERMINISM_RUNS,
            "tokens": tokens,
            "bitwise_equal": len(seen) == 1,
        }

    def _judge(self) -> Decoder | None:
        """KL and greedy tokens of the outputs; the peer's decoder stays for timing, unless
        transformers has no class for the model.
        """
        context = self.settings.fidelity_context
        sequences = []
        for number in range(self.settings.prompts):
            self._show(f"output {number + 1}/{self.settings.prompts}")
            sequences.append(self._decode(self._engine, self._prompts[number][:context])[1])
        if context == self.settings.context:
            self._known = dict(enumerate(sequences))
        keep = self.settings.tokens + 1
        device = peers.device_name()
        references = self._references(sequences, keep, device)
        self._followed = Followed(sequences[0], keep, references[0])
        decoder, follow = self._half(device)
        for number, (sequence, reference) in enumerate(zip(sequences, references, strict=True)):
            self._show(f"judging output {number + 1}/{len(sequences)}")
            peer = follow(sequence, keep)
            engine = self._engine.logits(sequence[:-1])[-keep:]
            self._measured.judged.append(fidelity.judge(reference, engine, peer, sequence[-keep:]))
        del follow
        peers.release()
        self._measured.fidelity |= {
            "prompts": len(sequences),
            "context": context,
            "timed_outputs": context == self.settings.context,
            "type": self._dtype.value,
            "reference": self._definition("FP32"),
            "peer": self._definition(self._dtype.value.upper()),
            **fidelity.summary(fidelity.joined(self._measured.judged)),
        }
        return decoder

    def _definition(self, dtype: str) -> str:
        if self.source.spec.lanes:
            return f"the published definition in torch, {dtype}"
        return f"Hugging Face transformers, {dtype}"

    def _references(self, sequences: Sequence[list[int]], keep: int, device: str) -> list[Logits]:
        """FP32 logits of every output; the model is gone when they are there."""
        self._show("loading the FP32 reference")
        spec, weights = self.source.spec, self.source.weights
        out = []
        if spec.lanes:
            lanes = LaneModel(spec, weights, DType.FP32, device=device, delay=self._delay())
            out = [lanes.logits(sequence[:-1], keep) for sequence in sequences]
            del lanes
        else:
            model = peers.make_model(
                spec,
                weights,
                DType.FP32,
                device=device,
                attention="eager",
                folder=self.source.folder,
            )
            for number, sequence in enumerate(sequences):
                self._show(f"FP32 logits {number + 1}/{len(sequences)}")
                out.append(peers.reference_logits(model, sequence[:-1], keep))
            del model
        peers.release()
        return out

    def _half(self, device: str) -> tuple[Decoder | None, Callable[[list[int], int], Logits]]:
        """The peer in the engine's type, and its logits of the last `keep` positions of a sequence
        but its last token.
        """
        self._show(f"loading the {self._dtype.value} peer")
        spec, weights = self.source.spec, self.source.weights
        if spec.lanes:
            lanes = LaneModel(spec, weights, self._dtype, device=device, delay=self._delay())
            return None, lambda sequence, keep: lanes.logits(sequence[:-1], keep)
        decoder = self._decoder(weights, device)
        captured = CAPTURED not in self._measured.left_out

        def follow(sequence: list[int], keep: int) -> Logits:
            return decoder.follow(sequence[:-keep], sequence[-keep:-1], captured=captured)

        return decoder, follow

    def _decoder(self, weights: Weights | None, device: str) -> Decoder:
        """Hugging Face with a static cache of the timed size, its step captured where that can be
        done.
        """
        spec = shape_peer(self.source.spec, self._dtype)
        model = peers.make_model(
            spec,
            weights,
            self._dtype,
            device=device,
            folder=self.source.folder if weights is not None else None,
        )
        decoder = Decoder(model, self.settings.context + max(self.settings.tokens, FEWEST_CACHED))
        prompt = self._prompts[0]
        try:
            decoder.capture(prompt)
        except (EngineError, RuntimeError) as error:
            # torch's errors of a capture are RuntimeErrors: the others are still worth timing
            self._measured.left_out[CAPTURED] = str(error)
            return decoder
        few = min(FEWEST_CACHED, self.settings.tokens)
        eager, captured = (decoder.run(prompt, few, captured=way).tokens for way in (False, True))
        self._measured.notes["captured_equals_eager"] = eager == captured
        return decoder

    def _delay(self) -> int:
        assert self.source.spec.lanes is not None
        return lane_delay(self.source.spec.lanes, self.plans.resident.options.delay)

    # ---- time ------------------------------------------------------------------------------------

    def _time(self, decoder: Decoder | None) -> None:
        variants = [
            self._engine_variant(
                RESIDENT, self._engine, "the engine, one launch for the whole generation"
            )
        ]
        self._show("loading the engine as a graph")
        graph = self._open(self.plans.graph, self.source.weights)
        variants.append(
            self._engine_variant(GRAPH, graph, "the engine's stages as the kernels of a CUDA graph")
        )
        if self.settings.peers:
            variants += self._peer_variants(decoder or self._shape_decoder())
        variants.append(self._ceiling_variant())
        variants += self._exchange_variants()
        self._measured.about = {variant.name: variant.about for variant in variants}
        self._measured.samples = alternate(
            variants, self.settings.repeats, show=self._show, after_round=self._watch.after_round
        )
        self._measured.notes["graph_tokens_equal"] = self._same_tokens(GRAPH)

    def _shape_decoder(self) -> Decoder:
        self._show("loading a Llama of the same dimensions")
        self._measured.notes["peers_timed_as"] = (
            f"{shape_peer(self.source.spec, self._dtype).name}: full attention, random weights"
        )
        return self._decoder(None, peers.device_name())

    def _engine_variant(self, name: str, engine: Session, about: str) -> Variant:
        def warm_up() -> None:
            end = time.monotonic() + WARM_UP_S
            with self._watch:
                while time.monotonic() < end:
                    generated(engine, self._prompts[0][:WARM_UP_PROMPT], self.settings.tokens)

        def run(repeat: int) -> Steps:
            steps, tokens = self._decode(engine, self._prompts[repeat])
            if name == RESIDENT:
                self._timed[repeat] = tokens
                if tokens != self._known.get(repeat, tokens):
                    raise EngineError(
                        f"repetition {repeat + 1} gave other tokens than those that were judged: "
                        "report this plan"
                    )
            return steps

        return Variant(name, about, warm_up, run)

    def _peer_variants(self, decoder: Decoder) -> list[Variant]:
        kinds = [(EAGER, False, "transformers, static cache, launch by launch")]
        if CAPTURED not in self._measured.left_out:
            kinds.append(
                (
                    CAPTURED,
                    True,
                    "transformers, static cache, a decode step captured as a CUDA graph",
                )
            )
        few = min(FEWEST_CACHED, self.settings.tokens)

        def variant(name: str, captured: bool, about: str) -> Variant:
            def run(repeat: int) -> Steps:
                return decoder.run(
                    self._timed[repeat][: self.settings.context],
                    self.settings.tokens,
                    captured=captured,
                )

            return Variant(
                name, about, lambda: decoder.run(self._prompts[0], few, captured=captured), run
            )

        return [variant(*kind) for kind in kinds]

    def _ceiling_variant(self) -> Variant:
        probe = self._open(self.plans.ceiling, None)
        probe.fill_random(PROBE_SEED)

        def run(repeat: int) -> Steps:
            return Steps(
                np.round(probe.step_seconds(steps=PROBE_STEPS, warmup=PROBE_WARM_UP) * 1e9).astype(
                    np.int64
                )
            )

        return Variant(
            CEILING,
            f"stream probe, {self.plans.ceiling.bytes_per_step() / 1e9:.3g} GB a step",
            lambda: run(0),
            run,
        )

    def _exchange_variants(self) -> list[Variant]:
        """The kernel's own all-reduces, whose times are those of one of STAGES."""
        elements = self.source.spec.hidden
        about = {
            IDLE: f"the kernel's all-reduce of {elements} FP32, nothing else running",
            LOADED: f"the same while every block streams; less {UNDISTURBED} it is the all-reduce",
            UNDISTURBED: f"what {LOADED} streams, without an all-reduce",
        }
        if self.plans.gpus > 1 and LOADED not in self.plans.exchanges:
            self._measured.left_out[LOADED] = (
                f"no room in shared memory next to {elements} elements"
            )

        def variant(name: str, plan: Plan) -> Variant:
            probe = self._open(plan, None)
            probe.fill_random(PROBE_SEED)

            def run(repeat: int) -> Steps:
                seconds = probe.step_seconds(steps=PROBE_STEPS, warmup=PROBE_WARM_UP)
                return Steps(np.round(seconds * 1e9 / STAGES).astype(np.int64))

            return Variant(name, about[name], lambda: run(0), run)

        return [variant(name, plan) for name, plan in self.plans.exchanges.items()]

    def _next_to_processes(self, followed: Followed) -> None:
        """What takes a process a GPU, which are free by then."""
        peers.release()
        settings, backend = self.settings, "gloo" if peers.device_name() == "cpu" else "nccl"
        self._show(f"NCCL on {self.plans.gpus} GPUs")
        time_nccl(
            self.source.spec.hidden,
            self.plans.gpus,
            settings.repeats,
            backend=backend,
            into=self._measured,
        )
        self._show(f"Hugging Face on {self.plans.gpus} GPUs")
        repeats = range(min(settings.repeats, HF_REPEATS))
        time_hugging_face(
            self.source,
            self.plans,
            [self._timed[repeat][: settings.context] for repeat in repeats],
            min(settings.tokens, HF_TOKENS),
            settings.context + max(settings.tokens, FEWEST_CACHED),
            followed,
            backend=backend,
            into=self._measured,
        )

    def _decode(self, engine: Session, prompt: list[int]) -> tuple[Steps, list[int]]:
        """The timed steps after `prompt`, and all tokens: as many as the prompt has, then those
        generated.
        """
        given = prompt[:1] if self.settings.fill_by_steps else prompt
        made = generated(engine, given, len(prompt) - len(given) + self.settings.tokens + 1)
        return replace(made, ns=made.ns[-self.settings.tokens :]), [*given, *made.tokens]

    def _same_tokens(self, variant: str) -> bool:
        by_repeat = {
            s.repeat: s.steps.tokens for s in self._measured.samples if s.variant == variant
        }
        return all(
            tuple(self._timed[repeat][-len(tokens) :]) == tokens
            for repeat, tokens in by_repeat.items()
        )


def generated(engine: Session, prompt: Sequence[int], tokens: int) -> Steps:
    """A greedy run of exactly `tokens` tokens. Ctrl-C ends the benchmark."""
    made = engine.generate(prompt, max_tokens=tokens)
    if made.stop_reason == "cancelled" or len(made.tokens) != tokens:
        raise KeyboardInterrupt
    return Steps(made.step_ns, tuple(made.tokens))


def reference_logits(plan: Plan, weights: Weights, tokens: Sequence[int]) -> NDArray[Any]:
    """[tokens, vocab] of the NumPy reference."""
    reference = Reference(plan, weights)
    reference.turn(len(tokens))
    return np.array([reference.step(token) for token in tokens])


def check_logits(
    engine: Session,
    plan: Plan,
    weights: Weights,
    tokens: Sequence[int],
    expected: NDArray[Any] | None = None,
) -> Agreement:
    """The engine's logits next to the NumPy reference's; `expected`: these, where they are known.
    Raises EngineError beyond LOGIT_TOLERANCE, which holds with the choices of experts that rounding
    decided (twin/bench/choices.py).
    """
    if expected is None:
        expected = reference_logits(plan, weights, tokens)
    found = engine.logits(tokens)
    difference = float(np.max(np.abs(found - expected)) / np.max(np.abs(expected)))
    made = Agreement(difference, difference)
    if difference > LOGIT_TOLERANCE and plan.kernel_experts:
        half = LOGIT_TOLERANCE / 2
        made = agreement(plan, weights, tokens, found, expected, beyond=half)
    if not made.difference <= LOGIT_TOLERANCE:
        raise EngineError(
            f"logits differ from the reference by {made.difference:.2g} of the largest, allowed "
            f"are {LOGIT_TOLERANCE:g}; report this plan"
        )
    return made
