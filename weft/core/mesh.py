"""Meshes: processors arranged along named axes.

    >>> Mesh("data=4 model=2")
    Mesh("data=4 model=2")
    >>> Mesh("data=4 model=2").size
    8

A mesh is a naming, not a topology. One with more processors than this machine has is still good for
planning; only running needs devices. `Mesh()` has no axes: one device.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterable, Mapping
from typing import Any, SupportsIndex

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType

from .dims import is_name, parse_pairs
from .errors import MeshError


class Mesh:
    """Processors arranged along named axes.

    Args:
      axes: `"data=4 model=2"`, `"data:4;model:2"`, a mapping, or pairs; a size of -1 takes what is
        left of the devices.
      devices: the devices to use, in row-major order; by default the first ones of `jax.devices()`.

    >>> import weft as wf
    >>> mesh = wf.Mesh("data=4 model=2")
    >>> wf.place(wf.ones("batch=4"), mesh, "batch:data")
    f32[batch=4/data·4] [1., 1., 1., 1.]
    """

    __slots__ = ("__dict__", "_devices", "_hash", "axes")

    def __init__(self, axes: Any = (), devices: Any = None):
        if isinstance(axes, str):
            pairs = [(n, int(s)) for n, s in parse_pairs(axes, "=:", MeshError, "Mesh", "mesh axis")]
        elif isinstance(axes, Iterable):
            pairs = list(axes.items() if isinstance(axes, Mapping) else axes)
        else:
            pairs = [axes]
        self._devices = None if devices is None else tuple(np.array([*devices], object).flat)
        self.axes: tuple[tuple[str, int], ...] = _checked(pairs, self._devices)
        if self._devices is not None and len(self._devices) != self.size:
            raise MeshError(
                f'mesh "{self}" has {self.size} places, and devices= has {len(self._devices)} devices',
                rule="devices are one for each place of the mesh, in row-major order",
                hint="give as many devices as places, or leave devices out for the first ones there are",
            ).located(repr(self))
        self._hash = hash((self.axes, self._devices))

    @classmethod
    def of(cls, given: Any) -> Mesh:
        """A mesh as it is, or one made of what makes one; None is one device."""
        return given if isinstance(given, Mesh) else cls(() if given is None else given)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the axes."""
        return tuple(name for name, _ in self.axes)

    @functools.cached_property
    def shape(self) -> dict[str, int]:
        """Sizes by name."""
        return dict(self.axes)

    @property
    def size(self) -> int:
        """The number of processors."""
        return math.prod(size for _, size in self.axes)

    def cuts(self, axis: str) -> bool:
        """Whether dims on an axis are cut."""
        return self.shape[axis] > 1

    @functools.cached_property
    def is_whole(self) -> bool:
        """Whether nothing is cut: a program needs no collectives."""
        return not any(map(self.cuts, self.names))

    def ways(self, axes: tuple[str, ...]) -> int:
        """How many pieces a dim on these axes is cut into."""
        return math.prod(self.shape[axis] for axis in axes)

    @property
    def is_anywhere(self) -> bool:
        """Whether it is any one device: there are no axes, and none was named."""
        return not self.axes and self._devices is None

    @property
    def is_one_named(self) -> bool:
        """Whether it is one device that was named."""
        return self._devices is not None and self.size == 1

    @functools.cached_property
    def has_devices(self) -> bool:
        """Whether there are enough devices to run on this mesh."""
        return self._devices is not None or self.size <= len(jax.devices())

    @functools.cached_property
    def jax_mesh(self) -> jax.sharding.Mesh | AbstractMesh:
        """The JAX mesh to trace with; an abstract one where there are too few devices."""
        sizes, types = tuple(size for _, size in self.axes), (AxisType.Auto,) * len(self.axes)
        if not self.has_devices:
            return AbstractMesh(sizes, self.names, axis_types=types)
        # JAX's own default is Explicit axes, which shard_map then checks in_specs against.
        if self._devices is None:
            return jax.make_mesh(sizes, self.names, axis_types=types, devices=jax.devices()[: self.size])
        # make_mesh would put them in an order that suits the network; these have been put in order already.
        devices = np.array(self._devices, object).reshape(sizes)
        return jax.sharding.Mesh(devices, self.names, axis_types=types)

    def require_devices(self) -> None:
        """An error unless this mesh can run here."""
        if not self.has_devices:
            have = len(jax.devices())
            raise MeshError(
                f'mesh "{self}" needs {self.size} devices, and there are {have}',
                f"{' · '.join(str(s) for _, s in self.axes)}"
                f"{f' = {self.size}' if len(self.axes) > 1 else ''} > {have}",
                rule="running needs one device for each place of the mesh; planning needs none",
                hint=f"on a CPU call wf.cpu_devices({self.size}) before the first use of JAX; "
                "or take a smaller mesh",
            ).located(repr(self))

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, Mesh) and self.axes == other.axes and self._devices == other._devices
        )

    def __hash__(self) -> int:
        return self._hash

    def __str__(self) -> str:
        return " ".join(f"{name}={size}" for name, size in self.axes)

    def __repr__(self) -> str:
        return f'Mesh("{self}")'


def _checked(given: list[Any], devices: tuple[Any, ...] | None) -> tuple[tuple[str, int], ...]:
    pairs: list[tuple[str, int]] = []
    for pair in given:
        name, size = pair if isinstance(pair, tuple | list) and len(pair) == 2 else (None, None)
        if is_name(name) and isinstance(size, SupportsIndex) and not isinstance(size, bool):
            pairs.append((name, operator.index(size)))
        else:
            raise MeshError(
                f"{pair!r} is not an axis of a mesh",
                rule="an axis is a name and a whole size",
                hint='for example Mesh("data=4 model=2") or Mesh([("data", 4), ("model", 2)])',
            ).located(f"Mesh({given!r})")
    names = [name for name, _ in pairs]
    twice = sorted({name for name in names if names.count(name) > 1})
    open_axes = [name for name, size in pairs if size == -1]
    wrong = [f"{name}={size}" for name, size in pairs if size < 1 and size != -1]
    shown = " ".join(f"{name}={size}" for name, size in pairs)
    if twice or wrong or len(open_axes) > 1:
        fact = (
            f"axis {', '.join(twice)} occurs twice in mesh"
            if twice
            else f"{', '.join(wrong)} is not a size for an axis of mesh"
            if wrong
            else f"axes {' and '.join(open_axes)} are both -1 in mesh"
        )
        raise MeshError(
            f'{fact} "{shown}"',
            rule="axes have different names and sizes of at least 1; at most one size is -1",
            hint='for example "data=-1 model=2" takes all devices, two by two',
        ).located(f'Mesh("{shown}")')
    if open_axes:
        have = len(devices) if devices is not None else len(jax.devices())
        rest = math.prod(size for _, size in pairs if size != -1)
        if have % rest:
            raise MeshError(
                f'mesh "{shown}" can\'t take up {have} devices',
                f"{have} / {rest} is not whole",
                rule="the axis of size -1 takes the devices that are left, evenly",
                hint="choose the other sizes so that they divide the number of devices",
            ).located(f'Mesh("{shown}")')
        pairs = [(name, have // rest if size == -1 else size) for name, size in pairs]
    return tuple(pairs)
