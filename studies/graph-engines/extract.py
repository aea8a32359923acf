"""Writes hwmodels/kernels from the measured kernel tables of NVIDIA's AIConfigurator (Apache-2.0).

    pip download --no-deps aiconfigurator-core==0.12.0 && unzip aiconfigurator_core-*.whl -d aic
    pip install pandas pyarrow
    python studies/graph-engines/extract.py aic/aiconfigurator_core/systems hwmodels/kernels

Kept are the shapes that decoding needs: 1 to 128 tokens, and of the matrices' sides the multiples
that models have. Times are in microseconds from one kernel of a CUDA graph to the next, so an edge
of the graph is in each of them.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pandas as pd

STACKS = {"vllm": "0.24.0", "sglang": "0.5.14", "trtllm": "1.3.0rc20"}
DEVICES = {"h200-sxm": "h200_sxm", "h100-sxm": "h100_sxm"}
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128)
SIDES = (
    256,
    512,
    768,
    1024,
    1536,
    2048,
    2560,
    3072,
    3584,
    4096,
    5120,
    6144,
    7168,
    8192,
    10240,
    12288,
    16384,
    51200,
    65536,
)
TYPES = {
    "bfloat16": "bf16",
    "fp8": "fp8",
    "fp8_block": "fp8-block",
    "w4a16_mxfp4": "mxfp4",
    "int4_wo": "int4",
}
RANK_HEADS = (4, 8, 16, 32, 64, 128)
CONTEXTS = tuple(2**power for power in range(6, 18))
HEADS = {
    (2, 1),
    (4, 1),
    (4, 2),
    (8, 1),
    (8, 2),
    (8, 4),
    (16, 1),
    (16, 2),
    (16, 4),
    (16, 8),
    (32, 4),
    (32, 8),
    (64, 4),
    (64, 8),
}
# 58 us whatever the size (SGLang: 3.6 us): not times between kernels of a graph, but of launches
LAUNCH_BOUND = {("vllm", "fp8-block")}
# vLLM's table holds the whole module; its scan is FlashAttention 3, as SGLang's
LATENT = ("sglang", "trtllm")
MOE = {  # hidden, inner, experts, top-k: the type that the checkpoint is stored in
    (2880, 2880, 128, 4): ("mxfp4",),
    (2880, 2880, 32, 4): ("mxfp4",),
    (2048, 768, 128, 8): ("bf16", "fp8-block"),
    (4096, 1536, 128, 8): ("bf16", "fp8-block"),
    (4096, 14336, 8, 2): ("bf16",),
    (2048, 512, 512, 10): ("bf16", "fp8-block"),
    (7168, 2048, 256, 8): ("fp8-block",),
    (7168, 2048, 384, 8): ("int4",),
}


def main(systems: Path, target: Path) -> None:
    for device, system in DEVICES.items():
        for stack, version in STACKS.items():
            source, folder = systems / "data" / system, target / device / stack
            folder.mkdir(parents=True, exist_ok=True)
            gemm(read(source, "gemm", stack, version, "gemm_perf"), stack).to_csv(
                folder / "gemm.csv", index=False
            )
            attention(
                read(source, "attention", stack, version, "generation_attention_perf")
            ).to_csv(folder / "attention.csv", index=False)
            allreduce(read(source, "comm", stack, version, "custom_allreduce_perf")).to_csv(
                folder / "allreduce.csv", index=False
            )
            moe(read(source, "moe", stack, version, "moe_perf")).to_csv(
                folder / "moe.csv", index=False
            )
            own = stack if stack in LATENT else "sglang"
            latent(read(source, "mla", own, STACKS[own], "generation_mla_perf")).to_csv(
                folder / "latent.csv", index=False
            )
            heads(read(source, "mla_bmm", stack, version, "mla_bmm_perf")).to_csv(
                folder / "heads.csv", index=False
            )
            scale(read(source, "quantize", stack, version, "computescale_perf")).to_csv(
                folder / "scale.csv", index=False
            )
        rows(systems / "data" / system).to_csv(target / device / "rows.csv", index=False)


def read(source: Path, kind: str, stack: str, version: str, name: str) -> pd.DataFrame:
    frame = pd.read_parquet(source / kind / stack / version / f"{name}.parquet")
    frame["us"] = frame["latency"] * 1e3
    return frame


def pivot(frame: pd.DataFrame, index: list[str], column: str) -> pd.DataFrame:
    """One line per `index`, a column per value of `column`; the best of several kernels, as an
    engine picks it.
    """
    table = frame.pivot_table(index=index, columns=column, values="us", aggfunc="min").round(2)
    table.columns = [f"{value}" for value in table.columns]
    return table.reset_index()


def gemm(frame: pd.DataFrame, stack: str) -> pd.DataFrame:
    frame["dtype"] = frame.gemm_dtype.map(TYPES)
    frame = frame[[(stack, dtype) not in LAUNCH_BOUND for dtype in frame.dtype]]
    kept = frame[
        frame.dtype.notna() & frame.m.isin(BATCHES) & frame.n.isin(SIDES) & frame.k.isin(SIDES)
    ]
    return pivot(kept, ["dtype", "m", "k"], "n")


def attention(frame: pd.DataFrame) -> pd.DataFrame:
    frame["dtype"], frame["context"] = frame.kv_cache_dtype.map(TYPES), frame.isl + frame.step
    frame = frame.rename(
        columns={
            "window_size": "window",
            "batch_size": "m",
            "num_heads": "heads",
            "num_key_value_heads": "kv_heads",
        }
    )
    shapes = pd.Series(list(zip(frame.heads, frame.kv_heads, strict=True)), index=frame.index)
    kept = frame[
        (frame.attn_dtype == "bfloat16")
        & frame.m.isin(BATCHES)
        & shapes.isin(HEADS)
        & frame.context.isin(CONTEXTS)
    ]
    kept = kept[
        kept.head_dim.isin((64, 128))
        & ((kept.window == 0) | ((kept.window == 128) & (kept.head_dim == 64)))
    ]
    return pivot(kept, ["dtype", "head_dim", "window", "heads", "kv_heads", "m"], "context")


def allreduce(frame: pd.DataFrame) -> pd.DataFrame:
    """Inside graphs; vLLM and SGLang also have eager calls, five times slower."""
    kept = frame[~frame.kernel_source.str.contains("eager") & (frame.message_size <= 2**20)]
    return pivot(kept, ["num_gpus"], "message_size").rename(columns={"num_gpus": "gpus"})


def moe(frame: pd.DataFrame) -> pd.DataFrame:
    frame["dtype"] = frame.moe_dtype.map(TYPES)
    names = {
        "hidden_size": "hidden",
        "inter_size": "inner",
        "num_experts": "experts",
        "topk": "top_k",
        "moe_tp_size": "tp",
    }
    frame = frame.rename(columns=names)
    shapes = zip(frame.hidden, frame.inner, frame.experts, frame.top_k, frame.dtype, strict=True)
    wanted = pd.Series(
        [
            dtype in MOE.get((hidden, inner, experts, top_k), ())
            for hidden, inner, experts, top_k, dtype in shapes
        ],
        index=frame.index,
    )
    kept = frame[
        wanted & (frame.moe_ep_size == 1) & (frame.tp <= 8) & frame.num_tokens.isin(BATCHES)
    ]
    kept = kept[kept.distribution == "power_law_1.01"]
    return pivot(kept, ["dtype", "hidden", "inner", "experts", "top_k", "tp"], "num_tokens")


def latent(frame: pd.DataFrame) -> pd.DataFrame:
    """Multi-head latent attention in the absorbed form: 512 latent and 64 rotated elements a
    position, the heads of one rank.
    """
    frame["dtype"], frame["context"] = frame.kv_cache_dtype.map(TYPES), frame.isl + frame.step
    kept = frame[
        frame.batch_size.isin(BATCHES)
        & frame.num_heads.isin(RANK_HEADS)
        & frame.context.isin(CONTEXTS)
    ]
    return pivot(
        kept.rename(columns={"num_heads": "heads", "batch_size": "m"}),
        ["dtype", "heads", "m"],
        "context",
    )


def heads(frame: pd.DataFrame) -> pd.DataFrame:
    """The products with one matrix a head that carry queries into the latent space and outputs out
    of it, 16-bit.
    """
    frame["side"] = frame.op_name.map({"mla_gen_pre": "k_up", "mla_gen_post": "v_up"})
    kept = frame[
        (frame.bmm_dtype == "bfloat16")
        & frame.num_tokens.isin(BATCHES)
        & frame.num_heads.isin(RANK_HEADS)
    ]
    return pivot(kept.rename(columns={"num_tokens": "m"}), ["side", "m"], "num_heads")


def scale(frame: pd.DataFrame) -> pd.DataFrame:
    """What finding the input's scale adds to an FP8 product; no lines where one kernel does both
    (then most entries are zero).
    """
    if (frame.us > 0).mean() < 0.5:
        return pd.DataFrame({"m": []})
    return pivot(frame[frame.m.isin(BATCHES) & frame.k.isin(SIDES) & (frame.us > 0)], ["m"], "k")


def rows(source: Path) -> pd.DataFrame:
    """Kernels without weights: one that maps a row (FP8 with a given scale), one that reduces it
    first (a scale of its own).
    """
    both = [
        read(source, "quantize", "vllm", STACKS["vllm"], name)
        for name in ("scale_matrix_perf", "computescale_perf")
    ]
    mapped, extra = (
        pivot(frame[frame.m.isin(BATCHES) & frame.k.isin(SIDES)], ["m"], "k") for frame in both
    )
    reduced = mapped.copy()
    reduced.iloc[:, 1:] = (mapped.iloc[:, 1:] + extra.iloc[:, 1:]).round(2)
    mapped.insert(0, "kind", "map")
    reduced.insert(0, "kind", "reduce")
    return pd.concat([mapped, reduced])


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
