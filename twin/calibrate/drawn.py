"""Models that a seed draws, to be predicted before they run: nobody can tune to them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from twin.calibrate import drawn_kinds
from twin.calibrate.drawn_kinds import FORMATS, STORED, dealt, grained, in_few_bits, log_between
from twin.calibrate.heldout import HeldOut
from twin.errors import CalibrationError, ConfigError, TwinError
from twin.hardware.types import HOST, Node
from twin.kernel.defaults import default_options
from twin.kernel.room import check_room
from twin.models.kind import ModelKind
from twin.models.spec import DType, ModelSpec, Rope
from twin.plan.types import HandOffKind

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


GPU = Scope(
    weights=(0.3e9, 14e9),
    hidden=(640, 5120),
    layers=(8, 60),
    vocab=(32_000, 152_064),
    head_dims=((64, 0.35), (128, 0.5), (96, 0.05), (256, 0.1)),
    prompts=(48, 1500),
    tokens=96,
    repeats=2,
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
)


def drawn_runs(
    node: Node,
    count: int,
    seed: int,
    progress: Callable[[str], None] = lambda _: None,
    *,
    kind: ModelKind = ModelKind.DENSE,
) -> list[HeldOut]:
    """Runs of each of `count` models: two contexts, and of dense ones the other two hand-offs in
    the short one.

    A model that the device does not hold, or that has no plan, is drawn again; one of another kind
    keeps its family and format then. The first models of a seed are the same whatever `count` is.
    Raises ConfigError or CalibrationError.
    """
    for name, value, least, most in (
        ("--shapes", count, 1, MOST_SHAPES),
        ("--seed", seed, 0, MOST_SEED),
    ):
        if not least <= value <= most:
            raise ConfigError(f"{name} {value}: from {least} to {most}")
    scope = CPU if node.device.isa == HOST else GPU
    runs: list[HeldOut] = []
    generator = np.random.default_rng(seed)
    for number in range(count):
        progress(f"drawing shapes for {node.name}: {number + 1}/{count}")
        shapes = (
            spec for spec in _models(kind, scope, generator, seed, number) if spec is not None
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
    kind: ModelKind, scope: Scope, generator: np.random.Generator, seed: int, number: int
) -> Iterator[ModelSpec | None]:
    """Endless; None for a draw without a model in the scope."""
    if kind is ModelKind.EXPERTS:
        experts = drawn_kinds.CPU if scope is CPU else drawn_kinds.GPU
        stored = dealt(STORED, seed, number)
        while True:
            yield drawn_kinds.with_experts(experts, stored, generator)
    for spec in _specs(scope, generator):
        if spec is not None and kind is ModelKind.FEW_BITS:
            yield in_few_bits(spec, dealt(FORMATS, seed, number))
        else:
            yield spec


def _runs(scope: Scope, node: Node, spec: ModelSpec, kind: ModelKind) -> list[HeldOut]:
    prompts = dict(zip((SHORTEST, LONGEST), scope.prompts, strict=True))
    wanted = [(where, HandOffKind.SENTINEL) for where in prompts]
    if kind is ModelKind.DENSE:
        wanted += [(SHORTEST, handoff) for handoff in (HandOffKind.COUNTER, HandOffKind.GRID)]
    return [_run(scope, node, spec, where, prompts[where], handoff) for where, handoff in wanted]


def _run(
    scope: Scope, node: Node, spec: ModelSpec, where: str, prompt: int, handoff: HandOffKind
) -> HeldOut:
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
        chosen["blocks"] = min(2, node.device.blocks)
    options = default_options(spec, node, **chosen)
    name = f"{spec.name}-{where}" + ("" if handoff is HandOffKind.SENTINEL else f"-{handoff.value}")
    run = HeldOut(name, spec, options, prompt, scope.tokens, scope.repeats)
    check_room(run.plan(node.device.name), node)
    return run


def _specs(scope: Scope, generator: np.random.Generator) -> Iterator[ModelSpec | None]:
    """Endless; None for a draw without a shape in the scope."""
    while True:
        yield _spec(scope, generator)


def _spec(scope: Scope, generator: np.random.Generator) -> ModelSpec | None:
    """All numbers are drawn before any is judged, so that each shape takes as many draws."""
    u = generator.uniform(size=11)
    dims, shares = zip(*scope.head_dims, strict=True)
    head_dim = dims[
        int(
            np.searchsorted(np.cumsum(shares), u[0] * sum(shares), side="right").clip(
                0, len(dims) - 1
            )
        )
    ]
    hidden = grained(log_between(*scope.hidden, u[1]), GRAIN)
    group, kv_heads = GROUPS[int(u[2] * len(GROUPS))], KV_HEADS[int(u[3] * len(KV_HEADS))]
    ffn = grained(hidden * log_between(*FEEDS, u[4]), HEAD_GRAIN)
    layers = round(log_between(*scope.layers, u[5]))
    vocab = grained(log_between(*scope.vocab, u[6]), HEAD_GRAIN)
    family = ("llama", "qwen2", "qwen3")[int(u[7] * 3)]
    spec = ModelSpec(
        name="",
        family=family,
        layers=layers,
        hidden=hidden,
        heads=group * kv_heads,
        kv_heads=kv_heads,
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
