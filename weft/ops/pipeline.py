"""pipeline: a stack of layers in stages, each on its own devices, through which micro-batches stream.

With the rule `layers:pipe` a stage is a device's slice of the layers. At every tick each stage applies its
layers to what the stage before made at the last tick; the first takes the next micro-batch:

    tick       0  1  2  3  4        3 stages, 3 micro-batches: M + K - 1 ticks, in M of which a stage is busy
    stage 0    0  1  2  .  .
    stage 1    .  0  1  2  .
    stage 2    .  .  0  1  2

Activations at the boundaries travel, by permutes; parameters don't. What goes in is the same on all stages.
What comes out is passed on from the last stage to all, so that whatever follows is an ordinary program again.

Stages with nothing to do compute all the same, on something that is thrown away: devices run one program.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .. import collectives, context
from ..autodiff import custom_vjp, vjp
from ..autodiff import remat as computed_again
from ..collectives import Axes
from ..context import Pipeline
from ..dims import Dim
from ..eager import op
from ..errors import DimError, LayoutError, ProgramError, ShapeError, TensorTypeError, nearest
from ..forms import Overcast, in_form, settle, slice_tensor
from ..padding import valid
from ..tensor import Tensor, describe, is_tensor
from .elementwise import stop_gradient, where
from .floats import Floats, sums, zeros_of
from .leaves import Form, around, array_of, common_dim, flatten
from .scan import scan
from .shape import merge, split, transpose

MICRO, TICK, SLOT = "_micro", "_tick", "_slot"  # of which no rule speaks


@op(cached=False)
def pipeline(
    f: Callable[..., Any],
    x: Any,
    params: Any,
    dim: Any = "layers",
    *,
    micro: int | None = None,
    shared: Sequence[Any] = (),
    batch: str | Dim = "batch",
    schedule: str = "gpipe",
    remat: Any = None,
    unroll: int = 1,
) -> Any:
    """`x = f(x, layer, *shared)` for each layer; in stages where the layers' dim is split.

    Not split it is a `scan`, and `micro`, `batch` and `schedule` don't matter. Results never depend on them.

    Args:
      f: takes x, one layer's parameters (without the dim) and what is shared; returns the new x. It treats
        the rows of the batch one by one: in stages it has a part of them, and what mixes rows is refused.
      x: a tensor, or a tree of tensors. In stages all of them have the batch's dim.
      params: a tree of tensors with the dim, and of raw arrays with it in front (keys for dropout).
      dim: the dim of the layers, by name.
      micro: in how many parts the batch streams through, a divisor of its size; by default the largest up
        to four times the number of stages: with "gpipe" these are then idle for a fifth of the time at most.
      shared: a tuple of what all layers use, tensors or trees of them. Of those with the batch's dim, `f`
        has the part at hand. With "1f1b", what should have gradients comes here too, not by a closure.
      batch: the batch's dim, by name.
      schedule: "gpipe": all micro-batches forward, then all backward; what each stage was given is kept.
        "1f1b": the backward pass runs the stages forward again, micro-batch by micro-batch just ahead of
        going back, so that a stage keeps at most 2K - 1 of what it was given; it computes a quarter more.
      remat: a policy of `wf.remat`: what the backward pass does not compute again. With "gpipe" of a stage,
        of which nothing is kept otherwise; else of a layer, of which all is.
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
    _check_shared(shared)
    micro, batch = _as_count(micro), batch.name if isinstance(batch, Dim) else batch
    if not axes:
        body = f if remat is None else computed_again(f, remat)
        return scan(lambda x, layer: (body(x, layer, *shared), None), x, params, layers, unroll=unroll)[0]
    line = _Line(f, layers, axes, _rows(x, batch), micro, items_tree, schedule, remat or "nothing", unroll)
    if schedule == "1f1b" and remat is not None:
        line.f = computed_again(f, remat)
    if line.stages == 1:
        program.pipelines[replace(line.known(), micro=micro or 0)] = None
        return line.opened(f if remat is None else computed_again(f, remat), x, items, shared)
    program.pipelines[line.known()] = None
    used = [(frame, set(frame.used)) for frame in program.frames]
    try:
        return line.run(x, items, shared, early=line.schedule == "gpipe")
    except Overcast:
        for frame, before in used:  # what a failed attempt used counts for nothing
            frame.used = before
        return line.run(x, items, shared, early=False)


def _check_schedule(schedule: str) -> None:
    if schedule not in tuple(SCHEDULES):
        close = nearest(schedule, SCHEDULES) if isinstance(schedule, str) else ""
        raise ProgramError(
            f"there is no schedule {schedule!r}{close}",
            rule=f"a pipeline's schedule is one of {', '.join(SCHEDULES)}",
            hint='schedule="gpipe"',
        )


def _check_shared(shared: Sequence[Any]) -> None:
    if not isinstance(shared, tuple | list):
        given = describe(shared) if isinstance(shared, Tensor) else f"a {type(shared).__name__}"
        raise TensorTypeError(
            f"a pipeline was given {given} as what its layers share",
            rule="that is a tuple, of which each part is one more argument of f",
            hint="shared=(gain, bias), and of one part shared=(gain,)",
        )


def _as_count(micro: Any) -> int | None:
    try:
        return None if micro is None else operator.index(micro)
    except TypeError:
        raise TensorTypeError(
            f"the number of micro-batches is {micro!r}",
            rule="it is a whole number, or None",
            hint="micro=4; None is for as many as are usual",
        ) from None


def _rows(x: Any, batch: str) -> Dim:
    """The dim of the batch, which all of x has."""
    found = set()
    if not isinstance(batch, str):
        raise DimError(
            f"the batch's dim is {batch!r}",
            rule="a dim is named by a Dim of the tensor or by its name",
            hint='batch="batch"',
        )
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
                rule="a pipeline cuts the batch into micro-batches: all that streams through it has that dim",
                hint="name the dim with batch=…; give what all layers share as shared=(…,)",
            )
        found.update(rows)
    if len(found) > 1:
        raise DimError(
            f"x has {' and '.join(sorted(map(str, found)))}",
            rule="what streams through a pipeline has one batch",
            hint="slice the larger one",
        )
    if not found:
        raise TensorTypeError(
            "x has no tensors",
            rule="what streams through a pipeline are tensors",
            hint="give what goes into the first layer as x; without any, wf.scan runs along the layers",
        )
    return found.pop()


@dataclass
class _Line:
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
        clash = program.mapped & set(self.axes)
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

    def run(self, x: Any, items: list[Any], shared: Sequence[Any], early: bool) -> Any:
        """What comes out of the last stage, on all devices."""
        program = context.require()
        plain = program.vmaps > 0  # where JAX's `linear_call` has no rule
        leaves, x_tree = flatten(x)
        dealt = [self._dealt(leaf) for leaf in leaves]
        forms = [_form_of_one(t) for t in dealt]
        streams = [collectives.to_stage(t._array, self.axes, 0, plain=plain) for t in dealt]
        own = [self._own(item, dealt if early else ()) for item in items]
        around_it = jax.tree.map(self._shared, tuple(shared), is_leaf=is_tensor)
        stages = _Stages(self, forms, x_tree)
        with program.mapping(program.mapped | set(self.axes), program.vmaps), program.staging(self.layers):
            given = [self._stream(f, a) for f, a in zip(forms, streams, strict=True)]
            out = [t._array for t in SCHEDULES[self.schedule](stages, given, own, around_it)]
        whole = [collectives.from_stage(a, self.axes, self.stages - 1, plain=plain) for a in out]
        results = [self._gathered(f, a) for f, a in zip(forms, whole, strict=True)]
        return jax.tree.unflatten(x_tree, results)

    def opened(self, f: Callable[..., Any], x: Any, items: list[Any], shared: Sequence[Any]) -> Any:
        """For a search, which looks at what a split does on an axis of one device: a scan in a stage."""
        program = context.require()
        leaves, x_tree = flatten(x)
        leaves = [settle(leaf, "value") for leaf in leaves]
        own = [self._own(item, ()) for item in items]

        def layer(h: list[Tensor], params: list[Any]) -> tuple[list[Tensor], None]:
            h = jax.tree.unflatten(x_tree, h)
            return flatten(f(h, jax.tree.unflatten(self.items_tree, params), *shared))[0], None

        forms = [Form.of(leaf) for leaf in leaves]
        entered = [collectives.to_stage(leaf._array, self.axes, 0) for leaf in leaves]
        with program.mapping(program.mapped | set(self.axes), program.vmaps), program.staging(self.layers):
            given = [around(f, a) for f, a in zip(forms, entered, strict=True)]
            made, _ = scan(layer, given, own, self.here, unroll=self.unroll)
            out = [t._array for t in made]
        left = [collectives.from_stage(a, self.axes, 0) for a in out]
        return jax.tree.unflatten(x_tree, [around(f, a) for f, a in zip(forms, left, strict=True)])

    def _stream(self, form: Form, array: Any) -> Tensor:
        return _with_first(self.parts, form, array)

    def _dealt(self, t: Any) -> Any:
        """A tensor with the batch dealt out to micro-batches, their dim in front; others as they are."""
        if not isinstance(t, Tensor) or self.rows.name not in {d.name for d in t.dims}:
            return t
        t = split(t, self.rows, [self.part, self.parts])
        return settle(transpose(t, [self.parts, *(d for d in t.dims if d != self.parts)]), "value")

    def _shared(self, t: Any) -> Any:
        """What is shared; each stage has another part of what is dealt, so its gradient is summed at last."""
        t = self._dealt(t)
        if not isinstance(t, Tensor) or self.parts not in t.dims:
            return t
        assert t.splits is not None
        return self._stream(_form_of_one(t), in_form(t, t.splits, self.axes))

    def _gathered(self, form: Form, array: Any) -> Tensor:
        """The other way."""
        t = self._stream(form, array)
        place = form.dims.index(self.part)
        back = transpose(t, [*form.dims[: place + 1], self.parts, *form.dims[place + 1 :]])
        return merge(back, [self.part, self.parts], self.rows)

    def _own(self, item: Any, streams: Sequence[Any]) -> Any:
        """A stage's own layers; if they are stored in further pieces, gathered once (by "1f1b" later)."""
        program = context.require()
        if not isinstance(item, Tensor):
            return self._own_rows(item)
        place, role = item.dims.index(self.layers), item.role if self.schedule == "1f1b" else "value"
        splits = program.splits(item.dims, role)
        splits = (*splits[:place], self.axes, *splits[place + 1 :])
        further = set()
        if jnp.issubdtype(item.dtype, jnp.inexact):
            further = {a for t in streams for axes in t.splits for a in axes}
        array = in_form(item, splits, further)
        dims = tuple(self.here if d == self.layers else d for d in item.dims)
        return Form(dims, role, (*splits[:place], (), *splits[place + 1 :]), frozenset()).around(array)

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

    @property
    def number(self) -> Any:
        """That of this stage."""
        return collectives.index(self.line.axes)

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
        return [line._stream(f, t._array[idle:]) for f, t in zip(self.forms, made, strict=True)]

    def begin(self, streams: list[Tensor]) -> list[Tensor]:
        """Something for stages that have nothing to do yet: true values, of which f has a derivative."""
        return [stop_gradient(f.around(t._array[0])) for f, t in zip(self.forms, streams, strict=True)]

    def _fed(self, streams: list[Tensor], ticks: Dim, before: int) -> list[Tensor]:
        """Micro-batches, one for each tick; the first and the last are said over where there is none."""
        found = []
        for form, t in zip(self.forms, streams, strict=True):
            after = ticks.size - before - self.line.parts.size
            first, last = (lax.stop_gradient(a) for a in (t._array[:1], t._array[-1:]))
            early, late = (
                jnp.broadcast_to(a, (n, *a.shape[1:])) for a, n in ((first, before), (last, after))
            )
            found.append(_with_first(ticks, form, jnp.concatenate([early, t._array, late])))
        return found

    def part(self, number: Any) -> Any:
        return jnp.clip(number, 0, self.line.parts.size - 1)

    def handed_on(self, h: list[Tensor], new: list[Tensor], first: int) -> list[Tensor]:
        """What each stage is given: by the one before it, seen from the first, and there what is new."""
        count, step = self.line.stages, 1 if first == 0 else -1
        pairs = [(k, k + step) for k in range(count) if 0 <= k + step < count]
        passed = [
            f.around(collectives.permute(array_of(t), self.line.axes, pairs))
            for f, t in zip(self.forms, h, strict=True)
        ]
        here = slice_tensor(self.number == first, ())
        return [where(here, n, p) for n, p in zip(new, passed, strict=True)]

    def stage(self, h: list[Tensor], own: list[Any], shared: Any, number: Any) -> list[Tensor]:
        """The layers of this stage, on the micro-batch of this number."""
        line = self.line
        shared = jax.tree.map(lambda t: self._of(t, number), shared, is_leaf=is_tensor)
        is_layer = valid((line.layers,), (line.axes,))

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

        with context.require().dealing(line.part, line.parts, number):
            return scan(layer, h, (own, is_layer), line.here, unroll=line.unroll)[0]

    def _of(self, t: Any, number: Any) -> Any:
        """What is shared, of one micro-batch."""
        if not isinstance(t, Tensor) or self.line.parts not in t.dims:
            return t
        return _at(t, number)

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


def _with_first(dim: Dim, form: Form, array: Any) -> Tensor:
    return slice_tensor(array, (dim, *form.dims), ((), *form.splits))


def _form_of_one(t: Tensor) -> Form:
    """The form of a tensor's places along its first dim, which is not split."""
    assert t.splits is not None and not t.splits[0]
    return Form(t.dims[1:], "value", t.splits[1:], frozenset())


# Schedules: each from the micro-batches, a stage's layers and what is shared to what comes out.


def _gpipe(stages: _Stages, streams: list[Tensor], own: list[Any], shared: Any) -> list[Tensor]:
    """All forward, then all backward, by JAX's own derivative of the loop."""
    return stages.forward(streams, own, shared, stages.line.remat)


def _one_by_one(stages: _Stages, streams: list[Tensor], own: list[Any], shared: Any) -> list[Tensor]:
    """The backward pass runs forward again, just ahead of itself.

    At tick t stage k of K runs micro-batch t - k forward, and t - 2(K - 1) + k backward: at the last stage
    the same one. Between the two it keeps what it was given, for 2(K - 1 - k) ticks.
    """
    line, mine, common = stages.line, Floats(own), Floats(shared)
    idle = line.stages - 1
    # Of parameters that are stored in pieces both passes use what is gathered here, and of the gradients each
    # device keeps its piece of the sum.
    gathered = [settle(t, "value") if isinstance(t, Tensor) else t for t in mine.floats]

    named = context.require().op  # by which plans know what belongs to the pipeline

    def whole(own: Any, shared: Any, fixed: Any) -> tuple[Any, Any]:
        return mine.whole(own, fixed[0]), common.whole(shared, fixed[1])

    def forward(streams: Any, pieces: Any, shared: Any, own: Any, fixed: Any) -> Any:
        with context.require().lowering(named):
            return stages.forward(streams, *whole(own, shared, fixed), None)

    def backward(kept: Any, cotangents: list[Tensor]) -> tuple[Any, ...]:
        with context.require().lowering(named):
            return back(kept, cotangents)

    def back(kept: Any, cotangents: list[Tensor]) -> tuple[Any, ...]:
        streams, shared, own, fixed = kept
        _check_floats(streams)
        stage, slots = stages.number, Dim(SLOT, 2 * idle + 1)
        ticks = Dim(TICK, line.parts.size + 2 * idle)
        # What goes in is needed at the first stage, and where it was, that of which it is the gradient comes
        # out; the gradients that go in are needed at the last: all are in one place.
        first = slice_tensor(stage == 0, ())
        ends = [where(first, x, g) for x, g in zip(streams, cotangents, strict=True)]

        def tick(carry: Any, now: Any) -> tuple[Any, None]:
            h, g, held, ends, (own_grads, shared_grads) = carry
            h = stages.handed_on(h, [_at(t, stages.part(now)) for t in ends], 0)
            held = [_with(to, t, now % slots.size) for to, t in zip(held, h, strict=True)]
            made = stages.stage(h, *whole(own, shared, fixed), stages.part(now - stage))

            number = now - 2 * idle + stage
            there = slice_tensor((number >= 0) & (number < line.parts.size), ())
            returning = [_at(t, stages.part(now - idle)) for t in ends]
            g = [where(there, t, 0.0) for t in stages.handed_on(g, returning, idle)]
            before = [_at(t, (now - 2 * (idle - stage)) % slots.size) for t in held]

            def again(h: Any, own: Any, shared: Any) -> Any:
                return stages.stage(h, *whole(own, shared, fixed), stages.part(number))

            _, pull = vjp(again, before, own, shared, zeros=False)
            h_grads, of_own, of_shared = pull(g)
            g = [zeros_of(t) if x is None else x for x, t in zip(h_grads, before, strict=True)]
            leaves, out = slice_tensor((stage == 0) & (number >= 0), ()), stages.part(number)
            ends = [_with(t, where(leaves, x, _at(t, out)), out) for t, x in zip(ends, g, strict=True)]
            grads = sums(own_grads, of_own), sums(shared_grads, of_shared)
            return (made, g, held, ends, grads), None

        begin = stages.begin(streams)
        held = [
            _with_first(slots, f, jnp.stack([t._array] * slots.size))
            for f, t in zip(stages.forms, begin, strict=True)
        ]
        none = [zeros_of(t) for t in own], [zeros_of(t) for t in shared]
        carry = begin, [zeros_of(t) for t in begin], held, ends, none
        (_, _, _, ends, grads), _ = scan(tick, carry, jnp.arange(ticks.size), ticks)
        return ends, *grads, None, None

    run = custom_vjp(forward)
    run.defvjp(lambda x, pieces, *rest: (forward(x, pieces, *rest), (x, *rest)), backward)
    return run(streams, mine.floats, common.floats, gathered, (mine.fixed, common.fixed))


def _check_floats(streams: list[Tensor]) -> None:
    whole = [t for t in streams if not jnp.issubdtype(t.dtype, jnp.inexact)]
    if whole:
        raise TensorTypeError(
            f"numbers of type {', '.join(sorted({str(t.dtype) for t in whole}))} stream through a pipeline "
            'that is differentiated by the schedule "1f1b"',
            rule="this one sends back a gradient of all that streams, so these are floats",
            hint='give what has no gradient as shared=(…,); or schedule="gpipe"',
        )


def _at(t: Tensor, number: Any) -> Tensor:
    """One place of a tensor along its first dim."""
    return _form_of_one(t).around(lax.dynamic_index_in_dim(array_of(t), number, 0, keepdims=False))


def _with(t: Tensor, one: Tensor, number: Any) -> Tensor:
    """A tensor with another one at that place."""
    form = Form.of(t)
    assert form is not None
    return form.around(lax.dynamic_update_index_in_dim(array_of(t), array_of(one), number, 0))


SCHEDULES = {"gpipe": _gpipe, "1f1b": _one_by_one}
