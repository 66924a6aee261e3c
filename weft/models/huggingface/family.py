"""A family of models: from its config.json to a `Config`, from its tensor names to ours.

A family is a table. One part maps keys of config.json to fields of a `Config`; another maps stored tensors to
parameters, and describes how the stored dimensions are composed of our dims:

    ours     decoder.blocks.attention.query.weight    [layers, d_model, kv_heads, heads, d_kv]
    theirs   layers.{layer}.self_attn.q_proj.weight
    dims     (kv_heads heads d_kv) d_model

Dims in parentheses form one stored dimension, the last one varying fastest; dims that the parameter doesn't
have are skipped. A number is the number of parts of a fused tensor, of which the row selects one: `(3 heads
d_kv)`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from weft.core.errors import ModelError

from ..config import Config

LM_HEAD = "lm_head.weight"  # the output layer, in all families


@dataclass(frozen=True)
class Row:
    """Where one parameter is stored.

    Attributes:
      ours: the parameter's name.
      theirs: the stored tensor's name, without the family's prefix; `{layer}` is the layer's index.
      dims: how its dimensions are composed of our dims.
      part: the index of the part of a fused tensor.
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
      name: its `model_type` in config.json.
      architecture: its class in transformers.
      prefix: the prefix of all names except the output layer's; a file may lack it.
      fixed: the `Config` fields that all its models share.
      sizes: by `Config` field, the required key of config.json.
      options: by `Config` field, the optional key of config.json and its default.
      activation: the key of the activation, its default, and our names of its values.
      required: by key, the only value that `Transformer` supports, which is also the default.
      read: the remaining `Config` fields, from config.json.
      write: the remaining keys of config.json, from a `Config`.
      rows: the tensors of a model.
      aliases: alternative names of a tensor that a file may use.
      ignored: a pattern of tensors that no model needs.
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
        """The `Config` that config.json describes."""
        missing = [key for key in self.sizes.values() if not isinstance(settings.get(key), int)]
        if missing:
            raise ModelError(
                f"config.json of a {self.name} model has no integer for {', '.join(missing)}",
                rule=f"it defines the sizes {', '.join(self.sizes.values())}",
                hint="it may belong to another kind of model: check its model_type",
            )
        key, default, activations = self.activation
        for name, supported in self.required.items():
            if settings.get(name, supported) not in (supported, None):
                raise unsupported(self.name, name, settings[name], supported)
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


def unsupported(family: str, key: str, value: object, *supported: object) -> ModelError:
    """The error for a model that `Transformer` does not support."""
    return ModelError(
        f"config.json has {key} = {value!r}",
        f"for {family} models, {' or '.join(map(repr, supported))} is supported",
        rule="a checkpoint is loaded if Transformer computes exactly the function it was trained with",
        hint="choose another checkpoint, or load it with PyTorch's transformers",
    )


# Rows that several families use

HEADS = "(kv_heads heads d_kv)"


def linear(ours: str, theirs: str, inputs: str, outputs: str) -> tuple[Row, ...]:
    """A PyTorch linear layer: outputs come first."""
    weight = Row(f"{ours}.weight", f"{theirs}.weight", f"{outputs} {inputs}")
    return weight, Row(f"{ours}.bias", f"{theirs}.bias", outputs)


def norm(ours: str, theirs: str) -> tuple[Row, ...]:
    """A norm's scale, and its bias if it has one."""
    scale = Row(f"{ours}.scale", f"{theirs}.weight", "d_model")
    return scale, Row(f"{ours}.bias", f"{theirs}.bias", "d_model")


def attention(ours: str, theirs: str, names: str) -> tuple[Row, ...]:
    """The projections of attention; `names` are theirs of query, key, value and output."""
    query, key, value, out = names.split()
    return (
        *linear(f"{ours}.query", f"{theirs}.{query}", "d_model", HEADS),
        *linear(f"{ours}.key", f"{theirs}.{key}", "d_model", HEADS),
        *linear(f"{ours}.value", f"{theirs}.{value}", "d_model", HEADS),
        *linear(f"{ours}.out", f"{theirs}.{out}", HEADS, "d_model"),
    )


LM_HEAD_ROW = Row("last.weight", LM_HEAD, "vocab d_model")
