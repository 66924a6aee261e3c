"""The user's line of an equation: the `file:line` that plans show for work, collectives and buffers."""

from __future__ import annotations

import os
from typing import Any

from ..core.errors import PACKAGE, short_path
from ..core.jax_compat import JaxprEqn

_MODELS = f"{PACKAGE}models{os.sep}"


def user_source(eqn: JaxprEqn) -> str:
    """The user's `file:line` of an equation."""
    traceback: Any = eqn.source_info.traceback
    frames = traceback.frames if traceback is not None else ()
    return next(filter(None, (user_line(frame.file_name, frame.line_num) for frame in frames)), "")


def user_line(file: str, line: int) -> str:
    """`file:line` of user code, "" of other code. Weft's own models count as user code."""
    # Frames of JAX, the standard library and Weft would point to code that the user can't change. So would
    # the script that starts the command line. Generated code has no file.
    library = f"{os.sep}site-packages{os.sep}" in file or f"{os.sep}lib{os.sep}python" in file
    if file.startswith(_MODELS):
        return f"weft/{os.path.relpath(file, PACKAGE)}:{line}"
    if file.startswith((PACKAGE, "<")) or library or os.path.basename(file) == "weft":
        return ""
    return f"{short_path(file)}:{line}"
