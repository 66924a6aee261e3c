"""Orbax's writer and reader for several processes, with a timeout on every wait.

By default Orbax synchronizes processes with a collective over all devices, which has no timeout. If it is
given the indices of the processes, it uses the coordinator's barriers, which have one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax

from weft.core.extras import from_extra
from weft.distributed import processes

if TYPE_CHECKING:  # the functions below import it when they are called: it takes a second
    import orbax.checkpoint as ocp


def make_writer(name: str) -> ocp.AsyncCheckpointer:
    """A writer that all processes use together, for one save. `name` is unique to that save."""
    with from_extra("train"):
        import orbax.checkpoint as ocp

    if not processes.is_multiprocess():
        return ocp.AsyncCheckpointer(ocp.PyTreeCheckpointHandler())
    all_processes = ocp.options.MultiprocessingOptions(
        active_processes=set(range(jax.process_count())),
        barrier_sync_key_prefix=name,
    )
    return ocp.AsyncCheckpointer(
        ocp.PyTreeCheckpointHandler(multiprocessing_options=all_processes),
        async_options=ocp.options.AsyncOptions(timeout_secs=max(1, int(processes.peer_timeout()))),
        multiprocessing_options=all_processes,
    )


def make_reader() -> ocp.Checkpointer:
    """A reader that each process uses on its own: reading needs no synchronization."""
    with from_extra("train"):
        import orbax.checkpoint as ocp

    alone = ocp.options.MultiprocessingOptions(primary_host=None, active_processes={jax.process_index()})
    return ocp.Checkpointer(
        ocp.PyTreeCheckpointHandler(multiprocessing_options=alone), multiprocessing_options=alone
    )
