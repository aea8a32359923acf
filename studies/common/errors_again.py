"""The errors of every record on file by the fits in force, once a fit or a law has changed:
`python -m studies.common.errors_again` (10 core-minutes, on all that it may run on). Behind it:
`python studies/intervals/public.py` and `python -m studies.common.held_out`.
"""

from __future__ import annotations

import sys

from twin.calibrate import shape_record, store
from twin.calibrate.known_error import keep
from twin.calibrate.validate import compare
from twin.hardware.load import load_node
from twin.hardware.types import HOST, Node


def nodes() -> list[Node]:
    """GPUs with errors on file, those of one first: a node of several needs theirs."""
    found = [load_node(name) for name in store.held_out_names()]
    return sorted((node for node in found if node.device.isa != HOST), key=lambda node: node.gpus)


def again(node: Node) -> None:
    """Of `twin validate` and of drawn shapes; public models have a script of their own."""
    file = store.held_out_of(node.name)
    assert file is not None
    about, rows = store.read_held_out(file)
    for record in dict.fromkeys((str(about["record"]), *(row["record"] for row in rows))):
        folder = store.runs_folder(node.name) / record
        if not record or not folder.is_dir():
            continue
        if (folder / shape_record.PREDICTIONS).is_file():
            shape_record.keep_errors(node, shape_record.read(node, folder), _said)
        else:
            measured = store.read_run(folder)
            keep(node, compare(node, measured, _said), measured)
        print(f"{node.name}: {record}", flush=True)


def _said(message: str) -> None:
    print(f"\r{message}", end="\r", file=sys.stderr)


def main() -> None:
    for node in nodes():
        again(node)


if __name__ == "__main__":
    main()
