"""The training loop: from settings to a trained model, and on from wherever it was stopped.

    outcome = train(recipe("lm").replace(steps=500))

`train` reads from top to bottom: what is run (`prepare`), where it begins (`begin`), the steps. The numbers
of step n depend on the settings, the seed and n alone, so a run that goes on from a checkpoint has the same
curve, bit for bit, as one that was never stopped.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np

import weft as wf
from weft import data, nn
from weft.errors import LayoutError, ModelError, WeftError
from weft.layout import Layout
from weft.mesh import Mesh
from weft.models import Transformer, preset
from weft.placing import without_values
from weft.plan.hardware import Hardware
from weft.plan.units import human_bytes, human_count, human_seconds

from . import config_file, hosts, inputs
from .checkpoint import Checkpoints
from .checkpoint_files import CheckpointError, CheckpointWarning, present, step_folders, unfinished
from .config import TrainConfig, schedule
from .evaluate import Score, evaluate, sums
from .journal import Journal
from .learner import Learner, learner
from .progress import Pace, Progress

AHEAD = 2  # batches that are made while a step runs


class TrainingError(WeftError, RuntimeError):
    """A run that could not go on."""


# What is run


@dataclass(frozen=True)
class Run:
    """All that a run is made of, before its first step."""

    config: TrainConfig
    mesh: Mesh
    layout: Layout
    tokenizer: data.Tokenizer
    train: data.Batches
    valid: data.Batches | None
    model: Transformer  # declared
    learner: Learner
    scoring: wf.Program
    rates: np.ndarray = field(repr=False)

    @property
    def checkpoints(self) -> Path:
        return self.config.folder / "checkpoints"

    def key(self, step: int) -> Any:
        """The key of a step's dropout."""
        return jax.random.fold_in(jax.random.key(self.config.seed), step)

    def plans(self) -> dict[str, wf.Plan]:
        """What a step will do and cost, and whatever else is done every so many steps."""
        batch = jax.tree.map(without_values, self.train.step(0).batch, is_leaf=wf.is_tensor)
        return self.learner.plans(nn.specs(self.model), batch, self.key(0))


def prepare(config: TrainConfig) -> Run:
    """From settings to what is run: data found, tokenizer loaded or trained, mesh checked, step staged."""
    config.check()
    h = config.hosts
    hosts.join(h.coordinator, h.processes, h.process)
    place = config.layout
    mesh = _with_devices(place.mesh)
    layout = Layout(place.rules, params=place.params or None, optimizer=place.optimizer or None)
    layout.check(mesh)
    _check_rows(config, mesh, layout)

    texts = inputs.examples(config.data, held_out=False)
    held_out = inputs.examples(config.data, held_out=True)
    assert texts is not None
    words = inputs.tokenizer(config.data, texts, config.folder)
    if config.model.vocab == preset(config.preset).config.vocab:
        config = config.replace(model=config.model.replace(vocab=words.vocab))
    inputs.check_vocab(words, config.model.vocab)
    _check_kind(config, inputs.is_pairs(texts))
    where = {"mesh": mesh, "layout": layout}
    train = inputs.batches(config.data, texts, words, seed=config.seed, **where)
    valid = None
    if held_out is not None:
        valid = inputs.batches(config.data, held_out, words, shuffle=False, epochs=1, **where)

    rates = schedule(config)(wf.arange(wf.Dim("steps", config.steps))).numpy()
    rates = np.broadcast_to(rates, config.steps)  # a constant one has no dim
    model, how = Transformer(config.model), learner(config, mesh, layout)
    scoring = wf.spmd(sums, mesh, how.whole_layout)
    return Run(config, mesh, layout, words, train, valid, model, how, scoring, rates)


def _with_devices(axes: str) -> Mesh:
    """The mesh. Where JAX has only a CPU, and is not in use yet, that gets as many virtual devices."""
    mesh = Mesh(axes) if "-1" not in axes else None
    if mesh is not None and not jax.distributed.is_initialized():
        with contextlib.suppress(RuntimeError):  # never fewer: somebody may have asked for more
            if mesh.size > jax.config.jax_num_cpu_devices:  # type: ignore[attr-defined]
                jax.config.update("jax_num_cpu_devices", mesh.size)
    mesh = mesh or Mesh(axes)
    mesh.require_devices()
    return mesh


def _check_rows(config: TrainConfig, mesh: Mesh, layout: Layout) -> None:
    rows = wf.Dim("batch", config.data.rows)
    ways = mesh.ways(layout.splits((rows,), mesh, "value")[0])
    if rows.size < ways:
        raise LayoutError(
            f"a batch of {rows.size} rows is split {ways} ways",
            f'mesh: "{mesh}"; rules: "{config.layout.rules}"',
            rule="each device that the batch is split over has at least one row",
            hint=f"--data.rows {ways} or more, or a smaller mesh",
        )


def _check_kind(config: TrainConfig, pairs: bool) -> None:
    two = config.model.kind == "encoder_decoder"
    if two != pairs or config.model.kind == "encoder":
        has = "pairs of texts" if pairs else "single texts"
        raise ModelError(
            f"the model is of kind {config.model.kind.replace('_', '-')}, and the data are {has}",
            rule="an encoder-decoder learns from pairs, a decoder from single texts",
            hint="weft train translate for pairs, weft train lm for texts; or another --preset",
        )


# Where it begins


@dataclass
class Place:
    """How far a run is: the steps done, the examples used, and what it has learned."""

    step: int
    position: int
    model: Any
    state: Any
    skipped: int = 0


def begin(run: Run, checkpoints: Checkpoints) -> Place:
    """The newest checkpoint, or parameters drawn anew."""
    seed = run.config.seed
    # Of several processes the first looks: all begin at the same place.
    if hosts.from_first(hosts.name("begun"), lambda: " ".join(map(str, step_folders(run.checkpoints)))):
        like = nn.specs(run.model)
        try:
            found = checkpoints.restore(*run.learner.init(like), run.mesh, run.layout)
        except ModelError as error:
            was = run.config.folder / "config.toml"
            error.hint = f"the settings of the run that is there are in {was}; a new run has another --folder"
            raise
        step, model, state, extra = found
        if extra["seed"] != seed:
            warnings.warn(f"the run began with seed {extra['seed']}, and goes on with {seed}", stacklevel=2)
        return Place(step, extra["position"], model, state, extra["skipped"])
    for path in unfinished(run.checkpoints).values():
        warnings.warn(
            f"checkpoint {path} was never finished, and there is none before it: the run begins anew",
            CheckpointWarning,
            stacklevel=2,
        )
    model = nn.init(run.model, jax.random.key(seed), run.mesh, run.layout)
    return Place(0, 0, *run.learner.init(model))


# The steps


@dataclass(frozen=True)
class Outcome:
    """How a run ended.

    Attributes:
      run: what was run.
      model: as it is now; the running mean, if there is one.
      step: how many steps are done, all runs before this one included.
      loss: of the last step.
      score: of the last evaluation, if there was one.
      stopped: the signal that ended it before its last step, or nothing.
      seconds: of this run's steps.
    """

    run: Run
    model: Any
    step: int
    loss: float
    score: Score | None
    stopped: str
    seconds: float


def train(config: TrainConfig, *, quiet: bool = False) -> Outcome:
    """Train, from the newest checkpoint in the folder if there is one.

    Args:
      config: all settings.
      quiet: whether nothing is shown.
    """
    return follow(prepare(config), quiet=quiet)


def follow(run: Run, *, quiet: bool = False) -> Outcome:
    """Train what is prepared."""
    c, first = run.config, jax.process_index() == 0
    hardware = Hardware.of(c.layout.hardware)
    plans = run.plans()
    plan = plans["a step"]
    predicted = plan.time(hardware)
    c.folder.mkdir(parents=True, exist_ok=True)  # not before: a mistake leaves nothing behind
    # Signals are caught until the last checkpoint is on the disk.
    with hosts.Stop() as stop, Checkpoints(run.checkpoints, c.save.keep) as checkpoints:
        place = begin(run, checkpoints)
        began, from_step, score = time.monotonic(), place.step, None
        pace = Pace(predicted.overlapped_seconds, plan.unique_flops, _peak(hardware, run))
        with (
            Progress(c.steps, place.step, pace, c.log_every, quiet=quiet or not first) as shown,
            _Record(run, place, shown, first, checkpoints) as record,
            contextlib.closing(run.train.batches(place.position, ahead=AHEAD)) as batches,
        ):
            record.open(plans, hardware)
            while place.step < c.steps:
                batch, place.position = next(batches)
                key, place.step = run.key(place.step), place.step + 1
                metrics, place.model, place.state = run.learner.learn(
                    place.step, place.model, place.state, batch, key
                )
                record.step(metrics)
                last = place.step == c.steps or stop.asked
                due = place.step == c.steps or _due(place.step, c.evaluate.every)
                if run.valid is not None and due:  # not at a signal: there may be little time
                    record.flush()
                    score = record.evaluated(_score(run, place))
                if last or _due(place.step, c.save.every):
                    record.flush()  # nothing is saved of which it is not known that it is finite
                    extra = {"position": place.position, "seed": c.seed, "skipped": place.skipped}
                    checkpoints.save(place.step, place.model, place.state, extra)
                if last:
                    break
            record.flush()
        seconds = time.monotonic() - began
    loss = record.loss if place.step > from_step else math.nan
    stopped = stop.reason if place.step < c.steps else ""
    model = run.learner.whole(place.model, place.state)
    return Outcome(run, model, place.step, loss, score, stopped, seconds)


def _due(step: int, every: int) -> bool:
    return bool(every) and step % every == 0


def _peak(hardware: Hardware, run: Run) -> float:
    """FLOP/s of all devices together; virtual ones share their cores."""
    dtype = {"bfloat16": "bf16", "float16": "f16"}.get(run.config.model.compute, "f32")
    return hardware.peak(dtype) * (hardware.shared_cores or run.mesh.size)


def _score(run: Run, place: Place) -> Score:
    assert run.valid is not None
    limit = run.config.evaluate.batches
    rows = (batch for batch, _ in itertools.islice(run.valid.batches(), limit))
    return evaluate(run.scoring, run.learner.whole(place.model, place.state), rows)


class _Record:
    """The numbers of steps: read one step late, so that devices need not wait; written, shown, and judged."""

    def __init__(self, run: Run, place: Place, shown: Progress, first: bool, checkpoints: Checkpoints):
        self.run, self.place, self.shown, self.checkpoints = run, place, shown, checkpoints
        self.loss = math.nan
        self._journal = Journal(run.config.folder, place.step) if first else None
        self._waiting: tuple[int, Any] | None = None
        self._time = time.monotonic()

    def __enter__(self) -> _Record:
        return self

    def __exit__(self, *error: Any) -> None:
        if self._journal is not None:
            self._journal.__exit__(*error)

    def open(self, plans: dict[str, wf.Plan], hardware: Hardware) -> None:
        """Say and write down what is run."""
        text = "\n".join(f"{often}:\n{plan.explain(hardware)}" for often, plan in plans.items())
        if self._journal is not None:
            self._journal.describe(config_file.write(self.run.config), text)
        for line in _summary(self.run, plans, hardware, self.place):
            self.shown.say(line)

    def step(self, metrics: Any) -> None:
        """A step was begun: read the numbers of the one before."""
        waiting, self._waiting = self._waiting, (self.place.step, metrics)
        self._read(waiting)

    def flush(self) -> None:
        """Read the numbers of the last step as well, and see that all are on the disk."""
        waiting, self._waiting = self._waiting, None
        self._read(waiting)
        if self._journal is not None:
            self._journal.sync()

    def _read(self, waiting: tuple[int, Any] | None) -> None:
        if waiting is None:
            return
        step, metrics = waiting
        numbers = {name: value.item() for name, value in metrics.items()}
        now = time.monotonic()
        numbers["seconds"], self._time = now - self._time, now
        finite = bool(numbers.pop("finite", True)) and all(map(math.isfinite, numbers.values()))
        if not finite:
            self._not_finite(step, numbers)
        numbers["rate"] = float(self.run.rates[step - 1])
        self.loss = numbers["loss"]
        self.shown.step(step, numbers)
        if self._journal is not None:
            self._journal.write(step, {name: x for name, x in numbers.items() if math.isfinite(x)})

    def _not_finite(self, step: int, numbers: dict[str, float]) -> None:
        c = self.run.config
        self.place.skipped += 1
        wrong = ", ".join(f"{name} {x}" for name, x in numbers.items() if not math.isfinite(x))
        if c.on_nan == "skip" and self.place.skipped <= c.nan_limit:
            self.shown.say(
                f"step {step} is left out: {wrong} ({self.place.skipped} of at most {c.nan_limit})"
            )
            return
        with contextlib.suppress(CheckpointError):  # that one failed too is not why the run stops
            self.checkpoints.wait()  # one may be on its way
        saved = list(present(self.run.checkpoints))
        good = f"that of step {saved[-1]} in {self.run.checkpoints}" if saved else "there is none yet"
        many = (
            [f"{self.place.skipped} steps were left out; the limit is {c.nan_limit}"]
            if c.on_nan == "skip"
            else []
        )
        raise TrainingError(
            f"step {step} gave {wrong}",
            *many,
            f"the last good checkpoint: {good}",
            f"what a step does is in {c.folder / 'plan.txt'}",
            rule="a loss and gradients are finite numbers; nothing was saved after they were not",
            hint="a lower --optimizer.rate, a longer --optimizer.warmup, --optimizer.clip; or --on-nan skip",
        )

    def evaluated(self, score: Score) -> Score:
        """Write down and show an evaluation."""
        step = self.place.step
        self.shown.say(
            f"step {step:>6}  held out: loss {score.loss:.4f}, perplexity {score.perplexity:.2f}, "
            f"accuracy {score.accuracy:.1%}"
        )
        if self._journal is not None:
            self._journal.write(step, {"valid_loss": score.loss, "valid_accuracy": score.accuracy})
            self._journal.draw()
        self._time = time.monotonic()  # what it took is not the next step's
        return score


def _summary(run: Run, plans: dict[str, wf.Plan], hardware: Hardware, place: Place) -> list[str]:
    """What will happen, in a few lines."""
    c = run.config
    begins = f"goes on after step {place.step}" if place.step else "begins anew"
    return [
        f"{c.preset}: {human_count(nn.count(run.model))} parameters; {c.steps} steps of {c.data.rows} rows "
        f"of {c.data.length}; {begins} in {c.folder}",
        f'mesh "{run.mesh}", layout "{run.layout}"',
        *(f"{often}, on each device: {_cost(plan, hardware)}" for often, plan in plans.items()),
    ]


def _cost(plan: wf.Plan, hardware: Hardware) -> str:
    predicted = plan.time(hardware)
    sent = [f"{human_bytes(size)} over {axes}" for axes, size in plan.comm_bytes.items()]
    return (
        f"{human_count(plan.flops)}FLOP, {'sends ' + ', '.join(sent) if sent else 'sends nothing'}, at most "
        f"{human_bytes(plan.memory.peak)} of memory; on {hardware.name} about "
        f"{human_seconds(predicted.overlapped_seconds)}, bound by {predicted.bound}"
    )
