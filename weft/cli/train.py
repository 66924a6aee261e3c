"""`weft train`: train a model from a recipe or a TOML file, and flags."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import tyro

from .flag_errors import naming_flags
from .output_files import probe_writable
from .targets import CommandFailure, UsageError

if TYPE_CHECKING:
    from ..train.config import TrainConfig
    from ..train.loop import TrainResult

USAGE = """weft train RECIPE|FILE.toml [--print-config] [--preset NAME] [--mesh AXES] [--layout RULES]
                  [--section.name VALUE ...]"""

DESCRIPTION = """Train a model from text files; write checkpoints and curves.

The settings come from a recipe (lm: a language model; translate: a translation model) or a TOML file; each
flag overrides one of them. --mesh and --layout are short for --layout.mesh and --layout.rules. --print-config
prints all settings as TOML without training. Run the same command again to resume.

  weft train lm                                     on Python's own documentation, which needs no files
  weft train lm --data.kind text --data.train "books/*.txt" --data.valid last.txt --folder runs/books
  weft train lm --mesh "data=4 model=2" --layout "batch:data d_ff:model heads:model vocab:model"
  weft train lm --layout auto                       with the best layout that weft search finds
  weft train lm --preset tiny-llama --print-config > llama.toml
  weft train llama.toml --steps 5000"""


@dataclass
class TrainCommand:
    """Train a model from text files; write checkpoints and curves."""

    arguments: tyro.conf.Positional[tuple[str, ...]] = ()
    """A recipe (lm, translate) or a TOML file, and flags; weft train lm --help lists them."""

    def run(self) -> None:
        """Train."""
        train(self.arguments)


def train(arguments: Sequence[str]) -> None:
    """Read the settings, then train with them or print them."""
    given = list(arguments)
    if not given or given[0].startswith("-"):
        from ..train.config import recipes

        known = "\n".join(f"  {name}: {about}" for name, about in recipes().items())
        listed = f"recipes:\n{known}\n\nweft train lm --help lists all settings"
        if {"-h", "--help"} & set(given):
            print(f"usage: {USAGE}\n\n{DESCRIPTION}\n\n{listed}")
            return
        raise UsageError(f"weft train: missing RECIPE or FILE.toml\n\nusage: {USAGE}\n\n{listed}")
    print_config = "--print-config" in given
    config = read_config([one for one in given if one != "--print-config"])
    if print_config:
        from ..train import config_io

        print(config_io.config_to_toml(config), end="")
        return
    run_training(config)


def read_config(arguments: list[str]) -> TrainConfig:
    """The settings of a recipe or a file, changed by flags."""
    from ..train import config_io
    from ..train.config import TrainConfig, recipe

    name, *flags = arguments
    config = config_io.config_from_toml(name) if name.endswith(".toml") else recipe(name)
    wants_help = {"-h", "--help"} & set(flags)
    config = config_io.apply_flags(config, [flag for flag in flags if flag not in wants_help])
    if wants_help:
        tyro.cli(  # prints the help and exits
            TrainConfig,
            prog=f"weft train {name}",
            description=DESCRIPTION,
            default=config,
            args=["--help"],
            config=(tyro.conf.FlagConversionOff, tyro.conf.HelptextFromCommentsOff),
        )
    return config


def run_training(config: TrainConfig, *, temporary: bool = False) -> TrainResult:
    """Train, and report how it went and, unless the folder is temporary, where the results are."""
    from ..core.errors import PeerTimeoutError, TrainingError
    from ..distributed import rendezvous
    from ..train.loop import train as run

    _check_writable(config.folder)
    try:
        with naming_flags("weft train lm --help explains each setting"):
            result = run(config)
    except (
        TrainingError,
        PeerTimeoutError,
        OSError,
    ) as error:  # OSError: a checkpoint or log can't be written
        rendezvous.mark_failed()
        raise CommandFailure(f"{type(error).__name__}: {error}") from None
    if result.stopped:
        fact = f"stopped by {result.stopped} after step {result.step} of {config.steps}"
        saved = f", which is saved in {config.folder}; run the same command again to resume"
        raise CommandFailure(fact if temporary else fact + saved)
    if result.trained:
        where = "" if temporary else f"; see {config.folder}"
        print(f"{result.trained} steps in {result.seconds:.0f} s{where}", file=sys.stderr)
    return result


def _check_writable(folder: Path) -> None:
    """Raise an error now, not after an hour of training, if the folder is not writable."""
    existing = next(p for p in (folder, *folder.absolute().parents) if os.path.exists(p))
    try:
        probe_writable(existing)
    except NotADirectoryError:
        fact, reason = f"{existing} is not a folder", []
    except OSError as error:
        fact, reason = f"{existing} is not writable", [str(error.strerror or error)]
    else:
        return
    raise UsageError(
        f"the run's folder is {folder}, but {fact}",
        *reason,
        rule="checkpoints and curves are written to the run's folder, which is created if necessary",
        hint="choose another folder with --folder",
    )
