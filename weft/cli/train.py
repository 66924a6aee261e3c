"""`weft train`: from a recipe or a TOML file, and flags, to a trained model."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from .loading import Failure, UserError

USAGE = """weft train RECIPE|FILE.toml [--print-config] [--preset NAME] [--section.field VALUE ...]"""


@dataclass
class Train:
    """Train a model: from text files to checkpoints and curves.

    weft train lm trains a language model, with no files given on Python's own documentation; weft train
    translate a translation model. A TOML file has the settings of a run; --print-config prints one. Whatever
    is stopped goes on when it is started again.
    """

    arguments: tyro.conf.Positional[tuple[str, ...]] = ()
    """A recipe (lm, translate) or a TOML file, and flags: weft train lm --help lists them."""

    def run(self) -> None:
        """Train."""
        train(self.arguments)


def train(arguments: Sequence[str]) -> None:
    """Read the settings, and train or print them."""
    given = list(arguments)
    if not given or given[0].startswith("-"):
        from ..train.config import recipes

        known = "\n".join(f"  {name}: {about}" for name, about in recipes().items())
        shown = f"usage: {USAGE}\n\nrecipes:\n{known}\n\nweft train lm --help lists all settings"
        if {"-h", "--help"} & set(given):
            print(shown)
            return
        raise UserError(f"weft train was given no recipe\n\n{shown}")
    printed = "--print-config" in given
    config = settings([one for one in given if one != "--print-config"])
    if printed:
        from ..train import config_file

        print(config_file.write(config), end="")
        return
    finish(config)


def settings(arguments: list[str]) -> Any:
    """The settings that a recipe or a file and flags say."""
    from ..train import config_file
    from ..train.config import TrainConfig, recipe, with_preset

    name, *flags = arguments
    config = config_file.read(name) if name.endswith(".toml") else recipe(name)
    if "--preset" in flags[:-1]:
        config = with_preset(config, flags[flags.index("--preset") + 1])
    return tyro.cli(
        TrainConfig,
        prog=f"weft train {name}",
        description=Train.__doc__,
        default=config,
        args=flags,
        config=(tyro.conf.FlagConversionOff, tyro.conf.HelptextFromCommentsOff),
    )


def finish(config: Any) -> Any:
    """Train, and say how it went."""
    from ..train.loop import TrainingError
    from ..train.loop import train as run

    _check_writable(config.folder)
    try:
        outcome = run(config)
    except TrainingError as error:
        raise Failure(f"TrainingError: {error}") from None
    if outcome.stopped:
        raise Failure(
            f"stopped by {outcome.stopped} after step {outcome.step} of {config.steps}, which is saved in "
            f"{config.folder}; the same command goes on from there"
        )
    print(f"{outcome.step} steps in {outcome.seconds:.0f} s; see {config.folder}", file=sys.stderr)
    return outcome


def _check_writable(folder: Path) -> None:
    """An error now, and not after an hour, if nothing can be written there."""
    import os

    there = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        what = "is not a folder" if not there.is_dir() else "can't be written to"
        raise UserError(
            f"the run's folder is {folder}, and {there} {what}\n\nhint: --folder names another place"
        )
