"""One server for all tests that need no limits of their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.server.serving import TEMPLATE, Running, running


@pytest.fixture(scope="session")
def template_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("template") / "chat.jinja"
    file.write_text(TEMPLATE)
    return file


@pytest.fixture(scope="session")
def live(checkpoint: Path, template_file: Path) -> Iterator[Running]:
    with running(checkpoint, template_file) as server:
        yield server


@pytest.fixture
def http(live: Running) -> Iterator[httpx.Client]:
    with live.client() as client:
        yield client
