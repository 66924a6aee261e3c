"""`--layout auto`: search for the mesh and the layout of a run."""

from __future__ import annotations

import dataclasses
import sys

import jax

import weft as wf
from weft import nn
from weft.autolayout.report import describe_candidate
from weft.core.errors import LayoutError
from weft.core.layout import Placement
from weft.core.mesh import Mesh
from weft.core.placement import without_values
from weft.core.types import PyTree
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
)  # the dims worth splitting


def dims_to_search(args: PyTree) -> list[str]:
    """The dims of `SEARCHED_DIMS` that occur in the arguments of a step."""
    tensors = filter(wf.is_tensor, jax.tree.leaves(args, is_leaf=wf.is_tensor))
    names = {dim.name for tensor in tensors for dim in tensor.dims if dim.size > 1}
    return [name for name in SEARCHED_DIMS if name in names]


def search_layout(config: TrainConfig, batch: PyTree) -> LayoutConfig:
    """The best mesh and layout: on the mesh of the settings, or else on any mesh of all devices.

    Args:
      config: the settings, with `layout.rules` "auto".
      batch: a batch of the run.
    """
    c = config.layout
    given = [name for name in ("params", "optimizer") if getattr(c, name)]
    if given:
        raise LayoutError(
            f"--layout auto with {' and '.join(f'--layout.{name}' for name in given)}",
            *(f'{name}: "{getattr(c, name)}"' for name in given),
            rule="the search finds the rules for all tensors, including stored ones",
            hint="omit them, or give all rules: --layout.rules",
        ).located("--layout auto")
    trainer = build_trainer(config, Placement.of(None, None))
    model, state = trainer.init(nn.specs(Transformer(config.model)))
    rows = jax.tree.map(without_values, batch, is_leaf=wf.is_tensor)
    mesh = Mesh(c.mesh) if c.mesh else None
    args = (model, state, rows, jax.random.key(config.seed))
    found = wf.search(
        trainer.program,
        args,
        devices=len(jax.devices()) if mesh is None else None,
        mesh=mesh,
        hardware=c.hardware,
        dims=dims_to_search(args),
    )
    best = found.best
    if best is None:
        raise LayoutError(
            f"no layout fits the memory of {c.hardware}",
            found.explain().rstrip(),
            rule="the peak memory of a step must fit on a device",
            hint="use more devices, --model.remat nothing, --optimizer.micro 4, or a smaller model",
        ).located("--layout auto")
    if jax.process_index() == 0:
        print(
            "\n".join(
                ["the layout found by the search:", *(f"  {line}" for line in describe_candidate(best))]
            ),
            file=sys.stderr,
        )
    rules = best.candidate
    return dataclasses.replace(
        c, mesh=str(best.mesh), rules=rules.rules, params=rules.params, optimizer=rules.optimizer
    )
