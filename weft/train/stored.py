"""A run that is on the disk: its settings, its data, and its model as it is now."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from weft import nn
from weft.errors import ModelError

from . import config_file
from .checkpoint import Checkpoints
from .config import TrainConfig
from .evaluate import Score, evaluate
from .inputs import examples, words_of
from .run import Run, prepare


def settings(folder: str | Path) -> TrainConfig:
    """The settings that a run was started with."""
    path = Path(folder) / "config.toml"
    if not path.is_file():
        raise ModelError(
            f"there is no run in {folder}",
            rule="the folder of a run has its settings, config.toml, and its checkpoints",
            hint="weft train writes them; --folder said where",
        )
    return config_file.read(path).replace(folder=Path(folder))


def restored(config: TrainConfig, step: int | None = None) -> tuple[Run, int, Any]:
    """What was run, the step of a checkpoint (by default the newest), and the model to use."""
    run = prepare(config)
    like = nn.specs(run.model)
    found = Checkpoints(run.checkpoints).restore(*run.learner.init(like), run.mesh, run.layout, step)
    return run, found[0], run.learner.whole(*found[1:3])


def score(run: Run, model: Any) -> Score:
    """How well a model does on all data of a run that it did not learn from."""
    texts = examples(run.config.data, held_out=True)
    if run.valid is None or texts is None:
        raise ModelError(
            "the run has no data to evaluate on",
            rule="files that a model did not learn from are named by --data.valid",
            hint="weft eval FOLDER --data.valid FILE (and --data.valid_targets FILE for parallel text)",
        )
    words = words_of(run.config.data, texts, run.tokenizer)
    return evaluate(run.scoring, model, (batch for batch, _ in run.valid.batches(ahead=2)), words)
