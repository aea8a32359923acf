"""What the engine runs next to softmax attention, gated DeltaNet, Mamba-2 and short convolutions:
which of them, and the shapes of a mixer's tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

from twin.models.formats import BF16, Formats
from twin.models.layers import Layer
from twin.models.mixers import (
    CompressedAttention,
    GroupedAttention,
    Mamba2,
    Mixer,
    Recurrence,
    Recurring,
    ShortConvolution,
)

LOADED = 4  # elements of a head that a thread loads at once
# vectors of a layer with recurrent states, by canonical name: taps of the convolution, logarithms
# of the decays, what is added to each time step, scales of the outputs' norm;
TAPS, DECAY, STEP, NORM = "conv", "decay", "step_bias", "gated_norm"
# of Mamba-2 also what the convolution adds, and the factors of x in the outputs
TAPS_BIAS, SKIP = "conv_bias", "skip"
MAMBA_TENSORS = {  # canonical name -> name, below the module of a layer of Mamba-2
    "state_in": "in_proj.weight",
    "o": "out_proj.weight",
    TAPS: "conv1d.weight",
    TAPS_BIAS: "conv1d.bias",
    DECAY: "A_log",
    STEP: "dt_bias",
    SKIP: "D",
    NORM: "norm.weight",
}


def recurrence_of(layout: Sequence[Layer]) -> Recurring | None:
    """The recurrent states of a layout that runs; None of one without."""
    return next((layer.mixer for layer in layout if isinstance(layer.mixer, Recurrence)), None)


def convolution_of(layout: Sequence[Layer]) -> ShortConvolution | None:
    """The short convolution of a layout that runs; None of one without."""
    found = (layer.mixer for layer in layout if isinstance(layer.mixer, ShortConvolution))
    return next(found, None)


def attention_of(layout: Sequence[Layer]) -> GroupedAttention | None:
    """The first softmax attention of a layout; where the engine runs it all are alike, but for
    windows and the shapes of their heads.
    """
    found = (layer.mixer for layer in layout if isinstance(layer.mixer, GroupedAttention))
    return next(found, None)


def runs(mixer: Recurring | ShortConvolution) -> bool:
    """Has the kernel code for it? Heads are whole loads, and the convolution looks back."""
    if isinstance(mixer, ShortConvolution):
        return mixer.conv > 1
    whole = mixer.key_dim % LOADED == 0 and mixer.value_dim % LOADED == 0
    return whole and mixer.conv > 1 and mixer.value_heads % mixer.key_heads == 0


def mixer_shape(mixer: Mixer, hidden: int, name: str) -> tuple[int, ...] | None:
    """Shape of a layer's tensor `name`; None: as in a dense model, or not the mixer's."""
    if isinstance(mixer, GroupedAttention):
        q, kv = mixer.heads * mixer.head_dim, mixer.kv_heads * mixer.head_dim
        together = mixer.whole_qk_norm
        return {
            "q": (q * (2 if mixer.output_gate else 1), hidden),
            "k": (kv, hidden),
            "v": (kv, hidden),
            "o": (hidden, q),
            "q_norm": (q if together else mixer.head_dim,),
            "k_norm": (kv if together else mixer.head_dim,),
        }.get(name)
    if isinstance(mixer, CompressedAttention):
        matrices = {w.name: (w.rows, w.cols) for w in mixer.weights(hidden, Formats(BF16))}
        return (matrices | mixer.vector_shapes()).get(name)
    if isinstance(mixer, ShortConvolution):
        return {
            "conv_in": (3 * mixer.channels, hidden),
            "o": (hidden, mixer.channels),
            TAPS: (mixer.channels, mixer.conv),
        }.get(name)
    if not isinstance(mixer, Recurrence):
        return None
    values = mixer.value_heads * mixer.value_dim
    if isinstance(mixer, Mamba2):
        return {
            "state_in": (values + mixer.channels + mixer.value_heads, hidden),
            "o": (hidden, values),
            TAPS: (mixer.channels, mixer.conv),
            TAPS_BIAS: (mixer.channels,),
            **dict.fromkeys((DECAY, STEP, SKIP), (mixer.value_heads,)),
            NORM: (values,),
        }.get(name)
    if mixer.split:
        projections = {"qkv": mixer.channels, "z": values} | dict.fromkeys("ba", mixer.value_heads)
    else:
        projections = {"qkvz": mixer.channels + values, "ba": 2 * mixer.value_heads}
    return {
        **{key: (rows, hidden) for key, rows in projections.items()},
        "o": (hidden, values),
        TAPS: (mixer.channels, mixer.conv),
        DECAY: (mixer.value_heads,),
        STEP: (mixer.value_heads,),
        NORM: (mixer.value_dim,),
    }.get(name)
