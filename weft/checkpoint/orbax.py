"""Orbax's writer and reader, for several processes, without a wait that never ends.

By default Orbax lets processes meet in a collective of all devices, which has no time limit. Given the
numbers of the processes, it uses barriers of the coordinator, which have one.
"""

from __future__ import annotations

from typing import Any

import jax

from weft.distributed import processes


def make_writer(name: str) -> Any:
    """A writer that all processes use together, once, under a name that no other has."""
    import orbax.checkpoint as ocp  # here, since it takes a second

    if not processes.is_multiprocess():
        return ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler())
    together = ocp.options.MultiprocessingOptions(
        active_processes=set(range(jax.process_count())),
        barrier_sync_key_prefix=name,
    )
    return ocp.AsyncCheckpointer(
        ocp.PyTreeCheckpointHandler(multiprocessing_options=together),
        async_options=ocp.options.AsyncOptions(timeout_secs=max(1, int(processes.peer_timeout()))),
        multiprocessing_options=together,
    )


def make_reader() -> Any:
    """A reader that each process uses by itself: reading needs no other."""
    import orbax.checkpoint as ocp

    alone = ocp.options.MultiprocessingOptions(primary_host=None, active_processes={jax.process_index()})
    return ocp.Checkpointer(
        ocp.PyTreeCheckpointHandler(multiprocessing_options=alone), multiprocessing_options=alone
    )
