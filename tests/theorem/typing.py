"""Run a program of narrow and weak types, and compare its types and values with those on one device.

Every value of the program is compared, not only its results. Dtypes and weak types must always agree. Elements must
agree if 16 bits represent every number in their computation exactly (`Named.narrow`): then rounding depends neither on
the order of additions nor on the precision of intermediate results. The float64 programs cover the other values.
"""

from __future__ import annotations

import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import weft as wf
from weft.core.placement import with_role

from .program import Case, Named, run_oracle, run_weft

NARROW = ("small", "index", "boolean")  # the kinds of inputs that 16 bits (8, for integers) represent exactly
GRADIENT_ULPS = 8  # units in the last place: the layout decides the order in which a gradient is summed


def computed(
    case: Case, mesh: Any, layout: Any, eager: bool = False
) -> tuple[list[wf.Tensor], list[wf.Tensor]]:
    """All values of the program, and the gradients of the sum of its results."""
    tensors = [with_role(wf.tensor(i.array(), i.dims), i.role) for i in case.inputs]

    def placed(t: wf.Tensor) -> wf.Tensor:
        return wf.place(t, mesh, layout) if eager and t.mesh is None else t

    tensors = list(map(placed, tensors))
    chosen = [n for n, given in enumerate(case.inputs) if given.has_gradient]
    handed = [n for n, i in enumerate(case.inputs) if not i.captured and n not in chosen]

    def program(differentiated: list[wf.Tensor], others: list[wf.Tensor]) -> Any:
        def loss(some: list[wf.Tensor]) -> tuple[wf.Tensor, list[wf.Tensor]]:
            given = dict(zip(chosen, some, strict=True)) | dict(zip(handed, others, strict=True))
            env = run_weft(case.steps, [given.get(n, t) for n, t in enumerate(tensors)], placed)
            total = placed(wf.zeros("", jnp.float64))
            for n in case.results:
                if jnp.issubdtype(env[n].dtype, jnp.floating):
                    total = total + wf.sum(env[n].astype(jnp.float64))
            return total, env

        grads, env = wf.grad(loss, has_aux=True)(differentiated)
        return env, grads

    run = program if eager else wf.spmd(program, mesh, layout)
    with warnings.catch_warnings():  # the layout may have a rule for a dim that the program lacks
        warnings.simplefilter("ignore", wf.LayoutWarning)
        return run([tensors[n] for n in chosen], [tensors[n] for n in handed])


def check_types(case: Case) -> None:
    """Raise AssertionError unless the program computes the same values on its mesh as on one device."""
    with jax.enable_x64(True):
        given = [
            Named(i.values(), tuple(d.name for d in wf.dims(i.dims)), exact=True, narrow=i.kind in NARROW)
            for i in case.inputs
        ]
        env = run_oracle(case.steps, given)
        want = computed(case, wf.Mesh(), wf.Layout())
        placement = wf.Mesh(case.mesh), case.weft_layout()
        _compare(case, "on its mesh", computed(case, *placement), want, env)
        if case.eager:
            _compare(case, "eagerly", computed(case, *placement, eager=True), want, env)


def _compare(case: Case, where: str, got: Any, want: Any, env: list[Named]) -> None:
    for n, (x, y, known) in enumerate(zip(got[0], want[0], env, strict=True)):
        _same_type(f"v{n} {where}", x, y)
        if known.narrow:
            _same(f"v{n} {where}", x, y)
    chosen = [n for n, given in enumerate(case.inputs) if given.has_gradient]
    for n, x, y in zip(chosen, got[1], want[1], strict=True):
        _same_type(f"the gradient of v{n} {where}", x, y)
        if all(known.narrow for known in env):
            _same(f"the gradient of v{n} {where}", x, y, GRADIENT_ULPS)


def _same_type(what: str, x: wf.Tensor, y: wf.Tensor) -> None:
    have, wanted = ((t.dtype, t.weak_type) for t in (x, y))
    assert have == wanted, f"{what} is {have} (dtype, weak type) instead of {wanted}"


def _same(what: str, x: wf.Tensor, y: wf.Tensor, ulps: int = 0) -> None:
    have, wanted = (np.asarray(t.numpy(*y.dims)) for t in (x, y))
    if jnp.issubdtype(y.dtype, jnp.floating):
        have, wanted = have.astype(np.float64), wanted.astype(np.float64)
        scale = np.max(np.abs(wanted), initial=0.0)
        wrong = ~(np.abs(have - wanted) <= ulps * float(jnp.finfo(y.dtype).eps) * scale)
    else:
        wrong = have != wanted
    assert not wrong.any(), f"{what} is\n{have}\ninstead of\n{wanted}"
