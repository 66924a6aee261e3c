"""Exported programs: a staged function as a file, which runs without the code that it was traced from.

    program.export(*args).save("step.weft")
    step = wf.load("step.weft")     # in another process
    step(*args)                     # named tensors in and out

Input: a function staged for one signature. Output: bytes. JAX serializes the computation on arrays
(`jax.export`); a JSON header has the rest: the mesh and the layout, and the tensors' names in the arguments
and results. The bytes are, in this order:

    MAGIC, the length of the header (8 bytes), the header, JAX's bytes, the values of captured tensors
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import export as jax_export
from jax.sharding import NamedSharding, PartitionSpec

from .atomic_file import atomic_write
from .boundary import format_treedef
from .call_stack import call_with_room
from .context import active
from .describe import format_call, reports_call, short_dtype
from .dims import Dim, format_dims
from .errors import DimError, ProgramError, TensorTypeError, WeftError
from .jax_compat import ClosedJaxpr, Jaxpr, jaxprs_in_params
from .labels import Scope
from .layout import ROLES, Layout, Placement
from .mesh import Mesh
from .operands import check_same_placement
from .placement import as_array, device_put, place_tensor, with_role
from .signature import Static, is_argument_leaf, is_dynamic
from .staging import UNPLACED, Staged
from .tensor import Tensor, check_has_values, is_tensor
from .types import PyTree, cast_like, weak_type

MAGIC = b"WEFT EXPORT\n"
VERSION = 1
LENGTH_BYTES = 8
# JAX exports only custom calls that it guarantees to keep. XLA itself resolves this one, that of `row_major`.
PERMITTED = [jax_export.DisabledSafetyCheck.custom_call("LayoutConstraint")]
ARRAY_FIELDS, TENSOR_FIELDS = ("dtype", "position", "weak_type"), ("dtype", "role", "position", "weak_type")


@dataclass(frozen=True)
class TensorSpec:
    """A tensor among the arguments or results, or a captured one.

    Attributes:
      position: its number among the arrays that the exported function takes, or returns.
      weak_type: whether a result has a weak type, which JAX does not export.
    """

    dims: tuple[Dim, ...]
    dtype: str
    role: str
    position: int = 0
    weak_type: bool = False

    def __str__(self) -> str:
        return f"{short_dtype(jnp.dtype(self.dtype))}[{format_dims(self.dims)}]"


@dataclass(frozen=True)
class ArraySpec:
    """A raw array, or a number, among the arguments or results.

    Attributes:
      position, weak_type: as those of a tensor.
    """

    shape: tuple[int, ...]
    dtype: str
    position: int = 0
    weak_type: bool = False

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}" if self.shape else self.dtype


@dataclass(frozen=True)
class StaticSpec:
    """A value that is part of the signature, or a static result."""

    value: Any

    def __str__(self) -> str:
        return repr(self.value)


Spec = TensorSpec | ArraySpec | StaticSpec


class ExportedProgram:
    """A program exported for one signature; created by `program.export(*args)` and by `wf.load`.

    Call it with global tensors, outside programs, as the program itself. It also has the attributes of JAX's
    `jax.export.Exported`: `.serialize()` returns bytes for `jax.export.deserialize`, `.nr_devices` the number
    of devices.

    Attributes:
      name: the name of the function.
      exported: JAX's exported function of arrays.
      placement: the mesh and the layout.
      inputs: `(args, kwargs)` with specs in place of tensors, arrays, numbers and static values.
      outputs: the result with specs.
      captured: the values of the tensors that the function captures.

    >>> import weft as wf
    >>> program = wf.spmd(lambda x: wf.sum(x, "d"), "data=4 model=2", "batch:data d:model")
    >>> exported = program.export(wf.spec("batch=4 d=6"))
    >>> wf.load(exported.to_bytes())(wf.ones("batch=4 d=6"))
    f32[batch=4/data·4] [6., 6., 6., 6.]
    """

    def __init__(
        self,
        name: str,
        exported: jax_export.Exported,
        placement: Placement,
        inputs: PyTree,
        outputs: PyTree,
        captured: Sequence[Tensor],
    ):
        self.name, self.exported, self.placement = name, exported, placement
        self.inputs, self.outputs, self.captured = inputs, outputs, tuple(captured)

    def __getattr__(self, name: str) -> Any:
        # Not for `exported` itself: copy and pickle look attributes up before they exist.
        if name.startswith("_") or name == "exported":
            raise AttributeError(name)
        return getattr(self.exported, name)

    def __reduce__(self) -> tuple[Any, ...]:
        """For copies and pickles: JAX's object has local functions."""
        return load, (self.to_bytes(),)

    def __repr__(self) -> str:
        return f"<exported program {self._signature} on {self.placement}>"

    @property
    def _signature(self) -> str:
        """`step(f32[batch=4, d=6], rate=float32)`."""
        args, kwargs = self.inputs
        given = [*map(_format, args), *(f"{name}={_format(value)}" for name, value in kwargs.items())]
        return f"{self.name}({', '.join(given)})"

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> Any:
        try:
            return self._run(*args, **kwargs)
        except WeftError as error:
            raise error.located(format_call(f"exported program {self.name}", args, kwargs)) from None

    def _run(self, *args: PyTree, **kwargs: PyTree) -> Any:
        if active.context is not None:
            raise ProgramError(
                f"{self!r} was called inside a program",
                rule="an exported program takes and returns global tensors",
                hint="call it outside; inside a program, call the function that it was exported from",
            )
        matched = self._matched(args, kwargs)
        arrays = {
            spec.position: self._array(spec, leaf)
            for spec, leaf in matched
            if not isinstance(spec, StaticSpec)
        }
        given = [arrays[n] for n in sorted(arrays)]
        outs = self._compiled(*given, *[t._read() for t in self._placed_captures])
        # Virtual CPU devices deadlock when calls pile up, so at most one call is in flight.
        if self.placement.mesh.size > 1 and jax.default_backend() == "cpu":
            outs = jax.block_until_ready(outs)
        placed = self.placement if self.placement is not UNPLACED else None

        def rebuild(spec: Spec) -> Any:
            if isinstance(spec, StaticSpec):
                return spec.value
            array = outs[spec.position]
            if isinstance(spec, ArraySpec):
                return array
            return Tensor(array, spec.dims, role=spec.role, placement=placed)

        return jax.tree.map(rebuild, self.outputs)

    @functools.cached_property
    def _compiled(self) -> Callable[..., list[jax.Array]]:
        self.placement.mesh.require_devices()
        specs = {s.position: s for s in jax.tree.leaves(self.outputs) if not isinstance(s, StaticSpec)}

        def run(*arrays: jax.Array) -> list[jax.Array]:
            outs = self.exported.call(*arrays)
            types = [
                jax.ShapeDtypeStruct((), a.dtype, weak_type=specs[n].weak_type) for n, a in enumerate(outs)
            ]
            return list(map(cast_like, outs, types))

        return jax.jit(run)

    @functools.cached_property
    def _placed_captures(self) -> list[Tensor]:
        return [place_tensor(t, self.placement) for t in self.captured]

    def _matched(self, args: Any, kwargs: Any) -> list[tuple[Spec, Any]]:
        """The leaves of the arguments with their specs; raises an error if they don't match."""
        tree: Any
        specs, tree = jax.tree_util.tree_flatten_with_path(self.inputs)
        try:
            leaves = tree.flatten_up_to(plain((args, kwargs)))
        except ValueError:
            given = jax.tree.structure(plain((args, kwargs)), is_leaf=is_tensor)
            raise ProgramError(
                f"the arguments are {format_treedef(given)}, and it was exported for {format_treedef(tree)}",
                rule="an exported program has one signature: positional arguments, and those by name (* is a "
                "leaf); a dict may stand for an object of a class",
                hint=f"call it as it was exported: {self._signature}",
            ) from None
        for (path, spec), leaf in zip(specs, leaves, strict=True):
            if isinstance(spec, StaticSpec) and not isinstance(leaf, Static):
                leaf = Static(leaf)
            _check_leaf(_argument_name(path), spec, leaf)
        return [(spec, leaf) for (_, spec), leaf in zip(specs, leaves, strict=True)]

    def _array(self, spec: Spec, leaf: Any) -> jax.Array:
        if isinstance(spec, TensorSpec):
            check_has_values(leaf)
            if leaf.placement is not None and leaf.mesh != self.placement.mesh:
                check_same_placement(leaf, self.placement)
            return place_tensor(with_role(leaf, spec.role), self.placement)._read()
        mesh = self.placement.mesh
        replicated = NamedSharding(mesh.jax_mesh, PartitionSpec())
        return as_array(leaf) if mesh.size == 1 else device_put(as_array(leaf), replicated)

    @reports_call
    def to_bytes(self) -> bytes:
        """The contents of the file that `save` writes, for `wf.load`."""
        program = bytes(self.exported.serialize())
        values = b"".join(np.ascontiguousarray(t.numpy()).tobytes() for t in self.captured)
        body = program + values
        layout = self.placement.layout
        header = {
            "version": VERSION,
            "jax": jax.__version__,
            "name": self.name,
            "mesh": self.placement.mesh.axes,
            "layout": {role: layout.rules_for(role) for role in ROLES},
            "inputs": _encode(self.inputs),
            "outputs": _encode(self.outputs),
            "captured": [_encode(_spec(t)) for t in self.captured],
            "program_bytes": len(program),
            "bytes": len(body),
            "crc32": zlib.crc32(body),
        }
        text = json.dumps(header).encode()
        return MAGIC + len(text).to_bytes(LENGTH_BYTES, "big") + text + body

    @reports_call
    def save(self, path: str | Path) -> None:
        """Write the program to a file, for `wf.load`. The file is complete or absent, even after a crash.

        Args:
          path: the file; its folder is created if it doesn't exist.
        """
        contents, path = self.to_bytes(), Path(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(path) as draft:
                draft.write_bytes(contents)
        except OSError as error:
            raise ProgramError(
                f"can't write {path}: {error.strerror}",
                rule="the path is that of a file in a folder that exists or can be created",
                hint='for example program.export(x).save("exported/program.weft")',
            ) from None


@reports_call
def load(source: str | Path | bytes) -> ExportedProgram:
    """Load a program that was exported and saved; the code that it was traced from is not needed.

    Args:
      source: the file that `program.export(*args).save(path)` wrote, or its contents.

    Returns:
      An `ExportedProgram`. It is called as the program was, with arguments of the dims and dtypes that it was
      exported for. Objects of a class, such as modules, are dicts of their fields in its results.

    >>> import tempfile, weft as wf
    >>> path = f"{tempfile.mkdtemp()}/double.weft"
    >>> wf.spmd(lambda x: x + x).export(wf.spec("a=3")).save(path)
    >>> wf.load(path)(wf.ones("a=3"))
    f32[a=3] [2., 2., 2.]
    """
    header, body = _parse(_read(source))
    placement = Placement(
        Mesh(header["mesh"]),
        Layout(
            header["layout"]["value"],
            params=header["layout"]["param"],
            optimizer=header["layout"]["optimizer"],
        ),
    )
    placement.mesh.require_devices()
    size = header["program_bytes"]
    try:
        exported = jax_export.deserialize(bytearray(body[:size]))
    except Exception as error:  # JAX documents no class; flatbuffers raise struct.error, and others
        raise ProgramError(
            f"JAX {jax.__version__} can't read this program, which JAX {header['jax']} exported",
            f"JAX: {str(error).partition(chr(10))[0]}",
            rule="JAX reads the exports of earlier releases for half a year",
            hint="export the program again, or install the JAX that it was exported with",
        ) from error
    captured, at = [], size
    for spec in map(_decode, header["captured"]):
        dtype, shape = jnp.dtype(spec.dtype), [d.size for d in spec.dims]
        array = np.frombuffer(body, dtype, math.prod(shape), at).reshape(shape)
        at += array.nbytes
        captured.append(Tensor(as_array(array), spec.dims, role=spec.role))
    inputs, outputs = _decode(header["inputs"]), _decode(header["outputs"])
    return ExportedProgram(header["name"], exported, placement, inputs, outputs, captured)


def export_staged(
    name: str, staged: Staged, arrays: Sequence[Any], args: PyTree, kwargs: PyTree, jaxpr: ClosedJaxpr
) -> ExportedProgram:
    """Export a staged function for the inputs `arrays`, which stand for the given arguments.

    Args:
      name: its name.
      staged: the staged function.
      arrays: its inputs.
      args, kwargs: the arguments; those that were declared static are `Static`.
      jaxpr: the traced function.
    """
    _check_no_callbacks(jaxpr, "export()")
    exported = jax_export.export(staged.jitted, disabled_checks=PERMITTED)(*arrays)
    leaves, tree = jax.tree.flatten((args, kwargs), is_leaf=is_argument_leaf)
    positions = itertools.count()
    inputs = [_spec(leaf, next(positions) if is_dynamic(leaf, ()) else 0) for leaf in leaves]
    # The results of deferred work follow the others, whatever their order in the result.
    kinds = [kind for kind, *_ in staged.out_leaves]
    order = [n for kind in ("array", "deferred") for n, k in enumerate(kinds) if k == kind]
    outputs: list[Spec] = [StaticSpec(value) for _, value, _ in staged.out_leaves]
    for position, (n, aval) in enumerate(zip(order, jaxpr.out_avals, strict=True)):
        outputs[n] = _array_spec(aval, staged.out_leaves[n][2], position)
    taken, returned = (
        plain(jax.tree.unflatten(tree, inputs)),
        plain(jax.tree.unflatten(staged.out_tree, outputs)),
    )
    return ExportedProgram(name, exported, staged.placement, taken, returned, staged.captured)


def export_for(staged: Staged, arrays: Sequence[Any], platform: str) -> bytes:
    """The bytes of a staged function exported for a platform that need not be there, `tpu` or `cuda`.

    Unlike those of `export_staged` they also hold for a mesh without devices: the inputs are described, with
    their sharding.
    """
    mesh = staged.placement.mesh.jax_mesh
    inputs = [
        jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, spec), weak_type=weak_type(a))
        for a, spec in zip(arrays, staged.in_specs, strict=True)
    ]
    # JAX's message is about the mesh. The export below shares this trace.
    traced = call_with_room(staged.jitted.trace, *inputs)
    _check_no_callbacks(traced.jaxpr, f"export_for({platform!r})")
    export = jax_export.export(staged.jitted, platforms=[platform], disabled_checks=PERMITTED)
    return bytes(call_with_room(export, *inputs).serialize())


# JAX's primitives that call a Python function.
CALLBACKS = ("pure_callback", "io_callback", "debug_callback", "debug_print")


def _check_no_callbacks(closed: ClosedJaxpr, call: str) -> None:
    """Raise an error if a program calls Python: exported, it runs in other processes."""
    if callbacks := dict.fromkeys(_find_callbacks(closed.jaxpr, Scope(), "")):
        raise ProgramError(
            f"the program calls Python: {', '.join(callbacks)}",
            rule="a callback runs code of this process, so a program with one can't be exported",
            hint="omit wf.debug and jax.debug.print; call the function of a wf.callback before the program, "
            "and pass its result as an argument",
        ).located(call)


def _find_callbacks(jaxpr: Jaxpr, outer: Scope, outer_source: str) -> Iterator[str]:
    """The ops of a jaxpr that call Python, with the user's lines: `debug[batch] at step.py:3`."""
    from ..plan.sources import user_source  # plan/ imports this package

    for eqn in jaxpr.eqns:
        scope = outer.extend(eqn.source_info.name_stack)
        # JAX traces the function of a custom derivative later, where the user's line is lost.
        source = user_source(eqn) or outer_source
        if eqn.primitive.name in CALLBACKS:
            yield (scope.op or eqn.primitive.name) + (f" at {source}" if source else "")
        for inner in jaxprs_in_params(eqn.params):
            yield from _find_callbacks(getattr(inner, "jaxpr", inner), scope, source)


def plain(tree: PyTree) -> PyTree:
    """A pytree in which objects of other classes than tuple, list and dict are dicts of their fields."""
    children, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: x is not tree)
    if is_tensor(tree) or [path for path, _ in children] == [()]:
        return tree
    if tree is None or type(tree) in (tuple, list):
        return tree if tree is None else type(tree)(map(plain, tree))
    return {_key_of(path[0]): plain(child) for path, child in children}


def _key_of(entry: Any) -> Any:
    """The key, the name or the index in an entry of a path."""
    return next(getattr(entry, name) for name in ("key", "name", "idx") if hasattr(entry, name))


def _spec(leaf: Any, position: int = 0) -> Spec:
    """The spec of an argument."""
    if isinstance(leaf, Tensor):
        return _array_spec(leaf, (leaf.dims, leaf.role), position)
    if is_dynamic(leaf, ()):
        return _array_spec(leaf if hasattr(leaf, "dtype") else jnp.asarray(leaf), None, position)
    return StaticSpec(leaf.value if isinstance(leaf, Static) else leaf)


def _array_spec(array: Any, named: tuple[tuple[Dim, ...], str] | None, position: int) -> Spec:
    """The spec of an array; `named` are the dims and the role if it is a tensor's."""
    if named is None:
        return ArraySpec(tuple(array.shape), str(array.dtype), position, weak_type(array))
    return TensorSpec(named[0], str(array.dtype), named[1], position, weak_type(array))


def _argument_name(path: Any) -> str:
    which, first, *rest = path
    name = first.key if which.idx else f"argument {first.idx}"
    return f"{name}{jax.tree_util.keystr(tuple(rest))}"


def _check_leaf(name: str, spec: Spec, leaf: Any) -> None:
    """Raise an error if an argument does not have the dims, dtype or value of its spec."""
    found = _spec(leaf)
    if type(found) is type(spec) and str(found) == str(spec):
        return
    is_other_dims = isinstance(spec, TensorSpec) and isinstance(leaf, Tensor) and leaf.dims != spec.dims
    kind = DimError if is_other_dims else TensorTypeError
    raise kind(
        f"{name} is {found}, and the program was exported for {spec}",
        rule="an exported program takes the dims, in this order, the dtypes and the static values of its "
        "signature",
        hint="export the program for these arguments too; wf.tensor names the dims of an array, wf.transpose "
        "reorders them, .astype converts",
    )


def _format(tree: PyTree) -> str:
    """An argument with its specs: `{x: f32[a=6], n: int32}`."""
    if isinstance(tree, tuple | list):
        return f"[{', '.join(map(_format, tree))}]"
    if isinstance(tree, dict):
        return f"{{{', '.join(f'{k}: {_format(v)}' for k, v in tree.items())}}}"
    return str(tree)


def _encode(tree: PyTree) -> Any:
    """A tree of specs as JSON."""
    if tree is None:
        return None
    if isinstance(tree, tuple | list):
        return {type(tree).__name__: [*map(_encode, tree)]}
    if isinstance(tree, dict):
        return {"dict": [[_storable(key), _encode(value)] for key, value in tree.items()]}
    if isinstance(tree, StaticSpec):
        return {"static": _storable(tree.value)}
    if isinstance(tree, ArraySpec):
        return {"array": tree.shape, **_fields(tree, ARRAY_FIELDS)}
    return {"tensor": [[d.name, d.size] for d in tree.dims], **_fields(tree, TENSOR_FIELDS)}


def _fields(spec: Spec, names: Sequence[str]) -> dict[str, Any]:
    return {name: getattr(spec, name) for name in names}


def _storable(value: Any) -> Any:
    if type(value) not in (str, int, float, bool):
        raise ProgramError(
            f"{value!r} can't be stored: it is a {type(value).__name__}",
            rule="the static arguments and results of a stored program, and the keys of its dicts, are "
            "numbers, strings and booleans",
            hint="stage a function that captures it: wf.spmd(lambda x: f(x, config), mesh, layout)",
        )
    return value


def _decode(node: Any) -> PyTree:
    """The tree of specs from JSON."""
    if node is None:
        return None
    kind, value = next(iter(node.items()))
    if kind in ("tuple", "list"):
        items = [*map(_decode, value)]
        return tuple(items) if kind == "tuple" else items
    if kind == "dict":
        return {key: _decode(child) for key, child in value}
    if kind == "static":
        return StaticSpec(value)
    if kind == "array":
        return ArraySpec(tuple(value), *[node[name] for name in ARRAY_FIELDS])
    return TensorSpec(tuple(Dim(*d) for d in value), *[node[name] for name in TENSOR_FIELDS])


def _read(source: str | Path | bytes) -> bytes:
    if isinstance(source, bytes | bytearray):
        return bytes(source)
    if not isinstance(source, str | os.PathLike):
        raise TensorTypeError(
            f"load was given a value of type {type(source).__name__}",
            rule="load reads the file at a path, or takes its contents as bytes",
            hint='wf.load("program.weft"), or wf.load(file.read())',
        )
    try:
        return Path(source).read_bytes()
    except OSError as error:
        raise ProgramError(
            f"{str(source)!r} can't be read: {error.strerror}",
            rule="load reads a file that an exported program was saved to",
            hint="check the path; program.export(*args).save(path) writes the file",
        ) from None


def _parse(contents: bytes) -> tuple[dict[str, Any], bytes]:
    """The header and the bytes that follow it; raises an error if they are not a complete export."""
    hint = "save it again: program.export(*args).save(path)"
    if not contents.startswith(MAGIC[: max(1, len(contents))]):
        raise ProgramError(
            "this is not a program that Weft exported",
            rule=f"the file starts with {MAGIC!r}; the bytes of .serialize() are for jax.export.deserialize",
            hint="program.export(*args).save(path) writes such a file, and .to_bytes() returns its contents",
        )
    start = len(MAGIC) + LENGTH_BYTES
    end = start + int.from_bytes(contents[len(MAGIC) : start], "big")
    header = json.loads(contents[start:end]) if len(contents) >= max(start, end) else {}
    if header.get("version", VERSION) != VERSION:
        raise ProgramError(
            f"the file has version {header['version']} of the format, and this Weft reads version {VERSION}",
            rule="a later version may store what this Weft does not know",
            hint="install the Weft that wrote it, or export the program again",
        )
    body = contents[end:]
    if not header or len(body) != header["bytes"]:
        wanted = f" of {end + header['bytes']}" if header else ""
        raise ProgramError(
            f"the file is incomplete: it has {len(contents)}{wanted} bytes",
            rule="save writes all of it, or nothing",
            hint=f"copy it again, or {hint}",
        )
    if zlib.crc32(body) != header["crc32"]:
        raise ProgramError(
            "the file is damaged: its checksum differs",
            rule="the header has a checksum of the program",
            hint=f"copy it again, or {hint}",
        )
    return header, body
