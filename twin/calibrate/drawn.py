"""Models that a seed draws, to be predicted before they run: nobody can tune to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from twin.calibrate import drawn_kinds
from twin.calibrate.drawn_kinds import (
    FORMATS,
    STORED,
    dealt,
    dividing_heads,
    grained,
    in_few_bits,
    log_between,
    one_of,
)
from twin.calibrate.experiment import Experiment
from twin.errors import CalibrationError, ConfigError, TwinError
from twin.hardware.types import HOST, Node
from twin.kernel.room import check_room
from twin.models.kind import ModelKind
from twin.models.spec import DType, Lanes, ModelSpec, Rope
from twin.plan.options import HandOffKind
from twin.schedule.options import default_options

MOST_SHAPES = 256
MOST_SEED = 2**32 - 1
ATTEMPTS = 200  # draws for each shape that is wanted: most fail by their number of weights
ROOM = 16  # positions for tokens that are not counted
GRAIN = 64  # of hidden sizes
HEAD_GRAIN = 128  # of feed-forwards and vocabularies
# a feed-forward's rows over the hidden size: public dense models have 2.4 to 5.4
FEEDS = (2.0, 5.5)
ATTENDED = (0.6, 1.6)  # elements of all query heads over the hidden size
KV_HEADS = (1, 2, 4, 5, 8, 16, 32)
GROUPS = (1, 2, 3, 4, 5, 6, 7, 8)
DTYPES = (DType.BF16, DType.FP16)
SHORTEST, LONGEST = "short", "long"
# on several GPUs; every fourth dense model has lanes, with the delays and windows of Laneformer-2B
# or others
LANED = (False, False, False, True)
DELAYS = (1, 2, 3)
WINDOW, WINDOWED = 512, (2, 3)  # positions; two of three layers


@dataclass(frozen=True, slots=True)
class Scope:
    """What is drawn for a kind of device, and how it runs."""

    weights: tuple[float, float]  # fewest, most
    hidden: tuple[int, int]
    layers: tuple[int, int]
    vocab: tuple[int, int]
    head_dims: tuple[tuple[int, float], ...]  # with their shares
    prompts: tuple[int, int]  # positions of the short and the long context
    tokens: int
    repeats: int
    lanes: int  # of a model that has some


GPU = Scope(
    weights=(0.3e9, 14e9),
    hidden=(640, 5120),
    layers=(8, 60),
    vocab=(32_000, 152_064),
    head_dims=((64, 0.35), (128, 0.5), (96, 0.05), (256, 0.1)),
    prompts=(48, 1500),
    tokens=96,
    repeats=2,
    lanes=8,
)
CPU = Scope(
    weights=(0.1e6, 8e6),
    hidden=(64, 384),
    layers=(1, 4),
    vocab=(256, 4096),
    head_dims=((32, 0.5), (64, 0.5)),
    prompts=(8, 64),
    tokens=12,
    repeats=3,
    lanes=4,
)


def drawn_runs(
    node: Node,
    count: int,
    seed: int,
    progress: Callable[[str], None] = lambda _: None,
    *,
    kind: ModelKind = ModelKind.DENSE,
) -> list[Experiment]:
    """Runs of each of `count` models: two contexts, and of dense ones the other two hand-offs in
    the short one.

    A model that the device does not hold, or that has no plan, is drawn again; one of another kind
    keeps its family and format then. The first models of a seed are the same whatever `count` is.
    On several GPUs all heads and rows divide over them, and some dense models have lanes. Raises
    ConfigError or CalibrationError.
    """
    for name, value, least, most in (
        ("--shapes", count, 1, MOST_SHAPES),
        ("--seed", seed, 0, MOST_SEED),
    ):
        if not least <= value <= most:
            raise ConfigError(f"{name} {value}: from {least} to {most}")
    scope = CPU if node.device.isa == HOST else GPU
    runs: list[Experiment] = []
    generator = np.random.default_rng(seed)
    for number in range(count):
        progress(f"drawing shapes for {node.name}: {number + 1}/{count}")
        shapes = (
            spec
            for spec in _models(kind, scope, generator, seed, number, node.gpus)
            if spec is not None
        )
        failed = ""
        for _ in range(ATTEMPTS):
            spec = next(shapes)
            try:
                runs += _runs(scope, node, replace(spec, name=f"s{seed}-{number + 1:02d}"), kind)
                break
            except TwinError as error:  # too large for the device, or no plan: another one
                failed = str(error)
        else:
            said = f"{node.name}: none of {ATTEMPTS} drawn shapes runs; the last one: {failed}"
            raise CalibrationError(said)
    return runs


def _models(
    kind: ModelKind,
    scope: Scope,
    generator: np.random.Generator,
    seed: int,
    number: int,
    gpus: int,
) -> Iterator[ModelSpec | None]:
    """Endless; None for a draw without a model in the scope."""
    if kind is ModelKind.EXPERTS:
        experts = drawn_kinds.CPU if scope is CPU else drawn_kinds.GPU
        stored = dealt(STORED, seed, number)
        while True:
            yield drawn_kinds.with_experts(experts, stored, generator, gpus)
    if kind is ModelKind.FEW_BITS:
        for spec in _specs(scope, generator, gpus, ffn_grain=HEAD_GRAIN * gpus):
            yield spec and in_few_bits(spec, dealt(FORMATS, seed, number), gpus)
    laned = gpus > 1 and dealt(LANED, seed, number)
    yield from (
        _laned_specs(scope, generator, max(scope.lanes, gpus))
        if laned
        else _specs(scope, generator, gpus)
    )


def _runs(scope: Scope, node: Node, spec: ModelSpec, kind: ModelKind) -> list[Experiment]:
    prompts = dict(zip((SHORTEST, LONGEST), scope.prompts, strict=True))
    wanted = [(where, HandOffKind.SENTINEL) for where in prompts]
    if kind is ModelKind.DENSE:
        wanted += [(SHORTEST, handoff) for handoff in (HandOffKind.COUNTER, HandOffKind.GRID)]
    return [_run(scope, node, spec, where, prompts[where], handoff) for where, handoff in wanted]


def _run(
    scope: Scope, node: Node, spec: ModelSpec, where: str, prompt: int, handoff: HandOffKind
) -> Experiment:
    """Default options. Raises TwinError for a shape that the device does not hold, or whose plan
    breaks a law.
    """
    chosen = {
        "context": prompt + scope.tokens // 2,
        "max_context": prompt + scope.tokens + ROOM,
        "handoff": handoff,
        "weight_dtype": spec.dtype,
        "kv_dtype": spec.dtype,
    }
    if node.device.isa == HOST:
        chosen["blocks"] = _host_blocks(spec, node)
    options = default_options(spec, node, **chosen)
    name = f"{spec.name}-{where}" + ("" if handoff is HandOffKind.SENTINEL else f"-{handoff.value}")
    run = Experiment(name, spec, options, prompt, scope.tokens, scope.repeats)
    check_room(run.plan(node.device.name), node)
    return run


def _host_blocks(spec: ModelSpec, node: Node) -> int:
    """Of one emulated GPU: they share this computer's cores, and a lane takes a block."""
    if spec.lanes:
        return max(1, spec.lanes.count // node.gpus)
    return max(1, min(2, node.device.blocks // node.gpus))


def _specs(
    scope: Scope, generator: np.random.Generator, ranks: int = 1, *, ffn_grain: int = HEAD_GRAIN
) -> Iterator[ModelSpec | None]:
    """Endless; None for a draw without a shape in the scope."""
    while True:
        yield _spec(scope, _numbers(generator), KV_HEADS, ranks, ffn_grain)


def _laned_specs(
    scope: Scope, generator: np.random.Generator, lanes: int
) -> Iterator[ModelSpec | None]:
    """The same with lanes; each of them has KV heads of its own, as in public models."""
    kv_heads = [count for count in KV_HEADS if count % lanes == 0]
    while True:
        u = _numbers(generator)
        spec = _spec(scope, u, kv_heads, lanes, HEAD_GRAIN)
        yield spec and _with_lanes(spec, lanes, u)


def _with_lanes(spec: ModelSpec, lanes: int, u: Sequence[float]) -> ModelSpec:
    windowed = spec.layers * WINDOWED[0] // WINDOWED[1] if u[7] < 0.5 else 0
    return replace(
        spec,
        family="laneformer",
        qkv_bias=False,
        qk_norm=False,
        lanes=Lanes(lanes, one_of(DELAYS, u[10])),
        windows=(WINDOW,) * windowed + (0,) * (spec.layers - windowed),
    )


def _numbers(generator: np.random.Generator) -> Sequence[float]:
    """All numbers are drawn before any is judged, so that each shape takes as many draws."""
    return tuple(map(float, generator.uniform(size=11)))


def _spec(
    scope: Scope, u: Sequence[float], kv_heads: Sequence[int], ranks: int, ffn_grain: int
) -> ModelSpec | None:
    """Heads and rows divide over `ranks`."""
    dims, shares = zip(*scope.head_dims, strict=True)
    head_dim = dims[
        int(
            np.searchsorted(np.cumsum(shares), u[0] * sum(shares), side="right").clip(
                0, len(dims) - 1
            )
        )
    ]
    hidden = grained(log_between(*scope.hidden, u[1]), GRAIN)
    kv, group = dividing_heads(kv_heads, GROUPS, ranks, (u[2], u[3]))
    ffn = grained(hidden * log_between(*FEEDS, u[4]), ffn_grain)
    layers = round(log_between(*scope.layers, u[5]))
    vocab = grained(log_between(*scope.vocab, u[6]), HEAD_GRAIN)
    family = ("llama", "qwen2", "qwen3")[int(u[7] * 3)]
    spec = ModelSpec(
        name="",
        family=family,
        layers=layers,
        hidden=hidden,
        heads=group * kv,
        kv_heads=kv,
        head_dim=head_dim,
        ffn=ffn,
        vocab=vocab,
        context=131_072,
        norm_eps=1e-5,
        rope=Rope(500_000.0),
        windows=(0,) * layers,
        tied=bool(u[8] < 0.5),
        qkv_bias=family == "qwen2",
        qk_norm=family == "qwen3",
        dtype=DTYPES[int(u[9] * len(DTYPES))],
    )
    attended = ATTENDED[0] <= spec.heads * head_dim / hidden <= ATTENDED[1]
    return spec if attended and scope.weights[0] <= weights_of(spec) <= scope.weights[1] else None


def weights_of(spec: ModelSpec) -> int:
    """Of all matrices; an LM head that shares the embedding counts once."""
    attention = spec.hidden * spec.head_dim * (2 * spec.heads + 2 * spec.kv_heads)
    return (
        spec.layers * (attention + 3 * spec.hidden * spec.ffn)
        + (1 if spec.tied else 2) * spec.vocab * spec.hidden
    )
