"""`weft eval`: how well a trained model says texts that it has not learned from."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import tyro

from .loading import UserError

USAGE = "weft eval FOLDER [--step N] [--json] [--section.name VALUE ...]"

ABOUT = """Evaluate a run of weft train: loss, perplexity and accuracy on its held-out data, or on others.

The settings are those that the run was started with; flags change them as those of weft train do: another
mesh and layout give the same numbers.

  weft eval runs/lm
  weft eval runs/lm --step 400 --layout.mesh data=4 --layout.rules batch:data
  weft eval runs/books --data.valid other.txt --json"""


@dataclass
class Evaluate:
    """Evaluate a trained model: loss, perplexity and accuracy on held-out data."""

    arguments: tyro.conf.Positional[tuple[str, ...]] = ()
    """The folder of a run, and flags."""

    def run(self) -> None:
        """Evaluate."""
        evaluate(self.arguments)


def evaluate(arguments: Sequence[str]) -> None:
    """Restore a run's model, score it, and print the score."""
    given = list(arguments)
    if {"-h", "--help"} & set(given):
        print(f"usage: {USAGE}\n\n{ABOUT}")
        return
    if not given or given[0].startswith("-"):
        raise UserError(f"weft eval was given no folder\n\nusage: {USAGE}")
    from ..train import config_flags, stored

    folder, *flags = given
    as_json = "--json" in flags
    step, flags = _step([flag for flag in flags if flag != "--json"])
    config = config_flags.changed(stored.settings(folder), flags)
    run, step, model = stored.restored(config, step)
    found = stored.score(run, model)
    numbers = {
        "step": step,
        "loss": found.loss,
        "perplexity": found.perplexity,
        "word_perplexity": found.word_perplexity,
        "accuracy": found.accuracy,
        "tokens": found.tokens,
        "words": found.words,
    }
    if as_json:
        import json

        print(json.dumps(numbers))
        return
    print(f"step {step}: {found.tokens:,} tokens, {found.words:,} words", file=sys.stderr)
    print(f"loss                 {found.loss:.4f}")
    print(f"perplexity per token {found.perplexity:.4f}")
    if found.word_perplexity is not None:
        print(f"perplexity per word  {found.word_perplexity:.4f}")
    print(f"accuracy             {found.accuracy:.4f}")


def _step(flags: list[str]) -> tuple[int | None, list[str]]:
    if "--step" not in flags:
        return None, flags
    at = flags.index("--step")
    value = flags[at + 1] if at + 1 < len(flags) else ""
    if not value.isdigit():
        raise UserError(f"--step {value or 'without a number'}\n\nhint: weft checkpoint list shows the steps")
    return int(value), flags[:at] + flags[at + 2 :]
