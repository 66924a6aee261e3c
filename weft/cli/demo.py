"""`weft demo`: train a small translation model on a mesh of virtual devices, and translate with it."""

from __future__ import annotations

import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import arg

from ..core.field_types import PositiveInt
from .flag_errors import validate_flags

if TYPE_CHECKING:
    from ..train.config import TrainConfig

SAMPLE_PHRASES = (
    "The train leaves at 4:45 PM.",
    "The answer is seventy-eight thousand, nine hundred and twelve.",
    "The letter is dated Tuesday, March 14, 2023.",
    "It costs $1,234.50.",
    "Count to ninety-nine.",
)


@dataclass
class DemoCommand:
    """Train an English-French translation model in a few minutes, on 8 virtual devices of this machine's CPU.

    The training data are generated phrases with numbers, dates, times and prices. The demo shows the plan of
    a step and the progress of training, translates phrases with values that are not in the training data, and
    reports how many translations are correct. Nothing is downloaded."""

    steps: Annotated[int, arg(metavar="N")] = 400
    """Training steps; more steps give a better model."""
    folder: Annotated[Path | None, arg(metavar="FOLDER", help_behavior_hint="")] = None
    """Keep checkpoints and curves in this folder (default: a temporary folder)."""
    phrases: Annotated[PositiveInt, arg(metavar="N")] = 500
    """The number of held-out phrases to translate for the score."""

    def run(self) -> None:
        """Train, translate, and score."""
        validate_flags(self)
        if self.folder is not None:
            run_demo(self.folder, self.steps, self.phrases)
            return
        with tempfile.TemporaryDirectory(prefix="weft-demo-") as folder:
            run_demo(Path(folder), self.steps, self.phrases, temporary=True)


def demo_config(folder: Path, steps: int) -> TrainConfig:
    """The settings of the demo's training run."""
    from ..train.config import DataConfig, EvaluateConfig, LayoutConfig, OptimizerConfig, SaveConfig, recipe

    base = recipe("translate")
    return base.replace(
        folder=folder,
        steps=steps,
        log_every=25,
        model=base.model.replace(d_model=96, d_ff=384, heads=4, d_kv=24),
        data=DataConfig(
            kind="phrases", tokenizer="bpe", vocab=640, tokenizer_examples=10_000, rows=64, length=64
        ),
        optimizer=OptimizerConfig(rate=4e-3, warmup=60, beta2=0.98),
        layout=LayoutConfig(mesh="data=4 model=2", rules="batch:data d_ff:model heads:model vocab:model"),
        evaluate=EvaluateConfig(every=0),
        save=SaveConfig(every=max(steps, 1)),
    )


def run_demo(folder: Path, steps: int, phrases: int, *, temporary: bool = False) -> None:
    """Train a model, translate with it, and print the results."""
    from .. import generate
    from ..data import Phrases
    from .train import run_training

    start = time.monotonic()
    result = run_training(demo_config(folder, steps), temporary=temporary)
    run = result.run
    generator = generate.TextGenerator(result.model, run.tokenizer, run.mesh, run.layout, rows=128)

    def translate(texts: list[str]) -> list[str]:
        return [completion.text for completion in generator.generate(texts)]

    held_out = list(Phrases(phrases, seed=7, held_out=True))
    translations = translate([source for source, _ in held_out])
    scores = generate.corpus_scores(translations, [[target] for _, target in held_out])
    for source, target in zip(SAMPLE_PHRASES, translate(list(SAMPLE_PHRASES)), strict=True):
        print(f"{source}\n  → {target}")
    wrong = [(pair, text) for pair, text in zip(held_out, translations, strict=True) if text != pair.target]
    for (source, target), text in wrong[:2]:
        print(f"wrong: {source}\n  → {text}\n  (correct: {target})", file=sys.stderr)
    print(f"{phrases} phrases with held-out values: {scores}")
    print(f"({scores.signatures[0]}; {time.monotonic() - start:.0f} s in total)", file=sys.stderr)
