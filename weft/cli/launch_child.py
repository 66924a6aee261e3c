"""A process that `weft launch` has started: the command line, and a thread that ends it with its launcher."""

from __future__ import annotations

import os
import signal
import sys
import threading

PIPE_VARIABLE = "WEFT_LAUNCHER_PIPE"


def exit_with_launcher() -> None:
    """End this process and its workers when the launcher is gone: then its end of the pipe is closed."""
    pipe = int(os.environ.pop(PIPE_VARIABLE))

    def follow() -> None:
        os.read(pipe, 1)
        os.killpg(os.getpgid(0), signal.SIGKILL)

    threading.Thread(target=follow, name="weft launcher", daemon=True).start()


if __name__ == "__main__":
    exit_with_launcher()
    from .main import main

    sys.exit(main())
