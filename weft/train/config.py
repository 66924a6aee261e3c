"""The settings of a run: one frozen dataclass of sections, and the recipes with their defaults.

    weft train lm --steps 500 --data.length 128 --layout.mesh "data=4 model=2"

A recipe (`lm`, `translate`) or a TOML file has all settings; flags change some. `config_io` reads and writes
them as TOML, and reads flags. `loop` applies them; this file builds only the optimizer and its schedule.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from weft.core.errors import ProgramError, nearest
from weft.models import Config, preset

from ..optim.adafactor import Adafactor
from ..optim.optimizers import AdamW, Lion, Momentum, Optimizer
from ..optim.schedules import Constant, Cosine, LinearDecay, LinearWarmup, RsqrtDecay, Schedule


@dataclass(frozen=True)
class DataConfig:
    """The data to train and evaluate on."""

    kind: Literal["python-docs", "text", "lines", "phrases", "parallel", "tsv", "jsonl"] = "python-docs"
    """Python's own documentation; files with one text each; files with one text per line; generated
    English-French phrases; two parallel files; files with two columns; JSON lines."""
    train: tuple[str, ...] = ()
    """Files to train on; patterns with * are allowed, and .gz, .bz2, .xz and .zst are unpacked. For parallel
    text, the source side."""
    train_targets: tuple[str, ...] = ()
    """For parallel text, the target side."""
    valid: tuple[str, ...] = ()
    """Files to evaluate on; without any, there is no evaluation (python-docs and phrases have their own)."""
    valid_targets: tuple[str, ...] = ()
    """For parallel text, the target side."""
    fields: tuple[str, ...] = ("text",)
    """The field of a JSON line with the text, or the two fields with source and target."""
    malformed: float = 0.01
    """The maximum fraction of malformed lines; they are skipped and reported."""
    tokenizer: str = "bytes"
    """"bytes", the path of a SentencePiece model, or "unigram" or "bpe" to train one."""
    vocab: int = 8000
    """The vocabulary size of a tokenizer that is trained."""
    tokenizer_examples: int = 100_000
    """The maximum number of examples to train it on."""
    rows: int = 16
    """Rows per batch, over all devices and hosts."""
    length: int = 128
    """The sequence length; for translation, of the target."""
    input_length: int | None = None
    """The sequence length of the encoder; None: the same."""
    packed: bool = True
    """For pairs, whether several share a row. (Texts are cut into windows of `length`.)"""
    buckets: tuple[int, ...] = ()
    """Unpacked, the lengths below `length` that rows may have."""

    def __post_init__(self) -> None:
        for name in ("train", "train_targets", "valid", "valid_targets", "fields", "buckets"):
            value = getattr(self, name)  # Python callers may pass one path or a list
            values = (value,) if isinstance(value, str | Path) else value
            object.__setattr__(self, name, tuple(str(x) if isinstance(x, Path) else x for x in values))


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer, its learning rate, and how gradients are computed."""

    kind: Literal["adamw", "adafactor", "lion", "momentum"] = "adamw"
    """The optimizer."""
    rate: float = 1e-3
    """The peak learning rate."""
    schedule: Literal["constant", "cosine", "linear", "rsqrt"] = "cosine"
    """The learning rate after the warmup; "cosine" and "linear" end near 0 at the last step."""
    warmup: int = 100
    """Steps in which the learning rate rises from 0."""
    last: float = 0.1
    """With "cosine", the final learning rate as a fraction of the peak."""
    beta1: float = 0.9
    """The decay of the first moment of adamw and lion; the momentum of momentum."""
    beta2: float = 0.999
    """The decay of the second moment of adamw; of lion, the decay of the stored momentum."""
    weight_decay: float = 0.01
    """Decoupled weight decay, multiplied by the learning rate."""
    clip: float = 1.0
    """The maximum global norm of the gradients; 0: no limit."""
    average: float = 0.0
    """The decay of an EMA of the parameters, which is evaluated in their place; 0: no EMA."""
    micro: int = 1
    """The number of micro-batches per batch: gradients are accumulated over them."""


@dataclass(frozen=True)
class LayoutConfig:
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


@dataclass(frozen=True)
class SaveConfig:
    """Checkpoints."""

    every: int = 200
    """Steps between two checkpoints; the last step and a stop signal also save one."""
    keep: int = 3
    """The number of checkpoints to keep."""


@dataclass(frozen=True)
class EvaluateConfig:
    """Evaluation on held-out data."""

    every: int = 200
    """Steps between two evaluations; 0: only at the end."""
    batches: int | None = None
    """The maximum number of batches per evaluation; None: all."""


@dataclass(frozen=True)
class DiLoCoConfig:
    """Replicas that synchronize every few steps (Douillard et al., 2023), along the dim `replicas`."""

    replicas: int = 0
    """The number of replicas; 0: no DiLoCo."""
    every: int = 50
    """Inner steps between two outer steps."""
    rate: float = 0.7
    """The outer learning rate."""
    momentum: float = 0.9
    """The outer Nesterov momentum."""


@dataclass(frozen=True)
class HostsConfig:
    """Several processes; `weft launch` and the clusters that JAX detects need none of these."""

    coordinator: str | None = None
    """Address and port of process 0."""
    processes: int | None = None
    """The number of processes."""
    process: int | None = None
    """The index of this process, from 0 on."""
    wait: float = 1800.0
    """Seconds that a process waits for the others at any one point before it exits with an error."""
    grace: float = 300.0
    """Seconds that a run has to stop and save after SIGTERM or SIGINT before it exits anyway."""


@dataclass(frozen=True)
class TrainConfig:
    """All settings of a run."""

    preset: str
    """The preset that provides the defaults of `model` (weft models)."""
    folder: Path
    """The run folder, for checkpoints, curves and settings; a run that is already there is resumed."""
    steps: int = 1000
    """The number of steps."""
    seed: int = 0
    """The seed of the parameters, the order of the data, and dropout."""
    on_nan: Literal["stop", "skip"] = "stop"
    """If a loss or gradient is not finite: stop, or skip that step."""
    nan_limit: int = 20
    """With "skip", the maximum number of skipped steps."""
    log_every: int = 10
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
        object.__setattr__(self, "folder", Path(self.folder))
        rules = {
            flag: _range_rule(flag, _setting(self, flag))
            for flag, bounds in _RANGES.items()
            if not _in_range(_setting(self, flag), *bounds)
        }
        for flag, known in _CHOICES.items():
            if (value := _setting(self, flag)) not in known:
                rules[flag] = f"{flag} is one of {', '.join(known)}{nearest(str(value), known)}"
        if rules:
            raise ProgramError(
                ", ".join(f"{flag} {_setting(self, flag)}" for flag in rules),
                rule="; ".join(rules.values()),
                hint="weft train lm --help explains each setting",
            )

    def check(self) -> None:
        """Raise an error if two settings contradict each other."""
        d, m, replicas, micro = self.data, self.model, self.diloco.replicas or 1, self.optimizer.micro
        parts = replicas * micro
        if d.rows % parts:
            factors = [("--diloco.replicas", replicas), ("--optimizer.micro", micro)]
            flags = [f"{flag} {count}" for flag, count in factors if count > 1]
            raise ProgramError(
                f"a batch of {d.rows} rows in {parts} parts: {_division(d.rows, parts)}",
                f"{' and '.join(flags)}",
                rule="a batch is split evenly over the replicas and their micro-batches",
                hint=f"--data.rows {-(-d.rows // parts) * parts}, or another number of parts",
            )
        average = self.optimizer.average
        if self.diloco.replicas and average:
            raise ProgramError(
                f"--optimizer.average {average:g} and --diloco.replicas {self.diloco.replicas}",
                rule="DiLoCo evaluates the outer parameters: an EMA of each replica would never be used",
                hint="use only one of the two",
            )
        longest = max(d.length, d.input_length or 0)
        if m.positions == "learned" and longest > m.longest:
            raise ProgramError(
                f"the sequence length is {longest}, and the model has {m.longest} learned positions",
                rule="--data.length and --data.input-length are at most the number of learned positions",
                hint=f"--model.longest {longest}; or --model.positions rotary, which has no limit",
            )


# The valid values of numbers: at least the first, below the second.
_ANY, _SHARE = float("inf"), 1.0
_RANGES = {
    "--steps": (1, 2**31),  # the optimizer counts steps in an int32
    "--seed": (0, 2**32),
    "--nan-limit": (0, _ANY),
    "--log-every": (1, _ANY),
    "--data.malformed": (0, math.nextafter(1, 2)),
    "--data.vocab": (1, _ANY),
    "--data.tokenizer-examples": (1, _ANY),
    "--data.rows": (1, _ANY),
    "--data.length": (1, _ANY),
    "--data.input-length": (1, _ANY),
    "--optimizer.rate": (0, _ANY),
    "--optimizer.warmup": (0, _ANY),
    "--optimizer.last": (0, math.nextafter(1, 2)),
    "--optimizer.beta1": (0, _SHARE),
    "--optimizer.beta2": (0, _SHARE),
    "--optimizer.weight-decay": (0, _ANY),
    "--optimizer.clip": (0, _ANY),
    "--optimizer.average": (0, _SHARE),
    "--optimizer.micro": (1, _ANY),
    "--save.every": (1, _ANY),
    "--save.keep": (1, _ANY),
    "--evaluate.every": (0, _ANY),
    "--evaluate.batches": (1, _ANY),
    "--diloco.replicas": (0, _ANY),
    "--diloco.every": (1, _ANY),
    "--diloco.rate": (0, _ANY),
    "--diloco.momentum": (0, _SHARE),
    "--hosts.wait": (1, _ANY),
    "--hosts.grace": (1, _ANY),
}


_CHOICES = {
    f"--{prefix}{field.name.replace('_', '-')}": get_args(kinds[field.name])
    for prefix, section in (("", TrainConfig), ("data.", DataConfig), ("optimizer.", OptimizerConfig))
    for kinds in [get_type_hints(section)]
    for field in dataclasses.fields(section)
    if get_origin(kinds[field.name]) is Literal
}


def _in_range(value: object, low: float, high: float) -> bool:
    return value is None or (isinstance(value, int | float) and low <= value < high)


def _setting(config: TrainConfig, flag: str) -> Any:
    """The value of the setting behind a flag."""
    value: Any = config
    for name in flag.removeprefix("--").replace("-", "_").split("."):
        value = getattr(value, name)
    return value


def _range_rule(flag: str, value: object) -> str:
    """The valid range of a flag; for NaN and infinity it adds that the number must be finite."""
    low, high = _RANGES[flag]
    if high == _ANY:
        finite = not isinstance(value, float) or math.isfinite(value)
        return f"{flag} is {'' if finite else 'finite, and '}at least {low}"
    if isinstance(high, int):
        return f"{flag} is from {low} to {high - 1}"
    return f"{flag} is from {low} to 1" + (" and not 1" if high == _SHARE else "")


def _division(total: int, parts: int) -> str:
    return f"{total} = {parts} · {total // parts} + {total % parts}"


# The optimizer


def build_schedule(config: TrainConfig) -> Schedule:
    """The learning-rate schedule of a run."""
    o = config.optimizer
    warmup = LinearWarmup(o.warmup) if o.warmup else Constant(1.0)
    left = max(config.steps - o.warmup, 1)
    decays: dict[str, Callable[[], Schedule]] = {
        "constant": lambda: Constant(1.0),
        "cosine": lambda: Cosine(left, floor=o.last, after=o.warmup),
        "linear": lambda: LinearDecay(config.steps, left),
        "rsqrt": lambda: math.sqrt(max(o.warmup, 1)) * RsqrtDecay(max(o.warmup, 1)),
    }
    return o.rate * warmup * decays[o.schedule]()


# By the names in settings and in `--train`.
OPTIMIZERS: dict[str, Callable[[float | Schedule, OptimizerConfig], Optimizer]] = {
    "adafactor": lambda rate, o: Adafactor(rate, weight_decay=o.weight_decay),
    "adamw": lambda rate, o: AdamW(rate, beta1=o.beta1, beta2=o.beta2, weight_decay=o.weight_decay),
    "lion": lambda rate, o: Lion(rate, beta1=o.beta1, beta2=o.beta2, weight_decay=o.weight_decay),
    "momentum": lambda rate, o: Momentum(rate, momentum=o.beta1, weight_decay=o.weight_decay),
}


def build_optimizer(config: TrainConfig) -> Optimizer:
    """The optimizer of a run, with its schedule."""
    return OPTIMIZERS[config.optimizer.kind](build_schedule(config), config.optimizer)


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
