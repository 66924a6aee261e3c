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

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from ..autodiff.grad import remat as computed_again
from ..core import collectives, context
from ..core.boundary import LeafSpec, common_dim, flatten, rebuild_leaf
from ..core.context import RetraceUnvarying
from ..core.describe import describe
from ..core.dims import Dim
from ..core.errors import DimError, ProgramError, TensorTypeError, nearest, python_number_error
from ..core.op import op
from ..core.reshard import materialize
from ..core.tensor import Tensor, is_tensor
from ..ops.scan import scan
from .schedules import SCHEDULES
from .stages import PipelineSpec, StageRunner, without_leading_dim


@op(functions=True)
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
        going back, so that a stage keeps at most 2K - 1 of what it was given. That takes 1.25 + bubble times
        the work of "gpipe", about 1.4 times by default.
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
    line = PipelineSpec(
        f, layers, axes, _rows(x, batch), micro, items_tree, schedule, remat or "nothing", unroll
    )
    if schedule == "1f1b" and remat is not None:
        line.f = computed_again(f, remat)
    if line.stages == 1:
        program.pipelines[replace(line.known(), micro=micro or 0)] = None
        return _opened(line, f if remat is None else computed_again(f, remat), x, items, shared)
    program.pipelines[line.known()] = None
    used = [(frame, set(frame.reused)) for frame in program.frames]
    try:
        return _staged(line, x, items, shared, early=line.schedule == "gpipe")
    except RetraceUnvarying:
        for frame, before in used:  # what a failed attempt used counts for nothing
            frame.reused = before
        return _staged(line, x, items, shared, early=False)


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
        raise python_number_error(
            TensorTypeError,
            "the number of micro-batches",
            micro,
            rule="it is an integer, or None",
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


def _staged(line: PipelineSpec, x: Any, items: list[Any], shared: Sequence[Any], early: bool) -> Any:
    """What comes out of the last stage, on all devices."""
    program = context.require()
    plain = program.vmap_depth > 0  # where JAX's `linear_call` has no rule
    leaves, x_tree = flatten(x)
    dealt = [line.dealt(leaf) for leaf in leaves]
    forms = [without_leading_dim(t) for t in dealt]
    streams = [collectives.to_stage(t._array, line.axes, 0, plain=plain) for t in dealt]
    own = [line.own(item, dealt if early else ()) for item in items]
    around_it = jax.tree.map(line.shared, tuple(shared), is_leaf=is_tensor)
    stages = StageRunner(line, forms, x_tree)
    with (
        program.vmapping(program.vmapped_axes | set(line.axes), program.vmap_depth),
        program.in_pipeline(line.layers),
    ):
        given = [line.stream(f, a) for f, a in zip(forms, streams, strict=True)]
        out = [t._array for t in SCHEDULES[line.schedule](stages, given, own, around_it)]
    whole = [collectives.from_stage(a, line.axes, line.stages - 1, plain=plain) for a in out]
    results = [line.gathered(f, a) for f, a in zip(forms, whole, strict=True)]
    return jax.tree.unflatten(x_tree, results)


def _opened(
    line: PipelineSpec, f: Callable[..., Any], x: Any, items: list[Any], shared: Sequence[Any]
) -> Any:
    """For a search, which looks at what a split does on an axis of one device: a scan in a stage."""
    program = context.require()
    leaves, x_tree = flatten(x)
    leaves = [materialize(leaf, "value") for leaf in leaves]
    own = [line.own(item, ()) for item in items]

    def layer(h: list[Tensor], params: list[Any]) -> tuple[list[Tensor], None]:
        h = jax.tree.unflatten(x_tree, h)
        return flatten(f(h, jax.tree.unflatten(line.items_tree, params), *shared))[0], None

    forms = [LeafSpec.of(leaf) for leaf in leaves]
    entered = [collectives.to_stage(leaf._array, line.axes, 0) for leaf in leaves]
    with (
        program.vmapping(program.vmapped_axes | set(line.axes), program.vmap_depth),
        program.in_pipeline(line.layers),
    ):
        given = [rebuild_leaf(f, a) for f, a in zip(forms, entered, strict=True)]
        made, _ = scan(layer, given, own, line.here, unroll=line.unroll)
        out = [t._array for t in made]
    left = [collectives.from_stage(a, line.axes, 0) for a in out]
    return jax.tree.unflatten(x_tree, [rebuild_leaf(f, a) for f, a in zip(forms, left, strict=True)])
