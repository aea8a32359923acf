"""What dividing a cache's positions over eight H200 brings, predicted:
`python studies/long-contexts/split.py` makes split.csv.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from twin.files import csv_text, write
from twin.plan.options import LatentCache
from twin.plan.types import Plan
from twin.sim.run import simulate
from twin.study.point import Point
from twin.workers import each

HERE = Path(__file__).resolve().parent
FILE = HERE / "split.csv"
NODE = "8xh200"
# by default options, but for the residual, which the search slices for all of them
CHOSEN = {"residual": "sliced"}
ROOM = 64  # positions behind the context
MODELS = {
    "gpt-oss-120b": 131_072,
    "qwen3-coder-next": 262_144,
    "kimi-k2.6": 262_144,
    "deepseek-v4-flash": 262_144,
}
CONTEXTS = (32_768, 131_072, 262_144)
SPLITS = (None, 2, 0.5)  # times the default


def points() -> Iterator[tuple[str, int, str, Point]]:
    for model, most in MODELS.items():
        for context in (context for context in CONTEXTS if context <= most):
            for cache in LatentCache if model == "kimi-k2.6" else (LatentCache.REPLICATED,):
                options = CHOSEN | {"context": context - ROOM, "max_context": context}
                point = Point(model, NODE).with_options(**options, latent_cache=cache.value)
                yield model, context, cache.value, point


def row(cell: tuple[str, int, str, Point]) -> dict[str, str]:
    """The fastest of three numbers of splits."""
    model, context, cache, point = cell
    plan = point.case().plan()
    own = max((s.scan.splits for s in plan.stages if s.scan and s.scan.entries > 1), default=0)
    found = {own: simulate(plan, point.case().node)}
    for times in SPLITS[1:] if model == "kimi-k2.6" else ():
        splits = round(own * times)
        other = point.with_options(attention_splits=splits).case()
        found[splits] = simulate(other.plan(), other.node)
    splits, best = min(found.items(), key=lambda one: one[1].step_s)
    attention = sum(one.seconds for one in best.stages if one.name.startswith("attention"))
    return {
        "model": model,
        "positions": str(context),
        "cache": cache,
        "splits": str(splits),
        "tokens_per_s": f"{best.tokens_per_s:.1f}",
        "attention_us": f"{1e6 * attention:.0f}",
        "cached_gb": f"{plan.kv_bytes() / 1e9:.2f}",
        "each_once_gb": f"{once(plan) / 1e9:.2f}",
        "floor_us": f"{1e6 * best.floor_s:.0f}",
    }


def once(plan: Plan) -> float:
    """Bytes of a step's caches and states, each moved once."""
    assert plan.spec is not None
    cached = plan.spec.traffic(plan.options.context, plan.options.kv_dtype.bytes)
    return cached.read_bytes + cached.written_bytes


def main() -> None:
    made = list(each(row, list(points())))
    write({FILE: csv_text(list(made[0]), [list(row.values()) for row in made])})


if __name__ == "__main__":
    main()
