"""`weft`: reads the command line and hands it to a command.

Results go to stdout, everything else to stderr. Exit 2 is a mistake in what was asked, 1 a failure.
"""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Sequence
from importlib.metadata import version
from typing import Annotated, Any, Union

import tyro

from ..errors import WeftError
from .checkpoint import Checkpoint
from .demo import Demo
from .evaluate import Evaluate
from .generate import Generate
from .hardware import Hardware
from .launch import Launch
from .loading import Failure, UserError
from .models import Models
from .plan import Plan
from .score import Score
from .search import Search
from .serve import Serve
from .train import Train
from .translate import Translate
from .verify import Verify

ABOUT = """Maths over named dimensions, split over a processor mesh by a one-line layout.

weft plan says what a program will do and cost, before it runs; weft search finds the mesh and the layout that
cost least. weft verify runs a program under several layouts and compares the results. weft train trains a
model, on one device or many, and weft eval scores it; weft demo does both in a few minutes. weft translate,
weft generate and weft score use a trained model on files of texts, weft serve lets it answer over HTTP. weft
checkpoint looks at what training stores, weft launch runs it in several processes. weft hardware shows the
machines that a plan's time can be predicted for, weft models the known models. Each has a --help; weft
--version says which Weft it is."""

COMMANDS = {
    "plan": Plan,
    "search": Search,
    "verify": Verify,
    "demo": Demo,
    "train": Train,
    "eval": Evaluate,
    "translate": Translate,
    "generate": Generate,
    "score": Score,
    "serve": Serve,
    "launch": Launch,
    "checkpoint": Checkpoint,
    "hardware": Hardware,
    "models": Models,
}


READ_BY_THEMSELVES = ("train", "eval")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; its exit code."""
    warnings.showwarning = _show_warning
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given == ["--version"]:
        print(f"weft {version('weft')}")
        return 0
    try:
        _chosen(given).run()
        sys.stdout.flush()
    except WeftError as error:
        kind = "error" if isinstance(error, UserError) else type(error).__name__
        print(f"{kind}: {_of_user(str(error))}", file=sys.stderr)
        if "weft.train.hosts" in sys.modules:  # one of several processes: the others need not wait for it
            sys.modules["weft.train.hosts"].fail(2)
        return 2
    except Failure as failure:
        print(failure, file=sys.stderr)
        return failure.code
    except BrokenPipeError:  # the reader, `head` perhaps, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:  # a full disk, no permission
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _chosen(given: list[str]) -> Any:
    """The command, with what it was given. The flags of some depend on their first argument."""
    if given and given[0] in READ_BY_THEMSELVES:
        return COMMANDS[given[0]](tuple(given[1:]))
    return tyro.cli(
        _choice(given[:1]),
        prog="weft",
        description=ABOUT,
        args=given,
        config=(tyro.conf.OmitSubcommandPrefixes, tyro.conf.FlagCreatePairsOff),
    )


def _choice(chosen: list[str]) -> Any:
    """One of the commands; the chosen one is described in full, the others by their first sentence."""
    kinds = [
        Annotated[kind, tyro.conf.subcommand(name, description=None if name in chosen else _first(kind))]
        for name, kind in COMMANDS.items()
    ]
    return Union[tuple(kinds)]  # noqa: UP007 (made of a list)


def _first(kind: type) -> str:
    return " ".join((kind.__doc__ or "").split("\n\n")[0].split())


def _show_warning(message: Any, *_: Any, **__: Any) -> None:
    print(f"warning: {_of_user(str(message))}", file=sys.stderr)


def _of_user(text: str) -> str:
    """A message without the line in our own start-up script, which errors take for the user's."""
    script = re.escape(os.path.basename(sys.argv[0]))
    return re.sub(rf"\n  at \S*\b{script}:\d+(?=\n|$)", "", text)


if __name__ == "__main__":
    sys.exit(main())
