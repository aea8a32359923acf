"""The application on a socket: uvicorn, with limits on connections and on how slowly a head may
come, and refusals of its own in our words.
"""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from typing import Any, Protocol

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from twin.errors import ConfigError
from twin.server.exchange import JSON, Exchange, Gone, Message, Receive, Send
from twin.server.limits import Limits
from twin.server.problem import Problem
from twin.server.replies import encoded
from twin.text import shown

GRACE_S = 3  # for answers under way when the server has to end
LEAST_TAKEN = 2**16  # bytes of an answer, by a client in `write_s`
KEEP_S = 30  # a connection without a request stays


class Worker(Protocol):
    def close(self) -> None:
        """Ends what runs."""
        ...


class Application(Protocol):
    """What an ASGI application of ours has in addition to its calls."""

    @property
    def limits(self) -> Limits: ...

    @property
    def worker(self) -> Worker: ...


def protocol(limits: Limits) -> type[H11Protocol]:
    """uvicorn's own waits for ever for a head that has begun, or that never begins. Where there are
    too many connections it refuses all of them; here those that came last.
    """

    async def crowded(scope: Message, receive: Receive, send: Send) -> None:
        exchange = Exchange(scope, receive, send, limits)
        exchange.close_after()
        with suppress(Gone):
            await exchange.refuse(
                Problem(
                    f"{limits.connections} connections are open, as many as this server takes; "
                    "try again later",
                    status=503,
                    code="connections",
                    retry_s=1,
                )
            )

    class Timed(H11Protocol):
        _late: asyncio.TimerHandle | None = None
        _looks: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) > limits.connections:
                self.app = crowded
            self._watch()
            self._look(0)

        def send_400_response(self, msg: str) -> None:
            """Of what is no HTTP. Where an answer is under way already, it ends there; the
            application, which may have heard of a head before, answers nobody any more.
            """
            begun = self.conn.our_state is h11.SEND_RESPONSE
            if begun or self.conn.our_state is h11.IDLE:
                said = encoded(Problem(f"{msg} Send HTTP/1.1").body())
                headers = [
                    (b"content-type", JSON),
                    (b"content-length", b"%d" % len(said)),
                    (b"connection", b"close"),
                ]
                head = h11.Response(status_code=400, headers=headers, reason=b"Bad Request")
                bare = begun and self.scope["method"] == "HEAD"
                for event in (head, h11.Data(data=b"" if bare else said), h11.EndOfMessage()):
                    self.transport.write(self.conn.send(event) or b"")
            if self.cycle is not None:
                self.cycle.disconnected = True
                self.cycle.message_event.set()
            self.transport.close()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._watch()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._watch()

        def connection_lost(self, exc: Exception | None) -> None:
            self._forget()
            if self._looks is not None:
                self._looks.cancel()
            super().connection_lost(exc)

        def _look(self, before: int) -> None:
            """Ends who has taken next to nothing since the last look, while an answer waits for it
            or the connection is to close: both wait for ever.
            """
            waits = self.flow.write_paused or self.transport.is_closing()
            left = self.transport.get_write_buffer_size() if waits else 0
            if left and left > before - LEAST_TAKEN and before:
                self.transport.abort()
                return
            self._looks = self.loop.call_later(limits.write_s, self._look, left)

        def _watch(self) -> None:
            """A head is under way unless h11 has read one whole."""
            if self.conn.their_state is not h11.IDLE or self.transport.is_closing():
                self._forget()
            elif self._late is None and (self.cycle is None or self.conn.trailing_data[0]):
                self._late = self.loop.call_later(limits.head_s, self.transport.close)

        def _forget(self) -> None:
            if self._late is not None:
                self._late.cancel()
                self._late = None

    return Timed


def bound(host: str, port: int) -> socket.socket:
    """A socket that has its address and does not listen yet. Raises ConfigError."""
    try:
        family, kind, proto, _, where = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        made = socket.socket(family, kind, proto)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(where)
    except (OSError, UnicodeError) as error:
        raise ConfigError(
            f"--host {shown(host)} --port {port}: cannot be listened to ({error}); choose another"
        ) from error
    made.set_inheritable(True)
    return made


class _Server(uvicorn.Server):
    """Ends what runs before it waits for its answers: uvicorn waits first, and then tears them."""

    def __init__(self, config: uvicorn.Config, app: Application) -> None:
        super().__init__(config)
        self._app = app

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await asyncio.to_thread(self._app.worker.close)
        await super().shutdown(sockets)


def server(app: Application) -> uvicorn.Server:
    limits = app.limits
    kind: Any = protocol(limits)
    config = uvicorn.Config(
        app,  # type: ignore[arg-type]  # it is called as well
        http=kind,
        ws="none",
        lifespan="on",
        loop="asyncio",
        log_level="warning",
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_S,
        timeout_graceful_shutdown=GRACE_S,
        h11_max_incomplete_event_size=limits.head_bytes,
    )
    return _Server(config, app)
