"""One HTTP request and its answer, over ASGI."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from contextlib import suppress
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
        path: str = scope["path"]
        self.path = path.removesuffix("/") or path
        self.query: bytes = scope.get("query_string", b"")
        self.client: str = (scope.get("client") or ("",))[0]
        self.headers = {k.decode("latin-1"): v.decode("latin-1") for k, v in scope["headers"]}
        self._head_bytes = len(scope.get("raw_path") or b"") + len(self.query)
        self._head_bytes += sum(len(name) + len(value) for name, value in scope["headers"])
        self.extra: list[tuple[bytes, bytes]] = []  # headers of the answer
        self.begun = False
        self._version: str = scope.get("http_version", "1.1")
        self._closing = False  # the connection ends with the answer
        self._whole = False  # the body has arrived to its end
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
            self.close_after()
            raise Problem(
                f"address and headers have {self._head_bytes} bytes; at most "
                f"{self._limits.head_bytes}: send less",
                status=431,
            )
        # A proxy that finds another end of the body takes what follows for the next request, or
        # the other way round: RFC 9112, 6.1 and 6.3.
        if "transfer-encoding" in self.headers and (
            "content-length" in self.headers or self._version == "1.0"
        ):
            self.close_after()
            raise Problem(
                "Transfer-Encoding together with Content-Length, or in HTTP/1.0, leaves open where "
                "the body ends; send one of them in HTTP/1.1"
            )

    async def body(self) -> bytes:
        """All of it. Raises Problem where it is too large, too slow, or no JSON by its type."""
        limits, kind = self._limits, self.headers.get("content-type", "")
        if kind.partition(";")[0].strip().lower() != "application/json":
            # Also what keeps a foreign page in a browser from posting here unnoticed.
            raise Problem("send the header Content-Type: application/json", status=415)
        packed = self.headers.get("content-encoding", "identity")
        if packed.strip().lower() != "identity":
            raise Problem(
                f"Content-Encoding {shown(packed)} is not read here; send the body as it is",
                status=415,
            )
        try:
            async with asyncio.timeout(limits.body_s):
                parts = [part async for part in self._parts()]
        except TimeoutError:
            self.close_after()
            raise Problem(
                f"the body took more than {limits.body_s:g} s to arrive", status=408
            ) from None
        whole = b"".join(parts)
        for sign, most in ((b":", limits.colons), (b",", limits.commas)):
            if (count := whole.count(sign)) > most:
                raise Problem(
                    f"the body has {count} times {sign.decode()!r}; at most {most}: send less",
                    status=413,
                )
        return whole

    async def _parts(self) -> AsyncIterator[bytes]:
        size = 0
        while not self._whole:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise Gone
            part = message.get("body", b"")
            size += len(part)
            if size > self._limits.body_bytes:
                self.close_after()
                raise Problem(
                    f"the body is larger than {self._limits.body_bytes} bytes; send less",
                    status=413,
                )
            self._whole = not message.get("more_body", False)
            yield part

    async def _leave_body(self) -> None:
        """Before an answer that needs no body: what has come of it is dropped. One that does not
        end at once is not waited for, and its connection ends with the answer.
        """
        if self._whole or self._closing:
            return
        # who waits for "100 Continue" has sent nothing and is to send nothing
        if "expect" not in self.headers:
            with suppress(TimeoutError, Problem):
                async with asyncio.timeout(self._limits.unread_s):
                    async for _ in self._parts():
                        pass
        if not self._whole and not self._closing:
            self.close_after()

    def close_after(self) -> None:
        """The rest of the body is not read: nothing more can follow on this connection."""
        self._closing = True
        self.extra.append((b"connection", b"close"))

    async def gone(self) -> None:
        """Returns when the client has left. The body must have been read."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def answer(self, status: int, body: bytes, kind: bytes = JSON) -> None:
        about = [(b"content-type", kind), (b"content-length", b"%d" % len(body))]
        await self._begin(status, about if status != 204 else [])  # RFC 9110, 8.6
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
            await self._begin(200, [(b"content-type", SSE), (b"x-accel-buffering", b"no")])
        if part:
            await self._write({"type": "http.response.body", "body": part, "more_body": True})

    async def end_stream(self) -> None:
        await self._write({"type": "http.response.body", "body": b""})

    async def _begin(self, status: int, about: list[tuple[bytes, bytes]]) -> None:
        await self._leave_body()
        self.begun = True
        headers = [*about, (b"cache-control", b"no-store"), *self.extra]
        await self._write({"type": "http.response.start", "status": status, "headers": headers})

    async def _write(self, message: Message) -> None:
        try:
            async with asyncio.timeout(self._limits.write_s):
                await self._send(message)
        except (TimeoutError, OSError) as error:
            raise Gone from error
