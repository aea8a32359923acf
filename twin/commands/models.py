"""`twin models`: the models known by name, or the facts of one."""

from __future__ import annotations

import argparse
from typing import Any

from twin.commands.arguments import Subparsers, command
from twin.commands.output import emit
from twin.models.load import load_model, model_names
from twin.models.spec import ModelSpec
from twin.report.tables import facts, table

EXAMPLES = """\
  twin models                    all models on file
  twin models laneformer-2b      one of them
  twin models ./my-checkpoint    a folder with a Hugging Face config.json"""


def add(commands: Subparsers) -> None:
    parser = command(
        commands, "models", run, usage="[MODEL] [--json]", summary="list models, or show the sizes of one",
        text="Any folder with a Hugging Face config.json of a dense Llama, Mistral, Qwen2, Qwen3 or Laneformer works as MODEL too.",
        examples=EXAMPLES,
    )  # fmt: skip
    parser.add_argument("model", metavar="MODEL", nargs="?", help="a name or a path; left out: list all")


def run(args: argparse.Namespace) -> int:
    if args.model is not None:
        spec = load_model(args.model)
        data = describe(spec)
        emit(args, data, facts([(name.replace("_", " "), _shown(value)) for name, value in data.items()]))
        return 0
    specs = [load_model(name) for name in model_names()]
    rows = [
        (s.name, s.family, f"{s.parameters / 1e9:.2f} B", s.layers, s.hidden, f"{s.heads}/{s.kv_heads}", s.ffn, s.vocab, s.context,
         f"{s.lanes.count} lanes, delay {s.lanes.delay}" if s.lanes else "")
        for s in specs
    ]  # fmt: skip
    head = ("model", "family", "parameters", "layers", "hidden", "heads/KV", "FFN", "vocabulary", "context", "lanes")
    emit(args, {"models": [describe(s) for s in specs]}, table(head, rows, text_columns=2))
    return 0


def describe(spec: ModelSpec) -> dict[str, Any]:
    """The sizes of a model, for machines."""
    streamed = spec.streamed_parameters * spec.dtype.bytes
    return {
        "name": spec.name,
        "family": spec.family,
        "parameters": spec.parameters,
        "streamed_bytes_per_step": streamed,
        "dtype": spec.dtype.value,
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
    }


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value)
