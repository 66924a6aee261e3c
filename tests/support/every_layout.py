"""Small random programs, and a brute-force search over every layout of them.

`drawn(seed, fixed=True)` returns a program with its arguments and a mesh; with `fixed=False`, a number of devices
replaces the mesh. `best_of_all` plans every legal layout, one by one. It shares no code with `weft.autolayout`: it
assigns every ordered tuple of axes to every dim, first for all tensors and then for stored ones, and relies on the plan
to reject illegal layouts.
"""

import itertools
import math
import random
import sys
from dataclasses import dataclass
from typing import Any

import weft as wf
from weft import optim
from weft.core.errors import LayoutError

SIZES = (6, 8, 50, 64, 512, 1000, 4096, 16384)
MESHES = ("one=8", "x=2 y=2", "pod=2 data=4", "data=4 model=2", "a=2 b=3", "far=8 near=2", "a=2 b=2 c=2")
COUNTS = (
    (2, 1),
    (4, 2),
    (6, 2),
    (8, 2),
    (12, 2),
    (16, 2),
    (8, 3),
)  # the number of devices, and the maximum number of axes
MACHINES = ("h100", "tpu-v2", "a100", "cpu")
KINDS = ("forward", "forward", "gradient", "train")
DIMS = {"forward": {1: 5, 2: 4, 3: 3}, "gradient": {1: 5, 2: 3, 3: 2}, "train": {1: 4, 2: 3}}


@dataclass(frozen=True)
class Drawn:
    """A random program, and the mesh or the number of devices of its search."""

    name: str
    fn: Any
    args: tuple[Any, ...]
    dims: tuple[str, ...]
    stored: tuple[str, ...]  # the dims of parameters
    state: tuple[str, ...]  # the roles that have their own rules
    hardware: str
    mesh: str = ""
    devices: int = 0
    axes: int = 2

    def search(self):
        """The result of the search with unlimited memory."""
        where = {"mesh": self.mesh} if self.mesh else {"devices": self.devices, "axes": self.axes}
        return wf.search(self.fn, self.args, hardware=self.hardware, memory=sys.maxsize, **where)


def drawn(seed, *, fixed):
    """The program of a seed. The more axes, the fewer dims it has, so that all layouts can be planned."""
    rng = random.Random(f"{seed} {fixed}")
    kind = rng.choice(KINDS)
    few = -3 if kind == "train" else None
    mesh, (devices, axes) = rng.choice(MESHES[:few]), rng.choice(COUNTS[:few])
    walk = Walk(rng, DIMS[kind][len(mesh.split()) if fixed else axes], kind)
    fn, args = _of_kind(kind, walk)
    state = {"forward": (), "gradient": ("params",), "train": ("params", "optimizer")}[kind]
    stored = tuple(dict.fromkeys(d for dims in walk.inputs[1:] for d in dims))
    where = {"mesh": mesh} if fixed else {"devices": devices, "axes": axes}
    return Drawn(f"{kind}: {walk}", fn, args, tuple(walk.sizes), stored, state, rng.choice(MACHINES), **where)


# The programs


class Walk:
    """A random sequence of ops: each step applies an op to the latest value, and perhaps to an earlier one."""

    def __init__(self, rng, most_dims, kind):
        self.rng, self.most_dims = rng, most_dims
        self.sizes = {}
        self.steps = []  # for each, the name of an op and a function of the list of all values so far
        self.shapes = []  # the dims of each value: of the inputs, then of the steps
        self.inputs = [self._input(rng.randint(1, 3))]
        is_short = kind == "train"  # a train step has many layouts, and takes longer to plan
        for _ in range(1 if is_short else rng.randint(1, 2)):
            self.inputs.append(self._input(rng.randint(1, 2), near=self.inputs[-1]))
        self.shapes = [*self.inputs]
        for n in range(1, len(self.inputs)):
            self.einsum(n) or self.binary(n)
        kinds = [
            self.unary,
            self.along,
            self.reduce,
            self.again,
            self.rename,
            self.merge,
            self.split,
            self.scan,
        ]
        if kind == "forward":
            kinds += [self.sort, self.take, self.one_hot]  # ops without useful gradients
        for _ in range(rng.randint(1, 2) if is_short else rng.randint(2, 5)):
            rng.choice(kinds)()

    def __str__(self):
        inputs = ", ".join("[" + " ".join(f"{d}={self.sizes[d]}" for d in dims) + "]" for dims in self.inputs)
        return f"{inputs} → {', '.join(name for name, _ in self.steps)}"

    def __call__(self, *inputs):
        values = list(inputs)
        for _, fn in self.steps:
            values.append(fn(values))
        return values[-1]

    def specs(self, roles):
        return [
            wf.spec([wf.Dim(d, self.sizes[d]) for d in dims], role=role)
            for dims, role in zip(self.inputs, roles, strict=True)
        ]

    def _dim(self, size=None):
        """A new dim."""
        name = "abcdefgh"[len(self.sizes)]
        self.sizes[name] = size or self.rng.choice(SIZES)
        return name

    def _has_room(self, count=1):
        return len(self.sizes) + count <= self.most_dims

    def _input(self, count, near=()):
        """The dims of an input: usually one of `near`, then new ones up to the limit."""
        dims = [self.rng.choice(near)] if near and self.rng.random() < 0.9 else []
        while len(dims) < count:
            old = [d for d in self.sizes if d not in dims]
            if not self._has_room() and not old:
                break
            new = self._has_room() and (not old or self.rng.random() < 0.8)
            dims.append(self._dim() if new else self.rng.choice(old))
        return tuple(dims)

    def _add(self, name, fn, dims):
        self.steps.append((name, fn))
        self.shapes.append(tuple(dims))
        return True

    @property
    def dims(self):
        """The dims of the latest value: the result of the last step, or at first the first input."""
        return self.shapes[-1] if self.steps else self.shapes[0]

    @property
    def latest(self):
        return len(self.shapes) - 1 if self.steps else 0

    def _union(self, other):
        return tuple(dict.fromkeys((*self.dims, *self.shapes[other])))

    def einsum(self, other):
        common, n = sorted({*self.dims} & {*self.shapes[other]}), self.latest
        if not common:
            return False
        reduced, union = self.rng.choice(common), self._union(other)
        remaining = [d for d in union if d != reduced]
        return self._add(f"einsum {reduced}", lambda v: wf.einsum(v[n], v[other], reduce=reduced), remaining)

    def binary(self, other):
        name = self.rng.choice(["add", "multiply", "maximum"])
        n, op = self.latest, getattr(wf, name)
        return self._add(f"{name} #{other}", lambda v: op(v[n], v[other]), self._union(other))

    def again(self):
        """Use an earlier value again."""
        other = self.rng.randrange(len(self.shapes))
        return self.rng.choice([self.einsum, self.binary])(other)

    def unary(self):
        name, n = self.rng.choice(["exp", "tanh", "relu", "square"]), self.latest
        return self._add(name, lambda v: getattr(wf, name)(v[n]), self.dims)

    def along(self, names=("softmax", "log_softmax", "cumsum")):
        if not self.dims:
            return False
        name, dim, n = self.rng.choice(names), self.rng.choice(self.dims), self.latest
        return self._add(f"{name} {dim}", lambda v: getattr(wf, name)(v[n], dim), self.dims)

    def sort(self):
        return self.along(["sort"])

    def reduce(self):
        if len(self.dims) < 2:
            return False
        name, n = self.rng.choice(["sum", "mean", "max", "logsumexp"]), self.latest
        reduced = self.rng.choice(self.dims)
        remaining = [d for d in self.dims if d != reduced]
        return self._add(f"{name} {reduced}", lambda v: getattr(wf, name)(v[n], reduced), remaining)

    def rename(self):
        if not self.dims or not self._has_room():
            return False
        old, n, dims = self.rng.choice(self.dims), self.latest, self.dims
        new = self._dim(self.sizes[old])
        renamed = [new if d == old else d for d in dims]
        return self._add(f"rename {old} {new}", lambda v: v[n].rename(**{old: new}), renamed)

    def merge(self):
        if len(self.dims) < 2 or not self._has_room():
            return False
        pair, n, dims = self.rng.sample(self.dims, 2), self.latest, self.dims
        new = self._dim(math.prod(self.sizes[d] for d in pair))
        first = min(dims.index(d) for d in pair)
        rest = [d for d in dims if d not in pair]
        merged = [*rest[:first], new, *rest[first:]]
        return self._add(f"merge {'+'.join(pair)} {new}", lambda v: wf.merge(v[n], pair, new), merged)

    def split(self):
        if not self.dims or not self._has_room(2):
            return False
        old, n, dims = self.rng.choice(self.dims), self.latest, self.dims
        outer = self.rng.choice([k for k in (2, 4, 5, 8, self.sizes[old]) if self.sizes[old] % k == 0])
        new = [self._dim(outer), self._dim(self.sizes[old] // outer)]
        into = [wf.Dim(d, self.sizes[d]) for d in new]
        latest = dims.index(old)
        parts = [*dims[:latest], *new, *dims[latest + 1 :]]
        return self._add(f"split {old} {'+'.join(new)}", lambda v: wf.split(v[n], old, into), parts)

    def take(self):
        """Look up rows along a dim, which a new dim replaces."""
        if not self.dims or not self._has_room():
            return False
        old, n, new = self.rng.choice(self.dims), self.latest, self._dim()
        ids = wf.Dim(new, self.sizes[new])
        dims = [new, *(d for d in self.dims if d != old)]
        return self._add(f"take {old} {new}", lambda v: wf.take(v[n], wf.arange(ids) % 5, old), dims)

    def one_hot(self):
        """One-hot encode the position of the maximum along a new dim."""
        if not self.dims or not self._has_room():
            return False
        old, n, new = self.rng.choice(self.dims), self.latest, self._dim()
        dim = wf.Dim(new, self.sizes[new])
        dims = [*(d for d in self.dims if d != old), new]
        return self._add(
            f"argmax {old}, one_hot {new}", lambda v: wf.one_hot(wf.argmax(v[n], old), dim), dims
        )

    def scan(self):
        """A loop along a dim."""
        if len(self.dims) < 2:
            return False
        old, n = self.rng.choice(self.dims), self.latest
        dims = [wf.Dim(d, self.sizes[d]) for d in self.dims if d != old]

        def body(carry, x):
            carry = wf.tanh(carry + x)
            return carry, carry

        def run(v):
            return wf.scan(body, wf.zeros(dims), v[n], old)[1]

        return self._add(f"scan {old}", run, [old, *(d for d in self.dims if d != old)])


def _of_kind(kind, walk):
    """The forward program of a walk, its gradients, or a train step, with their arguments."""
    if kind == "forward":
        return walk, tuple(walk.specs(["value"] * len(walk.inputs)))
    x, *params = walk.specs(["value", *["param"] * (len(walk.inputs) - 1)])

    def loss(params, x):
        return wf.sum(wf.square(walk(x, *params)))

    if kind == "gradient":
        return wf.value_and_grad(loss), (params, x)
    optimizer = optim.Momentum(0.1)

    def step(params, state, x):
        return optimizer.update(wf.grad(loss)(params, x), state, params)

    return wf.spmd(step, donate=(0, 1)), (params, optimizer.init(params), x)


# The brute force


def meshes_of(one):
    """The given mesh, or all ordered factorizations of the number of devices into at most `one.axes` axes."""
    if one.mesh:
        return [wf.Mesh(one.mesh)]
    sizes = (some for n in range(1, one.axes + 1) for some in itertools.product(range(2, 17), repeat=n))
    return [
        wf.Mesh([(f"axis{n}", size) for n, size in enumerate(some)])
        for some in sizes
        if math.prod(some) == one.devices
    ]


def rules_of(dims, axes):
    """Every assignment of an ordered tuple of axes, possibly empty, to every dim."""
    tuples = [some for n in range(len(axes) + 1) for some in itertools.permutations(axes, n)]
    for chosen in itertools.product(tuples, repeat=len(dims)):
        yield dict(zip(dims, chosen, strict=True))


def plans_of(one):
    """Every legal layout with its mesh and its plan.

    For each layout of all tensors, parameters and optimizer state are stored by every pair of rules.
    """
    fn, donate = getattr(one.fn, "fn", one.fn), getattr(one.fn, "donate", ())
    seen = {}

    def planned(mesh, layout):
        if (mesh, layout) not in seen:
            try:
                seen[mesh, layout] = wf.spmd(fn, mesh, layout, donate=donate).plan(*one.args)
            except LayoutError:
                seen[mesh, layout] = None
        return seen[mesh, layout]

    for mesh in meshes_of(one):
        for rules in rules_of(one.dims, mesh.names):
            if planned(mesh, wf.Layout(rules)) is None:
                continue
            for params in rules_of(one.stored, mesh.names) if "params" in one.state else ():
                if planned(mesh, wf.Layout(rules, params=params)) is None:
                    continue
                for optimizer in rules_of(one.stored, mesh.names) if "optimizer" in one.state else ():
                    planned(mesh, wf.Layout(rules, params=params, optimizer=optimizer))
    return {where: plan for where, plan in seen.items() if plan is not None}


def best_of_all(one):
    """The least time in seconds, its mesh and layout, and the number of legal layouts."""
    plans = plans_of(one)
    found = (
        (plan.time(one.hardware).overlapped_seconds, str(mesh), repr(layout))
        for (mesh, layout), plan in plans.items()
    )
    return (*min(found), len(plans))
