"""Loops, branches and vmap, whose bodies are programs."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import weft as wf

from ..program import Body, Named, Step, run_oracle, run_weft
from .rows import GAP, SIGNED, A, Op, Rows, dims_of, integers, one_along, sampled


def without(x: Named, dim: str, position: int = 0) -> Named:
    """The slice of a tensor at one position of a dim, or the tensor if it lacks the dim."""
    if dim not in x.names:
        return x
    axis = x.names.index(dim)
    names = tuple(n for n in x.names if n != dim)
    return dataclasses.replace(x, array=A.take(x.array, position, axis=axis), names=names)


def like(x: wf.Tensor, other: wf.Tensor) -> wf.Tensor:
    """A tensor in the dtype of another. The dtype of a carry is fixed, and both branches return the same one."""
    return x if x.dtype == other.dtype else x.astype(other.dtype)


def stacked(rows: Sequence[Named], dim: str) -> Named:
    narrow = all(r.narrow for r in rows)
    return Named(A.stack([r.array for r in rows]), (dim, *rows[0].names), narrow=narrow)


def draw_carry(d: Any, avoid: Sequence[str] = ()) -> tuple[int, tuple[int, ...]]:
    """A carry, and values that the loop's body captures."""
    fits = lambda x: not set(avoid) & set(x.names)
    carry = d.value("f", most=2, test=fits)
    extra = tuple(d.value("f", test=fits) for _ in range(d.draw(integers(0, 1))))
    return carry, extra


def carried(d: Any, given: Sequence[Named], carry: int, avoid: Sequence[str] = ()) -> tuple[Body, int]:
    """A body that updates argument number `carry`, and the number of another value that it computes."""
    body, env = d.body(given, avoid=avoid)
    fitted = Step("fit", (body.result,), {"dims": dims_of(given[carry])})
    how = d.choose(
        [
            [Step("add", (carry, len(env)))],
            [Step("multiply", (carry, len(env))), Step("tanh", (len(env) + 1,))],
        ]
    )
    steps = (*body.steps, fitted, *how)
    return Body(steps, len(env) + len(how)), body.result


def draw_scan(d: Any) -> Any:
    x = d.value("f", 1)
    dim = d.choose(d.env[x].names)
    carry, extra = draw_carry(d, [dim])
    given = [d.env[carry], without(d.env[x], dim), *[d.env[n] for n in extra]]
    body, computed = carried(d, given, 0, [dim])
    options = {"dim": dim, "body": body, "keep": computed if d.chance(2) else None}
    return (x, carry, *extra), options | {"reverse": d.draw(sampled([False, True]))}


def _scan_weft(
    x: wf.Tensor,
    carry: wf.Tensor,
    *extra: wf.Tensor,
    dim: str,
    body: Body,
    keep: Any,
    reverse: bool,
) -> list[wf.Tensor]:
    def step(carry: wf.Tensor, row: wf.Tensor) -> Any:
        env = run_weft(body.steps, [carry, row, *extra])
        return like(env[body.result], carry), None if keep is None else env[keep]

    last, rows = wf.scan(step, carry, x, dim, reverse=reverse)
    return [last] if keep is None else [last, rows]


def _scan(
    x: Named, carry: Named, *extra: Named, dim: str, body: Body, keep: Any, reverse: bool
) -> list[Named]:
    rows: dict[int, Named] = {}
    positions = range(x.sizes[dim])
    for n in reversed(positions) if reverse else positions:
        env = run_oracle(body.steps, [carry, without(x, dim, n), *extra])
        carry = env[body.result]
        if keep is not None:
            rows[n] = env[keep]
    return [carry] if keep is None else [carry, stacked([rows[n] for n in positions], dim)]


def draw_loop(d: Any) -> Any:
    carry, extra = draw_carry(d)
    counter = Named(np.asarray(0, np.int32), (), exact=True)
    body, _ = carried(d, [d.env[carry], counter, *[d.env[n] for n in extra]], 0)
    return (carry, *extra), {"body": body, "trips": d.draw(integers(0, 3))}


def _for_weft(carry: wf.Tensor, *extra: wf.Tensor, body: Body, trips: int) -> wf.Tensor:
    def step(n: wf.Tensor, c: wf.Tensor) -> wf.Tensor:
        return like(run_weft(body.steps, [c, n, *extra])[body.result], c)

    return wf.fori_loop(0, trips, step, carry)


def _while_weft(carry: wf.Tensor, *extra: wf.Tensor, body: Body, trips: int) -> wf.Tensor:
    carry, extra = wf.stop_gradient(carry), tuple(map(wf.stop_gradient, extra))

    def go(state: Any) -> wf.Tensor:
        return wf.logical_and(state["n"] < trips, wf.sum(state["carry"]).astype(jnp.float32) < 1e6)

    def step(state: Any) -> Any:
        env = run_weft(body.steps, [state["carry"], state["n"], *extra])
        return {"n": state["n"] + 1, "carry": like(env[body.result], state["carry"])}

    return wf.while_loop(go, step, {"n": wf.zeros("", jnp.int32), "carry": carry})["carry"]


def _for(carry: Named, *extra: Named, body: Body, trips: int) -> Named:
    for n in range(trips):
        counter = Named(np.asarray(n, np.int32), (), exact=True)
        carry = run_oracle(body.steps, [carry, counter, *extra])[body.result]
    return carry


def _while(carry: Named, *extra: Named, body: Body, trips: int) -> Named:
    still = [
        dataclasses.replace(x, array=lax.stop_gradient(x.array)) if isinstance(x.array, jax.Array) else x
        for x in (carry, *extra)
    ]
    return _for(*still, body=body, trips=trips)


def draw_operands(d: Any, most: int = 2, **filters: Any) -> tuple[int, ...]:
    return tuple(d.value("f", **filters) for _ in range(d.draw(integers(1, most))))


def draw_cond(d: Any) -> Any:
    decides, found = d.value("f"), draw_operands(d)
    given = [d.env[n] for n in found]
    yes, env = d.body(given)
    no, other = d.body(given)
    fitted = Step("fit", (no.result,), {"dims": dims_of(env[yes.result])})
    no = Body((*no.steps, fitted), len(other))
    handed = d.draw(integers(0, len(found)))
    return (decides, *found), {"than": d.draw(SIGNED), "yes": yes, "no": no, "handed": handed}


def _cond_weft(
    decides: wf.Tensor, *xs: wf.Tensor, than: float, yes: Body, no: Body, handed: int
) -> wf.Tensor:
    def branch(body: Body) -> Callable[..., Any]:
        return lambda *some: like(run_weft(body.steps, [*some, *xs[handed:]])[body.result], xs[0])

    return wf.cond(wf.mean(decides) > than, branch(yes), branch(no), *xs[:handed])


def _cond(decides: Named, *xs: Named, than: float, yes: Body, no: Body, handed: int) -> Named:
    first, second = (run_oracle(b.steps, xs)[b.result] for b in (yes, no))
    narrow = decides.narrow and first.narrow and second.narrow
    chosen = A.where(A.mean(decides.array) > than, first.array, second.array)
    return Named(chosen, first.names, narrow=narrow)


def draw_switch(d: Any) -> Any:
    found = draw_operands(d)
    given = [d.env[n] for n in found]
    first, env = d.body(given)
    bodies = [first]
    for _ in range(d.draw(integers(0, 2))):
        body, other = d.body(given)
        fitted = Step("fit", (body.result,), {"dims": dims_of(env[first.result])})
        bodies.append(Body((*body.steps, fitted), len(other)))
    return found, {
        "index": d.draw(integers(-1, 3)),
        "bodies": tuple(bodies),
        "handed": d.draw(integers(0, len(found))),
    }


def _switch_weft(*xs: wf.Tensor, index: int, bodies: Sequence[Body], handed: int) -> wf.Tensor:
    def branch(body: Body) -> Callable[..., Any]:
        return lambda *some: like(run_weft(body.steps, [*some, *xs[handed:]])[body.result], xs[0])

    # A tensor that the compiler can't fold, so that all branches are compiled.
    number = wf.sum(xs[0].astype(jnp.float32) > 1e6).astype(jnp.int32) + index
    return wf.switch(number, [branch(body) for body in bodies], *xs[:handed])


def _switch(*xs: Named, index: int, bodies: Sequence[Body], handed: int) -> Named:
    results = [run_oracle(b.steps, xs)[b.result] for b in bodies]
    chosen = results[min(max(index, 0), len(bodies) - 1)]
    return Named(chosen.array, results[0].names, narrow=all(r.narrow for r in results))


def draw_map(d: Any) -> Any:
    x = d.value("f", 1)
    dim = d.choose(d.env[x].names)
    fits = lambda y: y.sizes.get(dim) == d.env[x].sizes[dim]
    found = (x, *[d.value("f", 1, test=fits) for _ in range(d.draw(integers(0, 1)))])
    body, _ = d.body([without(d.env[n], dim) for n in found], avoid=[dim], mapped=[dim])
    return found, {"dim": dim, "body": body, "batch_size": d.draw(sampled([None, None, 1, 2]))}


def _map_weft(*xs: wf.Tensor, dim: str, body: Body, batch_size: int | None) -> wf.Tensor:
    return wf.map(lambda row: run_weft(body.steps, list(row))[body.result], xs, dim, batch_size=batch_size)


def _map(*xs: Named, dim: str, body: Body, batch_size: int | None) -> Named:
    return _vmap(*xs, dim=dim, body=body, captured=False)


def _compose(left: Any, right: Any) -> Any:
    """The composition of x → p x + q, first the left one."""
    return left[0] * right[0], right[0] * left[1] + right[1]


def _associative_scan_weft(x: wf.Tensor, dim: str, reverse: bool) -> list[wf.Tensor]:
    return list(wf.associative_scan(_compose, (wf.sin(x), x), dim, reverse=reverse))


def _associative_scan(x: Named, dim: str, reverse: bool) -> list[Named]:
    axis = x.names.index(dim)
    rows = [A.take(x.array, n, axis=axis) for n in range(x.sizes[dim])]
    pairs = [(A.sin(row), row) for row in (reversed(rows) if reverse else rows)]
    scanned = list(itertools.accumulate(pairs, _compose))
    scanned = scanned[::-1] if reverse else scanned
    return [Named(A.stack([pair[n] for pair in scanned], axis=axis), x.names) for n in (0, 1)]


def draw_vmap(d: Any) -> Any:
    x = d.value("f", 1)
    dim = d.choose(d.env[x].names)
    size = d.env[x].sizes[dim]
    more = d.draw(integers(0, 1))
    fits = lambda y: y.sizes.get(dim, size) == size
    found = (x, *[d.value("f", test=fits) for _ in range(more)])
    body, _ = d.body([without(d.env[n], dim) for n in found], avoid=[dim], mapped=[dim])
    return found, {"dim": dim, "body": body, "captured": d.draw(sampled([False, True]))}


def _vmap_weft(*xs: wf.Tensor, dim: str, body: Body, captured: bool) -> wf.Tensor:
    outside = [n for n, x in enumerate(xs) if captured and dim not in [d.name for d in x.dims]]

    def row(*some: wf.Tensor) -> wf.Tensor:
        rest = iter(some)
        return run_weft(body.steps, [x if n in outside else next(rest) for n, x in enumerate(xs)])[
            body.result
        ]

    return wf.vmap(row, dim)(*[x for n, x in enumerate(xs) if n not in outside])


def _vmap(*xs: Named, dim: str, body: Body, captured: bool) -> Named:
    rows = [
        run_oracle(body.steps, [without(x, dim, n) for x in xs])[body.result] for n in range(xs[0].sizes[dim])
    ]
    return stacked(rows, dim)


CONTROL: Rows = {
    "scan": Op(draw_scan, _scan_weft, _scan, apart=True),
    "fori_loop": Op(draw_loop, _for_weft, _for, apart=True),
    "while_loop": Op(draw_loop, _while_weft, _while, apart=True),
    "cond": Op(
        draw_cond,
        _cond_weft,
        _cond,
        lambda x, *_, than, **__: abs(np.mean(x.array) - than) > GAP,
        apart=True,
    ),
    "switch": Op(draw_switch, _switch_weft, _switch, apart=True),
    "vmap": Op(draw_vmap, _vmap_weft, _vmap, apart=True),
    "map": Op(draw_map, _map_weft, _map, apart=True),
    "associative_scan": Op(
        one_along(reverse=sampled([False, True])), _associative_scan_weft, _associative_scan, count=2
    ),
}
