"""Laneformer's published definition in torch: it has no class in transformers, and its FP32 logits
are the reference.

Whole sequences, without a cache; shares nothing with the plan. In a 16-bit type it rounds where
Hugging Face's Llama does: norms and softmax in FP32, everything else, the residuals too, in the
type.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from twin.bench.fidelity import Logits
from twin.bench.peers import TORCH, to_torch, torch_module
from twin.errors import EngineError
from twin.models.spec import DType, LaneHead, Lanes, ModelSpec, RopeStyle
from twin.plan.shards import Weights, rope_table

ROWS_BY_LANE = ("q", "k", "v", "gate", "up")  # a lane owns some outputs: [lanes, out / lanes, in]
COLUMNS_BY_LANE = ("o", "down")  # a lane owns some inputs: [lanes, out, in / lanes]


class LaneModel:
    """The weights of a Laneformer on a device, by lane."""

    def __init__(
        self, spec: ModelSpec, weights: Weights, dtype: DType, *, device: str, delay: int
    ) -> None:
        if (
            spec.lanes is None
            or spec.qkv_bias
            or spec.qk_norm
            or spec.rope.style is not RopeStyle.INTERLEAVED
        ):
            raise EngineError(
                f"{spec.name} is no Laneformer; compare it with its class in transformers"
            )
        self.spec, self.lanes, self.delay, self.device = spec, spec.lanes, delay, device
        self._torch = torch_module()
        self._dtype = getattr(self._torch, TORCH[dtype])
        self._weights = {name: self._by_lane(name, weights) for name in _names(spec)}

    def logits(self, tokens: Sequence[int], keep: int) -> Logits:
        """[keep, vocab] after each of the last `keep` tokens."""
        torch = self._torch
        torch.set_float32_matmul_precision("highest")
        with torch.no_grad():
            made = self._head(self._residuals(list(tokens))[:, -keep:]).float().cpu().numpy()
        found: Logits = made
        return found

    def _residuals(self, tokens: list[int]) -> Any:
        """[lanes, sequence, hidden] after the last layer."""
        w = self._weights
        x = w["embed"][self._torch.tensor(tokens, device=self.device)].expand(
            self.lanes.count, -1, -1
        )
        angles = self._angles(len(tokens))
        past: dict[str, list[Any]] = {"attn": [], "ffn": []}
        for layer in range(self.spec.layers):
            for kind in ("attn", "ffn"):
                h = self._norm(x, w[f"layers.{layer}.{kind}_norm"])
                out = (
                    self._attention(layer, h, angles)
                    if kind == "attn"
                    else self._feed_forward(layer, h)
                )
                past[kind].append(out)
                x = x + self._reduced(layer, past[kind])
        return x

    def _reduced(self, layer: int, outputs: list[Any]) -> Any:
        """What each lane adds: its own output and, `delay` layers late, the others'."""
        own = outputs[-1]
        if layer >= self.delay > 0:
            late = outputs[layer - self.delay]
            return own + (late.sum(0, keepdim=True) - late)
        if self.lanes.early_exchange or self.delay == 0:
            return own.sum(0, keepdim=True)
        return own * math.sqrt(self.lanes.count)

    def _attention(self, layer: int, x: Any, angles: tuple[Any, Any]) -> Any:
        torch, size = self._torch, self.spec.head_dim
        length = x.shape[1]
        q, k, v = (
            self._linear(x, f"layers.{layer}.{n}").unflatten(-1, (-1, size)).transpose(1, 2)
            for n in "qkv"
        )
        q, k = self._turned(q, angles), self._turned(k, angles)
        group = q.shape[1] // k.shape[1]  # all [lanes, heads of a lane, sequence, head_dim]
        k, v = (t.repeat_interleave(group, dim=1) for t in (k, v))
        scores = (q @ k.transpose(-1, -2)) * size**-0.5
        position = torch.arange(length, device=self.device)
        distance = position[:, None] - position[None]
        seen = (distance >= 0) & (distance < (self.spec.windows[layer] or length))
        p = torch.softmax(scores.masked_fill(~seen, -math.inf), dim=-1, dtype=torch.float32).to(
            self._dtype
        )
        return self._linear((p @ v).transpose(1, 2).flatten(2), f"layers.{layer}.o")

    def _feed_forward(self, layer: int, x: Any) -> Any:
        gate, up = (self._linear(x, f"layers.{layer}.{n}") for n in ("gate", "up"))
        return self._linear(self._torch.nn.functional.silu(gate) * up, f"layers.{layer}.down")

    def _head(self, x: Any) -> Any:
        """[sequence, vocab]."""
        scale, table = (
            self._weights["final_norm"],
            self._weights["embed" if self.spec.tied else "lm_head"],
        )
        match self.lanes.head:
            case LaneHead.SUM:
                return self._norm(x.sum(0), scale) @ table.T
            case LaneHead.MEAN:
                return self._norm(x, scale).mean(0) @ table.T
            case LaneHead.VOCABULARY:
                by_lane = table.unflatten(0, (self.lanes.count, -1))
                return (self._norm(x, scale) @ by_lane.transpose(1, 2)).transpose(0, 1).flatten(1)

    def _linear(self, x: Any, name: str) -> Any:
        """[lanes, sequence, in] by [lanes, out, in]."""
        return self._torch.bmm(x, self._weights[name].transpose(1, 2))

    def _norm(self, x: Any, scale: Any) -> Any:
        wide = x.float()
        wide = wide * self._torch.rsqrt((wide * wide).mean(-1, keepdim=True) + self.spec.norm_eps)
        return scale * wide.to(self._dtype)

    def _angles(self, length: int) -> tuple[Any, Any]:
        """(cos, sin), each [sequence, head_dim / 2]."""
        cos, sin = rope_table(self.spec, length)
        return to_torch(cos, self._dtype, self.device), to_torch(sin, self._dtype, self.device)

    def _turned(self, x: Any, angles: tuple[Any, Any]) -> Any:
        """Adjacent elements are one complex number."""
        cos, sin = angles
        even, odd = x[..., 0::2], x[..., 1::2]
        return self._torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1).flatten(
            -2
        )

    def _by_lane(self, name: str, weights: Weights) -> Any:
        made, leaf, count = (
            to_torch(weights[name], self._dtype, self.device),
            name.rpartition(".")[2],
            self.lanes.count,
        )
        if leaf in ROWS_BY_LANE:
            return made.unflatten(0, (count, -1))
        if leaf in COLUMNS_BY_LANE:
            return made.unflatten(1, (count, -1)).transpose(0, 1).contiguous()
        return made


def lane_delay(lanes: Lanes, chosen: int | None) -> int:
    """Layers: what the plan chose, else the model's own."""
    return lanes.delay if chosen is None else chosen


def _names(spec: ModelSpec) -> list[str]:
    tables = ["embed", "final_norm"] + ([] if spec.tied else ["lm_head"])
    leaves = ("attn_norm", "ffn_norm", *ROWS_BY_LANE, *COLUMNS_BY_LANE)
    return tables + [f"layers.{layer}.{leaf}" for layer in range(spec.layers) for leaf in leaves]
