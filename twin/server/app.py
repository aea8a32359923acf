"""The server's routes, as an ASGI application."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from twin.engine.logprobs import Spelling
from twin.server.application import Application, Route, page, whole_page
from twin.server.exchange import Exchange, Gone
from twin.server.expected import Expectation
from twin.server.guard import Guard
from twin.server.job import Ended, Failed, Job, Text
from twin.server.limits import Limits
from twin.server.metrics import Metrics
from twin.server.problem import Problem
from twin.server.replies import PING, Reply
from twin.server.responses import ResponsesReply, chat_of
from twin.server.served import Served, Work, turn_of
from twin.server.wire import Chat, Completion, Detokenize, Responses, Tokenize, read
from twin.server.worker import Worker
from twin.text import shown

Words = TypeVar("Words")
Made = TypeVar("Made")
PAGE = Path(__file__).with_name("page")


@dataclass(eq=False)
class App(Application):
    """All that a running server is made of. The caller owns the worker and closes it."""

    served: Served
    worker: Worker
    metrics: Metrics
    predicted: Expectation
    guard: Guard
    version: str
    limits: Limits
    held: Callable[[], int]  # positions of the context in use
    facts: dict[str, Any]  # of the model and where it runs, for the page
    created: int

    @cached_property
    def _spelling(self) -> Spelling:
        return Spelling(self.served.tokenizer)

    @cached_property
    def _routes(self) -> dict[tuple[str, str], Route]:
        return {
            ("GET", "/"): self._page,
            ("GET", "/health"): self._health,
            ("GET", "/metrics"): self._metrics,
            ("GET", "/version"): self._version,
            ("GET", "/v1/models"): self._models,
            ("GET", f"/v1/models/{self.served.name}"): self._model,
            ("GET", "/twin"): self._twin,
            ("POST", "/v1/chat/completions"): self._chat,
            ("POST", "/v1/completions"): self._completions,
            ("POST", "/v1/responses"): self._responses,
            ("POST", "/tokenize"): self._tokenize,
            ("POST", "/detokenize"): self._detokenize,
        }

    def _refused(self) -> None:
        self.metrics.refused += 1

    def _route(self, exchange: Exchange) -> Route:
        found = self._routes.get((exchange.method, exchange.path))
        if found is not None:
            return found
        methods = [method for method, path in self._routes if path == exchange.path]
        if methods and exchange.method == "OPTIONS":
            return self._nothing
        if methods:
            exchange.extra.append((b"allow", ", ".join(methods).encode()))
            raise Problem(f"{exchange.path} takes {methods[0]}", status=405)
        raise Problem(f"{shown(exchange.path)}: no such path; see /v1/models", status=404)

    # ---- what describes the server -------------------------------------------------------------

    async def _nothing(self, exchange: Exchange) -> None:
        await exchange.answer(204, b"")

    async def _page(self, exchange: Exchange) -> None:
        await page(exchange, whole_page(PAGE))

    async def _health(self, exchange: Exchange) -> None:
        if trouble := self.worker.trouble(self.limits.stall_s):
            raise Problem(trouble, status=503, code="engine")
        await exchange.json({"status": "ok"})

    async def _metrics(self, exchange: Exchange) -> None:
        text = self.metrics.text(
            running=self.worker.running,
            waiting=self.worker.waiting,
            kv_usage=self.held() / self.served.context,
        )
        await exchange.answer(200, text.encode(), b"text/plain; version=0.0.4; charset=utf-8")

    async def _version(self, exchange: Exchange) -> None:
        await exchange.json({"version": self.version})

    async def _models(self, exchange: Exchange) -> None:
        await exchange.json({"object": "list", "data": [self._about()]})

    async def _model(self, exchange: Exchange) -> None:
        await exchange.json(self._about())

    def _about(self) -> dict[str, Any]:
        return {
            "id": self.served.name,
            "object": "model",
            "created": self.created,
            "owned_by": "monotwin",
            "max_model_len": self.served.context,
        }

    async def _twin(self, exchange: Exchange) -> None:
        """Ours: what the page shows of the model and of the twin."""
        served = self.served
        said = {
            "model": served.name,
            "context": served.context,
            "chat": served.conversation is not None,
            "greedy": served.greedy,
            "waiting": self.worker.waiting,
            "running": self.worker.running,
        }
        await exchange.json(said | self.facts | {"twin": self.predicted.json()})

    # ---- words ---------------------------------------------------------------------------------

    async def _elsewhere(self, body: bytes, work: Callable[[Words], Made], request: Words) -> Made:
        """Work on a request's words in a thread. Long texts take turns in one of their own: no
        stream and no short request waits for them. It has the priority of all: one that gives way
        to the engine's would keep Python's lock for as long as it waits for a core.
        """
        lane = self._lane if len(body) >= self.limits.long_bytes else None
        return await asyncio.get_running_loop().run_in_executor(lane, work, request)

    @cached_property
    def _lane(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1, "long texts")

    async def _tokenize(self, exchange: Exchange) -> None:
        body = await exchange.body()
        request = read(body, Tokenize)
        self.served.check_name(request.model)
        if (request.prompt is None) == (request.messages is None):
            raise Problem("send one of prompt and messages", param="prompt")
        tokens = await self._elsewhere(body, self._tokens, request)
        await exchange.json(
            {"count": len(tokens), "max_model_len": self.served.context, "tokens": tokens}
        )

    def _tokens(self, request: Tokenize) -> list[int]:
        if request.messages is not None:
            return self.served.chat_prompt(request.messages, turn_of(request))
        return self.served.encode(
            request.prompt or "", special=request.add_special_tokens is not False
        )

    async def _detokenize(self, exchange: Exchange) -> None:
        body = await exchange.body()
        request = read(body, Detokenize)
        self.served.check_name(request.model)
        if len(request.tokens) > self.limits.tokens:
            raise Problem(
                f"tokens: {len(request.tokens)} of them; at most {self.limits.tokens} at once",
                param="tokens",
            )
        text = await self._elsewhere(body, self._spelt, request.tokens)
        await exchange.json({"prompt": text})

    def _spelt(self, tokens: list[int]) -> str:
        return self.served.tokenizer.spelling(self.served.check_tokens("tokens", tokens))

    # ---- generation ----------------------------------------------------------------------------

    async def _chat(self, exchange: Exchange) -> None:
        body = await exchange.body()
        request = read(body, Chat)
        work = await self._elsewhere(body, self.served.chat_work, request)
        await self._generate(exchange, request, work, chat=True)

    async def _completions(self, exchange: Exchange) -> None:
        body = await exchange.body()
        request = read(body, Completion)
        work = await self._elsewhere(body, self.served.completion_work, request)
        await self._generate(exchange, request, work, chat=False)

    async def _generate(
        self, exchange: Exchange, request: Chat | Completion, work: Work, *, chat: bool
    ) -> None:
        options = request.stream_options
        if options is not None and not request.stream:
            raise Problem("stream_options needs stream=true", param="stream_options")
        if options is not None and options.include_obfuscation:
            raise Problem(
                "stream_options.include_obfuscation=true is not supported; leave it out",
                param="stream_options.include_obfuscation",
                code="unsupported_parameter",
            )
        reply = Reply(
            chat=chat,
            **self._of(work),
            usage_chunk=options is not None and bool(options.include_usage),
            usage_always=options is not None
            and bool(options.include_usage and options.continuous_usage_stats),
            step_times=bool(request.step_times),
            spelling=self._spelling,
        )
        await self._run(exchange, work, reply, stream=bool(request.stream))

    async def _responses(self, exchange: Exchange) -> None:
        body = await exchange.body()
        request = read(body, Responses)
        work = await self._elsewhere(body, self._responses_work, request)
        reply = ResponsesReply(chat=True, **self._of(work), body=request, spelling=self._spelling)
        await self._run(exchange, work, reply, stream=bool(request.stream))

    def _responses_work(self, request: Responses) -> Work:
        return self.served.chat_work(chat_of(request))

    def _of(self, work: Work) -> dict[str, Any]:
        """What all answers say or need."""
        return {
            "model": self.served.name,
            "fingerprint": f"monotwin-{self.version}",
            "requests": work.requests,
            "parsers": work.parsers,
            "reasoning": work.reasoning,
        }

    async def _run(self, exchange: Exchange, work: Work, reply: Reply, *, stream: bool) -> None:
        job = Job(work.requests, asyncio.get_running_loop())
        self.worker.submit(job)
        gone = asyncio.create_task(exchange.gone())
        gone.add_done_callback(lambda _: self.worker.cancel(job))
        try:
            await (self._streamed if stream else self._whole)(exchange, job, reply)
        finally:
            self.worker.cancel(job)  # does nothing to a job that has ended
            gone.cancel()

    async def _whole(self, exchange: Exchange, job: Job, reply: Reply) -> None:
        async for batch in job.batches(self.limits.gap_s, self.limits.ping_s):
            for event in batch:
                if isinstance(event, Failed):
                    raise event.problem
                if isinstance(event, Ended):
                    reply.ended.append(event)
                else:
                    reply.hear(event)
        if len(reply.ended) < len(reply.requests):
            raise Gone
        await exchange.answer(200, reply.whole(job))

    async def _streamed(self, exchange: Exchange, job: Job, reply: Reply) -> None:
        """The head goes with the first token, or after a while: before, a failure is a status."""
        failed = False
        async for batch in job.batches(self.limits.gap_s, self.limits.ping_s):
            parts = [] if batch else [PING]
            texts: list[Text] = []
            for event in batch:
                if isinstance(event, Text):
                    texts.append(event)
                    continue
                if isinstance(event, Ended):
                    parts.append(reply.text_chunks(texts) + reply.end_chunk(event))
                    reply.ended.append(event)
                else:
                    if not exchange.begun and not texts and not parts:
                        raise event.problem
                    parts.append(reply.text_chunks(texts) + reply.failed_chunk(event))
                    failed = True
                texts = []
            await exchange.stream(b"".join([*parts, reply.text_chunks(texts)]))
        if not failed and len(reply.ended) < len(reply.requests):
            raise Gone
        if not failed:
            await exchange.stream(reply.last_chunks(job))
        await exchange.end_stream()
