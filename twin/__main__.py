"""The program's start: until the command line is loaded, Ctrl-C ends it at once, without a
traceback.
"""

from __future__ import annotations

import os
import signal
import sys

INTERRUPTED = 130


def main() -> int:
    """Loads the command line and runs it. Who has set a handler of their own, or ignores Ctrl-C,
    knows why.
    """
    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if usual:  # an exception would become an ImportError where C code is loaded
        signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    from twin import cli

    try:
        if usual:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        return cli.main()
    except KeyboardInterrupt:  # before or after it minds Ctrl-C itself
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
