"""Who may send requests: names of this server, origins of pages, and the key."""

from __future__ import annotations

import hmac
import ipaddress
import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from twin.errors import ConfigError
from twin.server.exchange import Exchange
from twin.server.problem import Problem
from twin.text import shown

LEAST_KEY = 16  # characters
OPEN_PATHS = frozenset({"/", "/health"})  # without the key: they tell nothing of anybody
_HOST = re.compile(r"[a-z0-9_]([a-z0-9_.-]{0,251}[a-z0-9_])?")
# What OpenAI's client for JavaScript sends from a page, too: x-stainless-os and others.
_HEADERS = ("authorization", "content-type", "openai-organization", "openai-project")
_STAINLESS = re.compile(r"x-stainless-[a-z-]{1,40}")
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})


def loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True, slots=True)
class Guard:
    """`names`: hosts under which it may be called, None for any (a key then stands in)."""

    key: str | None
    origins: frozenset[str]
    names: frozenset[str] | None

    def allow(self, exchange: Exchange) -> None:
        """Raises Problem. Adds what browsers require to the answer's headers."""
        # A page may make its own name point to this computer: its requests carry that name.
        if self.names is not None and exchange.host not in self.names:
            raise Problem(
                f"this server is not called {shown(exchange.host)}; name it with --allow-host",
                status=403,
                code="host",
            )
        self._origin(exchange)
        if (
            self.key is not None
            and exchange.path not in OPEN_PATHS
            and exchange.method != "OPTIONS"
        ):
            given = exchange.headers.get("authorization", "")
            kind, _, key = given.partition(" ")
            right = hmac.compare_digest(key.strip().encode(), self.key.encode())
            if kind.lower() != "bearer" or not right:
                raise Problem(
                    "this server requires a key: send the header Authorization: Bearer KEY",
                    status=401,
                    code="invalid_api_key",
                )

    def _origin(self, exchange: Exchange) -> None:
        origin = exchange.headers.get("origin")
        if origin is None or _same(origin, exchange.headers.get("host", "")):
            return
        if origin not in self.origins:
            raise Problem(
                f"pages of {shown(origin)} may not use this server; allow it with --cors-origin",
                status=403,
                code="origin",
            )
        exchange.extra += [
            (b"access-control-allow-origin", origin.encode("latin-1")),
            (b"access-control-expose-headers", b"retry-after"),
            (b"vary", b"Origin"),
        ]
        if exchange.method == "OPTIONS":
            wanted = exchange.headers.get("access-control-request-headers", "").lower()
            more = [one for one in wanted.replace(",", " ").split() if _STAINLESS.fullmatch(one)]
            exchange.extra += [
                (b"access-control-allow-methods", b"GET, POST"),
                (b"access-control-allow-headers", ", ".join([*_HEADERS, *more]).encode()),
                (b"access-control-max-age", b"600"),
            ]


def make_guard(host: str, key: str | None, origins: list[str], names: list[str]) -> Guard:
    """Raises ConfigError for a server that anybody in the network could use, and wrong origins."""
    if key is not None and (len(key) < LEAST_KEY or not key.isascii() or not key.isprintable()):
        raise ConfigError(
            f"the API key has {len(key)} characters: at least {LEAST_KEY}, printable ASCII; "
            "make one with `openssl rand -hex 24`"
        )
    if key is None and not loopback(host):
        raise ConfigError(
            f"--host {shown(host)} is reachable from outside: give a key with --api-key-file FILE "
            "or in MONOTWIN_API_KEY, or keep the default 127.0.0.1"
        )
    allowed = frozenset(_origin(origin) for origin in origins)
    called = frozenset(_name(name) for name in names)
    closed = loopback(host) or bool(names)
    return Guard(key, allowed, _LOOPBACK | {host.lower()} | called if closed else None)


def _origin(text: str) -> str:
    """As browsers write it."""
    try:
        parts = urlsplit(text.lower())
        plain = parts.hostname and parts.port != 0 and "@" not in parts.netloc
    except ValueError:  # of a port or an address
        parts, plain = urlsplit(""), False
    whole = f"{parts.scheme}://{parts.netloc}"
    if not plain or not text.isascii() or parts.scheme not in ("http", "https"):
        whole = ""
    if not whole or whole != text.lower():
        raise ConfigError(
            f"--cors-origin {shown(text)}: write scheme and host such as "
            "https://chat.example.org, without a path"
        )
    return whole


def _name(text: str) -> str:
    """A host's name or address as requests carry it."""
    name = text.lower()
    try:
        return str(ipaddress.ip_address(name))
    except ValueError:
        if _HOST.fullmatch(name):
            return name
        raise ConfigError(
            f"--allow-host {shown(text)}: write a name such as chat.example.org, without scheme "
            "and port"
        ) from None


def _same(origin: str, host: str) -> bool:
    try:
        parts = urlsplit(origin)
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and parts.netloc == host
