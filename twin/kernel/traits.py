"""What a model's layers do, as constants for C++: the generated header has all of them for every
plan, so the kernel asks nobody whether they are there.
"""

from __future__ import annotations

from collections.abc import Sequence

from twin.errors import PlanError
from twin.kernel import experts
from twin.kernel.coded import bits_of
from twin.kernel.compressed import compressed_traits
from twin.kernel.fields import CODED_FIELDS
from twin.models.feeds import ExpertFeed, Scoring
from twin.models.formats import DECODED
from twin.models.mixers import Mamba2, Recurring
from twin.models.spec import ModelSpec
from twin.models.variant import Activation
from twin.plan.catalogue import INPUTS, StageKind
from twin.plan.types import Plan, Stage
from twin.schedule.scores import scores_of

Constant = bool | int | float | Activation
# struct -> member -> (value where the plan has nothing of the kind, what it is)
TRAITS: dict[str, dict[str, tuple[Constant, str]]] = {
    "Family": {
        "GATE": (Activation.SILU, "the function of gates, and of rows that have none"),
        "GATED": (True, "rows that feed a down projection come with those of gates"),
        "NORMS_BEFORE": (True, "what a module reads is normed"),
        "NORMS_AFTER": (False, "what a module adds to the residual is: Stage::post_norm"),
        "QK_NORMED_TOGETHER": (False, "all heads of q as one vector, and those of k"),
        "NORMS_TURNED": (False, "heads of q and k behind their rotation"),
        "ROPE_BY_LAYER": (False, "Stage::rope"),
        "EMBEDDING": (1.0, "factor of a token's embedding"),
        "SCORE": (0.0, "factor of query times key; 0: 1 / sqrt(HEAD_DIM)"),
        "SCORE_CAP": (0.0, "cap * tanh(score / cap); 0: none"),
        "LOGIT_CAP": (0.0, "the same of logits"),
        "VALUES_NORMED": (False, "each value head, without weights"),
        "LAYER_SCALAR": (False, "the residual is multiplied at the end of a layer"),
    },
    "FirstShape": {  # of heads, besides HEAD_DIM and GROUP
        "VALUES_ARE_KEYS": (False, "before norm and rotation"),
    },
    "OtherShape": {  # of the heads of a second kind of layers; where there are none, the first's
        "ANY": (False, "there are some"),
        "HEAD_DIM": (1, "elements"),
        "GROUP": (1, "query heads that share a key head"),
        "VALUES_ARE_KEYS": (False, "before norm and rotation"),
    },
    "Additions": {  # to the layers of Llama and of plain experts
        "SINKS": (False, "each head's softmax has a logit without a value"),
        "OUTPUT_BIAS": (False, "of attention"),
        "EXPERT_BIAS": (False, "of experts' rows"),
        "GAIN": (1.0, "of a gate within its sigmoid"),
        "OFFSET": (0.0, "is added to what passes the gate"),
        "LIMIT": (0.0, "clamps gates and what passes them; 0: not"),
    },
    "Experts": {
        "ANY": (False, "there are routed experts"),
        "COUNT": (1, "of a layer"),
        "TOP_K": (1, "of a token, by the router,"),
        "VISITED": (1, "and shared ones behind them, which are numbered behind the routed ones"),
        "WIDTH": (1, "columns of one's down projection"),
        "SIGMOID": (False, "scores are sigmoids of the logits,"),
        "ROOTS": (False, "or roots of their softplus, else their softmax"),
        "NORMALISED": (True, "the chosen weights sum to one,"),
        "SCALING": (1.0, "times this"),
        "CHOICE_BIASED": (False, "the choice is by scores and Stage::choice_bias"),
        "SCALED": (False, "their weights are multiplied by Stage::expert_scales"),
        "HASHED": (False, "some layers' are those that Stage::chosen says of a token"),
    },
    "Scores": {  # logits of a router that blocks multiply with rows of their own
        "ANY": (False, "there are some"),
        "SUMS": (1, "logits"),
        "PARTS": (1, "threads that share one"),
        "PAIRS": (1, "of a block's rows, of a thread in each round"),
        "ROUNDS": (1, "in which threads take all logits"),
    },
    "NonRouted": {  # what stands next to routed experts
        "SHARED": (False, "experts that every token visits,"),
        "GATED": (False, "or VISITED ones, times the sigmoid of a logit behind the router's"),
        "PARALLEL": (False, "which are a dense MLP, whose output is published and normed alone"),
        "DENSE": (False, "layers without experts"),
    },
    "Delta": {  # Gated DeltaNet, Mamba-2
        "ANY": (False, "there are recurrent states"),
        "KEY_DIM": (4, "of a head"),
        "VALUE_DIM": (4, "of a head"),
        "CONV": (2, "positions that the convolution sees"),
        "KEY_HEADS": (1, "of a rank"),
        "VALUE_HEADS": (1, "of a rank"),
        "COLUMNS": (4, "of a head's state that an item has"),
        "MAMBA": (False, "Mamba-2's rule, else the delta rule"),
        "BIASED": (False, "the convolution adds a number to each channel"),
        "NORMED": (4, "outputs that one norm is over"),
        "LEAST_STEP": (0.0, "time steps are clamped to it"),
        "MOST_STEP": (0.0, "and to this; 0: not"),
    },
    "Convolution": {  # gated, short
        "ANY": (False, "there are some"),
        "CONV": (2, "positions that one sees"),
        "CHANNELS": (1, "of a rank"),
    },
    "Hyper": {  # hyper-connections
        "ANY": (False, "there are some"),
        "RESIDUALS": (1, "that a module's input collapses from"),
        "MIXES": (1, "outputs of a layer's mixing matrix"),
        "PARTS": (1, "matrices whose sum is a mixing matrix"),
        "ROUNDS": (1, "in which columns and rows are divided by their sums"),
        "EPS": (0.0, "is added to these, and to what residuals collapse by"),
    },
    "Compressed": {  # attention over a window and compressed entries, of a rank
        "ANY": (False, "there is some"),
        "HEADS": (1, "of queries, over one of keys"),
        "HEAD_DIM": (2, "elements, keys that are values"),
        "ROPE_DIM": (2, "of them, the last ones, that are turned"),
        "GROUPS": (1, "of heads, with an output projection each"),
        "WINDOW": (1, "positions that are attended as they are"),
        "INDEX_HEADS": (1, "of queries that score entries"),
        "INDEX_DIM": (2, "elements of these"),
        "TOP_K": (1, "entries that are attended where there are scores"),
    },
    "Outgoing": {
        "GATED": (False, "each output of attention times the sigmoid of a number"),
    },
}


def traits(plan: Plan) -> dict[str, dict[str, Constant]]:
    """The value of every member of TRAITS for a plan."""
    spec, routed, found = plan.spec, plan.kernel_experts, dict[str, dict[str, Constant]]()
    for name, own in zip(("FirstShape", "OtherShape"), _shapes_of(plan), strict=False):
        found[name] = own
    if spec:
        found["Family"] = _family(spec)
        found["Outgoing"] = {"GATED": spec.output_gate and plan.attention is not None}
    if spec and routed:
        found["Additions"] = _additions(spec, routed)
        down = next(s for s in plan.stages if s.kind is StageKind.ROUTED_DOWN)
        hashed = any(getattr(spec.layer(i).feed, "hashed", False) for i in range(spec.layers))
        found["Experts"] = _experts(routed, down) | {"HASHED": hashed}
        if (made := scores_of(plan)) is not None:
            found["Scores"] = {
                "ANY": True,
                "SUMS": made.sums,
                "PARTS": made.parts,
                "PAIRS": made.pairs,
                "ROUNDS": made.rounds,
            }
        found["NonRouted"] = {
            "SHARED": any(stage.kind is StageKind.SHARED_UP for stage in plan.stages),
            "GATED": routed.shared_gate,
            "PARALLEL": routed.parallel,
            "DENSE": any(stage.kind is StageKind.DOWN for stage in plan.stages),
        }
    if spec and spec.recurrence and plan.delta_stages:
        found["Delta"] = _recurrence(plan, spec.recurrence)
    if spec and spec.convolution and plan.convolving_stages:
        found["Convolution"] = {
            "ANY": True,
            "CONV": spec.convolution.conv,
            "CHANNELS": spec.convolution.channels // plan.ranks,
        }
    found |= compressed_traits(plan)
    return {
        struct: {
            name: found.get(struct, {}).get(name, value) for name, (value, _) in members.items()
        }
        for struct, members in TRAITS.items()
    }


def _recurrence(plan: Plan, kind: Recurring) -> dict[str, Constant]:
    own: dict[str, Constant] = {
        "ANY": True,
        "KEY_DIM": kind.key_dim,
        "VALUE_DIM": kind.value_dim,
        "CONV": kind.conv,
        "KEY_HEADS": kind.key_heads // plan.ranks,
        "VALUE_HEADS": kind.value_heads // plan.ranks,
        "COLUMNS": next(stage.scan.page for stage in plan.delta_stages if stage.scan),
        "NORMED": kind.normed,
    }
    if isinstance(kind, Mamba2):
        own |= {
            "MAMBA": True,
            "BIASED": kind.conv_bias,
            "LEAST_STEP": kind.least_step,
            "MOST_STEP": kind.most_step or 0.0,
        }
    return own


def _shapes_of(plan: Plan) -> list[dict[str, Constant]]:
    """Of the plan's first heads, and of others or of the first once more."""
    several = len(plan.attentions) > 1
    both = plan.attentions if several else 2 * plan.attentions
    return [
        {
            "ANY": several,
            "HEAD_DIM": own.head_dim,
            "GROUP": own.group,
            "VALUES_ARE_KEYS": own.values_are_keys,
        }
        for own in both
    ]


def _family(spec: ModelSpec) -> dict[str, Constant]:
    variant = spec.variant
    return {
        "GATE": variant.activation,
        "GATED": spec.gated,
        "NORMS_BEFORE": variant.norms.before,
        "NORMS_AFTER": variant.norms.after,
        "QK_NORMED_TOGETHER": spec.whole_qk_norm,
        "NORMS_TURNED": variant.norms_turned,
        "ROPE_BY_LAYER": len(spec.rotations) > 1,
        "EMBEDDING": variant.embedding,
        "SCORE": variant.score or 0.0,
        "SCORE_CAP": variant.score_cap or 0.0,
        "LOGIT_CAP": variant.logit_cap or 0.0,
        "VALUES_NORMED": spec.value_norm,
        "LAYER_SCALAR": variant.layer_scalar,
    }


def _additions(spec: ModelSpec, kind: ExpertFeed) -> dict[str, Constant]:
    return {
        "SINKS": spec.sinks,
        "OUTPUT_BIAS": spec.o_bias,
        "EXPERT_BIAS": kind.bias,
        "GAIN": kind.gain,
        "OFFSET": kind.offset,
        "LIMIT": kind.limit or 0.0,
    }


def _experts(kind: ExpertFeed, down: Stage) -> dict[str, Constant]:
    assert down.matrix is not None
    assert down.routed is not None
    return {
        "ANY": True,
        "COUNT": kind.experts,
        "TOP_K": kind.top_k,
        "VISITED": down.routed.top_k,
        "WIDTH": down.matrix.cols,
        "SIGMOID": kind.scoring is Scoring.SIGMOID,
        "ROOTS": kind.scoring is Scoring.SQRT_SOFTPLUS,
        "NORMALISED": kind.renormalise,
        "SCALING": kind.scaling,
        "CHOICE_BIASED": kind.choice_bias,
        "SCALED": kind.parallel,
    }


# ---- low-bit weights -----------------------------------------------------------------------------

PLAIN_BIT = 1


def codes(plan: Plan, embedded: bool) -> dict[str, int]:
    """A bit for each code of the plan's matrices, and of those that multiply one input.

    A host's kernel has all codes, so that formats cause no compile.
    """
    by_input = {f"{name.upper()}_CODES": PLAIN_BIT for name in INPUTS}
    if not plan.coded:
        return {"CODES": PLAIN_BIT} | by_input
    if not embedded:
        return {"CODES": (2 << len(DECODED)) - 1} | by_input
    for name in INPUTS:
        multiplied = bits_of(s.matrix for s in plan.stages if s.matrix and plan.input_of(s) == name)
        by_input[f"{name.upper()}_CODES"] = multiplied or PLAIN_BIT
    return {"CODES": bits_of(m for s in plan.stages for m in s.matrices)} | by_input


SHAPES = {"RoutedUp": StageKind.ROUTED_UP, "RoutedDown": StageKind.ROUTED_DOWN}
SHAPE_FIELDS = (
    *("kind", "cols", "tile_rows", "tile_cols"),
    *CODED_FIELDS,
    *("expert_units", "expert_rows", "expert_cols", *experts.CODED_FIELDS),
)


def shapes(
    plan: Plan, rows: Sequence[Sequence[int | float]], fields: Sequence[str]
) -> dict[str, dict[str, int]]:
    """By struct: the fields of the routed stages with low-bit weights, which are those of all
    layers; zeros in other plans. `rows`: the table of stages. Raises PlanError where layers differ.
    """
    if not plan.coded or not plan.kernel_routed:
        return {name: dict.fromkeys(SHAPE_FIELDS, 0) for name in SHAPES}
    made: dict[str, dict[str, int]] = {}
    for name, kind in SHAPES.items():
        found = {
            tuple(int(rows[stage.index][fields.index(field)]) for field in SHAPE_FIELDS)
            for stage in plan.stages
            if stage.kind is kind
        }
        if len(found) > 1:
            raise PlanError(
                f"{plan.name}: {kind.value} differs between layers; an NVIDIA block's loaders know "
                "one shape: use one stored format for all experts"
            )
        made[name] = dict(zip(SHAPE_FIELDS, found.pop(), strict=True))
    return made
