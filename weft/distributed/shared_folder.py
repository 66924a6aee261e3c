"""Check that all hosts see the same folder: several processes write one checkpoint to a shared disk.

Process 0 writes a file with a unique name, and the others look for it. Without this check, hosts with
separate disks would train until the first checkpoint and then wait there for files that never appear.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from contextlib import suppress
from pathlib import Path

import jax

from weft.core.errors import DistributedError
from weft.distributed import processes

TOKEN_PREFIX = ".weft-shared-"
LOOK_SECONDS = 10.0  # seconds: a network file system may show a new file late


def check_shared_folder(folder: Path, seconds: float = LOOK_SECONDS) -> None:
    """Raise the same error in all processes if some don't see the folder that process 0 sees.

    The folder need not exist: the file is written to its nearest parent that exists for process 0.

    Args:
      folder: the path of the folder, in each process.
      seconds: how long a process looks for the file.
    """
    if not processes.is_multiprocess():
        return
    folder, first = folder.absolute(), jax.process_index() == 0
    written: list[Path] = []

    def write() -> str:
        existing = next(p for p in (folder, *folder.parents) if p.is_dir())
        written.append(existing / f"{TOKEN_PREFIX}{secrets.token_hex(8)}")
        written[0].touch()
        return f"{len(folder.parts) - len(existing.parts)} {written[0].name} {socket.gethostname()}"

    try:
        text = processes.run_on_first(processes.unique_key("the shared folder"), write)
        up, name, first_host = text.split(" ", 2)
        parent = [folder, *folder.parents][: int(up) + 1][-1]
        seen = first or _appears(parent / name, seconds)
        own = "" if seen else f"{socket.gethostname()} (process {processes.process_index()})"
        texts = processes.gather_texts(processes.unique_key("the shared folder"), own)
        without_file = [host for host in texts if host]
    finally:
        for token in written:
            with suppress(OSError):  # the folder itself was removed
                token.unlink()
    if without_file:
        where = "there" if up == "0" else "in a parent folder"
        raise DistributedError(
            f"the folder {folder} is not shared by all hosts",
            f"process 0 on {first_host} wrote a file {where}, missing on: {', '.join(without_file)}",
            rule="all processes write their slices of a checkpoint to one folder",
            hint="put it on a disk that all hosts share, such as NFS, at the same path on each",
        )


def _appears(path: Path, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while True:
        with suppress(OSError):
            os.listdir(path.parent)  # opening the folder makes NFS revalidate its cached entries
            if path.exists():
                return True
        if time.monotonic() >= end:
            return False
        time.sleep(0.2)
