"""Devices: virtual CPU devices, and a CPU allocator setting for large arrays.

XLA's CPU client allocates memory from the C library at each call of a program, and frees it. glibc returns
freed arrays of 32 MB and more to the system, and the next call faults in zeroed pages again: one seventh of
the time of a training step with logits of that size. `mallopt` makes glibc retain them.
"""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from typing import Any

import jax

from .call_errors import checks_arguments
from .errors import MeshError

# ctypes can't read the macros of malloc.h, so mallopt's parameters are repeated here by number.
TRIM_THRESHOLD, MMAP_THRESHOLD, ARENA_MAX = -1, -3, -8
NEVER, LARGEST = -1, 2**31 - 1
MAX_CPU_DEVICES = 2048  # XLA rejects more: it takes them for several processes


@checks_arguments
def cpu_devices(count: int) -> None:
    """Split this process's CPU into `count` virtual devices; call it before the first use of JAX.

    With glibc, the process also retains the memory of large freed arrays from then on.

    Args:
      count: the number of devices.

    >>> import weft as wf
    >>> wf.cpu_devices(8)
    >>> wf.Mesh("data=-1 model=2")
    Mesh("data=4 model=2")
    """
    if not isinstance(count, int) or not 1 <= count <= MAX_CPU_DEVICES:
        raise MeshError(
            f"{count!r} is not a number of devices",
            rule=f"a CPU can be split into 1 to {MAX_CPU_DEVICES} virtual devices; plans need none",
            hint="wf.cpu_devices(8)",
        ).located(f"cpu_devices({count!r})")
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        if len(jax.devices()) != count:
            raise MeshError(
                f"JAX already runs with {len(jax.devices())} devices, not {count}",
                rule="the number of virtual CPU devices is fixed at the first use of JAX",
                hint="call wf.cpu_devices at the top of the program, before creating arrays",
            ).located(f"cpu_devices({count})") from None
    retain_freed_memory()


def retain_freed_memory() -> None:
    """Make glibc retain the memory of large freed arrays. It has no effect after the first use of JAX."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        # One arena for all threads: the heaps of other arenas are too small for large arrays, which would be
        # mapped from the system again.
        for setting, value in ((MMAP_THRESHOLD, LARGEST), (TRIM_THRESHOLD, NEVER), (ARENA_MAX, 1)):
            mallopt(setting, value)


def is_cpu_only() -> bool:
    """Whether JAX has only CPU devices, determined without initializing its backends."""
    plugins = any(importlib.util.find_spec(name) for name in ("jax_plugins", "libtpu"))
    config: Any = jax.config  # JAX defines its options at run time, where mypy does not see them
    return not plugins and config.jax_platforms in (None, "", "cpu")
