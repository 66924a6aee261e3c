"""A CPU as devices of a mesh: how many it poses as, and that it keeps the memory of large arrays.

XLA's CPU client asks the C library for memory at each call of a program, and gives it back. Arrays of 32 MB
and more then go back to the system, whose pages are faulted in and zeroed anew at the next call: a seventh of
the time of a training step whose logits are that large. Told to, glibc keeps them.
"""

from __future__ import annotations

import ctypes
import importlib.util
import sys

import jax

from .errors import MeshError

# Of glibc's mallopt, by their numbers in malloc.h.
TRIM_THRESHOLD, MMAP_THRESHOLD, ARENA_MAX = -1, -3, -8
NEVER, LARGEST = -1, 2**31 - 1
MAX_CPU_DEVICES = 2048  # more are refused by XLA, as if they were several processes


def cpu_devices(count: int) -> None:
    """Make this process's CPU look like `count` devices; call it before the first use of JAX.

    From then on the process keeps the memory of large arrays to use it again, where the C library is glibc.

    >>> import weft as wf
    >>> wf.cpu_devices(8)
    >>> wf.Mesh("data=-1 model=2")
    Mesh("data=4 model=2")
    """
    if not isinstance(count, int) or not 1 <= count <= MAX_CPU_DEVICES:
        raise MeshError(
            f"{count!r} is no number of devices",
            rule=f"a CPU poses as 1 to {MAX_CPU_DEVICES} devices; plans need none",
            hint="wf.cpu_devices(8)",
        ).located(f"cpu_devices({count!r})")
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        if len(jax.devices()) != count:
            raise MeshError(
                f"JAX already runs with {len(jax.devices())} devices, not {count}",
                rule="the number of virtual CPU devices is fixed at the first use of JAX",
                hint="call wf.cpu_devices at the top of the program, before any array is made",
            ).located(f"cpu_devices({count})") from None
    retain_freed_memory()


def retain_freed_memory() -> None:
    """Let the C library keep the memory of large arrays. It takes effect if JAX was not used yet.

    One arena is for all threads: those of other arenas can't hold large arrays, and would map them.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        for setting, value in ((MMAP_THRESHOLD, LARGEST), (TRIM_THRESHOLD, NEVER), (ARENA_MAX, 1)):
            mallopt(setting, value)


def is_cpu_only() -> bool:
    """Whether JAX can have no other devices, as far as can be told without asking it for them."""
    plugins = any(importlib.util.find_spec(name) for name in ("jax_plugins", "libtpu"))
    return not plugins and jax.config.jax_platforms in (None, "", "cpu")  # type: ignore[attr-defined]
