"""pipeline: a stack of layers in stages, each on its own devices, through which micro-batches stream.

With the rule `layers:pipe` a stage is a device's slice of the layers. At every tick each stage applies its layers
to what the stage before made at the last tick; the first takes the next micro-batch:

    tick       0  1  2  3  4        3 stages, 3 micro-batches: M + K - 1 ticks, in M of which a stage is busy
    stage 0    0  1  2  .  .
    stage 1    .  0  1  2  .
    stage 2    .  .  0  1  2

Activations at the boundaries travel, by permutes; parameters don't. What goes in is the same on all stages. What
comes out is passed on from the last stage to all, so that whatever follows is an ordinary program again.

Stages with nothing to do compute all the same, on something that is thrown away: devices run one program.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .. import collectives, context
from ..autodiff import remat as computed_again
from ..collectives import Axes
from ..context import Pipeline
from ..dims import Dim
from ..eager import op
from ..errors import DimError, LayoutError, ProgramError, ShapeError, TensorTypeError, nearest
from ..forms import Overcast, in_form, settle, slice_tensor
from ..padding import valid
from ..tensor import Tensor, describe
from .elementwise import stop_gradient, where
from .leaves import Form, around, array_of, common_dim, flatten
from .scan import scan
from .shape import merge, split, transpose

SCHEDULES = ("gpipe", "1f1b")
MICRO, TICK = "micro_batch", "tick"


@op(cached=False)
def pipeline(
    f: Callable[..., Any],
    x: Any,
    params: Any,
    dim: Any = "layers",
    *,
    micro: int | None = None,
    shared: Sequence[Any] = (),
    batch: str = "batch",
    schedule: str = "gpipe",
    remat: Any = None,
    unroll: int = 1,
) -> Any:
    """`x = f(x, layer, *shared)` for each layer; in stages where the layers' dim is split.

    Not split it is a `scan`, and `micro`, `batch` and `schedule` don't matter. Results never depend on them.

    Args:
      f: takes x, one layer's parameters (without the dim) and what is shared; returns the new x.
      x: a tensor, or a tree of tensors. In stages all of them have the batch's dim.
      params: a tree of tensors with the dim, and of raw arrays with it in front (keys for dropout).
      dim: the dim of the layers, by name.
      micro: in how many parts the batch streams through, a divisor of its size; by default the largest up
        to four times the number of stages, so that these are idle for at most a fifth of the time.
      shared: trees of tensors that all layers use. Of those with the batch's dim, `f` has the part at hand.
      batch: the name of the batch's dim.
      schedule: "gpipe": all micro-batches forward, then all backward; what each stage was given is kept.
        "1f1b": the backward pass runs the stages forward again, micro-batch by micro-batch just ahead of going
        back, so that a stage keeps at most 2K - 1 of what it was given; it computes a quarter more.
      remat: a policy of `wf.remat`: what the backward pass does not compute again. None: of layers that are not
        in stages all is kept; of a stage nothing but what it was given, as in GPipe.
      unroll: as in `scan`, for the layers.

    >>> import weft as wf
    >>> x, w = wf.ones("batch=4"), wf.tensor([1.0, 2.0, 3.0], "layers=3")
    >>> wf.pipeline(lambda x, w: x * w, x, w)
    f32[batch=4] [6., 6., 6., 6.]
    """
    program = context.require()
    items, items_tree = flatten(params)
    layers = common_dim(items, dim)
    (axes,) = program.splits((layers,))
    _check_schedule(schedule)
    if program.ways(axes) == 1:
        body = f if remat is None else computed_again(f, remat)
        return scan(lambda x, layer: (body(x, layer, *shared), None), x, params, layers, unroll=unroll)[0]
    line = _Line(f, layers, axes, _rows(x, batch), micro, items_tree, schedule, remat, unroll)
    program.pipelines.append(line.known())
    try:
        return line.run(x, items, shared, early=True)
    except Overcast:
        return line.run(x, items, shared, early=False)


def _check_schedule(schedule: str) -> None:
    if schedule not in SCHEDULES:
        raise ProgramError(
            f"there is no schedule {schedule!r}{nearest(schedule, SCHEDULES)}",
            rule=f"a pipeline's schedule is one of {', '.join(SCHEDULES)}",
            hint='schedule="gpipe"',
        )


def _rows(x: Any, batch: str) -> Dim:
    """The dim of the batch, which all of x has."""
    found = set()
    for leaf in flatten(x)[0]:
        if not isinstance(leaf, Tensor):
            raise TensorTypeError(
                f"a pipeline was given a raw array of shape {jnp.shape(leaf)} among x",
                rule="what streams through a pipeline are tensors",
                hint=f'name its dims: wf.tensor(array, "{batch}=8 …")',
            )
        rows = [d for d in leaf.dims if d.name == batch]
        if not rows:
            names = [d.name for d in leaf.dims]
            raise DimError(
                f"{describe(leaf)} has no dim {batch}{nearest(batch, names)}",
                rule="a pipeline cuts the batch into micro-batches, so all that streams through it has that dim",
                hint='name the dim with batch=…; give what all layers share as shared=(…,)',
            )
        found.update(rows)
    if len(found) > 1:
        raise DimError(
            f"x has {' and '.join(sorted(map(str, found)))}",
            rule="what streams through a pipeline has one batch",
            hint="slice the larger one",
        )
    return found.pop()


@dataclass
class _Line:
    """One pipeline: its stages are along `axes`, and micro-batch m has the rows m, m + micro, … of the batch."""

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
        if self.stages > self.layers.size:
            raise LayoutError(
                f"{self.layers} over {self.stages} devices ({'+'.join(self.axes)})",
                rule="every stage of a pipeline has a layer at least",
                hint=f"at most {self.layers.size} stages: a smaller axis, or no rule for {self.layers.name}",
            )
        (axes,) = program.splits((self.rows,))
        ways = program.ways(axes)
        if self.micro is None:
            self.micro = _micro(self.rows.size, ways, 4 * self.stages)
        if not isinstance(self.micro, int) or self.micro < 1 or self.rows.size % self.micro:
            fit = [n for n in range(1, self.rows.size + 1) if self.rows.size % n == 0]
            near = sorted(sorted(fit, key=lambda n: abs(n - self.micro))[:2]) if self.micro else fit[:2]
            raise ShapeError(
                f"{self.rows} in {self.micro} micro-batches",
                rule="micro-batches are of one size, so their number divides that of the batch",
                hint=f"micro={' or '.join(map(str, near))}",
            )
        self.here = Dim(f"{self.layers.name}_here", program.slice_size(self.layers, self.axes))
        self.part = Dim(self.rows.name, self.rows.size // self.micro)
        self.parts = Dim(MICRO, self.micro)
        self.ticks = Dim(TICK, self.micro + self.stages - 1)

    def known(self) -> Pipeline:
        assert self.micro is not None
        return Pipeline(self.layers, self.axes, self.stages, self.rows, self.micro, self.schedule)

    def run(self, x: Any, items: list[Any], shared: Sequence[Any], early: bool) -> Any:
        """What comes out of the last stage, on all devices."""
        program = context.require()
        leaves, x_tree = flatten(x)
        dealt = [self._dealt(leaf) for leaf in leaves]
        forms = [Form.of(_without_first(t)) for t in dealt]
        streams = [collectives.to_stage(t._array, self.axes, 0) for t in dealt]
        own = [self._own(item, dealt if early else ()) for item in items]
        around_it = jax.tree.map(self._dealt, shared, is_leaf=lambda t: isinstance(t, Tensor))
        with program.mapping(program.mapped | set(self.axes), program.vmaps):
            run = _Stages(self, forms, x_tree, own, around_it)
            out = run.forward(streams)
        whole = [collectives.from_stage(a, self.axes, self.stages - 1) for a in out]
        results = [self._gathered(f, a) for f, a in zip(forms, whole, strict=True)]
        return jax.tree.unflatten(x_tree, results)

    def _dealt(self, t: Any) -> Any:
        """A tensor with the batch dealt out to micro-batches, their dim in front; others as they are."""
        if not isinstance(t, Tensor) or self.rows.name not in {d.name for d in t.dims}:
            return t
        t = split(t, self.rows, [self.part, self.parts])
        return settle(transpose(t, [self.parts, *(d for d in t.dims if d != self.parts)]), "value")

    def _gathered(self, form: Form, array: Any) -> Tensor:
        """The other way."""
        t = slice_tensor(array, (self.parts, *form.dims), ((), *form.splits))
        place = form.dims.index(self.part)
        back = transpose(t, [*form.dims[: place + 1], self.parts, *form.dims[place + 1 :]])
        return merge(back, [self.part, self.parts], self.rows)

    def _own(self, item: Any, streams: Sequence[Any]) -> Any:
        """A stage's own layers; gathered, if they are stored in further pieces, once."""
        program = context.require()
        if not isinstance(item, Tensor):
            return self._own_rows(item)
        splits = program.splits(item.dims)
        further = set()
        if item.splits != splits and jnp.issubdtype(item.dtype, jnp.inexact):
            further = {a for t in streams for axes in t.splits for a in axes}
        array = in_form(item, splits, further)
        place = item.dims.index(self.layers)
        dims = tuple(self.here if d == self.layers else d for d in item.dims)
        return Form(dims, "value", (*splits[:place], (), *splits[place + 1 :]), frozenset()).around(array)

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
class _Stages:
    """What the stages do, inside the pipeline: there values differ from stage to stage."""

    line: _Line
    forms: list[Form]
    x_tree: Any
    own: list[Any]
    shared: Sequence[Any]

    def forward(self, streams: list[Any]) -> list[Any]:
        """What each stage made of each micro-batch that reached it, as at the last stage: in order."""
        line, stage = self.line, collectives.index(self.line.axes)
        idle = line.stages - 1
        fed = [_stretched(a, after=idle) for a in streams]
        given = [_with_first(line.ticks, f, a) for f, a in zip(self.forms, fed, strict=True)]
        begin = [stop_gradient(f.around(a[0])) for f, a in zip(self.forms, streams, strict=True)]

        def tick(h: list[Tensor], given: tuple[list[Tensor], Any]) -> tuple[list[Tensor], list[Tensor]]:
            entering, now = given
            h = self._entered(h, entering, stage == 0, 1)
            made = self.stage(h, jnp.clip(now - stage, 0, line.parts.size - 1))
            return made, made

        _, made = scan(tick, begin, (given, jnp.arange(line.ticks.size)), line.ticks)
        return [t._array[idle:] for t in made]

    def _entered(self, h: list[Tensor], new: list[Tensor], first: Any, step: int) -> list[Tensor]:
        """What a stage is given: from the stage before, or, where the line begins, what is new."""
        line = self.line
        pairs = [(k, k + step) for k in range(line.stages) if 0 <= k + step < line.stages]
        passed = [f.around(collectives.permute(array_of(t), line.axes, pairs)) for f, t in zip(self.forms, h)]
        here = slice_tensor(first, ())
        return [where(here, n, p) for n, p in zip(new, passed, strict=True)]

    def stage(self, h: list[Tensor], number: Any) -> list[Tensor]:
        """The layers of this stage, on the micro-batch of this number."""
        line, program = self.line, context.require()
        shared = jax.tree.map(lambda t: self._of(t, number), self.shared, is_leaf=lambda t: isinstance(t, Tensor))
        is_layer = valid((line.layers,), (line.axes,))

        def layer(h: list[Tensor], given: Any) -> tuple[list[Tensor], None]:
            params, there = given
            params = jax.tree.unflatten(line.items_tree, params)
            new, tree = flatten(line.f(jax.tree.unflatten(self.x_tree, h), params, *shared))
            self._check(new, tree)
            if is_layer is not None:
                new = [where(slice_tensor(there, ()), n, o) for n, o in zip(new, h, strict=True)]
            return new, None

        def run(h: list[Tensor]) -> list[Tensor]:
            with program.dealing(line.part, line.parts, number):
                return scan(layer, h, (self.own, is_layer), line.here, unroll=line.unroll)[0]

        return computed_again(run, line.remat or "nothing")(h)

    def _of(self, t: Any, number: Any) -> Any:
        """What is shared, of one micro-batch."""
        if not isinstance(t, Tensor) or self.line.parts not in t.dims:
            return t
        form = Form.of(_without_first(t))
        assert form is not None
        array = collectives.vary(t._array, self.line.axes)
        return form.around(lax.dynamic_index_in_dim(array, number, 0, keepdims=False))

    def _check(self, new: list[Any], tree: Any) -> None:
        line = self.line
        same = tree == self.x_tree
        for t, f in zip(new, self.forms, strict=False) if same else ():
            same &= isinstance(t, Tensor) and set(t.dims) == set(f.dims)
        if not same:
            shown = [describe(t) if isinstance(t, Tensor) else "a raw array" for t in new]
            dims = [f"[{', '.join(map(str, f.dims))}]" for f in self.forms]
            raise DimError(
                f"a layer of the pipeline makes {', '.join(shown)} of {', '.join(dims)}",
                rule=f"every layer along {line.layers.name} gives what the next one takes: the same dims",
                hint="return x with its own dims; what changes them goes before or after the pipeline",
            )


def _micro(rows: int, ways: int, most: int) -> int:
    """A number of micro-batches: as many as can be up to so many, of rows that all devices have alike."""
    divisors = [n for n in range(1, min(rows, most) + 1) if rows % n == 0]
    even = [n for n in divisors if (rows // n) % ways == 0]
    return max(even or divisors)


def _stretched(array: Any, after: int) -> Any:
    """With its last place said over and over."""
    last = lax.stop_gradient(array[-1:])
    return jnp.concatenate([array, *[last] * after]) if after else array


def _with_first(dim: Dim, form: Form, array: Any) -> Tensor:
    return slice_tensor(array, (dim, *form.dims), ((), *form.splits))


def _without_first(t: Tensor) -> Tensor:
    """The form of a tensor's places along its first dim, which is not split."""
    assert t.splits is not None and not t.splits[0]
    form = Form(t.dims[1:], "value", t.splits[1:], frozenset())
    return form.around(t._array[0])
