"""A program traced with every dim on an axis of its own, each of one device.

There every rule is legal and nothing is cut, and yet each sum and gather that splitting a dim calls for is in
the trace, of whole tensors and over the dim's axis. So one trace tells of all layouts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.sharding import AbstractMesh, AxisType

from ..core.dims import Dim
from ..core.errors import LayoutError
from ..core.layout import Layout, Splits
from ..core.mesh import Mesh
from ..core.program import Program

MAX_DIMS = 64  # more than a program has dims


class UniversalMesh(Mesh):
    """Axes of one device each that cut all the same; good for tracing only."""

    has_devices = False

    def __init__(self) -> None:
        super().__init__([(f"axis{n}", 1) for n in range(MAX_DIMS)])

    @property
    def jax_mesh(self) -> AbstractMesh:
        return AbstractMesh((1,) * MAX_DIMS, self.names, axis_types=(AxisType.Auto,) * MAX_DIMS)

    def splits_dims(self, axis: str) -> bool:
        return True


class UniversalLayout(Layout):
    """Gives every dim an axis of its own when it first occurs, but for those that are to stay whole."""

    __slots__ = ("_free", "axes", "whole")

    def __init__(self, mesh: Mesh, whole: frozenset[str] = frozenset()):
        super().__init__()
        self.axes: dict[str, str] = {}
        self.whole = whole
        self._free = iter(mesh.names)

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def rules_for(self, role: str = "value") -> dict[str, tuple[str, ...]]:
        return {name: (axis,) for name, axis in self.axes.items()}

    def splits(self, dims: Sequence[Dim], mesh: Mesh, role: str = "value") -> Splits:
        cut = [d.size > 1 and not d.is_inner and d.name not in self.whole for d in dims]
        return tuple((self._axis(d.name),) if one else () for d, one in zip(dims, cut, strict=True))

    def _axis(self, name: str) -> str:
        if name not in self.axes:
            axis = next(self._free, None)
            if axis is None:
                raise LayoutError(
                    f"the program has more than {MAX_DIMS} dims: {name} is one too many",
                    rule=f"a search is for programs of at most {MAX_DIMS} dims of different names",
                    hint="give dims that are never together one name",
                )
            self.axes[name] = axis
        return self.axes[name]


def program_on(fn: Any, mesh: Mesh, layout: Layout) -> Program:
    """A function, or what a program is made of, as a program of a mesh and a layout."""
    if isinstance(fn, Program):
        return Program(fn.fn, mesh, layout, static=fn.static, donate=fn.donate)
    return Program(fn, mesh, layout)
