"""From `FILE.py:FN` to the function to plan and its arguments, with the user's mistakes told as such."""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from ..core.errors import PACKAGE, WeftError, nearest

EXAMPLE = """def example():
    return step, (params, wf.spec([batch, length], "int32"))"""


class UsageError(WeftError):
    """Something in what was asked, such as flags that clash."""


class CommandFailure(Exception):
    """Something that did not come about, such as a check that did not hold."""

    code = 1


def virtual_devices(mesh: str | None) -> None:
    """As many CPU devices as the mesh has places, and at least 8; before the user's file can use JAX."""
    from ..core.devices import cpu_devices
    from ..core.mesh import Mesh

    # A size of -1 takes what is left of the devices: to ask for these fixes their number.
    cpu_devices(max(8, Mesh(mesh).size) if mesh and "-1" not in mesh else 8)


def load_target(target: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The function and the arguments that `FILE.py:FN` returns."""
    file, colon, name = target.rpartition(":")
    if not colon or not file or not name.isidentifier():
        raise UsageError(f"{target!r} is not FILE.py:FN", hint="for example train.py:example")
    path = Path(file)
    if not path.is_file():
        raise UsageError(f"there is no file {file}{_close_file(path)}")
    with user_code(f"{file} failed while it was imported"):
        module = _imported(path)
    function = getattr(module, name, None)
    if not callable(function):
        names = [n for n, value in vars(module).items() if inspect.isfunction(value)]
        found = f"functions there: {', '.join(names) or 'none'}"
        raise UsageError(f"there is no function {name} in {file}{nearest(name, names)}", found)
    if needed := _needed(function):
        raise UsageError(
            f"{target} takes arguments ({', '.join(needed)})",
            rule="FN takes none, and returns the function to plan and its arguments",
            hint=f"write beside it\n\n{EXAMPLE}",
        )
    with user_code(f"{target} failed"):
        pair = function()
    if not (isinstance(pair, tuple) and len(pair) == 2 and callable(pair[0]) and _is_list(pair[1])):
        shown = f"({', '.join(type(x).__name__ for x in pair)})" if isinstance(pair, tuple) else repr(pair)
        raise UsageError(
            f"{target} returned {shown}",
            rule="FN returns a pair: the function to plan, and a tuple of its arguments",
            hint=f"for example\n\n{EXAMPLE}",
        )
    return pair[0], tuple(pair[1])


def _is_list(x: Any) -> bool:
    return isinstance(x, tuple | list)


def _close_file(path: Path) -> str:
    folder = path.parent if path.parent.is_dir() else Path()
    return nearest(path.name, [p.name for p in folder.glob("*.py")])


def _imported(path: Path) -> ModuleType:
    """The file as a module of its own name, able to import its neighbours as when it is run."""
    sys.path.insert(0, str(path.parent.resolve()))
    other = sys.modules.get(path.stem)
    taken = other is not None and getattr(other, "__file__", None) != str(path)  # as json by a file json.py
    name = f"_{path.stem}" if taken else path.stem
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} is not a Python file", rule="the name of one ends with .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickles look their module up
    spec.loader.exec_module(module)
    return module


def _needed(function: Callable[..., Any]) -> list[str]:
    """The arguments that a call has to give."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a builtin
        return []
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in variable]


@contextlib.contextmanager
def user_code(what: str) -> Iterator[None]:
    """Whatever fails inside is told with the user's lines of the traceback, not ours."""
    try:
        yield
    except WeftError:
        raise
    except SystemExit as error:
        rule = "what is imported and called here may not end the process"
        raise UsageError(f"{what}: it called sys.exit({error.code!r})", rule=rule) from None
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        if frames and frames[-1].filename.startswith(os.path.join(PACKAGE, "plan")):
            raise  # the planner's own failure: exit 1, with all of the traceback
        notes = getattr(error, "__notes__", [])  # JAX adds one on how to see its own frames
        notes[:] = [note for note in notes if "JAX_TRACEBACK_FILTERING" not in note]
        mine = [frame for frame in frames if not _is_library(frame.filename)]
        lines = ["Traceback (most recent call last):\n", *traceback.format_list(mine)] if mine else []
        lines += traceback.format_exception_only(type(error), error)
        raise UsageError(f"{what}\n\n{''.join(lines).rstrip()}") from None


def _is_library(file: str) -> bool:
    lib = (f"{os.sep}site-packages{os.sep}", f"{os.sep}lib{os.sep}python")
    return file.startswith((PACKAGE, "<frozen")) or any(part in file for part in lib)
