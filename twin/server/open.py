"""A server from what a command line says: a model, an engine, the twin."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from twin.engine.opening import Show, Source, open_session, plan_served
from twin.engine.session import Session
from twin.errors import ConfigError
from twin.hardware.types import Node
from twin.plan.types import Plan
from twin.server.app import App
from twin.server.expected import Expectation, expect
from twin.server.guard import Guard
from twin.server.limits import Limits
from twin.server.metrics import Metrics
from twin.server.served import Served, served
from twin.server.worker import Worker
from twin.text import shown


@contextmanager
def opened(
    source: Source,
    place: Path,
    node: Node,
    chosen: Mapping[str, Any],
    show: Show,
    *,
    greedy: bool,
    name: str = "",
    template: Path | None = None,
    values: Mapping[str, Any] | None = None,
    reuse: bool = True,
) -> Iterator[tuple[Served, Session, Plan]]:
    """The model at a place and its engine; both are closed at the end."""
    if source.tokenizer is None:
        raise ConfigError(f"{shown(place)}: has no tokenizer, and what is served is text")
    plan = plan_served(source, node, chosen, greedy=greedy)
    model = served(source, plan, name=name, template=template, values=values, reuse=reuse)
    try:
        with open_session(node, plan, source, show) as session:
            yield replace(model, logits=session.gives_logits), session, plan
    finally:
        if model.conversation is not None:
            model.conversation.template.close()


def make_app(
    model: Served, session: Session, plan: Plan, node: Node, guard: Guard, limits: Limits
) -> App:
    """Starts the worker, which the application closes when it has to shut down."""
    predicted = Expectation()
    metrics = Metrics(model.name, predicted)
    if not model.greedy:
        model.grammars.prepare()
    worker = Worker(session, model.tokenizer, metrics, waiting=limits.waiting)
    return App(
        served=model,
        worker=worker,
        metrics=metrics,
        predicted=predicted,
        guard=guard,
        version=_version(),
        limits=limits,
        held=lambda: session.held,
        facts={"node": node.name, "weight_bytes": plan.weight_bytes()},
        created=int(time.time()),
    )


def watch(app: App, plan: Plan, node: Node, chosen: Mapping[str, Any]) -> None:
    """Lets the twin predict the plan's rate, in a thread."""
    spec = plan.spec
    assert spec is not None
    app.predicted.begin(lambda: expect(spec, node, plan, chosen))


def _version() -> str:
    try:
        return version("monotwin")
    except PackageNotFoundError:
        return "0"
