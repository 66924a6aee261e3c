"""From the words of a command line to a command, and from what it raises to an exit code.

Results go to stdout, everything else to stderr. Exit 2 is a mistake in what was asked, 1 a failure.
"""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Annotated, Any, Union, get_args, get_type_hints

import tyro

from ..core.errors import LayoutWarning, WeftError, nearest
from .argument_types import REGISTRY
from .checkpoint import CheckpointCommand
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

DESCRIPTION = """Maths over named dimensions, split over a processor mesh by a one-line layout.

weft plan says what a program will do and cost, before it runs; weft search finds the mesh and the layout that
cost least. weft verify runs a program under several layouts and compares the results. weft train trains a
model, on one device or many, and weft eval scores it; weft demo does both in a few minutes. weft translate,
weft generate and weft score use a trained model on files of texts, weft serve lets it answer over HTTP. weft
checkpoint looks at what training stores, weft launch runs it in several processes. weft hardware shows the
machines that a plan's time can be predicted for, weft models the known models. Each has a --help; weft
--version says which Weft it is."""

COMMANDS = {
    "plan": PlanCommand,
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
}


PARSE_OWN_FLAGS = ("train", "eval")


def dispatch(arguments: Sequence[str]) -> int:
    """Run a command; its exit code."""
    warnings.showwarning = _warnings_shown()
    _open_streams()
    given = list(arguments)
    if given == ["--version"]:
        print(f"weft {version('weft')}")
        return 0
    try:
        _check_text(given)
        _chosen(given).run()
        sys.stdout.flush()
    except WeftError as error:
        kind = "error" if isinstance(error, UsageError) else type(error).__name__
        print(f"{kind}: {_of_user(str(error))}", file=sys.stderr)
        _fail(2)
        return 2
    except CommandFailure as failure:
        print(failure, file=sys.stderr)
        return failure.code
    except BrokenPipeError:  # the reader, `head` perhaps, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:  # a full disk, no permission
        print(f"error: {error}", file=sys.stderr)
        _fail(1)
        return 1
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and "RESOURCE_EXHAUSTED" not in str(error):  # JAX's
            raise
        print(f"error: {_short_of_memory(error)}", file=sys.stderr)
        _fail(1)
        return 1
    return 0


def _open_streams() -> None:
    """A stream that is closed (`weft models >&-`) is empty, and a letter that it does not have is escaped."""
    for name, mode in {"stdin": "r", "stdout": "w", "stderr": "w"}.items():
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 (until the exit)
    if getattr(sys.stdout, "errors", "") == "strict" and hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")


def _fail(code: int) -> None:
    """If this is one of several processes, the others need not wait for it."""
    if "weft.distributed.rendezvous" in sys.modules:
        sys.modules["weft.distributed.rendezvous"].mark_failed(code)


def _short_of_memory(error: Exception) -> UsageError:
    said = (str(error).splitlines() or [""])[0]
    return UsageError(
        "the memory is not enough",
        *([said] if said else []),
        rule="what a program needs is in its plan, before it runs: weft plan, and plan.txt in a run's folder",
        hint='fewer --data.rows or --rows; "When memory is short" in docs/training.md has more settings',
    )


def _check_text(given: list[str]) -> None:
    """An error now for what can't be written down later: names in settings, results and messages."""
    readable = [one.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace") for one in given]
    wrong = [shown for shown, one in zip(readable, given, strict=True) if shown != one]
    if wrong:
        raise UsageError(
            f"{' and '.join(wrong)} is not UTF-8",
            rule="words on the command line are text in UTF-8, names of files and folders too",
            hint="give the file or folder another name",
        )


def _chosen(given: list[str]) -> Any:
    """The command, with what it was given. The flags of some depend on their first argument."""
    if not given or given[0].startswith("-"):
        return _parsed(_any_of(COMMANDS), "weft", given, DESCRIPTION)
    name, *rest = given
    kind = _known(COMMANDS, name, "weft")
    if name in PARSE_OWN_FLAGS:
        return kind(tuple(rest))
    inner = _inner(kind)
    if not inner or not rest or rest[0].startswith("-"):
        return _parsed(kind, f"weft {name}", rest)
    chosen = _known(inner, rest[0], f"weft {name}")
    return kind(_parsed(chosen, f"weft {name} {rest[0]}", rest[1:]))


def _parsed(kind: Any, called: str, given: list[str], about: str | None = None) -> Any:
    options = (tyro.conf.OmitSubcommandPrefixes, tyro.conf.FlagCreatePairsOff)
    return tyro.cli(kind, prog=called, description=about, args=given, config=options, registry=REGISTRY)


def _known(commands: Mapping[str, Any], name: str, called: str) -> Any:
    if name not in commands:
        raise UsageError(
            f"there is no command {called} {name}{nearest(name, commands)}",
            rule=f"the commands are {', '.join(commands)}",
            hint=f"{called} --help says what each does",
        )
    return commands[name]


def _any_of(commands: Mapping[str, type]) -> Any:
    """One of the commands, each described by its first sentence."""
    kinds = [
        Annotated[kind, tyro.conf.subcommand(name, description=_first(kind))]
        for name, kind in commands.items()
    ]
    return Union[tuple(kinds)]  # noqa: UP007 (made of a list)


def _inner(kind: type) -> dict[str, type]:
    """The commands that a command has, by name."""
    choice = get_type_hints(kind, include_extras=True).get("do")
    return {one.__metadata__[0].name: one.__origin__ for one in get_args(choice)}


def _first(kind: type) -> str:
    return " ".join((kind.__doc__ or "").split("\n\n")[0].split())


def _warnings_shown() -> Any:
    """Prints warnings; of a rule without effect only the first, as a command may have several programs."""
    shown: set[str] = set()

    def show(message: Any, *_: Any, **__: Any) -> None:
        text = str(message)
        fact = text.partition("\n")[0]
        if fact not in shown:
            print(f"warning: {_of_user(text)}", file=sys.stderr)
        shown.update([fact] if isinstance(message, LayoutWarning) else [])

    return show


def _of_user(text: str) -> str:
    """A message without the line in our own start-up script, which errors take for the user's."""
    script = re.escape(os.path.basename(sys.argv[0]))
    return re.sub(rf"\n  at \S*\b{script}:\d+(?=\n|$)", "", text)
