"""Keys of a configuration that no family reads: those known to change nothing that is computed or
counted, and the values at which others change nothing. Every other key is refused by its name.

A key that a family reads is never looked up here. So a key stands here only if no family could
mean something else by it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from twin.errors import ConfigError
from twin.models.config import Config, spelt
from twin.text import shown

IRRELEVANT: dict[str, tuple[str, ...]] = {  # by the reason why nothing computed depends on them
    "says who wrote the file and with what": (
        *("_name_or_path", "name_or_path", "_commit_hash", "_from_model_config", "_class_name"),
        *("transformers_version", "transformers.js_config", "unsloth_version", "unsloth_fixed"),
        *("model_name", "license", "language", "base_model", "base_model_name_or_path"),
        *("task_specific_params", "finetuning_task", "custom_pipelines", "_unsloth_template"),
        *("axolotl_version", "mergekit_version", "trl_version", "quantized_by", "creator"),
        *("_diffusers_version", "is_llama_config"),
    ),
    "chooses how something is computed, not what": (
        *("_attn_implementation", "_attn_implementation_autoset", "_attn_implementation_internal"),
        *("attn_implementation", "attention_implementation", "_experts_implementation"),
        *("use_flash_attn", "use_flash_attention", "use_flash_attention_2", "use_sdpa"),
        *("flash_attn", "_flash_attn_2_enabled", "use_cache", "torchscript", "use_bfloat16"),
        *("use_fused_rms_norm", "use_fused_rope", "use_fused_swiglu", "use_fused_mlp"),
        *("fused_ops", "use_kernels", "cache_implementation", "gradient_checkpointing"),
        *("output_attentions", "output_hidden_states", "output_router_logits", "return_dict"),
        *("output_past", "keys_to_ignore_at_inference", "ep_size", "tp_size", "tensor_parallel"),
        *("sequence_parallel", "chunk_size_feed_forward", "_tensor_parallel", "fsdp"),
        *("max_sequence_length", "seq_length", "use_mem_eff_attention", "use_liger_kernel"),
        "pretraining_tp",  # the order of summation
    ),
    "is of training alone": (
        *("attention_dropout", "attn_dropout", "attn_pdrop", "attention_probs_dropout_prob"),
        *("hidden_dropout", "hidden_dropout_prob", "resid_pdrop", "residual_dropout"),
        *("embd_pdrop", "embedding_dropout", "dropout", "ffn_dropout", "mlp_dropout"),
        *("residual_dropout_prob", "drop_path_rate", "layerdrop", "expert_dropout"),
        *("initializer_range", "initializer_factor", "init_std", "init_method", "init_device"),
        *("initialization_type", "hidden_init_std", "init_cutoff_factor", "initialization"),
        *("router_aux_loss_coef", "aux_loss_alpha", "seq_aux", "router_z_loss_coef"),
        *("router_jitter_noise", "input_jitter_noise", "jitter_eps", "load_balancing_loss_coef"),
        *("z_loss_coefficient", "label_smoothing", "loss_type", "num_token_loss", "train_seq_len"),
        *("max_seq_len_train", "pretraining_seq_len", "lora_alpha", "neftune_noise_alpha"),
        *("classifier_dropout", "summary_activation", "summary_first_dropout", "summary_type"),
        *("summary_proj_to_labels", "summary_use_proj", "router_bias_update_speed"),
    ),
    "names tokens, or how text becomes them": (
        *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "unk_token_id"),
        *("cls_token_id", "mask_token_id", "bos_token", "eos_token", "pad_token", "unk_token"),
        *("decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id"),
        *("bos_token_index", "eos_token_index", "pad_token_index", "ignore_index", "ignore_id"),
        *("tokenizer_class", "tokenizer_name", "chat_template", "prefix", "suppress_tokens"),
        *("begin_suppress_tokens", "bad_words_ids", "add_bos_token", "add_eos_token"),
        *("tokenizer_model_max_length", "model_max_length", "tokenizer_padding_side"),
        *("tokenizer_vocab_size", "special_tokens", "im_start_token_id", "im_end_token_id"),
        "tokenizer_type",
    ),
    "is a default of generating text": (
        *("max_length", "min_length", "max_new_tokens", "min_new_tokens", "do_sample"),
        *("early_stopping", "num_beams", "num_beam_groups", "diversity_penalty", "temperature"),
        *("top_k", "top_p", "typical_p", "min_p", "repetition_penalty", "length_penalty"),
        *("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "num_return_sequences"),
        *("output_scores", "return_dict_in_generate", "remove_invalid_values"),
        *("exponential_decay_length_penalty", "generation_config"),
        *("penalty_alpha", "assistant_early_exit"),
    ),
    "is of classifiers, which are refused by their class": (
        *("id2label", "label2id", "num_labels", "problem_type", "label_names"),
    ),
    "is of other towers than the text model, and of their tokens": (
        *("vision_config", "audio_config", "image_token_id", "image_token_index", "image_size"),
        *("video_token_id", "video_token_index", "audio_token_id", "audio_token_index"),
        *("boi_token_id", "boi_token_index", "eoi_token_id", "eoi_token_index", "boa_token_id"),
        *("eoa_token_id", "eoa_token_index", "boa_token_index", "vision_start_token_id"),
        *("vision_end_token_id", "vision_token_id", "media_placeholder_token_id", "vision_path"),
        *("mm_tokens_per_image", "vision_soft_tokens_per_image", "projection_hidden_size"),
        *("audio_soft_tokens_per_image", "projection_layer_norm_eps", "projector_hidden_act"),
        *("mm_projector_type", "multimodal_projector_bias", "vision_feature_layer", "eov_token_id"),
        *("vision_feature_select_strategy", "video_placeholder", "use_unified_vision_chunk"),
        *("spatial_merge_size", "media_token_id", "bov_token_id"),
    ),
}
# keys that change what is computed at every other value
NEUTRAL: dict[str, Callable[[object], bool]] = {}


def _neutral(values: Iterable[object], *keys: str) -> None:
    allowed = tuple(values)

    def known(value: object) -> bool:
        return any(type(value) is type(one) and value == one for one in allowed)

    NEUTRAL.update(dict.fromkeys(keys, known))


_neutral(
    (False,),
    *("attention_bias", "mlp_bias", "qkv_bias", "bias", "use_bias", "o_bias", "lm_head_bias"),
    *("attention_out_bias", "head_bias", "add_bias_linear", "add_qkv_bias", "use_qkv_bias"),
    *("use_qk_norm", "qk_norm", "qk_layernorm", "use_sliding_window", "alibi", "use_alibi"),
    *("parallel_attn", "use_parallel_residual", "scale_embeddings", "scale_attn_weights"),
    *("is_encoder_decoder", "is_decoder", "add_cross_attention", "tie_encoder_decoder"),
    *("tf_legacy_loss", "use_mamba_kernels", "use_mrope", "logn_attn", "use_logn_attn"),
    *("use_dynamic_ntk", "use_lora", "use_dora", "cross_attention", "layer_scale", "use_medusa"),
    *("attention_output_gate", "attn_output_gate", "use_bidirectional_attention"),
    *("rope_interleaved", "rope_interleave"),
    *("mlp_only", "norm_before_gate", "apply_residual_connection_post_layernorm"),
    *("use_double_wide_mlp", "fp32_residual", "is_hybrid", "headwise_attn_output_gate"),
    *("elementwise_attn_output_gate", "enable_moe_block", "use_expert_bias", "use_cla"),
)
_neutral((True,), "is_causal", "causal", "use_rmsnorm", "use_rope", "use_swiglu")
_neutral((True, False), "is_decoder")  # a model that only decodes is one with either
_neutral((1, 1.0), "partial_rotary_factor", "rotary_pct", "rope_ratio")
_neutral(
    (1, 1.0),
    *("embedding_multiplier", "residual_multiplier", "logits_scaling", "logit_scale"),
    *(
        "scale_emb",
        "scale_depth_factor",
        "mup_multiplier",
        "moe_layer_freq",
        "routed_scaling_factor",
    ),
)
_neutral((0, 0.0), "num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers")
_neutral((0, 0.0), "attn_logit_softcapping", "final_logit_softcapping", "logits_soft_cap")
_neutral((0,), "num_experts", "num_local_experts", "n_routed_experts", "num_shared_experts")
_neutral((0,), "n_shared_experts", "num_kv_shared_layers", "hidden_size_per_layer_input")
_neutral(({}, []), "pruned_heads", "mlp_only_layers", "moe_layers", "adapter_config")
_neutral(("rms_norm", "rmsnorm", "RMSNorm"), "norm_type", "normalization", "norm_class")
_neutral(("rope", "rotary"), "position_embedding_type", "pos_emb_type")


def _full(value: object) -> bool:
    return isinstance(value, list | tuple) and set(map(str, value)) <= {"full_attention"}


NEUTRAL["layer_types"] = _full
_KNOWN = frozenset(key for keys in IRRELEVANT.values() for key in keys)
_MOST_NAMED = 5


def refuse_unread(config: Config, kind: str) -> None:
    """Raises ConfigError for keys that the family of this model_type did not read, and that are not
    known to change nothing.
    """
    left = [
        (where.name.removeprefix(f"{config.name}: "), spelt(key), where.values[key])
        for where, key in config.unread()
        if not _passes(key, where.values[key])
    ]
    if left:
        named = [
            f"{key if where == config.name else f'{where}.{key}'} is {shown(value)}"
            for where, key, value in left[:_MOST_NAMED]
        ]
        more = f" and {len(left) - _MOST_NAMED} more" if len(left) > _MOST_NAMED else ""
        raise ConfigError(
            f"{config.name}: {'; '.join(named)}{more}; allowed: keys that a {kind} model has, "
            "because what others change is not described; remove a key that changes nothing, or "
            "use another model"
        )


def _passes(key: str, value: object) -> bool:
    return key in _KNOWN or (key in NEUTRAL and NEUTRAL[key](value))
