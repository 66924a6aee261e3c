"""A block drawn by index is the block of jax.random's draw, bit for bit, wherever it is cut."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.random import threefry_2x32
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from tiers import slow

from weft.core.errors import TensorTypeError
from weft.random.threefry import block_bits, block_normal, block_uniform

FLOATS = [
    ("float32", False),
    ("bfloat16", False),
    ("float16", False),
    ("float32", True),
    ("float64", True),
]
# shape, and how many pieces each dim is cut into (ceil-sized: the last is short, or all padding)
CUTS = [
    ((), ()),
    ((1,), (1,)),
    ((13,), (4,)),
    ((9,), (8,)),
    ((5, 1, 7), (2, 1, 3)),
    ((33, 18), (1, 5)),
]


def assert_same_bits(actual, expected):
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    assert actual.tobytes() == expected.tobytes()


def blocks(shape, cuts):
    sizes = tuple(-(-size // cut) for size, cut in zip(shape, cuts, strict=True))
    for position in itertools.product(*(range(cut) for cut in cuts)):
        yield tuple(p * size for p, size in zip(position, sizes, strict=True)), sizes


def assert_blocks_match(draw, expected, cuts):
    """Every block of `draw(starts, sizes)`, without its padding, is a block of `expected`."""
    expected = np.asarray(expected)
    for starts, sizes in blocks(expected.shape, cuts):
        inside = expected[
            tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))
        ]
        block = np.asarray(draw(starts, sizes))
        assert block.shape == sizes
        assert_same_bits(block[tuple(slice(0, size) for size in inside.shape)], inside)


@pytest.mark.parametrize("shape, cuts", CUTS, ids=str)
@pytest.mark.parametrize("bit_width, x64", [(8, False), (16, False), (32, False), (32, True), (64, True)])
def test_bits(shape, cuts, bit_width, x64):
    with jax.enable_x64(x64):
        key = jax.random.key(0)
        draw = jax.jit(
            lambda starts, sizes: block_bits(key, shape, starts, sizes, bit_width), static_argnums=1
        )
        assert_blocks_match(draw, jax.random.bits(key, shape, f"uint{bit_width}"), cuts)


@pytest.mark.parametrize("jit", [slow(False), True], ids=["eager", "jit"])
@pytest.mark.parametrize("shape, cuts", CUTS, ids=str)
@pytest.mark.parametrize("dtype, x64", FLOATS)
def test_floats(shape, cuts, dtype, jit, x64):
    with jax.enable_x64(x64):
        key = jax.random.key(1)
        # A scalar with the emitters that users have: the plain ones of these tests fuse its × and + or not, at will.
        # Later versions of JAX have no others.
        has_choice = jax.__version_info__ < (0, 11)
        scalar = {"xla_cpu_use_fusion_emitters": True} if np.prod(shape) == 1 and has_choice else None
        jitted = functools.partial(jax.jit, compiler_options=scalar)
        wrap = functools.partial(jitted, static_argnums=1) if jit else lambda f: f
        normal = wrap(lambda starts, sizes: block_normal(key, shape, starts, sizes, dtype))
        uniform = wrap(lambda starts, sizes: block_uniform(key, shape, starts, sizes, dtype, -0.1, 3.7))
        theirs = jitted if jit else lambda f: f
        assert_blocks_match(normal, theirs(lambda key: jax.random.normal(key, shape, dtype))(key), cuts)
        drawn = theirs(lambda key: jax.random.uniform(key, shape, dtype, -0.1, 3.7))(key)
        assert_blocks_match(uniform, drawn, cuts)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_what_follows_a_draw_does_not_change_it(dtype):
    """Fails for float32 without the barrier: `normal * 0.02` differs in the last bit."""
    key, shape = jax.random.key(2), (10007,)
    expected = jax.jit(lambda x: x * 0.02)(jax.random.normal(key, shape, dtype))
    scaled = jax.jit(
        lambda starts, sizes: block_normal(key, shape, starts, sizes, dtype) * 0.02,
        static_argnums=1,
    )
    assert_blocks_match(scaled, expected, (3,))


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("raw", [False, True], ids=["typed", "raw"])
def test_in_shard_map(raw, check_vma):
    key, shape, sizes = (jax.random.PRNGKey if raw else jax.random.key)(3), (13, 5), (4, 3)
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)

    @jax.jit
    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=P(), out_specs=P("data", "model"), check_vma=check_vma
    )
    def draw(key):
        starts = lax.axis_index("data") * 4, lax.axis_index("model") * 3
        block = block_normal(key, shape, starts, sizes)
        if check_vma:
            assert jax.typeof(block).manual_axis_type.varying == {"data", "model"}
        return block

    assert_same_bits(draw(key)[:13, :5], jax.random.normal(key, shape))


def test_key_that_differs_per_device():
    keys = jax.random.split(jax.random.key(4), 8)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    def draw(keys):
        block = block_uniform(keys[0], (6,), (2,), (3,))
        assert jax.typeof(block).manual_axis_type.varying == {"data"}
        return block[None]

    expected = jax.vmap(lambda key: jax.random.uniform(key, (6,))[2:5])(keys)
    assert_same_bits(jax.jit(draw)(keys), expected)
    assert_same_bits(draw(keys), expected)


def test_vmap_over_keys_and_starts():
    keys, starts = jax.random.split(jax.random.key(5), 3), jnp.array([0, 2, 4])
    expected = jnp.stack(
        [jax.random.normal(key, (7,))[start : start + 3] for key, start in zip(keys, starts, strict=True)]
    )
    assert_same_bits(
        jax.vmap(lambda key, start: block_normal(key, (7,), (start,), (3,)))(keys, starts), expected
    )


def test_gradient_of_the_bounds():
    key = jax.random.key(6)
    block = lambda bounds: block_uniform(key, (9,), (3,), (4,), "float32", *bounds).sum()
    full = lambda bounds: jax.random.uniform(key, (9,), "float32", *bounds)[3:7].sum()
    np.testing.assert_array_equal(
        jax.grad(block)(jnp.array([-1.0, 2.0])), jax.grad(full)(jnp.array([-1.0, 2.0]))
    )


@pytest.mark.parametrize(
    "shape, starts",
    [
        ((2**20, 2**20), (2**19 + 3, 7)),
        ((2**18 + 1, 3, 2**16 - 1), (2**18 - 2, 0, 2**16 - 3)),
        ((2, 2**31 + 5), (0, 2**31 - 2)),  # the second row lies beyond 2^32
        ((3, 2**32 + 9), (1, 2**32 - 2)),  # one dim alone exceeds 32 bits
        ((2**40,), (2**32 - 2,)),
    ],
    ids=str,
)
def test_more_elements_than_32_bits_count(shape, starts):
    """Too large to draw completely: the oracle hashes the 64-bit index, computed with Python integers."""
    key, sizes = jax.random.key(7), tuple(min(4, size) for size in shape)
    expected = np.zeros(sizes, np.uint32)
    for position in np.ndindex(*sizes):
        index = 0
        for start, offset, size in zip(starts, position, shape, strict=True):
            index = index * size + start + offset
        high, low = threefry_2x32(
            jax.random.key_data(key), jnp.array([index >> 32, index & 0xFFFFFFFF], jnp.uint32)
        )
        expected[position] = high ^ low
    assert_same_bits(block_bits(key, shape, starts, sizes), expected)
    if max(starts) < 2**31:  # as traced numbers too
        draw = jax.jit(lambda starts: block_bits(key, shape, starts, sizes))
        assert_same_bits(draw(starts), expected)


def test_traced_start_of_64_bits():
    key = jax.random.key(8)
    with jax.enable_x64(True):
        traced = jax.jit(lambda start: block_bits(key, (2**40,), (start,), (4,)))(jnp.int64(2**32 + 5))
    assert_same_bits(traced, block_bits(key, (2**40,), (2**32 + 5,), (4,)))


def test_refusals():
    with pytest.raises(TensorTypeError, match="only threefry draws are layout-invariant"):
        block_bits(jax.random.key(0, impl="rbg"), (4,), (0,), (2,))
    with pytest.raises(TensorTypeError, match="takes a single key"):
        block_bits(jax.random.split(jax.random.key(0), 3), (4,), (0,), (2,))
    with pytest.raises(TensorTypeError, match="the dtype of the draw is int32, and must be floating"):
        block_normal(jax.random.key(0), (4,), (0,), (2,), "int32")
    with pytest.warns(UserWarning, match="float64.*truncated"):
        assert block_normal(jax.random.key(0), (4,), (0,), (2,), "float64").dtype == "float32"


def test_threefry_works_in_one_dimension():
    """XLA took 6 s to compile its loop for an array of five dimensions, and takes 0.5 s for one."""
    shape = (3, 3, 3, 8, 16)
    jaxpr = jax.make_jaxpr(lambda key: block_bits(key, shape, (0,) * 5, shape))(jax.random.key(0))
    (equation,) = [e for e in jaxpr.eqns if e.primitive.name == "threefry2x32"]
    assert [v.aval.shape for v in equation.outvars] == [(3456,), (3456,)]
