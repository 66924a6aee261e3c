"""Load a run from its folder: its settings, its data, and its model.

run, step, model = load.restore_run(load.load_config("runs/lm"))   # with its data, to resume or to evaluate
loaded = load.load_run("runs/lm")                                  # without its data, to generate
loaded = load.load_run("Llama-3.2-1B")                             # a Hugging Face folder
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from weft import data, nn
from weft.core.errors import DataError, MeshError, ModelError
from weft.core.layout import Layout, Placement
from weft.core.mesh import Mesh
from weft.core.types import PyTree
from weft.models import Config, Transformer, huggingface

from ..checkpoint.manager import CheckpointManager
from ..checkpoint.manifest import CHECKPOINTS_FOLDER, read_manifest, recover_step_folders, step_folder
from ..core.errors import CheckpointError
from ..optim.ema import average_models
from . import config_io
from .config import TrainConfig
from .data_setup import RUN_TOKENIZER_FILE, count_words
from .evaluate import EvalResult, evaluate
from .run_folder import CONFIG_FILE
from .setup import Run, mesh_with_devices, prepare_run
from .trainer import build_trainer


def load_config(folder: str | Path) -> TrainConfig:
    """The settings of a run."""
    path = Path(folder) / CONFIG_FILE
    if not path.is_file():
        raise ModelError(
            f"there is no run in {folder}",
            rule=f"a run folder has its settings, {CONFIG_FILE}, and its checkpoints",
            hint="weft train writes them into its --folder",
        )
    return config_io.config_from_toml(path).replace(folder=Path(folder))


def load_model_config(folder: str | Path) -> Config:
    """The model config of a run folder or a Hugging Face folder."""
    return huggingface.config_of(folder) if _is_huggingface(folder) else load_config(folder).model


def _is_huggingface(folder: str | Path) -> bool:
    return (Path(folder) / "config.json").is_file() and not (Path(folder) / CONFIG_FILE).is_file()


def restore_run(config: TrainConfig, step: int | None = None) -> tuple[Run, int, PyTree]:
    """The prepared run, the step of a checkpoint (by default the newest), and the model to use."""
    run = prepare_run(config)
    model, state = run.trainer.init(nn.specs(run.model))
    state = state if _needs_state(config) else None  # an imported model has no state
    restored = CheckpointManager(run.checkpoints).restore(model, state, run.mesh, run.layout, step)
    number, model, state, _ = restored
    return run, number, run.trainer.eval_model(model, state)


def _needs_state(config: TrainConfig) -> bool:
    """Whether the model to use is built from the optimizer state: the EMA or the outer parameters."""
    return bool(config.optimizer.average or config.diloco.replicas)


def evaluate_run(run: Run, model: PyTree) -> EvalResult:
    """Evaluate a model on the held-out data of a run: all batches, or `evaluate.batches` of them."""
    if run.valid is None:
        raise ModelError(
            "the run has no data to evaluate on",
            rule="--data.valid names files to evaluate on, which the model did not train on",
            hint="weft eval FOLDER --data.valid FILE (and --data.valid_targets FILE for parallel text)",
        )
    with contextlib.closing(run.valid.batches(ahead=2)) as batches:
        some = itertools.islice(batches, run.config.evaluate.batches)
        result = evaluate(run.eval_program, model, (batch for batch, _ in some))
        if next(batches, None) is not None:
            return result  # texts are cut and packed: the number of words of some batches is unknown
    words = count_words(run.config.data, run.valid.examples, run.tokenizer)
    return dataclasses.replace(result, words=words)


# Without the data


@dataclass(frozen=True)
class LoadedRun:
    """A trained model with its tokenizer, mesh and layout.

    Attributes:
      folder: the folder it was loaded from.
      config: the settings of the run; None for a Hugging Face folder.
      model: the model with its parameters, placed on the mesh.
      tokenizer: the model's tokenizer.
      mesh, layout: the placement of the model.
      steps: the step of its checkpoint; for an average of checkpoints, all their steps, the newest first.
      checksums: the SHA-256 of each checkpoint's manifest (for Hugging Face, of the sizes and times of its
        files). They identify the model.
    """

    folder: Path
    config: TrainConfig | None
    model: PyTree
    tokenizer: data.Tokenizer
    mesh: Mesh
    layout: Layout
    steps: tuple[int, ...]
    checksums: tuple[str, ...]


def load_run(
    folder: str | Path,
    step: int | None = None,
    average: int = 1,
    mesh: Mesh | str | None = None,
    layout: Layout | str | None = None,
) -> LoadedRun:
    """Load the model of a run from its folder. The training data is not needed.

    Args:
      folder: a run folder, or a Hugging Face folder with a tokenizer.
      step: the step of the checkpoint; by default the newest intact one.
      average: the number of checkpoints whose parameters are averaged: that one and those before it.
      mesh, layout: the placement. By default as in training, or on one device if there are too few.
    """
    if _is_huggingface(folder):
        return _load_huggingface(Path(folder), step, average, mesh, layout)
    config = load_config(folder)
    tokenizer = load_tokenizer(config)
    placement = resolve_placement(config, mesh, layout)
    trainer = build_trainer(config, placement)
    like_model, like_state = trainer.init(nn.specs(Transformer(config.model)))
    checkpoints = CheckpointManager(config.folder / CHECKPOINTS_FOLDER)
    like_state = like_state if _needs_state(config) else None
    mesh = placement.mesh
    restore = functools.partial(checkpoints.restore, like_model, like_state, mesh, placement.layout)
    steps: list[int | None] = [step]
    if average > 1:
        steps = list(_last_steps(checkpoints, step, average))
    restored = []

    def models() -> Iterator[PyTree]:
        for requested in steps:
            number, model, state, _ = restore(requested)
            restored.append(number)
            yield trainer.eval_model(model, state)

    model = average_models(models()) if len(steps) > 1 else next(models())
    checksums = tuple(read_manifest(step_folder(checkpoints.folder, n))["sha256"] for n in restored)
    eval_layout = trainer.eval_layout
    return LoadedRun(config.folder, config, model, tokenizer, mesh, eval_layout, tuple(restored), checksums)


def _load_huggingface(
    folder: Path, step: int | None, average: int, mesh: Mesh | str | None, layout: Layout | str | None
) -> LoadedRun:
    if step is not None or average > 1:
        raise ModelError(
            f"{'--step' if step is not None else '--average'} is given for {folder}",
            rule="a Hugging Face folder has one model, without steps",
            hint="omit --step and --average",
        )
    mesh = mesh_with_devices(mesh) if isinstance(mesh, str) else Mesh.of(mesh)
    tokenizer, layout = huggingface.tokenizer(folder), Layout.of(layout)
    files = sorted((path.name, path.stat()) for path in folder.iterdir() if path.is_file())
    about = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in files]
    checksum = hashlib.sha256(repr(about).encode()).hexdigest()
    model = huggingface.load(folder, mesh, layout)
    return LoadedRun(folder, None, model, tokenizer, mesh, layout, (), (checksum,))


def load_tokenizer(config: TrainConfig) -> data.Tokenizer:
    """The tokenizer of a run, from its folder or its original path."""
    if config.data.tokenizer == "bytes":
        return data.ByteTokenizer()
    own = config.folder / RUN_TOKENIZER_FILE
    for path in (own, Path(config.data.tokenizer)):
        if path.is_file():
            return data.SentencePiece(str(path))
    raise DataError(
        f"there is no {RUN_TOKENIZER_FILE} in {config.folder}",
        f"the run's tokenizer is {config.data.tokenizer!r}",
        rule="a run keeps its tokenizer in its folder",
        hint=f"copy the SentencePiece model that it was trained with to {own}",
    )


def resolve_placement(
    config: TrainConfig, mesh: Mesh | str | None = None, layout: Layout | str | None = None
) -> Placement:
    """The placement of a run's model: on the given mesh, or on the run's own, or else on one device.

    A layout without a mesh is for the run's own mesh; a mesh without a layout uses the run's rules.
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
    return Placement.of(mesh, layout)


def _last_steps(checkpoints: CheckpointManager, step: int | None, count: int) -> list[int]:
    """The steps of the last checkpoints, up to a given one, the newest first."""
    available = list(recover_step_folders(checkpoints.folder))
    chosen = [number for number in available if step is None or number <= step][-count:]
    if len(chosen) < count or (step is not None and step not in chosen):
        until = "" if step is None else f" up to step {step}"
        raise CheckpointError(
            f"{count} checkpoints{until} can't be averaged: there are {len(chosen)} in {checkpoints.folder}",
            f"available steps: {', '.join(map(str, available)) or 'none'}",
            rule="an average needs all of its checkpoints",
            hint="use a smaller --average; weft train --save.keep sets how many are kept",
        )
    return chosen[::-1]
