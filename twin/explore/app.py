"""The explorer's routes, as an ASGI application."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote

from twin.errors import TwinError
from twin.explore import answers, tables
from twin.explore.answers import Answer, Part
from twin.explore.choices import choices, hardware
from twin.explore.desk import Desk, Job
from twin.explore.pareto import pareto
from twin.explore.reports import report, reports
from twin.explore.rows import Rows
from twin.explore.view import MOST_QUERY, View, read_view
from twin.files import csv_text
from twin.server.application import Application, Route, page, whole_page
from twin.server.exchange import Exchange, Gone
from twin.server.guard import Guard
from twin.server.limits import Limits
from twin.server.problem import Problem
from twin.server.replies import PING, encoded
from twin.text import shown

PAGE = Path(__file__).with_name("page")
# A report's scripts draw its figures; they reach neither this server nor anything else.
REPORT_POLICY = (
    b"default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; "
    b"img-src data: blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    b"sandbox allow-scripts allow-downloads"
)
CSV = b"text/csv; charset=utf-8"
REPORT = "/reports/"
TABLE, NODE = "table", "node"  # parameters in addition to those of a view


@dataclass(eq=False)
class App(Application):
    """All that a running explorer is made of. The caller owns the desk and closes it."""

    worker: Desk
    guard: Guard
    limits: Limits
    own: Mapping[str, str]  # nodes of the user's files, by the name that pages give them
    folder: Path  # of reports

    @property
    def rows(self) -> Rows:
        return self.worker.rows

    @cached_property
    def _routes(self) -> dict[str, Route]:
        return {
            "/": self._page,
            "/health": self._health,
            "/choices": self._choices,
            "/hardware": self._hardware,
            "/commands": self._commands,
            "/answer": self._answer,
            "/sweep": self._sweep,
            "/stages": self._stages,
            "/pareto": self._pareto,
            "/csv": self._csv,
            "/reports": self._reports,
        }

    async def _failed(self, exchange: Exchange, error: Exception) -> None:
        if isinstance(error, TwinError):
            await exchange.refuse(Problem(str(error)))
        else:
            await super()._failed(exchange, error)

    def _route(self, exchange: Exchange) -> Route:
        path = exchange.path
        found = self._report if path.startswith(REPORT) else self._routes.get(path)
        if found is None:
            known = ", ".join(self._routes)
            raise Problem(f"{shown(path)}: no such path; there are {known}", status=404)
        if exchange.method != "GET":
            exchange.extra.append((b"allow", b"GET"))
            raise Problem(f"{shown(path)} takes GET", status=405)
        return found

    # ---- what is there -------------------------------------------------------------------------

    async def _page(self, exchange: Exchange) -> None:
        await page(exchange, whole_page(PAGE))

    async def _health(self, exchange: Exchange) -> None:
        await exchange.json({"status": "ok"})

    async def _choices(self, exchange: Exchange) -> None:
        await exchange.json(await asyncio.to_thread(choices, self.own))

    async def _hardware(self, exchange: Exchange) -> None:
        name = _parameter(exchange, NODE)
        if name not in self.own and ("/" in name or name.endswith((".yaml", ".yml"))):
            raise Problem(f"{shown(name)}: no node of that name", param=NODE)
        await exchange.json(await asyncio.to_thread(hardware, self.own.get(name, name)))

    async def _reports(self, exchange: Exchange) -> None:
        found = await asyncio.to_thread(reports, self.folder)
        await exchange.json({"folder": str(self.folder), "reports": found})

    async def _report(self, exchange: Exchange) -> None:
        name = unquote(exchange.path.removeprefix(REPORT)).rstrip("/")
        body = await asyncio.to_thread(report, self.folder, name)
        await page(exchange, body, REPORT_POLICY)

    # ---- views ---------------------------------------------------------------------------------

    def _view(self, exchange: Exchange, without: str = "") -> View:
        query = exchange.query
        if without:
            pairs = [pair for pair in query.split(b"&") if not pair.startswith(without.encode())]
            query = b"&".join(pairs)
        return read_view(query, self.own)

    async def _commands(self, exchange: Exchange) -> None:
        view = self._view(exchange)
        data = {"commands": list(view.commands())}
        data["ladders"] = [case.ladder_command() for case in view.cases]
        await exchange.json(data)

    async def _answer(self, exchange: Exchange) -> None:
        view = self._view(exchange)
        if len(view.cases) != 1:
            raise Problem(f"{len(view.cases)} cases: /answer takes one at a time", param="case")
        await self._stream(exchange, lambda: answers.case(view.cases[0], view.usd, self.rows))

    async def _sweep(self, exchange: Exchange) -> None:
        view = self._view(exchange)
        if not view.sweeps:
            raise Problem("no sweep in the address; add sweep=context=128,1024", param="sweep")
        await self._stream(exchange, lambda: answers.swept(view, self.rows))

    async def _stages(self, exchange: Exchange) -> None:
        view = self._view(exchange)
        await self._stream(exchange, lambda: answers.stages(view))

    async def _pareto(self, exchange: Exchange) -> None:
        view = self._view(exchange)
        await self._stream(exchange, lambda: pareto(view.cases[0], self.rows))

    async def _csv(self, exchange: Exchange) -> None:
        name = _parameter(exchange, TABLE)
        view = self._view(exchange, without=f"{TABLE}=")
        begin = tables.answer_for  # refuses an unknown table before anything is computed
        if name not in tables.TABLES:
            begin(view, name, self.rows)
        parts = await self._whole(exchange, lambda: begin(view, name, self.rows))
        header, lines = tables.csv_of(view, name, parts)
        disposition = f'attachment; filename="monotwin-{name}.csv"'.encode()
        exchange.extra.append((b"content-disposition", disposition))
        await exchange.answer(200, csv_text([str(word) for word in header], lines).encode(), CSV)

    # ---- work ----------------------------------------------------------------------------------

    async def _stream(self, exchange: Exchange, begin: Callable[[], Answer]) -> None:
        """Server-sent events: parts as they come; what is wrong with the question is a status."""
        job = self.worker.begin(exchange.client, begin)
        leaving = asyncio.create_task(exchange.gone())
        leaving.add_done_callback(lambda _: self.worker.leave(job))
        try:
            while True:
                said = await self._next(exchange, job)
                if said is None:
                    break
                if isinstance(said, Problem):
                    if not exchange.begun:
                        raise said
                    await exchange.stream(_event(said.body() | {"part": "failed"}))
                    break
                await exchange.stream(_event(said))
            await exchange.stream(b"data: [DONE]\n\n")
            await exchange.end_stream()
        finally:
            self.worker.leave(job)
            leaving.cancel()

    async def _next(self, exchange: Exchange, job: Job) -> Part | Problem | None:
        """Comments keep the connection while another question has its turn."""
        while True:
            try:
                return await asyncio.wait_for(job.said.get(), self.limits.ping_s)
            except TimeoutError:
                await exchange.stream(PING)

    async def _whole(self, exchange: Exchange, begin: Callable[[], Answer]) -> list[Part]:
        job = self.worker.begin(exchange.client, begin)
        leaving = asyncio.create_task(exchange.gone())
        leaving.add_done_callback(lambda _: job.tell(Problem("the client left", status=499)))
        parts: list[Part] = []
        try:
            while (said := await job.said.get()) is not None:
                if isinstance(said, Problem):
                    raise Gone if said.status == 499 else said
                if said["part"] != "progress":
                    parts.append(said)
        finally:
            self.worker.leave(job)
            leaving.cancel()
        return parts


def _event(part: Mapping[str, Any]) -> bytes:
    return b"data: " + encoded(part) + b"\n\n"


def _parameter(exchange: Exchange, name: str) -> str:
    """Exactly one of that name. Raises Problem."""
    if len(exchange.query) > MOST_QUERY:
        raise Problem(f"an address of {len(exchange.query)} characters; at most {MOST_QUERY}")
    found = parse_qs(exchange.query.decode("latin-1")).get(name, [])
    if len(found) != 1:
        raise Problem(f"give one {name}=, not {len(found)}", param=name)
    return found[0]
