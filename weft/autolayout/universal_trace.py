"""The universal trace: one trace of a program with every dim split over a mesh axis of its own, of size 1.

With one axis per dim every rule is legal, and axes of size 1 leave all arrays at full size. The trace still
contains each sum and gather that splitting a dim causes, over that dim's axis. One trace therefore holds the
costs of all layouts (`cost_atoms`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from jax.sharding import AbstractMesh, AxisType

from ..core.dims import Dim
from ..core.errors import LayoutError
from ..core.layout import Layout, Splits
from ..core.mesh import Mesh
from ..core.program import Program
from ..core.types import PyTree

MAX_DIMS = 64  # the number of axes of the mesh; no program we know has as many dims


class UniversalMesh(Mesh):
    """Axes of size 1 that count as splitting; only for tracing."""

    has_devices = False

    def __init__(self) -> None:
        super().__init__([(f"axis{n}", 1) for n in range(MAX_DIMS)])

    @property
    def jax_mesh(self) -> AbstractMesh:
        return AbstractMesh((1,) * MAX_DIMS, self.names, axis_types=(AxisType.Auto,) * MAX_DIMS)

    # The lowering normally drops collectives over axes of size 1. Here they are what the search reads.
    @property
    def splitting_axes(self) -> frozenset[str]:
        return frozenset(self.names)


class UniversalLayout(Layout):
    """Assigns every dim its own axis when it first occurs, except `unsplittable` dims.

    Attributes:
      axes: the axis of each dim.
      unsplittable: dims that stay unsplit.
    """

    __slots__ = ("_free", "axes", "unsplittable")

    def __init__(self, mesh: Mesh, unsplittable: frozenset[str] = frozenset()):
        super().__init__()
        self.axes: dict[str, str] = {}
        self.unsplittable = unsplittable
        self._free = iter(mesh.names)

    # The rules grow during the trace, so equality and hash can't depend on them.
    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def rules_for(self, role: str = "value") -> dict[str, tuple[str, ...]]:
        return {name: (axis,) for name, axis in self.axes.items()}

    def splits(self, dims: Sequence[Dim], mesh: Mesh, role: str = "value") -> Splits:
        # A rule can't name an inner dim, so no candidate splits one.
        is_split = [d.size > 1 and not d.is_inner and d.name not in self.unsplittable for d in dims]
        return tuple(
            (self._axis_of(d.name),) if split else () for d, split in zip(dims, is_split, strict=True)
        )

    def _axis_of(self, name: str) -> str:
        if name not in self.axes:
            axis = next(self._free, None)
            if axis is None:
                raise LayoutError(
                    f"the program has more than {MAX_DIMS} dims: {name} is one too many",
                    rule=f"a search handles programs of at most {MAX_DIMS} dims with different names",
                    hint="give the same name to dims that never occur together",
                )
            self.axes[name] = axis
        return self.axes[name]


def program_on(fn: Callable[..., PyTree], mesh: Mesh, layout: Layout) -> Program:
    """A function as a program for a mesh and a layout; a program keeps its static and donated arguments."""
    if isinstance(fn, Program):
        return Program(fn.fn, mesh, layout, static=fn.static, donate=fn.donate)
    return Program(fn, mesh, layout)
