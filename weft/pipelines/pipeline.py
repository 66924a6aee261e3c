"""pipeline: a stack of layers split into stages on different devices; micro-batches stream through them.

With the rule `layers:pipe`, a stage is a device's slice of the layers. At every tick each stage applies its
layers to the output that the previous stage made one tick earlier; the first takes the next micro-batch:

    tick       0  1  2  3  4        3 stages, 3 micro-batches: M + K - 1 ticks; a stage is busy in M of them
    stage 0    0  1  2  .  .
    stage 1    .  0  1  2  .
    stage 2    .  .  0  1  2

Only the activations at stage boundaries move, by permutes; parameters stay. The input is replicated over the
stages. The output is broadcast from the last stage to all, so the code that follows is an ordinary program.

Idle stages still run, on dummy data that is discarded, because every device executes the same program.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp

from ..autodiff.remat import remat as checkpointed
from ..core import collectives
from ..core.boundary import LeafSpec, common_dim, flatten, rebuild_leaf
from ..core.context import active
from ..core.describe import describe
from ..core.dims import Dim, DimLike, dim_name
from ..core.errors import DimError, ProgramError, TensorTypeError, nearest, python_number_error
from ..core.op import op
from ..core.reshard import materialize
from ..core.retrace import trace_with_guess
from ..core.tensor import Tensor, is_tensor
from ..core.types import PyTree, Tree
from ..ops.scan import scan
from .schedules import SCHEDULES
from .stages import Leaf, PipelineSpec, StageRunner, without_leading_dim


@op(example=lambda op, p, kernel: op(lambda x, w: x * w, p, kernel["f", 0], "w", batch="a"), functions=True)
def pipeline(
    f: Callable[..., Tree],
    x: Tree,
    params: PyTree,
    dim: DimLike = "layers",
    *,
    micro: int | None = None,
    shared: Sequence[PyTree] = (),
    batch: DimLike = "batch",
    schedule: str = "gpipe",
    remat: str | Callable[..., bool] | None = None,
    unroll: int = 1,
) -> Tree:
    """`x = f(x, layer, *shared)` for each layer; in stages if the layers' dim is split.

    If it is not split, this is a `scan`, and `micro`, `batch` and `schedule` have no effect. Results never
    depend on them.

    Args:
      f: takes x, one layer's parameters (without the dim) and the shared arguments; returns the new x. It
        must treat the rows of the batch independently: in stages it gets some of them at a time, and an op
        that mixes rows raises an error.
      x: a tensor, or a tree of tensors. In stages all of them have the batch's dim.
      params: a tree of tensors with the dim, and of raw arrays with it as the first dimension (keys for
        dropout).
      dim: the dim of the layers.
      micro: the number of micro-batches, a divisor of the batch's size; by default the largest one up to four
        times the number of stages, with which "gpipe" stages are idle at most a fifth of the time.
      shared: a tuple of further arguments, the same for all layers: tensors or trees of them. Of a tensor
        with the batch's dim, `f` gets the current micro-batch. With "1f1b", tensors that need gradients have
        to be passed here, not captured by a closure.
      batch: the dim of the batch.
      schedule: "gpipe": all micro-batches forward, then all backward; the inputs of every stage are saved.
        "1f1b": the backward pass runs the stages forward again, each micro-batch just before its backward
        step, so a stage holds at most 2K - 1 of its inputs. This takes 1.25 + bubble times the work of
        "gpipe", about 1.4 times by default.
      remat: a policy of `wf.remat`: what the backward pass does not recompute. With "gpipe" it applies to a
        stage, which by default saves nothing; with "1f1b", and without stages, to a layer, which by default
        saves everything.
      unroll: as in `scan`, for the layers.

    >>> import weft as wf
    >>> x, w = wf.ones("batch=4"), wf.tensor([1.0, 2.0, 3.0], "layers=3")
    >>> wf.pipeline(lambda x, w: x * w, x, w)
    f32[batch=4] [6., 6., 6., 6.]
    """
    ctx = active.context
    items, items_tree = flatten(params)
    layers = common_dim(items, dim)
    (axes,) = ctx.splits((layers,))
    _check_schedule(schedule)
    _check_shared(shared)
    micro, batch = _as_integer(micro), dim_name(batch)
    if not axes:
        body = f if remat is None else checkpointed(f, remat)
        return scan(lambda x, layer: (body(x, layer, *shared), None), x, params, layers, unroll=unroll)[0]
    rows = _batch_dim(x, batch)
    spec = PipelineSpec(f, layers, axes, rows, micro, items_tree, schedule, remat or "nothing", unroll)
    if schedule == "1f1b" and remat is not None:
        spec.f = checkpointed(f, remat)
    # An axis of one device occurs in the layout search, which traces a pipeline to learn what splitting it
    # costs.
    if spec.stages == 1:
        ctx.observations.pipelines[replace(spec.record(), micro=micro or 0)] = None
        return _one_stage(spec, f if remat is None else checkpointed(f, remat), x, items, shared)
    ctx.observations.pipelines[spec.record()] = None
    # Casting the parameters to varying before the loop sums their gradients once, after all ticks. That is
    # impossible where `f` needs a parameter that does not vary, which only its trace can tell.
    return trace_with_guess(
        lambda cast_early: _staged(spec, x, items, shared, cast_early),
        spec.schedule == "gpipe",
        lambda cast_early, found: False if cast_early and found.kind == "unvarying" else None,
    )


def _check_schedule(schedule: str) -> None:
    if schedule not in tuple(SCHEDULES):
        close = nearest(schedule, SCHEDULES) if isinstance(schedule, str) else ""
        raise ProgramError(
            f"there is no schedule {schedule!r}{close}",
            rule=f"a pipeline's schedule is one of {', '.join(SCHEDULES)}",
            hint='schedule="gpipe"',
        )


def _check_shared(shared: Sequence[PyTree]) -> None:
    if not isinstance(shared, tuple | list):
        given = describe(shared) if isinstance(shared, Tensor) else f"a {type(shared).__name__}"
        raise TensorTypeError(
            f"pipeline was given {given} as shared=",
            rule="shared= is a tuple; each element is one more argument of f",
            hint="shared=(gain, bias), or shared=(gain,) for a single argument",
        )


def _as_integer(micro: int | None) -> int | None:
    try:
        return None if micro is None else operator.index(micro)
    except TypeError:
        raise python_number_error(
            TensorTypeError,
            "the number of micro-batches",
            micro,
            rule="it is an integer, or None",
            hint="micro=4; None selects the default for the number of stages",
        ) from None


def _batch_dim(x: PyTree, batch: str) -> Dim:
    """The dim of the batch, which all tensors of x have."""
    found = set()
    for leaf in flatten(x)[0]:
        if not isinstance(leaf, Tensor):
            raise TensorTypeError(
                f"pipeline was given a raw array of shape {jnp.shape(leaf)} in x",
                rule="x consists of tensors",
                hint=f'name its dims: wf.tensor(array, "{batch}=8 …")',
            )
        rows = [d for d in leaf.dims if d.name == batch]
        if not rows:
            names = [d.name for d in leaf.dims]
            raise DimError(
                f"{describe(leaf)} has no dim {batch}{nearest(batch, names)}",
                rule="a pipeline splits the batch into micro-batches, so every tensor of x has that dim",
                hint="name the dim with batch=…; pass tensors that all layers share as shared=(…,)",
            )
        found.update(rows)
    if len(found) > 1:
        raise DimError(
            f"x has {' and '.join(sorted(map(str, found)))}",
            rule="all tensors of x have one batch size",
            hint="slice the larger one",
        )
    if not found:
        raise TensorTypeError(
            "x has no tensors",
            rule="x consists of tensors",
            hint="pass the input of the first layer as x; to run along the layers without one, use wf.scan",
        )
    return found.pop()


def _staged(
    spec: PipelineSpec, x: PyTree, items: list[Leaf], shared: Sequence[PyTree], cast_early: bool
) -> PyTree:
    """The output of the last stage, on all devices."""
    ctx = active.context
    plain = ctx.vmap.depth > 0  # JAX's `linear_call` has no batching rule
    leaves, x_tree = flatten(x)
    split_rows: list[Tensor] = [spec.split_rows(leaf) for leaf in leaves]
    specs = [without_leading_dim(t) for t in split_rows]
    streams = [collectives.to_stage(t._read(), spec.axes, 0, plain=plain) for t in split_rows]
    own = [spec.own_layers(item, split_rows if cast_early else ()) for item in items]
    shared = jax.tree.map(spec.shared, tuple(shared), is_leaf=is_tensor)
    runner = StageRunner(spec, specs, x_tree)
    # From here on values differ from stage to stage, although none of their dims is split over these axes. To
    # the rest of the language this is a vmap over the axes.
    with ctx.in_pipeline(spec.layers, spec.axes):
        given = [spec.stream(s, a) for s, a in zip(specs, streams, strict=True)]
        out = [t._read() for t in SCHEDULES[spec.schedule](runner, given, own, shared)]
    replicated = [collectives.from_stage(a, spec.axes, spec.stages - 1, plain=plain) for a in out]
    results = [spec.merge_rows(s, a) for s, a in zip(specs, replicated, strict=True)]
    return jax.tree.unflatten(x_tree, results)


def _one_stage(
    spec: PipelineSpec, f: Callable[..., PyTree], x: PyTree, items: list[Leaf], shared: Sequence[PyTree]
) -> PyTree:
    """A scan inside one stage. The layout search traces pipelines this way, on axes with one device."""
    ctx = active.context
    leaves, x_tree = flatten(x)
    leaves = [materialize(leaf, "value") for leaf in leaves]
    own = [spec.own_layers(item, ()) for item in items]

    def layer(h: list[Tensor], params: list[Leaf]) -> tuple[list[Tensor], None]:
        h = jax.tree.unflatten(x_tree, h)
        return flatten(f(h, jax.tree.unflatten(spec.items_tree, params), *shared))[0], None

    specs = [LeafSpec.of(leaf) for leaf in leaves]
    entered = [collectives.to_stage(leaf._read(), spec.axes, 0) for leaf in leaves]
    with ctx.in_pipeline(spec.layers, spec.axes):
        given = [rebuild_leaf(s, a) for s, a in zip(specs, entered, strict=True)]
        made, _ = scan(layer, given, own, spec.stage_layers, unroll=spec.unroll)
        out = [t._read() for t in made]
    left = [collectives.from_stage(a, spec.axes, 0) for a in out]
    return jax.tree.unflatten(x_tree, [rebuild_leaf(s, a) for s, a in zip(specs, left, strict=True)])
