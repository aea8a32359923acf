"""Tensors of a checkpoint that its model does not use: each is known not to change what is computed
of a text, or refused by its name.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from twin.engine.safetensors import Entry
from twin.engine.save import CONFIG
from twin.errors import CheckpointError
from twin.models.load import no_part, tensors
from twin.models.spec import ModelSpec
from twin.text import shown

AT_ONCE = 2**24  # bytes that are compared
# constants that old versions stored: angles of positions, masks
_CONSTANT = re.compile(
    r"(rotary_(pos_)?emb\.(inv_freq|cos_cached|sin_cached)|masked_bias|attn\.bias)\Z"
)
# towers of images and sounds, what turns their outputs into a text's, and drafts of tokens
_DRAFTING = re.compile(
    r"(model\.)?(vision_tower|vision_model|visual|multi_modal_projector|mm_projector|audio_tower"
    r"|mtp|mtp_layers)\."
)
_LAYER = re.compile(r"(.*\.layers\.(\d+))\.(.+)")
# what a layer that drafts tokens has in addition, and no other one: DeepSeek-V3's
_DRAFTS = re.compile(r"(eh_proj|enorm|hnorm)\.weight\Z")


def beyond(spec: ModelSpec, name: str) -> bool:
    """Is a tensor, by its name, of a tower, a draft or a layer behind the model's last one?"""
    layer = _LAYER.match(name)
    outside = _DRAFTING.match(name) is not None or name.startswith(no_part(spec))
    return outside or (layer is not None and int(layer[2]) >= spec.layers)


def refuse_left_over(
    path: Path, spec: ModelSpec, found: Mapping[str, Entry], known: Collection[str]
) -> None:
    """Raises CheckpointError for the first tensor, by name, that a model of this configuration
    leaves out and that the one which was trained did not. `known`: names that are read.
    """
    drafting = {layer[1] for name in found if (layer := _LAYER.match(name)) and _drafts(layer)}
    for name in sorted(found.keys() - known):
        layer = _LAYER.match(name)
        number = int(layer[2]) if layer else 0
        if _CONSTANT.search(name) or _DRAFTING.match(name) or name.startswith(no_part(spec)):
            continue
        if layer and number >= spec.layers:
            if layer[1] in drafting:
                continue
            raise CheckpointError(
                f"{path}: {shown(name)} is of layer {number}, and {CONFIG} has num_hidden_layers "
                f"{spec.layers}, counted from 0; use the {CONFIG} of these weights"
            )
        if _is_tied_head(path, spec, name, found):
            continue
        raise CheckpointError(
            f"{path}: {shown(name)} is not part of a {spec.family} model as {CONFIG} describes "
            f"it; use a matching {CONFIG}"
        )


def _drafts(layer: re.Match[str]) -> bool:
    return _DRAFTS.match(layer[3]) is not None


def _is_tied_head(path: Path, spec: ModelSpec, name: str, found: Mapping[str, Entry]) -> bool:
    """Is the tensor the head of a model whose head is its embedding, and the same? transformers
    uses a head that differs, whatever the configuration says.
    """
    if not spec.tied or name != tensors(replace(spec, tied=False))["lm_head"].name:
        return False
    embedding = found.get(tensors(spec)["embed"].name)
    if embedding is None or _same(found[name], embedding):
        return True  # or its absence is reported
    raise CheckpointError(
        f"{path}: {shown(name)} differs from {shown(embedding.name)}, and {CONFIG} has "
        "tie_word_embeddings true, by which there is one matrix for both; set it to false to use "
        "both, or remove the tensor to use the embedding"
    )


def _same(one: Entry, other: Entry) -> bool:
    """Are two stored tensors alike in type, shape and every bit?"""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    (a, b) = (np.memmap(entry.path, np.uint8, "r") for entry in (one, other))
    return all(
        np.array_equal(
            a[one.begin + at : min(one.begin + at + AT_ONCE, one.end)],
            b[other.begin + at : min(other.begin + at + AT_ONCE, other.end)],
        )
        for at in range(0, one.end - one.begin, AT_ONCE)
    )
