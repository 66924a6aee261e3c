"""`weft train`: from a recipe or a TOML file, and flags, to a trained model."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from .output_files import probe_writable
from .targets import CommandFailure, UsageError

USAGE = """weft train RECIPE|FILE.toml [--print-config] [--preset NAME] [--mesh AXES] [--layout RULES]
                  [--section.name VALUE ...]"""

DESCRIPTION = """Train a model: from text files to checkpoints and curves.

The settings are those of a recipe (lm: a language model; translate: a translation model) or of a TOML file;
each flag changes one. --mesh and --layout are short for --layout.mesh and --layout.rules. --print-config
prints all settings as TOML, and does not train. Run the same command again to resume.

  weft train lm                                     on Python's own documentation, which needs no files
  weft train lm --data.kind text --data.train "books/*.txt" --data.valid last.txt --folder runs/books
  weft train lm --mesh "data=4 model=2" --layout "batch:data d_ff:model heads:model vocab:model"
  weft train lm --layout auto                       as weft search finds it best for all devices
  weft train lm --preset tiny-llama --print-config > llama.toml
  weft train llama.toml --steps 5000"""


@dataclass
class TrainCommand:
    """Train a model: from text files to checkpoints and curves."""

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
        listed = f"recipes:\n{known}\n\nweft train lm --help lists all settings"
        if {"-h", "--help"} & set(given):
            print(f"usage: {USAGE}\n\n{DESCRIPTION}\n\n{listed}")
            return
        raise UsageError(f"weft train was given no recipe\n\nusage: {USAGE}\n\n{listed}")
    printed = "--print-config" in given
    config = read_config([one for one in given if one != "--print-config"])
    if printed:
        from ..train import config_io

        print(config_io.config_to_toml(config), end="")
        return
    run_training(config)


def read_config(arguments: list[str]) -> Any:
    """The settings that a recipe or a file and flags say."""
    from ..train import config_io
    from ..train.config import TrainConfig, recipe

    name, *flags = arguments
    config = config_io.config_from_toml(name) if name.endswith(".toml") else recipe(name)
    asked = {"-h", "--help"} & set(flags)
    config = config_io.apply_flags(config, [flag for flag in flags if flag not in asked])
    if asked:
        tyro.cli(  # it ends here
            TrainConfig,
            prog=f"weft train {name}",
            description=DESCRIPTION,
            default=config,
            args=["--help"],
            config=(tyro.conf.FlagConversionOff, tyro.conf.HelptextFromCommentsOff),
        )
    return config


def run_training(config: Any, *, kept: bool = True) -> Any:
    """Train, and say how it went, and where that is written down if the folder is kept."""
    from ..distributed import rendezvous
    from ..distributed.processes import PeerTimeoutError
    from ..train.loop import train as run
    from ..train.metrics import TrainingError

    _check_writable(config.folder)
    try:
        outcome = run(config)
    except (
        TrainingError,
        PeerTimeoutError,
        OSError,
    ) as error:  # OSError: checkpoints and journals that can't be written too
        rendezvous.mark_failed()
        raise CommandFailure(f"{type(error).__name__}: {error}") from None
    if outcome.stopped:
        where = f", which is saved in {config.folder}; run the same command again to resume" if kept else ""
        raise CommandFailure(
            f"stopped by {outcome.stopped} after step {outcome.step} of {config.steps}{where}"
        )
    if outcome.trained:
        where = f"; see {config.folder}" if kept else ""
        print(f"{outcome.trained} steps in {outcome.seconds:.0f} s{where}", file=sys.stderr)
    return outcome


def _check_writable(folder: Path) -> None:
    """An error now, and not after an hour, if nothing can be written there."""
    there = next(p for p in (folder, *folder.absolute().parents) if os.path.exists(p))
    try:
        probe_writable(there)
    except NotADirectoryError:
        fact, said = f"{there} is not a folder", []
    except OSError as error:
        fact, said = f"{there} can't be written to", [f"the system says: {error.strerror or error}"]
    else:
        return
    raise UsageError(
        f"the run's folder is {folder}, and {fact}",
        *said,
        rule="checkpoints and curves are written to the run's folder, which is made if need be",
        hint="--folder names another place",
    )
