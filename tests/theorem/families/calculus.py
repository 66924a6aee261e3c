"""Derivatives, remat, and raw functions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import weft as wf

from ..program import Body, Named, run_oracle, run_weft, weights
from .control import draw_operands, like
from .rows import A, Op, Rows, along, broadcast, integers, lined, one, one_along, sampled, several, union


def draw_body(**options: Any) -> Callable[..., Any]:
    """Some values, a function of them, and options from strategies."""

    def draw(d: Any) -> Any:
        found = draw_operands(d)
        body, _ = d.body([d.env[n] for n in found])
        drawn = {k: d.draw(s) for k, s in options.items()}
        return found, {"body": body, **drawn}

    return draw


def _remat_weft(*xs: wf.Tensor, body: Body, policy: Any, handed: int) -> wf.Tensor:
    fn = lambda *some: run_weft(body.steps, [*some, *xs[handed:]])[body.result]
    return wf.remat(fn, policy)(*xs[:handed])


def _inline(*xs: Named, body: Body, **_: Any) -> Named:
    return run_oracle(body.steps, xs)[body.result]


def _by_jax(fn: Callable[..., Any], xs: Sequence[Named]) -> list[Named]:
    """Compute with JAX, also for NumPy arrays."""
    if any(isinstance(x.array, jax.Array) for x in xs):
        return fn(*xs)
    names: list[Any] = []

    def arrays(*arrays: Any) -> list[Any]:
        out = fn(*[Named(a, x.names) for a, x in zip(arrays, xs, strict=True)])
        names[:] = [x.names for x in out]
        return [x.array for x in out]

    with jax.ensure_compile_time_eval():
        out = jax.jit(arrays)(*[x.array for x in xs])
    return [Named(np.asarray(a), n) for a, n in zip(out, names, strict=True)]


def _sound_inside(*xs: Named, body: Body, **_: Any) -> bool:
    run_oracle(body.steps, xs)
    return True


def _sound_forward(*xs: Named, body: Body, **_: Any) -> bool:
    """custom_vjp has no forward-mode derivative, neither in JAX nor in Weft."""
    return not _has_own_rule(body) and _sound_inside(*xs, body=body)


def _has_own_rule(body: Body) -> bool:
    inner = [option for step in body.steps for option in step.options.values() if isinstance(option, Body)]
    return any(step.op == "custom_vjp" for step in body.steps) or any(map(_has_own_rule, inner))


def _jvp_weft(*xs: wf.Tensor, body: Body) -> list[wf.Tensor]:
    fn = lambda x: run_weft(body.steps, [x, *xs[1:]])[body.result]
    return list(wf.jvp(fn, (xs[0],), (wf.cos(xs[0]),)))


def _jvp(*xs: Named, body: Body) -> list[Named]:
    def both(*xs: Named) -> list[Named]:
        names: list[Any] = []

        def fn(array: Any) -> Any:
            out = run_oracle(body.steps, [dataclasses.replace(xs[0], array=array), *xs[1:]])[body.result]
            names[:] = [out.names]
            return out.array

        return [Named(a, names[0]) for a in jax.jvp(fn, (xs[0].array,), (jnp.cos(xs[0].array),))]

    return _by_jax(both, xs)


def _vjp_weft(*xs: wf.Tensor, body: Body) -> wf.Tensor:
    fn = lambda x: run_weft(body.steps, [x, *xs[1:]])[body.result]
    out, pull = wf.vjp(fn, xs[0])
    return pull(wf.cos(out))[0]


def _vjp(*xs: Named, body: Body) -> list[Named]:
    def pulled(*xs: Named) -> list[Named]:
        def fn(array: Any) -> Any:
            return run_oracle(body.steps, [dataclasses.replace(xs[0], array=array), *xs[1:]])[
                body.result
            ].array

        out, pull = jax.vjp(fn, xs[0].array)
        return [Named(pull(jnp.cos(out))[0], xs[0].names)]

    return _by_jax(pulled, xs)


def _jacobian_weft(*xs: wf.Tensor, body: Body) -> wf.Tensor:
    return wf.jacobian(lambda x: run_weft(body.steps, [x, *xs[1:]])[body.result])(xs[0])


def _jacobian(*xs: Named, body: Body) -> list[Named]:
    def rows(*xs: Named) -> list[Named]:
        names: list[Any] = []

        def fn(array: Any) -> Any:
            out = run_oracle(body.steps, [dataclasses.replace(xs[0], array=array), *xs[1:]])[body.result]
            names[:] = out.names
            return out.array

        array = jax.jacobian(fn)(xs[0].array)
        used, primed = {*names, *xs[0].names}, []
        for n in xs[0].names:
            primed.append(n)
            while primed[-1] in names or (primed[-1] != n and primed[-1] in used):
                primed[-1] += "'"
            used.add(primed[-1])
        return [Named(array, (*names, *primed))]

    return _by_jax(rows, xs)


def _grad_weft(*xs: wf.Tensor, body: Body) -> list[wf.Tensor]:
    def loss(xs: Any) -> wf.Tensor:
        out = run_weft(body.steps, xs)[body.result]
        return wf.sum(out * wf.tensor(weights([d.size for d in out.dims]), out.dims))

    return wf.grad(loss)(list(xs))


def _grad(*xs: Named, body: Body) -> list[Named]:
    def grads(*xs: Named) -> list[Named]:
        def loss(arrays: Any) -> Any:
            values = [dataclasses.replace(x, array=a) for x, a in zip(xs, arrays, strict=True)]
            out = run_oracle(body.steps, values)[body.result].array
            return jnp.sum(out * weights(out.shape))

        return [Named(g, x.names) for g, x in zip(jax.grad(loss)([x.array for x in xs]), xs, strict=True)]

    return _by_jax(grads, xs)


def _own_rule_weft(x: wf.Tensor, y: wf.Tensor) -> wf.Tensor:
    """x · tanh(y) with a custom derivative."""
    rule = wf.custom_vjp(lambda x, y: x * wf.tanh(y))

    def backward(residuals: Any, g: wf.Tensor) -> Any:
        x, y = residuals
        to = lambda t, like: wf.sum(t, [d for d in t.dims if d not in like.dims])
        return like(to(g * wf.cos(y), x), x), like(to(g * x * 0.5, y), y)

    rule.defvjp(lambda x, y: (x * wf.tanh(y), (x, y)), backward)
    return rule(x, y)


def _own_rule(x: Named, y: Named) -> Named:
    names = union(x, y)
    if not isinstance(x.array, jax.Array) and not isinstance(y.array, jax.Array):
        return broadcast(lambda a, b: a * np.tanh(b), x, y)
    rule = jax.custom_vjp(lambda a, b: a * jnp.tanh(b))

    def backward(residuals: Any, g: Any) -> Any:
        a, b = residuals
        to = lambda t, like: jnp.sum(
            t, axis=[n for n in range(t.ndim) if like.shape[n] < t.shape[n]], keepdims=True
        )
        return to(g * jnp.cos(b), a), to(g * a * 0.5, b)

    rule.defvjp(lambda a, b: (a * jnp.tanh(b), (a, b)), backward)
    return Named(rule(jnp.asarray(lined(x, names)), jnp.asarray(lined(y, names))), names)


def draw_local(d: Any) -> Any:
    """A raw function along one dim, which must not be split."""
    (n,), options = one_along()(d)
    d.forbid_split(options["dim"])
    return (n,), options


def _local_weft(x: wf.Tensor, dim: str) -> wf.Tensor:
    axis = [d.name for d in x.dims].index(dim)
    others = [d for d in x.dims if d.name != dim]
    return wf.local(
        lambda a: a - jnp.mean(a, axis, keepdims=True) / 2 + 1.0, x, out=x.dims, splittable=others
    )


CALCULUS: Rows = {
    "remat": Op(
        draw_body(
            policy=sampled([None, "sums", "dots", "everything"]),
            handed=integers(0, 2),
        ),
        _remat_weft,
        _inline,
        apart=True,
    ),
    "jvp": Op(draw_body(), _jvp_weft, _jvp, _sound_forward, apart=True, count=2),
    "vjp": Op(draw_body(), _vjp_weft, _vjp, _sound_inside, apart=True),
    "jacobian": Op(draw_body(), _jacobian_weft, _jacobian, _sound_inside, apart=True),
    "grad": Op(draw_body(), _grad_weft, _grad, _sound_inside, apart=True),
    "custom_vjp": Op(several(2), _own_rule_weft, _own_rule),
    "local": Op(
        one(),
        lambda x: wf.local(lambda a: jnp.sin(a) + 1.0, x, out=x.dims, splittable=x.dims),
        lambda x: Named(A.sin(x.array) + 1.0, x.names),
    ),
    # Not a cumulative sum, which XLA computes wrongly if it follows another op (docs/reliability.md).
    "local along": Op(
        draw_local, _local_weft, along(lambda a, n: a - A.mean(a, axis=n, keepdims=True) / 2 + 1.0)
    ),
}
