"""remat: a function in, the same function out, whose backward pass recomputes its activations."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..core.boundary import LeafSpec, leaf_array, rebuild_leaf
from ..core.call_errors import check_function
from ..core.context import active
from ..core.describe import reports_call
from ..core.errors import ProgramError, nearest
from ..core.jax_compat import Primitive
from ..core.operands import as_slice
from ..core.registry import register
from ..core.tensor import Tensor, is_tensor
from ..core.types import Params, PyTree, Result


def _sums_saveable(primitive: Primitive, *_: object, **__: object) -> bool:
    return primitive.name == "psum_invariant"  # the primitive of lax.psum inside a shard_map


# JAX's primitives with real operands and complex results; an `fft` may have either.
MAKE_COMPLEX = ("complex", "fft")


def _recomputes_complex(policy: Callable[..., Any]) -> Callable[..., Any]:
    """The policy, but for complex values, which are recomputed: JAX fails when it saves one (0.10.2)."""

    def saves(primitive: Primitive, *avals: Any, **params: Any) -> Any:
        dtypes = [params.get("new_dtype"), *[getattr(a, "dtype", None) for a in avals]]
        is_complex = any(d is not None and jnp.issubdtype(d, jnp.complexfloating) for d in dtypes)
        return not is_complex and primitive.name not in MAKE_COMPLEX and policy(primitive, *avals, **params)

    return saves


REMAT_POLICIES = {
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "everything": jax.checkpoint_policies.everything_saveable,
    "dots": jax.checkpoint_policies.dots_saveable,
    "sums": _sums_saveable,
    "dots+sums": jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_saveable, _sums_saveable
    ),
}


@register(example=lambda op, x: op(lambda x: x * x)(x))
@reports_call
def remat(
    f: Callable[Params, Result], policy: str | Callable[..., bool] | None = None
) -> Callable[Params, Result]:
    """The same function, whose backward pass recomputes the values it needs, as `jax.checkpoint`.

    Args:
      policy: what is saved nevertheless: "nothing" (the default), "sums" (results of all-reduces, so
        that no collective runs twice), "dots", "dots+sums", "everything", or a JAX policy. Complex values are
        not saved.

    >>> import weft as wf
    >>> f = lambda w, x: wf.sum(wf.tanh(wf.einsum(x, w, reduce="b")))
    >>> args = wf.spec("b=32 c=32"), wf.spec("a=32 b=32")
    >>> plans = [wf.spmd(wf.grad(g)).plan(*args) for g in (f, wf.remat(f))]
    >>> [plan.memory.activations for plan in plans]
    [4096, 0]
    """
    check_function(f, "remat")
    if isinstance(policy, str) and policy not in REMAT_POLICIES:
        raise ProgramError(
            f"there is no remat policy {policy!r}{nearest(policy, REMAT_POLICIES)}",
            rule="a policy selects what is saved for the backward pass",
            hint=f"one of {', '.join(REMAT_POLICIES)}, or a function of jax.checkpoint_policies",
        )
    policy = REMAT_POLICIES[policy] if isinstance(policy, str) else policy
    chosen = None if policy is None else _recomputes_complex(policy)

    @functools.wraps(f)
    def run(*args: Params.args, **kwargs: Params.kwargs) -> Result:
        ctx = active.context
        leaves, tree = jax.tree.flatten((args, kwargs), is_leaf=is_tensor)
        # jax.checkpoint traces all its arguments. Python numbers stay out of it: the function may branch on
        # them.
        dynamic = [n for n, x in enumerate(leaves) if isinstance(x, Tensor | jax.Array)]

        def call(given: Sequence[Tensor | jax.Array]) -> PyTree:
            all_leaves = list(leaves)
            for n, leaf in zip(dynamic, given, strict=True):
                all_leaves[n] = leaf
            args, kwargs = jax.tree.unflatten(tree, all_leaves)
            return f(*args, **kwargs)

        if ctx is None:
            return jax.checkpoint(call, policy=chosen)([leaves[n] for n in dynamic])
        leaves = [as_slice(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        specs = [LeafSpec.of(leaves[n]) for n in dynamic]
        traced: dict[str, Any] = {}

        def inner(arrays: list[jax.Array]) -> list[jax.Array]:
            # Variants that need a collective are made inside: gathered outside, a stored parameter would be
            # an input of the checkpoint, and all layers' gathered parameters would be saved.
            with ctx.frame(lifts_collectives=False):
                out, traced["tree"] = jax.tree.flatten(
                    call(list(map(rebuild_leaf, specs, arrays))), is_leaf=is_tensor
                )
                # Results may stay pending: their sum is then not part of what is recomputed.
                out = [as_slice(o) if isinstance(o, Tensor) else o for o in out]
                traced["specs"] = [LeafSpec.of(o) for o in out]
                return [leaf_array(o) for o in out]

        arrays = jax.checkpoint(inner, policy=chosen)([leaf_array(leaves[n]) for n in dynamic])
        out = [rebuild_leaf(spec, a) for spec, a in zip(traced["specs"], arrays, strict=True)]
        return jax.tree.unflatten(traced["tree"], out)

    return run
