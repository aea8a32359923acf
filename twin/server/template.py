"""A checkpoint's chat template, rendered by a child within limits on time, size and memory."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from twin.errors import ConfigError
from twin.server.problem import Problem
from twin.text import shown

MOST_CHARACTERS = 2**22  # rendered
MEMORY_BYTES = 2**29
SECONDS = 2.0  # of a rendering
QUESTION, ANSWER = "a question", "an answer to it"  # of a conversation that shows how turns end
START_S = 20.0  # of the child: its first import may find a cold disk
_CHILD = Path(__file__).with_name("template_child.py")
_LIBRARIES = ("jinja2", "markupsafe")


def _folders() -> list[str]:
    """Where the child's libraries lie: an isolated Python does not look where PYTHONPATH says."""
    found = [find_spec(name) for name in _LIBRARIES]
    return sorted({str(Path(one.origin).parents[1]) for one in found if one and one.origin})


class Template:
    """One child process, started at first use and again after it was ended. Threads take turns."""

    def __init__(
        self, source: str, special: Mapping[str, str], *, seconds: float = SECONDS
    ) -> None:
        """Raises ConfigError for a text that is no template."""
        self.source, self._special, self._seconds = source, dict(special), seconds
        self._turn = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        try:
            self._start()
        except Problem as error:
            raise ConfigError(
                f"the chat template cannot be used: {error}; give another with --chat-template FILE"
            ) from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        generate: bool = True,
        more: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text; `more` of what templates read. Raises Problem: what the template
        refuses is the request's mistake.
        """
        values = {"messages": list(messages), "add_generation_prompt": generate, **self._special}
        values |= more or {}
        with self._turn:
            if self._child is None or self._child.poll() is not None:
                self._start()
            return self._ask({"values": values, "most": MOST_CHARACTERS}, self._seconds)

    def end_mark(self, special: Iterable[str]) -> str | None:
        """Which of the special tokens it writes behind an answer, if it writes one there."""
        question = {"role": "user", "content": QUESTION}
        try:
            text = self.render([question, {"role": "assistant", "content": ANSWER}], generate=False)
        except Problem:
            return None
        _, there, rest = text.rpartition(ANSWER)
        found = [one for one in special if there and rest.lstrip().startswith(one)]
        return max(found, key=len, default=None)

    def close(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.communicate()
            self._child = None

    def _start(self) -> None:
        self.close()
        command = [sys.executable, "-I", str(_CHILD), str(MEMORY_BYTES), *_folders()]
        self._child = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={},
            start_new_session=True,  # Ctrl-C of a terminal is not meant for it
        )
        self._ask({"template": self.source}, START_S)

    def _ask(self, question: dict[str, Any], seconds: float) -> str:
        child = self._child
        assert child is not None
        assert child.stdin is not None
        assert child.stdout is not None
        late = time.monotonic() + seconds
        answer = b""
        try:
            child.stdin.write(json.dumps(question).encode() + b"\n")
            child.stdin.flush()
            while not answer.endswith(b"\n"):
                left = late - time.monotonic()
                if left <= 0 or not select.select([child.stdout], [], [], left)[0]:
                    raise TimeoutError
                got = os.read(child.stdout.fileno(), 2**16)
                if not got:
                    raise EOFError
                answer += got
        except (TimeoutError, EOFError, OSError) as error:
            with suppress(OSError):
                self.close()
            took = f"took more than {seconds:g} s" if isinstance(error, TimeoutError) else "ended"
            raise Problem(
                f"the chat template {took}; send fewer or shorter messages", code="template"
            ) from error
        said = json.loads(answer)
        if "error" in said:
            raise Problem(
                f"the chat template refuses: {shown(said['error'], 300)}", code="template"
            )
        text: str = said["text"]
        return text
