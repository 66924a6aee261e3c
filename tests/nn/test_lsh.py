"""LSH attention against slow oracles, under layouts, and by its plan."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import assert_same

import weft as wf
from weft import nn
from weft.models import Batch, Config, Transformer
from weft.nn.lsh import default_buckets
from weft.nn.module import map_parameters

MESH = wf.Mesh("data=2 model=2 seq=2")
TOLERANCE = {"rtol": 1e-9, "atol": 1e-11}  # in float64
D_MODEL, HEADS, D_KV = wf.dims("d_model=6 heads=3 d_kv=4")


@pytest.fixture(autouse=True)
def _double():
    """In 64 bits no layout rounds a hash into another bucket."""
    with jax.enable_x64(True):
        yield


def module(**options):
    draw = np.random.default_rng(0).normal
    declared = nn.LSHAttention(D_MODEL, HEADS, D_KV, **options)
    return map_parameters(lambda p: wf.tensor(0.5 * draw(size=[d.size for d in p.dims]), p.dims), declared)


def inputs(length, batch=2):
    x = np.random.default_rng(length).normal(size=(batch, length, D_MODEL.size))
    return wf.tensor(x, [wf.Dim("batch", batch), wf.Dim("length", length), D_MODEL])


def packed(length):
    """Rows of several examples, with different boundaries, and positions that start at 0 in each example."""
    cuts = np.array([[2, 7], [5, 6]])
    segments = (np.arange(length) >= cuts[..., None]).sum(1)
    starts = np.where(segments == 0, 0, np.take_along_axis(cuts, np.maximum(segments - 1, 0), 1))
    dims = wf.dims(f"batch=2 length={length}")
    return [wf.tensor(a.astype(np.int32), dims) for a in (np.arange(length) - starts, segments)]


# The oracle


def hashes(q, rounds, factors, key):
    """`argmax([qR; -qR])` for [batch, heads, length, d_kv]: the bucket in each round."""
    bucket, count = np.zeros((rounds, *q.shape[:-1]), int), 1
    for n, factor in enumerate(factors):
        if factor == 1:
            continue
        shape = (rounds, q.shape[1], q.shape[-1], factor // 2)
        r = np.asarray(jax.random.normal(jax.random.fold_in(key, n), shape, jnp.float32), np.float64)
        turned = np.einsum("bhld,rhdn->rbhln", q, r)
        bucket += count * np.concatenate([turned, -turned], -1).argmax(-1)
        count *= factor
    return bucket


def allowed(buckets, positions, segments, chunk, causal):
    """Which keys each query sees, query by query: in any round, and never itself unless there is no other."""
    rounds, batch, heads, length = buckets.shape
    chunk = min(chunk, length)
    chunks = -(-length // chunk)
    seen = np.zeros((batch, heads, length, length), bool)
    for r, b, h in np.ndindex(rounds, batch, heads):
        bucket = buckets[r, b, h]
        order = sorted(range(length), key=lambda i: (bucket[i], i))
        part = {i: n // chunk for n, i in enumerate(order)}
        for i in range(length):
            near = {part[i], (part[i] - 1) % chunks}
            for j in range(length):
                seen[b, h, i, j] |= (
                    bucket[i] == bucket[j]
                    and part[j] in near
                    and (not causal or positions[b, j] <= positions[b, i])
                    and segments[b, i] == segments[b, j]
                )
    own = np.eye(length, dtype=bool)
    others = seen & ~own
    return np.where(others.any(-1, keepdims=True), others, own)


def maps(weights, x):
    q = jnp.einsum("bld,dhk->bhlk", x, weights["query.weight"])
    return q, jnp.einsum("bld,dhk->bhlk", x, weights["value.weight"])


def attend(weights, x, mask):
    """The softmax over the allowed keys. A key that occurs in several rounds counts once, because of log N."""
    q, v = maps(weights, x)
    scores = jnp.einsum("bhik,bhjk->bhij", q, q / jnp.linalg.norm(q, axis=-1, keepdims=True))
    shares = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), -1)
    return jnp.einsum("bhij,bhjk,hkd->bid", shares, v, weights["out.weight"])


@jax.jit
def plain(weights, x, mask):
    def loss(weights, x):
        y = attend(weights, x, mask)
        return jnp.sum(jnp.sin(y)), y

    return jax.grad(loss, argnums=(0, 1), has_aux=True)(weights, x)


def check(m, x, factors, *, segments=False, causal=True, key=None, layout=""):
    """Values and gradients (of x and parameters) of the module and of the oracle; the mask is returned."""
    length = x.dims[1]
    positions, parts = packed(length.size) if segments else (wf.arange(length), None)

    def loss(m, x):
        y = m(x, positions, parts, causal=causal, key=key)
        return wf.sum(wf.sin(y)), y

    run = wf.grad(loss, argnums=(0, 1), has_aux=True)
    (m_grad, x_grad), y = wf.spmd(run, MESH, wf.Layout(layout))(m, x)

    weights = {name: p.array for name, p in nn.parameters(m).items()}
    q, _ = maps(weights, x.array)
    key = jax.random.key(0) if key is None else key
    buckets = hashes(np.asarray(q), m.rounds.size, factors, key)
    shape = x.array.shape[:2]
    numbers, cuts = (
        np.zeros(shape, int) if t is None else np.broadcast_to(t.array, shape) for t in (positions, parts)
    )
    mask = allowed(buckets, numbers, cuts, m.chunk, causal)

    (w_want, x_want), want = plain(weights, x.array, mask)
    assert want.dtype == jnp.float64
    assert_same((y, x_grad, dict(nn.parameters(m_grad))), (want, x_want, w_want), **TOLERANCE)
    return mask


@pytest.mark.parametrize("chunk, rounds, segments", [(9, 1, False), (16, 2, True), (5, 2, False)])
def test_one_bucket_is_full_attention(chunk, rounds, segments):
    """With one chunk; and with two, where the first also attends to the last, and each key occurs in each round."""
    m = module(chunk=chunk, rounds=rounds, buckets=1)
    mask = check(m, inputs(9), [1], segments=segments)
    example = packed(9)[1].numpy() if segments else np.zeros((2, 9))
    others = np.tril(example[:, :, None] == example[:, None, :], -1)
    full = np.where(others.any(-1, keepdims=True), others, np.eye(9, dtype=bool))
    assert (mask == full[:, None]).all()


@pytest.mark.parametrize(
    "length, chunk, rounds, buckets, factors, segments, key",
    [
        (13, 4, 3, (2, 4), [2, 4], True, jax.random.key(5)),
        (12, 3, 2, None, [8], False, None),
    ],
    ids=["factors", "default"],
)
def test_hashed(length, chunk, rounds, buckets, factors, segments, key):
    m = module(chunk=chunk, rounds=rounds, buckets=buckets)
    mask = check(m, inputs(length), factors, segments=segments, causal=segments, key=key)
    assert mask.sum() < mask[0, 0].size * 2 * HEADS.size / 2, "this is not full attention"


@pytest.mark.parametrize(
    "layout",
    [
        "batch:data heads:model",
        "length:seq d_model:model",
        "batch:data length:seq chunks:seq",
        "length:seq rounds:seq heads:model d_kv:data",
    ],
)
def test_layouts(layout):
    m = module(chunk=4, rounds=3, buckets=4)
    check(m, inputs(13), [4], segments=True, key=jax.random.key(3), layout=layout)


def test_what_travels():
    """By heads and batch nothing moves but the last sum."""
    mesh = wf.Mesh("data=2 model=2")
    program = wf.spmd(lambda m, x: m(x, wf.arange(x.dims[1])), mesh, wf.Layout("batch:data heads:model"))
    found = program.plan(nn.specs(nn.LSHAttention(D_MODEL, HEADS, D_KV, chunk=4)), inputs(16)).collectives
    assert [(c.kind, c.axes) for c in found] == [("all-reduce", ("model",))]


def test_work_grows_with_length():
    def flops(length):
        m = nn.specs(nn.LSHAttention(D_MODEL, HEADS, D_KV, chunk=4))
        program = wf.spmd(lambda m, x: m(x, wf.arange(x.dims[1])), wf.Mesh("data=1"), wf.Layout(""))
        return program.plan(m, inputs(length)).flops

    assert flops(512) < 2.3 * flops(256)


def test_default_buckets():
    for length in (5, 64, 65, 1000, 8192, 65_536, 1_000_000):
        factors = default_buckets(length, 64)
        assert factors == (1,) or (all(f % 2 == 0 and f <= 256 for f in factors))
        if length > 64:
            assert 0.8 < np.prod(factors) / (2 * length / 64) < 1.25
    assert default_buckets(64, 64) == (1,)


def run(m, x, layout="", **options):
    program = wf.spmd(lambda m, x: m(x, wf.arange(x.dims[1]), **options), MESH, wf.Layout(layout))
    return program(m, x)


@pytest.mark.slow
def test_dropout():
    m, x = module(chunk=4, rounds=1, buckets=2), inputs(13)

    def drop(weights):
        assert weights.dims[-1] == wf.Dim("near", 8)
        return wf.dropout(weights, 0.5, jax.random.key(7))

    full, dropped = run(m, x), run(m, x, dropout=drop)
    assert_same(run(m, x, dropout=lambda weights: weights * 0.5), full.numpy() * 0.5, **TOLERANCE)
    assert not np.isclose(dropped.numpy(), full.numpy()).all((1, 2)).any()
    split = run(m, x, "batch:data heads:model length:seq chunks:seq", dropout=drop)
    assert full.dtype == split.dtype == jnp.float64
    assert_same(split, dropped, **TOLERANCE)


def test_nothing_to_see():
    """Queries of zero, and padding, give no NaN; in half precision neither."""
    m = nn.cast(module(chunk=4, rounds=2, buckets=2), jnp.bfloat16)
    x = inputs(13).astype(jnp.bfloat16) * 0

    def loss(m, x):
        return wf.sum(m(x, wf.arange(x.dims[1])).astype(jnp.float32))

    y, grads = wf.spmd(wf.value_and_grad(loss), MESH, wf.Layout(""))(m, x)
    assert y.numpy() == 0
    assert all(np.isfinite(g.numpy().astype(np.float32)).all() for g in nn.parameters(grads).values())


@pytest.mark.parametrize(
    "options", [{"chunk": 0}, {"rounds": 0}, {"buckets": 7}, {"chunk": -1, "rounds": 0, "buckets": (4, 3)}]
)
def test_errors(options):
    with pytest.raises(wf.ShapeError) as caught:
        nn.LSHAttention(D_MODEL, HEADS, D_KV, **options)
    message = str(caught.value)
    for part in ("buckets come in pairs", "in LSHAttention(chunk=", "at ", "hint: LSHAttention(…"):
        assert part in message
    facts = {"chunk": "a chunk has", "rounds": "there are 0 rounds", "buckets": "a hash has"}
    first = message.splitlines()[0]
    assert all((fact in first) == (name in options) for name, fact in facts.items())


# In the Transformer

SMALL = Config(
    vocab=11, d_model=8, d_ff=8, heads=3, d_kv=4, layers=2, longest=16, attention="lsh", lsh_chunk=4
)


def tokens(length=13):
    numbers = np.random.default_rng(1).integers(0, 11, (2, length)).astype(np.int32)
    return wf.tensor(numbers, [wf.Dim("batch", 2), wf.Dim("length", length)])


def logits(model, tokens, layout="", segments=None):
    def program(model, tokens, key):
        return model.logits(Batch(tokens, segments=segments), key)

    return wf.spmd(program, MESH, wf.Layout(layout))(model, tokens, jax.random.key(2)).numpy()


@pytest.mark.slow
def test_decoder():
    model = nn.init(Transformer(SMALL.replace(compute="float64")), jax.random.key(0))
    names = nn.parameters(model.decoder.blocks.attention)
    assert sorted(names) == ["out.weight", "query.weight", "value.weight"]
    given = model, tokens()
    segments = packed(13)[1]
    split = logits(*given, "batch:data heads:model d_ff:model length:seq", segments)
    np.testing.assert_allclose(split, logits(*given, "", segments), rtol=1e-5, atol=1e-5)


def test_a_decoder_attends_only_to_earlier_positions():
    """Exactly with one chunk only: with several, the assignment to chunks depends on all positions."""
    model = nn.init(Transformer(SMALL.replace(lsh_chunk=16)), jax.random.key(0))
    one, other = tokens(), wf.where(wf.arange(wf.Dim("length", 13)) < 6, tokens(), 3)
    before, after = (logits(model, t) for t in (one, other))
    np.testing.assert_array_equal(before[:, :6], after[:, :6])
    assert not np.isclose(before[:, 6:], after[:, 6:]).all((1, 2)).any()


def test_encoder_stays_full():
    model = Transformer(SMALL.replace(kind="encoder_decoder"))
    assert isinstance(model.encoder.blocks.attention, nn.Attention)
    assert isinstance(model.decoder.blocks.attention, nn.LSHAttention)
    assert isinstance(model.decoder.blocks.memory_attention, nn.Attention)


def test_what_does_not_go_together():
    with pytest.raises(wf.ProgramError, match='positions="rotary" and kv_heads=1') as caught:
        Transformer(SMALL.replace(positions="rotary", kv_heads=1))
    assert "at " in str(caught.value) and "hint: " in str(caught.value)
    model = nn.specs(Transformer(SMALL))
    with pytest.raises(wf.ProgramError, match="prefix"):
        batch = Batch(tokens(), prefix=wf.tensor(np.array([1, 2], np.int32), "batch=2"))
        wf.spmd(lambda model: model.logits(batch), MESH, wf.Layout("")).plan(model)
