"""The call stack: calls a function with enough room for its frames.

CPython stores the frames of Python functions in chunks of 16 KB, about 60 frames. A call that does not fit
maps a new chunk, and until the latest releases of 3.13 its return unmaps it. JAX traces and lowers in loops
that are 40 to 80 frames deep. If a chunk ends there, each iteration maps and unmaps memory, and tracing takes
up to 1.7 times as long, depending on the depth of the caller (github.com/python/cpython/issues/142183).

A frame that is larger than a chunk gets a larger chunk, and the calls inside it share the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")

# In words. Chunks are powers of two: this frame needs one of 1 MB and leaves half of it, more than 1,000
# frames. The system provides the pages that are used only.
RESERVED = 2**16


def call_with_room(fn: Callable[..., Result], *args: object) -> Result:
    """`fn(*args)`, with all frames inside it in one chunk of the stack."""
    return fn(*args)


call_with_room.__code__ = call_with_room.__code__.replace(co_stacksize=RESERVED)
