"""Inside a pipeline: which layers and which rows are where, and what a stage does with them.

`PipelineSpec` splits the batch into micro-batches and the layers into stages. `StageRunner` is the work of a
stage, where values differ from stage to stage. The schedule decides the order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..autodiff.grad import remat as computed_again
from ..core import collectives, context
from ..core.boundary import LeafSpec, flatten, leaf_array
from ..core.collectives import Axes
from ..core.context import Pipeline
from ..core.describe import describe
from ..core.dims import Dim
from ..core.errors import DimError, LayoutError, ShapeError
from ..core.operands import slice_tensor
from ..core.padding import safe_padding, valid_mask
from ..core.reshard import materialize, reshard
from ..core.tensor import Tensor, is_tensor
from ..ops.elementwise import stop_gradient, where
from ..ops.scan import scan
from ..ops.shape import merge, split, transpose

MICRO, TICK = "_micro", "_tick"  # of which no rule speaks


@dataclass
class PipelineSpec:
    """One pipeline: stages are along `axes`, and micro-batch m has the rows m, m + micro, … of the batch."""

    f: Callable[..., Any]
    layers: Dim
    axes: Axes
    rows: Dim
    micro: int | None
    items_tree: Any
    schedule: str
    remat: Any
    unroll: int

    def __post_init__(self) -> None:
        program = context.require()
        self.stages = program.ways(self.axes)
        clash = program.vmapped_axes & set(self.axes)
        if clash:
            names = ", ".join(sorted(clash))
            raise LayoutError(
                f"{self.layers.name} is on axis {names}, as is that of an enclosing vmap or pipeline",
                rule="the places of an axis are stages of one pipeline, or have other things to do",
                hint=f"another axis for {self.layers.name}, or for what is around the pipeline",
            )
        if self.stages > self.layers.size:
            raise LayoutError(
                f"{self.layers} over {self.stages} devices ({'+'.join(self.axes)})",
                rule="a pipeline has at most as many stages as layers",
                hint=f"at most {self.layers.size} stages: a smaller axis, or no rule for {self.layers.name}",
            )
        (axes,) = program.splits((self.rows,))
        ways = program.ways(axes)
        divisors = [n for n in range(1, self.rows.size + 1) if self.rows.size % n == 0]
        if self.micro is None:
            few = [n for n in divisors if n <= 4 * self.stages]
            self.micro = max([n for n in few if self.rows.size // n % ways == 0] or few)
        if self.micro not in divisors:
            asked = self.micro
            near = sorted(sorted(divisors, key=lambda n: abs(n - asked))[:2])
            raise ShapeError(
                f"{self.rows} in {self.micro} micro-batches",
                rule="micro-batches are of one size, so their number divides that of the batch",
                hint=f"micro={' or '.join(map(str, near))}; of a Transformer it is pipeline_micro",
            )
        self.here = Dim(f"_{self.layers.name}", program.slice_size(self.layers, self.axes))
        self.part = Dim(self.rows.name, self.rows.size // self.micro)
        self.parts = Dim(MICRO, self.micro)

    def known(self) -> Pipeline:
        assert self.micro is not None
        again = self.remat == "nothing" or self.schedule == "1f1b"
        return Pipeline(self.layers, self.axes, self.stages, self.rows, self.micro, self.schedule, again)

    def stream(self, form: LeafSpec, array: Any) -> Tensor:
        return with_leading_dim(self.parts, form, array)

    def dealt(self, t: Any) -> Any:
        """A tensor with the batch dealt out to micro-batches, their dim in front; others as they are."""
        if not isinstance(t, Tensor) or self.rows.name not in {d.name for d in t.dims}:
            return t
        t = split(t, self.rows, [self.part, self.parts])
        return materialize(transpose(t, [self.parts, *(d for d in t.dims if d != self.parts)]), "value")

    def shared(self, t: Any) -> Any:
        """What is shared; each stage has another part of what is dealt, so its gradient is summed at last."""
        t = self.dealt(t)
        if not isinstance(t, Tensor) or self.parts not in t.dims:
            return t
        assert t.splits is not None
        return self.stream(without_leading_dim(t), reshard(t, t.splits, self.axes))

    def gathered(self, form: LeafSpec, array: Any) -> Tensor:
        """The other way."""
        t = self.stream(form, array)
        place = form.dims.index(self.part)
        back = transpose(t, [*form.dims[: place + 1], self.parts, *form.dims[place + 1 :]])
        return merge(back, [self.part, self.parts], self.rows)

    def own(self, item: Any, streams: Sequence[Any]) -> Any:
        """A stage's own layers; if they are stored in further pieces, gathered once (by "1f1b" later).

        Where a stage has fewer than others, something at which f has a derivative stands for a layer.
        """
        program = context.require()
        if not isinstance(item, Tensor):
            return self._own_rows(item)
        place, role = item.dims.index(self.layers), item.role if self.schedule == "1f1b" else "value"
        splits = program.splits(item.dims, role)
        splits = (*splits[:place], self.axes, *splits[place + 1 :])
        further = set()
        if jnp.issubdtype(item.dtype, jnp.inexact):
            further = {a for t in streams for axes in t.splits for a in axes}
        array = safe_padding(reshard(item, splits, further), item.dims, splits, self.layers)
        dims = tuple(self.here if d == self.layers else d for d in item.dims)
        return LeafSpec(dims, role, (*splits[:place], (), *splits[place + 1 :]), frozenset()).rebuild(array)

    def _own_rows(self, array: Any) -> Any:
        """The same of a raw array."""
        array = jnp.asarray(array)
        if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
            data = self._own_rows(jax.random.key_data(array))
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(array))
        missing = self.here.size * self.stages - array.shape[0]
        array = jnp.pad(array, [(0, missing), *[(0, 0)] * (array.ndim - 1)], mode="edge")
        return collectives.local_slice(array, self.axes, 0, self.here.size, plain=True)


@dataclass
class StageRunner:
    """What the stages do, inside the pipeline: there values differ from stage to stage."""

    line: PipelineSpec
    forms: list[LeafSpec]
    x_tree: Any

    @property
    def number(self) -> Any:
        """That of this stage."""
        return collectives.axis_index(self.line.axes)

    def forward(
        self, streams: list[Tensor], own: list[Any], shared: Any, keep: Any = "nothing"
    ) -> list[Tensor]:
        """The micro-batches as they come out of the last stage; on other stages something else."""
        line, stage, idle = self.line, self.number, self.line.stages - 1
        ticks = Dim(TICK, line.parts.size + idle)

        def tick(h: list[Tensor], given: tuple[list[Tensor], Any]) -> tuple[list[Tensor], list[Tensor]]:
            entering, now = given
            h = self.handed_on(h, entering, 0)
            run = functools.partial(self.stage, own=own, shared=shared, number=self.part(now - stage))
            made = (run if keep is None else computed_again(run, keep))(h)
            return made, made

        given = self._fed(streams, ticks, 0)
        _, made = scan(tick, self.begin(streams), (given, jnp.arange(ticks.size)), ticks)
        return [line.stream(f, t._array[idle:]) for f, t in zip(self.forms, made, strict=True)]

    def begin(self, streams: list[Tensor]) -> list[Tensor]:
        """Something for stages that have nothing to do yet: true values, of which f has a derivative."""
        return [stop_gradient(f.rebuild(t._array[0])) for f, t in zip(self.forms, streams, strict=True)]

    def _fed(self, streams: list[Tensor], ticks: Dim, before: int) -> list[Tensor]:
        """Micro-batches, one for each tick; the first and the last are said over where there is none."""
        found = []
        for form, t in zip(self.forms, streams, strict=True):
            after = ticks.size - before - self.line.parts.size
            first, last = (lax.stop_gradient(a) for a in (t._array[:1], t._array[-1:]))
            early, late = (
                jnp.broadcast_to(a, (n, *a.shape[1:])) for a, n in ((first, before), (last, after))
            )
            found.append(with_leading_dim(ticks, form, jnp.concatenate([early, t._array, late])))
        return found

    def part(self, number: Any) -> Any:
        return jnp.clip(number, 0, self.line.parts.size - 1)

    def handed_on(self, h: list[Tensor], new: list[Tensor], first: int) -> list[Tensor]:
        """What each stage is given: by the one before it, seen from the first, and there what is new."""
        count, step = self.line.stages, 1 if first == 0 else -1
        pairs = [(k, k + step) for k in range(count) if 0 <= k + step < count]
        passed = [
            f.rebuild(collectives.permute(leaf_array(t), self.line.axes, pairs))
            for f, t in zip(self.forms, h, strict=True)
        ]
        here = slice_tensor(self.number == first, ())
        return [where(here, n, p) for n, p in zip(new, passed, strict=True)]

    def stage(self, h: list[Tensor], own: list[Any], shared: Any, number: Any) -> list[Tensor]:
        """The layers of this stage, on the micro-batch of this number."""
        line = self.line
        shared = jax.tree.map(lambda t: self._of(t, number), shared, is_leaf=is_tensor)
        is_layer = valid_mask((line.layers,), (line.axes,))

        def layer(h: list[Tensor], given: Any) -> tuple[list[Tensor], None]:
            params, there = given
            params = jax.tree.unflatten(line.items_tree, params)
            try:
                new, tree = flatten(line.f(jax.tree.unflatten(self.x_tree, h), params, *shared))
            except DimError as error:
                if error.fact.startswith(f"dim {line.part.name} has two sizes"):
                    error.hint = (
                        f"a layer has a micro-batch of x, {line.part} of {line.rows.size}; "
                        f"what else has the dim {line.rows.name} is given as shared=(…,)"
                    )
                raise
            self._check(new, tree)
            if is_layer is not None:
                new = [where(slice_tensor(there, ()), n, o) for n, o in zip(new, h, strict=True)]
            return new, None

        with context.require().part_of_dim(line.part, line.parts, number):
            return scan(layer, h, (own, is_layer), line.here, unroll=line.unroll)[0]

    def _of(self, t: Any, number: Any) -> Any:
        """What is shared, of one micro-batch."""
        if not isinstance(t, Tensor) or self.line.parts not in t.dims:
            return t
        return index_leading(t, number)

    def _check(self, new: list[Any], tree: Any) -> None:
        line = self.line
        same = tree == self.x_tree
        for t, f in zip(new, self.forms, strict=False) if same else ():
            same &= isinstance(t, Tensor) and set(t.dims) == set(f.dims)
        if not same:
            shown = [describe(t) if isinstance(t, Tensor) else "a raw array" for t in new]
            dims = [f"[{', '.join(map(str, f.dims))}]" for f in self.forms]
            raise DimError(
                f"a layer of the pipeline makes {', '.join(shown) or 'nothing'} of {', '.join(dims)}",
                rule=f"every layer along {line.layers.name} gives what the next one takes: the same dims",
                hint="return x with its own dims; what changes them goes before or after the pipeline",
            )


def with_leading_dim(dim: Dim, form: LeafSpec, array: Any) -> Tensor:
    return slice_tensor(array, (dim, *form.dims), ((), *form.splits))


def without_leading_dim(t: Tensor) -> LeafSpec:
    """The form of a tensor's places along its first dim, which is not split."""
    assert t.splits is not None and not t.splits[0]
    return LeafSpec(t.dims[1:], "value", t.splits[1:], frozenset())


def index_leading(t: Tensor, number: Any) -> Tensor:
    """One place of a tensor along its first dim."""
    return without_leading_dim(t).rebuild(lax.dynamic_index_in_dim(leaf_array(t), number, 0, keepdims=False))


def update_leading(t: Tensor, one: Tensor, number: Any) -> Tensor:
    """A tensor with another one at that place."""
    form = LeafSpec.of(t)
    assert form is not None
    return form.rebuild(lax.dynamic_update_index_in_dim(leaf_array(t), leaf_array(one), number, 0))
