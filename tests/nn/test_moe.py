"""Mixtures of experts against a loop over tokens, under every kind of layout.

Routing is discrete: values are float64 here, so that rounding can't send a token elsewhere.
"""

import functools
import math
import re
from collections import Counter
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import weft as wf
from weft import nn
from weft.core.errors import DimError, ShapeError

LAYOUTS = {
    "unsplit": ("data=4", ""),
    "one axis": ("data=4", "batch:data experts:data"),
    "two axes": ("data=4 model=2", "batch:data experts:model"),
    "three axes": ("data=2 expert=2 model=2", "batch:data experts:expert d_ff:model"),
    "batch on more": ("data=2 expert=2", "batch:data+expert experts:expert groups:data"),
    "length": ("data=4", "length:data experts:data"),
    "features": ("data=2 model=2", "batch:data experts:data d_model:model"),
}


class Case(NamedTuple):
    """One mixture of experts and its inputs."""

    top: int = 1
    capacity: float = 1.0
    activation: str = "relu"
    bias: bool = False
    padded: bool = False
    exact: bool = False
    batch: int = 6
    length: int = 5
    experts: int = 6

    @property
    def layer(self):
        d_model, d_ff = wf.dims("d_model=4 d_ff=6")
        experts = wf.Dim("experts", self.experts)
        more = {"activation": self.activation, "bias": self.bias}
        return nn.MixtureOfExperts(d_model, d_ff, experts, top=self.top, capacity=self.capacity, **more)

    def inputs(self):
        """The layer with its parameters, x, and weights, in float64."""
        draws = np.random.default_rng(self.batch)

        def draw(dims):
            return wf.tensor(draws.normal(size=[d.size for d in dims]), dims)

        layer = jax.tree.map(
            lambda p: wf.parameter(draw(p.dims)),
            self.layer,
            is_leaf=lambda p: isinstance(p, nn.Declared),
        )
        x = draw(wf.dims(f"batch={self.batch} length={self.length} d_model=4"))
        weights = None
        if self.padded:
            live = draws.integers(0, 4, [self.batch, self.length]) > 0
            live[0] = False  # a group of nothing but padding
            weights = wf.tensor(live.astype(float), x.dims[:2])
        return layer, x, weights


CASES = {
    "switch": Case(capacity=1.5),
    "top 2": Case(top=2, activation="swiglu"),
    "top 2, padded, with bias": Case(top=2, padded=True, bias=True, activation="gelu"),
    "switch, padded, one place": Case(padded=True),
}


# -- the oracle -------------------------------------------------------------------------------------


def queue(order, capacity, top, live):
    """Whether each token fits into the capacity of its chosen experts: in order, best choices first."""
    served = np.zeros([*order.shape[:2], top], bool)
    for group in range(order.shape[0]):
        taken = Counter()
        for pick in range(top):
            for token in np.flatnonzero(live[group]):
                expert = order[group, token, pick]
                served[group, token, pick] = taken[expert] < capacity
                taken[expert] += 1
    return served


def block(case, p, expert, row):
    """One expert's work on one token."""
    activation = {
        "relu": jax.nn.relu,
        "gelu": functools.partial(jax.nn.gelu, approximate=False),
        "swiglu": jax.nn.silu,
    }[case.activation]

    def linear(name, row):
        out = row @ p[f"feed.{name}.weight"][expert]
        return out + p[f"feed.{name}.bias"][expert] if case.bias else out

    if case.activation == "swiglu":
        return linear("narrow", activation(linear("gate", row)) * linear("wide", row))
    return linear("narrow", activation(linear("wide", row)))


def oracle(case, p, x, live, order, served):
    """The result and both losses, given the routing: each token's experts in order, and the served choices."""

    def one(row, order, served):
        shares = jax.nn.softmax(row @ p["router.weight"])
        total = 1.0 if case.top == 1 else sum(shares[order[pick]] for pick in range(case.top))
        y = jnp.zeros_like(row)
        for pick in range(case.top):
            expert = order[pick]
            y += jnp.where(served[pick], shares[expert] / total * block(case, p, expert, row), 0)
        return y, shares, jnp.log(jnp.sum(jnp.exp(row @ p["router.weight"]))) ** 2

    y, shares, z = jax.vmap(jax.vmap(one))(x, order, served)
    balances = []
    for group in range(case.batch):
        mine = np.flatnonzero(live[group])
        if len(mine):
            used = np.bincount(order[group, mine, 0], minlength=case.experts) / len(mine)
            balances.append(case.experts * jnp.sum(used * jnp.mean(shares[group, mine], axis=0)))
    return y, sum(balances) / len(balances), jnp.mean(z[live])


@functools.cache
def expected(case):
    """The oracle's results and gradients, and the number of dropped choices."""
    layer, x, weights = case.inputs()
    p = {name: jnp.asarray(t.numpy()) for name, t in nn.parameters(layer).items()}
    x, live = x.numpy(), np.ones([case.batch, case.length], bool) if weights is None else weights.numpy() > 0
    capacity = math.ceil(case.capacity * case.length * case.top / case.experts)
    order = np.argsort(-(x @ p["router.weight"]), axis=-1, kind="stable")
    served = queue(np.asarray(order), case.length if case.exact else capacity, case.top, live)

    def loss(p, x):
        y, balance, z = oracle(case, p, x, live, np.asarray(order), served)
        return jnp.sum(y * scale(x.shape)) + 3 * balance + 0.5 * z, (y, balance, z)

    (grads, dx), outs = jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(p, x)
    return outs, grads, dx, live.sum() * case.top - served.sum()


def scale(shape):
    """Factors, so that every element counts differently."""
    return np.cos(1.0 + np.arange(math.prod(shape))).reshape(shape)


def program(case, mesh="", layout=""):
    """The same by Weft: results, and gradients for all parameters and x."""
    factors = wf.tensor(
        scale([case.batch, case.length, 4]), f"batch={case.batch} length={case.length} d_model=4"
    )

    def loss(layer, x, weights):
        y, losses = layer(x, dropless=case.exact, weights=weights)
        value = wf.sum(y * factors) + 3 * losses.balance + 0.5 * losses.z
        return value, (y, losses)

    return wf.spmd(wf.grad(loss, argnums=(0, 1), has_aux=True), mesh or wf.Mesh(), layout)


def check(case, mesh="", layout=""):
    outs, grads, dx, lost = expected(case)
    (got, got_dx), (y, losses) = program(case, mesh, layout)(*case.inputs())
    close = functools.partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-11)
    close(y.numpy("batch", "length", "d_model"), outs[0])
    close(losses.balance.item(), outs[1])
    close(losses.z.item(), outs[2])
    close(got_dx.numpy("batch", "length", "d_model"), dx)
    found = nn.parameters(got)
    assert found.keys() == grads.keys()
    for name, grad in grads.items():
        assert np.any(grad), name
        close(found[name].numpy(), grad, err_msg=name)
    return lost


def with_router(layer, weight):
    """The layer with another router."""
    weight = wf.parameter(wf.tensor(weight, layer.router.weight.dims))
    return eqx.tree_at(lambda t: t.router.weight, layer, weight)


def with_parameters(described, layer):
    """A described mixture with the parameters of a like one."""
    return eqx.tree_at(lambda t: (t.router, t.feed), described, (layer.router, layer.feed))


# -- values and gradients ---------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize("name", ["switch", "switch, padded, one place", "top 2"])
def test_a_mixture_is_its_loop_over_tokens(name):
    assert check(CASES[name]) > 2  # dropped tokens are among them


@pytest.mark.parametrize("mesh, layout", list(LAYOUTS.values())[1:], ids=list(LAYOUTS)[1:])
def test_layouts_do_not_change_it(mesh, layout):
    """6 experts and 6 rows on 4 devices (or 2), 5 positions on 4: nothing divides evenly."""
    assert check(CASES["top 2, padded, with bias"], mesh, layout) > 2


def test_exact_serves_everyone():
    """With the same tokens, some of them dropped before; their gates are those of the router."""
    assert check(CASES["top 2"]._replace(exact=True), *LAYOUTS["one axis"]) == 0


def test_exact_gives_padding_nothing():
    case = CASES["top 2, padded, with bias"]._replace(exact=True)
    assert check(case, *LAYOUTS["two axes"]) == 0


def test_expert_capacity():
    assert [case.layer.expert_capacity(5) for case in CASES.values()] == [2, 2, 2, 1]
    capacity = Case(capacity=1.25, top=2, experts=4).layer.expert_capacity
    assert [capacity(n) for n in (1, 2, 8, 9, 64)] == [1, 2, 5, 6, 40]
    assert Case(capacity=100.0).layer.expert_capacity(5) == 5  # never more than there are tokens


@pytest.mark.parametrize("top, mesh, layout", [(1, *LAYOUTS["one axis"]), (2, *LAYOUTS["two axes"])])
def test_ties_go_to_the_first_experts(top, mesh, layout):
    """A router that has no opinion: all choose expert 0, then 1; the first tokens of each row are served."""
    case = Case(top=top, capacity=3.0)
    layer, x, _ = case.inputs()
    layer = with_router(layer, np.zeros((4, 6)))
    y, losses = wf.spmd(lambda layer, x: layer(x), mesh, layout)(layer, x)
    capacity = math.ceil(3.0 * 5 * top / 6)
    p = {name: t.numpy() for name, t in nn.parameters(layer).items()}
    want = np.zeros((6, 5, 4))
    for group, token in np.ndindex(6, min(capacity, 5)):
        gate = 1 / 6 if top == 1 else 1 / 2
        for expert in range(top):
            want[group, token] += gate * block(case, p, expert, x.numpy()[group, token])
    np.testing.assert_allclose(y.numpy(), want, atol=1e-12)
    np.testing.assert_allclose([losses.balance.item(), losses.z.item()], [1.0, math.log(6) ** 2])


def test_padding_takes_no_room():
    """Rows with padding among their tokens give what rows without it give."""
    case = Case(top=2, capacity=1.5)
    layer, x, _ = case.inputs()
    capacity = layer.expert_capacity(5)
    live = np.array([0, 2, 3])
    weights = np.zeros(5)
    weights[live] = 1
    y, losses = jax.jit(layer.__call__)(x, weights=wf.tensor(weights, "length=5"))
    short = wf.tensor(x.numpy()[:, live], "batch=6 length=3 d_model=4")
    more = nn.MixtureOfExperts(*wf.dims("d_model=4 d_ff=6 experts=6"), top=2, capacity=capacity)
    assert more.expert_capacity(3) == capacity
    short_y, short_losses = jax.jit(with_parameters(more, layer).__call__)(short)
    np.testing.assert_allclose(y.numpy()[:, live], short_y.numpy(), atol=1e-12)
    assert not y.numpy()[:, [1, 4]].any()
    np.testing.assert_allclose(losses.balance.item(), short_losses.balance.item())
    np.testing.assert_allclose(losses.z.item(), short_losses.z.item())


def test_nothing_but_padding():
    layer, x, _ = Case(top=2).inputs()

    def loss(layer, x):
        y, losses = layer(x, weights=wf.zeros("batch=6", jnp.float64))
        return wf.sum(wf.cos(y)) + losses.balance + losses.z

    value, grads = jax.jit(wf.value_and_grad(loss))(layer, x)
    assert value.item() == 6 * 5 * 4
    assert all(not t.numpy().any() for t in nn.parameters(grads).values())


# -- shapes and types -------------------------------------------------------------------------------


def test_any_dims():
    """Tokens over several dims, in any order; over none; and groups of another dim."""
    layer, x, _ = Case(top=2, length=6).inputs()
    described = nn.MixtureOfExperts(
        *wf.dims("d_model=4 d_ff=6 experts=6"), top=2, capacity=1.0, group="length"
    )

    @jax.jit
    def run(layer, x):
        several = wf.split(x, "length", wf.dims("height=2 width=3"))
        turned = wf.transpose(several, ["height", "d_model", "batch", "width"])
        swapped = x.rename(batch="b", length="batch").rename(b="length")
        return {
            "plain": layer(x)[0],
            "turned": layer(turned)[0],
            "swapped": with_parameters(described, layer)(swapped)[0],
            "exact": layer(x, dropless=True)[0],
            "alone": layer(x["length", 0])[0],
            "alone, exact": layer(x["length", 0], dropless=True)[0],
        }

    got = run(layer, x)
    close = functools.partial(np.testing.assert_allclose, atol=1e-12)
    want = got["plain"].numpy()
    assert got["turned"].dims == wf.dims("height=2 d_model=4 batch=6 width=3")
    close(got["turned"].numpy("batch", "height", "width", "d_model").reshape(want.shape), want)
    close(got["swapped"].numpy("length", "batch", "d_model"), want)
    # One token of each group: there is always room.
    assert got["alone"].dims == wf.dims("batch=6 d_model=4")
    close(got["alone"].numpy(), got["exact"].numpy()[:, 0])
    close(got["alone, exact"].numpy(), got["exact"].numpy()[:, 0])


def test_types():
    """The router works in float32 at least, whatever type the tokens have."""
    layer, x, _ = Case().inputs()
    for given, wide in ((jnp.bfloat16, jnp.float32), (jnp.float32, jnp.float32), (jnp.float64, jnp.float64)):
        y, losses = jax.eval_shape(nn.cast(layer, given).__call__, x.astype(given))
        assert (y.dtype, losses.balance.dtype, losses.z.dtype) == (given, wide, wide)
    # A share that bfloat16 would round to 1/2 decides.
    weight = np.zeros((4, 6))
    weight[0, :2] = 1.0, 1.0 + 2**-7
    layer = with_router(layer, weight)
    token = wf.tensor(np.array([[1.0, 0, 0, 0]]), "batch=1 d_model=4").astype(jnp.bfloat16)
    token = wf.reshape(token, wf.dims("batch=1 length=1 d_model=4"))
    routes, _ = jax.jit(nn.cast(layer, jnp.bfloat16).route)(token)
    assert routes.experts.numpy().item() == 1


def test_dropout_and_a_scan_over_layers():
    """Two layers in a scan with dropout and remat: the draws too are the same under every layout."""
    layers, key = wf.Dim("layers", 2), jax.random.key(3)
    _, x, _ = Case().inputs()
    draws = np.random.default_rng(1)
    stacked = jax.tree.map(
        lambda p: wf.parameter(wf.tensor(draws.normal(size=[d.size for d in p.dims]), p.dims)),
        nn.stack(Case(top=2).layer, layers),
        is_leaf=lambda p: isinstance(p, nn.Declared),
    )

    def run(stacked, x):
        def step(x, layer):
            y, losses = layer(x, dropout=lambda h: wf.dropout(h, 0.5, key))
            return x + y, losses

        x, losses = wf.scan(wf.remat(step), x, stacked, layers)
        return wf.sum(wf.sin(x)) + wf.sum(losses.balance + losses.z)

    results = [
        wf.spmd(wf.value_and_grad(run), mesh, layout)(stacked, x)
        for mesh, layout in (LAYOUTS["unsplit"], LAYOUTS["one axis"])
    ]
    for want, got in zip(*(jax.tree.leaves(r, is_leaf=wf.is_tensor) for r in results), strict=True):
        assert np.any(want.numpy())
        np.testing.assert_allclose(got.numpy(), want.numpy(), rtol=1e-9, atol=1e-11)


# -- costs ------------------------------------------------------------------------------------------


def planned(mesh, layout, exact=False, **more):
    """The plan of value and gradients in float32, for 8 rows of 16 tokens and 8 experts with a capacity of 4."""
    layer = nn.MixtureOfExperts(*wf.dims("d_model=32 d_ff=64 experts=8"), top=2, capacity=1.0, **more)

    def loss(layer, x):
        y, losses = layer(x, dropless=exact)
        return wf.sum(wf.square(y)) + losses.balance + losses.z

    x = wf.spec("batch=8 length=16 d_model=32")
    return wf.spmd(wf.value_and_grad(loss, argnums=(0, 1)), mesh, layout).plan(nn.specs(layer), x)


DISPATCHED = 8 * 8 * 4 * 32 * 4  # bytes of [experts=8, batch=8, capacity=4, d_model=32]
ROUTER, EXPERT = 32 * 8 * 4, 8 * 32 * 64 * 4  # bytes of parameters


def traffic(plan):
    """The number of collectives by (phase, kind, axes, bytes), without sums of scalars."""
    found = Counter()
    for c in plan.collectives:
        if not (c.kind == "all-reduce" and c.bytes <= 8):
            found[c.phase, c.kind, "+".join(c.axes), c.bytes] += c.count
    return found


def test_batch_and_experts_on_one_axis_exchange_by_all_to_all():
    """All-to-alls out and back, forward and backward; experts' gradients need no sum, and no token is gathered."""
    plan = planned("data=4", "batch:data experts:data")
    assert traffic(plan) == {
        ("forward", "all-to-all", "data", DISPATCHED // 4): 2,
        ("backward", "all-to-all", "data", DISPATCHED // 4): 2,
        ("backward", "all-reduce", "data", ROUTER): 1,
    }
    assert sum(c.kind == "all-reduce" and c.bytes <= 8 for c in plan.collectives) <= 3


def test_batch_on_more_axes_exchanges_over_the_experts_alone():
    assert traffic(planned("data=2 expert=2", "batch:data+expert experts:expert groups:data")) == {
        ("forward", "all-to-all", "expert", DISPATCHED // 4): 2,
        ("backward", "all-to-all", "expert", DISPATCHED // 4): 2,
        ("backward", "all-reduce", "data+expert", ROUTER): 1,
        ("backward", "all-reduce", "data", EXPERT // 2): 2,
    }


def test_experts_on_an_axis_of_their_own():
    """The tokens are there already on the way out; what the experts made is gathered, each way."""
    assert traffic(planned("data=4 model=2", "batch:data experts:model")) == {
        ("forward", "all-gather", "model", DISPATCHED // 4): 1,
        ("backward", "all-gather", "model", DISPATCHED // 4): 1,
        ("backward", "all-reduce", "data", ROUTER): 1,
        ("backward", "all-reduce", "data", EXPERT // 2): 2,
    }


@pytest.mark.parametrize(
    "mesh, layout", [LAYOUTS[n] for n in ("one axis", "two axes", "three axes", "batch on more")]
)
def test_no_expert_works_twice(mesh, layout):
    """Only the router's product is repeated along axes that do not split the batch."""
    plan = planned(mesh, layout)
    router = 3 * 2 * 8 * 16 * 32 * 8
    assert plan.unique_flops == planned("data=1", "").flops
    assert plan.flops * plan.mesh.size <= plan.unique_flops + router * plan.mesh.size


def test_uneven_sizes_move_by_all_to_all_too():
    case = CASES["top 2"]
    plan = program(case, *LAYOUTS["one axis"]).plan(*case.inputs())
    kinds = Counter(c.kind for c in plan.collectives)
    assert kinds["all-to-all"] == 4
    assert kinds.keys() == {"all-to-all", "all-reduce"}


def test_exact_gathers_tokens_and_scatters_the_sum():
    """Decoding sends each token to all: its bytes once, not once for each expert."""
    tokens = 8 * 16 * 32 * 4
    found = traffic(planned("data=4", "batch:data experts:data", exact=True))
    assert found["forward", "all-gather", "data", tokens] == 1
    assert found["forward", "reduce-scatter", "data", tokens] == 1


def test_flops_are_those_of_the_capacity():
    """Against a dense block with the same active products, capacity 1.25: 1.268 times the FLOPs (top 1), of which
    1.25 are the empty places' and the rest the router's. Sending tokens out and back costs no product."""
    d_model, d_ff, experts = wf.dims("d_model=64 d_ff=256 experts=8")
    x = wf.spec("batch=4 length=64 d_model=64")
    mixture = nn.specs(nn.MixtureOfExperts(d_model, d_ff, experts))
    dense = nn.specs(nn.FeedForward(d_model, d_ff))
    flops = wf.spmd(lambda layer, x: layer(x)[0], "data=1", "").plan(mixture, x).flops
    dense_flops = wf.spmd(lambda layer, x: layer(x), "data=1", "").plan(dense, x).flops
    router, gates = 2 * 4 * 64 * 64 * 8, 2 * 4 * 64 * 64
    assert flops == dense_flops * 1.25 + router + gates
    assert round(flops / dense_flops, 3) == 1.268


# -- mistakes ---------------------------------------------------------------------------------------


def too_many():
    Case(top=7).layer


def no_room():
    Case(capacity=0.0).layer


def unknown_group():
    layer, x, _ = Case().inputs()
    layer(x.rename(batch="rows"))


def unknown_features():
    layer, x, _ = Case().inputs()
    layer(x.rename(d_model="features"))


@pytest.mark.parametrize(
    "wrong, error",
    [(too_many, ShapeError), (no_room, ShapeError), (unknown_group, DimError), (unknown_features, DimError)],
)
def test_mistakes(wrong, error, golden):
    with pytest.raises(error) as caught:
        wrong()
    golden(wrong.__name__, re.sub(r"(?<=\.py:)\d+", "…", f"{error.__name__}: {caught.value}"), "messages/moe")
