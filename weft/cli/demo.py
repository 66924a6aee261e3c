"""`weft demo`: trains a small translator on a mesh of virtual devices, and lets it translate."""

from __future__ import annotations

import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import arg

from .targets import UsageError

SAMPLE_PHRASES = (
    "The train leaves at 4:45 PM.",
    "The answer is seventy-eight thousand, nine hundred and twelve.",
    "The letter is dated Tuesday, March 14, 2023.",
    "It costs $1,234.50.",
    "Count to ninety-nine.",
)


@dataclass
class DemoCommand:
    """Train an English-French translator, in a few minutes, on 8 virtual devices of this machine's CPU.

    It learns from phrases with numbers, dates, times and prices that are made up on the spot, shows the plan
    of a step and how training goes, translates phrases with values that it has never seen, and says how many
    were right. Nothing is downloaded."""

    steps: Annotated[int, arg(metavar="N")] = 400
    """How many steps; more make it better."""
    folder: Annotated[Path | None, arg(metavar="FOLDER", help_behavior_hint="")] = None
    """Where checkpoints and curves are kept; by default they are thrown away."""
    phrases: Annotated[int, arg(metavar="N")] = 500
    """How many held-out phrases are translated to see how good it is."""

    def run(self) -> None:
        """Train, translate, and score."""
        if self.phrases < 1:
            raise UsageError(
                f"--phrases {self.phrases}",
                rule="at least one phrase is translated, to see how good it is",
                hint="--phrases 500",
            )
        if self.folder is not None:
            run_demo(self.folder, self.steps, self.phrases)
            return
        with tempfile.TemporaryDirectory(prefix="weft-demo-") as folder:
            run_demo(Path(folder), self.steps, self.phrases, kept=False)


def demo_config(folder: Path, steps: int) -> Any:
    """What the demo trains."""
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


def run_demo(folder: Path, steps: int, phrases: int, *, kept: bool = True) -> None:
    """The demo itself."""
    from .. import generate
    from ..data import Phrases
    from .train import run_training

    began = time.monotonic()
    outcome = run_training(demo_config(folder, steps), kept=kept)
    run = outcome.run
    speaker = generate.TextGenerator(outcome.model, run.tokenizer, run.mesh, run.layout, rows=128)

    def translated(texts: list[str]) -> list[str]:
        return [said.text for said in speaker.generate(texts)]

    held_out = list(Phrases(phrases, seed=7, held_out=True))
    said = translated([source for source, _ in held_out])
    found = generate.corpus_scores(said, [[target] for _, target in held_out])
    for source, target in zip(SAMPLE_PHRASES, translated(list(SAMPLE_PHRASES)), strict=True):
        print(f"{source}\n  → {target}")
    wrong = [(pair, text) for pair, text in zip(held_out, said, strict=True) if text != pair.target]
    for (source, target), text in wrong[:2]:
        print(f"wrong: {source}\n  → {text}\n  (it is: {target})", file=sys.stderr)
    print(f"{phrases} phrases with values that it had not seen: {found}")
    print(f"({found.signatures[0]}; {time.monotonic() - began:.0f} s in all)", file=sys.stderr)
