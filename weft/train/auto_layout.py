"""`--layout auto`: the mesh and the layout that the search finds for a run."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

import jax

import weft as wf
from weft import nn
from weft.autolayout.report import describe_candidate
from weft.core.errors import LayoutError
from weft.core.layout import Layout
from weft.core.mesh import Mesh
from weft.core.placement import without_values
from weft.models import Transformer

from .config import LayoutConfig, TrainConfig
from .trainer import build_trainer

AUTO = "auto"
SEARCHED_DIMS = (
    "replicas",
    "batch",
    "heads",
    "kv_heads",
    "d_ff",
    "experts",
    "vocab",
    "layers",
)  # what is worth splitting


def dims_to_search(args: Any) -> list[str]:
    """Those of `DIMS` that the tensors of a step have."""
    tensors = filter(wf.is_tensor, jax.tree.leaves(args, is_leaf=wf.is_tensor))
    names = {dim.name for tensor in tensors for dim in tensor.dims if dim.size > 1}
    return [name for name in SEARCHED_DIMS if name in names]


def search_layout(config: TrainConfig, batch: Any) -> LayoutConfig:
    """Where the search would have it run: on the mesh that the settings say, else on any of all devices.

    Args:
      batch: one of the run's.
    """
    place = config.layout
    given = [name for name in ("params", "optimizer") if getattr(place, name)]
    if given:
        raise LayoutError(
            f"--layout auto with {' and '.join(f'--layout.{name}' for name in given)}",
            *(f'{name}: "{getattr(place, name)}"' for name in given),
            rule="the search finds the rules for all tensors, stored ones too",
            hint="leave them out, or say all rules: --layout.rules",
        ).located("--layout auto")
    step = build_trainer(config, Mesh(), Layout())
    model, state = step.init(nn.specs(Transformer(config.model)))
    rows = jax.tree.map(without_values, batch, is_leaf=wf.is_tensor)
    mesh = Mesh(place.mesh) if place.mesh else None
    args = (model, state, rows, jax.random.key(config.seed))
    found = wf.search(
        step.program,
        args,
        devices=len(jax.devices()) if mesh is None else None,
        mesh=mesh,
        hardware=place.hardware,
        dims=dims_to_search(args),
    )
    best = found.best
    if best is None:
        raise LayoutError(
            f"no layout fits the memory of {place.hardware}",
            found.explain().rstrip(),
            rule="what a step needs at its peak fits the memory of a device",
            hint="more devices, --model.remat nothing, --optimizer.micro 4, or a smaller model",
        ).located("--layout auto")
    if jax.process_index() == 0:
        print(
            "\n".join(["the layout that was found:", *(f"  {line}" for line in describe_candidate(best))]),
            file=sys.stderr,
        )
    c = best.candidate
    return dataclasses.replace(
        place,
        mesh=str(best.mesh),
        rules=c.rules,
        params=c.params,
        optimizer=c.optimizer,
    )
