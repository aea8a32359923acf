"""One HTTP request and its answer, over ASGI."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import urlsplit

from twin.server.limits import Limits
from twin.server.problem import Problem
from twin.server.replies import encoded
from twin.text import shown

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
JSON, SSE = b"application/json", b"text/event-stream; charset=utf-8"


class Gone(Exception):
    """The client left, or does not take what it is sent."""


class Exchange:
    """A request's head, its body within limits, and one answer."""

    def __init__(self, scope: Message, receive: Receive, send: Send, limits: Limits) -> None:
        # its answer is that of GET without the body, which uvicorn leaves out
        self.method: str = "GET" if scope["method"] == "HEAD" else scope["method"]
        self.path: str = scope["path"]
        self.query: bytes = scope.get("query_string", b"")
        self.client: str = (scope.get("client") or ("",))[0]
        self.headers = {k.decode("latin-1"): v.decode("latin-1") for k, v in scope["headers"]}
        self._head_bytes = len(scope.get("raw_path") or b"") + len(self.query)
        self._head_bytes += sum(len(name) + len(value) for name, value in scope["headers"])
        self.extra: list[tuple[bytes, bytes]] = []  # headers of the answer
        self.begun = False
        self._receive, self._send, self._limits = receive, send, limits

    @property
    def host(self) -> str:
        """The name that the client thinks it talks to, without its port."""
        try:
            return urlsplit(f"//{self.headers.get('host', '')}").hostname or ""
        except ValueError:
            return ""

    def check_head(self) -> None:
        """Raises Problem where it is too large. What came in one piece was read whole."""
        if self._head_bytes > self._limits.head_bytes:
            self._close_after()
            raise Problem(
                f"address and headers have {self._head_bytes} bytes; at most "
                f"{self._limits.head_bytes}: send less",
                status=431,
            )

    async def body(self) -> bytes:
        """All of it. Raises Problem where it is too large, too slow, or no JSON by its type."""
        limits, kind = self._limits, self.headers.get("content-type", "")
        if kind.partition(";")[0].strip().lower() != "application/json":
            # Also what keeps a foreign page in a browser from posting here without being asked.
            raise Problem("send the header Content-Type: application/json", status=415)
        packed = self.headers.get("content-encoding", "identity")
        if packed.strip().lower() != "identity":
            raise Problem(
                f"Content-Encoding {shown(packed)} is not read here; send the body as it is",
                status=415,
            )
        late = asyncio.timeout(limits.body_s)
        parts, size = [], 0
        try:
            async with late:
                while True:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise Gone
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if size > limits.body_bytes:
                        self._close_after()
                        raise Problem(
                            f"the body is larger than {limits.body_bytes} bytes; send less",
                            status=413,
                        )
                    if not message.get("more_body", False):
                        return b"".join(parts)
        except TimeoutError:
            self._close_after()
            raise Problem(
                f"the body took more than {limits.body_s:g} s to arrive", status=408
            ) from None

    def _close_after(self) -> None:
        """The rest of the body is not read: nothing more can follow on this connection."""
        self.extra.append((b"connection", b"close"))

    async def gone(self) -> None:
        """Returns when the client has left. The body must have been read."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def answer(self, status: int, body: bytes, kind: bytes = JSON) -> None:
        await self._begin(status, kind, [(b"content-length", b"%d" % len(body))])
        await self._write({"type": "http.response.body", "body": body})

    async def json(self, value: Any, status: int = 200) -> None:
        await self.answer(status, encoded(value))

    async def refuse(self, problem: Problem) -> None:
        if problem.retry_s is not None:
            self.extra.append((b"retry-after", b"%d" % problem.retry_s))
        if problem.status == 401:
            self.extra.append((b"www-authenticate", b"Bearer"))
        await self.json(problem.body(), problem.status)

    async def stream(self, part: bytes) -> None:
        """A part of an answer whose end nobody knows yet."""
        if not self.begun:
            await self._begin(200, SSE, [(b"x-accel-buffering", b"no")])
        if part:
            await self._write({"type": "http.response.body", "body": part, "more_body": True})

    async def end_stream(self) -> None:
        await self._write({"type": "http.response.body", "body": b""})

    async def _begin(self, status: int, kind: bytes, more: list[tuple[bytes, bytes]]) -> None:
        self.begun = True
        headers = [(b"content-type", kind), (b"cache-control", b"no-store"), *more, *self.extra]
        await self._write({"type": "http.response.start", "status": status, "headers": headers})

    async def _write(self, message: Message) -> None:
        try:
            async with asyncio.timeout(self._limits.write_s):
                await self._send(message)
        except (TimeoutError, OSError) as error:
            raise Gone from error
