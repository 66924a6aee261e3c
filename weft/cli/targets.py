"""From `FILE.py:FN` to the function to plan and its arguments; errors in that file are usage errors."""

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
    """A usage error, such as conflicting flags. The command exits with 2."""


class CommandFailure(Exception):
    """A failure, such as a check that does not hold. The command exits with 1."""

    code = 1


def virtual_devices(mesh: str | None) -> None:
    """Create as many CPU devices as the mesh has, and at least 8. Call it before the user's file uses JAX."""
    from ..core.devices import cpu_devices
    from ..core.mesh import Mesh

    # A size of -1 absorbs the remaining devices. Resolving it would initialize JAX and fix their number.
    cpu_devices(max(8, Mesh(mesh).size) if mesh and "-1" not in mesh else 8)


def load_target(target: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The function and arguments that `FILE.py:FN` returns."""
    file, colon, name = target.rpartition(":")
    if not colon or not file or not name.isidentifier():
        raise UsageError(f"{target!r} is not FILE.py:FN", hint="for example train.py:example")
    path = Path(file)
    if not path.is_file():
        raise UsageError(f"no such file: {file}{_nearest_file(path)}")
    with user_code(f"importing {file} failed"):
        module = _import_file(path)
    function = getattr(module, name, None)
    if not callable(function):
        names = [n for n, value in vars(module).items() if inspect.isfunction(value)]
        found = f"functions in it: {', '.join(names) or 'none'}"
        raise UsageError(f"no function {name} in {file}{nearest(name, names)}", found)
    if needed := _required_arguments(function):
        raise UsageError(
            f"{target} takes arguments ({', '.join(needed)})",
            rule="FN takes no arguments; it returns the function to plan and its arguments",
            hint=f"add a function like this one\n\n{EXAMPLE}",
        )
    with user_code(f"{target} failed"):
        pair = function()
    if not (
        isinstance(pair, tuple) and len(pair) == 2 and callable(pair[0]) and isinstance(pair[1], tuple | list)
    ):
        shown = f"({', '.join(type(x).__name__ for x in pair)})" if isinstance(pair, tuple) else repr(pair)
        raise UsageError(
            f"{target} returned {shown}",
            rule="FN returns a pair: the function to plan and a tuple of its arguments",
            hint=f"for example\n\n{EXAMPLE}",
        )
    return pair[0], tuple(pair[1])


def _nearest_file(path: Path) -> str:
    folder = path.parent if path.parent.is_dir() else Path()
    return nearest(path.name, [p.name for p in folder.glob("*.py")])


def _import_file(path: Path) -> ModuleType:
    """Import a file as a module that can import its neighbours, as if it were run as a script."""
    sys.path.insert(0, str(path.parent.resolve()))
    other = sys.modules.get(path.stem)
    taken = other is not None and getattr(other, "__file__", None) != str(
        path
    )  # json, for example, by a file json.py
    name = f"_{path.stem}" if taken else path.stem
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UsageError(f"{path} is not a Python file", rule="its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look up their module
    spec.loader.exec_module(module)
    return module


def _required_arguments(function: Callable[..., Any]) -> list[str]:
    """The parameters without a default."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # a builtin
        return []
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in variable]


@contextlib.contextmanager
def user_code(fact: str) -> Iterator[None]:
    """Report exceptions as usage errors, with only the user's frames in the traceback."""
    try:
        yield
    except WeftError:
        raise
    except SystemExit as error:
        rule = "code that is imported or called here must not end the process"
        raise UsageError(f"{fact}: it called sys.exit({error.code!r})", rule=rule) from None
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        if frames and frames[-1].filename.startswith(os.path.join(PACKAGE, "plan")):
            raise  # a bug in the planner: exit with 1 and the full traceback
        notes = getattr(error, "__notes__", [])  # JAX adds a note on how to show its own frames
        notes[:] = [note for note in notes if "JAX_TRACEBACK_FILTERING" not in note]
        mine = [frame for frame in frames if not _is_library(frame.filename)]
        lines = ["Traceback (most recent call last):\n", *traceback.format_list(mine)] if mine else []
        lines += traceback.format_exception_only(type(error), error)
        raise UsageError(f"{fact}\n\n{''.join(lines).rstrip()}") from None


def _is_library(file: str) -> bool:
    lib = (f"{os.sep}site-packages{os.sep}", f"{os.sep}lib{os.sep}python")
    return file.startswith((PACKAGE, "<frozen")) or any(part in file for part in lib)
