"""A run that is on the disk: its settings, its data, and its model as it is now.

run, step, model = stored.restored(stored.settings("runs/lm"))     # with its data, to go on or to evaluate
found = stored.loaded("runs/lm")                                   # without: to say something with it
found = stored.loaded("Llama-3.2-1B")                              # a folder of Hugging Face has no run
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft import data, nn
from weft.core.errors import DataError, MeshError, ModelError
from weft.core.layout import Layout
from weft.core.mesh import Mesh
from weft.models import Config, Transformer, huggingface

from ..checkpoint.manager import CheckpointManager
from ..checkpoint.manifest import (
    CHECKPOINTS_FOLDER,
    CheckpointError,
    read_manifest,
    recover_step_folders,
    step_folder,
)
from ..optim.ema import average_models
from . import config_io
from .config import TrainConfig
from .data_setup import RUN_TOKENIZER_FILE, count_words
from .evaluate import EvalResult, evaluate
from .run_folder import CONFIG_FILE
from .setup import Run, mesh_with_devices, prepare_run
from .trainer import build_trainer


def load_config(folder: str | Path) -> TrainConfig:
    """The settings that a run was started with."""
    path = Path(folder) / CONFIG_FILE
    if not path.is_file():
        raise ModelError(
            f"there is no run in {folder}",
            rule=f"the folder of a run has its settings, {CONFIG_FILE}, and its checkpoints",
            hint="weft train writes them; --folder said where",
        )
    return config_io.config_from_toml(path).replace(folder=Path(folder))


def load_model_config(folder: str | Path) -> Config:
    """What the model in a folder is, that of a run or one of Hugging Face."""
    return huggingface.config_of(folder) if _is_huggingface(folder) else load_config(folder).model


def _is_huggingface(folder: str | Path) -> bool:
    return (Path(folder) / "config.json").is_file() and not (Path(folder) / CONFIG_FILE).is_file()


def restore_run(config: TrainConfig, step: int | None = None) -> tuple[Run, int, Any]:
    """What was run, the step of a checkpoint (by default the newest), and the model to use."""
    run = prepare_run(config)
    model, state = run.learner.init(nn.specs(run.model))
    state = state if _made_of_state(config) else None  # an imported model has none
    found = CheckpointManager(run.checkpoints).restore(model, state, run.mesh, run.layout, step)
    return run, found[0], run.learner.whole(*found[1:3])


def _made_of_state(config: TrainConfig) -> bool:
    """Whether the model to use is made of what is stored beside the trained one."""
    return bool(config.optimizer.average or config.diloco.replicas)


def evaluate_run(run: Run, model: Any) -> EvalResult:
    """How well a model does on data of a run that it did not learn from: all, or `evaluate.batches`."""
    if run.valid is None:
        raise ModelError(
            "the run has no data to evaluate on",
            rule="files that a model did not learn from are named by --data.valid",
            hint="weft eval FOLDER --data.valid FILE (and --data.valid_targets FILE for parallel text)",
        )
    with contextlib.closing(run.valid.batches(ahead=2)) as batches:
        some = itertools.islice(batches, run.config.evaluate.batches)
        found = evaluate(run.scoring, model, (batch for batch, _ in some))
        if next(batches, None) is not None:
            return found  # texts are cut and packed: the words of some batches are not known
    words = count_words(run.config.data, run.valid.examples, run.tokenizer)
    return dataclasses.replace(found, words=words)


# Without its data


@dataclass(frozen=True)
class LoadedRun:
    """A trained model, and what is needed to use it.

    Attributes:
      folder: where it was.
      config: the run's settings; None of a folder of Hugging Face.
      model: with its parameters, placed on the mesh.
      tokenizer: the model's.
      mesh, layout: where it is.
      steps: the checkpoint that it is of; of a mean, all of them, the newest first.
      sums: the SHA-256 of each one's manifest (of Hugging Face, of its files' sizes and times), by which two
        that are not the same are told apart.
    """

    folder: Path
    config: TrainConfig | None
    model: Any
    tokenizer: data.Tokenizer
    mesh: Mesh
    layout: Layout
    steps: tuple[int, ...]
    sums: tuple[str, ...]


def load_run(
    folder: str | Path, step: int | None = None, average: int = 1, mesh: Any = None, layout: Any = None
) -> LoadedRun:
    """A run's model, from its folder alone: the data that it learned from are not needed.

    Args:
      folder: of the run; or of Hugging Face, with its tokenizer.
      step: of which checkpoint; by default the newest that is whole.
      average: the mean of the parameters of so many checkpoints is taken, that one and those before it.
      mesh, layout: where it is placed. By default as in training, or on one device if there are too few.
    """
    if _is_huggingface(folder):
        return _huggingface(Path(folder), step, average, mesh, layout)
    config = load_config(folder)
    words = load_tokenizer(config)
    mesh, layout = resolve_placement(config, mesh, layout)
    how = build_trainer(config, mesh, layout)
    model, state = how.init(nn.specs(Transformer(config.model)))
    checkpoints = CheckpointManager(config.folder / CHECKPOINTS_FOLDER)
    state = state if _made_of_state(config) else None
    restore = functools.partial(checkpoints.restore, model, state, mesh, how.layout)
    steps: list[int | None] = [step]
    if average > 1:
        steps = list(_last(checkpoints, step, average))
    found = []

    def models() -> Any:
        for one in steps:
            number, model, state, _ = restore(one)
            found.append(number)
            yield how.whole(model, state)

    whole = average_models(models()) if len(steps) > 1 else next(models())
    sums = tuple(read_manifest(step_folder(checkpoints.folder, number))["sha256"] for number in found)
    return LoadedRun(config.folder, config, whole, words, mesh, how.whole_layout, tuple(found), sums)


def _huggingface(folder: Path, step: int | None, average: int, mesh: Any, layout: Any) -> LoadedRun:
    if step is not None or average > 1:
        raise ModelError(
            f"{'a step' if step is not None else 'the mean of steps'} of {folder} is asked for",
            rule="a folder of Hugging Face holds one model, without steps",
            hint="leave out --step and --average",
        )
    mesh = mesh_with_devices(mesh) if isinstance(mesh, str) else Mesh.of(mesh)
    words, layout = huggingface.tokenizer(folder), Layout.of(layout)
    files = sorted((path.name, path.stat()) for path in folder.iterdir() if path.is_file())
    about = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in files]
    sum = hashlib.sha256(repr(about).encode()).hexdigest()
    return LoadedRun(folder, None, huggingface.load(folder, mesh, layout), words, mesh, layout, (), (sum,))


def load_tokenizer(config: TrainConfig) -> data.Tokenizer:
    """The tokenizer of a run, from its folder."""
    if config.data.tokenizer == "bytes":
        return data.ByteTokenizer()
    kept, named = config.folder / RUN_TOKENIZER_FILE, Path(config.data.tokenizer)
    for path in (kept, named):
        if path.is_file():
            return data.SentencePiece(str(path))
    raise DataError(
        f"there is no {RUN_TOKENIZER_FILE} in {config.folder}",
        f"the run's tokenizer is {config.data.tokenizer!r}",
        rule="a run keeps its tokenizer in its folder",
        hint=f"copy the SentencePiece model that it was trained with to {kept}",
    )


def resolve_placement(config: TrainConfig, mesh: Any = None, layout: Any = None) -> tuple[Mesh, Layout]:
    """Where a run's model is used: on a mesh that is given, or on the run's own, or else on one device.

    If just a layout is given it is for the run's own mesh; if just a mesh is, the run's rules are for that.
    """
    p = config.layout
    rules = Layout(p.rules, params=p.params or None, optimizer=p.optimizer or None)
    if mesh is None:
        try:
            mesh = mesh_with_devices(p.mesh)
        except MeshError:
            if layout is not None:
                raise
            mesh = Mesh()
    elif isinstance(mesh, str):
        mesh = mesh_with_devices(mesh)
    if layout is None:
        layout = rules if mesh.axes else ""
    layout = Layout.of(layout)
    layout.check(mesh)
    return mesh, layout


def _last(checkpoints: CheckpointManager, step: int | None, count: int) -> list[int]:
    """The steps of the last checkpoints, up to a given one, the newest first."""
    there = list(recover_step_folders(checkpoints.folder))
    chosen = [one for one in there if step is None or one <= step][-count:]
    if len(chosen) < count or (step is not None and step not in chosen):
        until = "" if step is None else f" up to step {step}"
        raise CheckpointError(
            f"the mean of {count} checkpoints{until} is asked for, and there are {len(chosen)} in "
            f"{checkpoints.folder}",
            f"steps that are there: {', '.join(map(str, there)) or 'none'}",
            rule="a mean is that of checkpoints that are there",
            hint="--average of fewer; weft train --save.keep says how many are kept",
        )
    return chosen[::-1]
