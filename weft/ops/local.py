"""Escape hatches: raw JAX functions on slices, Python callbacks, and printing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ..core import collectives
from ..core.context import active
from ..core.describe import reports_call, short_dtype
from ..core.dims import Dim, DimLike, DimsLike, as_dims, format_dims, select_dims, union_dims
from ..core.errors import LayoutError, ProgramError, ShapeError, TensorTypeError
from ..core.layout import axes_of
from ..core.op import op
from ..core.operands import as_slice, check_along, from_global, slice_tensor
from ..core.padding import fill_padding
from ..core.reshard import reshard, reshard_together
from ..core.retrace import Retrace
from ..core.tensor import Tensor


@overload
def local(
    fn: Callable[..., jax.Array], *tensors: Tensor, out: DimsLike, splittable: DimsLike = ()
) -> Tensor: ...
@overload
def local(
    fn: Callable[..., Sequence[jax.Array]],
    *tensors: Tensor,
    out: Sequence[Sequence[DimLike]],
    splittable: DimsLike = (),
) -> tuple[Tensor, ...]: ...
@op(example=lambda op, x: op(lambda array: array * 2, x, out=x.dims, splittable=x.dims), functions=True)
def local(
    fn: Callable[..., jax.Array | Sequence[jax.Array]],
    *tensors: Tensor,
    out: DimsLike | Sequence[DimsLike],
    splittable: DimsLike = (),
) -> Tensor | tuple[Tensor, ...]:
    """Apply a raw JAX function to slices: for kernels, and for ops that Weft does not have.

    Args:
      fn: takes one array for each tensor (its slice, dimensions in the tensor's order) and returns an
        array, or a tuple of arrays.
      out: the dims of the result, by name if a tensor has them; a list of lists of dims if `fn` returns a
        tuple.
      splittable: the dims along which `fn` can process each slice independently. Splitting any other dim is
        an error. Padding along them is zero in the inputs, and is discarded in the results, where it should
        be finite.

    A result may lack a split dim if it does not depend on the tensors that have the dim. Collectives inside
    `fn` are not checked: `jax.lax.psum` of a replicated value multiplies it.

    >>> import weft as wf, jax.numpy as jnp
    >>> x = wf.ones("batch=2 d=3")
    >>> wf.local(lambda a: jnp.cumsum(a, axis=1), x, out=x.dims, splittable="batch")
    f32[batch=2, d=3]
    [[1., 2., 3.],
     [1., 2., 3.]]
    """
    ctx = active.context
    slices = [as_slice(t) for t in tensors]
    items: Any = out if isinstance(out, str | Dim) else list(out)
    several = isinstance(items, list) and bool(items) and not isinstance(items[0], Dim | str)
    known = union_dims(t.dims for t in slices)
    outs = [as_dims(dims, known) for dims in (items if several else [items])]
    all_dims = union_dims([*(t.dims for t in slices), *outs])
    allowed = {d.name for d in select_dims(all_dims, splittable)}
    splits = dict(zip(all_dims, ctx.splits(all_dims), strict=True))
    undeclared = [d for d in all_dims if splits[d] and d.name not in allowed]
    if undeclared:
        rules = " ".join(f"{d.name}:{'+'.join(splits[d])}" for d in undeclared)
        error = LayoutError(
            f"the layout splits {', '.join(d.name for d in undeclared)}, which the local function does not "
            "declare splittable",
            f"rules: {rules}     splittable: {', '.join(sorted(allowed)) or 'none'}",
            rule="a local function sees slices, so it declares the dims that may be split",
            hint="declare it (splittable=[...]) if slices can be computed independently, else drop the rule",
        )
        error.unsplittable = frozenset(d.name for d in undeclared)
        raise error
    check_along(d for d in all_dims if d.name not in allowed)
    split_axes = axes_of(tuple(splits.values()))
    # Making each operand varying over all axes, once, sums its gradient once. But then all results vary over
    # them too. If a result lacks a split dim, leave the operands as they are: JAX's types then show over
    # which axes the result varies.
    is_full = all(axes_of(ctx.splits(dims)) >= split_axes for dims in outs)
    arrays = reshard_together(slices) if is_full else [reshard(t) for t in slices]
    if any(collectives.varying_axes(a) - split_axes - ctx.vmap.axes for a in arrays):
        raise Retrace("unvarying")  # a scan made them varying in advance, so the results would vary too
    returned: Any = fn(*arrays)
    results = list(returned) if several and isinstance(returned, list | tuple) else [returned]
    not_arrays = [r for r in results if not hasattr(r, "shape")]
    if not_arrays:
        raise TensorTypeError(
            f"the local function returned a {type(not_arrays[0]).__name__}",
            rule="a local function returns an array, or a tuple of arrays if out= lists the dims of several",
            hint="out=[[batch, d], [batch]] for a tuple of two arrays",
        )
    if len(results) != len(outs):
        raise ShapeError(
            f"the local function returned {len(results)} arrays, and out= lists {len(outs)}",
            rule="out= lists the dims of each result",
            hint="out=[[batch, d], [batch]] for two results",
        )
    tensors_out = [_result(array, dims) for array, dims in zip(results, outs, strict=True)]
    return tuple(tensors_out) if several else tensors_out[0]


def _result(array: jax.Array, dims: tuple[Dim, ...]) -> Tensor:
    ctx = active.context
    splits = ctx.splits(dims)
    shape = ctx.slice_shape(dims, splits)
    if tuple(array.shape) != shape:
        raise ShapeError(
            f"the local function returned shape {tuple(array.shape)}",
            f"a slice of [{format_dims(dims)}] has shape {shape} here",
            rule="a local function returns the slice of each result",
            hint="check out=; inside, a split dim has the size of its slice",
        )
    extra = collectives.varying_axes(array) - axes_of(splits) - ctx.vmap.axes
    if extra:
        raise ProgramError(
            f"the result of the local function varies over {', '.join(sorted(extra))}, "
            f"which split none of its dims [{format_dims(dims)}]",
            rule="a result without a split dim must be the same on all devices along that dim's axes",
            hint="keep the dim in out=, and reduce the result outside: wf.sum(...)",
        )
    return slice_tensor(fill_padding(array, dims, splits), dims)


@reports_call
def callback(fn: Callable[..., ArrayLike], *tensors: Tensor, out: Tensor) -> Tensor:
    """Call a Python function on global arrays from inside a program.

    Args:
      fn: takes NumPy arrays without padding and returns an array. It must be pure, because every device calls
        it. Inside `wf.vmap` the calls are sequential. It has no derivative.
      out: a `wf.spec` of the result.

    >>> import weft as wf, numpy as np
    >>> x = wf.ones("a=2")
    >>> wf.callback(lambda a: np.asarray(a) * 2, x, out=wf.spec(x.dims))
    f32[a=2] [2., 2.]
    """
    if not isinstance(out, Tensor):
        raise TensorTypeError(
            f"out= is {out!r}",
            rule="the result of a callback is described by a spec: dims and dtype",
            hint="out=wf.spec(dims, dtype)",
        )
    return _callback(fn, *tensors, dims=out.dims, dtype=out.dtype)


@op(example=lambda op, x: op(lambda array: array * 2, x, out=x), mixes_rows=True, cached=False)
def _callback(
    fn: Callable[..., ArrayLike], *tensors: Tensor, dims: tuple[Dim, ...], dtype: np.dtype
) -> Tensor:
    shape = tuple(d.size for d in dims)

    def call(*arrays: jax.Array) -> np.ndarray:
        result = np.asarray(fn(*map(np.asarray, arrays)), dtype)
        if result.shape != shape:
            raise ShapeError(
                f"the callback returned shape {result.shape}",
                rule=f"out= is [{format_dims(dims)}]",
                hint="return the global result",
            )
        return result

    slices = [as_slice(t) for t in tensors]
    check_along(d for t in slices for d in t.dims)
    arrays = list(map(_unsplit, slices))

    @jax.custom_jvp
    def run_callback(*arrays: jax.Array) -> jax.Array:
        result = jax.ShapeDtypeStruct(shape, dtype)
        return jax.pure_callback(call, result, *arrays, vmap_method="sequential")

    run_callback.defjvp(_no_derivative)
    return from_global(run_callback(*arrays), dims)


def _no_derivative(primals: Sequence[jax.Array], tangents: Sequence[jax.Array]) -> NoReturn:
    raise ProgramError(
        "a callback can't be differentiated",
        rule="JAX can't differentiate Python code that a program calls back",
        hint="give the function that calls it a derivative with wf.custom_vjp, or block gradients with "
        "wf.stop_gradient(x)",
    )


def _unsplit(t: Tensor) -> jax.Array:
    return reshard(t, ((),) * len(t.dims))


@op(example="x")
def debug(x: Tensor, label: str = "") -> Tensor:
    """Print a tensor when the program runs, and return it unchanged. A split tensor is gathered.

    >>> import weft as wf
    >>> double = wf.spmd(lambda x: 2 * wf.debug(x, "x"))
    >>> double(wf.ones("a=2"))
    x: f32[a=2] [1. 1.]
    f32[a=2] [2., 2.]
    """
    x = as_slice(x)
    ctx = active.context
    kind = f"{short_dtype(x.dtype)}[{format_dims(x.dims)}]"

    def print_values(array: jax.Array, device: jax.Array) -> None:
        if int(device) == 0:
            print(f"{label + ': ' if label else ''}{kind} {np.array2string(np.asarray(array))}")

    axes = tuple(a for a, n in ctx.placement.mesh.axes if n > 1)
    array = _unsplit(x)
    jax.debug.callback(print_values, array, jnp.int32(collectives.axis_index(axes)))
    return x
