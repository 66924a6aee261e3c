"""conv, pools and windows against `jax.lax` and NumPy at the true size, under every kind of layout."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import assert_same
from jax import lax

import weft as wf
from weft.core.errors import DimError, LayoutError, ShapeError, TensorTypeError

H, HW, HWD = {"h": "kh"}, {"h": "kh", "w": "kw"}, {"h": "kh", "w": "kw", "d": "kd"}


def draw(dims, seed):
    dims = wf.dims(dims)
    values = np.random.default_rng(seed).normal(size=[d.size for d in dims])
    return wf.tensor(values.astype(np.float32), dims)


def tolerance(expected):
    """Sums of products round in proportion to the largest of them."""
    return {"rtol": 1e-5, "atol": 1e-5 * max(1, np.abs(np.asarray(expected)).max())}


def with_gradients(fn):
    """The result, and the gradients of its product with weights."""

    def run(weights, *tensors):
        def loss(*tensors):
            out = fn(*tensors)
            return wf.sum(out * weights), out

        argnums = tuple(range(len(tensors)))
        (_, out), grads = wf.value_and_grad(loss, argnums=argnums, has_aux=True)(*tensors)
        return out, grads

    return run


_expected = {}  # by case: the oracle runs once for all layouts


def check(fn, oracle, tensors, mesh, layout, case):
    """Values, gradients and padding of `fn` on a mesh are those of `oracle` on arrays."""
    if case not in _expected:
        result, pull = jax.vjp(oracle, *[t.array for t in tensors])
        weights = np.random.default_rng(7).normal(size=result.shape).astype(np.float32)
        _expected[case] = result, weights, pull(jnp.asarray(weights))
    result, weights, cotangents = _expected[case]
    out_dims = jax.eval_shape(fn, *tensors).dims
    weights = wf.tensor(weights, out_dims)
    out, grads = wf.spmd(with_gradients(fn), mesh, layout)(weights, *tensors)
    assert out.dims == out_dims
    assert_same(out, result, **tolerance(result))
    for ours, theirs in zip(grads, cotangents, strict=True):
        assert_same(ours, theirs, **tolerance(theirs))


# Convolution


def lax_conv(x, kernel, window, stride=1, padding="SAME", dilation=1, transpose=False, groups=1):
    """`lax`'s convolution of [batch, spatial…, channels] and [window…, channels, features]."""
    each = lambda given: [given[n] if isinstance(given, dict) else given for n in window]
    letters = "HWD"[: len(window)]
    numbers = (f"N{letters}C", f"{letters}IO", f"N{letters}C")
    pads = padding if isinstance(padding, str) else each(padding)
    options = {"rhs_dilation": each(dilation), "dimension_numbers": numbers}
    if transpose:
        return lax.conv_transpose(x, kernel, each(stride), pads, **options)
    return lax.conv_general_dilated(x, kernel, each(stride), pads, feature_group_count=groups, **options)


CONVS = {
    # name: (dims of x, dims of the kernel, window, options, [(mesh, layout), …])
    "same": (
        "b=2 h=13 w=8 c=3", "kh=3 kw=3 c=3 o=4", HW, {},
        [("x=4", "h:x"), ("x=2 y=2", "h:x w:y"), ("x=2 y=2", "b:x c:y"), ("x=2 y=4", "o:x h:y")],
    ),
    "even size": ("b=2 h=16 c=3", "kh=4 c=3 o=2", H, {}, [("x=2 y=2", "h:x+y")]),
    "mostly padding": (
        "b=1 h=9 c=2", "kh=3 c=2 o=2", H, {}, [("x=2 y=4", "h:x+y")]
    ),
    "window over several blocks": (
        "b=1 h=9 w=3 c=2", "kh=7 kw=5 c=2 o=2", HW, {}, [("x=8", "h:x")]
    ),
    "valid": (
        "b=2 h=13 w=5 c=2", "kh=3 kw=2 c=2 o=3", HW, {"padding": "VALID"},
        [("x=4", "h:x"), ("x=2 y=4", "w:x h:y")],
    ),
    "one window": ("b=2 h=5 c=2", "kh=5 c=2 o=3", H, {"padding": "VALID"}, [("x=4", "h:x")]),
    "stride and dilation": (
        "b=2 h=13 w=9 c=2", "kh=3 kw=3 c=2 o=3", HW,
        {"stride": {"h": 2, "w": 3}, "dilation": {"h": 1, "w": 2}},
        [("x=2 y=2", "w:y h:x"), ("x=2 y=2", "w:y+x")],
    ),
    "explicit": (
        "b=2 h=13 w=9 c=2", "kh=3 kw=4 c=2 o=3", HW,
        {"stride": 2, "padding": {"h": (5, -1), "w": (-2, 4)}},
        [("x=2 y=2", "w:x h:y")],
    ),
    "pairs": ("b=2 h=7 c=2", "kh=3 c=2 o=3", H, {"padding": (1, 2)}, [("x=4", "h:x")]),
    "three dims": (
        "b=1 h=5 w=4 d=7 c=2", "kh=3 kw=2 kd=3 c=2 o=2", HWD, {"stride": {"h": 1, "w": 1, "d": 2}},
        [("x=2 y=2 z=2", "h:x w:y d:z"), ("x=2 y=2 z=2", "d:x+y c:z")],
    ),
    "kernel split": ("b=2 h=5 c=3", "kh=3 c=3 o=5", H, {}, [("x=2 y=2", "kh:x o:y"), ("x=2", "kh:x h:x")]),
    "transpose, same phase": (
        "b=2 h=8 c=2", "kh=3 c=2 o=3", H, {"transpose": True, "stride": 2},
        [("x=4", "h:x"), ("x=2 y=2", "b:y h:x")],
    ),
    "transpose, phases differ": (
        "b=2 h=5 w=7 c=2", "kh=3 kw=4 c=2 o=3", HW, {"transpose": True, "stride": {"h": 3, "w": 2}},
        [("x=2 y=2", "h:x w:y"), ("x=2 y=4", "w:y o:x")],
    ),
    "transpose, valid": (
        "b=2 h=9 c=2", "kh=2 c=2 o=3", H,
        {"transpose": True, "stride": 3, "padding": "VALID", "dilation": 2},
        [("x=8", "h:x")],
    ),
    "transpose, blocks without padding": (  # XLA aborted
        "b=1 h=3 w=5 c=3", "kh=7 kw=4 c=3 o=3", HW, {"transpose": True, "stride": {"h": 3, "w": 2}},
        [("x=8", "w:x")],
    ),
    "transpose, explicit": (
        "b=2 h=7 w=3 c=2", "kh=3 kw=1 c=2 o=3", HW,
        {"transpose": True, "stride": 3, "padding": {"h": (-1, 4), "w": (2, -2)}},
        [("x=4", "h:x"), ("x=4", "w:x")],
    ),
}  # fmt: skip

CONV_CASES = [
    pytest.param(name, mesh, layout, id=f"{name}|{mesh}|{layout}")
    for name, case in CONVS.items()
    for mesh, layout in case[4]
]


@pytest.mark.parametrize("name, mesh, layout", CONV_CASES)
def test_conv(name, mesh, layout):
    x, kernel, window, options, _ = CONVS[name]

    def ours(x, kernel):
        return wf.conv(x, kernel, window, **options)

    def theirs(x, kernel):
        return lax_conv(x, kernel, window, **options)

    check(ours, theirs, [draw(x, 1), draw(kernel, 2)], mesh, layout, ("conv", name))


@pytest.mark.parametrize(
    "mesh, layout", [("x=2", "g:x"), ("x=2 y=2", "h:x g:y"), ("x=2 y=2", "c:x o:y"), ("x=4", "o:x")]
)
def test_groups_are_a_dim_in_out(mesh, layout):
    out = ["b", "h", "g", "o"]

    def ours(x, kernel):
        return wf.conv(x, kernel, H, out=out, stride=2)

    def theirs(x, kernel):
        x, kernel = x.reshape(2, 7, 6), kernel.reshape(3, 2, 15)
        return lax_conv(x, kernel, H, stride=2, groups=3).reshape(2, 4, 3, 5)

    tensors = [draw("b=2 h=7 g=3 c=2", 1), draw("kh=3 c=2 g=3 o=5", 2)]
    check(ours, theirs, tensors, mesh, layout, "groups")


@pytest.mark.parametrize("mesh, layout", [("x=2 y=2", "h:x c:y"), ("x=4", "c:x")])
def test_depthwise_with_several_batch_dims_in_another_order(mesh, layout):
    def ours(x, kernel):
        return wf.conv(x, kernel, H, out=["c", "h", "time", "b"])

    def theirs(x, kernel):
        x = jnp.moveaxis(x, 0, -1).reshape(4, 7, 5)
        result = lax_conv(x, kernel.T.reshape(3, 1, 5), H, groups=5)
        return result.reshape(2, 2, 7, 5).transpose(3, 2, 1, 0)

    tensors = [draw("c=5 b=2 time=2 h=7", 1), draw("c=5 kh=3", 2)]
    check(ours, theirs, tensors, mesh, layout, "depthwise")


def test_several_contracted_and_feature_dims():
    def ours(x, kernel):
        return wf.conv(x, kernel, H)

    def theirs(x, kernel):
        x = x.transpose(1, 2, 0, 3).reshape(2, 7, 6)
        kernel = kernel.transpose(2, 1, 4, 0, 3).reshape(3, 6, 8)
        return lax_conv(x, kernel, H).reshape(2, 7, 4, 2)

    tensors = [draw("e=2 b=2 h=7 c=3", 1), draw("o=4 e=2 kh=3 p=2 c=3", 2)]
    check(ours, theirs, tensors, "x=2 y=2", "h:x e:y", "several")


def test_default_order_of_dims_and_dims_as_keys():
    x, kernel = draw("c=2 w=6 b=2 h=8", 1), draw("o=3 kh=2 c=2 kw=2", 2)
    (h, w), (kh, kw) = (x.dims[3], x.dims[1]), (kernel.dims[1], kernel.dims[3])
    named = wf.conv(x, kernel, {"h": "kh", "w": "kw"}, stride={"h": 2})
    assert [repr(d) for d in named.dims] == ["w=6", "b=2", "h=4", "o=3"]
    by_dim = wf.conv(x, kernel, {w: kw, h: kh}, out=[*named.dims[1:], w], stride={h: np.int64(2)})
    assert [d.name for d in by_dim.dims] == ["b", "h", "o", "w"]
    assert_same(by_dim.numpy("w", "b", "h", "o"), named.numpy(), **tolerance(named.numpy()))
    small = wf.conv(x, kernel, {h: kh, w: kw}, out=["b", h, w, "o"], stride=3)  # sizes are computed
    assert [repr(d) for d in small.dims] == ["b=2", "h=3", "w=2", "o=3"]


# Pools


def lax_pool(kind, x, window, stride, padding):
    """`lax.reduce_window` of [batch, spatial…, channels]; a mean counts the elements only."""
    pads = padding if isinstance(padding, str) else [(0, 0), *padding, (0, 0)]
    args = ((1, *window, 1), (1, *stride, 1), pads)
    if kind == "max":
        return lax.reduce_window(x, -np.inf, lax.max, *args)
    total, count = (lax.reduce_window(a, 0.0, lax.add, *args) for a in (x, jnp.ones_like(x)))
    return total / count


POOLS = {
    # name: (sizes, window, stride, padding, [(mesh, layout), …])
    "even": ((16, 6), (2, 2), (2, 2), "VALID", [("x=2 y=2", "h:x c:y")]),
    "uneven": ((13, 7), (2, 3), (2, 3), "VALID", [("x=2 y=2", "h:x w:y")]),
    "overlapping": ((9, 5), (3, 2), (1, 2), "SAME", [("x=8", "h:x"), ("x=2 y=2", "b:x h:y")]),
    "explicit": ((7, 5), (4, 3), (3, 2), ((2, 3), (0, 2)), [("x=4", "h:x"), ("x=4", "w:x")]),
    "large": ((9, 3), (7, 1), (2, 1), "SAME", [("x=2 y=2", "h:x+y")]),
}
POOL_CASES = [
    pytest.param(name, mesh, layout, id=f"{name}|{mesh}|{layout}")
    for name, case in POOLS.items()
    for mesh, layout in case[4]
]


@pytest.mark.parametrize("name, mesh, layout", POOL_CASES)
def test_pools(name, mesh, layout):
    sizes, window, stride, padding, _ = POOLS[name]
    x = draw(f"b=3 h={sizes[0]} w={sizes[1]} c=2", 3)
    x = wf.tensor(np.round(2 * x.numpy()) - 4, x.dims)  # ties, and mostly below the padding's zero
    by_dim = lambda pair: dict(zip("hw", pair, strict=True))
    pads = padding if isinstance(padding, str) else by_dim(padding)
    pools = {"max": wf.max_pool, "avg": wf.avg_pool}

    def ours(x):
        both = [pool(x, by_dim(window), by_dim(stride), pads) for pool in pools.values()]
        return wf.stack(both, wf.Dim("kind", 2))

    def theirs(x):
        return jnp.stack([lax_pool(kind, x, window, stride, padding) for kind in pools])

    check(ours, theirs, [x], mesh, layout, ("pools", name))


def test_pools_of_integers_and_booleans():
    numbers = wf.arange(wf.Dim("h", 7)) - 9
    booleans = numbers == -6

    def all_three(numbers, booleans):
        options = {"window": {"h": 3}, "stride": 2, "padding": "SAME"}
        return (
            wf.max_pool(numbers, **options),
            wf.max_pool(booleans, **options),
            wf.avg_pool(numbers, **options),
        )

    for mesh, layout in (("", ""), ("x=4", "h:x")):
        highest, any_true, mean = wf.spmd(all_three, mesh, layout)(numbers, booleans)
        assert highest.numpy().tolist() == [-8, -6, -4, -3]
        assert any_true.numpy().tolist() == [False, True, True, False]
        assert mean.numpy().tolist() == [-8.5, -7, -5, -3.5]


# Windows

WINDOWS = {
    # name: (size, window, stride, padding, dilation, [(mesh, layout), …])
    "all": (9, 3, 1, "VALID", 1, [("x=4", "t:x"), ("x=8", "t:x"), ("x=2 y=2", "t:x k:y")]),
    "stride": (13, 4, 3, "SAME", 2, [("x=4", "t:x"), ("x=2 y=2", "b:x t:y"), ("x=2", "k:x")]),
    "large": (8, 7, 2, (5, 6), 1, [("x=2 y=2", "t:x+y"), ("x=8", "t:x")]),
    "cut": (8, 2, 1, (-2, -1), 1, [("x=4", "t:x")]),
}
WINDOWS_CASES = [
    pytest.param(name, mesh, layout, id=f"{name}|{mesh}|{layout}")
    for name, case in WINDOWS.items()
    for mesh, layout in case[5]
]


@pytest.mark.parametrize("name, mesh, layout", WINDOWS_CASES)
def test_windows(name, mesh, layout):
    size, window, stride, padding, dilation, _ = WINDOWS[name]
    reach = (window - 1) * dilation + 1
    before, behind = padding if isinstance(padding, tuple) else (0, 0)
    if padding == "SAME":
        ((before, behind),) = lax.padtype_to_pads([size], [reach], [stride], padding)

    def ours(x):
        return wf.windows(x, "t", wf.Dim("k", window), stride, padding, dilation)

    def theirs(x):
        x = lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), (before, behind, 0), (0, 0, 0)])
        view = np.lib.stride_tricks.sliding_window_view
        return x[:, view(np.arange(x.shape[1]), reach)[::stride, ::dilation]]

    check(ours, theirs, [draw(f"b=2 t={size} c=3", 4)], mesh, layout, ("windows", name))


# What travels


def travels(fn, mesh, layout, *specs):
    """The kinds of collectives with their bytes, forward and backward, sums to scalars left out."""

    def loss(*tensors):
        return wf.sum(wf.square(fn(*tensors)))

    argnums = tuple(range(len(specs)))
    program = wf.spmd(wf.value_and_grad(loss, argnums=argnums), mesh, layout)
    found: dict[str, list[int]] = {}
    for collective in program.collectives(*[wf.spec(s) for s in specs]):
        if collective.bytes > 4:
            found.setdefault(collective.kind, []).append(collective.bytes)
    return found


def test_only_one_row_each_way_for_a_window_of_three():
    conv = lambda x, kernel: wf.conv(x, kernel, HW)
    found = travels(conv, "x=4", "h:x", "b=2 h=16 w=8 c=3", "kh=3 kw=3 c=3 o=2")
    row = 2 * 8 * 3 * 4
    # Two rows forward, their cotangents backward, and the sum of the kernel's gradient.
    assert found == {"permute": [row] * 4, "all-reduce": [3 * 3 * 3 * 2 * 4]}


def test_corners_travel_with_the_second_border():
    conv = lambda x, kernel: wf.conv(x, kernel, HW)
    found = travels(conv, "x=2 y=2", "h:x w:y", "b=1 h=16 w=8", "kh=3 kw=3 o=1")
    row, column = 4 * 4, (8 + 2) * 4
    assert sorted(found.pop("permute")) == sorted([row, column] * 4)
    assert set(found) == {"all-reduce"}


@pytest.mark.parametrize("pool", [wf.max_pool, wf.avg_pool], ids=["max", "avg"])
def test_pools_send_borders_only(pool):
    x = "b=2 h=16 w=8"
    assert travels(lambda x: pool(x, {"h": 2, "w": 2}), "x=4", "h:x", x) == {}
    same = travels(lambda x: pool(x, {"h": 3}, 1, "SAME"), "x=4", "h:x", x)
    assert same == {"permute": [2 * 8 * 4] * 4}
    uneven = travels(lambda x: pool(x, {"h": 3}, 2), "x=4", "h:x", "b=2 h=13 w=8")
    assert set(uneven) == {"permute"}


UNEVEN = {
    "valid": {"padding": "VALID"},
    "stride": {"stride": 3},
    "transpose": {"transpose": True, "stride": 3},
    "transpose, valid": {"transpose": True, "stride": 2, "padding": "VALID"},
}


@pytest.mark.parametrize("options", UNEVEN.values(), ids=UNEVEN)
@pytest.mark.parametrize("mesh, layout", [("x=4", "h:x"), ("x=2 y=2", "h:x+y")])
def test_uneven_convolutions_permute_and_never_gather(options, mesh, layout):
    conv = lambda x, kernel: wf.conv(x, kernel, H, **options)
    found = travels(conv, mesh, layout, "b=2 h=13 c=2", "kh=3 c=2 o=2")
    assert set(found) == {"permute", "all-reduce"}
    assert found["all-reduce"] == [3 * 2 * 2 * 4]
    block = 2 * 4 * 2 * 4
    assert max(found["permute"]) <= block


def test_windows_send_borders_only():
    found = travels(lambda x: wf.windows(x, "t", wf.Dim("k", 3)), "x=4", "t:x", "b=2 t=16")
    assert set(found) == {"permute"}


def test_split_channels_are_a_pending_sum():
    conv = lambda x, kernel: wf.conv(x, kernel, H)
    found = travels(conv, "x=2", "c:x", "b=2 h=8 c=4", "kh=3 c=4 o=2")
    assert found == {"all-reduce": [2 * 8 * 2 * 4]}

    def two(x, y, kernel):
        return wf.conv(x, kernel, H) + wf.conv(y, kernel, H)

    found = travels(two, "x=2", "c:x", "b=2 h=8 c=4", "b=2 h=8 c=4", "kh=3 c=4 o=2")
    assert found == {"all-reduce": [2 * 8 * 2 * 4]}


# Eager


def test_eager_equals_staged_under_any_layout():
    x, kernel = draw("b=2 h=7 c=2", 1), draw("kh=3 c=2 o=3", 2)

    def every(x, kernel):
        return [
            wf.conv(x, kernel, H, stride=2),
            wf.conv(x, kernel, H, stride=2, transpose=True),
            wf.max_pool(x, {"h": 2}),
            wf.avg_pool(x, {"h": 3}, 1, "SAME"),
            wf.windows(x, "h", wf.Dim("k", 2)),
        ]

    staged = wf.spmd(every, "x=4", "h:x")(x, kernel)
    placed = every(wf.place(x, wf.Mesh("x=4"), wf.Layout("h:x")), kernel)
    for one, two, three in zip(every(x, kernel), staged, placed, strict=True):
        assert_same(two, one, **tolerance(one.numpy()))
        assert_same(three, one, **tolerance(one.numpy()))


# Mistakes

X, KERNEL = "b=2 h=7 w=4 c=2", "kh=3 kw=3 c=2 o=3"
MISTAKES = {
    "misspelt spatial dim": (DimError, "did you mean", lambda x, k: wf.conv(x, k, {"hh": "kh"})),
    "no window": (TensorTypeError, "whose keys are the dims", lambda x, k: wf.conv(x, k, 3)),
    "no kernel dim": (DimError, "no dim kx", lambda x, k: wf.conv(x, k, {"h": "kx"})),
    "option of another dim": (DimError, "stride is given for b", lambda x, k: wf.conv(x, k, HW, stride={"b": 2})),
    "stride": (ShapeError, "stride along h is 0", lambda x, k: wf.conv(x, k, HW, stride=0)),
    "padding": (ShapeError, "padding along h", lambda x, k: wf.conv(x, k, HW, padding="FULL")),
    "window too large": (ShapeError, "does not fit", lambda x, k: wf.conv(x, k, HW, padding="VALID", dilation=2)),
    "lost dim": (DimError, "b is not in out", lambda x, k: wf.conv(x, k, HW, out=["h", "w", "o"])),
    "unknown out": (DimError, "no dim z", lambda x, k: wf.conv(x, k, HW, out=["b", "h", "w", "z"])),
    "spatial dim in the kernel": (DimError, "kernel has that dim too", lambda x, k: wf.conv(x, k.rename(o="h"), HW)),
    "negative padding": (ShapeError, "not negative", lambda x, k: wf.max_pool(x, {"h": 2}, padding=(-1, 0))),
    "pool by number": (TensorTypeError, "whose keys are the dims", lambda x, k: wf.avg_pool(x, 2)),
    "window dim without size": (DimError, "has no size", lambda x, k: wf.windows(x, "h", ["k"])),
    "window dim taken": (DimError, "occurs twice", lambda x, k: wf.windows(x, "h", wf.Dim("w", 2))),
}  # fmt: skip


@pytest.mark.parametrize("error, text, call", MISTAKES.values(), ids=MISTAKES)
def test_mistakes(error, text, call):
    with pytest.raises(error, match=text) as caught:
        call(wf.zeros(X), wf.zeros(KERNEL))
    assert "test_neighbours.py" in str(caught.value)
    assert caught.value.call and caught.value.rule and caught.value.hint


def test_batch_and_features_on_one_axis():
    program = wf.spmd(lambda x, k: wf.conv(x, k, HW), "x=2", "b:x o:x")
    with pytest.raises(LayoutError, match="b and o"):
        program(wf.zeros(X), wf.zeros(KERNEL))
