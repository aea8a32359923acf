"""`twin models`: the models known by name, or the facts of one."""

from __future__ import annotations

import argparse
from typing import Any

from twin.commands.arguments import Subparsers, command
from twin.commands.output import emit
from twin.models.formats import STORED
from twin.models.load import load_model, model_names
from twin.models.spec import RUN, ModelSpec
from twin.report.tables import facts, table

CACHE_BYTES = 2  # a 16-bit cache
EXAMPLES = """\
  twin models                    all models on file
  twin models deepseek-v3        one of them: total and active parameters, bytes a token, formats
  twin models ./my-checkpoint    a folder with a Hugging Face config.json"""


def add(commands: Subparsers) -> None:
    parser = command(
        commands,
        "models",
        run,
        usage="[MODEL] [--json]",
        summary="list models, or show the sizes of one",
        text="Any folder with a Hugging Face config.json of a known family works as MODEL too. "
        f"NAME@FORMAT stores its matrices in another format ({', '.join(STORED)}). The "
        f"engine runs dense models in {', '.join(RUN)}; the others are planned and simulated.",
        examples=EXAMPLES,
    )
    parser.add_argument(
        "model", metavar="MODEL", nargs="?", help="a name or a path; left out: list all"
    )


def run(args: argparse.Namespace) -> int:
    if args.model is not None:
        spec = load_model(args.model)
        data = describe(spec)
        emit(
            args,
            data,
            facts([(name.replace("_", " "), _shown(value)) for name, value in data.items()]),
        )
        return 0
    specs = [load_model(name) for name in model_names()]
    rows = [
        (
            s.name,
            ", ".join(_kinds(s)),
            _count(s.parameters),
            _count(s.active_parameters),
            f"{s.streamed_bytes / 1e9:.2f} GB",
            s.layers,
            s.hidden,
            f"{s.heads}/{s.kv_heads}",
            s.ffn,
            s.vocab,
            s.context,
        )
        for s in specs
    ]
    head = (
        "model",
        "kinds",
        "total",
        "active",
        "bytes a token",
        "layers",
        "hidden",
        "heads/KV",
        "FFN",
        "vocabulary",
        "context",
    )
    emit(args, {"models": [describe(s) for s in specs]}, table(head, rows, text_columns=2))
    return 0


def describe(spec: ModelSpec) -> dict[str, Any]:
    """The sizes of a model, for machines."""
    return {
        "name": spec.name,
        "family": spec.family,
        "parameters": spec.parameters,
        "active_parameters": spec.active_parameters,
        "streamed_bytes_per_step": spec.streamed_bytes,
        "stored_bytes": spec.stored_bytes,
        "cache_bytes_read_at_4096": spec.traffic(4096, CACHE_BYTES).read_bytes,
        "dtype": spec.dtype.value,
        "formats": ", ".join(dict.fromkeys(w.format.name for w in spec.weights())),
        "layers": spec.layers,
        "hidden": spec.hidden,
        "heads": spec.heads,
        "kv_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "ffn": spec.ffn,
        "vocab": spec.vocab,
        "context": spec.context,
        "tied": spec.tied,
        "lanes": spec.lanes.count if spec.lanes else 0,
        "delay": spec.lanes.delay if spec.lanes else 0,
        "kinds": ", ".join(_kinds(spec)),
        "runs_on_the_engine": spec.runnable_reason() is None,
    }


def _kinds(spec: ModelSpec) -> tuple[str, ...]:
    lanes = (f"{spec.lanes.count} lanes, delay {spec.lanes.delay}",) if spec.lanes else ()
    return (*lanes, *spec.features())


def _count(parameters: int) -> str:
    return f"{parameters / 1e9:.2f} B"


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value)
