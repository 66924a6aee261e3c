"""From command-line arguments to a command, and from its exceptions to an exit code.

Results go to stdout, everything else to stderr. The exit code is 2 for a usage error and 1 for a failure.
"""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from typing import Annotated, Any, Protocol, Union, get_args, get_type_hints

import tyro

from ..core.errors import LayoutWarning, WeftError, nearest
from .argument_types import REGISTRY
from .checkpoint import CheckpointCommand
from .compile import CompileCommand
from .completion import CompletionCommand
from .demo import DemoCommand
from .evaluate import EvalCommand
from .generate import GenerateCommand
from .hardware import HardwareCommand
from .launch import LaunchCommand
from .models import ModelsCommand
from .plan import PlanCommand
from .score import ScoreCommand
from .search import SearchCommand
from .serve import ServeCommand
from .targets import CommandFailure, UsageError
from .train import TrainCommand
from .translate import TranslateCommand
from .verify import VerifyCommand

DESCRIPTION = """Math over named dimensions, sharded over a device mesh by a one-line layout.

weft plan reports what a program will do and cost before it runs; weft compile compiles it with the compiler
of the TPU or GPU that it will run on; weft search finds the mesh and layout with the lowest cost. weft verify
runs a program under several layouts and compares the results. weft train trains a model on one device or
many, and weft eval evaluates it; weft demo does both in a few minutes. weft translate, weft generate and weft
score apply a trained model to text files; weft serve serves it over HTTP. weft checkpoint inspects the
checkpoints of a run; weft launch starts a command in several processes. weft hardware lists the hardware
profiles for predicted times, and weft models lists the known models. weft completion prints a script for TAB
in a shell. Every command has --help; use --version to print Weft's version."""

COMMANDS = {
    "plan": PlanCommand,
    "compile": CompileCommand,
    "search": SearchCommand,
    "verify": VerifyCommand,
    "demo": DemoCommand,
    "train": TrainCommand,
    "eval": EvalCommand,
    "translate": TranslateCommand,
    "generate": GenerateCommand,
    "score": ScoreCommand,
    "serve": ServeCommand,
    "launch": LaunchCommand,
    "checkpoint": CheckpointCommand,
    "hardware": HardwareCommand,
    "models": ModelsCommand,
    "completion": CompletionCommand,
}


# Their flags are the settings of a recipe or a run, which the first argument names: tyro can't know them.
PARSE_OWN_FLAGS = ("train", "eval")


class Command(Protocol):
    """A parsed command."""

    def run(self) -> None: ...


def dispatch(arguments: Sequence[str]) -> int:
    """Run a command and return its exit code."""
    warnings.showwarning = _warning_printer()
    _open_streams()
    given = list(arguments)
    if given == ["--version"]:
        print(f"weft {version('weft')}")
        return 0
    try:
        _check_utf8(given)
        _parse_command(given).run()
        sys.stdout.flush()
    except WeftError as error:
        kind = "error" if isinstance(error, UsageError) else type(error).__name__
        print(f"{kind}: {_without_entry_point(str(error))}", file=sys.stderr)
        _notify_other_processes(2)
        return 2
    except CommandFailure as failure:
        print(failure, file=sys.stderr)
        return failure.code
    except BrokenPipeError:  # the reader, perhaps `head`, has closed the pipe
        # Python flushes stdout again at exit: point it at /dev/null, or that raises once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:  # a full disk, missing permissions
        print(f"error: {error}", file=sys.stderr)
        _notify_other_processes(1)
        return 1
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and "RESOURCE_EXHAUSTED" not in str(error):  # JAX's
            raise
        print(f"error: {_out_of_memory(error)}", file=sys.stderr)
        _notify_other_processes(1)
        return 1
    return 0


def _open_streams() -> None:
    """Open closed streams (`weft models >&-`) as /dev/null; escape what stdout can't encode."""
    for name, mode in {"stdin": "r", "stdout": "w", "stderr": "w"}.items():
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 (until the exit)
    if getattr(sys.stdout, "errors", "") == "strict" and hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")


def _notify_other_processes(code: int) -> None:
    """Tell the other processes of a distributed run not to wait for this one, which failed."""
    if "weft.distributed.rendezvous" in sys.modules:
        sys.modules["weft.distributed.rendezvous"].mark_failed(code)


def _out_of_memory(error: Exception) -> UsageError:
    first = (str(error).splitlines() or [""])[0]
    return UsageError(
        "out of memory",
        *([first] if first else []),
        rule="a program's plan shows the memory it needs: weft plan, and plan.txt in the folder of a run",
        hint='reduce --data.rows or --rows; see "When memory is short" in docs/training.md',
    )


def _check_utf8(given: list[str]) -> None:
    """Raise now for arguments that can't be written to settings, results and messages later."""
    readable = [one.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace") for one in given]
    wrong = [shown for shown, one in zip(readable, given, strict=True) if shown != one]
    if wrong:
        raise UsageError(
            f"{' and '.join(wrong)} is not UTF-8",
            rule="command-line arguments must be UTF-8 text, including names of files and folders",
            hint="rename the file or folder",
        )


def _parse_command(given: list[str]) -> Command:
    """Parse the arguments into a command."""
    if not given or given[0].startswith("-"):
        return _parse(_any_of(COMMANDS), "weft", given, DESCRIPTION)
    name, *rest = given
    kind = _find_command(COMMANDS, name, "weft")
    if name in PARSE_OWN_FLAGS:
        return kind(tuple(rest))
    inner = subcommands(kind)
    if not inner or not rest or rest[0].startswith("-"):
        return _parse(kind, f"weft {name}", rest)
    # Parsed on its own, a subcommand's help and errors carry its full name and no options of the outer
    # command.
    chosen = _find_command(inner, rest[0], f"weft {name}")
    return kind(_parse(chosen, f"weft {name} {rest[0]}", rest[1:]))


def _parse(kind: Any, program: str, given: list[str], description: str | None = None) -> Any:
    options = (tyro.conf.OmitSubcommandPrefixes, tyro.conf.FlagCreatePairsOff)
    return tyro.cli(
        kind, prog=program, description=description, args=given, config=options, registry=REGISTRY
    )


def _find_command(commands: Mapping[str, type], name: str, program: str) -> Any:
    if name not in commands:
        raise UsageError(
            f"unknown command: {program} {name}{nearest(name, commands)}",
            rule=f"the commands are {', '.join(commands)}",
            hint=f"{program} --help describes each command",
        )
    return commands[name]


def _any_of(commands: Mapping[str, type]) -> Any:
    """The union of the commands, each described by its first paragraph."""
    kinds = [
        Annotated[kind, tyro.conf.subcommand(name, description=summary(kind))]
        for name, kind in commands.items()
    ]
    return Union[tuple(kinds)]  # noqa: UP007 (from a list)


def subcommands(kind: type) -> dict[str, type]:
    """The subcommands of a command, by name."""
    choice = get_type_hints(kind, include_extras=True).get("do")
    return {one.__metadata__[0].name: one.__origin__ for one in get_args(choice)}


def summary(kind: type) -> str:
    """The first paragraph of a command's description."""
    return " ".join((kind.__doc__ or "").split("\n\n")[0].split())


def _warning_printer() -> Callable[..., None]:
    """A `warnings.showwarning` that prints to stderr.

    A LayoutWarning is printed once: a command may run several programs, and each would warn of the same rule.
    """
    shown: set[str] = set()

    def show(message: Warning | str, *_: object, **__: object) -> None:
        text = str(message)
        fact = text.partition("\n")[0]
        if fact not in shown:
            print(f"warning: {_without_entry_point(text)}", file=sys.stderr)
        shown.update([fact] if isinstance(message, LayoutWarning) else [])

    return show


def _without_entry_point(text: str) -> str:
    """Remove the source line of the `weft` entry point, which errors take for the user's code."""
    script = re.escape(os.path.basename(sys.argv[0]))
    return re.sub(rf"(\n  in main)?\n  at \S*\b{script}:\d+(?=\n|$)", "", text)
