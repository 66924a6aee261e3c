"""Every relayout gives the right values and gradients: renames and reshapes between all layouts.

Layouts refer to dims by name. So one program contains dozens of relayouts, each of another tensor with other dims and
rules, and one compilation checks them all. `make test` runs a seeded sample, `make soak` all of them.
"""

import itertools
import math
import random
from collections import Counter
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import assert_same_on_mesh, assert_zero_padding, cosines
from hlo import collective_bytes

import weft as wf
from weft.core.errors import LayoutError

PHASES = ("forward", "backward")
MESHES = ["x=2", "x=2 y=2", "x=2 y=4", "x=2 y=2 z=2"]
PROGRAM = 40  # relayouts in one program
CHUNK = 200  # relayouts in one test of the soak


@dataclass(frozen=True)
class Case:
    """A tensor split as `old` that becomes one split as `new`; `summed` are axes of a pending sum.

    `split` makes two dims of the last of two, `merge` one dim of the last and the first of three: one
    dim stays what it is.
    """

    way: str
    sizes: tuple
    old: tuple
    new_sizes: tuple
    new: tuple
    summed: tuple = ()

    def dims(self, n):
        """Its dims before and after, named for the n-th case of a program."""
        old = [wf.Dim(f"{c}{n}", s) for c, s in zip("abc", self.sizes, strict=False)]
        new = [wf.Dim(f"{c}{n}", s) for c, s in zip("pqr", self.new_sizes, strict=False)]
        if self.way in ("split", "merge"):
            new[0] = old[0 if self.way == "split" else 1]
        return old, new

    def rules(self, n):
        old, new = self.dims(n)
        rules = {d.name: axes for d, axes in zip(old + new, self.old + self.new, strict=True)}
        return {name: axes for name, axes in (rules | {f"k{n}": self.summed}).items() if axes}

    def apply(self, x, n):
        old, new = self.dims(n)
        if self.summed:
            x = wf.sum(x, f"k{n}")
        if self.way == "rename":
            return x.rename(**{a.name: b.name for a, b in zip(old, new, strict=True)})
        if self.way == "reshape":
            return wf.reshape(x, new)
        if self.way == "split":
            return wf.split(x, old[-1], new[1:])
        assert self.way == "merge"
        return wf.merge(x, [old[-1], old[0]], new[-1])

    def oracle(self, x):
        x = x.sum(0) if self.summed else x
        if self.way == "merge":
            x = x.transpose([*range(1, x.ndim), 0])
        return x.reshape(self.new_sizes)

    def pulled(self, cotangent):
        """The gradient with respect to the tensor (of each of the parts that were summed)."""
        if self.way == "merge":
            turned = (*self.sizes[1:], self.sizes[0])
            cotangent = cotangent.reshape(turned)
            cotangent = cotangent.transpose([len(turned) - 1, *range(len(turned) - 1)])
        return cotangent.reshape(self.sizes)


def placements(axes, rank):
    """All ways of splitting `rank` dims over some of the axes, in any order of axes."""
    found = []
    for count in range(len(axes) + 1):
        for order in itertools.permutations(axes, count):
            for cuts in itertools.combinations_with_replacement(range(count + 1), rank - 1):
                ends = (0, *cuts, count)
                found.append(tuple(order[a:b] for a, b in itertools.pairwise(ends)))
    return found


# Sizes: 8 divides everywhere; 7 is uneven, yet its blocks nest over 2, 4 and 8 devices; those of 12
# nest up to 4; those of 5, 6 and 9 do not.
RENAMES = [(8,), (12,), (5,), (9,), (8, 8), (12, 5), (6, 9), (8, 8, 8), (5, 12, 7)]
PENDING = [(8,), (5,), (12, 5), (8, 6)]
RESHAPES = [
    ("reshape", (24,), (4, 6)),
    ("reshape", (15,), (3, 5)),
    ("reshape", (9,), (1, 9)),
    ("reshape", (6, 4), (24,)),
    ("reshape", (5, 3), (15,)),
    ("reshape", (2, 12), (8, 3)),
    ("reshape", (3, 8), (4, 6)),
    ("reshape", (7, 1), (1, 7)),
    ("reshape", (24,), (2, 3, 4)),
    ("reshape", (2, 3, 4), (24,)),
    ("reshape", (4, 6, 5), (8, 3, 5)),
    ("reshape", (4, 4), (2, 8)),
    ("reshape", (8, 8), (4, 16)),
    ("reshape", (4, 12, 5), (16, 3, 5)),
    ("split", (5, 8), (5, 4, 2)),
    ("merge", (4, 5, 2), (5, 8)),
]
FAMILIES = {f"rename {s}": ("rename", s, s) for s in RENAMES}
FAMILIES |= {f"pending {s}": ("pending", s, s) for s in PENDING}
FAMILIES |= {f"{way} {a} to {b}": (way, a, b) for way, a, b in RESHAPES}


def cases(family, mesh):
    way, sizes, new_sizes = FAMILIES[family]
    axes = [name for name, _ in wf.Mesh(mesh).axes]
    ends = placements(axes, len(new_sizes))
    if way != "pending":
        starts = placements(axes, len(sizes))
        every = [Case(way, sizes, a, new_sizes, b) for a in starts for b in ends]
        stays = {"split": 0, "merge": 1}.get(way)
        return [c for c in every if stays is None or c.new[0] == c.old[stays]]
    starts = placements(axes, len(sizes) + 1)
    starts = [s for s in starts if s[0] and list(s[0]) == sorted(s[0])]
    return [Case("rename", sizes, a[1:], sizes, b, a[0]) for a in starts for b in ends]


def numbers(shape, seed):
    return np.random.default_rng(seed).permutation(math.prod(shape)).reshape(shape) + 1.0


def check_elements(t, want, what):
    """The stored elements are the expected ones, and the padding is zero."""
    stored = np.asarray(t.storage)[tuple(slice(d.size) for d in t.dims)]
    assert np.array_equal(stored, want), f"{what} of {t.dims}: {stored}, not {want}"
    assert_zero_padding(t, f"{what} of {t.dims}")


def check(mesh, some, used):
    """Run several relayouts in one program. `used`: whether a product consumes the results, or the program returns them."""
    # One replicated input for each shape; a change of sign reshards it to the initial layout of the relayout.
    shapes = {(3, *c.sizes) if c.summed else c.sizes for c in some}
    values = {shape: numbers(shape, 0).astype(np.float32) for shape in shapes}
    inputs = {
        shape: wf.tensor(v, [wf.Dim(f"whole{n}", s) for n, s in enumerate(shape)])
        for shape, v in values.items()
    }
    weights = [numbers(c.new_sizes, n).astype(np.float32) for n, c in enumerate(some)]

    def start(n, case, inputs):
        names = [d.name for d in case.dims(n)[0]]
        x = inputs[(3, *case.sizes)] if case.summed else inputs[case.sizes]
        names = [f"k{n}", *names] if case.summed else names
        return -x.rename(**{d.name: name for d, name in zip(x.dims, names, strict=True)})

    def program(inputs, weights):
        starts = [start(n, c, inputs) for n, c in enumerate(some)]
        weights = [
            -wf.tensor(w, [d.rename("whole" + d.name) for d in c.dims(n)[1]]).rename(
                **{"whole" + d.name: d.name for d in c.dims(n)[1]}
            )
            for n, (w, c) in enumerate(zip(weights, some, strict=True))
        ]

        def relayouts(starts):
            ends = [c.apply(x, n) for n, (x, c) in enumerate(zip(starts, some, strict=True))]
            return [x * w for x, w in zip(ends, weights, strict=True)] if used else ends

        ends, pull = wf.vjp(relayouts, starts)
        return ends, pull(weights)[0]

    rules = {name: axes for n, c in enumerate(some) for name, axes in c.rules(n).items()}
    ends, gradients = wf.spmd(program, mesh, rules)(inputs, weights)
    for case, end, gradient, w in zip(some, ends, gradients, weights, strict=True):
        shape = (3, *case.sizes) if case.summed else case.sizes
        want = case.oracle(-values[shape])
        check_elements(end, want * -w if used else want, f"value, {case}")
        want = np.broadcast_to(case.pulled(w * w if used else -w), shape)
        check_elements(gradient, want, f"gradient, {case}")


# A sample, and all


@pytest.mark.parametrize(
    "mesh, used",
    [(mesh, bool(n % 2)) for n, mesh in enumerate(MESHES)] + [(MESHES[-1], False)],
    ids=lambda value: value if isinstance(value, str) else ["returned", "used"][value],
)
def test_a_sample_of_relayouts(mesh, used):
    draw = random.Random(f"{mesh} {used}")
    every = {family: cases(family, mesh) for family in FAMILIES}
    families = list(FAMILIES) * 2
    check(mesh, [draw.choice(every[family]) for family in draw.sample(families, PROGRAM)], used)


def chunks():
    for mesh, family in itertools.product(MESHES, FAMILIES):
        for first in range(0, len(cases(family, mesh)), CHUNK):
            yield pytest.param(mesh, family, first, id=f"{mesh}|{family}|{first}")


@pytest.mark.slow
@pytest.mark.parametrize("mesh, family, first", list(chunks()))
def test_every_relayout(mesh, family, first):
    chunk = cases(family, mesh)[first : first + CHUNK]
    for n, at in enumerate(range(0, len(chunk), PROGRAM)):
        check(mesh, chunk[at : at + PROGRAM], used=bool(n % 2))


# Illegal layouts


def overlapping(axes, rank):
    some = [order for n in range(len(axes) + 1) for order in itertools.permutations(axes, n)]
    for splits in itertools.product(some, repeat=rank):
        used = [axis for one in splits for axis in one]
        if len(set(used)) < len(used):
            yield splits


@pytest.mark.parametrize("way", ["rename", "reshape", "split", "merge"])
@pytest.mark.parametrize("mesh", MESHES[:3])
def test_two_dims_on_one_axis_are_an_error(mesh, way):
    shapes = {
        "rename": ((5, 4), (5, 4)),
        "reshape": ((5, 4), (4, 5)),
        "split": ((3, 20), (3, 4, 5)),
        "merge": ((2, 5, 2), (5, 4)),
    }
    sizes, new_sizes = shapes[way]
    axes = [name for name, _ in wf.Mesh(mesh).axes]
    for new in overlapping(axes, 2):
        new = ((), *new) if way == "split" else new
        case = Case(way, sizes, ((),) * len(sizes), new_sizes, new)
        program = wf.spmd(lambda x: case.apply(x, 0), mesh, case.rules(0))
        with pytest.raises(LayoutError, match="both on axis"):
            program.jaxpr(wf.spec(case.dims(0)[0], np.float32))


# What Mesh-TensorFlow silently permutes (mesh-tf-features.md §2.2)


PERMUTED = [
    ((8,), "a:x p:y"),
    ((4, 8), "a:x b:y p:y q:x"),
    ((4, 6), "a:x b:y p:y q:x"),
    ((8, 8), "a:x p:y q:x"),
    ((8, 8), "a:x p:y"),
    ((8, 8), "a:x b:y p:y"),
    ((4, 8, 4), "a:x b:y q:x r:y"),
    ((4, 8, 4), "a:x b:y q:x"),
]


@pytest.mark.parametrize("sizes, layout", PERMUTED, ids=[f"{s} {rules}" for s, rules in PERMUTED])
def test_what_mesh_tensorflow_permutes(sizes, layout):
    values = np.arange(math.prod(sizes)).reshape(sizes)
    x = wf.tensor(values, list(map(wf.Dim, "abc", sizes)))
    new = list(map(wf.Dim, "pqr", sizes))
    reshaped, renamed = wf.spmd(
        lambda x: (
            wf.reshape(x, new),
            x.rename(**{a.name: b.name for a, b in zip(x.dims, new, strict=True)}),
        ),
        "x=2 y=2",
        layout,
    )(x)
    np.testing.assert_array_equal(reshaped.numpy(*new), values)
    np.testing.assert_array_equal(renamed.numpy(*new), values)


# The collectives of a relayout: kind, axes, bytes on a device. The tensor is f32[a=8, b=8], 256 bytes.

TRAFFIC = {
    "unchanged": ("a:x p:x", "", []),
    "newly split": ("p:x", "", []),
    "newly split on two axes": ("p:x+y", "", []),
    "split further": ("a:x p:x+y", "", []),
    "two dims newly split": ("p:y q:x", "", []),
    "no longer split": ("a:x", "", [("all-gather", "x", 256)]),
    "no longer split on two axes": ("a:x+y", "", [("all-gather", "xy", 256)]),
    "no longer split on the last axis": ("a:x+y p:x", "", [("all-gather", "y", 128)]),
    "one of two no longer split": ("a:x b:y p:x", "", [("all-gather", "y", 128)]),
    "moved": ("a:x q:x", "", [("all-to-all", "x", 128)]),
    "two axes moved": ("a:x+y q:x+y", "", [("all-to-all", "xy", 64)]),
    "the last axis moved": ("a:x+y p:x q:y", "", [("all-to-all", "y", 64)]),
    "moved behind another": ("a:x b:y p:x+y", "", [("all-to-all", "y", 64)]),
    "moved behind a new one": ("b:y p:x+y", "", [("all-to-all", "y", 64)]),
    "moved while another is split": ("a:x p:y q:x", "", [("all-to-all", "x", 128)]),
    "pending": ("", "x", [("all-reduce", "x", 256)]),
    "pending over two axes": ("", "x+y", [("all-reduce", "xy", 256)]),
    "pending, then split": ("p:x", "x", [("reduce-scatter", "x", 256)]),
    "pending, then split on two axes": ("p:x+y", "x+y", [("reduce-scatter", "xy", 256)]),
    "pending over two axes, then split on one": (
        "p:y",
        "x+y",
        [("reduce-scatter", "y", 256), ("all-reduce", "x", 128)],
    ),
    "pending, then split on more axes": ("p:x+y", "x", [("reduce-scatter", "x", 256)]),
    "pending, then split behind another": ("p:y+x", "x", [("reduce-scatter", "x", 128)]),
    "pending, another dim newly split": ("p:x q:y", "x", [("reduce-scatter", "x", 128)]),
    "pending, then split, another moved": (
        "a:y p:x q:y",
        "x",
        [("all-to-all", "y", 128), ("reduce-scatter", "x", 128)],
    ),
    "pending, another moved": (
        "a:y q:y",
        "x",
        [("all-to-all", "y", 128), ("all-reduce", "x", 128)],
    ),
}


@pytest.mark.parametrize("name", TRAFFIC)
def test_collectives(name):
    layout, summed, want = TRAFFIC[name]
    rules = f"{layout} k:{summed}" if summed else layout

    def relayout(x):
        x = wf.sum(x, "k") if summed else x
        return x.rename(a="p", b="q")

    x = wf.spec("k=8 a=8 b=8" if summed else "a=8 b=8", np.float32)
    made = wf.spmd(relayout, "x=2 y=2", rules).collectives(x)
    assert [(c.kind, "".join(sorted(c.axes)), c.bytes * c.count) for c in made] == want


def test_two_axes_go_to_two_dims_without_a_gather():
    program = wf.spmd(lambda x: x.rename(a="p", b="q", c="r"), "x=2 y=2", "a:x+y q:y r:x")
    made = program.collectives(wf.spec("a=8 b=8 c=8", np.float32))
    assert [(c.kind, c.axes) for c in made] == [("all-to-all", ("y",)), ("all-to-all", ("x",))]


RESHAPED = {
    "the leading dims share the axis": ("a:x p:x", (6, 4), (24,), []),
    "the leading dim is split": ("a:x p:x q:y", (24,), (4, 6), []),
    "the run is gathered: blocks of 3 and of 4": ("a:x p:x", (3, 8), (4, 6), ["all-gather"]),
    "an inner dim is split": ("b:x", (6, 4), (24,), ["all-gather"]),
    "a dim of size 1 is put first": ("a:x q:x", (9,), (1, 9), []),
    "a dim of size 1 is put last": ("a:x p:x", (9,), (9, 1), []),
    "a dim of size 1 is dropped": ("b:x p:x", (1, 9, 4), (9, 4), []),
    "another run stays as it is": ("a:x b:y p:x", (8, 3, 4), (8, 12), ["all-gather"]),
}  # fmt: skip


@pytest.mark.parametrize("name", RESHAPED)
def test_collectives_of_reshapes(name):
    layout, sizes, new_sizes, want = RESHAPED[name]
    x = wf.spec(list(map(wf.Dim, "abc", sizes)), np.float32)
    new = list(map(wf.Dim, "pqr", new_sizes))
    made = wf.spmd(lambda x: wf.reshape(x, new), "x=2 y=2", layout).collectives(x)
    assert [c.kind for c in made] == want


# Reshapes that move splits, on x=2 y=2 or x=2 z=4: what is sent forward. The tensor is of float32.

MOVED = {
    "an inner dim's to the first dim": ("b:x p:x", (4, 4), (2, 8), [("all-to-all", "x", 32)]),
    "the first dim's to an inner one": ("a:x q:x", (4, 4), (2, 8), [("all-to-all", "x", 32)]),
    "four pieces": ("b:z p:z", (256, 256), (64, 1024), [("all-to-all", "z", 65536)]),
    "into a merged dim": ("b:x p:x", (4, 4), (16,), [("all-to-all", "x", 32)]),
    "three dims": ("c:x q:x", (2, 4, 4), (4, 4, 2), [("all-to-all", "x", 64)]),
    "two axes as one": ("b:x+y p:x+y", (8, 8), (4, 16), [("all-to-all", "xy", 64)]),
    "two axes to two dims": (
        "b:x+y p:x q:y",
        (8, 8),
        (4, 16),
        [("all-to-all", "y", 64), ("all-to-all", "x", 64)],
    ),
    "behind another": ("a:x b:y p:x+y", (8, 8), (4, 16), [("all-to-all", "y", 64)]),
    "beside a new split": ("b:x p:x q:y", (8, 8), (4, 16), [("all-to-all", "x", 64)]),
    "beside a new split across its pieces": ("b:x p:x q:z", (8, 8), (4, 16), [("all-to-all", "x", 128)]),
    "beside one that stays": ("a:y b:x p:y q:x", (8, 8), (4, 16), [("all-to-all", "x", 64)]),
    "beside an uneven dim": ("b:x c:y p:x r:y", (4, 4, 5), (2, 8, 5), [("all-to-all", "x", 96)]),
    "to another run": ("b:x r:x", (4, 6, 4), (8, 3, 4), [("all-to-all", "x", 192)]),
    "from another run": ("c:x q:x", (4, 6, 5), (3, 8, 5), [("all-to-all", "x", 288)]),
    "two axes over two dims, none moved": ("a:x+y p:x q:y", (24,), (2, 12), []),
    "with a dim of size 1": ("b:x r:x", (4, 4, 1), (1, 2, 8), [("all-to-all", "x", 32)]),
    "gathered: 6 and 8 have no common factors": ("b:x p:x", (3, 8), (4, 6), [("all-gather", "x", 96)]),
    "gathered: 5 is uneven": ("b:x p:x", (4, 5), (2, 10), [("all-gather", "x", 96)]),
    "gathered: half of an axis would move": ("a:z q:z", (4, 4), (2, 8), [("all-gather", "z", 64)]),
}


@pytest.mark.parametrize("name", MOVED)
def test_a_reshape_moves_a_split_by_an_all_to_all(name):
    layout, sizes, new_sizes, want = MOVED[name]
    new = list(map(wf.Dim, "pqr", new_sizes))
    values, weights = numbers(sizes, 0).astype(np.float32), numbers(new_sizes, 1).astype(np.float32)
    args = wf.tensor(values, list(map(wf.Dim, "abc", sizes))), wf.tensor(weights, new)

    def forward(x):
        return wf.reshape(x, new)

    def both(x, w):
        y, pull = wf.vjp(forward, x)
        return y, pull(w)[0]

    mesh = "x=2 z=4" if "z" in layout else "x=2 y=2"
    made = wf.spmd(forward, mesh, layout).collectives(args[0])
    assert [(c.kind, "".join(c.axes), c.bytes * c.count) for c in made] == want
    program = wf.spmd(both, mesh, layout)
    y, gradient = program(*args)
    expected, pull = jax.vjp(lambda x: jnp.reshape(x, new_sizes), values)
    check_elements(y, expected, "value")
    check_elements(gradient, pull(weights)[0], "gradient")

    plan = program.plan(*args).collectives
    moves = [
        [(c.axes, c.bytes) for c in plan if (c.kind, c.phase) == ("all-to-all", phase)] for phase in PHASES
    ]
    assert moves[0] == moves[1][::-1]  # the transpose sends as much back
    total = Counter()
    for c in plan:
        total[c.kind, c.axes] += c.bytes * c.count
    assert collective_bytes(program.compile(*args).as_text(), program.mesh) == dict(total)


def test_a_pending_sum_is_scattered_where_a_reshape_moves_a_split():
    def run(x):
        return wf.reshape(wf.sum(x, "k"), "p=4 q=16")

    program = wf.spmd(run, "x=2 y=2", "k:y b:x p:x q:y")
    x = wf.tensor(numbers((2, 8, 8), 0).astype(np.float32), "k=2 a=8 b=8")
    made = program.collectives(x)
    assert [(c.kind, c.axes, c.bytes) for c in made] == [
        ("reduce-scatter", ("y",), 128),
        ("all-to-all", ("x",), 64),
    ]
    check_elements(program(x), x.numpy().sum(0).reshape(4, 16), "value")


def test_equal_reshapes_share_an_all_to_all_outside_of_loops():
    def run(x):
        def body(total, _):
            return total + wf.reshape(x, "p=4 q=16"), None

        start = wf.reshape(x, "p=4 q=16")
        return wf.scan(body, start, wf.zeros("steps=3"), "steps")[0]

    program = wf.spmd(run, "x=2", "b:x p:x")
    x = wf.tensor(numbers((8, 8), 0).astype(np.float32), "a=8 b=8")
    assert [(c.kind, c.bytes, c.count) for c in program.collectives(x)] == [("all-to-all", 128, 1)]
    check_elements(program(x), 4 * x.numpy().reshape(4, 16), "value")


def test_the_axis_of_a_dim_of_one_moves_to_another_dim_and_back():
    """XLA could not compile the reshard back, in which the second device's slice is all padding."""

    def run(x):
        def loss(x):
            return wf.sum(wf.einsum(x, x.rename(g="d"), out=["g", "d"]))

        return wf.grad(loss)(x)

    x = wf.parameter(cosines("a=1 h=2 g=3"))
    assert_same_on_mesh(run, "x=2", wf.Layout("d:x", params="a:x"), x)
