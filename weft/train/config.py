"""What a run is: one frozen dataclass of sections, with recipes to begin with.

    weft train lm --steps 500 --data.length 128 --layout.mesh "data=4 model=2"

A recipe (`lm`, `translate`) or a TOML file says all settings; flags change some. `config_file` reads and
writes them as TOML. What they mean, `loop` knows; only an optimizer and its schedule are made of them here.
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
    """What it learns from."""

    kind: Literal["python-docs", "text", "lines", "phrases", "parallel", "tsv", "jsonl"] = "python-docs"
    """Python's own documentation; files that are a text each; files with a text in each line; generated
    English-French phrases; two parallel files; files with two columns; JSON lines."""
    train: tuple[str, ...] = ()
    """Files to train on, patterns with * allowed, .gz, .bz2, .xz and .zst unpacked; of parallel text, the
    source side."""
    train_targets: tuple[str, ...] = ()
    """Of parallel text, the target side."""
    valid: tuple[str, ...] = ()
    """Files to evaluate on; without any, nothing is evaluated (python-docs and phrases have their own)."""
    valid_targets: tuple[str, ...] = ()
    """Of parallel text, the target side."""
    fields: tuple[str, ...] = ("text",)
    """The field of a JSON line that is the text, or the two that are source and target."""
    malformed: float = 0.01
    """The share of malformed lines that is borne; they are left out and reported."""
    tokenizer: str = "bytes"
    """"bytes", the path of a SentencePiece model, or "unigram" or "bpe" to train one."""
    vocab: int = 8000
    """How many ids a tokenizer that is trained gets."""
    tokenizer_examples: int = 100_000
    """On how many of the examples it is trained, at most."""
    rows: int = 16
    """Rows in a batch, over all devices and hosts."""
    length: int = 128
    """Places in a row; of the target, for translation."""
    input_length: int | None = None
    """Places in the encoder's row; None: as many."""
    packed: bool = True
    """Of pairs: whether several share a row. (Texts are cut into windows of `length`.)"""
    buckets: tuple[int, ...] = ()
    """Unpacked, the lengths below `length` that rows may have."""

    def __post_init__(self) -> None:
        for name in ("train", "train_targets", "valid", "valid_targets", "fields", "buckets"):
            value = getattr(self, name)  # from Python, one path or a list will do
            each = (value,) if isinstance(value, str | Path) else value
            object.__setattr__(self, name, tuple(str(x) if isinstance(x, Path) else x for x in each))


@dataclass(frozen=True)
class OptimizerConfig:
    """How it learns."""

    kind: Literal["adamw", "adafactor", "lion", "momentum"] = "adamw"
    """The optimizer."""
    rate: float = 1e-3
    """The highest learning rate."""
    schedule: Literal["constant", "cosine", "linear", "rsqrt"] = "cosine"
    """What becomes of the rate after the warm-up: "cosine" and "linear" end near 0 with the last step."""
    warmup: int = 100
    """Steps in which the rate rises from 0."""
    last: float = 0.1
    """With "cosine", the share of the rate that is left at the end."""
    beta1: float = 0.9
    """Of adamw and lion, how much of the mean of gradients stays; of momentum, the momentum."""
    beta2: float = 0.999
    """How much of their mean square stays (of lion, of the mean that is kept)."""
    weight_decay: float = 0.01
    """The share of a parameter that is taken away, times the rate."""
    clip: float = 1.0
    """The largest global norm of the gradients; 0: any."""
    average: float = 0.0
    """The decay of a running mean of the parameters, which is evaluated in their place; 0: there is none."""
    micro: int = 1
    """In how many parts, one after the other, a batch's gradients are computed."""


@dataclass(frozen=True)
class LayoutConfig:
    """Where it runs: the mesh, and which dims are split over which axes."""

    mesh: str = ""
    """The processor mesh, "data=4 model=2"; none: one device."""
    rules: str = ""
    """Which dims are split over which axes, "batch:data d_ff:model"; "auto": as the search finds it best, on
    the mesh if there is one, else on any mesh of all devices."""
    params: str = ""
    """Further rules for stored parameters, "d_model:data" (ZeRO-3)."""
    optimizer: str = ""
    """Further rules for the optimizer's state (ZeRO-1); by default those of `params`."""
    hardware: str = "cpu"
    """The machine that the plan's time is worked out for, of `weft hardware list`."""


@dataclass(frozen=True)
class SaveConfig:
    """Checkpoints."""

    every: int = 200
    """Steps between two of them; the last step, and a signal to stop, save too."""
    keep: int = 3
    """How many stay."""


@dataclass(frozen=True)
class EvaluateConfig:
    """The loss on data that it does not learn from."""

    every: int = 200
    """Steps between two evaluations; 0: only at the end."""
    batches: int | None = None
    """At most so many batches each time; None: all."""


@dataclass(frozen=True)
class DiLoCoConfig:
    """Replicas that meet every so many steps (Douillard and others, 2023), along the dim `replicas`."""

    replicas: int = 0
    """How many; 0: no DiLoCo."""
    every: int = 50
    """Inner steps between two meetings."""
    rate: float = 0.7
    """The outer learning rate."""
    momentum: float = 0.9
    """The outer Nesterov momentum."""


@dataclass(frozen=True)
class HostsConfig:
    """Several processes; `weft launch` and clusters that JAX knows need none of these."""

    coordinator: str | None = None
    """Address and port of process 0."""
    processes: int | None = None
    """How many processes there are."""
    process: int | None = None
    """The number of this one, from 0 on."""
    wait: float = 1800.0
    """Seconds that a process waits for the others at any one point, before it ends with an error."""
    grace: float = 300.0
    """Seconds that a run has to stop and save, from SIGTERM or SIGINT on, before it ends without."""


@dataclass(frozen=True)
class TrainConfig:
    """All settings of a run."""

    preset: str
    """The known model that `model` begins with (weft models)."""
    folder: Path
    """Where checkpoints, curves and the run's settings are written; a run that is there goes on."""
    steps: int = 1000
    """How many steps."""
    seed: int = 0
    """Of the parameters, the order of the data, and dropout."""
    on_nan: Literal["stop", "skip"] = "stop"
    """A loss or gradient that is not finite: stop, or leave that step out."""
    nan_limit: int = 20
    """With "skip", how many steps may be left out."""
    log_every: int = 10
    """Steps between two lines, where there is no terminal to show progress on."""
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    layout: LayoutConfig = field(default_factory=LayoutConfig)
    save: SaveConfig = field(default_factory=SaveConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    diloco: DiLoCoConfig = field(default_factory=DiLoCoConfig)
    hosts: HostsConfig = field(default_factory=HostsConfig)
    model: Config = field(default_factory=Config)
    """The model. A vocab that is left as the preset has it becomes the tokenizer's."""

    def replace(self, **changes: Any) -> TrainConfig:
        """The same with some settings changed; another preset brings its model."""
        if "preset" in changes and "model" not in changes:
            changes["model"] = preset(changes["preset"]).config
        return dataclasses.replace(self, **changes)

    def __post_init__(self) -> None:
        object.__setattr__(self, "folder", Path(self.folder))
        rules = {
            flag: _range(flag, _setting(self, flag))
            for flag, ends in _RANGES.items()
            if not _inside(_setting(self, flag), *ends)
        }
        for flag, known in _CHOICES.items():
            if (value := _setting(self, flag)) not in known:
                rules[flag] = f"{flag} is one of {', '.join(known)}{nearest(str(value), known)}"
        if rules:
            raise ProgramError(
                ", ".join(f"{flag} {_setting(self, flag)}" for flag in rules),
                rule="; ".join(rules.values()),
                hint="weft train lm --help says what each setting is",
            )

    def check(self) -> None:
        """An error if two settings do not go together."""
        d, m, replicas, micro = self.data, self.model, self.diloco.replicas or 1, self.optimizer.micro
        parts = replicas * micro
        if d.rows % parts:
            each = [("--diloco.replicas", replicas), ("--optimizer.micro", micro)]
            flags = [f"{flag} {count}" for flag, count in each if count > 1]
            raise ProgramError(
                f"a batch of {d.rows} rows in {parts} parts: {_division(d.rows, parts)}",
                f"{' and '.join(flags)}",
                rule="a batch is dealt out evenly to replicas and their parts",
                hint=f"--data.rows {-(-d.rows // parts) * parts}, or other numbers of parts",
            )
        average = self.optimizer.average
        if self.diloco.replicas and average:
            raise ProgramError(
                f"--optimizer.average {average:g} and --diloco.replicas {self.diloco.replicas}",
                rule="replicas are evaluated as they last met: a running mean of each would never be used",
                hint="leave one of the two out",
            )
        longest = max(d.length, d.input_length or 0)
        if m.positions == "learned" and longest > m.longest:
            raise ProgramError(
                f"rows have {longest} places, and the model has {m.longest} learned positions",
                rule="--data.length and --data.input-length are at most the number of learned positions",
                hint=f"--model.longest {longest}; or --model.positions rotary, which do not end",
            )


# The values that numbers may have: from the first on, below the second.
_ANY, _SHARE = float("inf"), 1.0
_RANGES = {
    "--steps": (1, 2**31),  # the optimizer counts them in 32 bits
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
    f"--{before}{one.name.replace('_', '-')}": get_args(kinds[one.name])
    for before, section in (("", TrainConfig), ("data.", DataConfig), ("optimizer.", OptimizerConfig))
    for kinds in [get_type_hints(section)]
    for one in dataclasses.fields(section)
    if get_origin(kinds[one.name]) is Literal
}


def _inside(value: Any, least: float, most: float) -> bool:
    return value is None or (isinstance(value, int | float) and least <= value < most)


def _setting(config: TrainConfig, flag: str) -> Any:
    """The value that a flag sets."""
    value: Any = config
    for name in flag.removeprefix("--").replace("-", "_").split("."):
        value = getattr(value, name)
    return value


def _range(flag: str, value: Any) -> str:
    """What a flag may be, with a word more for a value that is no finite number."""
    least, most = _RANGES[flag]
    if most == _ANY:
        finite = not isinstance(value, float) or math.isfinite(value)
        return f"{flag} is {'' if finite else 'finite, and '}at least {least}"
    if isinstance(most, int):
        return f"{flag} is from {least} to {most - 1}"
    return f"{flag} is from {least} to 1" + (" and not 1" if most == _SHARE else "")


def _division(whole: int, parts: int) -> str:
    return f"{whole} = {parts} · {whole // parts} + {whole % parts}"


# From settings to an optimizer


def build_schedule(config: TrainConfig) -> Schedule:
    """The learning rate by step."""
    o = config.optimizer
    rise = LinearWarmup(o.warmup) if o.warmup else Constant(1.0)
    left = max(config.steps - o.warmup, 1)
    falls: dict[str, Callable[[], Schedule]] = {
        "constant": lambda: Constant(1.0),
        "cosine": lambda: Cosine(left, floor=o.last, after=o.warmup),
        "linear": lambda: LinearDecay(config.steps, left),
        "rsqrt": lambda: math.sqrt(max(o.warmup, 1)) * RsqrtDecay(max(o.warmup, 1)),
    }
    return o.rate * rise * falls[o.schedule]()


# By the names that settings and `--train` have for them.
OPTIMIZERS: dict[str, Callable[[float | Schedule, OptimizerConfig], Optimizer]] = {
    "adafactor": lambda rate, o: Adafactor(rate, weight_decay=o.weight_decay),
    "adamw": lambda rate, o: AdamW(rate, beta1=o.beta1, beta2=o.beta2, weight_decay=o.weight_decay),
    "lion": lambda rate, o: Lion(rate, beta1=o.beta1, beta2=o.beta2, weight_decay=o.weight_decay),
    "momentum": lambda rate, o: Momentum(rate, momentum=o.beta1, weight_decay=o.weight_decay),
}


def build_optimizer(config: TrainConfig) -> Optimizer:
    """The optimizer, with its schedule."""
    return OPTIMIZERS[config.optimizer.kind](build_schedule(config), config.optimizer)


# Recipes


def recipes() -> dict[str, str]:
    """The names of the recipes, and what each trains."""
    return {name: about for name, (about, _) in _RECIPES.items()}


def recipe(name: str, preset_name: str | None = None) -> TrainConfig:
    """The settings that a recipe begins with, perhaps for another preset."""
    if name not in _RECIPES:
        raise ProgramError(
            f"there is no recipe {name!r}{nearest(name, _RECIPES)}",
            *[f"{known}: {about}" for known, about in recipes().items()],
            rule="training begins with a recipe, or with a TOML file",
            hint="weft train lm; or weft train FILE.toml",
        )
    config = _RECIPES[name][1]
    return config if preset_name is None else with_preset(config, preset_name)


def with_preset(config: TrainConfig, name: str) -> TrainConfig:
    """The same run of another known model."""
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
