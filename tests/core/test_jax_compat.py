"""One test for each JAX API without a stability guarantee: a new release of JAX that breaks Weft fails here first."""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from weft.core import jax_compat


def equation(name, fn, *args):
    """The first equation of this primitive in the jaxpr of a call."""
    return next(e for e in jax.make_jaxpr(fn)(*args).eqns if e.primitive.name == name)


def test_tracers_and_their_types():
    def fn(x):
        assert isinstance(x, jax_compat.Tracer)
        assert isinstance(jax.typeof(x), jax_compat.ShapedArray)
        assert isinstance(jax.typeof(x), jax_compat.AbstractValue)
        return x

    jax.make_jaxpr(fn)(1.0)
    assert not isinstance(jnp.ones(2), jax_compat.Tracer)


def test_the_parts_of_a_jaxpr():
    closed = jax.make_jaxpr(lambda x: jax.jit(lambda y: y * 2.0)(x))(1.0)
    assert isinstance(closed, jax_compat.ClosedJaxpr)
    assert isinstance(closed.jaxpr, jax_compat.Jaxpr)
    [call] = closed.eqns
    assert isinstance(call, jax_compat.JaxprEqn)
    [inner] = jax_compat.jaxprs_in_params(call.params)
    [multiply] = getattr(inner, "jaxpr", inner).eqns
    assert isinstance(multiply.invars[0], jax_compat.Var)
    assert isinstance(multiply.invars[1], jax_compat.Literal)


def test_a_row_major_array():
    """XLA chooses another order for an array that is transposed, unless it is constrained."""
    traced = jax.jit(lambda x: jax_compat.row_major(jnp.sin(x.T)).T).trace(np.ones((3, 4)))
    text = traced.lower().as_text()
    assert "LayoutConstraint" in text and "dense<[1, 0]>" in text
    assert "LayoutConstraint" not in traced.lower(lowering_platforms=("tpu",)).as_text()
    transposed = jax.make_jaxpr(lambda x: jax.vjp(jax_compat.row_major, x)[1](x))(np.ones((3, 4)))
    assert str(transposed).count("layout_constraint[") == 2


def test_dead_code_is_removed():
    jaxpr = jax.make_jaxpr(lambda x: (jnp.sin(x), x + 1)[1])(1.0).jaxpr
    live, used = jax_compat.dce_jaxpr(jaxpr, [True], instantiate=True)
    assert [e.primitive.name for e in live.eqns] == ["add"]
    assert used == [True]


def test_primitives_that_expand_to_others():
    jaxpr = jax.make_jaxpr(lambda x: jnp.frexp(x)[1])(1.0).jaxpr
    assert "bitcast_convert_type" in str(jax_compat.expand_hijax(jaxpr))


@pytest.mark.parametrize("consts", [0, 1, 2])
@pytest.mark.parametrize("carries", [1, 3])
def test_the_operands_of_a_scan(consts, carries):
    def fn(given, carry, xs):
        return jax.lax.scan(lambda c, x: ([one + x + sum(given) for one in c], None), carry, xs)

    scan = equation("scan", fn, [1.0] * consts, [1.0] * carries, jnp.ones(3))
    assert jax_compat.scan_counts(scan.params) == (consts, carries)


def test_varying_axes_are_read_and_removed():
    found = []

    def fn(x):
        aval = jax.typeof(x)
        found.append(jax_compat.varying_axes_of(aval))
        found.append(jax_compat.varying_axes_of(jax_compat.without_varying(aval, frozenset(["a"]))))
        found.append(jax_compat.jaxpr_varying_axes(aval))
        return x

    mesh = AbstractMesh((2, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    both = PartitionSpec(("a", "b"))
    jax.make_jaxpr(jax.shard_map(fn, mesh=mesh, in_specs=both, out_specs=both))(jnp.ones(4))
    assert found == [{"a", "b"}, {"b"}, {"a", "b"}]
    assert jax_compat.jaxpr_varying_axes(jax.typeof(1.0)) == set()


@pytest.mark.parametrize("name", ["erf", "erfc", "gelu"])
def test_the_derivatives_of_error_functions_inside_shard_map(name):
    mesh = AbstractMesh((2,), ("a",), axis_types=(AxisType.Auto,))
    options = {"approximate": False} if name == "gelu" else {}
    fn = lambda module: functools.partial(getattr(module, name), **options)
    slope = jax.grad(lambda x: jnp.sum(fn(jax_compat)(x)))
    split = PartitionSpec("a")
    jax.make_jaxpr(jax.shard_map(slope, mesh=mesh, in_specs=split, out_specs=split))(jnp.ones(4))
    x = jnp.linspace(-4, 4, 33)
    want = jax.vmap(jax.grad(fn(jax.nn if name == "gelu" else jax.scipy.special)))(x)
    np.testing.assert_allclose(slope(x), want, rtol=1e-5, atol=1e-7)


def test_an_outer_trace_can_be_entered_from_an_inner_one():
    outer = {}

    def body(carry, _):
        assert jax_compat.get_opaque_trace_state() != outer["state"]
        with jax_compat.set_current_trace(outer["trace"]):
            assert jax_compat.get_opaque_trace_state() == outer["state"]
            lifted = jnp.sin(outer["x"])
        return carry + lifted, None

    def fn(x):
        outer["x"], outer["state"] = x, jax_compat.get_opaque_trace_state()
        with jax_compat.take_current_trace() as outer["trace"]:
            pass
        with jax_compat.set_current_trace(outer["trace"]):
            return jax.lax.scan(body, x, None, length=3)[0]

    names = [e.primitive.name for e in jax.make_jaxpr(fn)(1.0).eqns]
    assert names.index("sin") < names.index("scan")


def test_there_is_a_trace():
    assert jax_compat.has_trace()
    with jax_compat.take_current_trace():
        found = jax_compat.has_trace()
    assert found == (jax.__version_info__ < (0, 11))  # earlier versions of JAX always have one


def test_a_primitive_with_its_rules():
    same = jax_compat.Primitive("same_for_a_test")
    same.def_impl(lambda x: x)
    same.def_abstract_eval(lambda x: x)
    jax_compat.mlir.register_lowering(same, lambda _, x: [x])
    jax_compat.batching.primitive_batchers[same] = lambda xs, dims: (same.bind(*xs), dims[0])
    jax_compat.ad.primitive_jvps[same] = lambda primals, _: (
        same.bind(*primals),
        jax_compat.ad.Zero(jax.typeof(primals[0]).to_tangent_aval()),
    )
    assert jax.jit(same.bind)(3.0) == 3.0
    assert jax.vmap(same.bind)(jnp.arange(3)).tolist() == [0, 1, 2]
    assert jax.jvp(same.bind, [1.0], [1.0])[1] == 0.0


def test_a_linear_function_has_its_own_transpose():
    def fn(x):
        return jax_compat.linear_call(lambda _, x: 2 * x, lambda _, ct: 3 * ct, (), x)

    assert fn(1.0) == 2.0
    assert jax.grad(fn)(1.0) == 3.0


def test_only_wanted_cotangents_are_computed():
    _, pullback = jax.vjp(lambda xs: xs[0] * xs[1], [2.0, 3.0])
    [[first, second]] = jax_compat.pull_back_wanted(pullback, [False, True], 1.0)
    assert second == 2.0 and first is not None and not isinstance(first, jax.Array)


def test_an_array_of_all_processes():
    assert jax_compat.process_allgather(jnp.arange(3)).tolist() == [0, 1, 2]


def test_threefry_has_the_bits_of_jax_random():
    key = jax.random.key(7)
    words = jax.random.key_data(key)
    high, low = jax_compat.threefry2x32_p.bind(words[0], words[1], *np.zeros((2, 1), np.uint32))
    expected = jax.random.bits(key, (1,), jnp.uint32)
    assert (high ^ low).tolist() == expected.tolist()


def test_the_state_of_several_processes():
    state = jax_compat.distributed_state()
    assert (state.client, state.process_id, state.num_processes) == (None, 0, 1)
    assert hasattr(state, "coordinator_address")
    kinds = jax_compat.cluster_environments()
    assert any(kind.__name__ == "K8sCluster" for kind in kinds)
    assert all(hasattr(kind, name) for kind in kinds for name in ("is_env_present", "opt_in_only_method"))


def test_the_clients_factory_has_the_arguments_that_gloo_needs():
    """tests/distributed runs it; here the names must exist."""
    from jax._src import xla_bridge
    from jax._src.lib import _jax

    assert callable(xla_bridge.make_cpu_client)
    assert callable(xla_bridge.register_backend_factory)
    assert callable(_jax.make_gloo_tcp_collectives)


class Probe:
    """An object that records which function of JAX reads `__jax_array__`."""

    def __init__(self):
        self.read_by = []

    @property
    def __jax_array__(self):
        self.read_by.append(jax_compat.called_jax_function(sys._getframe(1)))
        raise AttributeError


CALLS = {
    "jnp.sum": jnp.sum,
    "jnp.concatenate": lambda x: jnp.concatenate([x, x]),
    "jax.grad": lambda x: jax.grad(lambda _: x)(1.0),
    "jax.value_and_grad": lambda x: jax.value_and_grad(lambda _: x)(1.0),
    None: lambda x: jnp.ones(2) + x,
}


@pytest.mark.parametrize("name", CALLS)
def test_the_function_that_converts_an_object(name):
    probe = Probe()
    with pytest.raises(TypeError):
        CALLS[name](probe)
    assert {*probe.read_by} == {name}


def test_conversions_to_arrays_are_no_calls():
    probe = Probe()
    with pytest.raises((TypeError, ValueError)):
        jnp.asarray(probe)
    assert {*probe.read_by} <= {None}
    assert not hasattr(probe, "__jax_array__") and probe.read_by[-1] is None
