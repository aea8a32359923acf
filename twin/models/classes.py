"""Which classes of transformers a family's configurations may name (`architectures`, `auto_map`).

Another class means another model in the same words: a draft (LlamaForCausalLMEagle3), a classifier,
a reward or embedding model.
"""

from __future__ import annotations

from collections.abc import Iterator

from twin.errors import ConfigError
from twin.models.config import Config
from twin.text import shown

CLASSES: dict[str, tuple[str, ...]] = {  # by model_type
    "llama": ("LlamaForCausalLM", "LLaMAForCausalLM"),
    "mistral": ("MistralForCausalLM",),
    "qwen2": ("Qwen2ForCausalLM",),
    "qwen3": ("Qwen3ForCausalLM",),
    # laneformer, laneformer_tp: the class is not published
    "phi3": ("Phi3ForCausalLM",),
    "granite": ("GraniteForCausalLM",),
    "smollm3": ("SmolLM3ForCausalLM",),
    "internlm3": ("InternLM3ForCausalLM", "LlamaForCausalLM"),  # Llama by other names
    "olmo2": ("Olmo2ForCausalLM",),
    "olmo3": ("Olmo3ForCausalLM",),
    "seed_oss": ("SeedOssForCausalLM",),
    "exaone4": ("Exaone4ForCausalLM",),
    "ernie4_5": ("Ernie4_5ForCausalLM", "Ernie4_5_ForCausalLM"),
    "ernie4_5_moe": ("Ernie4_5_MoeForCausalLM",),
    "hunyuan_v1_dense": ("HunYuanDenseV1ForCausalLM",),
    "hunyuan_v1_moe": ("HunYuanMoEV1ForCausalLM",),
    "granitemoehybrid": ("GraniteMoeHybridForCausalLM",),
    "lfm2": ("Lfm2ForCausalLM",),
    "lfm2_moe": ("Lfm2MoeForCausalLM",),
    "gemma": ("GemmaForCausalLM",),
    "gemma2": ("Gemma2ForCausalLM",),
    "gemma3_text": ("Gemma3ForCausalLM",),
    "gemma3": ("Gemma3ForConditionalGeneration",),
    "mixtral": ("MixtralForCausalLM",),
    "qwen2_moe": ("Qwen2MoeForCausalLM",),
    "qwen3_moe": ("Qwen3MoeForCausalLM",),
    "qwen3_next": ("Qwen3NextForCausalLM",),
    "qwen3_5": ("Qwen3_5ForConditionalGeneration",),
    "qwen3_5_text": ("Qwen3_5ForCausalLM",),
    "qwen3_5_moe": ("Qwen3_5MoeForConditionalGeneration",),
    "qwen3_5_moe_text": ("Qwen3_5MoeForCausalLM",),
    "glm4_moe": ("Glm4MoeForCausalLM",),
    "minimax_m2": ("MiniMaxM2ForCausalLM",),
    "nemotron_h": ("NemotronHForCausalLM",),
    "gpt_oss": ("GptOssForCausalLM",),
    "deepseek_v3": ("DeepseekV3ForCausalLM",),
    "kimi_k2": ("DeepseekV3ForCausalLM", "KimiK2ForCausalLM"),
    "kimi_k25": ("KimiK25ForConditionalGeneration",),
    "deepseek_v4": ("DeepseekV4ForCausalLM",),
    "gemma4": ("Gemma4ForConditionalGeneration",),
    "gemma4_text": ("Gemma4ForCausalLM",),
}
_CAUSAL = "ForCausalLM"


def check_classes(config: Config, kind: str) -> None:
    """Raises ConfigError for a class that the family of this model_type does not have."""
    for key, name in _named(config):
        known = CLASSES.get(kind, (name,) if name.endswith(_CAUSAL) else ())
        if name not in known:
            raise ConfigError(
                f"{config.name}: {key} names the class {shown(name)}; allowed for model_type "
                f"{kind}: {', '.join(known) or '*' + _CAUSAL}; another class is another model (a "
                "draft, a classifier, an embedding), which is not described"
            )


def _named(config: Config) -> Iterator[tuple[str, str]]:
    """The classes that compute the next token; without any, the class of the bare model."""
    named = [("architectures", name) for name in config.texts("architectures")]
    remote = config.part("auto_map")
    if remote is not None:
        causal, bare = (remote.get(key) for key in ("AutoModelForCausalLM", "AutoModel"))
        path = causal or (None if named else bare)
        if isinstance(path, str):
            named.append(("auto_map", path.rpartition(".")[2]))
        remote.unused(*remote)
    yield from named
