"""What the applications of this package share: how a request is answered, or refused, whole."""

from __future__ import annotations

import logging
import re
from collections.abc import Awaitable, Callable
from functools import cache
from pathlib import Path

from twin.server.exchange import Exchange, Gone, Message, Receive, Send
from twin.server.guard import Guard
from twin.server.limits import Limits
from twin.server.problem import Problem
from twin.text import shown

HTML = b"text/html; charset=utf-8"
# A page has its scripts and styles in itself and calls no server but this one.
POLICY = (
    b"default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    b"connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
    b"frame-ancestors 'none'"
)
# What a page names of its folder: a line for each file
NAMED = re.compile(
    r'<link rel="stylesheet" href="(?P<style>[a-z]+\.css)" />'
    r'|<script src="(?P<script>[a-z]+\.js)"></script>'
)
LOG = logging.getLogger("twin.server")
Route = Callable[[Exchange], Awaitable[None]]


class Application:
    """An ASGI application of routes. Nothing that a client sends ends the process."""

    guard: Guard
    limits: Limits

    def _route(self, exchange: Exchange) -> Route:
        """Raises Problem for a path or a method that is none."""
        raise NotImplementedError

    def _refused(self) -> None:
        """A request was refused."""

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["type"] == "http":
            await self._http(Exchange(scope, receive, send, self.limits))

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        while True:
            message = await receive()
            await send({"type": f"{message['type']}.complete"})
            if message["type"] == "lifespan.shutdown":
                return

    async def _http(self, exchange: Exchange) -> None:
        try:
            try:
                exchange.check_head()
                self.guard.allow(exchange)
                await self._route(exchange)(exchange)
            except Problem as problem:
                self._refused()
                await exchange.refuse(problem)
            except Gone:
                raise
            except Exception as error:
                await self._failed(exchange, error)
        except Gone:
            if exchange.begun:
                raise ConnectionResetError("the client left") from None

    async def _failed(self, exchange: Exchange, error: Exception) -> None:
        LOG.exception("%s %s", exchange.method, shown(exchange.path))
        if exchange.begun:
            raise error  # ends the connection: the answer is not whole
        await exchange.refuse(Problem("an error of the server; see its log", status=500))


@cache
def whole_page(folder: Path) -> bytes:
    """page.html of a folder with the styles and scripts that it names inside it: one answer, and a
    policy that lets a page load nothing.
    """

    def content(named: re.Match[str]) -> str:
        tag = "style" if named["style"] else "script"
        text = (folder / (named["style"] or named["script"])).read_text(encoding="utf-8")
        return f"<{tag}>\n{text}</{tag}>"

    return NAMED.sub(content, (folder / "page.html").read_text(encoding="utf-8")).encode()


async def page(exchange: Exchange, content: bytes, policy: bytes = POLICY) -> None:
    exchange.extra.append((b"content-security-policy", policy))
    exchange.extra.append((b"x-content-type-options", b"nosniff"))
    await exchange.answer(200, content, HTML)
