"""Inside a pipeline: which layers and rows each stage has, and what a stage computes.

`PipelineSpec` splits the batch into micro-batches and the layers into stages. `StageRunner` runs the stages,
where values differ from stage to stage. The order of their steps is up to a schedule.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from ..autodiff.remat import remat as checkpointed
from ..core import collectives
from ..core.boundary import LeafSpec, flatten, leaf_array
from ..core.collectives import Axes
from ..core.context import active
from ..core.describe import describe
from ..core.dims import Dim
from ..core.errors import DimError, LayoutError, ShapeError
from ..core.observations import Pipeline
from ..core.operands import slice_tensor
from ..core.padding import safe_padding, valid_mask
from ..core.reshard import materialize, reshard
from ..core.tensor import Tensor, is_tensor
from ..core.types import PyTree
from ..ops.elementwise import stop_gradient, where
from ..ops.scan import scan
from ..ops.shape import merge, split, transpose

MICRO, TICK = "_micro", "_tick"  # dims that no layout rule can name

Leaf = Tensor | jax.Array


@dataclass
class PipelineSpec:
    """One pipeline: its stages lie along `axes`; micro-batch m has the rows m, m + micro, … of the batch.

    Interleaved rows, not blocks: if the batch is split over devices, each device's slice then contributes to
    every micro-batch, and splitting the batch into micro-batches moves no data.
    """

    f: Callable[..., PyTree]
    layers: Dim
    axes: Axes
    rows: Dim
    micro: int | None
    items_tree: PyTree
    schedule: str
    remat: str | Callable[..., bool]
    unroll: int

    def __post_init__(self) -> None:
        ctx = active.context
        self.stages = ctx.ways(self.axes)
        clash = ctx.vmap.axes & set(self.axes)
        if clash:
            names = ", ".join(sorted(clash))
            raise LayoutError(
                f"{self.layers.name} is on axis {names}, which an enclosing vmap or pipeline already uses",
                rule="the devices along an axis are the stages of one pipeline, or split one other dim",
                hint=f"use another axis for {self.layers.name}, or for the enclosing vmap or pipeline",
            )
        if self.stages > self.layers.size:
            raise LayoutError(
                f"{self.layers} over {self.stages} devices ({'+'.join(self.axes)})",
                rule="a pipeline has at most as many stages as layers",
                hint=f"at most {self.layers.size} stages: a smaller axis, or no rule for {self.layers.name}",
            )
        (axes,) = ctx.splits((self.rows,))
        ways = ctx.ways(axes)
        divisors = [n for n in range(1, self.rows.size + 1) if self.rows.size % n == 0]
        if self.micro is None:
            few = [n for n in divisors if n <= 4 * self.stages]
            # Prefer micro-batches that the batch's axes divide: others are padded.
            self.micro = max([n for n in few if self.rows.size // n % ways == 0] or few)
        if self.micro not in divisors:
            given = self.micro
            near = sorted(sorted(divisors, key=lambda n: abs(n - given))[:2])
            raise ShapeError(
                f"{self.rows} in {self.micro} micro-batches",
                rule="micro-batches have equal sizes, so their number divides the batch's size",
                hint=f"micro={' or '.join(map(str, near))}; for a Transformer, pipeline_micro",
            )
        self.stage_layers = Dim(f"_{self.layers.name}", ctx.slice_size(self.layers, self.axes))
        self.part = Dim(self.rows.name, self.rows.size // self.micro)
        self.parts = Dim(MICRO, self.micro)

    def record(self) -> Pipeline:
        """What plans know of this pipeline."""
        assert self.micro is not None
        recomputes = self.remat == "nothing" or self.schedule == "1f1b"
        return Pipeline(self.layers, self.axes, self.stages, self.rows, self.micro, self.schedule, recomputes)

    def stream(self, spec: LeafSpec, array: jax.Array) -> Tensor:
        """The tensor of all micro-batches, from the spec of one."""
        return with_leading_dim(self.parts, spec, array)

    def split_rows(self, t: PyTree) -> PyTree:
        """A tensor with its batch split into micro-batches, their dim first; others unchanged."""
        if not isinstance(t, Tensor) or self.rows.name not in {d.name for d in t.dims}:
            return t
        t = split(t, self.rows, [self.part, self.parts])
        return materialize(transpose(t, [self.parts, *(d for d in t.dims if d != self.parts)]), "value")

    def shared(self, t: Leaf) -> Leaf:
        """A shared argument, its batch split into micro-batches.

        It is made varying over the stages: each uses another micro-batch at a time, and the gradient is
        summed over the stages once, after the loop.
        """
        t = self.split_rows(t)
        if not isinstance(t, Tensor) or self.parts not in t.dims:
            return t
        assert t.splits is not None
        return self.stream(without_leading_dim(t), reshard(t, t.splits, self.axes))

    def merge_rows(self, spec: LeafSpec, array: jax.Array) -> Tensor:
        """The inverse of `split_rows`."""
        t = self.stream(spec, array)
        position = spec.dims.index(self.part)
        back = transpose(t, [*spec.dims[: position + 1], self.parts, *spec.dims[position + 1 :]])
        return merge(back, [self.part, self.parts], self.rows)

    def own_layers(self, item: Leaf, streams: Sequence[Tensor]) -> Leaf:
        """A stage's own layers. Stored parameters are gathered once, here ("1f1b" gathers them later).

        Args:
          item: a tensor with the layers' dim, or a raw array with it as the first dimension.
          streams: tensors over whose axes the parameters are made varying before the loop.
        """
        ctx = active.context
        if not isinstance(item, Tensor):
            return self._own_rows(item)
        position = item.dims.index(self.layers)
        role = item.role if self.schedule == "1f1b" else "value"
        splits = ctx.splits(item.dims, role)
        splits = (*splits[:position], self.axes, *splits[position + 1 :])
        vary_over: set[str] = set()
        if jnp.issubdtype(item.dtype, jnp.inexact):
            vary_over = {a for t in streams for axes in t.splits or () for a in axes}
        # Stages with fewer layers than others run on padding. It must not be zero: `f` may have no finite
        # derivative there, and the zero cotangent of a discarded result times infinity is NaN.
        array = safe_padding(reshard(item, splits, vary_over), item.dims, splits, self.layers)
        dims = tuple(self.stage_layers if d == self.layers else d for d in item.dims)
        inside = (*splits[:position], (), *splits[position + 1 :])
        return LeafSpec(dims, role, inside, frozenset()).rebuild(array)

    def _own_rows(self, array: jax.Array) -> jax.Array:
        """The same for a raw array."""
        array = jnp.asarray(array)
        if jnp.issubdtype(array.dtype, jax.dtypes.prng_key):
            # Key arrays support neither pad nor collectives; their data does.
            data = self._own_rows(jax.random.key_data(array))
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(array))
        missing = self.stage_layers.size * self.stages - array.shape[0]
        array = jnp.pad(array, [(0, missing), *[(0, 0)] * (array.ndim - 1)], mode="edge")
        return collectives.local_slice(array, self.axes, 0, self.stage_layers.size, plain=True)


@dataclass
class StageRunner:
    """The steps of the stages, inside the pipeline, where values differ from stage to stage.

    Attributes:
      spec: the pipeline.
      specs: those of the tensors of x, for one micro-batch.
      x_tree: the structure of x.
    """

    spec: PipelineSpec
    specs: list[LeafSpec]
    x_tree: PyTree

    @property
    def index(self) -> jax.Array:
        """The index of this stage."""
        return collectives.axis_index(self.spec.axes)

    def forward(
        self,
        streams: list[Tensor],
        own: list[Leaf],
        shared: PyTree,
        policy: str | Callable[..., bool] | None = "nothing",
    ) -> list[Tensor]:
        """The micro-batches as the last stage returns them; on the other stages the values are garbage."""
        spec, stage, last = self.spec, self.index, self.spec.stages - 1
        ticks = Dim(TICK, spec.parts.size + last)

        def tick(h: list[Tensor], given: tuple[list[Tensor], jax.Array]) -> tuple[list[Tensor], list[Tensor]]:
            entering, now = given
            h = self.hand_on(h, entering, 0)
            run = functools.partial(self.stage, own=own, shared=shared, number=self.clip(now - stage))
            made = (run if policy is None else checkpointed(run, policy))(h)
            return made, made

        given = self._feed(streams, ticks)
        _, made = scan(tick, self.dummy_inputs(streams), (given, jnp.arange(ticks.size)), ticks)
        return [spec.stream(s, t._read()[last:]) for s, t in zip(self.specs, made, strict=True)]

    def dummy_inputs(self, streams: list[Tensor]) -> list[Tensor]:
        """Inputs for stages that are idle at first: real values, where `f` has a finite derivative."""
        return [stop_gradient(s.rebuild(t._read()[0])) for s, t in zip(self.specs, streams, strict=True)]

    def _feed(self, streams: list[Tensor], ticks: Dim) -> list[Tensor]:
        """One micro-batch per tick, padded at the end with copies of the last one."""
        found = []
        for spec, t in zip(self.specs, streams, strict=True):
            last = lax.stop_gradient(t._read()[-1:])
            padding = jnp.broadcast_to(last, (ticks.size - self.spec.parts.size, *last.shape[1:]))
            found.append(with_leading_dim(ticks, spec, jnp.concatenate([t._read(), padding])))
        return found

    def clip(self, number: jax.Array) -> jax.Array:
        """The number of a micro-batch; idle stages compute the first or the last one again."""
        return jnp.clip(number, 0, self.spec.parts.size - 1)

    def hand_on(self, h: list[Tensor], new: list[Tensor], first: int) -> list[Tensor]:
        """The next input of each stage: its neighbour's output; at the stage `first`, the new values.

        Forward `first` is 0, and values move to the next stage; backward it is the last, and they move back.
        """
        count, step = self.spec.stages, 1 if first == 0 else -1
        pairs = [(k, k + step) for k in range(count) if 0 <= k + step < count]
        # The permute is no ring: the first stage receives zeros, which the new values replace.
        passed = [
            s.rebuild(collectives.permute(leaf_array(t), self.spec.axes, pairs))
            for s, t in zip(self.specs, h, strict=True)
        ]
        is_first = slice_tensor(self.index == first, ())
        return [where(is_first, n, p) for n, p in zip(new, passed, strict=True)]

    def stage(self, h: list[Tensor], own: list[Leaf], shared: PyTree, number: jax.Array) -> list[Tensor]:
        """The layers of this stage, applied to the micro-batch of this number."""
        spec = self.spec
        shared = jax.tree.map(lambda t: self._micro_batch(t, number), shared, is_leaf=is_tensor)
        is_layer = valid_mask((spec.layers,), (spec.axes,))

        def layer(h: list[Tensor], given: tuple[list[Leaf], jax.Array]) -> tuple[list[Tensor], None]:
            items, is_real = given
            params = jax.tree.unflatten(spec.items_tree, items)
            try:
                new, tree = flatten(spec.f(jax.tree.unflatten(self.x_tree, h), params, *shared))
            except DimError as error:
                if error.two_sizes == spec.part.name:
                    error.hint = (
                        f"a layer gets a micro-batch of x, {spec.part} of {spec.rows.size} rows; "
                        f"pass other tensors with the dim {spec.rows.name} as shared=(…,)"
                    )
                raise
            self._check(new, tree)
            if is_layer is not None:  # the layers are uneven: a padding layer is the identity
                new = [where(slice_tensor(is_real, ()), n, o) for n, o in zip(new, h, strict=True)]
            return new, None

        # Random draws inside depend on the row in the full batch, so that micro-batches don't change results.
        with active.context.in_part_of_dim(spec.part, spec.parts, number):
            return scan(layer, h, (own, is_layer), spec.stage_layers, unroll=spec.unroll)[0]

    def _micro_batch(self, t: Leaf, number: jax.Array) -> Leaf:
        """One micro-batch of a shared argument."""
        if not isinstance(t, Tensor) or self.spec.parts not in t.dims:
            return t
        return index_leading(t, number)

    def _check(self, new: list[Leaf], tree: PyTree) -> None:
        same = tree == self.x_tree
        for t, s in zip(new, self.specs, strict=False) if same else ():
            same &= isinstance(t, Tensor) and set(t.dims) == set(s.dims)
        if not same:
            shown = [describe(t) if isinstance(t, Tensor) else "a raw array" for t in new]
            dims = [f"[{', '.join(map(str, s.dims))}]" for s in self.specs]
            raise DimError(
                f"a layer of the pipeline maps {', '.join(dims)} to {', '.join(shown) or 'nothing'}",
                rule=f"every layer along {self.spec.layers.name} returns the dims that the next one takes",
                hint="return x with its own dims; change dims before or after the pipeline",
            )


def with_leading_dim(dim: Dim, spec: LeafSpec, array: jax.Array) -> Tensor:
    """A tensor from an array with an unsplit first dim, and the spec of its elements along it."""
    return slice_tensor(array, (dim, *spec.dims), ((), *spec.splits))


def without_leading_dim(t: Tensor) -> LeafSpec:
    """The spec of a tensor's elements along its first dim, which is not split."""
    assert t.splits is not None and not t.splits[0]
    return LeafSpec(t.dims[1:], "value", t.splits[1:], frozenset())


def index_leading(t: Tensor, number: jax.Array) -> Tensor:
    """One element of a tensor along its first dim."""
    array = lax.dynamic_index_in_dim(leaf_array(t), number, 0, keepdims=False)
    return without_leading_dim(t).rebuild(array)


def update_leading(t: Tensor, one: Tensor, number: jax.Array) -> Tensor:
    """A tensor with one element along its first dim replaced."""
    spec = LeafSpec.of(t)
    assert spec is not None
    return spec.rebuild(lax.dynamic_update_index_in_dim(leaf_array(t), leaf_array(one), number, 0))
