"""Models by their name on a Hub: a server on this computer that answers as the Hub does."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from twin.engine.hub import local
from twin.errors import ConfigError

COMMIT = "a" * 40
REPO = "someone/tiny"


@dataclass
class Hub:
    files: dict[str, bytes]
    broken: set[str] = field(default_factory=set)  # whose next answer ends halfway
    sent: list[str] = field(default_factory=list)
    port: int = 0


@pytest.fixture
def hub(checkpoint: Path) -> Iterator[Hub]:
    files = {path.name: path.read_bytes() for path in sorted(checkpoint.iterdir())} | {
        "original/consolidated.safetensors": b"of another program",
        "readme.md": b"#",
    }
    made = Hub(files)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def _answer(self, *, body: bool) -> None:
            parts = self.path.partition("?")[0].strip("/").split("/")
            if parts[:4] == ["api", "models", "someone", "tiny"] and "tree" in parts:
                tree = [
                    {"type": "file", "path": name, "size": len(content), "oid": "0" * 40}
                    for name, content in made.files.items()
                ]
                self._send(json.dumps(tree).encode())
            elif parts[:4] == ["api", "models", "someone", "tiny"]:
                names = [{"rfilename": name} for name in made.files]
                self._send(json.dumps({"id": REPO, "sha": COMMIT, "siblings": names}).encode())
            elif parts[:3] == ["someone", "tiny", "resolve"]:
                self._file("/".join(parts[4:]), body=body)
            else:
                self._send(b"{}", 404, {"X-Error-Code": "RepoNotFound"})

        def _file(self, name: str, *, body: bool) -> None:
            if name not in made.files:
                return self._send(b"", 404, {"X-Error-Code": "EntryNotFound"})
            content = made.files[name]
            about = {
                "ETag": f'"{hashlib.sha256(content).hexdigest()}"',
                "X-Repo-Commit": COMMIT,
                "Accept-Ranges": "bytes",
            }
            if not body:
                return self._send(b"", 200, about, len(content))
            begin = int(self.headers.get("Range", "bytes=0-").split("=")[1].split("-")[0])
            made.sent.append(f"{name} from {begin}")
            status = 206 if begin else 200
            if begin:
                about["Content-Range"] = f"bytes {begin}-{len(content) - 1}/{len(content)}"
            if name in made.broken:
                made.broken.discard(name)
                self._send(content[begin : len(content) // 2], status, about, len(content) - begin)
                self.close_connection = True
                return None
            return self._send(content[begin:], status, about)

        def _send(
            self,
            content: bytes,
            status: int = 200,
            about: dict[str, str] | None = None,
            length: int | None = None,
        ) -> None:
            self.send_response(status)
            for name, value in (about or {}).items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content) if length is None else length))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield made
    server.shutdown()
    server.server_close()


def ran(hub: Hub, home: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own: the library reads its environment once."""
    environment = os.environ | {
        "HF_ENDPOINT": f"http://127.0.0.1:{hub.port}",
        "HF_HOME": str(home),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_OFFLINE": "0",
    }
    return subprocess.run(
        [sys.executable, "-m", "twin", *words],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_what_a_broken_download_left_is_not_fetched_again(hub: Hub, tmp_path: Path) -> None:
    words = ("run", f"hf:{REPO}", "--prompt", "a", "--max-tokens", "2", "--blocks", "1")
    hub.broken.add("model.safetensors")
    first = ran(hub, tmp_path, *words)
    if first.returncode:  # the library may try again by itself
        assert "run it again" in first.stderr
        first = ran(hub, tmp_path, *words)
    assert first.returncode == 0, first.stderr
    assert hub.sent.count("model.safetensors from 0") == 2
    assert all(hub.sent.count(one) == 1 for one in hub.sent if "model.safe" not in one)
    fetched = {one.partition(" ")[0] for one in hub.sent}
    assert fetched == {name for name in hub.files if name.endswith((".json", ".safetensors"))} - {
        "original/consolidated.safetensors"
    }
    before = len(hub.sent)
    again = ran(hub, tmp_path, *words)
    assert again.stdout == first.stdout
    assert len(hub.sent) == before, "nothing is fetched twice"


@pytest.mark.slow
def test_a_prediction_fetches_a_description_alone(hub: Hub, tmp_path: Path) -> None:
    made = ran(hub, tmp_path, "simulate", f"hf:{REPO}", "1xh200", "--blocks", "1")
    assert made.returncode == 0, made.stderr
    assert not [one for one in hub.sent if "safetensors" in one and "index" not in one]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("hf:someone/nothing", "there is no such model"),
        (f"hf:{REPO}/model.gguf", "has no such file"),
        ("hf:tiny", "hf:OWNER/NAME"),
    ],
)
def test_what_cannot_be_fetched_says_why(model: str, said: str, hub: Hub, tmp_path: Path) -> None:
    made = ran(hub, tmp_path, "run", model, "--prompt", "a")
    assert (made.returncode, said in made.stderr) == (2, True), made.stderr


@pytest.mark.slow
def test_without_a_network_the_command_is_named(hub: Hub, tmp_path: Path) -> None:
    hub.port = 9  # nobody listens there
    made = ran(hub, tmp_path, "run", f"hf:{REPO}", "--prompt", "a")
    assert made.returncode == 2
    assert (
        f"hf download {REPO} --include '*.json' '*.jinja' '*.safetensors' --exclude '*/*' "
        "--local-dir tiny"
    ) in made.stderr


def test_without_the_library_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ConfigError, match=r"monotwin\[hub\]"):
        local(f"hf:{REPO}", weights=True)
