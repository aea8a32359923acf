"""Studies of kind agent: how long a job of many model calls and tool calls takes, and what decides
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from twin.reading import SOME, FieldError, Reader, quantity
from twin.study.fields import MOST_NUMBER, Count, Head
from twin.study.outcome import Bars, Cell, Column, Lines, Outcome, Part, Series, Shown, Table
from twin.study.runner import Runner
from twin.units import format_quantity

from .speeds import Engine, Entry, Speed, engines_of, speeds

CURVE = (30.0, 100.0, 300.0, 1000.0, 3000.0, 10_000.0, 30_000.0)  # tokens per second


@dataclass(frozen=True, slots=True)
class Tools:
    """What a tool call takes on average, and how anybody knows."""

    name: str
    call_s: Annotated[float, quantity(0.0, MOST_NUMBER)]
    source: str


@dataclass(frozen=True, slots=True)
class Job:
    """Steps of one model call each, whose tokens come one after the other; the tools of a step
    follow its tokens.
    """

    tokens: Count
    tokens_per_step: Annotated[float, Meta(ge=1, le=MOST_NUMBER)]
    calls_per_step: Annotated[float, Meta(ge=0, le=MOST_NUMBER)]
    source: str

    @property
    def steps(self) -> float:
        return self.tokens / self.tokens_per_step

    def tool_s(self, tools: Tools) -> float:
        return self.steps * self.calls_per_step * tools.call_s

    def wall_s(self, tokens_per_s: float, tools: Tools) -> float:
        return self.tokens / tokens_per_s + self.tool_s(tools)

    def balance(self, tools: Tools) -> float | None:
        """Tokens per second at which generation takes as long as the tools; above it the tools
        decide. None without tool time.
        """
        return self.tokens / self.tool_s(tools) if self.tool_s(tools) else None


@dataclass(frozen=True, slots=True)
class Agent:
    job: Job
    tools: tuple[Tools, ...]
    engines: tuple[Engine, ...]

    def run(self, runner: Runner) -> Outcome:
        found = speeds(self.engines, runner)
        known = [speed for speed in found if speed.tokens_per_s]
        headline = []
        for tools in self.tools:
            balance = self.job.balance(tools)
            if balance:
                headline.append(
                    (
                        f"{balance:,.0f}",
                        f"tokens/s from which tools take longer than generation: {tools.name}",
                    )
                )
        notes = [
            f"The job: {self.job.steps:.0f} steps with {self.job.calls_per_step:g} tool calls "
            f"each ({self.job.source}).",
            "Left out: reading prompts and tool results, waiting for a person, tools that run "
            "next to the model, other users of the engine.",
            *(
                f"{tools.name}: {format_quantity(tools.call_s, 's')} a call ({tools.source})."
                for tools in self.tools
            ),
            *(f"{speed.engine.name}: {speed.problem}" for speed in found if speed.problem),
        ]
        return Outcome(
            (self._wall_clock(known), self._curve(), self._sources(found)),
            tuple(headline),
            tuple(notes),
        )

    def _wall_clock(self, known: Sequence[Speed]) -> Part:
        columns = [
            Column("engine", Shown.TEXT),
            Column("tokens/s"),
            Column("kind", Shown.CHIP),
            Column("generation", Shown.QUANTITY, "s"),
        ]
        for tools in self.tools:
            columns += [
                Column(f"wall clock, {tools.name}", Shown.QUANTITY, "s"),
                Column(f"generation's share, {tools.name}", Shown.PERCENT),
            ]
        rows: list[tuple[Cell, ...]] = []
        for speed in known:
            assert speed.tokens_per_s is not None
            cells: list[Cell] = [
                speed.engine.name,
                speed.tokens_per_s,
                speed.kind,
                self.job.tokens / speed.tokens_per_s,
            ]
            for tools in self.tools:
                wall = self.job.wall_s(speed.tokens_per_s, tools)
                cells += [wall, self.job.tokens / speed.tokens_per_s / wall]
            rows.append(tuple(cells))
        names = tuple(speed.engine.name for speed in known)
        first = self.tools[0]
        generation = tuple(
            self.job.tokens / speed.tokens_per_s for speed in known if speed.tokens_per_s
        )
        series = (
            Series("generation", generation),
            Series(f"tools: {first.name}", (self.job.tool_s(first),) * len(known)),
        )
        return Part(
            f"A job of {self.job.tokens:,} tokens",
            "Generation shrinks with the engine's speed; the time of the tools stays. Where it is "
            "the longer bar, a faster engine no longer helps much.",
            (Bars(names, series, "seconds", stacked=True),),
            (Table("wall-clock", tuple(columns), tuple(rows)),),
        )

    def _curve(self) -> Part:
        series = tuple(
            Series(tools.name, tuple(self.job.wall_s(speed, tools) for speed in CURVE))
            for tools in self.tools
        )
        columns = (
            Column("tools", Shown.TEXT),
            Column("tool time", Shown.QUANTITY, "s"),
            Column("balance, tokens/s"),
            Column("most that any engine gains over 100 tokens/s"),
        )
        rows = []
        for tools in self.tools:
            tool_s = self.job.tool_s(tools)
            rows.append(
                (
                    tools.name,
                    tool_s,
                    self.job.balance(tools),
                    self.job.wall_s(100.0, tools) / tool_s if tool_s else None,
                )
            )
        return Part(
            "Where generation stops being the bottleneck",
            "Each line bends where generation takes as long as the tools.",
            (
                Lines(
                    CURVE,
                    series,
                    "tokens/s of the engine",
                    "wall clock, seconds",
                    log_x=True,
                    log_y=True,
                ),
            ),
            (Table("balance", columns, tuple(rows)),),
        )

    def _sources(self, found: Sequence[Speed]) -> Part:
        columns = (
            Column("engine", Shown.TEXT),
            Column("tokens/s"),
            Column("kind", Shown.CHIP),
            Column("source", Shown.TEXT),
        )
        rows = tuple((s.engine.name, s.tokens_per_s, s.kind, s.problem or s.source) for s in found)
        return Part(
            "Where the speeds come from",
            tables=(Table("speeds", columns, rows, terminal=False),),
            long=True,
        )


@dataclass(frozen=True, kw_only=True)
class File(Head):
    """A study file of this kind."""

    job: Job
    tools: Annotated[tuple[Tools, ...], SOME]
    context: Count
    engines: Annotated[tuple[Entry, ...], SOME]

    def __post_init__(self) -> None:
        if self.job.tokens_per_step > self.job.tokens:
            raise FieldError(
                "job.tokens_per_step",
                f"{self.job.tokens_per_step:g} exceeds the job's {self.job.tokens} tokens; a job "
                "has at least one step",
            )

    def asks(self, reader: Reader, folder: Path) -> Agent:
        return Agent(self.job, self.tools, engines_of(self.engines, self.context, reader))
