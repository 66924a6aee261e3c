"""Running a program of narrow and weak types, and comparing types and values with those on one device.

Every value of the program is compared, not only its results. Its dtype and its weak type are always the same. Its
elements are if 16 bits hold all that they are made of exactly (`Named.narrow`): then no rounding depends on the order
of additions, nor on the precision of intermediate results. Other values are the float64 programs' concern.
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

NARROW = ("small", "index", "truth")  # the kinds of inputs that 16 bits, or 8, hold exactly
GRADIENT_PLACES = 8  # units in the last place: a gradient adds up in an order that depends on the layout


def computed(
    case: Case, mesh: Any, layout: Any, eager: bool = False
) -> tuple[list[wf.Tensor], list[wf.Tensor]]:
    """All values, and the gradients of the sum of all results."""
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
    with warnings.catch_warnings():  # a rule for a dim that the program happens not to have
        warnings.simplefilter("ignore", wf.LayoutWarning)
        return run([tensors[n] for n in chosen], [tensors[n] for n in handed])


def check_types(case: Case) -> None:
    """An AssertionError unless the program's values are the same on its mesh as on one device."""
    with jax.enable_x64(True):
        given = [
            Named(i.values(), tuple(d.name for d in wf.dims(i.dims)), exact=True, narrow=i.kind in NARROW)
            for i in case.inputs
        ]
        env = run_oracle(case.steps, given)
        want = computed(case, wf.Mesh(), wf.Layout())
        place = wf.Mesh(case.mesh), case.weft_layout()
        _compare(case, "on its mesh", computed(case, *place), want, env)
        if case.eager:
            _compare(case, "eagerly", computed(case, *place, eager=True), want, env)


def _compare(case: Case, where: str, got: Any, want: Any, env: list[Named]) -> None:
    for n, (x, y, known) in enumerate(zip(got[0], want[0], env, strict=True)):
        _same_type(f"v{n} {where}", x, y)
        if known.narrow:
            _same(f"v{n} {where}", x, y)
    chosen = [n for n, given in enumerate(case.inputs) if given.has_gradient]
    for n, x, y in zip(chosen, got[1], want[1], strict=True):
        _same_type(f"the gradient of v{n} {where}", x, y)
        if all(known.narrow for known in env):
            _same(f"the gradient of v{n} {where}", x, y, GRADIENT_PLACES)


def _same_type(what: str, x: wf.Tensor, y: wf.Tensor) -> None:
    have, wanted = ((t.dtype, t.weak_type) for t in (x, y))
    assert have == wanted, f"{what} is {have} (dtype, weak type) instead of {wanted}"


def _same(what: str, x: wf.Tensor, y: wf.Tensor, places: int = 0) -> None:
    have, wanted = (np.asarray(t.numpy(*y.dims)) for t in (x, y))
    if jnp.issubdtype(y.dtype, jnp.floating):
        have, wanted = have.astype(np.float64), wanted.astype(np.float64)
        scale = np.max(np.abs(wanted), initial=0.0)
        wrong = ~(np.abs(have - wanted) <= places * float(jnp.finfo(y.dtype).eps) * scale)
    else:
        wrong = have != wanted
    assert not wrong.any(), f"{what} is\n{have}\ninstead of\n{wanted}"
