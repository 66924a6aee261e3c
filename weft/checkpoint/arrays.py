"""Pytrees of tensors to and from a checkpoint: names, dtypes, dims, and arrays in their true sizes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding
from jax.typing import DTypeLike

from weft.core.errors import ModelError, ProgramError
from weft.core.extras import from_extra
from weft.core.jax_compat import process_allgather
from weft.core.layers import path_name
from weft.core.layout import Placement
from weft.core.placement import device_put, partition_spec
from weft.core.tensor import Tensor, check_has_values
from weft.core.types import PyTree
from weft.distributed import processes
from weft.nn.module import Declared, check_initialized, is_parameter

from .orbax import make_reader

Array = jax.Array | np.ndarray
Leaf = Tensor | Declared | Array  # JAX keys are jax.Arrays


@dataclass(frozen=True)
class ManifestEntry:
    """The description of a tensor in the manifest. Raw arrays and keys have no dims."""

    dtype: str
    shape: tuple[int, ...]
    dims: tuple[str, ...] | None

    def __str__(self) -> str:
        names = self.dims
        sizes = [f"{names[n]}={size}" if names else str(size) for n, size in enumerate(self.shape)]
        return f"{self.dtype}{'' if names is not None else ' array '}[{', '.join(sizes)}]"

    def to_json(self) -> dict[str, Any]:
        content: dict[str, Any] = {"dtype": self.dtype, "shape": list(self.shape)}
        return content if self.dims is None else {**content, "dims": list(self.dims)}


def entries_from_manifest(tensors: Mapping[str, Any]) -> dict[str, ManifestEntry]:
    """The entries in the `tensors` table of a manifest."""
    return {
        name: ManifestEntry(row["dtype"], tuple(row["shape"]), tuple(row["dims"]) if "dims" in row else None)
        for name, row in tensors.items()
    }


def checkpoint_leaves(model: PyTree, state: PyTree) -> dict[str, Any]:
    """The leaves to store, by name: tensors (also specs and declared parameters), raw arrays and keys."""
    leaves = jax.tree_util.tree_leaves_with_path({"model": model, "state": state}, is_leaf=is_parameter)
    pairs = [(path_name(path), leaf) for path, leaf in leaves if _is_stored(leaf)]
    duplicates = [name for name, n in Counter(name for name, _ in pairs).items() if n > 1]
    if duplicates:
        raise ProgramError(
            f"several tensors are called {', '.join(duplicates)}",
            rule="tensors are stored by name, so each needs a unique name",
            hint="use no dots in the keys of dicts",
        )
    return dict(pairs)


def manifest_entries(leaves: Mapping[str, Leaf]) -> dict[str, ManifestEntry]:
    """The manifest entries of leaves by name."""
    return {name: _entry(leaf) for name, leaf in leaves.items()}


def _is_stored(leaf: object) -> bool:
    return is_parameter(leaf) or (hasattr(leaf, "shape") and hasattr(leaf, "dtype"))


def _entry(leaf: Leaf) -> ManifestEntry:
    if isinstance(leaf, Tensor | Declared):
        shape, names = tuple(d.size for d in leaf.dims), tuple(d.name for d in leaf.dims)
        return ManifestEntry(_dtype_name(leaf.dtype), shape, names)
    return ManifestEntry(_dtype_name(leaf.dtype), tuple(leaf.shape), None)


def _dtype_name(dtype: DTypeLike) -> str:
    return str(dtype) if jax.dtypes.issubdtype(dtype, jax.dtypes.extended) else np.dtype(dtype).name


def is_key(entry: ManifestEntry) -> bool:
    """Whether the entry is a JAX random key."""
    return entry.dtype.startswith("key<")


def _key_impl(entry: ManifestEntry) -> str:
    """JAX's `impl` name of a key's dtype: `threefry2x32` for `key<fry>`."""
    for impl in ("threefry2x32", "rbg", "unsafe_rbg"):
        if str(jax.random.key(0, impl=impl).dtype) == entry.dtype:
            return impl
    raise ModelError(
        f"a key is stored as {entry.dtype}",
        rule="only keys of JAX's built-in implementations can be restored",
        hint="store jax.random.key_data(key) in the state instead of the key",
    )


# Saving


def copy_to_host(leaves: Mapping[str, Any]) -> dict[str, Array]:
    """Host copies of the values in their true sizes, under names that are safe in file names."""
    check_initialized(leaves, rule="a checkpoint stores values")
    check_has_values(*leaves.values())
    arrays = {name: _array(leaf) for name, leaf in leaves.items()}
    for array in arrays.values():  # start all transfers before waiting for the first
        if isinstance(array, jax.Array) and array.is_fully_addressable:
            array.copy_to_host_async()
    shapes = {name: _entry(leaf).shape for name, leaf in leaves.items()}
    return {
        quote(name, safe=""): _copy(array, shapes[name] + array.shape[len(shapes[name]) :])
        for name, array in arrays.items()
        if 0 not in array.shape  # Orbax rejects empty arrays, and they have no data
    }


def _array(leaf: Tensor | Array) -> Array:
    array = leaf.storage if isinstance(leaf, Tensor) else leaf
    return jax.random.key_data(array) if is_key(_entry(leaf)) else array


def _copy(array: Array, shape: tuple[int, ...]) -> Array:
    """A copy on the host, without padding."""
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
        if array.shape == shape:
            return array  # Orbax copies and writes the addressable shards of each host
        array = process_allgather(array)
    copy = np.empty(shape, array.dtype)
    if not isinstance(array, jax.Array):
        copy[...] = np.asarray(array)[tuple(slice(n) for n in shape)]
        return copy
    # Shard by shard: np.asarray(array) would allocate the padded array as well.
    for shard in array.addressable_shards:
        if shard.replica_id == 0:
            spans = [s.indices(n) for s, n in zip(shard.index, array.shape, strict=True)]
            target = tuple(slice(start, min(end, n)) for (start, end, _), n in zip(spans, shape, strict=True))
            source = tuple(slice(max(0, s.stop - s.start)) for s in target)
            if all(s.stop for s in source):  # otherwise the shard is all padding
                copy[target] = np.asarray(shard.data)[source]
    return copy


# Restoring


def check_compatible(
    path: Path, stored: Mapping[str, ManifestEntry], wanted: Mapping[str, ManifestEntry]
) -> None:
    """Raise an error that lists every missing, unexpected or mismatched tensor."""
    wrong = [f"missing: {name} {wanted[name]}" for name in wanted if name not in stored]
    wrong += [f"unexpected: {name} {stored[name]}" for name in stored if name not in wanted]
    wrong += [
        f"mismatched: {name} is {stored[name]} in the checkpoint and {entry} here"
        for name, entry in wanted.items()
        if name in stored and stored[name] != entry
    ]
    if wrong:
        raise ModelError(
            f"the checkpoint {path} does not match: {len(wrong)} tensors differ",
            *wrong,
            rule="names, dims (in order) and dtypes must equal the saved ones; nothing was loaded",
            hint="create the model and the optimizer with the settings of the run that saved them; "
            "like_state=None skips the optimizer's state",
        )


def restore_trees(
    folder: Path,
    stored: Mapping[str, ManifestEntry],
    like_model: PyTree,
    like_state: PyTree,
    placement: Placement | None,
) -> tuple[PyTree, PyTree]:
    """The trees with values read from the files. Each device reads only its own slices."""
    with from_extra("train"):
        import orbax.checkpoint as ocp

    like = {"model": like_model, "state": like_state}
    paths, tree = jax.tree_util.tree_flatten_with_path(like, is_leaf=is_parameter)
    wanted = {path_name(path): leaf for path, leaf in paths if _is_stored(leaf)}
    placements = {name: _placement(leaf, placement) for name, leaf in wanted.items()}
    shapes = {name: _padded_shape(leaf, placements[name]) for name, leaf in wanted.items()}

    def restore_args(name: str, leaf: Leaf) -> ocp.RestoreArgs:
        if isinstance(leaf, np.ndarray | np.generic):
            return ocp.RestoreArgs(restore_type=np.ndarray)
        sharding = _sharding(leaf, placements[name])
        if is_key(stored[name]):
            return ocp.ArrayRestoreArgs(restore_type=jax.Array, sharding=sharding)
        # strict=False: Orbax pads with zeros up to a global_shape that is larger than the stored one.
        return ocp.ArrayRestoreArgs(
            restore_type=jax.Array, sharding=sharding, global_shape=shapes[name], strict=False
        )

    args = {
        quote(name, safe=""): restore_args(name, leaf)
        for name, leaf in wanted.items()
        if not _is_empty(stored[name])
    }
    arrays: dict[str, Any] = {}
    if args:
        with make_reader() as reader:
            request = ocp.args.PyTreeRestore(
                item=dict.fromkeys(args, 0), restore_args=args, partial_restore=True
            )
            arrays = reader.restore(folder, args=request)
    processes.barrier(processes.unique_key("restoring a checkpoint"))

    def restored(name: str, leaf: Leaf) -> Tensor | Array:
        entry = stored[name]
        array: Any = arrays.get(quote(name, safe=""))
        if array is None:  # empty arrays are not in the files
            array = np.zeros(shapes[name], leaf.dtype)
            if not isinstance(leaf, np.ndarray):
                sharding: Any = _sharding(leaf, placements[name])
                array = device_put(array, sharding)
        if is_key(entry):
            array = jax.random.wrap_key_data(array, impl=_key_impl(entry))
        if not isinstance(leaf, Tensor | Declared):
            return array
        return Tensor(array, leaf.dims, role=_role(leaf), placement=placements[name])

    filled = [restored(path_name(p), leaf) if _is_stored(leaf) else leaf for p, leaf in paths]
    result = jax.tree_util.tree_unflatten(tree, filled)
    return result["model"], result["state"]


def read_arrays(folder: Path, stored: Mapping[str, ManifestEntry]) -> Iterator[tuple[str, np.ndarray]]:
    """Read arrays to the host, one at a time; a key is read as its bits."""
    with from_extra("train"):
        import orbax.checkpoint as ocp

    restore_args = ocp.RestoreArgs(restore_type=np.ndarray)
    with make_reader() as reader:
        for name, entry in stored.items():
            if _is_empty(entry):
                yield name, np.zeros(entry.shape, "uint32" if is_key(entry) else entry.dtype)
                continue
            safe = quote(name, safe="")
            request = ocp.args.PyTreeRestore(
                item={safe: 0}, restore_args={safe: restore_args}, partial_restore=True
            )
            yield name, reader.restore(folder, args=request)[safe]


def _is_empty(entry: ManifestEntry) -> bool:
    return 0 in entry.shape


def _placement(leaf: Leaf, placement: Placement | None) -> Placement | None:
    return leaf.placement if placement is None and isinstance(leaf, Tensor) else placement


def _role(leaf: Tensor | Declared) -> str:
    return leaf.role if isinstance(leaf, Tensor) else "param"


def _padded_shape(leaf: Leaf, placement: Placement | None) -> tuple[int, ...]:
    """The shape of the stored array, padded where a dim is split unevenly."""
    if placement is None or not isinstance(leaf, Tensor | Declared):
        return _entry(leaf).shape
    return placement.array_shape(leaf.dims, _role(leaf))


def _sharding(leaf: Leaf, placement: Placement | None) -> Sharding:
    if placement is not None and placement.mesh.axes:
        placement.mesh.require_devices()
        spec = PartitionSpec()
        if isinstance(leaf, Tensor | Declared):
            spec = partition_spec(placement.splits(leaf.dims, _role(leaf)))
        return NamedSharding(placement.mesh.jax_mesh, spec)
    if isinstance(leaf, jax.Array) and placement is None and not is_key(_entry(leaf)):
        return leaf.sharding
    return SingleDeviceSharding(jax.local_devices()[0])
