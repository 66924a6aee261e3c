"""Ways out of the language: raw JAX on slices, Python from inside a program, printing."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..core import collectives, context
from ..core.context import RetraceUnvarying
from ..core.describe import reports_call, short_dtype
from ..core.dims import Dim, as_dims, format_dims, select_dims, union_dims
from ..core.errors import LayoutError, ProgramError, ShapeError, TensorTypeError
from ..core.layout import axes_of
from ..core.op import op
from ..core.operands import as_slice, check_along, from_global, slice_tensor
from ..core.padding import fill_padding
from ..core.reshard import reshard, reshard_together
from ..core.tensor import Tensor


@op(functions=True)
def local(fn: Callable[..., Any], *tensors: Tensor, out: Any, splittable: Iterable[Any] = ()) -> Any:
    """A raw JAX function on the slices: for kernels, or for what the language has no word for.

    Args:
      fn: takes one array for each tensor (its slice, dimensions in the tensor's order) and returns an
        array, or a tuple of them.
      out: the dims of the result; a list of lists of dims if `fn` returns a tuple.
      splittable: the dims that `fn` works on piece by piece. A split of any other dim is an error. Padding
        along them comes in as zeros; what `fn` makes of it is dropped, but should not be infinite.

    A result may lack a split dim if it does not depend on the tensors that have it. A collective that `fn`
    calls itself is not checked: `jax.lax.psum` of a value that is the same on all devices multiplies it.

    >>> import weft as wf, jax.numpy as jnp
    >>> x = wf.ones("batch=2 d=3")
    >>> wf.local(lambda a: jnp.cumsum(a, axis=1), x, out=x.dims, splittable=["batch"])
    f32[batch=2, d=3]
    [[1., 2., 3.],
     [1., 2., 3.]]
    """
    program = context.require()
    slices = [as_slice(t) for t in tensors]
    out = out if isinstance(out, str | Dim) else list(out)
    several = isinstance(out, list) and bool(out) and not isinstance(out[0], Dim | str)
    outs = [_known_dims(o, slices) for o in (out if several else [out])]
    every = union_dims([*(t.dims for t in slices), *outs])
    allowed = {d.name for d in select_dims(every, list(splittable))}
    splits = dict(zip(every, program.splits(every), strict=True))
    wrong = [d for d in every if splits[d] and d.name not in allowed]
    if wrong:
        rules = " ".join(f"{d.name}:{'+'.join(splits[d])}" for d in wrong)
        error = LayoutError(
            f"the layout splits {', '.join(d.name for d in wrong)}, which the local function does not "
            "declare splittable",
            f"rules: {rules}     splittable: {', '.join(sorted(allowed)) or 'none'}",
            rule="a local function sees slices; it says which dims it can work on piece by piece",
            hint="declare it (splittable=[...]) if each piece can be computed alone, else drop the rule",
        )
        error.unsplittable = frozenset(d.name for d in wrong)
        raise error
    check_along(d for d in every if d.name not in allowed)
    split_axes = axes_of(splits.values())
    # Made varying over all axes once for each operand, its gradient is summed once. But then all results
    # vary so too; where one lacks a split dim, JAX's types have to tell what it depends on.
    is_full = all(axes_of(program.splits(dims)) >= split_axes for dims in outs)
    arrays = reshard_together(slices) if is_full else [reshard(t) for t in slices]
    if any(collectives.varying_axes(a) - split_axes - program.vmapped_axes for a in arrays):
        raise RetraceUnvarying  # a scan made them varying beforehand, and the function's results would be too
    results = fn(*arrays)
    results = list(results) if several and isinstance(results, list | tuple) else [results]
    strange = [r for r in results if not hasattr(r, "shape")]
    if strange:
        raise TensorTypeError(
            f"the local function returned a {type(strange[0]).__name__}",
            rule="a local function returns an array, or a tuple of them if out= lists the dims of several",
            hint="out=[[batch, d], [batch]] for a tuple of two arrays",
        )
    if len(results) != len(outs):
        raise ShapeError(
            f"the local function returned {len(results)} arrays, and out= names {len(outs)}",
            rule="out= has the dims of each result",
            hint="out=[[batch, d], [batch]] for two results",
        )
    made = [_result(array, dims) for array, dims in zip(results, outs, strict=True)]
    return tuple(made) if several else made[0]


def _known_dims(wanted: Any, slices: list[Tensor]) -> tuple[Dim, ...]:
    """Dims of a result: new ones as Dims, those of the operands also by name."""
    if isinstance(wanted, str) and "=" in wanted:
        return as_dims(wanted)
    known = union_dims(t.dims for t in slices)
    items = [wanted] if isinstance(wanted, Dim | str) else list(wanted)
    return as_dims([select_dims(known, d)[0] if isinstance(d, str) else d for d in items])


def _result(array: Any, dims: tuple[Dim, ...]) -> Tensor:
    program = context.require()
    splits = program.splits(dims)
    shape = program.slice_shape(dims, splits)
    if tuple(array.shape) != shape:
        raise ShapeError(
            f"the local function returned the shape {tuple(array.shape)}",
            f"a slice of [{format_dims(dims)}] is {shape} here",
            rule="a local function returns a slice for each result",
            hint="check out=; a split dim has its slice's size inside",
        )
    extra = collectives.varying_axes(array) - axes_of(splits) - program.vmapped_axes
    if extra:
        raise ProgramError(
            f"the local function's result differs between devices along {', '.join(sorted(extra))}, "
            f"which split none of its dims [{format_dims(dims)}]",
            rule="a result without a split dim must be the same on all devices along its axes",
            hint="keep the dim in out=, and reduce the result outside: wf.sum(...)",
        )
    return slice_tensor(fill_padding(array, dims, splits), dims)


@reports_call
def callback(fn: Callable[..., Any], *tensors: Tensor, out: Any) -> Any:
    """A Python function on whole values, called from inside a program.

    Args:
      fn: takes NumPy arrays in their true sizes and returns an array; must be pure, as every device
        calls it. Inside `wf.vmap` it is called for one place after the other. It has no derivative.
      out: a `wf.spec` of the result.

    >>> import weft as wf, numpy as np
    >>> x = wf.ones("a=2")
    >>> wf.callback(lambda a: np.asarray(a) * 2, x, out=wf.spec(x.dims))
    f32[a=2] [2., 2.]
    """
    if not isinstance(out, Tensor):
        raise TensorTypeError(
            f"out= is {out!r}",
            rule="a callback's result is known by its spec: dims and dtype",
            hint="out=wf.spec(dims, dtype)",
        )
    return _callback(fn, *tensors, dims=out.dims, dtype=out.dtype)


@op(cached=False)
def _callback(fn: Callable[..., Any], *tensors: Tensor, dims: tuple[Dim, ...], dtype: Any) -> Any:
    shape = tuple(d.size for d in dims)

    def call(*arrays: Any) -> Any:
        result = np.asarray(fn(*map(np.asarray, arrays)), dtype)
        if result.shape != shape:
            raise ShapeError(
                f"the callback returned the shape {result.shape}",
                rule=f"out= says [{format_dims(dims)}]",
                hint="return the whole result",
            )
        return result

    slices = [as_slice(t) for t in tensors]
    check_along(d for t in slices for d in t.dims)
    arrays = list(map(_whole, slices))

    @jax.custom_jvp
    def called(*arrays: Any) -> Any:
        result = jax.ShapeDtypeStruct(shape, dtype)
        return jax.pure_callback(call, result, *arrays, vmap_method="sequential")

    called.defjvp(_no_derivative)
    return from_global(called(*arrays), dims)


def _no_derivative(primals: Any, tangents: Any) -> Any:
    raise ProgramError(
        "a callback is to be differentiated",
        rule="JAX can't look into Python code that is called from inside a program",
        hint="give the function that calls it a derivative with wf.custom_vjp, or keep gradients out with "
        "wf.stop_gradient(x)",
    )


def _whole(t: Tensor) -> Any:
    return reshard(t, ((),) * len(t.dims))


@op
def debug(x: Tensor, label: str = "") -> Tensor:
    """Print a tensor when the program runs (gathering it), and hand it on unchanged.

    >>> import weft as wf
    >>> double = wf.spmd(lambda x: 2 * wf.debug(x, "x"))
    >>> double(wf.ones("a=2"))
    x: f32[a=2] [1. 1.]
    f32[a=2] [2., 2.]
    """
    x = as_slice(x)
    program = context.require()
    kind = f"{short_dtype(x.dtype)}[{format_dims(x.dims)}]"

    def show_values(array: Any, place: Any) -> None:
        if int(place) == 0:
            print(f"{label + ': ' if label else ''}{kind} {np.array2string(np.asarray(array))}")

    axes = tuple(a for a, n in program.mesh.axes if n > 1)
    array = _whole(x)
    jax.debug.callback(show_values, array, jnp.int32(collectives.axis_index(axes)))
    return x
