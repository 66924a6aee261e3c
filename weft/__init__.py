"""Weft: distributed tensor programs over named dimensions.

The names are those of `language.py`. They are loaded when one of them is first asked for, and JAX with them:
what needs none, like the command line's help, does not wait for it.
"""

from __future__ import annotations as _annotations

import importlib as _importlib
import os.path as _path
import sys as _sys
import types as _types

# typing and pathlib are not imported: this file runs before the command line can handle Ctrl-C.
TYPE_CHECKING = False  # a type checker takes it for True
if TYPE_CHECKING:
    import typing as _typing

    from .language import *  # noqa: F403

    def __getattr__(name: str) -> _typing.Any: ...


_HERE = _path.dirname(__file__)
_PUBLIC_MODULES = {"data", "decode", "models", "nn", "random", "serve", "train"}
_FUNCTIONS = {"dims", "optimizer", "search", "spmd", "tensor"}  # named like the files that they are in
_ELSEWHERE = {  # what other libraries call it, and what it is here
    **dict.fromkeys(["dot", "matmul", "tensordot", "inner", "outer"], "einsum"),
    **dict.fromkeys(["permute", "swapaxes", "moveaxis"], "transpose"),
    **dict.fromkeys(["concatenate", "cat"], "concat"),
    **dict.fromkeys(["gather", "embedding"], "take"),
    **dict.fromkeys(["expand_dims", "unsqueeze"], "broadcast_to"),
    "jit": "spmd",
    "checkpoint": "remat",
    "array": "tensor",
}


class _Weft(_types.ModuleType):
    """The package: its files, and the names of the language."""

    def __getattr__(self, name: str) -> _typing.Any:
        file = _path.join(_HERE, name)
        is_file = _path.isdir(file) or _path.exists(f"{file}.py")
        if is_file and name not in _FUNCTIONS:
            return _importlib.import_module(f"{__name__}.{name}")
        if name == "__version__":
            return _importlib.import_module("importlib.metadata").version(__name__)
        language = _importlib.import_module(f"{__name__}.language")
        if name == "__all__":
            return self.__dir__()
        if name.startswith("_") or not hasattr(language, name):
            from .errors import nearest

            close = "" if name.startswith("_") else nearest(name, self.__dir__())
            close = f" (here it is {_ELSEWHERE[name]})" if name in _ELSEWHERE else close
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}{close}")
        value = getattr(language, name)
        super().__setattr__(name, value)
        return value

    def __setattr__(self, name: str, value: _typing.Any) -> None:
        if name not in _FUNCTIONS or not isinstance(
            value, _types.ModuleType
        ):  # an import would hide a function
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        """What is for the user; the files behind it are not shown."""
        language = _importlib.import_module(f"{__name__}.language")
        names = {n for n, x in vars(language).items() if not isinstance(x, _types.ModuleType)} - {"LATER"}
        names |= {*language.LATER} | (_PUBLIC_MODULES & {*vars(self)})
        return sorted(n for n in names if not n.startswith("_"))


_sys.modules[__name__].__class__ = _Weft
