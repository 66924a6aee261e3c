"""From a jaxpr to the list of its collectives, with trip counts."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jax.extend import core as jax_core
from jax.interpreters import partial_eval

from ..mesh import Mesh

KINDS = {
    "psum": "all-reduce",
    "psum_invariant": "all-reduce",
    "pmax": "all-reduce",
    "pmin": "all-reduce",
    "all_gather": "all-gather",
    "all_gather_invariant": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "all_to_all": "all-to-all",
    "ppermute": "permute",
}


@dataclass(frozen=True)
class Collective:
    """One collective of a program.

    Attributes:
      kind: all-reduce, all-gather, reduce-scatter, all-to-all or permute.
      axes: the mesh axes that it runs over.
      bytes: on one device: the operand's, for an all-gather the result's.
      count: how often it runs in one call of the program.
      op: the op of the language that called for it, with JAX's marks for the backward pass.
    """

    kind: str
    axes: tuple[str, ...]
    bytes: int
    count: int
    op: str

    def __str__(self) -> str:
        times = f" × {self.count}" if self.count != 1 else ""
        return f"{self.kind} over {'+'.join(self.axes)}: {self.bytes} bytes{times} ({self.op})"


def collectives_of(closed: Any, mesh: Mesh) -> list[Collective]:
    """Every collective in a closed jaxpr; dead code is left out."""
    jaxpr, _ = partial_eval.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars))
    return list(_walk(jaxpr, mesh, 1, ""))


def _walk(jaxpr: Any, mesh: Mesh, times: int, outer: str) -> Iterator[Collective]:
    for eqn in jaxpr.eqns:
        # Inside a scanned body equations carry only their own part of the name: it is put together
        # on the way down.
        name = "/".join(part for part in (outer, str(eqn.source_info.name_stack)) if part)
        kind = KINDS.get(eqn.primitive.name)
        if kind is not None:
            axes = _axes(eqn.params)
            variables = eqn.outvars if kind == "all-gather" else eqn.invars
            yield Collective(kind, axes, sum(_bytes(v.aval) for v in variables), times, name)
            continue
        inner = times * eqn.params["length"] if eqn.primitive.name == "scan" else times
        for sub in jax_core.jaxprs_in_params(eqn.params):
            yield from _walk(getattr(sub, "jaxpr", sub), mesh, inner, name)


def _axes(params: dict[str, Any]) -> tuple[str, ...]:
    axes = params.get("axes", params.get("axis_name"))
    return tuple(axes) if isinstance(axes, tuple | list | frozenset) else (axes,)  # type: ignore[return-value]


def _bytes(aval: Any) -> int:
    return math.prod(aval.shape) * aval.dtype.itemsize
