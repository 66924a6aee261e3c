"""The user's line of an equation: the `file:line` that plans show for work, collectives and buffers."""

from __future__ import annotations

import os
from typing import Any

from ..core.errors import PACKAGE, short_path
from ..core.jax_compat import JaxprEqn

_MODELS = f"{PACKAGE}models{os.sep}"


def user_source(eqn: JaxprEqn) -> str:
    """The user's `file:line` of an equation. Weft's own models count as user code."""
    traceback: Any = eqn.source_info.traceback
    for frame in traceback.frames if traceback is not None else ():
        name = frame.file_name
        # Frames of JAX, the standard library and Weft would point to code that the user can't change.
        # Generated code has no file.
        library = f"{os.sep}site-packages{os.sep}" in name or f"{os.sep}lib{os.sep}python" in name
        if name.startswith(_MODELS):
            return f"weft/{os.path.relpath(name, PACKAGE)}:{frame.line_num}"
        if not name.startswith(PACKAGE) and not library and not name.startswith("<"):
            return f"{short_path(name)}:{frame.line_num}"
    return ""
