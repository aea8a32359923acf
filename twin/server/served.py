"""The model that a server serves, and how requests for it become work for the engine."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from twin.engine.bias import Bias
from twin.engine.generate import Request
from twin.engine.literal import Marked, Spellings
from twin.engine.opening import Source
from twin.engine.sampling import SamplingParams
from twin.engine.tokenizer import Tokenizer
from twin.engine.words import MOST_STOPS, read_template
from twin.errors import ConfigError, TwinError
from twin.plan.options import Sampling
from twin.plan.types import Plan
from twin.server.bias import adjustment, together
from twin.server.conversation import OWN, Conversation, Turn
from twin.server.formats import PLAIN
from twin.server.grammar import MOST_KEPT, Grammars, calls_grammar, schema_grammar, schema_of
from twin.server.limits import Limits
from twin.server.parsing import Parser
from twin.server.problem import Problem
from twin.server.schemas import check_schemas
from twin.server.template import Template
from twin.server.tools import Wanted, tools_of
from twin.server.wire import Chat, Completion, Message, Tokenize, Whole, prompts, within
from twin.text import shown

COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions
REASONING = (None, "auto", "deepseek", "none")  # llama.cpp's: the last one leaves it in the text
MOST_SEED = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Work:
    """A request as work for the engine, and how its answers are read."""

    requests: list[Request]
    parsers: tuple[Parser, ...] = ()  # one for each; none where all of an answer is content
    reasoning: bool = True  # it is sent


def turn_of(body: Chat | Tokenize) -> Turn:
    """Raises Problem."""
    turn = Turn(
        tools_of(body.tools),
        generate=body.add_generation_prompt is not False,
        resume=body.continue_final_message is True,
        more=body.chat_template_kwargs,
    )
    if isinstance(body, Tokenize):
        return turn
    tools = tools_of(body.tools, body.tool_choice, body.parallel_tool_calls)
    return replace(turn, tools=tools, effort=body.reasoning_effort)


@dataclass(frozen=True, slots=True)
class Served:
    """A model with its words. Every method raises Problem for what it does not take."""

    name: str
    tokenizer: Tokenizer
    vocab: int
    context: int  # positions
    greedy: bool  # the plan can do nothing else
    conversation: Conversation | None  # where there is a chat template
    ends: frozenset[int]  # tokens that end a text, the template's mark behind an answer among them
    grammars: Grammars
    spellings: Spellings
    reuse: bool = True  # keys and values of the last request, also for another client
    logits: bool = False  # the engine gives them while it runs
    limits: Limits = field(default_factory=Limits)

    # ---- words ---------------------------------------------------------------------------------

    def check_name(self, model: str | None) -> None:
        if model is not None and model != self.name:
            raise Problem(
                f"the model {shown(model)} is not served here; this server has {self.name}",
                status=404,
                param="model",
                code="model_not_found",
            )

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """`special`: with what the tokenizer puts before a text of its own."""
        return self._encoded(
            text, self.tokenizer.encode if special else self.tokenizer.encode_plain
        )

    def encode_chat(self, text: Marked) -> list[int]:
        """A conversation's, in which a client's spellings of special tokens are text."""
        return self._encoded(text.marked, lambda _: self.spellings.encode(text))

    def _encoded(self, text: str, encode: Callable[[str], list[int]]) -> list[int]:
        most = self.limits.text_per_token * self.context
        if len(text) > most:
            raise Problem(
                f"the prompt has {len(text)} characters; at most {most} can be tokenized for a "
                f"context of {self.context}; shorten it",
                code="context_length_exceeded",
            )
        try:
            return self.check_tokens("prompt", encode(text))
        except Problem:
            raise
        except TwinError as error:
            raise Problem(str(error), param="prompt") from error

    def check_tokens(self, name: str, tokens: list[int]) -> list[int]:
        # at the speed of C: a text of a megabyte has as many tokens, and streams wait meanwhile
        if tokens and (min(tokens) < 0 or max(tokens) >= self.vocab):
            wrong = next(token for token in tokens if not 0 <= token < self.vocab)
            raise Problem(
                f"{name}: token {wrong} is unknown, {self.name} knows 0 to {self.vocab - 1}",
                param=name,
            )
        return tokens

    def chat_text(self, messages: Sequence[Message], turn: Turn) -> Marked:
        """The prompt of a conversation."""
        if self.conversation is None:
            raise Problem(
                f"{self.name} has no chat template; use /v1/completions, or start the server with "
                "--chat-template FILE",
                code="no_chat_template",
            )
        return self.conversation.text(messages, turn, self.limits.text_per_token * self.context)

    def chat_prompt(self, messages: Sequence[Message], turn: Turn = Turn()) -> list[int]:  # noqa: B008  # frozen
        return self.encode_chat(self.chat_text(messages, turn))

    # ---- work ----------------------------------------------------------------------------------

    def chat_work(self, body: Chat) -> Work:
        self.check_name(body.model)
        most = body.max_completion_tokens
        if None not in (most, body.max_tokens) and most != body.max_tokens:
            raise Problem(
                "max_tokens and max_completion_tokens differ; send one of them",
                param="max_completion_tokens",
            )
        self._choices(body, 1)
        turn = turn_of(body)
        marked = self.chat_text(body.messages, turn)
        text, prompt = marked.plain, self.encode_chat(marked)
        parser = self._parser(body, text, turn)
        wanted = body.max_tokens if most is None else most
        grammar = self._grammar(body, turn, text)
        made = self._requests(body, [prompt], wanted, None, self._chat_logprobs(body), grammar)
        if parser is None:
            return Work(made)
        marks = frozenset(parser.format.marks())
        stops = (parser.format.close,) if parser.single and parser.format.close else ()
        made = [replace(one, named=marks, stop_texts=one.stop_texts + stops) for one in made]
        return Work(made, tuple(replace(parser) for _ in made), body.include_reasoning is not False)

    def _parser(self, body: Chat, text: str, turn: Turn) -> Parser | None:
        wanted = body.reasoning_format
        if wanted not in REASONING:
            allowed = ", ".join(map(str, REASONING[1:]))
            raise Problem(
                f"reasoning_format is {shown(wanted)}; allowed: {allowed}",
                param="reasoning_format",
            )
        assert self.conversation is not None
        calls = body.parse_tool_calls is not False
        return self.conversation.parser(text, turn, reasoning=wanted != "none", calls=calls)

    def completion_work(self, body: Completion) -> Work:
        self.check_name(body.model)
        prompts = self._prompts(body)
        most, logprobs = body.max_tokens, self._completion_logprobs(body)
        grammar = self._grammar(body)
        if most == 0 and body.echo:  # only the prompt, as who scores texts wants it
            made = self._requests(body, prompts, 1, COMPLETION_TOKENS, logprobs, grammar)
            return Work([replace(one, echo=True, max_tokens=0) for one in made])
        made = self._requests(body, prompts, most, COMPLETION_TOKENS, logprobs, grammar)
        return Work([replace(one, echo=True) for one in made] if body.echo else made)

    def _chat_logprobs(self, body: Chat) -> int | None:
        """How many of the most probable tokens come with each; None: not even its own."""
        if body.top_logprobs and not body.logprobs:
            raise Problem("top_logprobs needs logprobs=true", param="top_logprobs")
        if not body.logprobs:
            return None
        return self._reported("top_logprobs", body.top_logprobs or 0)

    def _completion_logprobs(self, body: Completion) -> int | None:
        if body.logprobs is None or body.logprobs is False:
            return None
        if body.logprobs is True:
            raise Problem(
                "logprobs=true: /v1/completions takes how many of the most probable tokens to "
                f"tell, 0 to {self.limits.logprobs}",
                param="logprobs",
            )
        return self._reported("logprobs", body.logprobs)

    def _reported(self, name: str, count: Whole) -> int:
        if not self.logits:
            raise Problem(
                "logprobs are not supported here: "
                + (
                    "on a GPU the kernel of a server that was started with --greedy keeps its "
                    "logits; leave them out, or start the server without --greedy"
                    if self.greedy
                    else "this kernel keeps its logits on the device while it runs; leave them "
                    "out, or serve from a CPU (1xhost)"
                ),
                param="logprobs",
                code="unsupported_parameter",
            )
        return within(name, count, 0, self.limits.logprobs) or 0

    def _prompts(self, body: Completion) -> list[list[int]]:
        prompt = prompts(body.prompt, self.limits.choices)
        self._choices(body, len(prompt))
        return [self.encode(one) if isinstance(one, str) else self._read(one) for one in prompt]

    def _read(self, prompt: list[int]) -> list[int]:
        """A prompt of tokens. One beyond the context is refused by its length alone."""
        return prompt if len(prompt) > self.context else self.check_tokens("prompt", prompt)

    def _choices(self, body: Chat | Completion, prompts: int) -> int:
        n = within("n", body.n, 1, self.limits.choices) or 1
        if not 1 <= n * prompts <= self.limits.choices:
            raise Problem(
                f"{prompts} prompts times n={n}: this server makes 1 to {self.limits.choices} "
                "choices for a request",
                param="prompt" if n == 1 else "n",
            )
        return n

    def _requests(
        self,
        body: Chat | Completion,
        prompts: list[list[int]],
        most: Whole | None,
        usual: int | None,
        logprobs: int | None,
        grammar: Callable[[], Bias] | None = None,
    ) -> list[Request]:
        n = self._choices(body, len(prompts))
        seed = within("seed", body.seed, -MOST_SEED - 1, MOST_SEED)
        seed = secrets.randbits(63) if seed is None else seed % 2**64
        stops = self._stops(body.stop)
        ends = frozenset() if body.ignore_eos else self.ends
        ends |= self._stop_tokens(body.stop_token_ids or [])
        bias = self._bias(body, grammar, ends)
        made: list[Request] = []
        for prompt in prompts:
            tokens = self._tokens(prompt, most, usual)
            for _ in range(n):
                sampling = self._sampling(body, (seed + len(made)) % 2**64)
                made.append(
                    Request(prompt, tokens, sampling, ends, stops, self.reuse, logprobs, bias=bias)
                )
        return made

    def _bias(
        self, body: Chat | Completion, grammar: Callable[[], Bias] | None, ends: frozenset[int]
    ) -> Callable[[], Bias] | None:
        least = within("min_tokens", body.min_tokens, 0) or 0
        if least and grammar is not None:
            raise Problem(
                "min_tokens and response_format or tool_choice=required say both when an answer "
                "ends; send one of them",
                param="min_tokens",
            )
        adjusted = adjustment(body, self.vocab, least, sorted(ends))
        made = together(grammar, adjusted)
        if made is not None and self.greedy:
            raise Problem(
                "a bias of logits, penalties, response_format and tool_choice=required need a "
                "sampler: this server was started with --greedy; leave them out",
                code="unsupported_parameter",
            )
        return made

    def _grammar(
        self, body: Chat | Completion, turn: Turn | None = None, prompt: str = ""
    ) -> Callable[[], Bias] | None:
        """What an answer has to be, where the request says so."""
        schema = schema_of(body.response_format)
        calls = turn is not None and turn.tools.callable and turn.tools.wanted is Wanted.REQUIRED
        if schema is None and not calls:
            return None
        form = PLAIN if self.conversation is None or turn is None else self.conversation.format
        thinking, param = form.begun(prompt), "tools" if calls else "response_format"
        check_schemas(turn.tools.schemas.values() if turn and calls else [schema or {}], param)
        try:
            if turn is not None and calls:
                text = calls_grammar(turn.tools, form, self.grammars.mark, thinking=thinking)
            else:
                assert schema is not None
                text = schema_grammar(schema, form, self.grammars.mark, thinking=thinking)
        except RecursionError as error:
            raise Problem(f"{param}: a schema is nested too deeply", param=param) from error
        matcher = self.grammars.matcher(text, param)
        return lambda: self.grammars.allowed(matcher)

    def _tokens(self, prompt: list[int], limit: Whole | None, usual: int | None) -> int:
        """How many may be made: as requested, or what is left of the context."""
        if not prompt:
            raise Problem("the prompt is empty; give at least one token", param="prompt")
        room = self.context + 1 - len(prompt)  # the last token is never read
        most = within("max_tokens", limit, 1)
        wanted = 1 if most is None else most
        if wanted > room:
            named = "" if most is None else f" and max_tokens={most}"
            raise Problem(
                f"the prompt's {len(prompt)} tokens{named} exceed the context of {self.context} "
                "tokens; shorten them, or start the server with a larger --max-context",
                param="messages" if usual is None else "prompt",
                code="context_length_exceeded",
            )
        return wanted if most is not None else min(room, usual or room)

    def _sampling(self, body: Chat | Completion, seed: int) -> SamplingParams:
        temperature = body.temperature
        if temperature is None:
            temperature = 0.0 if self.greedy else 1.0
        if not 0 <= temperature <= 2:
            raise Problem(
                f"temperature={temperature}: must lie between 0 and 2", param="temperature"
            )
        if temperature > 0 and self.greedy:
            raise Problem(
                f"temperature={temperature}: this server was started with --greedy; send 0",
                param="temperature",
                code="unsupported_value",
            )
        top_k = within("top_k", body.top_k, -1) or 0
        top_k = 0 if top_k == -1 else top_k  # vLLM's "all"
        top_p = 1.0 if body.top_p is None else body.top_p
        if top_p == 0:  # as OpenAI's API allows: the most probable token alone
            top_k, top_p = 1, 1.0
        try:
            return SamplingParams(temperature, top_k, top_p, seed, body.min_p or 0.0)
        except TwinError as error:
            raise Problem(str(error), param=str(error).partition("=")[0]) from error

    def _stop_tokens(self, tokens: list[int]) -> frozenset[int]:
        most = MOST_STOPS - len(self.ends)
        if len(tokens) > most:
            raise Problem(
                f"stop_token_ids: {len(tokens)} of them; at most {most}", param="stop_token_ids"
            )
        return frozenset(self.check_tokens("stop_token_ids", tokens))

    def _stops(self, stop: str | list[str] | None) -> tuple[str, ...]:
        stops = [stop] if isinstance(stop, str) else stop or []
        stops = [one for one in stops if one]  # an empty one means nothing
        limits = self.limits
        if len(stops) > limits.stops:
            raise Problem(f"stop: {len(stops)} texts; at most {limits.stops}", param="stop")
        for one in stops:
            if len(one) > limits.stop_characters:
                raise Problem(
                    f"stop: a text of {len(one)} characters; each has at most "
                    f"{limits.stop_characters}",
                    param="stop",
                )
        return tuple(stops)


def served(
    source: Source,
    plan: Plan,
    *,
    name: str = "",
    template: Path | None = None,
    values: Mapping[str, Any] | None = None,
    reuse: bool = True,
) -> Served:
    """The model of a source as it is served; `template`: instead of its own, which gets `values`
    besides a conversation. Raises CheckpointError, ConfigError.
    """
    values = dict(values or {})
    if own := OWN & values.keys():
        raise ConfigError(
            f"--chat-template-kwargs {min(own)}: what the server gives itself; leave it out"
        )
    words = source.tokenizer
    assert words is not None
    text = read_template(template) if template else words.template
    made = Template(text, words.names) if text is not None else None
    named = {token.content: number for number, token in words.added.items()}
    mark = made.end_mark(named) if made else None
    ends = words.stop if mark is None else words.stop | {named[mark]}
    spellings = Spellings(words, reuse=reuse)
    if made:
        spellings.prepare()
    return Served(
        name=name or source.spec.name,
        tokenizer=words,
        vocab=source.spec.vocab,
        context=plan.options.max_context,
        greedy=plan.options.sampling is Sampling.GREEDY,
        conversation=None if made is None else Conversation(made, Limits(), values, spellings),
        ends=ends,
        grammars=Grammars(words, source.spec.vocab, ends, kept=MOST_KEPT if reuse else 0),
        spellings=spellings,
        reuse=reuse,
    )
