"""The settings of a run: one frozen dataclass of sections, and the recipes with their defaults.

    weft train lm --steps 500 --data.length 128 --layout.mesh "data=4 model=2"

A recipe (`lm`, `translate`) or a TOML file has all settings; flags change some. A setting is one field here,
with its type, range, default and documentation (`core/fields.py`). `config_io` reads and writes settings as
TOML, and reads flags. `setup` and `loop` apply them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Annotated, Any, Literal

from weft.core.errors import ProgramError, nearest
from weft.core.field_types import Fraction, NonNegative, NonNegativeInt, PositiveInt, Range, Share, Text
from weft.core.fields import PYTHON, Offender, documented, field_error, validate
from weft.models import Config, preset

Seconds = Annotated[float, Range(at_least=1)]


class _Section:
    """A section of the settings."""

    def __post_init__(self) -> None:
        validate(self)


@documented
@dataclass(frozen=True)
class DataConfig(_Section):
    """The data to train and evaluate on."""

    kind: Literal["python-docs", "text", "lines", "phrases", "parallel", "tsv", "jsonl"] = "python-docs"
    """Python's own documentation; files with one text each; files with one text per line; generated
    English-French phrases; two parallel files; files with two columns; JSON lines."""
    train: tuple[Text, ...] = ()
    """Files to train on; patterns with * are allowed, and .gz, .bz2, .xz and .zst are unpacked. For parallel
    text, the source side."""
    train_targets: tuple[Text, ...] = ()
    """For parallel text, the target side."""
    valid: tuple[Text, ...] = ()
    """Files to evaluate on; without any, there is no evaluation (python-docs and phrases have their own)."""
    valid_targets: tuple[Text, ...] = ()
    """For parallel text, the target side."""
    fields: tuple[Text, ...] = ("text",)
    """The field of a JSON line with the text, or the two fields with source and target."""
    malformed: Fraction = 0.01
    """The maximum fraction of malformed lines; they are skipped and reported."""
    tokenizer: str = "bytes"
    """"bytes", the path of a SentencePiece model, or "unigram" or "bpe" to train one."""
    vocab: PositiveInt = 8000
    """The vocabulary size of a tokenizer that is trained."""
    tokenizer_examples: PositiveInt = 100_000
    """The maximum number of examples to train it on."""
    rows: PositiveInt = 16
    """Rows per batch, over all devices and hosts."""
    length: PositiveInt = 128
    """The sequence length; for translation, of the target."""
    input_length: PositiveInt | None = None
    """The sequence length of the encoder; None: the same."""
    packed: bool = True
    """For pairs, whether several share a row. (Texts are cut into windows of `length`.)"""
    buckets: tuple[PositiveInt, ...] = ()
    """Unpacked, the lengths below `length` that rows may have."""

    def __post_init__(self) -> None:
        for name in ("train", "train_targets", "valid", "valid_targets", "fields", "buckets"):
            value = getattr(self, name)  # Python callers may pass one path or a list
            values = (value,) if isinstance(value, str | Path) else value
            if isinstance(values, tuple | list):  # anything else is an error of `validate`
                object.__setattr__(self, name, tuple(str(x) if isinstance(x, Path) else x for x in values))
        validate(self, more=self._contradictions())

    def _contradictions(self) -> Iterator[Offender]:
        if len(self.fields) not in (1, 2):
            rule = "one field, the text of a language model, or two, source and target"
            yield Offender(("fields",), self.fields, rule, fix=("text",))


@documented
@dataclass(frozen=True)
class OptimizerConfig(_Section):
    """The optimizer, its learning rate, and how gradients are computed."""

    kind: Literal["adamw", "adafactor", "lion", "momentum"] = "adamw"
    """The optimizer."""
    rate: NonNegative = 1e-3
    """The peak learning rate."""
    schedule: Literal["constant", "cosine", "linear", "rsqrt"] = "cosine"
    """The learning rate after the warmup; "cosine" and "linear" end near 0 at the last step."""
    warmup: NonNegativeInt = 100
    """Steps in which the learning rate rises from 0."""
    last: Fraction = 0.1
    """With "cosine", the final learning rate as a fraction of the peak."""
    beta1: Share = 0.9
    """The decay of the first moment of adamw and lion; the momentum of momentum."""
    beta2: Share = 0.999
    """The decay of the second moment of adamw; of lion, the decay of the stored momentum."""
    weight_decay: NonNegative = 0.01
    """Decoupled weight decay, multiplied by the learning rate."""
    clip: NonNegative = 1.0
    """The maximum global norm of the gradients; 0: no limit."""
    average: Share = 0.0
    """The decay of an EMA of the parameters, which is evaluated in their place; 0: no EMA."""
    micro: PositiveInt = 1
    """The number of micro-batches per batch: gradients are accumulated over them."""


@documented
@dataclass(frozen=True)
class LayoutConfig(_Section):
    """The mesh and the layout: which dims are split over which axes."""

    mesh: str = ""
    """The device mesh, "data=4 model=2"; empty: one device."""
    rules: str = ""
    """Which dims are split over which axes, "batch:data d_ff:model"; "auto": the best that the search finds,
    on the given mesh, or else on any mesh of all devices."""
    params: str = ""
    """Further rules for stored parameters, "d_model:data" (ZeRO-3)."""
    optimizer: str = ""
    """Further rules for the optimizer state (ZeRO-1); by default those of `params`."""
    hardware: str = "cpu"
    """The hardware for which the plan predicts times, from `weft hardware list`."""


@documented
@dataclass(frozen=True)
class SaveConfig(_Section):
    """Checkpoints."""

    every: PositiveInt = 200
    """Steps between two checkpoints; the last step and a stop signal also save one."""
    keep: PositiveInt = 3
    """The number of checkpoints to keep."""


@documented
@dataclass(frozen=True)
class EvaluateConfig(_Section):
    """Evaluation on held-out data."""

    every: NonNegativeInt = 200
    """Steps between two evaluations; 0: only at the end."""
    batches: PositiveInt | None = None
    """The maximum number of batches per evaluation; None: all."""


@documented
@dataclass(frozen=True)
class DiLoCoConfig(_Section):
    """Replicas that synchronize every few steps (Douillard et al., 2023), along the dim `replicas`."""

    replicas: NonNegativeInt = 0
    """The number of replicas; 0: no DiLoCo."""
    every: PositiveInt = 50
    """Inner steps between two outer steps."""
    rate: NonNegative = 0.7
    """The outer learning rate."""
    momentum: Share = 0.9
    """The outer Nesterov momentum."""


@documented
@dataclass(frozen=True)
class HostsConfig(_Section):
    """Several processes; `weft launch` and the clusters that JAX detects need none of these."""

    coordinator: str | None = None
    """Address and port of process 0."""
    processes: PositiveInt | None = None
    """The number of processes."""
    process: NonNegativeInt | None = None
    """The index of this process, from 0 on."""
    wait: Seconds = 1800.0
    """Seconds that a process waits for the others at any one point before it exits with an error."""
    grace: Seconds = 300.0
    """Seconds that a run has to stop and save after SIGTERM or SIGINT before it exits anyway."""


@documented
@dataclass(frozen=True)
class TrainConfig:
    """All settings of a run."""

    preset: str
    """The preset that provides the defaults of `model` (weft models)."""
    folder: Path
    """The run folder, for checkpoints, curves and settings; a run that is already there is resumed."""
    # The optimizer counts steps in an int32.
    steps: Annotated[int, Range(at_least=1, below=2**31)] = 1000
    """The number of steps."""
    seed: Annotated[int, Range(at_least=0, below=2**32)] = 0
    """The seed of the parameters, the order of the data, and dropout."""
    on_nan: Literal["stop", "skip"] = "stop"
    """If a loss or gradient is not finite: stop, or skip that step."""
    nan_limit: NonNegativeInt = 20
    """With "skip", the maximum number of skipped steps."""
    log_every: PositiveInt = 10
    """Steps between two log lines, when stderr is not a terminal."""
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    layout: LayoutConfig = field(default_factory=LayoutConfig)
    save: SaveConfig = field(default_factory=SaveConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    diloco: DiLoCoConfig = field(default_factory=DiLoCoConfig)
    hosts: HostsConfig = field(default_factory=HostsConfig)
    model: Config = field(default_factory=Config)
    """The model. If vocab is left at the preset's value, it becomes the tokenizer's."""

    def replace(self, **changes: Any) -> TrainConfig:
        """A copy with some settings changed; a new preset also replaces the model."""
        if "preset" in changes and "model" not in changes:
            changes["model"] = preset(changes["preset"]).config
        return dataclasses.replace(self, **changes)

    def __post_init__(self) -> None:
        if isinstance(self.folder, str | PathLike):
            object.__setattr__(self, "folder", Path(self.folder))
        validate(self)

    def check(self) -> None:
        """Raise an error if settings of different sections contradict each other."""
        if offenders := [*self._contradictions()]:
            hint = "help(weft.train.config.TrainConfig) describes each field"
            raise field_error(ProgramError, offenders, PYTHON, hint)

    def _contradictions(self) -> Iterator[Offender]:
        d, m, replicas, micro = self.data, self.model, self.diloco.replicas or 1, self.optimizer.micro
        parts = replicas * micro
        if d.rows % parts:
            rule = (
                f"a multiple of {parts}, the number of replicas times micro-batches: "
                f"{d.rows} = {parts} · {d.rows // parts} + {d.rows % parts}"
            )
            yield Offender(("data", "rows"), d.rows, rule, fix=-(-d.rows // parts) * parts)
        if self.diloco.replicas and self.optimizer.average:
            rule = (
                "0 with DiLoCo, which evaluates the outer parameters: an EMA of a replica would never be used"
            )
            yield Offender(("optimizer", "average"), self.optimizer.average, rule)
            yield Offender(("diloco", "replicas"), replicas, "0 with an EMA")
        longest = max(d.length, d.input_length or 0)
        if m.positions == "learned" and longest > m.longest:
            rule = f"at least the sequence length, {longest}; positions that are not learned have no limit"
            yield Offender(("model", "longest"), m.longest, rule, fix=longest)


# Recipes


def recipes() -> dict[str, str]:
    """The recipes by name, with their descriptions."""
    return {name: description for name, (description, _) in _RECIPES.items()}


def recipe(name: str, preset_name: str | None = None) -> TrainConfig:
    """The default settings of a recipe, optionally with another preset."""
    if name not in _RECIPES:
        raise ProgramError(
            f"there is no recipe {name!r}{nearest(name, _RECIPES)}",
            *[f"{known}: {description}" for known, description in recipes().items()],
            rule="training starts from a recipe or a TOML file",
            hint="weft train lm; or weft train FILE.toml",
        )
    config = _RECIPES[name][1]
    return config if preset_name is None else with_preset(config, preset_name)


def with_preset(config: TrainConfig, name: str) -> TrainConfig:
    """The same settings with the model of another preset."""
    return config.replace(preset=name)


_RECIPES = {
    "lm": (
        "a language model; with no files given, on Python's own documentation",
        TrainConfig(
            preset="tiny-lm",
            folder=Path("runs/lm"),
            model=preset("tiny-lm").config,
            data=DataConfig(rows=16, length=128),
            optimizer=OptimizerConfig(beta2=0.99, weight_decay=0.1),
        ),
    ),
    "translate": (
        "a translation model; with no files given, on generated English-French phrases",
        TrainConfig(
            preset="tiny-tr",
            folder=Path("runs/translate"),
            model=preset("tiny-tr").config,
            data=DataConfig(kind="phrases", rows=32, length=96),
            optimizer=OptimizerConfig(beta2=0.98),
        ),
    ),
}
