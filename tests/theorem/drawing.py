"""Draw random programs, meshes and legal layouts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from random import Random
from typing import Any

import jax
from hypothesis import strategies as st

import weft as wf

from .families import FAMILIES, OPS, TYPED
from .families.rows import MOST_ELEMENTS
from .program import Body, Case, Input, Named, Step, Unfit

NAMES = "abcdefgh"
MESHES = [
    "x=2", "x=3", "x=4", "x=8", "x=5", "x=2 y=2", "x=2 y=3", "x=3 y=2", "x=4 y=2", "x=2 y=4",
    "x=1 y=4", "x=2 y=2 z=2",
]  # fmt: skip
# The dtypes of the inputs of typed programs.
FLOATS = ["bfloat16", "float16", "float32", "weak", "bfloat16"]
INTEGERS = ["int8", "uint8", "weak", "int8", "int32"]
TRIES = 12  # draws of another op after one did not fit


class LayoutConstraints:
    """What a program requires of a layout: dims that need different axes, and dims that must not be split."""

    def __init__(self) -> None:
        self.together: set[frozenset[str]] = set()
        self.unsplittable: set[str] = set()
        self.sizes: dict[str, int] = {}

    def names(self) -> list[str]:
        return sorted(set().union(*self.together))

    def rivals(self, name: str) -> set[str]:
        """The dims that must not share an axis with this one."""
        return set().union(*[group for group in self.together if name in group]) - {name}


class Drawer:
    """Draws the steps of a program, given the values computed so far."""

    def __init__(
        self,
        random: Random,
        env: Sequence[Named],
        constraints: LayoutConstraints,
        depth: int = 0,
        avoid: Sequence[str] = (),
        mapped: Sequence[str] = (),
        families: dict[str, Any] = FAMILIES,
    ):
        self.families = families
        self.random, self.env, self.constraints, self.depth = random, list(env), constraints, depth
        self.avoid, self.mapped = tuple(avoid), tuple(mapped)
        self.steps: list[Step] = []

    # Choices that ops are drawn with

    def draw(self, option: Callable[[Drawer], Any]) -> Any:
        return option(self)

    def choose(self, items: Sequence[Any]) -> Any:
        return self.random.choice(list(items))

    def chance(self, one_in: int) -> bool:
        return self.random.randrange(one_in) == 0

    def shuffled(self, items: Sequence[Any]) -> list[Any]:
        return self.random.sample(list(items), len(items))

    def some(self, items: Sequence[Any], least: int = 1) -> list[Any]:
        """Some of the items, in any order."""
        return self.random.sample(list(items), self.random.randint(least, len(items)))

    def value(
        self,
        kinds: str = "f",
        least: int = 0,
        most: int = 3,
        test: Callable[..., bool] | None = None,
    ) -> int:
        """A value of one of the kinds with `least` to `most` dims: half of the time the newest."""
        found = [
            n
            for n, x in enumerate(self.env)
            if x.kind in kinds and least <= len(x.names) <= most and (test is None or test(x))
        ]
        if not found:
            raise Unfit
        return self.choose([found[-1]] * len(found) + found[::-1])

    def name(self, avoid: Sequence[str] = ()) -> str:
        return self.choose([n for n in NAMES if n not in avoid and n not in self.avoid])

    def size(self, name: str) -> int:
        """The size of a dim: mostly the same for a name, so that tensors can be combined."""
        if name not in self.constraints.sizes or self.chance(8):
            self.constraints.sizes[name] = self.choose([3, 2, 5, 4, 1, 6, 7, 8, 9])
        return self.constraints.sizes[name]

    def dims(self, count: int) -> list[tuple[str, int]]:
        dims: list[tuple[str, int]] = []
        for _ in range(count):
            name = self.name([n for n, _ in dims])
            dims.append((name, self.size(name)))
        if math.prod(size for _, size in dims) > MOST_ELEMENTS // 2:
            raise Unfit
        return dims

    def forbid_split(self, name: str) -> None:
        self.constraints.unsplittable.add(name)

    def body(
        self, given: Sequence[Named], avoid: Sequence[str] = (), mapped: Sequence[str] = ()
    ) -> tuple[Body, list[Named]]:
        """A function of the given values, drawn by an inner drawer, and all values that it computes."""
        inner = Drawer(
            self.random,
            given,
            self.constraints,
            self.depth + 1,
            (*self.avoid, *avoid),
            (*self.mapped, *mapped),
            self.families,
        )
        for n in inner.env:
            inner.note([n.names])
        for _ in range(self.random.randint(1, 3)):
            inner.step()
        floats = [n for n, x in enumerate(inner.env) if x.kind == "f" and len(x.names) <= 2]
        if not floats:
            raise Unfit
        return Body(tuple(inner.steps), floats[-1]), inner.env

    # Steps

    def note(self, groups: Sequence[Sequence[str]]) -> None:
        """Record dims that occur in one tensor or one op."""
        for group in groups:
            self.constraints.together.add(frozenset({*group, *self.mapped}))

    def step(self) -> None:
        """Append a step, if one of several draws fits."""
        deep = {"control", "calculus"} if self.depth else set()
        families = [f for f in self.families if f not in deep]
        if self.depth == 1 and self.chance(6):
            families = sorted(deep)
        if "mixed" in self.families and self.chance(3):
            families = ["mixed"]
        for _ in range(TRIES):
            name = self.choose(list(self.families[self.choose(families)]))
            before = set(self.constraints.together), set(self.constraints.unsplittable)
            try:
                operands, options = OPS[name].draw(self)
                given = [self.env[n] for n in operands]
                results = OPS[name].apply(given, options)
            except Unfit:
                self.constraints.together, self.constraints.unsplittable = before
                continue
            if any(len(x.names) > 4 for x in results):
                continue
            self.steps.append(Step(name, tuple(operands), options))
            self.env += results
            groups = [x.names for x in (*given, *results)]
            if not OPS[name].apart:
                groups = [[n for group in groups for n in group]]
            if OPS[name].groups is not None:
                groups += OPS[name].groups(given, results, **options)
            self.note(groups)
            return


# Cases


def _input(d: Drawer, kind: str, most: int) -> Input:
    try:
        dims = d.dims(d.random.randint(1, most))
    except Unfit:
        dims = [(d.name(), 3)]
    text = " ".join(f"{n}={size}" for n, size in dims)
    role = d.choose(["value", "value", "value", "param", "optimizer"]) if kind != "index" else "value"
    return Input(text, kind, role, captured=d.chance(6), seed=d.random.randint(0, 99))


def _layout(d: Drawer, constraints: LayoutConstraints, axes: list[str]) -> dict[str, tuple[str, ...]]:
    """Rules for the dims of a program, with no two rivals on one axis."""
    rules: dict[str, tuple[str, ...]] = {}
    for name in d.shuffled(constraints.names()):
        taken = {axis for rival in constraints.rivals(name) for axis in rules.get(rival, ())}
        free = [axis for axis in axes if axis not in taken]
        if name in constraints.unsplittable or not free:
            continue
        count = d.choose([n for n in (1, 1, 1, 2, 2, 0, 3) if n <= len(free)])
        if count:
            rules[name] = tuple(d.shuffled(free)[:count])
    return rules


def _stored(
    d: Drawer,
    rules: dict[str, tuple[str, ...]],
    inputs: Sequence[Input],
    role: str,
    axes: list[str],
) -> dict[str, tuple[str, ...]]:
    """Additional rules for the inputs of a role."""
    new: dict[str, tuple[str, ...]] = {}
    tensors = [[d.name for d in wf.dims(i.dims)] for i in inputs if i.role == role]
    for name in sorted({n for names in tensors for n in names}):
        merged = rules | new
        taken = {
            axis
            for names in tensors
            if name in names
            for other in names
            if other != name
            for axis in merged.get(other, ())
        }
        free = [axis for axis in axes if axis not in taken]
        count = d.choose([n for n in (0, 1, 2) if n <= len(free)])
        if count:
            new[name] = tuple(d.shuffled(free)[:count])
    return new


def _text(rules: dict[str, tuple[str, ...]]) -> str:
    return " ".join(f"{name}:{'+'.join(axes)}" for name, axes in rules.items())


def drawn(random: Random, most_steps: int = 8, typed: bool = False) -> Case:
    """A program of several ops, a mesh and a legal layout; `typed` programs have narrow and weak types."""
    with jax.enable_x64(True):
        return _drawn(random, most_steps, typed)


def _kinds(d: Drawer) -> list[str]:
    kinds = ["real", *d.random.choices(["real", "positive", "grid"], k=d.random.randint(0, 2))]
    return kinds + d.choose([["index"], ["index"], [], ["boolean"]])


def _typed_kinds(d: Drawer) -> list[str]:
    kinds = ["small", *d.random.choices(["small", "index", "boolean"], k=d.random.randint(0, 2))]
    return kinds + d.choose([["index"], ["boolean"], ["index", "boolean"]])


def _with_type(d: Drawer, given: Input) -> Input:
    if given.kind == "boolean":
        return given
    return dataclasses.replace(given, dtype=d.choose(INTEGERS if given.kind == "index" else FLOATS))


def _drawn(random: Random, most_steps: int, typed: bool) -> Case:
    constraints = LayoutConstraints()
    d = Drawer(random, [], constraints, families=TYPED if typed else FAMILIES)
    kinds = (_typed_kinds if typed else _kinds)(d)
    inputs = tuple(_input(d, kind, 3 if kind != "index" else 2) for kind in kinds)
    if typed:
        inputs = tuple(_with_type(d, given) for given in inputs)
    inputs = (dataclasses.replace(inputs[0], captured=False), *inputs[1:])
    for given in inputs:
        names = tuple(dim.name for dim in wf.dims(given.dims))
        exact = given.kind not in ("real", "positive")
        d.env.append(Named(given.values(), names, exact, narrow=typed))
        d.note([names])
    for _ in range(random.randint(3, most_steps)):
        d.step()
    used = {n for step in d.steps for n in step.operands}
    ends = [n for n in range(len(inputs), len(d.env)) if n not in used]
    others = [n for n in range(len(d.env)) if n not in ends]
    results = tuple(sorted({*ends, *d.some(others, least=0)[:2]}))
    inputs = tuple(  # a rule for a dim of a tensor that the program never uses would warn
        dataclasses.replace(given, captured=given.captured and n in used | set(results))
        for n, given in enumerate(inputs)
    )
    mesh = d.choose(MESHES)
    axes = list(wf.Mesh(mesh).names)
    rules = _layout(d, constraints, axes)
    stored = {
        role: _text(_stored(d, rules, inputs, role, axes)) if any(i.role == role for i in inputs) else None
        for role in ("param", "optimizer")
    }
    return Case(
        inputs,
        tuple(d.steps),
        results,
        tuple(n for n in results if d.chance(3)),
        mesh,
        _text(rules),
        stored["param"],
        stored["optimizer"],
        eager=d.chance(40),
        alone=d.chance(4),
    )


def cases(salt: int = 0, typed: bool = False) -> st.SearchStrategy[Case]:
    """Cases for hypothesis, each drawn from its own seed.

    So all ops are equally likely, and no example is a variation of another. `reduced` shrinks a failing case.
    """
    seeds = st.tuples(*[st.integers(0, 2**20)] * 3)
    return seeds.map(lambda seed: drawn(Random(repr((salt, *seed))), typed=typed))
