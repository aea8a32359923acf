"""Small models of families that norm, scale and cap otherwise than Llama."""

from __future__ import annotations

from dataclasses import replace

from tests.engine.small_engine import LLAMA
from twin.models.spec import Rope
from twin.models.variant import Activation, Norms, Variant

NEAR = Rope(50.0)
TOGETHER = replace(
    LLAMA,
    name="together",
    qk_norm=True,
    variant=Variant(norms=Norms.AFTER, whole_qk_norm=True),
    ropes=(),
)
AROUND = replace(
    LLAMA,
    name="around",
    qk_norm=True,
    ropes=(LLAMA.rope, NEAR, None),
    variant=Variant(
        activation=Activation.GELU,
        norms=Norms.AROUND,
        embedding=3.0,
        residual=0.5,
        score=0.2,
        logit=0.25,
        score_cap=1.5,
        logit_cap=2.5,
    ),
)
FACTORS = replace(
    LLAMA,
    name="factors",
    rope=Rope(10000.0, rotated=6),
    variant=Variant(embedding=12.0, residual=0.22, score=0.3, logit=0.5),
)
TURNED = replace(LLAMA, name="turned", qk_norm=True, variant=Variant(norms_turned=True))
