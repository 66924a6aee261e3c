"""Whether all hosts see the same folder: what several processes write together is on a disk that they share.

Process 0 writes a file with a name that no other run has, and the others look for it. Without this, hosts
with disks of their own would train until the first checkpoint, and wait there for files that never come.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from contextlib import suppress
from pathlib import Path

import jax

from weft.distributed import processes
from weft.distributed.processes import DistributedError

TOKEN_PREFIX = ".weft-shared-"
LOOK_SECONDS = 10.0  # seconds: a network file system may show a new file late


def check_shared_folder(folder: Path, seconds: float = LOOK_SECONDS) -> None:
    """The same error in all processes if some of them don't see the folder that process 0 sees.

    The folder need not exist. The file is then written where the folder would be made, in the nearest folder
    above it that exists for process 0.

    Args:
      folder: as each process names it.
      seconds: how long a process looks for the file.
    """
    if not processes.is_multiprocess():
        return
    folder, first = folder.absolute(), jax.process_index() == 0
    written: list[Path] = []

    def write() -> str:
        there = next(p for p in (folder, *folder.parents) if p.is_dir())
        written.append(there / f"{TOKEN_PREFIX}{secrets.token_hex(8)}")
        written[0].touch()
        return f"{len(folder.parts) - len(there.parts)} {written[0].name} {socket.gethostname()}"

    try:
        said = processes.run_on_first(processes.unique_key("the shared folder"), write)
        up, name, first_host = said.split(" ", 2)
        above = [folder, *folder.parents][: int(up) + 1][-1]
        seen = first or _appears(above / name, seconds)
        mine = "" if seen else f"{socket.gethostname()} (process {processes.process_index()})"
        blind = [
            one for one in processes.gather_texts(processes.unique_key("the shared folder"), mine) if one
        ]
    finally:
        for token in written:
            with suppress(OSError):  # the folder itself is gone
                token.unlink()
    if blind:
        where = "there" if up == "0" else "above it"
        raise DistributedError(
            f"the folder {folder} is not shared by all hosts",
            f"process 0 on {first_host} wrote a file {where}, which does not appear on: {', '.join(blind)}",
            rule="all processes write their slices of a checkpoint to one folder",
            hint="put it on a disk that all hosts share, such as NFS, at the same path on each",
        )


def _appears(path: Path, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while True:
        with suppress(OSError):
            os.listdir(path.parent)  # NFS asks the server again when a folder is opened
            if path.exists():
                return True
        if time.monotonic() >= end:
            return False
        time.sleep(0.2)
