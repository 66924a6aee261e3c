"""Types: an op gives the same dtype and the same weak type on one device and under every layout.

A type is known once a program is traced, so nothing here is compiled unless values are compared: one trace has
hundreds of ops. Rows are the examples of all ops, with their operands in narrow and weak types, and ops mixed with
Python numbers.
"""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from every_op import EVERY_OP
from op_examples import OPERANDS

import weft as wf
from weft.core.errors import WeftError

LAYOUTS = {
    "even": ("x=2 y=3 z=3", "a:x b:y r:z"),
    "uneven": ("x=4 z=2", "a:x r:z"),
    "uneven, two axes": ("x=4 y=2 z=2", "a:x b:y n:z"),
    "uneven, one dim over two axes": ("x=2 y=2 z=2", "a:x+y n:z r:z"),
    "the other dims": ("x=2 y=2 z=2", "b:x n:z r:y"),
    "more devices than elements": ("x=8 z=8", "a:x n:z r:z"),
    "stages": ("x=2", "w:x"),
}

# The dtypes of what a row is given. A weak type is what Python's numbers have: float32 or int32 that give way.
TYPES = {
    "bf16": lambda a: jnp.asarray(a, jnp.bfloat16),
    "f16": lambda a: jnp.asarray(a, jnp.float16),
    "int8": lambda a: jnp.asarray(a, jnp.int8),
    "uint8": lambda a: jnp.asarray(a, jnp.uint8),
    "bool": lambda a: jnp.asarray(a > 0),
    "weak float": lambda a: jnp.full(a.shape, 0.5) * jnp.arange(a.size).reshape(a.shape),
    "weak int": lambda a: (jnp.asarray(a) > 0) + 1,
    "f32": lambda a: jnp.asarray(a, jnp.float32),
}
FLOATS = ("bf16", "f16", "weak float", "f32")


def tensors(kind, more=""):
    """The operands of the examples, in one type; `more` are dims in front of all."""
    given = {}
    for seed, (name, like) in enumerate(OPERANDS.items()):
        if not wf.is_tensor(like):
            continue
        dims = [*wf.dims(more), *like.dims]
        shape = [d.size for d in dims]
        random = np.random.default_rng(seed)
        integers = like.dtype == jnp.int32
        values = random.integers(1, 5, shape) if integers or name in "pg" else random.integers(-4, 5, shape)
        of = "bool" if like.dtype == jnp.bool_ else kind
        if integers and kind in (*FLOATS, "bool"):
            of = "uint8" if name == "j" else "int8"
        given[name] = wf.tensor(TYPES[of](values), dims)
    return given


A = wf.Dim("a", 6)

# Python's numbers among tensors: `x` is of the row's type, `c` a mask.
MIXED = {
    "x + 1": lambda t: t["x"] + 1,
    "1 - x": lambda t: 1 - t["x"],
    "x * 0.5": lambda t: t["x"] * 0.5,
    "x / 2": lambda t: t["x"] / 2,
    "3.5 / x": lambda t: 3.5 / t["x"],
    "x // 2": lambda t: t["x"] // 2,
    "x % 2.5": lambda t: t["x"] % 2.5,
    "x ** 2": lambda t: t["x"] ** 2,
    "x ** 0.5": lambda t: t["x"] ** 0.5,
    "2 ** x": lambda t: 2 ** t["x"],
    "1j * x": lambda t: 1j * t["x"],
    "x > 1": lambda t: t["x"] > 1,
    "x & 1": lambda t: t["x"] & 1,
    "numpy number": lambda t: t["x"] * np.float32(2),
    "maximum": lambda t: wf.maximum(t["x"], 1.5),
    "where numbers": lambda t: wf.where(t["c"], 0.0, -1e9),
    "where whole numbers": lambda t: wf.where(t["c"], 1, 2),
    "where a number": lambda t: wf.where(t["c"], t["x"], 0),
    "where weak": lambda t: wf.where(t["c"], t["x"], wf.where(t["c"], 0.5, 1.0)),
    "x + where": lambda t: t["x"] + wf.where(t["c"], 0.0, -1e9),
    "x * where": lambda t: t["x"] * wf.where(t["d"], 2, 3),
    "arange * 0.5": lambda t: wf.arange(A) * 0.5,
    "x * arange * 0.5": lambda t: wf.arange(A, jnp.int8) * 0.5 * t["x"],
    "mask + 1": lambda t: t["c"] + 1,
    "x + mask": lambda t: t["x"] * (t["c"] + 1),
    "mask * 0.5": lambda t: t["c"] * 0.5,
    "full": lambda t: wf.full([A], 2.0),
    "full of whole numbers": lambda t: wf.full([A], 2),
    "full of a tensor": lambda t: wf.full([A], t["x"]["a", 0, "b", 0]),
    "x + full": lambda t: t["x"] + wf.full([A], 2.0),
    "full_like": lambda t: wf.full_like(t["x"], 2.5),
    "clip": lambda t: wf.clip(t["x"], 0, 2),
    "clip, fractions": lambda t: wf.clip(t["x"], 0.5, 1.5),
    "clip, one bound": lambda t: wf.clip(t["x"], min=1),
    "clip of numbers": lambda t: wf.clip(t["c"] + 1, 0, 2),
    "cumsum": lambda t: wf.cumsum(t["x"], "a"),
    "cumsum of b": lambda t: wf.cumsum(t["x"], "b", reverse=True),
    "cumsum of a mask": lambda t: wf.cumsum(t["c"], "a"),
    "cumsum, weak": lambda t: wf.cumsum(t["c"] * 0.5, "a", exclusive=True),
    "cumprod, weak": lambda t: wf.cumprod(t["c"] + 1, "a"),
    "concat": lambda t: wf.concat([t["x"], t["p"]], "a"),
    "concat with weak": lambda t: wf.concat([t["x"], wf.where(t["c"], 0.5, 1.0)], "a"),
    "concat of weak": lambda t: wf.concat([t["c"] + 1, wf.where(t["c"], 0.5, 1.0)], "a"),
    "stack with weak": lambda t: wf.stack([t["x"], t["c"] * 0.5], "n"),
    "roll": lambda t: wf.roll(t["x"], "a", 1),
    "roll of weak": lambda t: wf.roll(t["c"] * 0.5, "a", -1),
    "shift of weak": lambda t: wf.shift(t["c"] + 1, "a", 1),
    "flip of weak": lambda t: wf.flip(t["c"] + 1, "a"),
    "pad": lambda t: wf.pad(t["x"], "a", 1, 0, value=1),
    "pad of weak": lambda t: wf.pad(t["c"] * 0.5, "a", 1, 2, value=1.0),
    "index of weak": lambda t: (t["c"] * 0.5)["a", 1],
    "part of weak": lambda t: (t["c"] * 0.5)["a", 1:5:2],
    "part of weak, from the end": lambda t: (t["c"] + 1)["a", ::-1],
    "slice of weak": lambda t: wf.slice(t["c"] + 1, "a", 1, 3),
    "slice of weak, at a tensor": lambda t: wf.slice(t["c"] + 1, "a", t["j"]["a", 0], 3),
    "update by a number": lambda t: wf.update(t["x"], "a", 1, 1),
    "update of weak": lambda t: wf.update(t["c"] * 0.5, "a", 1, 0.5),
    "update of weak by weak": lambda t: wf.update(t["c"] * 0.5, "a", 1, (t["c"] * 0.5)["a", 0:2]),
    "update at a tensor": lambda t: wf.update(t["c"] + 1, "a", t["j"]["a", 0], 1),
    "take of weak": lambda t: wf.take((t["c"] * 0.5).rename(a="n"), t["j"], "n"),
    "take, filled": lambda t: wf.take((t["c"] + 1).rename(a="n"), t["j"], "n", fill=0),
    "scatter_add of numbers": lambda t: wf.scatter_add(t["x"].rename(a="n"), t["j"], 1, "n"),
    "scatter_add to weak": lambda t: wf.scatter_add((t["c"] * 0.5).rename(a="n"), t["j"], 1, "n"),
    "scatter_add of weak": lambda t: wf.scatter_add(t["x"].rename(a="n"), t["j"], t["c"] + 1, "n"),
    "one_hot": lambda t: wf.one_hot(t["j"], wf.Dim("n", 5), jnp.bfloat16) * 2.0,
    "sum of weak": lambda t: wf.sum(t["c"] * 0.5, "a"),
    "sum of a mask": lambda t: wf.sum(t["c"], "a"),
    "sum of all * 2": lambda t: wf.sum(t["x"]) * 2,
    "mean of weak": lambda t: wf.mean(t["c"] + 1, "a"),
    "mean over weak": lambda t: t["x"] - wf.mean(t["c"] * 0.5, "a"),
    "max of weak": lambda t: wf.max(t["c"] * 0.5, "a"),
    "min of weak": lambda t: wf.min(t["c"] + 1, "a"),
    "prod of weak": lambda t: wf.prod(t["c"] + 1, "a"),
    "softmax of weak": lambda t: wf.softmax(t["c"] * 0.5, "a"),
    "logsumexp of weak": lambda t: wf.logsumexp(t["c"] * 0.5, "a"),
    "top_k of weak": lambda t: wf.top_k(t["c"] * 0.5, "a", wf.Dim("n", 2)),
    "sort of weak": lambda t: wf.sort(t["c"] + 1, "a"),
    "einsum": lambda t: wf.einsum(t["x"], t["c"] * 0.5, out=["b"]),
    "einsum of three": lambda t: wf.einsum(t["x"], t["y"], t["c"] + 1, out=["a"]),
    "einsum of one and two weak": lambda t: wf.einsum(t["x"]["b", 0], t["d"] + 1, (t["c"] + 1)["a", 0], out=["a", "b"]),
    "einsum of weak": lambda t: wf.einsum(t["c"] * 0.5, t["c"] + 1, out=["a"]),
    "pending + number": lambda t: wf.sum(t["x"], "a") + 1.5,
    "pending + weak": lambda t: wf.sum(t["x"], "a") + wf.where(t["d"], 0.5, 1.0),
    "pending, renamed": lambda t: wf.einsum(t["c"] * 0.5, reduce="a").rename(b="a"),
    "renamed weak": lambda t: (t["c"] * 0.5).rename(a="n") + 1,
    "swapped weak": lambda t: (t["c"] * 0.5).rename(a="b", b="a"),
    "reshaped weak": lambda t: wf.reshape(t["c"] * 0.5, "m=9 n=2"),
    "merged weak": lambda t: wf.merge(t["c"] * 0.5, ["b", "a"], "n"),
    "split weak": lambda t: wf.split(t["c"] * 0.5, "a", "m=3 n=2"),
    "broadcast weak": lambda t: wf.broadcast_to(t["d"] * 0.5, "n=5 b=3"),
    "unstacked weak": lambda t: wf.unstack(t["c"] * 0.5, "a")[1],
    "windows of weak": lambda t: wf.windows(t["c"] * 0.5, "a", wf.Dim("n", 2), padding="SAME"),
    "max_pool of weak": lambda t: wf.max_pool(t["c"] * 0.5, {"a": 3}, stride=1, padding="SAME"),
    "avg_pool of weak": lambda t: wf.avg_pool(t["c"] * 0.5, {"a": 3}, stride=1, padding="SAME"),
    "avg_pool": lambda t: wf.avg_pool(t["x"], {"a": 3}, stride=1, padding="SAME"),
    "conv with weak": lambda t: wf.conv(t["x"], t["kernel"] * 0.5, window={"a": "w"}, out=["a", "f"]),
    "dropout of weak": lambda t: wf.dropout(t["c"] * 0.5, 0.5, jax.random.key(0)),
    "draws": lambda t: wf.random.normal(jax.random.key(0), [A], jnp.bfloat16) * 0.5,
    "whole draws": lambda t: wf.random.randint(jax.random.key(0), [A], 0, 9, jnp.int8) + 1,
    "bernoulli": lambda t: wf.random.bernoulli(jax.random.key(0), [A], 0.5) + 1,
    "stop_gradient of weak": lambda t: wf.stop_gradient(t["c"] * 0.5),
    "as it is": lambda t: t["x"],
    "cast": lambda t: t["x"].astype(t["x"].dtype),
    "cast of weak": lambda t: (t["c"] + 1).astype(jnp.int32),
    "tensor of an array": lambda t: t["x"] * wf.tensor(np.arange(6, dtype=np.int8), [A]),
    "tensor of a number": lambda t: t["x"] * wf.tensor(0.5, ()),
    "local, weak": lambda t: wf.local(lambda a: a * 2, t["c"] + 1, out=["a", "b"], splittable=["a", "b"]),
    "callback": lambda t: wf.callback(lambda a: a, t["c"] * 0.5, out=wf.spec("a=6 b=3")),
    "carry": lambda t: wf.scan(lambda h, g: (h + wf.where(t["c"], 0.0, g), h * 2), t["x"], t["j"].rename(a="n") * t["x"]["a", 0, "b", 0], "n"),
    "carry of a number": lambda t: wf.scan(lambda h, g: (h + 1, g + h), 0.0, t["x"], "a"),
    "carry of weak": lambda t: wf.scan(lambda h, g: (h * 2, g), t["d"] + 1, t["x"], "a"),
    "carry that becomes weak": lambda t: wf.scan(lambda h, g: (wf.where(t["c"], 0.5, 1.0), g), wf.zeros("a=6 b=3"), t["x"], "b"),
    "while_loop of weak": lambda t: wf.while_loop(lambda h: wf.sum(h) < 9, lambda h: h * 2, t["c"] + 1),
    "fori_loop of weak": lambda t: wf.fori_loop(0, 3, lambda n, h: h + n, t["c"] + 1),
    "cond of weak": lambda t: wf.cond(wf.any(t["c"]), lambda h: h * 2, lambda h: h, t["c"] + 1),
    "cond, one branch weak": lambda t: wf.cond(wf.any(t["c"]), lambda: t["c"] * 0.5, lambda: wf.zeros("a=6 b=3")),
    "cond of numbers": lambda t: t["x"] * wf.cond(wf.any(t["c"]), lambda: 0.5, lambda: 2.0),
    "vmap of weak": lambda t: wf.vmap(lambda r: r * 0.5 + wf.sum(r), "a")(t["c"] + 1),
    "vmap over b": lambda t: wf.vmap(lambda r, m: r + wf.where(m, 0.0, -1e9), "b")(t["x"], t["c"]),
    "remat of weak": lambda t: wf.remat(lambda h: wf.sin(h) * 2)(t["c"] * 0.5),
    "custom_vjp of weak": lambda t: twice(t["c"] * 0.5),
}  # fmt: skip
# Only for floats: their gradients.
SLOPES = {
    "grad": lambda t: wf.grad(lambda x: wf.sum(x * 2.0))(t["x"]),
    "grad through weak": lambda t: wf.grad(lambda x: wf.sum(x + wf.where(t["c"], 0.0, -1e9) * x))(t["x"]),
    "grad of what is not used": lambda t: wf.grad(lambda x, y: wf.sum(y * 1.0), (0, 1))(t["x"], t["y"]),
    "grad of weak": lambda t: wf.value_and_grad(lambda x: wf.sum(x * t["x"]))(t["c"] * 0.5),
    "grad of weak, cast": lambda t: wf.grad(lambda x: wf.sum(x.astype(jnp.bfloat16)))(t["c"] * 0.5),
    "grad, broadcast": lambda t: wf.grad(lambda d: wf.sum(t["x"] * d) + wf.sum(d))(t["d"] * 0.5),
    "grad of a number": lambda t: wf.grad(lambda s: wf.sum(t["x"] * s))(wf.tensor(0.5, ())),
    "grad of scan": lambda t: wf.grad(lambda x: wf.sum(wf.scan(lambda h, g: (h * 0.5 + g, h), x["a", 0], x, "a")[1]))(t["x"]),
    "grad of cumsum": lambda t: wf.grad(lambda x: wf.sum(wf.cumsum(x, "a") * 2))(t["c"] * 0.5),
    "grad of concat": lambda t: wf.grad(lambda x: wf.sum(wf.concat([x, t["x"]], "a") * 2))(t["c"] * 0.5),
    "grad of custom_vjp": lambda t: wf.grad(lambda x: wf.sum(twice(x)))(t["x"]),
    "grad of remat": lambda t: wf.grad(wf.remat(lambda x: wf.sum(wf.sin(x) * t["c"])))(t["x"]),
    "grad of grad": lambda t: wf.grad(lambda x: wf.sum(wf.grad(lambda y: wf.sum(y * y * y))(x)))(t["c"] * 0.5),
    "jvp": lambda t: wf.jvp(lambda x: x * 0.5 + wf.sum(x, "a"), (t["x"],), (wf.ones_like(t["x"]),)),
    "jvp of weak": lambda t: wf.jvp(lambda x: wf.roll(x, "a", 1), (t["c"] * 0.5,), (wf.ones("a=6 b=3"),)),
    "vjp": lambda t: wf.vjp(lambda x: x * t["c"], t["x"])[1](wf.ones_like(t["x"])),
    "vjp of weak": lambda t: wf.vjp(lambda x: x * t["x"], t["c"] * 0.5)[1](wf.ones_like(t["x"])),
}  # fmt: skip


@wf.custom_vjp
def twice(x):
    return x * 2


twice.defvjp(lambda x: (x * 2, None), lambda _, g: (g * 2,))

EXAMPLES = {
    name: lambda t, info=info: info.run_example({"key": OPERANDS["key"], **t})
    for name, info in EVERY_OP.items()
}
ROWS = {**EXAMPLES, **MIXED, **SLOPES}
# A few of each sort, for what takes time.
WORDS = (
    "where",
    "arange",
    "mask",
    "full",
    "clip",
    "cumsum",
    "concat",
    "roll",
    "pad",
    "carry",
    "index",
    "pending",
)
CORE = {name: row for name, row in MIXED.items() if any(word in name for word in WORDS)}


def of(arrays):
    """The types of arrays, or of what stands for them."""
    return [(str(a.dtype), bool(getattr(a, "weak_type", False))) for a in arrays]


# What a row runs in. A row's tensors come as `t`; `t["r"]`, where there is one, has one more dim in front.


def plain(row, t):
    return row(t)


def in_scan(row, t):
    return wf.scan(lambda h, s: (h, row(t)), 0.0, wf.zeros("step=2"), "step")[1]


def in_cond(row, t):
    return wf.cond(wf.any(t["c"]), lambda: row(t), lambda: row(t))


def in_vmap(row, t):
    return wf.vmap(lambda t: row(t), "r")(t)


def in_grad(row, t):
    def loss(x):
        out = row({**t, "x": x})
        floats = [
            o for o in jax.tree.leaves(out, is_leaf=wf.is_tensor) if jnp.issubdtype(o.dtype, jnp.floating)
        ]
        total = sum((wf.sum(o).astype(jnp.float32) for o in floats), wf.sum(x).astype(jnp.float32))
        return total, out

    return wf.grad(loss, has_aux=True)(t["x"])


AROUND = {"plain": plain, "scan": in_scan, "cond": in_cond, "vmap": in_vmap, "grad": in_grad}


def types(rows, kind, mesh, layout, around=plain):
    """The types of all rows' results in one program; the error, as text, of a row that has none."""
    found = {}

    def program(t):
        outs = []
        for name, row in rows.items():
            try:
                out = jax.tree.leaves(around(row, t), is_leaf=wf.is_tensor)
                for o in filter(wf.is_tensor, out):
                    o.array
                found[name] = slice(len(outs), len(outs) + len(out))
                outs += out
            except (WeftError, TypeError, ValueError) as error:
                found[name] = f"{type(error).__name__}: {error}"
        return outs

    t = tensors(kind, "r=3" if around is in_vmap else "")
    with warnings.catch_warnings():  # a rule for a dim that no row has
        warnings.simplefilter("ignore", wf.LayoutWarning)
        avals = wf.spmd(program, mesh, layout).jaxpr(t).out_avals
    return {name: of(avals[what]) if isinstance(what, slice) else what for name, what in found.items()}


def check(rows, kind, layouts, around=plain):
    """The rows that exist for this type have the types that they have on one device, wherever a layout is legal."""
    one = types(rows, kind, "", "", around)
    rows = {name: row for name, row in rows.items() if not isinstance(one[name], str)}
    compared = set()
    for layout in layouts:
        for name, got in types(rows, kind, *LAYOUTS[layout], around).items():
            if isinstance(got, str) and got.startswith("LayoutError"):
                continue  # of an op that has two dims on one axis
            assert got == one[name], f"{name} of {kind}, {layout}"
            compared.add(name)
    assert len(compared) >= 0.9 * len(rows) > 30, sorted(set(rows) - compared)


def rows_for(kind, rows=ROWS):
    return rows if kind in FLOATS else {name: row for name, row in rows.items() if name not in SLOPES}


@pytest.mark.parametrize("kind", ["bf16", "int8", "weak float"])
def test_types_do_not_depend_on_the_layout(kind):
    """Zeros of a strong type, added as padding, made weak types strong."""
    check(rows_for(kind) if kind != "bf16" else MIXED, kind, ["uneven, two axes"])


@pytest.mark.parametrize("around", [a for a in AROUND if a != "plain"])
def test_types_do_not_depend_on_the_layout_inside(around):
    check(CORE, "bf16", ["uneven, two axes" if around != "vmap" else "uneven"], AROUND[around])


@pytest.mark.slow
@pytest.mark.parametrize("around", AROUND)
@pytest.mark.parametrize("kind", TYPES)
def test_types_do_not_depend_on_any_layout(kind, around):
    if around != "grad" or kind in FLOATS:
        check(rows_for(kind), kind, LAYOUTS, AROUND[around])


def eagerly(rows, kind, place):
    """The types of all rows' results where each op runs by itself; nothing is compiled."""
    found = {}

    def run(t):
        for name, row in rows.items():
            try:
                leaves = jax.tree.leaves(row(t), is_leaf=wf.is_tensor)
                found[name] = of([x._data if wf.is_tensor(x) else jax.typeof(x) for x in leaves])
            except (WeftError, TypeError, ValueError) as error:
                found[name] = f"{type(error).__name__}: {error}"

    jax.eval_shape(run, place(tensors(kind)))
    return found


EAGER = {
    "unplaced": lambda t: t,
    "placed": lambda t: wf.place(t, "x=4 y=2", "a:x b:y"),
}


def check_eager(rows, kind, place):
    one = types(rows, kind, "", "")
    got = eagerly(rows, kind, EAGER[place])
    wrong = {n: (got[n], one[n]) for n in rows if not isinstance(one[n], str) and got[n] != one[n]}
    wrong = {n: both for n, both in wrong.items() if not str(both[0]).startswith("LayoutError")}
    assert not wrong


def test_eager_types_are_those_of_programs():
    check_eager(MIXED, "int8", "placed")


@pytest.mark.slow
@pytest.mark.parametrize("place", EAGER)
@pytest.mark.parametrize("kind", TYPES)
def test_all_eager_types_are_those_of_programs(kind, place):
    check_eager(rows_for(kind), kind, place)


# jax.numpy's own results, for rows that are not the same expression of arrays; `b` is the last dim, so that `d`
# broadcasts.
JAX = {
    "maximum": lambda t: jnp.maximum(t["x"], 1.5),
    "where numbers": lambda t: jnp.where(t["c"], 0.0, -1e9),
    "where whole numbers": lambda t: jnp.where(t["c"], 1, 2),
    "where a number": lambda t: jnp.where(t["c"], t["x"], 0),
    "where weak": lambda t: jnp.where(t["c"], t["x"], jnp.where(t["c"], 0.5, 1.0)),
    "x + where": lambda t: t["x"] + jnp.where(t["c"], 0.0, -1e9),
    "x * where": lambda t: t["x"] * jnp.where(t["d"], 2, 3),
    "arange * 0.5": lambda t: jnp.arange(6) * 0.5,
    "full": lambda t: jnp.full(6, 2.0),
    "full of whole numbers": lambda t: jnp.full(6, 2),
    "full of a tensor": lambda t: jnp.full(6, t["x"][0, 0]),
    "full_like": lambda t: jnp.full_like(t["x"], 2.5),
    "clip": lambda t: jnp.clip(t["x"], 0, 2),
    "clip, fractions": lambda t: jnp.clip(t["x"], 0.5, 1.5),
    "clip, one bound": lambda t: jnp.clip(t["x"], min=1),
    "clip of numbers": lambda t: jnp.clip(t["c"] + 1, 0, 2),
    "cumsum": lambda t: jnp.cumsum(t["x"], 0),
    "cumsum of a mask": lambda t: jnp.cumsum(t["c"], 0),
    "cumsum, weak": lambda t: jnp.cumsum(t["c"] * 0.5, 0),
    "cumprod, weak": lambda t: jnp.cumprod(t["c"] + 1, 0),
    "concat": lambda t: jnp.concatenate([t["x"], t["p"]]),
    "concat with weak": lambda t: jnp.concatenate([t["x"], jnp.where(t["c"], 0.5, 1.0)]),
    "concat of weak": lambda t: jnp.concatenate([t["c"] + 1, jnp.where(t["c"], 0.5, 1.0)]),
    "stack with weak": lambda t: jnp.stack([t["x"], t["c"] * 0.5]),
    "roll": lambda t: jnp.roll(t["x"], 1, 0),
    "roll of weak": lambda t: jnp.roll(t["c"] * 0.5, -1, 0),
    "flip of weak": lambda t: jnp.flip(t["c"] + 1, 0),
    "pad": lambda t: jnp.pad(t["x"], ((1, 0), (0, 0)), constant_values=1),
    "pad of weak": lambda t: jnp.pad(t["c"] * 0.5, ((1, 2), (0, 0)), constant_values=1.0),
    "index of weak": lambda t: (t["c"] * 0.5)[1],
    "part of weak": lambda t: (t["c"] * 0.5)[1:5:2],
    "take of weak": lambda t: jnp.take(t["c"] * 0.5, t["j"], 0),
    "sum of weak": lambda t: jnp.sum(t["c"] * 0.5, 0),
    "sum of a mask": lambda t: jnp.sum(t["c"], 0),
    "sum of all * 2": lambda t: jnp.sum(t["x"]) * 2,
    "mean of weak": lambda t: jnp.mean(t["c"] + 1, 0),
    "max of weak": lambda t: jnp.max(t["c"] * 0.5, 0),
    "min of weak": lambda t: jnp.min(t["c"] + 1, 0),
    "prod of weak": lambda t: jnp.prod(t["c"] + 1, 0),
    "softmax of weak": lambda t: jax.nn.softmax(t["c"] * 0.5, 0),
    "logsumexp of weak": lambda t: jax.nn.logsumexp(t["c"] * 0.5, 0),
    "sort of weak": lambda t: jnp.sort(t["c"] + 1, 0),
    "einsum": lambda t: jnp.einsum("ab,ab->b", t["x"], t["c"] * 0.5),
    "einsum of weak": lambda t: jnp.einsum("ab,ab->a", t["c"] * 0.5, t["c"] + 1),
    "broadcast weak": lambda t: jnp.broadcast_to(t["d"] * 0.5, (5, 3)),
    "stop_gradient of weak": lambda t: jax.lax.stop_gradient(t["c"] * 0.5),
    "grad": lambda t: jax.grad(lambda x: jnp.sum(x * 2.0))(t["x"]),
    "grad of weak": lambda t: jax.value_and_grad(lambda x: jnp.sum(x * t["x"]))(t["c"] * 0.5),
}
# Written with operators and numbers alone.
JAX |= {
    name: row for name, row in MIXED.items() if "x" in row.__code__.co_consts and not row.__code__.co_names
}


@pytest.mark.parametrize("kind", TYPES)
def test_types_are_those_of_jax(kind):
    t = tensors(kind)
    arrays = {name: x.array for name, x in t.items()}
    ours = types({name: ROWS[name] for name in JAX if name not in SLOPES or kind in FLOATS}, kind, "", "")
    theirs = {}
    for name in ours:
        try:
            theirs[name] = of(jax.tree.leaves(jax.eval_shape(JAX[name], arrays)))
        except TypeError:
            theirs[name] = None
    assert {name: None if isinstance(got, str) else got for name, got in ours.items()} == theirs


# Where tensors are stored


def test_stored_tensors_keep_weak_types():
    """NumPy has none, so a tensor lost its own when it was padded, and one that a program captured."""
    weak = wf.arange(wf.Dim("a", 6)) * 0.5
    there = wf.place(weak, "x=4", "a:x")
    back = wf.place(there, None, None)
    moved = wf.place(wf.place(there, None, None), "x=8", "a:x")
    assert [t.weak_type for t in (weak, there, back, moved)] == [True] * 4
    assert there.array.weak_type and there.storage.shape == (8,)
    np.testing.assert_array_equal(moved.numpy(), np.arange(6) * 0.5)

    x = wf.ones("a=6", jnp.bfloat16)
    summed = wf.spmd(lambda x: wf.fori_loop(0, 2, lambda n, h: h + weak, x), "x=4", "a:x")(x)  # captures it
    assert summed.dtype == jnp.bfloat16
    assert wf.spmd(lambda w: w, "x=4", "a:x")(weak).weak_type
    spec = wf.spmd(lambda x, w: x * w, "x=400", "a:x").jaxpr(x, weak).out_avals[0]
    assert spec.dtype == jnp.bfloat16


@pytest.mark.parametrize("size", [8, 6, 3], ids=["even", "uneven", "more devices than elements"])
def test_narrow_types_wrap_and_round_the_same(size):
    """Values, not only types: int8 wraps at 128, and a mask does not widen bfloat16."""
    a = wf.Dim("a", size)
    x = wf.tensor(np.arange(size, dtype=np.float32), [a]).astype(jnp.bfloat16)

    def program(x):
        mask = x > 2
        layers = wf.ones("layers=3", jnp.bfloat16)
        step = lambda h, g: (h + wf.where(mask, 0.0, g) * 3, h * 2)
        return {
            "masked": x + wf.where(mask, 0.0, -1e9),
            "scaled": wf.arange(a) * 0.5 * x,
            "count": (x.astype(jnp.int8) + 100) * (mask + 1),
            "layers": wf.scan(step, x, layers, "layers"),
            "chosen": wf.cond(wf.any(mask), lambda: x * 0.5, lambda: x),
            "rows": wf.vmap(lambda r: r + wf.full((), 2.0), "a")(x),
            "gradient": wf.grad(lambda x: wf.sum(x * wf.where(mask, 0.5, 2.0)))(x),
        }

    [found] = {len(wf.verify(program, (x,), "x=4", ["a:x"], tolerance=0))}
    assert found == 8
    array = jnp.arange(size).astype(jnp.int8)
    want = (array + 100) * ((array > 2) + 1)
    got = wf.spmd(program, "x=4", "a:x")(x)["count"]
    assert got.dtype == want.dtype == jnp.int8
    np.testing.assert_array_equal(got.numpy(), want)
