"""Every public function that takes dims takes them in every spelling: `"a b"`, `"a=2, b=3"`, names, Dims."""

import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import weft as wf
from weft import nn, optim
from weft.core.dims import as_dims, list_dims, select_dims
from weft.core.errors import DimError

BATCH, LENGTH, VOCAB = wf.dims("batch=6 length=4 vocab=3")
X = wf.tensor(np.linspace(-2.0, 3.0, 24, dtype=np.float32).reshape(6, 4), [BATCH, LENGTH])
IDS = wf.tensor(np.array([2, 0, 1, 2], np.int32), [LENGTH])
TABLE = wf.tensor(np.arange(15.0, dtype=np.float32).reshape(3, 5), "vocab=3 d=5")
KERNEL = wf.tensor(np.arange(6.0, dtype=np.float32).reshape(3, 2), "tap=3 out=2")
MATRIX = wf.tensor(np.diag(np.arange(1.0, 5.0, dtype=np.float32)), "length=4 column=4")
LAYERS = wf.tensor(np.array([1.0, 2.0, 3.0], np.float32), "layers=3")
KEY = jax.random.key(0)


ALL = {dim.name: dim for t in (X, TABLE, KERNEL, MATRIX, LAYERS) for dim in t.dims}


class Spelling:
    """A way to write dims: `have`, those of a tensor, whose sizes are known, and `new` ones."""

    def __init__(self, have, new):
        self.spell_have, self.spell_new, self.selects = have, new, False

    def have(self, names):
        self.selects = True
        return self.spell_have([ALL[name] for name in names.split()])

    def have_one(self, name):
        return self._one(self.have(name))

    def new(self, text):
        return self.spell_new(wf.dims(text))

    def new_one(self, text):
        return self._one(self.new(text))

    def _one(self, dims):
        return dims if isinstance(dims, str) else dims[0]


def names(dims):
    return [dim.name for dim in dims]


def texts(dims):
    return [str(dim) for dim in dims]


SPELLINGS = {
    "dims": (list, tuple),
    "names": (lambda ds: " ".join(names(ds)), lambda ds: " ".join(texts(ds))),
    "sizes": (lambda ds: " ".join(texts(ds)), lambda ds: ", ".join(texts(ds))),
    "commas": (lambda ds: ", ".join(names(ds)), lambda ds: "; ".join(texts(ds))),
    "list of names": (names, texts),
    "mixed": (lambda ds: (*ds[:1], *texts(ds[1:])), lambda ds: [*texts(ds[:1]), *ds[1:]]),
}


def misspelt(dims):
    """The last name with two letters exchanged, as in lenght."""
    *others, last = names(dims)
    return " ".join([*others, f"{last[:-2]}{last[-1]}{last[-2]}"])


def over_several(fn):
    return lambda s: fn(X, s.have("length batch"))


def along_one(fn):
    return lambda s: fn(X, s.have_one("length"))


def of_matrix(fn, *between):
    """A function of `MATRIX`, perhaps of others, and of its two dims."""
    return lambda s: fn(MATRIX, *between, s.have_one("length"), s.have_one("column"))


def factors(fn):
    return lambda s: fn(MATRIX, s.have_one("length"), s.have_one("column"), s.new_one("k=4"))


def drawn(fn, *args):
    return lambda s: fn(KEY, s.new("m=2 n=3"), *args)


SEVERAL = "sum mean max min prod any all var std median logsumexp softmax log_softmax"
ONE = "argmax argmin sort argsort cumsum cumprod diff flip unstack"
FOURIER = "fft fft2 fftn ifft ifft2 ifftn rfft rfft2 rfftn irfft irfft2 irfftn"
DRAWS = "bits uniform normal gumbel truncated_normal bernoulli"
# From a spelling to the result of a call.
CALLS = {
    **{name: over_several(getattr(wf, name)) for name in SEVERAL.split()},
    **{name: along_one(getattr(wf, name)) for name in ONE.split()},
    **{name: drawn(getattr(wf.random, name)) for name in DRAWS.split()},
    "randint": drawn(wf.random.randint, 0, 9),
    "zeros": lambda s: wf.zeros(s.new("m=2 n=3")),
    "ones": lambda s: wf.ones(s.new("m=2 n=3")),
    "full": lambda s: wf.full(s.new("m=2 n=3"), 7),
    "spec": lambda s: wf.spec(s.new("m=2 n=3")),
    "tensor": lambda s: wf.tensor(np.ones((2, 3)), s.new("m=2 n=3")),
    "from_callback": lambda s: wf.from_callback(lambda i: np.ones((2, 3))[i], s.new("m=2 n=3"), "", ""),
    "numpy": lambda s: X.numpy(s.have("length batch")),
    "arange": lambda s: wf.arange(s.new_one("m=3")),
    "eye": lambda s: wf.eye(s.new_one("m=3"), s.new_one("n=2")),
    "linspace": lambda s: wf.linspace(0.0, 1.0, s.new_one("m=3")),
    "einsum": lambda s: wf.einsum(X, IDS, out=s.have("length batch")),
    "einsum reduce": lambda s: wf.einsum(X, IDS, reduce=s.have("batch length")),
    "transpose": lambda s: wf.transpose(X, s.have("length batch")),
    "broadcast_to": lambda s: wf.broadcast_to(X, [*list_dims(s.new("n=2")), *list_dims(s.have("length batch"))]),
    "reshape": lambda s: wf.reshape(X, s.new("m=3 n=8")),
    "split": lambda s: wf.split(X, s.have_one("batch"), s.new("m=3 n=2")),
    "unflatten": lambda s: wf.unflatten(X, s.have_one("batch"), s.new("m=3 n=2")),
    "merge": lambda s: wf.merge(X, s.have("length batch"), s.new_one("m=24")),
    "flatten": lambda s: wf.flatten(X, s.have("length batch"), s.new_one("m=24")),
    "rename": lambda s: wf.rename(X, {"batch": s.new_one("rows=6")}),
    "stack": lambda s: wf.stack([X, X], s.new_one("m=2")),
    "concat": lambda s: wf.concat([X, X], s.new_one("length=8")),
    "pad": lambda s: wf.pad(X, s.have_one("length"), 1, 2),
    "shift": lambda s: wf.shift(X, s.have_one("length"), 1),
    "roll": lambda s: wf.roll(X, s.have_one("length"), 1),
    "slice": lambda s: wf.slice(X, s.have_one("length"), 1, s.new_one("part=2")),
    "update": lambda s: wf.update(X, s.have_one("length"), 1, 0.0),
    "index": lambda s: X[s.have_one("length"), 1],
    "take": lambda s: wf.take(TABLE, IDS, s.have_one("vocab")),
    "scatter_add": lambda s: wf.scatter_add(TABLE, IDS, 1.0, s.have_one("vocab")),
    "one_hot": lambda s: wf.one_hot(IDS, s.new_one("vocab=3")),
    "top_k": lambda s: wf.top_k(X, s.have_one("length"), s.new_one("best=2")),
    "approx_max_k": lambda s: wf.approx_max_k(X, s.have_one("length"), s.new_one("best=2")),
    "quantile": lambda s: wf.quantile(X, 0.3, s.have("batch length")),
    "searchsorted": lambda s: wf.searchsorted(X.sort("length"), 0.5, s.have_one("length")),
    "tril": lambda s: wf.tril(X, s.have_one("batch"), s.have_one("length")),
    "triu": lambda s: wf.triu(X, s.have_one("length"), s.have_one("batch")),
    **{name: of_matrix(getattr(wf.linalg, name)) for name in "cholesky inv det slogdet".split()},
    **{name: of_matrix(getattr(wf.linalg, name), IDS) for name in "solve triangular_solve".split()},
    **{name: factors(getattr(wf.linalg, name)) for name in "eigh qr svd".split()},
    "norm": over_several(wf.linalg.norm),
    **{name: over_several(getattr(wf.fft, name)) for name in FOURIER.split()},
    "fftfreq": lambda s: wf.fft.fftfreq(s.new_one("time=5"), 0.5),
    "rfftfreq": lambda s: wf.fft.rfftfreq(s.new_one("time=5"), 0.5),
    "conv": lambda s: wf.conv(X, KERNEL, {s.have_one("length"): s.have_one("tap")}, s.have("out batch length")),
    "max_pool": lambda s: wf.max_pool(X, {s.have_one("length"): 2}, stride={s.have_one("length"): 1}),
    "avg_pool": lambda s: wf.avg_pool(X, {s.have_one("length"): 2}),
    "windows": lambda s: wf.windows(X, s.have_one("length"), s.new_one("k=2")),
    "local": lambda s: wf.local(jnp.exp, X, out=s.have("batch length"), splittable=s.have("batch")),
    "local, new dims": lambda s: wf.local(lambda a: a.reshape(6, 2, 2), X, out=s.new("batch=6 m=2 n=2")),
    "local, two results": lambda s: wf.local(lambda a: (a, a.T), X, out=[list_dims(s.have("batch length")), list_dims(s.have("length batch"))]),
    "map": lambda s: wf.map(lambda x: x.sum(), X, s.have_one("batch")),
    "associative_scan": lambda s: wf.associative_scan(wf.add, X, s.have_one("batch")),
    "vmap": lambda s: wf.vmap(lambda x: x.sum(), s.have_one("batch"))(X),
    "scan": lambda s: wf.scan(lambda c, x: (c + x.sum(), x), 0.0, X, s.have_one("batch")),
    "scan without tensors": lambda s: wf.scan(lambda c, _: (c + 1.0, None), 0.0, None, s.new_one("step=3")),
    "pipeline": lambda s: wf.pipeline(lambda x, w: x * w, X, LAYERS, s.have_one("layers"), batch=s.have_one("batch")),
    "search": lambda s: str(wf.search(lambda x: wf.exp(x), (X,), devices=2, hardware="h100", dims=s.have("batch length")).best.layout),
    "categorical": lambda s: wf.random.categorical(KEY, X, s.have_one("length")),
    "Linear": lambda s: nn.parameters(nn.Linear(s.new("m=2 n=3"), s.new("o=4"), bias=True)),
    "Linear, call": lambda s: nn.init(nn.Linear("length=4", "d=5"), KEY)(X, out=["d", *list_dims(s.have("batch"))]),
    "Embedding": lambda s: nn.parameters(nn.Embedding(s.new_one("vocab=3"), s.new_one("d=4"))),
    "RMSNorm": lambda s: nn.parameters(nn.RMSNorm(s.new_one("d=4"))),
    "LayerNorm": lambda s: nn.parameters(nn.LayerNorm(s.new_one("d=4"))),
    "FeedForward": lambda s: nn.parameters(nn.FeedForward(s.new_one("d=4"), s.new_one("d_ff=8"))),
    "Attention": lambda s: nn.parameters(nn.Attention(s.new_one("d=4"), s.new_one("heads=2"), s.new_one("d_kv=2"), s.new_one("kv=1"))),
    "LSHAttention": lambda s: nn.parameters(nn.LSHAttention(s.new_one("d=4"), s.new_one("heads=2"), s.new_one("d_kv=2"))),
    "MixtureOfExperts": lambda s: nn.parameters(nn.MixtureOfExperts(s.new_one("d=4"), s.new_one("d_ff=8"), s.new_one("experts=2"), group=s.new_one("batch=2"))),
    "LearnedPositions": lambda s: nn.parameters(nn.LearnedPositions(9, s.new_one("d=4"))),
    "RelativePositions": lambda s: nn.parameters(nn.RelativePositions(s.new("kv=2 heads=2"), True)),
    "declare": lambda s: nn.declare(s.new("m=2 n=3"), nn.zeros),
    "fan_in": lambda s: nn.fan_in(s.new("m=2 n=3")),
    "nn.stack": lambda s: nn.parameters(nn.stack(nn.Linear("m=2", "n=3"), s.new_one("layers=2"))),
    "causal": lambda s: nn.causal(s.new_one("length=4"), s.new_one("memory=4")),
    "prefix": lambda s: nn.prefix(s.new_one("memory=4"), IDS),
    "window": lambda s: nn.window(s.new_one("length=4"), s.new_one("memory=4"), 2),
    "sinusoid": lambda s: nn.sinusoid(IDS, s.new_one("d=4")),
    "rotary": lambda s: nn.rotary(X, wf.arange("batch=6"), s.have_one("length")),
    "cross_entropy": lambda s: nn.cross_entropy(X.rename(length="vocab2"), wf.arange("batch=6") % 4, s.new_one("vocab2=4")),
    "chunked": lambda s: wf.spmd(lambda x: nn.chunked(wf.exp, x, s.have_one("length"), 2))(X),
    "reversible": lambda s: nn.reversible(lambda w, _: [lambda x: x * w], X, X, LAYERS, s.have_one("layers")),
    "stacked_dims": lambda s: optim.AdamW(1e-3, stacked_dims=s.new("layers=1 experts=1")).stacked_dims,
}  # fmt: skip
FUNCTIONS = {"Tensor.numpy": "numpy", "Linear.__call__": "Linear, call"}


def plain(leaf):
    """A leaf of a result in a form that can be compared."""
    has_values = isinstance(leaf, wf.Tensor) and not isinstance(leaf.array, jax.ShapeDtypeStruct)
    return (str(leaf.dims), str(leaf.dtype), leaf.numpy().tolist()) if has_values else str(leaf)


@pytest.mark.parametrize("name", CALLS)
def test_every_spelling_means_the_same(name):
    results = {key: wf.tree_map(plain, CALLS[name](Spelling(*row))) for key, row in SPELLINGS.items()}
    for spelling, result in results.items():
        assert result == results["dims"], spelling


@pytest.mark.parametrize("name", CALLS)
def test_a_misspelt_name_is_reported_with_the_nearest(name):
    spelling = Spelling(misspelt, tuple)
    try:
        CALLS[name](spelling)
    except DimError as error:
        assert re.search(r"\(did you mean \w+\?\)", error.fact), error
        assert "test_dims.py" in error.where
    else:
        assert not spelling.selects


def public():
    """The public functions, and the methods of public classes, that have a parameter for dims."""
    for module in (wf, wf.random, wf.linalg, wf.fft, nn):
        for name in dir(module):
            value = getattr(module, name)
            if name.startswith("_") or not getattr(value, "__module__", "").startswith("weft."):
                continue
            members = vars(value).items() if inspect.isclass(value) else [("", value)]
            for member, fn in members:
                is_shown = not member.startswith("_") or member in ("__init__", "__call__")
                if is_shown and callable(fn) and not isinstance(fn, type):
                    annotations = [str(p.annotation) for p in inspect.signature(fn).parameters.values()]
                    if any(re.search(r"\bDims?Like\b", one) for one in annotations):
                        yield f"{name}.{member}".removesuffix(".__init__").removesuffix(".")


@pytest.mark.parametrize("name", sorted({*public()}))
def test_every_function_that_takes_dims_is_in_the_table(name):
    assert FUNCTIONS.get(name, name) in CALLS


@pytest.mark.parametrize("out", ["vocab batch", "vocab=3, batch", ["vocab", BATCH], (VOCAB, BATCH)])
def test_labels_do_not_depend_on_the_spelling(out):
    program = wf.spmd(lambda x, w: wf.einsum(x, w, out=out), "model=2", "length:model")
    (collective,) = program.collectives(X, wf.spec([LENGTH, VOCAB]))
    assert collective.op == "einsum[batch,length · length,vocab → vocab,batch]"


def test_known_names_and_new_dims():
    assert as_dims("n=2 batch, length=9", X.dims) == (wf.Dim("n", 2), BATCH, wf.Dim("length", 9))
    assert wf.broadcast_to(X, "n=2 length batch").dims == wf.dims("n=2 length=4 batch=6")
    assert wf.reshape(X, "batch m=2 n=2").dims == wf.dims("batch=6 m=2 n=2")
    assert wf.sum(X, "").dims == X.dims
    assert wf.einsum(X, out="").dims == ()


@pytest.mark.parametrize("name", ["sum", "mean", "var", "std", "max", "softmax", "logsumexp"])
def test_an_iterator_is_read_once(name):
    program = wf.spmd(lambda x: getattr(wf, name)(x, iter(["batch"])))
    np.testing.assert_allclose(program(X).numpy(), getattr(wf, name)(X, "batch").numpy(), rtol=1e-6)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("batch=5", "dim batch has size 5 here and 6"),
        ("batch length batch", "dim batch occurs twice"),
        ("batch-size", "can't parse the dim at character 6"),
        ("batch size", "there is no dim size"),
    ],
)
def test_sizes_and_syntax_are_checked(wanted, message):
    with pytest.raises(DimError, match=message):
        select_dims(X.dims, wanted)


@pytest.mark.parametrize("call", [wf.argmax, wf.sort, wf.flip], ids=lambda call: call.__name__)
@pytest.mark.parametrize("given", ["batch length", ["batch", "length"], ""])
def test_one_dim_is_needed(call, given):
    with pytest.raises(DimError, match="dims were given, and one is needed"):
        call(X, given)
