"""Agents of others complete a task through `twin serve`: loops.py BASE_URL MODEL.

Each has a tool that opens one of four boxes, and is done once it has opened the one with the key:
a model that knows nothing gets there, as long as every call is one of the tool's, and the loop of
calls and results holds. Run it in an environment with openai-agents or pydantic-ai-slim[openai];
what is not installed is left out, and named.

    twin serve MODEL --served-name tiny &
    python studies/structured/loops.py http://127.0.0.1:8000/v1 tiny
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any, Literal

Box = Literal["red", "green", "blue", "grey"]
KEY = "blue"
MOST = 40  # turns: four boxes are not all opened in so many once in 100,000 runs
TASK = "Open boxes until you find the key."


@dataclass
class Room:
    """What an agent does, and what it sees."""

    opened: list[str] = field(default_factory=list)

    def look(self, box: str) -> str:
        self.opened.append(box)
        return "the key" if box == KEY else "nothing"

    @property
    def done(self) -> bool:
        return self.opened[-1:] == [KEY]


async def openai_agents(base: str, model: str, *, responses: bool) -> Room:
    """OpenAI's own, by either of its APIs."""
    from agents import (
        Agent,
        ModelSettings,
        OpenAIChatCompletionsModel,
        OpenAIResponsesModel,
        Runner,
        ToolsToFinalOutputResult,
        function_tool,
        set_tracing_disabled,
    )
    from openai import AsyncOpenAI

    set_tracing_disabled(disabled=True)
    room = Room()

    @function_tool
    def open_box(box: Box) -> str:
        """Open a box."""
        return room.look(box)

    def behaviour(_: Any, __: Any) -> Any:
        return ToolsToFinalOutputResult(is_final_output=room.done, final_output="done")

    kind = OpenAIResponsesModel if responses else OpenAIChatCompletionsModel
    agent = Agent(
        name="opener",
        instructions="Use the tool.",
        model=kind(model, AsyncOpenAI(base_url=base, api_key="x")),
        model_settings=ModelSettings(tool_choice="required", temperature=1, max_tokens=200),
        reset_tool_choice=False,
        tools=[open_box],
        tool_use_behavior=behaviour,
    )
    found = await Runner.run(agent, TASK, max_turns=MOST)
    assert found.final_output == "done"
    return room


async def pydantic_ai(base: str, model: str, *, streamed: bool) -> Room:
    """The answer is a call of the output's tool; one of a wrong box is made again."""
    from pydantic import BaseModel
    from pydantic_ai import Agent, ModelRetry
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    class Choice(BaseModel):
        box: Box

    room = Room()
    agent = Agent(
        OpenAIChatModel(model, provider=OpenAIProvider(base_url=base, api_key="x")),
        output_type=Choice,
        instructions="Use the tool.",
        retries=MOST,
        model_settings={"temperature": 1, "max_tokens": 200},
    )

    @agent.output_validator
    def right(found: Choice) -> Choice:
        if room.look(found.box) == "nothing":
            raise ModelRetry(f"{found.box} holds nothing")
        return found

    if streamed:
        async with agent.iter(TASK) as run:
            async for _ in run:
                pass
        assert run.result is not None
    else:
        await agent.run(TASK)
    return room


AGENTS: dict[str, tuple[str, Callable[[str, str], Awaitable[Room]]]] = {
    "openai-agents, /v1/responses": (
        "agents",
        lambda base, model: openai_agents(base, model, responses=True),
    ),
    "openai-agents, chat completions": (
        "agents",
        lambda base, model: openai_agents(base, model, responses=False),
    ),
    "pydantic-ai": ("pydantic_ai", lambda base, model: pydantic_ai(base, model, streamed=False)),
    "pydantic-ai, node by node": (
        "pydantic_ai",
        lambda base, model: pydantic_ai(base, model, streamed=True),
    ),
}


def main(base: str, model: str) -> int:
    failed = 0
    for name, (package, run) in AGENTS.items():
        if find_spec(package) is None:
            print(f"{name}: {package} is not installed here")
            continue
        try:
            room = asyncio.run(run(base, model))  # type: ignore[arg-type]
            print(f"{name}: {'done' if room.done else 'NOT done'} after {', '.join(room.opened)}")
            failed += not room.done
        except Exception as error:
            print(f"{name}: FAILED: {type(error).__name__}: {str(error)[:300]}")
            failed += 1
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]))
