"""JAX's APIs without a stability guarantee, and the differences between the versions that Weft supports.

Weft supports JAX 0.10.2 up to the latest release. JAX promises stability for the documented names of `jax`,
`jax.numpy`, `jax.lax`, `jax.random`, `jax.nn`, `jax.tree` and `jax.sharding`. Every other name that Weft uses
is imported here, with the reason, and `tests/core/test_jax_compat.py` has a test for each. A new release of
JAX that breaks Weft is repaired in this file.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp
import jax.scipy.special
import numpy as np

# The types of traced values: `Tracer` distinguishes values known only at run time from concrete ones, and
# `ShapedArray` has the shape and dtype of a value in a jaxpr.
from jax.core import AbstractValue as AbstractValue
from jax.core import ShapedArray as ShapedArray
from jax.core import Tracer as Tracer

# A collective with a transpose of its own, for sums that JAX's transpose would repeat.
from jax.custom_derivatives import linear_call as linear_call

# XLA's CPU backend rejects a Fourier transform of an array in another order than row-major, which its own
# layouts of all-gathers may ask for.
from jax.experimental.layout import Layout as ArrayLayout
from jax.experimental.layout import with_layout_constraint

# A plan reads jaxprs: these are their parts.
from jax.extend.core import ClosedJaxpr as ClosedJaxpr
from jax.extend.core import Jaxpr as Jaxpr
from jax.extend.core import JaxprEqn as JaxprEqn
from jax.extend.core import Literal as Literal

# `collectives.assume_replicated` is a primitive: JAX has no cast from varying to unvarying.
from jax.extend.core import Primitive as Primitive
from jax.extend.core import Var as Var

# The memo of variants belongs to one trace, and computes a shared variant in an outer trace.
from jax.extend.core import get_opaque_trace_state as get_opaque_trace_state

# The bodies of calls that the plan has no rule for.
from jax.extend.core import jaxprs_in_params as jaxprs_in_params
from jax.extend.core import set_current_trace as set_current_trace
from jax.extend.core import take_current_trace as take_current_trace

# Index-based threefry draws the bits of a slice by element index. `jax.random` draws an entire array.
from jax.extend.random import threefry2x32_p as threefry2x32_p

# The derivative, batching and lowering rules of that primitive.
from jax.interpreters import ad as ad
from jax.interpreters import batching as batching
from jax.interpreters import mlir as mlir
from jax.interpreters import partial_eval

# A plan leaves out work whose result nothing uses, as XLA does.
from jax.interpreters.partial_eval import dce_jaxpr as dce_jaxpr


def scan_counts(params: Mapping[str, Any]) -> tuple[int, int]:
    """The numbers of constants and of carries among the operands of a scan equation.

    Later versions of JAX have `ft_in` instead of `num_consts` and `num_carry`: a tree of constants, carries
    and scanned arrays.
    """
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carries, _ = params["ft_in"].unpack()
    return len(consts), len(carries)


def has_trace() -> bool:
    """Whether there is a current trace. `jax.jvp` of JAX 0.12 flattens results after its own has ended."""
    try:
        get_opaque_trace_state()
    except AssertionError:
        return False
    return True


def expand_hijax(jaxpr: Jaxpr) -> Jaxpr:
    """The jaxpr with only the primitives that are lowered to XLA.

    Since JAX 0.12 some functions, such as `jnp.frexp`, are primitives that expand to others when the program
    is lowered.
    """
    if not getattr(jaxpr, "is_high", False):
        return jaxpr
    return partial_eval.lower_jaxpr2(jaxpr)  # type: ignore[attr-defined]


# The mesh axes over which a value of this type varies, inside a `shard_map`. JAX prints them, but has no
# public name for them. Every op reads them, hence no Python function.
varying_axes_of: Callable[[ShapedArray], frozenset[str]] = operator.attrgetter("mat.varying")


def jaxpr_varying_axes(aval: AbstractValue) -> frozenset[str]:
    """The mesh axes over which a value of a jaxpr varies: none outside of `shard_map`, and for tokens."""
    return aval.mat.varying if hasattr(aval, "mat") else frozenset()


def without_varying(aval: ShapedArray, axes: frozenset[str]) -> ShapedArray:
    """The type of a value that no longer varies over these mesh axes."""
    return aval.update(manual_axis_type=aval.mat.update(varying=aval.mat.varying - axes))


def _error_function(fn: Callable[[jax.Array], jax.Array], slope: float) -> Callable[[jax.Array], jax.Array]:
    """An error function with the derivative slope · exp(-x²).

    The derivative in JAX 0.12 is a polynomial whose coefficients don't vary, which `shard_map` rejects.
    """
    wrapped = jax.custom_jvp(fn)

    @wrapped.defjvp
    def jvp(primals: Sequence[jax.Array], tangents: Sequence[jax.Array]) -> tuple[jax.Array, jax.Array]:
        (x,), (dx,) = primals, tangents
        return wrapped(x), jnp.asarray(slope, x.dtype) * (dx * jnp.exp(-jnp.square(x)))

    return wrapped


erf = _error_function(jax.scipy.special.erf, 2 / math.sqrt(math.pi))
erfc = _error_function(jax.scipy.special.erfc, -2 / math.sqrt(math.pi))


def gelu(x: jax.Array, approximate: bool = True) -> jax.Array:
    """`jax.nn.gelu` with this derivative of the error function."""
    if approximate:
        return jax.nn.gelu(x)
    x = x.astype(jnp.result_type(x, float)) if not jnp.issubdtype(x.dtype, jnp.inexact) else x
    return jnp.array(0.5 * x * erfc(-x * np.sqrt(0.5).astype(x.dtype)), dtype=x.dtype)


def pull_back_wanted(pullback: Any, wanted: Any, cotangents: Any) -> Any:
    """The cotangents of the wanted inputs of `jax.vjp`; `wanted` is a tree of booleans. The others are None.

    The documented call computes zeros for inputs that were not used.
    """
    value, nothing = jax.ad.GradValue(), jax.ad.DontWant()  # type: ignore[attr-defined]
    return pullback.with_refs(jax.tree.map(lambda one: value if one else nothing, wanted))(cotangents)


def process_allgather(array: jax.Array) -> np.ndarray:
    """The values of an array that is spread over several processes, in each process."""
    from jax.experimental import multihost_utils

    return multihost_utils.process_allgather(array, tiled=True)


def row_major(array: jax.Array) -> jax.Array:
    """The array, stored in row-major order on CPUs; so is its cotangent. TPUs have no such constraint."""
    layout = ArrayLayout(tuple(range(array.ndim)))
    return jax.lax.platform_dependent(
        array, cpu=lambda x: with_layout_constraint(x, layout), default=lambda x: x
    )


# Transformations that check whether the result of a function is an array.
TRANSFORMATIONS = {"grad_f": "jax.grad", "value_and_grad_f": "jax.value_and_grad"}
_CONVERSIONS = {"jnp.array", "jnp.asarray"}


def called_jax_function(frame: FrameType) -> str | None:
    """The function of JAX that user code called, such as `jnp.sum`, and in which this frame runs.

    None for JAX's operators and conversions to arrays, and if the frame is not JAX's. Read from the stack:
    JAX does not tell an object which function converts it.
    """
    if frame.f_code.co_name.startswith("_operator_"):
        return None
    modules = {
        "jnp": jax.numpy,
        "jax.nn": jax.nn,
        "jax.lax": jax.lax,
        "jax": jax,
        "jnp.linalg": jax.numpy.linalg,
        "jnp.fft": jax.numpy.fft,
        "jax.random": jax.random,
    }
    found: str | None = None
    caller: FrameType | None = frame
    while caller is not None and caller.f_globals.get("__name__", "").partition(".")[0] in (
        "jax",
        "contextlib",
    ):
        called = caller.f_locals.get("self")
        name = getattr(
            called, "__name__" if isinstance(called, jax.numpy.ufunc) else "", caller.f_code.co_name
        )
        name = "take" if name == "rewriting_take" else name  # array[indices]
        public = [
            f"{short}.{name}" for short, module in modules.items() if callable(getattr(module, name, None))
        ]
        found = TRANSFORMATIONS.get(name) or (public[0] if public else found)
        caller = caller.f_back
    return None if found in _CONVERSIONS else found


def cluster_environments() -> list[Any]:
    """The kinds of clusters whose environment JAX can read to find the processes of a job."""
    from jax._src.clusters import ClusterEnv

    return ClusterEnv._cluster_types


def distributed_state() -> Any:
    """The state of `jax.distributed`: its client and the address of its coordinator."""
    from jax._src import distributed

    return distributed.global_state


def register_gloo_client(distributed_client: Any, address: str) -> None:
    """Make JAX's CPU client, before it exists, run its collectives through Gloo at this address.

    JAX has no public option for the address: it takes the one that the host's own name resolves to.
    """
    from jax._src import xla_bridge
    from jax._src.lib import _jax

    def client() -> Any:
        collectives = _jax.make_gloo_tcp_collectives(distributed_client, hostname=address)
        return xla_bridge.make_cpu_client(collectives)

    xla_bridge.register_backend_factory("cpu", client, priority=0, fail_quietly=False)
