"""A process started by `weft launch`: runs the command, and ends when its launcher ends."""

from __future__ import annotations

import os
import signal
import sys
import threading

PIPE_VARIABLE = "WEFT_LAUNCHER_PIPE"


def exit_with_launcher() -> None:
    """Kill this process and its workers when the launcher ends, which closes its end of the pipe."""
    pipe = int(os.environ.pop(PIPE_VARIABLE))

    def wait() -> None:
        os.read(pipe, 1)  # blocks until the launcher's end is closed: nothing is ever written
        os.killpg(os.getpgid(0), signal.SIGKILL)

    threading.Thread(target=wait, name="weft launcher", daemon=True).start()


if __name__ == "__main__":
    exit_with_launcher()
    from .main import main

    sys.exit(main())
