"""`twin serve`: the engine behind OpenAI's API, and a page to try it on."""

from __future__ import annotations

import argparse
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from twin.commands.arguments import Subparsers, add_model, chosen_options, command, whole
from twin.commands.drafts import headed
from twin.commands.output import done, emit, progress, say
from twin.commands.run import INTERRUPTED, add_machine, chosen_node, settled_node
from twin.engine.opening import Source, open_source
from twin.errors import ConfigError
from twin.files import read_text
from twin.hardware.types import Node
from twin.schedule.options import multiplies_blocks
from twin.text import said, shown

KEY = "MONOTWIN_API_KEY"
MOST_KEY_BYTES = 4096
MOST_PORT, MOST_WAITING = 65535, 10_000
MOST_NAME = 200  # characters
NEEDED = ("h11", "jinja2", "llguidance", "uvicorn")
EXAMPLES = """\
  twin serve ./my-checkpoint
  twin serve ./my-checkpoint --node 1xh200 --port 8080 --max-context 32768
  twin serve ./my-checkpoint --host 0.0.0.0 --api-key-file key.txt
  twin serve llama-3.2-1b --node 1xh200 --random 1 --greedy"""


def add(commands: Subparsers) -> None:
    parser = command(
        commands,
        "serve",
        run,
        usage="MODEL [options]",
        summary="serve a model to OpenAI's clients, with a page to try it on",
        text="Chat, completions, streams, metrics: docs/server.md says what is there, what not.\n"
        "One request runs at a time, others wait in a bounded queue. A chat's next turn\n"
        "reads only what is new. Reachable from this computer alone unless --host and a key say\n"
        "otherwise.",
        examples=EXAMPLES,
    )
    add_model(parser)
    group = parser.add_argument_group("server")
    group.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default %(default)s)"
    )
    group.add_argument(
        "--port",
        type=whole,
        default=8000,
        metavar="N",
        help="0 takes a free one (default %(default)s)",
    )
    group.add_argument(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help=f"clients must send the key in it; or set {KEY}, which no list of processes shows",
    )
    group.add_argument(
        "--cors-origin",
        action="append",
        default=[],
        metavar="URL",
        help="a page from there may send requests, such as https://chat.example.org; may be "
        "repeated",
    )
    group.add_argument(
        "--allow-host",
        action="append",
        default=[],
        metavar="NAME",
        help="another name under which clients call this server; may be repeated",
    )
    group.add_argument(
        "--queue",
        type=whole,
        default=32,
        metavar="N",
        help="most requests that wait; further ones get a 429 (default %(default)s)",
    )
    group.add_argument(
        "--served-name", default="", metavar="NAME", help="what clients call the model"
    )
    group.add_argument(
        "--no-reuse",
        action="store_true",
        help="keep nothing for the next request: times could show clients what others sent",
    )
    add_words(parser)
    add_machine(parser)
    add_where(parser)


def add_words(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--chat-template",
        type=Path,
        metavar="FILE",
        help="a jinja template instead of the checkpoint's own",
    )
    parser.add_argument(
        "--chat-template-kwargs",
        metavar="JSON",
        help="what the template gets besides a conversation, such as "
        "'{\"enable_thinking\": true}'; a request's own chat_template_kwargs come first",
    )
    parser.add_argument(
        "--greedy",
        action="store_true",
        help="plan the greedy sampler: a little faster, and every temperature but 0 is refused",
    )


def add_where(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--node",
        metavar="NODE",
        help="where to run: 1xhost (default), 1xh200 for an NVIDIA GPU of this computer, 1xmi300x "
        "for an AMD GPU",
    )


def run(args: argparse.Namespace) -> int:
    check_libraries()
    _check(args)
    from twin.server.guard import make_guard
    from twin.server.limits import Limits
    from twin.server.listen import bound, server
    from twin.server.open import make_app, opened, watch

    guard = make_guard(args.host, _key(args), args.cors_origin, args.allow_host)
    node, chosen = chosen_node(args), chosen_options(args)
    source = source_of(args, node)
    node = settled_node(args, node, source.spec)
    socket = bound(args.host, args.port)  # before minutes of loading
    with (
        socket,
        opened(
            source,
            Path(args.model),
            node,
            chosen,
            progress(),
            greedy=args.greedy,
            name=args.served_name,
            template=args.chat_template,
            values=template_values(args),
            reuse=not args.no_reuse,
        ) as (model, session, plan),
    ):
        done()
        app = make_app(model, session, plan, node, guard, Limits(waiting=args.queue))
        watch(app, plan, node, chosen)
        socket.listen()  # not before the weights are there: who checks its health would wait
        url = _url(args.host, socket.getsockname()[1])
        emit(
            args,
            {"url": url, "model": model.name, "context": model.context},
            f"{model.name}: {url}",
        )
        if model.conversation is None:
            say("no chat template: /v1/chat/completions is refused; --chat-template FILE gives one")
        try:
            server(app).run(sockets=[socket])
        except KeyboardInterrupt:
            return INTERRUPTED
        finally:
            app.worker.close()
    return 0


def check_libraries() -> None:
    """Raises ConfigError where the extra is not installed."""
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        raise ConfigError(
            f"this needs {', '.join(missing)}: install the extra monotwin[serve], or run "
            "`pip install jinja2 llguidance uvicorn`"
        )


def source_of(args: argparse.Namespace, node: Node) -> Source:
    dtype = chosen_options(args).get("weight_dtype")
    source = open_source(args.model, args.random, dtype, blocks=multiplies_blocks(node.device))
    return headed(source, args.draft_head)


def template_values(args: argparse.Namespace) -> dict[str, Any]:
    """Raises ConfigError for what is no JSON object."""
    given: str = args.chat_template_kwargs or "{}"
    try:
        return msgspec.json.decode(given.encode(), type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise ConfigError(
            f"--chat-template-kwargs {said(given, 80)}: must be a JSON object ({error})"
        ) from error


def _check(args: argparse.Namespace) -> None:
    if not 0 <= args.port <= MOST_PORT:
        raise ConfigError(f"--port {shown(args.port)}: must lie between 0 (any) and {MOST_PORT}")
    name = args.served_name
    if len(name) > MOST_NAME or not name.isprintable() or name != name.strip():
        raise ConfigError(
            f"--served-name {shown(name)}: at most {MOST_NAME} characters that can be printed, "
            "without spaces around them"
        )
    if not 0 <= args.queue <= MOST_WAITING:
        raise ConfigError(f"--queue {shown(args.queue)}: must lie between 0 and {MOST_WAITING}")


def _key(args: argparse.Namespace) -> str | None:
    if args.api_key_file is not None:
        return read_text(args.api_key_file, MOST_KEY_BYTES).strip()
    return os.environ.get(KEY)


def _url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
