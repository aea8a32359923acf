"""Engine runs that no number is fitted to: other shapes, block counts and mixtures than any
probe.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from twin.hardware.load import load_node
from twin.kernel.defaults import limits_of
from twin.models.spec import DType, Lanes, ModelSpec, Rope
from twin.plan.types import CollectiveKind, Execution, HandOffKind, Options, Plan
from twin.proof.prove import prove
from twin.schedule.plans import build

TOKENS = 48  # decoded and timed per repeat
REPEATS = 5


@dataclass(frozen=True, slots=True)
class HeldOut:
    """One engine run: random weights of a model's shape, decoded greedily after a prompt."""

    name: str
    spec: ModelSpec
    options: Options
    prompt: int  # positions
    tokens: int = TOKENS
    repeats: int = REPEATS
    traced: bool = False  # once more, with the time of each stage

    def plan(self, device: str) -> Plan:
        """Planned for `device` and proven."""
        plan = build(self.spec, self.options, limits_of(load_node(f"{self.options.gpus}x{device}")))
        prove(plan)
        return plan


def _spec(
    name: str,
    *,
    hidden: int,
    layers: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    ffn: int,
    vocab: int,
) -> ModelSpec:
    return ModelSpec(
        name=name,
        family="llama",
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=ffn,
        vocab=vocab,
        context=4096,
        norm_eps=1e-5,
        rope=Rope(10000.0),
        windows=(0,) * layers,
    )


# 9 M weights: in cache
TINY = _spec("tiny", hidden=384, layers=4, heads=6, kv_heads=2, head_dim=64, ffn=1024, vocab=4096)
# 44 M
SMALL = _spec(
    "small", hidden=768, layers=6, heads=12, kv_heads=4, head_dim=64, ffn=2048, vocab=8192
)
# 158 M: from memory
MEDIUM = _spec(
    "medium", hidden=1024, layers=12, heads=16, kv_heads=8, head_dim=64, ffn=2816, vocab=16384
)
# 85 M, many hand-offs
DEEP = _spec("deep", hidden=512, layers=24, heads=8, kv_heads=8, head_dim=64, ffn=1536, vocab=4096)
QWEN = replace(SMALL, name="qwen", family="qwen3", qk_norm=True, head_dim=128, heads=8, kv_heads=2)
LANES = replace(
    DEEP,
    name="lanes",
    family="laneformer",
    layers=12,
    lanes=Lanes(4, 2),
    windows=(128,) * 8 + (0,) * 4,
)


def host_held_out() -> list[HeldOut]:
    """The runs of `twin validate host`; block counts 3 and 4 appear in no probe.

    At most two blocks share a core of the smallest computer (two cores): with four the twin was
    seen 48 % too fast, because blocks that poll in turn cost each other more than
    `sharing.switch_s` says.
    """

    def run(name: str, spec: ModelSpec, prompt: int = 16, **options: object) -> HeldOut:
        chosen = replace(Options(max_context=2048), context=prompt + TOKENS // 2, **options)  # type: ignore[arg-type]
        return HeldOut(name, spec, chosen, prompt)

    return [
        run("tiny-bf16-b2", TINY, blocks=2),
        run("tiny-fp16-b3", TINY, blocks=3, weight_dtype=DType.FP16, kv_dtype=DType.FP16),
        run("small-fp32-b3", SMALL, blocks=3, weight_dtype=DType.FP32, kv_dtype=DType.FP32),
        run("small-fp16-b1", SMALL, blocks=1, weight_dtype=DType.FP16, kv_dtype=DType.FP16),
        run("small-bf16-b3", SMALL, blocks=3),
        run("small-bf16-b4", SMALL, blocks=4),
        run("medium-bf16-b2", MEDIUM, blocks=2),
        run("medium-fp16-b3", MEDIUM, blocks=3, weight_dtype=DType.FP16, kv_dtype=DType.FP16),
        run("medium-bf16-b4-counter", MEDIUM, blocks=4, handoff=HandOffKind.COUNTER),
        run("deep-bf16-b3", DEEP, blocks=3),
        run("deep-bf16-b2-graph", DEEP, blocks=2, execution=Execution.GRAPH),
        run("qwen-bf16-b4-grid", QWEN, blocks=4, handoff=HandOffKind.GRID),
        run("medium-bf16-b2-long", MEDIUM, prompt=1200, blocks=2),
        run("small-bf16-2gpus-b1", SMALL, blocks=1, gpus=2, collective=CollectiveKind.PUSH),
        run("lanes-bf16-2gpus-b2", LANES, blocks=2, gpus=2, collective=CollectiveKind.PUSH),
    ]
