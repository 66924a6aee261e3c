"""Element-wise functions and constants against jax.numpy, jax.nn and jax.lax."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import assert_same, booleans, check, integers, outputs, real
from every_op import EVERY_OP
from jax.scipy import special

import weft as wf
from weft.core.errors import TensorTypeError
from weft.ops import elementwise

# a=6 is even over 2; over 4 it leaves one device with nothing but padding, as b=3 does.
PLACES = [
    ("x=4", "a:x"),
    ("x=2 y=4", "a:x b:y"),
]
places = pytest.mark.parametrize("mesh, layout", PLACES, ids=[f"{m}-{lay}" for m, lay in PLACES])

# Functions by the domain of their operands: x all numbers, p above 0, u within (-1, 1), g above 1,
# i and j are integers, b and c booleans.
UNARY = {
    "x": {
        "abs": jnp.abs,
        "arcsinh": jnp.arcsinh,
        "arctan": jnp.arctan,
        "ceil": jnp.ceil,
        "conj": jnp.conj,
        "cos": jnp.cos,
        "cosh": jnp.cosh,
        "elu": jax.nn.elu,
        "erf": special.erf,
        "erfc": special.erfc,
        "exp": jnp.exp,
        "exp2": jnp.exp2,
        "expm1": jnp.expm1,
        "floor": jnp.floor,
        "gelu": jax.nn.gelu,
        "imag": jnp.imag,
        "isfinite": jnp.isfinite,
        "isinf": jnp.isinf,
        "isnan": jnp.isnan,
        "leaky_relu": jax.nn.leaky_relu,
        "log_sigmoid": jax.nn.log_sigmoid,
        "logical_not": jnp.logical_not,
        "negative": jnp.negative,
        "real": jnp.real,
        "reciprocal": jnp.reciprocal,
        "relu": jax.nn.relu,
        "relu6": jax.nn.relu6,
        "round": jnp.round,
        "selu": jax.nn.selu,
        "sigmoid": jax.nn.sigmoid,
        "sign": jnp.sign,
        "silu": jax.nn.silu,
        "sin": jnp.sin,
        "sinh": jnp.sinh,
        "softplus": jax.nn.softplus,
        "softsign": jax.nn.soft_sign,
        "square": jnp.square,
        "stop_gradient": jax.lax.stop_gradient,
        "tan": jnp.tan,
        "tanh": jnp.tanh,
    },
    "p": {
        "cbrt": jnp.cbrt,
        "lgamma": jax.lax.lgamma,
        "log": jnp.log,
        "log10": jnp.log10,
        "log1p": jnp.log1p,
        "log2": jnp.log2,
        "rsqrt": jax.lax.rsqrt,
        "sqrt": jnp.sqrt,
    },
    "u": {
        "arccos": jnp.arccos,
        "arcsin": jnp.arcsin,
        "arctanh": jnp.arctanh,
        "erfinv": jax.lax.erf_inv,
    },
    "g": {"arccosh": jnp.arccosh},
    "i": {"bitwise_not": jnp.bitwise_not},
}
BINARY = {
    "x y": {
        "add": jnp.add,
        "arctan2": jnp.arctan2,
        "divide": jnp.divide,
        "equal": jnp.equal,
        "floor_divide": jnp.floor_divide,
        "greater": jnp.greater,
        "greater_equal": jnp.greater_equal,
        "hypot": jnp.hypot,
        "isclose": jnp.isclose,
        "less": jnp.less,
        "less_equal": jnp.less_equal,
        "logaddexp": jnp.logaddexp,
        "maximum": jnp.maximum,
        "minimum": jnp.minimum,
        "multiply": jnp.multiply,
        "not_equal": jnp.not_equal,
        "remainder": jnp.remainder,
        "subtract": jnp.subtract,
    },
    "p y": {"power": jnp.power},
    "i j": {
        "bitwise_and": jnp.bitwise_and,
        "bitwise_or": jnp.bitwise_or,
        "bitwise_xor": jnp.bitwise_xor,
        "left_shift": jnp.left_shift,
        "right_shift": jnp.right_shift,
    },
    "b c": {
        "logical_and": jnp.logical_and,
        "logical_or": jnp.logical_or,
        "logical_xor": jnp.logical_xor,
    },
}
OTHER = {"astype", "clip", "where"}  # below


def table(families, prefix=""):
    return {
        name + prefix: (inputs, getattr(wf, name), oracle)
        for inputs, functions in families.items()
        for name, oracle in functions.items()
    }


def test_every_function_has_a_row():
    known = {n for f in (UNARY, BINARY) for rows in f.values() for n in rows} | OTHER
    assert {name for name, info in EVERY_OP.items() if info.family == "elementwise"} == known
    assert all(getattr(wf, alias) is getattr(wf, name) for alias, name in elementwise.ALIASES.items())


X = {
    "x": real(0, "a=6 b=3"),
    "p": real(1, "a=6 b=3", 0.2, 2.0),
    "u": real(2, "a=6 b=3", -0.9, 0.9),
    "g": real(3, "a=6 b=3", 1.1, 3.0),
    "i": integers(4, "a=6 b=3", 0, 9),
}
SAME = {**X, "y": real(5, "a=6 b=3"), "j": integers(6, "a=6 b=3", 1, 5)}
SAME |= {"b": booleans(7, "a=6 b=3"), "c": booleans(8, "a=6 b=3")}
UNARY_ROWS = table(UNARY)
BINARY_ROWS = table(BINARY)


@places
def test_unary(mesh, layout):
    check(UNARY_ROWS, mesh, layout, X)


def test_binary():
    check(BINARY_ROWS, "x=2 y=4", "a:x b:y", SAME)


def spread(oracle):
    """Operands [a, b] and [c, b]: the result is [a, b, c]."""
    return lambda x, y: oracle(x[:, :, None], y.T[None])


BROADCAST = {
    **{
        name: (inputs, getattr(wf, name), spread(oracle))
        for inputs, functions in BINARY.items()
        for name, oracle in functions.items()
    },
    "where": (
        "b x y",
        wf.where,
        lambda b, x, y: jnp.where(b[:, :, None], x[:, :, None], y.T[None]),
    ),
    "clip": ("x s p", wf.clip, lambda x, s, p: jnp.clip(x, s[:, None], p)),
    "order": ("s x", lambda s, x: s * wf.transpose(x, ["b", "a"]), lambda s, x: s[:, None] * x),
    "missing last": (
        "t x",
        lambda t, x: t / (1.0 + wf.square(x)),
        lambda t, x: t[:, None] / (1.0 + x.T**2),
    ),
    "scalar": ("x r", lambda x, r: x * r + r - r / (x * x), lambda x, r: x * r + r - r / (x * x)),
}
SPREAD = {
    **SAME,
    "y": real(9, "c=2 b=3"),
    "j": integers(10, "c=2 b=3", 1, 5),
    "c": booleans(11, "c=2 b=3"),
}
SPREAD |= {"s": real(12, "a=6", -1.0, -0.2), "t": real(13, "b=3"), "r": real(14, "")}
SPREAD_PLACES = [("x=2 y=2 z=2", "a:x b:y c:z"), ("x=2 y=2", "b:x+y")]


@pytest.mark.parametrize("mesh, layout", SPREAD_PLACES, ids=[f"{m}-{lay}" for m, lay in SPREAD_PLACES])
def test_broadcasting_by_name(mesh, layout):
    check(BROADCAST, mesh, layout, SPREAD)


NUMBERS = {
    "+": ("x", lambda x: 2.5 + (x + 1), lambda x: 2.5 + (x + 1)),
    "-": ("x", lambda x: 2.5 - (x - 1), lambda x: 2.5 - (x - 1)),
    "*": ("x", lambda x: 2 * (x * 0.5), lambda x: 2 * (x * 0.5)),
    "/": ("x", lambda x: 3.0 / (x / 2), lambda x: 3.0 / (x / 2)),
    "/ 0": ("x", lambda x: x / 0, lambda x: x / 0),
    "//": ("x", lambda x: (x // 0.4) + 2.0 // x, lambda x: (x // 0.4) + 2.0 // x),
    "%": ("x", lambda x: (x % 0.4) + 2.0 % x, lambda x: (x % 0.4) + 2.0 % x),
    "**": ("p", lambda p: p**3 + p**-0.5 + 2.0**p, lambda p: p**3 + p**-0.5 + 2.0**p),
    "** 2": ("x", lambda x: x**2, lambda x: x**2),
    "- abs": ("x", lambda x: -abs(+x), lambda x: -abs(+x)),
    "<": ("x", lambda x: [x < 0.3, x <= 0, 0.3 < x, x >= 1, x == 0.07, x != 0], lambda x: [x < 0.3, x <= 0, 0.3 < x, x >= 1, x == 0.07, x != 0]),
    "bits": ("i j", lambda i, j: [i & 3, 6 | i, i ^ j, ~i, 5 & j, 1 ^ i], lambda i, j: [i & 3, 6 | i, i ^ j, ~i, 5 & j, 1 ^ i]),
    "truth": ("b c", lambda b, c: [b & c, b | c, b ^ c, ~b], lambda b, c: [b & c, b | c, b ^ c, ~b]),
    "int": ("i j", lambda i, j: [i / j, i // j, i % j, i**2, i - 7, 7 - i, -i, i * 2.5], lambda i, j: [i / j, i // j, i % j, i**2, i - 7, 7 - i, -i, i * 2.5]),
    "bool": ("b", lambda b: [b * 2, b + 0.5, b * b], lambda b: [b * 2, b + 0.5, b * b]),
    "clip": ("x", lambda x: [wf.clip(x, -0.5, 0.5), wf.clip(x, 0.2), wf.clip(x, high=0.2), wf.clip(x, min=-0.3, max=0.4)], lambda x: [jnp.clip(x, -0.5, 0.5), jnp.clip(x, 0.2), jnp.clip(x, max=0.2), jnp.clip(x, min=-0.3, max=0.4)]),
    "where": ("b x", lambda b, x: [wf.where(b, x, 5.0), wf.where(b, 5.0, x), wf.where(x > 0, 1, 0), wf.where(b, 2.0, 3.0)], lambda b, x: [jnp.where(b, x, 5.0), jnp.where(b, 5.0, x), jnp.where(x > 0, 1, 0), jnp.where(b, 2.0, 3.0)]),
    "functions": ("x", lambda x: [wf.maximum(x, 0.3), wf.minimum(0.3, x), wf.power(2.0, x), wf.arctan2(1.0, x), wf.logaddexp(x, 0.5), wf.hypot(x, 3.0)], lambda x: [jnp.maximum(x, 0.3), jnp.minimum(0.3, x), jnp.power(2.0, x), jnp.arctan2(1.0, x), jnp.logaddexp(x, 0.5), jnp.hypot(x, 3.0)]),
    "options": ("x", lambda x: [wf.gelu(x, approximate=False), wf.leaky_relu(x, negative_slope=0.3), wf.elu(x, alpha=0.5), wf.round(x, decimals=1)], lambda x: [jax.nn.gelu(x, approximate=False), jax.nn.leaky_relu(x, negative_slope=0.3), jax.nn.elu(x, alpha=0.5), jnp.round(x, decimals=1)]),
    "astype": ("x i b", lambda x, i, b: [x.astype(jnp.bfloat16), x.astype("int32"), i.astype(float), b.astype(jnp.int32), (x - 0.07).astype(bool)], lambda x, i, b: [x.astype(jnp.bfloat16), x.astype("int32"), i.astype("float32"), b.astype(jnp.int32), (x - 0.07).astype(bool)]),
    "numpy": ("x", lambda x: [np.float32(2.0) * x, x - np.int32(3), np.float64(2.0) / x], lambda x: [2.0 * x, x - 3, 2.0 / x]),
}  # fmt: skip


def test_operators_and_numbers():
    check(NUMBERS, "x=2 y=4", "b:x a:y", SAME)


def test_numbers_and_options_eagerly():
    """Numbers are operands, and options are not."""
    arrays = {n: t.array for n, t in SAME.items()}
    for name in ("/", "/ 0", "where", "options", "numpy"):
        inputs, fn, oracle = NUMBERS[name]
        got, want = (f(*[given[n] for n in inputs.split()]) for f, given in ((fn, SAME), (oracle, arrays)))
        for t, a in zip(outputs(got), outputs(want), strict=True):
            assert_same(t, a, name=name)


KINKS = {
    "abs": ("k", wf.abs, jnp.abs),
    "relu": ("k", wf.relu, jax.nn.relu),
    "sign": ("k", wf.sign, jnp.sign),
    "maximum": ("k l", wf.maximum, jnp.maximum),
    "minimum": ("k l", wf.minimum, jnp.minimum),
    "max number": ("k", lambda k: wf.maximum(k, 0.0), lambda k: jnp.maximum(k, 0.0)),
    "clip": ("k", lambda k: wf.clip(k, 0.0, 0.5), lambda k: jnp.clip(k, 0.0, 0.5)),
    "round": ("k", wf.round, jnp.round),
    "sinh at 0": ("k", lambda k: wf.square(wf.sinh(k)), lambda k: jnp.square(jnp.sinh(k))),
}


@places
def test_gradients_at_kinks_and_ties(mesh, layout):
    grid = np.random.default_rng(0).integers(-2, 3, (2, 6, 3)).astype(np.float32) / 2
    check(
        KINKS,
        mesh,
        layout,
        {"k": wf.tensor(grid[0], "a=6 b=3"), "l": wf.tensor(grid[1], "a=6 b=3")},
    )


SPECIAL = {
    "isnan": ("x", wf.isnan, jnp.isnan),
    "isinf": ("x", wf.isinf, jnp.isinf),
    "isfinite": ("x", wf.isfinite, jnp.isfinite),
    "relu": ("x", wf.relu, jax.nn.relu),
    "exp": ("x", wf.exp, jnp.exp),
    "x - x": ("x", lambda x: x - x, lambda x: x - x),
    "where": (
        "x",
        lambda x: wf.where(wf.isfinite(x), x, 0.0),
        lambda x: jnp.where(jnp.isfinite(x), x, 0.0),
    ),
}


def test_infinities_and_nan_stay_where_they_are():
    values = np.linspace(-1, 1, 18, dtype=np.float32).reshape(6, 3)
    values[0, 0], values[3, 1], values[5, 2], values[2, 2] = np.inf, -np.inf, np.nan, np.inf
    check(SPECIAL, "x=2 y=4", "b:x a:y", {"x": wf.tensor(values, "a=6 b=3")})


# Padding is zero: a function that is infinite there must not spoil what flows back through a matrix.
SINGULAR = {
    "log": (wf.log, jnp.log),
    "sqrt": (wf.sqrt, jnp.sqrt),
    "rsqrt": (wf.rsqrt, jax.lax.rsqrt),
    "reciprocal": (wf.reciprocal, jnp.reciprocal),
    "1 / h": (lambda h: 1.0 / h, lambda h: 1.0 / h),
    "h / h²": (lambda h: h / (h * h), lambda h: h / (h * h)),
    "h ** 0.5": (lambda h: h**0.5, lambda h: h**0.5),
    "h ** h": (lambda h: h**h, lambda h: h**h),
    "cbrt": (wf.cbrt, jnp.cbrt),
    "hypot": (lambda h: wf.hypot(h, h), lambda h: jnp.hypot(h, h)),
    "arctan2": (lambda h: wf.arctan2(h, h), lambda h: jnp.arctan2(h, h)),
    "lgamma": (wf.lgamma, jax.lax.lgamma),
    "h % h²": (lambda h: h % (h * h), lambda h: h % (h * h)),
}
THROUGH = {
    name: (
        "v w",
        lambda v, w, fn=fn: wf.sum(fn(wf.einsum(v, w, out=["batch", "h"])), "batch"),
        lambda v, w, fn=oracle: jnp.sum(fn(v @ w), 0),
    )
    for name, (fn, oracle) in SINGULAR.items()
}


@pytest.mark.parametrize("mesh, layout", [("x=8", "batch:x"), ("x=2 y=4", "batch:x h:y")])
def test_padding_is_neutral(mesh, layout):
    tensors = {"v": real(0, "batch=9 io=2", 0.2, 1.0), "w": real(1, "io=2 h=5", 0.2, 1.0)}
    check(THROUGH, mesh, layout, tensors, rtol=3e-5)


def test_weak_types_and_dtypes():
    def program(f, h, i):
        return {
            "f32 * 2.0": f * 2.0,
            "bf16 * 2.0": h * 2.0,
            "2.0 - bf16": 2.0 - h,
            "bf16 / 3": h / 3,
            "bf16 + f32": h + f,
            "i32 * 2": i * 2,
            "i32 * 2.0": i * 2.0,
            "i32 / 2": i / 2,
            "max": wf.maximum(h, 0.0),
            "where": wf.where(h > 0, h, 1.0),
            "sum": wf.sum(h) * 2.0,
        }

    f, h, i = real(0, "a=3"), real(1, "a=3").astype(jnp.bfloat16), integers(2, "a=3", 0, 5)
    want = dict.fromkeys(("bf16 * 2.0", "2.0 - bf16", "bf16 / 3", "max", "where", "sum"), jnp.bfloat16)
    want |= {"i32 * 2": jnp.int32}
    staged = wf.spmd(program, "x=2", "a:x")(f, h, i)
    for results in (program(f, h, i), staged):
        for name, t in results.items():
            assert t.dtype == want.get(name, jnp.float32), name
    # A number that is handed over is as weak as one written in the program.
    assert wf.spmd(lambda h, n: h * n, "x=2", "a:x")(h, 2.0).dtype == jnp.bfloat16


def tolerances(isclose):
    return lambda k, l: [
        isclose(k, l), isclose(k, l, rtol=0.0, atol=0.6), isclose(k, l, equal_nan=True), isclose(k, 1.0),
        isclose(k, l, 0.5), isclose(2, k, atol=1),
    ]  # fmt: skip


CLOSE = {
    "floats": ("k l", tolerances(wf.isclose), tolerances(jnp.isclose)),
    "complex": (
        "k l",
        lambda k, l: wf.isclose(k + 1j * l, 1j * l, atol=0.6),
        lambda k, l: jnp.isclose(k + 1j * l, 1j * l, atol=0.6),
    ),
    "integers": (
        "i j", lambda i, j: wf.isclose(i, j, rtol=0.5), lambda i, j: jnp.isclose(i, j, rtol=0.5)
    ),
    "a tensor of tolerances": (
        "k l s",
        lambda k, l, s: wf.isclose(k, l, atol=abs(s)),
        lambda k, l, s: jnp.isclose(k, l, atol=abs(s)[:, None]),
    ),
}  # fmt: skip


@places
def test_isclose(mesh, layout):
    grid = np.random.default_rng(0).integers(-2, 3, (2, 6, 3)).astype(np.float32) / 2
    grid[:, 0, 0], grid[0, 1, 1], grid[:, 2, 2], grid[1, 3, 0] = np.nan, np.nan, np.inf, -np.inf
    tensors = {"k": wf.tensor(grid[0], "a=6 b=3"), "l": wf.tensor(grid[1], "a=6 b=3")}
    check(CLOSE, mesh, layout, tensors | {n: SPREAD[n] for n in "is"} | {"j": SAME["j"]})
    eager = tolerances(wf.isclose)(*tensors.values())
    for t, a in zip(eager, tolerances(jnp.isclose)(*grid), strict=True):
        assert_same(t, a)


# Complex numbers: functions of z[a, b] and w[b, c], built from real and imaginary parts, which have gradients.
COMPLEX = {
    "parts": (
        lambda z, w: [wf.real(z), wf.imag(z), wf.real(z * wf.conj(z)), abs(z), wf.real(wf.conj(1j * z))],
        lambda z, w: [z.real, z.imag, (z * z.conj()).real, abs(z), (1j * z).conj().real],
    ),
    "functions": (
        lambda z, w: [wf.exp(z), wf.square(z), z / (z + 3), wf.sqrt(z + 3), wf.sin(z), z**2, 1 / (z + 3j)],
        lambda z, w: [jnp.exp(z), z * z, z / (z + 3), jnp.sqrt(z + 3), jnp.sin(z), z**2, 1 / (z + 3j)],
    ),
    "contractions": (
        lambda z, w: [
            wf.einsum(z, w, out=["a", "c"]), wf.conj(wf.einsum(z, w, out=["c"])),
            wf.real(wf.einsum(z, wf.conj(z), out=["a"])), wf.imag(wf.einsum(z, w, out=["a", "c"]) * 2),
        ],
        lambda z, w: [z @ w, (z @ w).sum(0).conj(), (z * z.conj()).real.sum(1), (z @ w).imag * 2],
    ),
    "reductions": (
        lambda z, w: [wf.sum(z, "a"), wf.mean(z), wf.var(z, "b"), wf.prod(z, "b"), wf.std(z), wf.cumsum(z, "a"),
                      wf.cumprod(z, "b"), wf.mean(wf.abs(z), "a")],
        lambda z, w: [z.sum(0), z.mean(), z.var(1), z.prod(1), z.std(), z.cumsum(0),
                      z.cumprod(1), abs(z).mean(0)],
    ),
    "moves": (
        lambda z, w: [wf.pad(z, "a", 1, 2, value=1j), wf.roll(z, "a", 2), wf.diff(z, "a"), z["a", 1:4],
                      wf.concat([z, z], "a"), wf.tril(z, "a", "b"), wf.where(wf.real(z) > 0, z, 0)],
        lambda z, w: [jnp.pad(z, [(1, 2), (0, 0)], constant_values=1j), jnp.roll(z, 2, 0), jnp.diff(z, axis=0),
                      z[1:4], jnp.concatenate([z, z]), jnp.tril(z), jnp.where(z.real > 0, z, 0)],
    ),
}  # fmt: skip
# The weighted sum of the real and the imaginary part has a gradient for both.
COMPLEX_ROWS = {
    name: (
        "x y u v",
        lambda x, y, u, v, fn=fn: [
            part(t) for t in fn(x + 1j * y, u + 1j * v) for part in (wf.real, wf.imag)
        ],
        lambda x, y, u, v, fn=oracle: [
            part(a) for a in fn(x + 1j * y, u + 1j * v) for part in (jnp.real, jnp.imag)
        ],
    )
    for name, (fn, oracle) in COMPLEX.items()
}


@pytest.mark.parametrize("mesh, layout", [*PLACES, ("x=2 y=2", "b:x+y")])
def test_complex_numbers(mesh, layout):
    tensors = {"x": SAME["x"], "y": SAME["y"], "u": real(20, "b=3 c=2"), "v": real(21, "b=3 c=2")}
    check(COMPLEX_ROWS, mesh, layout, tensors, rtol=3e-5, atol=1e-5)


@places
def test_gradients_of_complex_parameters(mesh, layout):
    """The convention is that of JAX: the gradient of a real function is dx - i·dy."""
    z = wf.tensor(SAME["x"].numpy() + 1j * SAME["y"].numpy(), "a=6 b=3")
    matrix = np.linspace(-1, 1, 18, dtype=np.float32).reshape(3, 6) * (1 + 2j)
    w = wf.tensor(matrix.astype(np.complex64), "b=3 c=6")

    def loss(z, w):
        return wf.sum(wf.square(wf.abs(wf.einsum(z, w, out=["a", "c"])))) + wf.mean(wf.imag(z * z))

    def oracle(z, w):
        return jnp.sum(jnp.abs(z @ w) ** 2) + jnp.mean(jnp.imag(z * z))

    got = wf.spmd(wf.grad(loss, (0, 1)), mesh, layout)(z, w)
    assert_same(got, jax.grad(oracle, (0, 1))(z.array, w.array), rtol=3e-5, atol=1e-5)
    for run in (wf.grad(lambda z: wf.sum(z)), wf.spmd(wf.grad(lambda z: wf.sum(z)), mesh, layout)):
        with pytest.raises(wf.ProgramError, match="returned c64") as caught:
            run(z)
        assert "wf.real(loss)" in caught.value.hint


def test_the_real_part_of_a_pending_sum_is_sent():
    fn = lambda z: wf.real(wf.sum(z, "a")) + wf.imag(wf.conj(wf.sum(z, "a")))
    (only,) = wf.spmd(fn, "x=2", "a:x").collectives(wf.spec("a=6 b=3", jnp.complex64))
    assert (only.kind, only.bytes) == ("all-reduce", 3 * 4)


MAKE_PLACES = [("", ""), ("x=8", "a:x"), ("x=2 y=2", "a:x b:y"), ("x=2 y=2", "b:x+y")]


@pytest.mark.parametrize("mesh, layout", MAKE_PLACES, ids=[f"{m}-{lay}" for m, lay in MAKE_PLACES])
def test_make(mesh, layout):
    a, b = wf.dims("a=5 b=3")

    def program(x):
        return [
            wf.zeros([a, b]),
            wf.ones([b, a], jnp.bfloat16),
            wf.full("a=5 b=3", 7),
            wf.full([a], 2.5),
            wf.full([a], True),
            wf.full([b], -np.inf, jnp.float32),
            wf.arange(a),
            wf.arange(b, float),
            wf.full([a, b], wf.sum(x)) + x,
            wf.tensor(np.arange(15.0, dtype=np.float32).reshape(5, 3), [a, b]),
            wf.zeros(""),
            wf.zeros_like(x),
            wf.ones_like(wf.sum(x, "b"), jnp.int32),
            wf.full_like(x, 2),
        ]

    x = real(0, "a=5 b=3")
    total = jnp.sum(x.array)
    want = [
        jnp.zeros((5, 3)),
        jnp.ones((3, 5), jnp.bfloat16),
        jnp.full((5, 3), 7),
        jnp.full((5,), 2.5),
        jnp.full((5,), True),
        jnp.full((3,), -jnp.inf),
        jnp.arange(5),
        jnp.arange(3, dtype=float),
        total + x.array,
        jnp.arange(15.0).reshape(5, 3),
        jnp.zeros(()),
        jnp.zeros((5, 3)),
        jnp.ones((5,), jnp.int32),
        jnp.full((5, 3), 2.0),
    ]
    for results in (wf.spmd(program, mesh, layout)(x), program(x)):
        for n, (t, expect) in enumerate(zip(results, want, strict=True)):
            assert_same(t, expect, name=str(n))


def test_equal_numbers_of_different_types_are_different_signatures():
    """1 == 1.0 == True, and yet full() makes other tensors of them."""
    assert [str(wf.full("a=2", n).dtype) for n in (1, 1.0, True)] == ["int32", "float32", "bool"]
    zeros = wf.full("a=1", 0.0), wf.full("a=1", -0.0)
    assert [bool(np.signbit(z.numpy()[0])) for z in zeros] == [False, True]


@pytest.mark.parametrize("mesh, layout", MAKE_PLACES, ids=[f"{m}-{lay}" for m, lay in MAKE_PLACES])
def test_from_callback(mesh, layout):
    values, slices = np.arange(15.0, dtype=np.float32).reshape(5, 3), []

    def part(where):
        slices.append(values[where].size)
        return values[where]

    t = wf.from_callback(part, "a=5 b=3", wf.Mesh(mesh), wf.Layout(layout))
    assert_same(t, values)
    assert_same(t * 2.0, values * 2)
    if mesh:
        assert max(slices) < values.size  # no host created more than its slices


def test_where_needs_booleans():
    with pytest.raises(TensorTypeError, match="is a boolean tensor"):
        wf.where(SAME["i"], SAME["x"], 0.0)


def test_undefined_dtypes_are_errors():
    with pytest.raises(TensorTypeError, match="not defined for"):
        wf.bitwise_and(SAME["x"], 1)
    with pytest.raises(TensorTypeError, match="not defined for c64"):
        wf.hypot(SAME["x"] * 1j, 1)


INTEGERS = (jnp.int32, jnp.int8, jnp.uint8, jnp.bool_)


@pytest.mark.parametrize("dtype", INTEGERS, ids=lambda d: d.__name__)
def test_an_integer_to_a_negative_power(dtype):
    """A Python exponent is an error, eagerly and in a program; jnp.power leaves other exponents undefined."""
    x = wf.tensor(np.asarray([1, 0, 1], dtype), "a=3")
    for run in (lambda x: x**-1, wf.spmd(lambda x: x**-1), wf.spmd(lambda x: x**-1, "x=2", "a:x")):
        with pytest.raises(TensorTypeError, match="raised to the power -1"):
            run(x)


@pytest.mark.parametrize("mesh, layout", [("", ""), ("x=4", "a:x")], ids=["one device", "uneven"])
def test_integer_powers_of_tensors(mesh, layout):
    bases, exponents = np.meshgrid([-3, -1, 0, 1, 2], [-3, -2, -1, 0, 1, 2, 3])
    with np.errstate(divide="ignore"):
        exact = np.trunc(bases.astype(float) ** exponents)
    exact[(bases == 0) & (exponents < 0)] = 0
    x, y = (wf.tensor(v.ravel(), "a=35") for v in (bases, exponents))
    run = lambda x, y, n: [x**y, (-1) ** y, x**n, x.astype(jnp.float32) ** n]
    for got in (run(x, y, 3), wf.spmd(run, mesh, layout)(x, y, 3)):
        np.testing.assert_array_equal(got[0].numpy(), exact.ravel())
        np.testing.assert_array_equal(got[1].numpy(), (-1.0) ** exponents.ravel())
        np.testing.assert_array_equal(got[2].numpy(), bases.ravel() ** 3)
    # A number that is passed to a program is a traced operand.
    np.testing.assert_array_equal(
        wf.spmd(run, mesh, layout)(x, y, -1)[2].numpy(), np.trunc(1 / np.where(bases, bases, np.inf)).ravel()
    )


def test_from_callback_raises_inside_a_program_and_is_called_once_per_slice():
    calls = []

    def part(where):
        calls.append(where)
        return np.arange(1.0, 6.0)[where]

    t = wf.from_callback(part, "a=5", "p=4", "a:p")
    assert t.numpy().tolist() == [1, 2, 3, 4, 5] and len(calls) == 4
    with pytest.raises(wf.ProgramError, match="inside a program"):
        wf.spmd(lambda: wf.from_callback(part, "a=5", "p=4", "a:p"), "p=4", "a:p")()
