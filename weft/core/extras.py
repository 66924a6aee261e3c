"""Imports of packages that `pip install weft` does not bring, and the error that says how to install them.

    with from_extra("train"):
        import orbax.checkpoint as ocp

The packages of each extra are listed in pyproject.toml. They are imported where they are used, so that only
the function that needs one fails without it. A test compares these imports with that list.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager

from .errors import MissingExtraError, is_user_frame

EXTRAS = {
    "train": "data, checkpoints, optax and the commands that train and evaluate",
    "serve": "the HTTP server",
    "plots": "plots of loss curves",
    "huggingface": "safetensors files and the tokenizers of Hugging Face folders",
    "zstd": "data files compressed with Zstandard",
}
# Run by `compilers/process.py` in a process of their own. They are large, so weft[all] does not have them.
COMPILER_EXTRAS = {
    "tpu-compiler": "compiling for TPUs without a TPU",
    "gpu-compiler": "compiling for GPUs without a GPU",
}


@contextmanager
def from_extra(name: str) -> Iterator[None]:
    """Import packages of an extra. If one is not installed, raise an error that names the extra.

    >>> with from_extra("zstd"):
    ...     import zstandard
    """
    purpose = EXTRAS.get(name) or COMPILER_EXTRAS[name]
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "weft"):
            raise
        missing = MissingExtraError(
            f"the package {package} is not installed",
            rule=f"it belongs to the extra {name}: {purpose}",
            hint=f'pip install "weft[{name}]"',
        )
        missing.name = error.name
        raise missing.located(_public_call()) from None


def _public_call() -> str:
    """The function of Weft that the user's code called, or the module that it imported."""
    call, frame = "", inspect.currentframe()
    while frame is not None and not is_user_frame(frame):
        module = frame.f_globals.get("__name__", "")
        name = frame.f_code.co_qualname
        if module.startswith("weft.") and "<locals>" not in name:  # not the wrapper of a decorator
            call = f"import {module}" if name == "<module>" else name
        frame = frame.f_back
    return call
