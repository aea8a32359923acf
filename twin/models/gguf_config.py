"""What a GGUF file says of its model, as the Hugging Face configuration that means the same.

Keys: the format's description in the ggml repository (docs/gguf.md). What a file leaves out is what
llama.cpp puts there, each with its reason below.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from twin.errors import ConfigError
from twin.frozen import frozen
from twin.models.bounds import FIELDS, quantity
from twin.models.codes.gguf import common_format
from twin.models.formats import GGUF, MIXED, Format, Formats, Role, format_named
from twin.models.gguf_file import KINDS, GgufFile
from twin.models.spec import DType, ModelSpec, Rope, RopeScaling
from twin.text import shown

STORED_AS = {form.name: form for form in (*GGUF, *MIXED)}
ARCHITECTURE = "general.architecture"
EMBEDDING, HEAD = "token_embd.weight", "output.weight"
FREQUENCIES = "rope_freqs.weight"  # what each pair's frequency is divided by
SHORT, LONG = "rope_factors_short.weight", "rope_factors_long.weight"  # the same, of LongRoPE
_WIDE_RANGE = ("BF16", "MXFP4")  # exponents beyond those of FP16
_GEMMA2_27B, _GEMMA3_27B = 46, 62  # layers; llama.cpp distinguishes by them, too
_ADVICE = "convert the model again with llama.cpp's convert_hf_to_gguf.py"

Fields = dict[str, object]


@frozen
class Architecture:
    """How files of a `general.architecture` differ from the Hugging Face family `model_type`."""

    model_type: str
    extra: Callable[[Keys], Fields] = lambda keys: {}  # fields that only this family has
    permuted: bool = False  # rows of q and k lie pair by pair, as llama.cpp turns them
    norms_with_one: bool = False  # norms hold what they multiply with, not what is added to one
    partial: bool = False  # heads may be turned in part
    windows: bool = False  # attention may slide


@frozen
class Keys:
    """The values of a file, those of its architecture without its name before them."""

    file: GgufFile

    @property
    def name(self) -> str:
        return self.file.path.stem

    @property
    def architecture(self) -> str:
        value = self.file.metadata.get(ARCHITECTURE)
        if not isinstance(value, str):
            raise self.refuse(ARCHITECTURE, value, "the name of an architecture")
        return value

    def refuse(self, key: str, value: object, allowed: str, advice: str = _ADVICE) -> ConfigError:
        return ConfigError(
            f"{shown(self.file.path)}: {key} is {shown(value)}; allowed: {allowed}; {advice}"
        )

    def get(self, key: str) -> Any:
        return self.file.metadata.get(f"{self.architecture}.{key}")

    def need(self, key: str) -> int | float:
        value = self.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            full = f"{shown(self.architecture)[1:-1]}.{key}"
            raise self.refuse(full, value, "a number, the same in every layer")
        return value

    def given(self, **fields: str) -> Fields:
        """Fields of a configuration from keys, without those that the file does not have."""
        return {field: self.need(key) for field, key in fields.items() if self.get(key) is not None}


# ---- what only one family says ---------------------------------------------------------------


def _gemma(keys: Keys) -> Fields:
    # The embeddings' factor is rounded to the configuration's type. llama.cpp does not round it.
    return {"dtype": "float32"}


def _gemma2(keys: Keys) -> Fields:
    fields = keys.given(
        attn_logit_softcapping="attn_logit_softcapping",
        final_logit_softcapping="final_logit_softcapping",
        sliding_window="attention.sliding_window",
    )
    return _gemma(keys) | fields | {"query_pre_attn_scalar": _scalar(keys, _GEMMA2_27B)}


def _gemma3(keys: Keys) -> Fields:
    fields = keys.given(
        final_logit_softcapping="final_logit_softcapping",
        sliding_window="attention.sliding_window",
        rope_local_base_freq="rope.freq_base_swa",
    )
    every = keys.get("attention.sliding_window_pattern")
    if isinstance(every, int) and not isinstance(every, bool):
        fields["sliding_window_pattern"] = every
    elif every is not None:
        raise keys.refuse("attention.sliding_window_pattern", every, "a whole number")
    return _gemma(keys) | fields | {"query_pre_attn_scalar": _scalar(keys, _GEMMA3_27B)}


def _scalar(keys: Keys, large: int) -> float:
    """Files do not hold query_pre_attn_scalar: it is a head's size but for the models of 27B."""
    if keys.need("block_count") != large:
        return keys.need("attention.key_length")
    return keys.need("embedding_length") / keys.need("attention.head_count")


def _granite(keys: Keys) -> Fields:
    return {
        "embedding_multiplier": keys.need("embedding_scale"),
        "residual_multiplier": keys.need("residual_scale"),
        "attention_multiplier": keys.need("attention.scale"),
        "logits_scaling": keys.need("logit_scale"),
    }


def _phi3(keys: Keys) -> Fields:
    fields = keys.given(sliding_window="attention.sliding_window")
    if not fields.get("sliding_window"):  # 0 stands for none
        fields = {"sliding_window": None}
    if keys.get("rope.dimension_count") is not None and (size := _head_size(keys)):
        fields["partial_rotary_factor"] = keys.need("rope.dimension_count") / size
    return fields


ARCHITECTURES = {
    "llama": Architecture("llama", permuted=True),  # Mistral, Falcon 3, SmolLM 2, InternLM 3, too
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
    "gemma": Architecture("gemma", _gemma, norms_with_one=True),
    "gemma2": Architecture("gemma2", _gemma2, norms_with_one=True, windows=True),
    "gemma3": Architecture("gemma3_text", _gemma3, norms_with_one=True, windows=True),
    "phi3": Architecture("phi3", _phi3, partial=True, windows=True),
    "granite": Architecture("granite", _granite, permuted=True),
    "smollm3": Architecture("smollm3", permuted=True),
    "olmo2": Architecture("olmo2"),
}


# ---- a configuration -------------------------------------------------------------------------


def architecture_of(file: GgufFile) -> Architecture:
    """Raises ConfigError for one that the engine does not run."""
    keys = Keys(file)
    found = ARCHITECTURES.get(keys.architecture)
    if found is None:
        known = ", ".join(ARCHITECTURES)
        advice = "use another file, or predict its speed by name (`twin models`)"
        raise keys.refuse(ARCHITECTURE, keys.architecture, known, advice)
    return found


def config_of(file: GgufFile) -> Mapping[str, object]:
    """The Hugging Face configuration of a file's model. Raises ConfigError."""
    keys, own = Keys(file), architecture_of(file)
    _refuse_others(keys, own)
    if EMBEDDING not in file.tensors:
        raise ConfigError(f"{shown(file.path)}: has no {EMBEDDING}: no language model; {_ADVICE}")
    fields: Fields = {
        "model_type": own.model_type,
        "num_hidden_layers": keys.need("block_count"),
        "hidden_size": keys.need("embedding_length"),
        "intermediate_size": keys.need("feed_forward_length"),
        "num_attention_heads": keys.need("attention.head_count"),
        "rms_norm_eps": keys.need("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": keys.need("context_length"),
        "vocab_size": file.tensors[EMBEDDING].shape[0],
        "tie_word_embeddings": HEAD not in file.tensors,
        "rope_theta": keys.need("rope.freq_base") if keys.get("rope.freq_base") else 10000.0,
    }
    fields |= keys.given(num_key_value_heads="attention.head_count_kv")
    if keys.get("attention.key_length") is not None:
        fields["head_dim"] = keys.need("attention.key_length")
    return fields | _scaling(keys) | own.extra(keys)


def weight_type(file: GgufFile) -> DType:
    """The type that a file's weights are turned into: 16 bits that hold their range. FP32 alone
    stays.

    FP16 holds a dequantised weight eight times as finely as BF16.
    """
    kinds = {KINDS[t.kind][0] for t in file.tensors.values() if len(t.shape) > 1}
    if kinds <= {"F32"}:
        return DType.FP32
    return DType.BF16 if kinds & set(_WIDE_RANGE) else DType.FP16


# what a layer's matrices are called, those first that hold several of ours; one line for each that
# a stage multiplies as one
_MATRICES = (
    (("q", ("attn_qkv", "attn_q")), ("k", ("attn_qkv", "attn_k")), ("v", ("attn_qkv", "attn_v"))),
    (("o", ("attn_output",)),),
    (("gate", ("ffn_gate", "ffn_up")), ("up", ("ffn_up",))),
    (("down", ("ffn_down",)),),
)


def kept(spec: ModelSpec, file: GgufFile) -> Formats | None:
    """How a CPU's engine streams a file's matrices: as they are stored, where it multiplies their
    types; None where it does of none. Those that a stage multiplies as one have one format.
    """
    plain = format_named(spec.dtype.value)

    def of(names: Iterable[str]) -> Format | None:
        found = [file.tensors[name] for name in names if name in file.tensors]
        return common_format(KINDS[tensor.kind][0].lower() for tensor in found)

    layers = []
    for layer in range(spec.layers):
        own: list[tuple[str, Format]] = []
        for stage in _MATRICES:
            names = {
                leaf: next(
                    (n for n in (f"blk.{layer}.{t}.weight" for t in leaves) if n in file.tensors),
                    "",
                )
                for leaf, leaves in stage
            }
            form = of(names.values())
            own += [(leaf, STORED_AS[form.name]) for leaf in names if form is not None]
        layers.append(tuple(own))
    head = of([HEAD if HEAD in file.tensors else EMBEDDING])
    if head is None and not any(layers):
        return None
    chosen = ((Role.HEAD, STORED_AS[head.name]),) if head else ()
    return Formats(plain, chosen, tuple(layers))


def completed(spec: ModelSpec, file: GgufFile) -> ModelSpec:
    """The model with what a configuration cannot say: the factors of its frequencies, its type, its
    matrices' formats.
    """
    spec = _with_factors(spec, file)
    return replace(spec, stored=kept(spec, file))


def _with_factors(spec: ModelSpec, file: GgufFile) -> ModelSpec:
    keys = Keys(file)
    frequencies, short, long = (file.floats(name) for name in (FREQUENCIES, SHORT, LONG))
    if short and long:
        scaling = _long(keys, spec, short, long)
    elif frequencies:
        scaling = RopeScaling("longrope", 1.0, short=frequencies, long=frequencies)
    else:
        return replace(spec, dtype=weight_type(file))
    for factors in (scaling.short, scaling.long):
        _check_factors(keys, factors, (spec.rope.rotated or spec.head_dim) // 2)
    rope = replace(spec.rope, scaling=scaling)
    ropes: tuple[Rope | None, ...] = tuple(rope if own == spec.rope else own for own in spec.ropes)
    return replace(spec, rope=rope, ropes=ropes, dtype=weight_type(file))


def factors_read(file: GgufFile) -> set[str]:
    """The tensors that `completed` reads."""
    if SHORT in file.tensors and LONG in file.tensors:
        return {SHORT, LONG}
    return {FREQUENCIES} & file.tensors.keys()


def _long(
    keys: Keys, spec: ModelSpec, short: tuple[float, ...], long: tuple[float, ...]
) -> RopeScaling:
    context = keys.need("rope.scaling.original_context_length")
    if (
        not isinstance(context, int)
        or not 2 <= context <= FIELDS["max_position_embeddings"].highest
    ):
        raise keys.refuse("rope.scaling.original_context_length", context, "at least 2")
    reach = spec.context / context
    grown = math.sqrt(1 + math.log(reach) / math.log(context)) if reach > 1 else 1.0
    factor = keys.given(factor="rope.scaling.attn_factor").get("factor", grown)
    assert isinstance(factor, int | float)
    if not FIELDS["attention_factor"].holds(factor):
        raise keys.refuse("rope.scaling.attn_factor", factor, FIELDS["attention_factor"].reason)
    return RopeScaling("longrope", float(factor), original_context=context, short=short, long=long)


def _check_factors(keys: Keys, factors: tuple[float, ...], pairs: int) -> None:
    limits = FIELDS["long_factor"]
    if len(factors) != pairs or not all(limits.holds(factor) for factor in factors):
        reach = f"from {quantity(limits.lowest)} to {quantity(limits.highest)}"
        allowed = f"{pairs} numbers {reach}, one for each pair of a head's elements"
        raise keys.refuse("the factors of rope frequencies", factors, allowed)


def _head_size(keys: Keys) -> float:
    """Elements of a head; 0 where the file contradicts itself, as its configuration says."""
    if keys.get("attention.key_length") is not None:
        return keys.need("attention.key_length")
    heads = keys.need("attention.head_count")
    return keys.need("embedding_length") / heads if heads else 0


def _scaling(keys: Keys) -> Fields:
    kind = keys.get("rope.scaling.type")
    factor = keys.get("rope.scaling.factor")
    if kind in (None, "none") or SHORT in keys.file.tensors or FREQUENCIES in keys.file.tensors:
        return {}
    if kind != "linear":
        raise keys.refuse("rope.scaling.type", kind, "none, linear, or longrope with its factors")
    return {"rope_scaling": {"rope_type": "linear", "factor": factor}} if factor else {}


def _refuse_others(keys: Keys, own: Architecture) -> None:
    """What would be computed otherwise than this file's model means."""
    if keys.get("expert_count"):
        advice = "the engine runs dense models; predict it by name (`twin models`)"
        raise keys.refuse("expert_count", keys.get("expert_count"), "none", advice)
    window = keys.get("attention.sliding_window")
    if window and not own.windows:
        raise keys.refuse("attention.sliding_window", window, "none in this architecture")
    key, value = keys.get("attention.key_length"), keys.get("attention.value_length")
    if value is not None and key is not None and key != value:
        raise keys.refuse("attention.value_length", value, f"attention.key_length, {shown(key)}")
    turned, size = keys.get("rope.dimension_count"), _head_size(keys)
    if turned is not None and turned != size and not own.partial:
        raise keys.refuse("rope.dimension_count", turned, f"a whole head, {size:g}")
