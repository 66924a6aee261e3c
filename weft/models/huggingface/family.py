"""A family of models: from its config.json to a `Config`, from its tensors' names to ours.

A family is a table. One part says which key of config.json is which number of a `Config`, another which
stored tensor is which parameter, and how its dimensions are made of ours:

    ours     decoder.blocks.attention.query.weight    [layers, d_model, kv_heads, heads, d_kv]
    theirs   layers.{layer}.self_attn.q_proj.weight
    dims     (kv_heads heads d_kv) d_model

Dims in parentheses are one stored dimension, the last of them the fastest; those that the parameter doesn't
have are left out. A number stands for parts of a fused tensor, of which the row names one: `(3 heads d_kv)`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from weft.core.errors import ModelError

from ..config import Config

LM_HEAD = "lm_head.weight"  # the last layer, in all families


@dataclass(frozen=True)
class Row:
    """One parameter, and where it is stored.

    Attributes:
      ours: the parameter's name.
      theirs: the stored tensor's name, without the family's prefix; `{layer}` is the layer's number.
      dims: how its dimensions are made of ours.
      part: the number of the part of a fused tensor.
    """

    ours: str
    theirs: str
    dims: str
    part: int = 0

    @property
    def groups(self) -> list[list[str]]:
        """The names in each stored dimension: `[["kv_heads", "heads", "d_kv"], ["d_model"]]`."""
        return [group.strip("()").split() for group in re.findall(r"\([^)]*\)|\S+", self.dims)]


@dataclass(frozen=True)
class Family:
    """One kind of checkpoint.

    Attributes:
      name: what config.json calls it, `model_type`.
      architecture: the class that transformers makes of it.
      prefix: in front of all names but the last layer's; a file may lack it.
      fixed: what all its models have in common.
      sizes: by number of a `Config`, the key of config.json, which has to be there.
      options: the same for keys that may be missing, and the value that this means.
      activation: the key of the activation, its default, and what its values are called here.
      required: by key, the only value that `Transformer` can do. A missing key means this one.
      read: the other numbers, from config.json.
      write: the other keys, from a `Config`.
      rows: the tensors of a model.
      aliases: other names of a tensor that a file may use instead.
      ignored: tensors that no model needs, as a pattern.
    """

    name: str
    architecture: str
    prefix: str
    fixed: Mapping[str, Any]
    sizes: Mapping[str, str]
    options: Mapping[str, tuple[str, Any]]
    activation: tuple[str, str, Mapping[str, str]]
    required: Mapping[str, Any]
    read: Callable[[Mapping[str, Any]], dict[str, Any]]
    write: Callable[[Config], dict[str, Any]]
    rows: Callable[[Config], tuple[Row, ...]]
    aliases: Mapping[str, tuple[str, ...]]
    ignored: str

    def stored(self, name: str) -> str:
        """The full name of a stored tensor."""
        return name if name == LM_HEAD else self.prefix + name

    def config(self, settings: Mapping[str, Any]) -> Config:
        """What config.json describes."""
        missing = [key for key in self.sizes.values() if not isinstance(settings.get(key), int)]
        if missing:
            raise ModelError(
                f"config.json of a {self.name} model has no whole number for {', '.join(missing)}",
                rule=f"it has the sizes {', '.join(self.sizes.values())}",
                hint="it may be of another kind of model: look at its model_type",
            )
        key, default, activations = self.activation
        for name, can in self.required.items():
            if settings.get(name, can) not in (can, None):
                raise unsupported(self.name, name, settings[name], can)
        if settings.get(key, default) not in activations:
            raise unsupported(self.name, key, settings[key], *activations)
        return Config(
            **self.fixed,
            **{ours: settings[theirs] for ours, theirs in self.sizes.items()},
            **{
                ours: default if settings.get(theirs) is None else settings[theirs]
                for ours, (theirs, default) in self.options.items()
            },
            activation=activations[settings.get(key, default)],
            **self.read(settings),
        )

    def settings(self, config: Config) -> dict[str, Any]:
        """The config.json of a model."""
        key, default, activations = self.activation
        theirs = (name for name, ours in activations.items() if ours == config.activation)
        return {
            "model_type": self.name,
            "architectures": [self.architecture],
            **self.required,
            **{theirs: getattr(config, ours) for ours, theirs in self.sizes.items()},
            **{theirs: getattr(config, ours) for ours, (theirs, _) in self.options.items()},
            key: next(theirs, default),
            **self.write(config),
        }


def unsupported(family: str, key: str, value: Any, *can: Any) -> ModelError:
    """The error for a model that `Transformer` is not."""
    return ModelError(
        f"config.json asks for {key} = {value!r}",
        f"of {family} models this can be {' or '.join(map(repr, can))} here",
        rule="a checkpoint is loaded if Transformer computes exactly what it was trained to",
        hint="choose another checkpoint, or load it with PyTorch's transformers",
    )


# Rows that families share

HEADS = "(kv_heads heads d_kv)"


def linear(ours: str, theirs: str, inputs: str, outputs: str) -> tuple[Row, ...]:
    """A PyTorch linear map: outputs come first."""
    weight = Row(f"{ours}.weight", f"{theirs}.weight", f"{outputs} {inputs}")
    return weight, Row(f"{ours}.bias", f"{theirs}.bias", outputs)


def norm(ours: str, theirs: str) -> tuple[Row, ...]:
    scale = Row(f"{ours}.scale", f"{theirs}.weight", "d_model")
    return scale, Row(f"{ours}.bias", f"{theirs}.bias", "d_model")


def attention(ours: str, theirs: str, names: str) -> tuple[Row, ...]:
    query, key, value, out = names.split()
    return (
        *linear(f"{ours}.query", f"{theirs}.{query}", "d_model", HEADS),
        *linear(f"{ours}.key", f"{theirs}.{key}", "d_model", HEADS),
        *linear(f"{ours}.value", f"{theirs}.{value}", "d_model", HEADS),
        *linear(f"{ours}.out", f"{theirs}.{out}", HEADS, "d_model"),
    )


LM_HEAD_ROW = Row("last.weight", LM_HEAD, "vocab d_model")
