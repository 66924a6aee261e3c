"""Trees of tensors and what is stored of them: names, types, dims and arrays in true size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from weft.core.errors import ModelError, ProgramError
from weft.core.layout import Layout
from weft.core.mesh import Mesh
from weft.core.placement import device_put, partition_spec
from weft.core.shapes import stored_shape
from weft.core.tensor import Tensor, check_has_values
from weft.distributed import processes
from weft.nn.module import Declared, check_initialized, is_parameter, path_name

from .orbax import make_reader

MeshAndLayout = tuple[Mesh, Layout]


@dataclass(frozen=True)
class ManifestEntry:
    """What a manifest says of a tensor, or of a raw array or key, which has no dims."""

    dtype: str
    shape: tuple[int, ...]
    dims: tuple[str, ...] | None

    def __str__(self) -> str:
        names = self.dims
        sizes = [f"{names[n]}={size}" if names else str(size) for n, size in enumerate(self.shape)]
        return f"{self.dtype}{'' if names is not None else ' array '}[{', '.join(sizes)}]"

    def as_json(self) -> dict[str, Any]:
        said: dict[str, Any] = {"dtype": self.dtype, "shape": list(self.shape)}
        return said if self.dims is None else {**said, "dims": list(self.dims)}


def entries_from_manifest(said: Mapping[str, Any]) -> dict[str, ManifestEntry]:
    """The entries of a manifest."""
    return {
        name: ManifestEntry(one["dtype"], tuple(one["shape"]), tuple(one["dims"]) if "dims" in one else None)
        for name, one in said.items()
    }


def checkpoint_leaves(model: Any, state: Any) -> dict[str, Any]:
    """What is stored, by name: tensors (also specs and declared ones), raw arrays and keys."""
    found = jax.tree_util.tree_leaves_with_path({"model": model, "state": state}, is_leaf=is_parameter)
    pairs = [(path_name(path), leaf) for path, leaf in found if _is_stored(leaf)]
    twice = [name for name, n in Counter(name for name, _ in pairs).items() if n > 1]
    if twice:
        raise ProgramError(
            f"several tensors are called {', '.join(twice)}",
            rule="tensors are stored by name, so each has one of its own",
            hint="keep dots out of the keys of dicts",
        )
    return dict(pairs)


def manifest_entries(found: Mapping[str, Any]) -> dict[str, ManifestEntry]:
    """What is to be stored, or what is wanted."""
    return {name: _entry(leaf) for name, leaf in found.items()}


def _is_stored(leaf: Any) -> bool:
    return is_parameter(leaf) or (hasattr(leaf, "shape") and hasattr(leaf, "dtype"))


def _entry(leaf: Any) -> ManifestEntry:
    if isinstance(leaf, Tensor | Declared):
        shape, names = tuple(d.size for d in leaf.dims), tuple(d.name for d in leaf.dims)
        return ManifestEntry(_type_name(leaf.dtype), shape, names)
    return ManifestEntry(_type_name(leaf.dtype), tuple(leaf.shape), None)


def _type_name(dtype: Any) -> str:
    return str(dtype) if jax.dtypes.issubdtype(dtype, jax.dtypes.extended) else np.dtype(dtype).name


def is_key(entry: ManifestEntry) -> bool:
    return entry.dtype.startswith("key<")


def _key_kind(entry: ManifestEntry) -> str:
    """JAX's name of a key's kind: `threefry2x32` of `key<fry>`."""
    for kind in ("threefry2x32", "rbg", "unsafe_rbg"):
        if str(jax.random.key(0, impl=kind).dtype) == entry.dtype:
            return kind
    raise ModelError(
        f"a key is stored as {entry.dtype}",
        rule="keys are of one of JAX's own kinds",
        hint="keep jax.random.key_data(key) in the state instead of the key",
    )


# To the host


def copy_to_host(found: Mapping[str, Any]) -> dict[str, Any]:
    """Copies of the tensors' values in true size, under names that are safe in files."""
    check_initialized(found, rule="a checkpoint stores values")
    check_has_values(*found.values())
    arrays = {name: _array(leaf) for name, leaf in found.items()}
    for array in arrays.values():  # all copies at once, then wait for each
        if isinstance(array, jax.Array) and array.is_fully_addressable:
            array.copy_to_host_async()
    sizes = {name: _entry(leaf).shape for name, leaf in found.items()}
    return {
        quote(name, safe=""): _copy(array, sizes[name] + array.shape[len(sizes[name]) :])
        for name, array in arrays.items()
        if 0 not in array.shape  # Orbax refuses these, and there is nothing to store
    }


def _array(leaf: Any) -> Any:
    array = leaf.storage if isinstance(leaf, Tensor) else leaf
    return jax.random.key_data(array) if is_key(_entry(leaf)) else array


def _copy(array: Any, shape: tuple[int, ...]) -> Any:
    """A copy on the host, without padding."""
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        if array.shape == shape:
            return array  # of each host Orbax copies and writes its own parts
        from jax.experimental import multihost_utils

        array = multihost_utils.process_allgather(array, tiled=True)
    whole = np.empty(shape, array.dtype)
    if not isinstance(array, jax.Array):
        whole[...] = np.asarray(array)[tuple(slice(n) for n in shape)]
        return whole
    for shard in array.addressable_shards:
        if shard.replica_id == 0:
            spans = [s.indices(n) for s, n in zip(shard.index, array.shape, strict=True)]
            here = tuple(slice(begin, min(end, n)) for (begin, end, _), n in zip(spans, shape, strict=True))
            size = tuple(slice(max(0, s.stop - s.start)) for s in here)
            if all(s.stop for s in size):
                whole[here] = np.asarray(shard.data)[size]
    return whole


# From files


def check_compatible(
    path: Path, stored: Mapping[str, ManifestEntry], wanted: Mapping[str, ManifestEntry]
) -> None:
    """An error that lists every tensor that is missing, unexpected or otherwise shaped."""
    wrong = [f"missing: {name} {wanted[name]}" for name in wanted if name not in stored]
    wrong += [f"unexpected: {name} {stored[name]}" for name in stored if name not in wanted]
    wrong += [
        f"misshapen: {name} is {stored[name]} there and {one} here"
        for name, one in wanted.items()
        if name in stored and stored[name] != one
    ]
    if wrong:
        raise ModelError(
            f"the checkpoint {path} does not fit: {len(wrong)} of its tensors and ours differ",
            *wrong,
            rule="names, dims with their order, and types are those that were saved; nothing was loaded",
            hint="make the model and the optimizer with the settings of the run that saved them; "
            "like_state=None leaves the optimizer's state out",
        )


def restore_trees(
    folder: Path,
    stored: Mapping[str, ManifestEntry],
    like_model: Any,
    like_state: Any,
    place: MeshAndLayout | None,
) -> tuple[Any, Any]:
    """The trees with their tensors read: each device's slices, and no more."""
    import orbax.checkpoint as ocp

    like = {"model": like_model, "state": like_state}
    paths, tree = jax.tree_util.tree_flatten_with_path(like, is_leaf=is_parameter)
    wanted = {path_name(path): leaf for path, leaf in paths if _is_stored(leaf)}
    places = {name: _place(leaf, place) for name, leaf in wanted.items()}
    shapes = {name: _shape(leaf, places[name]) for name, leaf in wanted.items()}

    def how(name: str, leaf: Any) -> Any:
        if isinstance(leaf, np.ndarray | np.generic):
            return ocp.RestoreArgs(restore_type=np.ndarray)
        sharding = _sharding(leaf, places[name])
        if is_key(stored[name]):
            return ocp.ArrayRestoreArgs(restore_type=jax.Array, sharding=sharding)
        # strict=False: a larger shape than the stored one is filled up with zeros.
        return ocp.ArrayRestoreArgs(
            restore_type=jax.Array, sharding=sharding, global_shape=shapes[name], strict=False
        )

    args = {
        quote(name, safe=""): how(name, leaf) for name, leaf in wanted.items() if _has_bytes(stored[name])
    }
    read: dict[str, Any] = {}
    if args:
        with make_reader() as files:
            asked = ocp.args.PyTreeRestore(
                item=dict.fromkeys(args, 0), restore_args=args, partial_restore=True
            )
            read = files.restore(folder, args=asked)
    processes.barrier(processes.unique_key("a checkpoint is restored"))

    def made(name: str, leaf: Any) -> Any:
        entry = stored[name]
        array: Any = read.get(quote(name, safe=""))
        if array is None:
            array = np.zeros(shapes[name], leaf.dtype)
            if not isinstance(leaf, np.ndarray):
                array = device_put(array, _sharding(leaf, places[name]))
        if is_key(entry):
            array = jax.random.wrap_key_data(array, impl=_key_kind(entry))
        if not isinstance(leaf, Tensor | Declared):
            return array
        role = leaf.role if isinstance(leaf, Tensor) else "param"
        mesh, layout = places[name] or (None, None)
        return Tensor(array, leaf.dims, role=role, mesh=mesh, layout=layout)

    filled = [made(path_name(p), leaf) if _is_stored(leaf) else leaf for p, leaf in paths]
    result = jax.tree_util.tree_unflatten(tree, filled)
    return result["model"], result["state"]


def read_arrays(folder: Path, stored: Mapping[str, ManifestEntry]) -> Iterator[tuple[str, np.ndarray]]:
    """Arrays on the host, one after the other; of keys their bits."""
    import orbax.checkpoint as ocp

    how = ocp.RestoreArgs(restore_type=np.ndarray)
    with make_reader() as files:
        for name, entry in stored.items():
            if not _has_bytes(entry):
                yield name, np.zeros(entry.shape, "uint32" if is_key(entry) else entry.dtype)
                continue
            safe = quote(name, safe="")
            asked = ocp.args.PyTreeRestore(item={safe: 0}, restore_args={safe: how}, partial_restore=True)
            yield name, files.restore(folder, args=asked)[safe]


def _has_bytes(entry: ManifestEntry) -> bool:
    return 0 not in entry.shape


def _place(leaf: Any, place: MeshAndLayout | None) -> MeshAndLayout | None:
    if place is None and isinstance(leaf, Tensor) and leaf.mesh is not None and leaf.layout is not None:
        return leaf.mesh, leaf.layout
    return place


def _splits(leaf: Tensor | Declared, place: MeshAndLayout) -> Any:
    role = leaf.role if isinstance(leaf, Tensor) else "param"
    return place[1].splits(leaf.dims, place[0], role)


def _shape(leaf: Any, place: MeshAndLayout | None) -> tuple[int, ...]:
    """The shape at rest, padded where a dim is split unevenly."""
    if place is None or not isinstance(leaf, Tensor | Declared):
        return _entry(leaf).shape
    return stored_shape(leaf.dims, _splits(leaf, place), place[0])


def _sharding(leaf: Any, place: MeshAndLayout | None) -> Any:
    if place is not None and place[0].axes:
        place[0].require_devices()
        named = isinstance(leaf, Tensor | Declared)
        spec = partition_spec(_splits(leaf, place)) if named else PartitionSpec()
        return NamedSharding(place[0].jax_mesh, spec)
    if isinstance(leaf, jax.Array) and place is None and not is_key(_entry(leaf)):
        return leaf.sharding
    return SingleDeviceSharding(jax.local_devices()[0])
