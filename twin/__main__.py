"""The program's start: until the command line is loaded, Ctrl-C ends it at once, without a
traceback.
"""

from __future__ import annotations

import gc
import os
import signal
import sys

INTERRUPTED = 130
OBJECTS = 300_000  # more of them than were freed, before Python looks for garbage


def main() -> int:
    """Loads the command line and runs it. Who has set a handler of their own, or ignores Ctrl-C,
    knows why.
    """
    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if usual:  # an exception would become an ImportError where C code is loaded
        signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    # nearly all that a command makes lives until it ends: by Python's own limit of 700 objects,
    # looking for garbage among them took 15 % of a cold `twin simulate`
    gc.set_threshold(OBJECTS)
    from twin import cli

    try:
        if usual:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        return cli.main()
    except KeyboardInterrupt:  # before or after it minds Ctrl-C itself
        return INTERRUPTED
    finally:
        gc.freeze()  # Python's end looks for garbage twice more, 2 % of a cold `twin simulate`


if __name__ == "__main__":
    sys.exit(main())
