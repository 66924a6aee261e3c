"""Meshes: devices arranged along named axes.

    >>> Mesh("data=4 model=2")
    Mesh("data=4 model=2")
    >>> Mesh("data=4 model=2").size
    8

A mesh names axes; it does not describe a network topology. A mesh with more devices than this machine has
can still be planned for; only running needs the devices. `Mesh()` has no axes: one device.
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

from .call_errors import reports_construction
from .dims import is_name, parse_pairs
from .errors import MeshError

AxesLike = str | Mapping[str, int] | Iterable[tuple[str, int]]


@reports_construction
class Mesh:
    """Devices arranged along named axes.

    Args:
      axes: `"data=4 model=2"`, `"data:4;model:2"`, a mapping, or pairs; a size of -1 takes all
        remaining devices.
      devices: the devices to use, in row-major order; by default the first ones of `jax.devices()`.

    >>> import weft as wf
    >>> mesh = wf.Mesh("data=4 model=2")
    >>> wf.place(wf.ones("batch=4"), mesh, "batch:data")
    f32[batch=4/data·4] [1., 1., 1., 1.]
    """

    __slots__ = ("__dict__", "_devices", "_hash", "axes")

    def __init__(self, axes: AxesLike = (), devices: Iterable[Any] | None = None):
        pairs: list[Any]  # Any, because `_validated` reports wrong types in the words of a mesh
        if isinstance(axes, str):
            pairs = [(n, int(s)) for n, s in parse_pairs(axes, "=:", MeshError, "Mesh", "mesh axis")]
        elif isinstance(axes, Iterable):
            pairs = list(axes.items() if isinstance(axes, Mapping) else axes)
        else:
            pairs = [axes]
        # `flat`: a nested list or an array of devices, as jax.sharding.Mesh takes, is accepted too.
        if devices is not None and (isinstance(devices, str) or not isinstance(devices, Iterable)):
            raise MeshError(
                f"devices= is {devices!r}",
                rule="devices= has one device for each position of the mesh, in row-major order",
                hint="omit devices= to use the first ones; or choose some, devices=jax.devices()[:2]",
            )
        self._devices = None if devices is None else tuple(np.array([*devices], object).flat)
        self.axes: tuple[tuple[str, int], ...] = _validated(pairs, self._devices)
        if self._devices is not None and len(self._devices) != self.size:
            raise MeshError(
                f'mesh "{self}" has {self.size} positions, and devices= has {len(self._devices)} devices',
                rule="devices= has one device for each position of the mesh, in row-major order",
                hint="pass one device per position, or omit devices= to use the first ones of jax.devices()",
            ).located(repr(self))
        self._hash = hash((self.axes, self._devices))  # once: meshes are part of every cache key

    @classmethod
    def of(cls, given: MeshLike) -> Mesh:
        """Convert to a Mesh: a Mesh is returned as it is, and None is one device."""
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
        """The number of devices."""
        return math.prod(size for _, size in self.axes)

    # A property, so that the layout search can count axes of size 1 as ones that split.
    @functools.cached_property
    def splitting_axes(self) -> frozenset[str]:
        """The axes that split the dims that are mapped to them: their size is above 1."""
        return frozenset(name for name, size in self.axes if size > 1)

    @functools.cached_property
    def is_unsplit(self) -> bool:
        """Whether no axis splits anything, so that programs need no collectives."""
        return not self.splitting_axes

    def ways(self, axes: tuple[str, ...]) -> int:
        """How many slices these axes split a dim into."""
        return math.prod(self.shape[axis] for axis in axes)

    @property
    def is_default(self) -> bool:
        """Whether this is the default: no axes, and no device chosen. Tensors stay where they are."""
        return not self.axes and self._devices is None

    @property
    def is_chosen_device(self) -> bool:
        """Whether this is a single device that the user chose."""
        return self._devices is not None and self.size == 1

    @functools.cached_property
    def has_devices(self) -> bool:
        """Whether there are enough devices to run on this mesh."""
        return self._devices is not None or self.size <= len(jax.devices())

    @functools.cached_property
    def jax_mesh(self) -> jax.sharding.Mesh | AbstractMesh:
        """The JAX mesh to trace with; an abstract one if there are too few devices."""
        sizes, types = tuple(size for _, size in self.axes), (AxisType.Auto,) * len(self.axes)
        if not self.has_devices:
            return AbstractMesh(sizes, self.names, axis_types=types)
        # JAX's own default is Explicit axes, and shard_map then checks in_specs against them.
        if self._devices is None:
            return jax.make_mesh(sizes, self.names, axis_types=types, devices=jax.devices()[: self.size])
        # make_mesh would reorder the devices for the network; the user has already ordered these.
        devices = np.array(self._devices, object).reshape(sizes)
        return jax.sharding.Mesh(devices, self.names, axis_types=types)

    def require_devices(self) -> None:
        """Raise an error unless there are enough devices to run on this mesh."""
        if not self.has_devices:
            have = len(jax.devices())
            raise MeshError(
                f'mesh "{self}" needs {self.size} devices, and there are {have}',
                f"{' · '.join(str(s) for _, s in self.axes)}"
                f"{f' = {self.size}' if len(self.axes) > 1 else ''} > {have}",
                rule="running needs one device for each position of the mesh; planning needs none",
                hint=f"on a CPU call wf.cpu_devices({self.size}) before the first use of JAX; "
                "or use a smaller mesh",
            ).located(repr(self))

    def __reduce__(self) -> tuple[Any, ...]:
        # Devices belong to a process; another one has devices with the same ids. Hashes differ as well.
        return _restore, (self.axes, self._devices and tuple(device.id for device in self._devices))

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

    def _repr_html_(self) -> str:
        from .html import mesh_html  # imported here because html.py imports this module

        return mesh_html(self)


MeshLike = Mesh | AxesLike | None


def _restore(axes: AxesLike, ids: tuple[int, ...] | None) -> Mesh:
    """An unpickled mesh, on the devices of this process."""
    if ids is None:
        return Mesh(axes)
    devices = {device.id: device for device in jax.devices()}
    missing = [id for id in ids if id not in devices]
    if missing:
        raise MeshError(
            f"an unpickled mesh is on the devices {', '.join(map(str, ids))}, and there are {len(devices)}",
            rule="an unpickled mesh has devices with the same ids as the pickled one",
            hint=f"on a CPU call wf.cpu_devices({max(ids) + 1}) before the first use of JAX",
        ).located("pickle.loads")
    return Mesh(axes, [devices[id] for id in ids])


def _validated(given: list[Any], devices: tuple[Any, ...] | None) -> tuple[tuple[str, int], ...]:
    """The axes as (name, size) pairs, with a size of -1 replaced by the remaining devices."""
    pairs: list[tuple[str, int]] = []
    for pair in given:
        name, size = pair if isinstance(pair, tuple | list) and len(pair) == 2 else (None, None)
        if is_name(name) and isinstance(size, SupportsIndex) and not isinstance(size, bool):
            pairs.append((name, operator.index(size)))
        else:
            raise MeshError(
                f"{pair!r} is not a mesh axis",
                rule="an axis is a name and an integer size",
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
            rule="axes have distinct names and sizes of at least 1; at most one size is -1",
            hint='for example "data=-1 model=2" uses all devices, with model=2',
        ).located(f'Mesh("{shown}")')
    if open_axes:
        have = len(devices) if devices is not None else len(jax.devices())
        rest = math.prod(size for _, size in pairs if size != -1)
        if have % rest:
            raise MeshError(
                f'mesh "{shown}" can\'t use {have} devices evenly',
                f"{have} / {rest} is not an integer",
                rule="the axis of size -1 takes all remaining devices",
                hint="choose the other sizes so that they divide the number of devices",
            ).located(f'Mesh("{shown}")')
        pairs = [(name, have // rest if size == -1 else size) for name, size in pairs]
    return tuple(pairs)
