"""The command line, called in this process as a user in some folder would."""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path

from tests.attack.defect import Defect
from twin.cli import main


def called(words: list[str], folder: Path, what: str) -> tuple[int, str, str]:
    """(exit code, stdout, stderr). Raises Defect for an exception that comes out of `what`."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2))
    here = Path.cwd()
    os.chdir(folder)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                code = main(words)
            except SystemExit as ended:  # argparse's own way out
                code = ended.code if isinstance(ended.code, int) else 1
            except Exception as error:
                raise Defect(
                    f"{type(error).__name__} ({str(error)[:300]}) came out of {what}"
                ) from error
    finally:
        os.chdir(here)
    return code, _read(out), _read(err)


def _read(output: io.TextIOWrapper) -> str:
    output.flush()
    output.buffer.seek(0)
    return output.buffer.read().decode("utf-8")
