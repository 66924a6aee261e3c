"""Memory that a step frees stays with the process, for the next step.

XLA's CPU allocates a step's temporaries anew each time. glibc hands large blocks back to the system at once,
and each step then waits for thousands of fresh pages: a quarter of the time of a small model's step.
"""

from __future__ import annotations

import ctypes
import sys

TRIM_THRESHOLD, MMAP_MAX = -1, -4  # glibc's numbers for mallopt
MOST = 2**31 - 1


def keep_freed_memory() -> bool:
    """Ask glibc to keep what is freed; whether it does. Elsewhere nothing happens."""
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    return mallopt is not None and bool(mallopt(MMAP_MAX, 0)) and bool(mallopt(TRIM_THRESHOLD, MOST))
