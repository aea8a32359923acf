"""`twin explore`: a page that shows predictions, for whoever would rather choose than type."""

from __future__ import annotations

import argparse
import threading
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path

from twin.commands.arguments import Subparsers, command, folder_to_write, whole
from twin.commands.inputs import place_of_node
from twin.commands.output import emit, say
from twin.commands.run import INTERRUPTED
from twin.commands.serve import MOST_PORT, check_libraries
from twin.errors import ConfigError, TwinError
from twin.study.hardware import node_on_file
from twin.study.store import Store, default_folder
from twin.text import shown

HOST = "127.0.0.1"
PORT = 8010
REPORTS = Path("out")
EXAMPLES = """\
  twin explore
  twin explore --port 8080 --reports out
  twin explore --node my-gpu.yaml"""


def add(commands: Subparsers) -> None:
    parser = command(
        commands,
        "explore",
        run,
        usage="[options]",
        summary="a page to choose models and nodes on, and see what the twin predicts",
        text="Speeds with intervals, where a token's time goes, sweeps, and cases side by side.\n"
        "Every view has an address, the command that gives the same, and CSV. Needs no GPU and no\n"
        "network. Only this computer reaches it; over a network use a tunnel:\n"
        "ssh -L 8010:127.0.0.1:8010 HOST.",
        examples=EXAMPLES,
    )
    parser.add_argument(
        "--port",
        type=whole,
        default=PORT,
        metavar="N",
        help="0 takes a free one (default %(default)s)",
    )
    parser.add_argument(
        "--store",
        metavar="FOLDER",
        type=folder_to_write,
        help="where results are kept, as of `twin project` (default: the user's cache)",
    )
    parser.add_argument(
        "--reports",
        metavar="FOLDER",
        type=Path,
        default=REPORTS,
        help="where `twin project` wrote its reports (default %(default)s)",
    )
    parser.add_argument(
        "--node",
        action="append",
        default=[],
        metavar="FILE",
        help="offer a node of your own, too; may be repeated",
    )


def run(args: argparse.Namespace) -> int:
    check_libraries()
    if not 0 <= args.port <= MOST_PORT:
        raise ConfigError(f"--port {shown(args.port)}: must lie between 0 (any) and {MOST_PORT}")
    from twin.explore.app import App
    from twin.explore.desk import Desk, Work
    from twin.explore.processes import Processes
    from twin.explore.rows import Rows
    from twin.server.guard import make_guard
    from twin.server.limits import Limits
    from twin.server.listen import bound, server

    own = own_nodes(args.node)
    rows = Rows(Store(args.store or default_folder()), Processes())
    socket = bound(HOST, args.port)
    app = App(Desk(Work(), rows), make_guard(HOST, None, [], []), Limits(), own, args.reports)
    threading.Thread(target=_load, name="load", daemon=True).start()
    with socket:
        socket.listen()
        url = f"http://{HOST}:{socket.getsockname()[1]}"
        emit(args, {"url": url}, f"explorer: {url}")
        say("Ctrl-C ends it")
        try:
            server(app).run(sockets=[socket])
        except KeyboardInterrupt:
            return INTERRUPTED
        finally:
            app.worker.close()
    return 0


def own_nodes(files: Sequence[str]) -> dict[str, str]:
    """Places of the user's nodes by the names that pages give them. Raises TwinError."""
    found = {}
    for file in files:
        place = place_of_node(file)
        found[node_on_file(place).name] = place
    return found


def _load() -> None:
    """What the first question would have to wait for: libraries, models, nodes."""
    from twin.explore.choices import choices

    with suppress(ImportError, TwinError):
        for name in ("scipy.special", "scipy.stats", "twin.study.parquet"):
            import_module(name)
        choices({})
