"""pipeline: unsupported uses and their error messages."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from compare import assert_same
from every_op import EVERY_OP
from op_examples import OPERANDS

import weft as wf


def scaled(x, w):
    return x * w


def looked_up(x, w, table):
    """What each stage finds of it is a sum over the stages, which look for different things."""
    f = lambda x, w, table: x * w + wf.take(table, wf.argmax(x, "d"), "e")  # wrong
    wf.spmd(lambda *args: wf.pipeline(f, *args[:2], shared=args[2:]), "pipe=4", "layers:pipe e:pipe").jaxpr(
        x, w, table
    )


def differentiated(x, w):
    run = lambda x, w: wf.sum(wf.pipeline(lambda x, w: (x[0] * w, x[1]), x, w, schedule="1f1b")[0])
    wf.spmd(lambda x, w: wf.grad(run, argnums=1)(x, w), "pipe=4", "layers:pipe")(x, w)  # wrong


def captured(x, w):
    """What a layer holds has a gradient, which this schedule does not send back."""
    run = lambda gain: wf.sum(wf.pipeline(lambda x, w: x * w * gain, x, w, schedule="1f1b"))
    wf.spmd(wf.grad(run), "pipe=4", "layers:pipe")(wf.ones(""))  # wrong


def twice(x, w):
    inner = lambda w: lambda x, one: wf.pipeline(scaled, x * one, w)  # wrong
    wf.spmd(lambda x, w: wf.pipeline(inner(w), x, w), "pipe=4", "layers:pipe").jaxpr(x, w)


def mapped(x, w):
    """Each position of the axis has its own member, and cannot be a stage for all of them."""
    f = lambda x, w: wf.vmap(lambda x: wf.pipeline(scaled, x, w), "member")(x)  # wrong
    wf.spmd(f, "pipe=4", "layers:pipe member:pipe").jaxpr(x, w)


def widened(x, w):
    return wf.sum(x * w * wf.ones("e=2"), "e")  # wrong


def staged(x, w, f=scaled, layout="layers:pipe", mesh="pipe=4", **options):
    """Trace a program with one pipeline; nothing is compiled."""
    wf.spmd(lambda x, w: wf.pipeline(f, x, w, **options), mesh, layout).jaxpr(x, w)  # wrong


X, W = wf.ones("batch=12 d=4"), wf.ones("layers=8 d=4")
MISTAKES = {
    "micro_that_does_not_divide": lambda: staged(X, W, micro=5),
    "micro_of_nothing": lambda: staged(X, W, micro=0),
    "more_stages_than_layers": lambda: staged(X, wf.ones("layers=3 d=4")),
    "layer_that_adds_a_dim": lambda: staged(X, W, lambda x, w: x * w * wf.ones("e=2")),
    "layer_that_drops_a_dim": lambda: staged(X, W, lambda x, w: wf.sum(x * w, "d")),
    "layer_with_another_tree": lambda: staged(X, W, lambda x, w: (x, x * w)),
    "no_such_schedule": lambda: staged(X, W, schedule="1b1f"),
    "no_such_schedule_without_stages": lambda: staged(X, W, layout="batch:pipe", schedule="pipe"),
    "tensor_without_the_batch": lambda: staged((X, wf.ones("d=4")), W, lambda x, w: x),
    "batch_by_another_name": lambda: staged(wf.ones("batches=12 d=4"), W),
    "raw_array_that_streams": lambda: staged((X, jnp.ones(12)), W, lambda x, w: x),
    "batches_of_two_sizes": lambda: staged((X, wf.ones("batch=6 d=4")), W, lambda x, w: x),
    "parameter_on_the_axis_of_the_stages": lambda: staged(X, W, layout="layers:pipe d:pipe"),
    "stream_on_the_axis_of_the_stages": lambda: staged(X, wf.ones("layers=8"), layout="layers:pipe d:pipe"),
    "look_up_on_the_axis_of_the_stages": lambda: looked_up(X, W, wf.ones("e=8 d=4")),
    "whole_numbers_sent_back": lambda: differentiated((X, wf.arange(X.dims[0])), W),
    "micro_that_is_no_number": lambda: staged(X, W, micro="2"),
    "schedule_that_is_no_name": lambda: staged(X, W, schedule=["gpipe"]),
    "batch_that_is_no_name": lambda: staged(X, W, batch=None),
    "shared_that_is_no_tuple": lambda: staged(X, W, shared=X),
    "shared_that_is_nothing": lambda: staged(X, W, layout="batch:pipe", shared=None),
    "nothing_that_streams": lambda: staged({}, W, lambda x, w: x),
    "layer_that_gives_nothing": lambda: staged(X, W, lambda x, w: None),
    "gradient_of_what_a_layer_holds": lambda: captured(X, W),
    "rows_that_a_layer_holds": lambda: staged(X, W, lambda x, w: x * w * wf.ones("batch=12")),  # wrong
    "pipeline_in_a_pipeline": lambda: twice(X, W),
    "vmap_on_the_axis_of_the_stages": lambda: mapped(wf.ones("member=4 batch=12 d=4"), W),
    "dim_inside_on_the_axis_of_the_stages": lambda: staged(X, W, widened, "layers:pipe e:pipe"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_messages(name, mistake):
    mistake(name, MISTAKES[name], "messages/pipeline")


def test_every_text_is_of_a_mistake():
    here = {path.stem for path in (Path(__file__).parents[1] / "messages" / "pipeline").glob("*.txt")}
    assert here == set(MISTAKES)


# Operands of the ops' examples. Those with the dim a are twice as long: a micro-batch has the usual size.
BATCHES = {
    name: wf.concat([t, t], "a")
    for name, t in OPERANDS.items()
    if wf.is_tensor(t) and "a" in {d.name for d in t.dims}
}
OF_ROWS = {  # a pipeline in a pipeline is an error for another reason
    name: info for name, info in EVERY_OP.items() if BATCHES.keys() & {*info.operands} and name != "pipeline"
}
MIXING = {name: info.run_example for name, info in OF_ROWS.items() if info.mixes_rows} | {
    "sum of all": lambda t: wf.sum(t["x"]),
    "sum of renamed": lambda t: wf.sum(t["x"].rename(a="n"), "n"),
    "local along the batch": lambda t: wf.local(lambda a: a.sum(0), t["x"], out="b", splittable=["b"]),
}


def layers(calls, mesh, layout):
    """A program of two layers, whose results are those of some functions of the examples' operands."""

    def layer(rows, w):
        operands, totals = rows
        results = {name: per_row(call(OPERANDS | operands)) for name, call in calls.items()}
        return operands, {name: totals[name] + w * result for name, result in results.items()}

    def run(operands, w):
        totals = dict.fromkeys(calls, wf.zeros_like(operands["x"]))
        return wf.pipeline(layer, (operands, totals), w, micro=2, batch="a")[1]

    return wf.spmd(run, mesh, layout)


def per_row(tree):
    """The sum of the tensors in a tree, averaged over dims other than a (which an example renames to n) and b."""
    total = wf.zeros("")
    for t in jax.tree.leaves(tree, is_leaf=wf.is_tensor):
        names = {d.name for d in t.dims}
        t = t.astype(jnp.float32).rename(**{"n": "a"} if "n" in names and "a" not in names else {})
        total = total + wf.mean(t, [d for d in t.dims if d.name not in ("a", "b")])
    return total


WEIGHTS = wf.tensor([1.0, 0.5], "layers=2")


@pytest.mark.parametrize("name", MIXING)
def test_a_layer_that_mixes_rows_is_an_error(name):
    """A layout must not change results, and a stage has some of the rows at a time."""
    calls = {name: lambda operands: (operands["x"], MIXING[name](operands))[0]}
    without_stages = layers(calls, "data=2", "b:data")  # a scan
    without_stages.jaxpr({n: OPERANDS[n] for n in BATCHES}, WEIGHTS)
    with pytest.raises(wf.ProgramError, match=r"works along [an], and it sees one micro-batch at a time"):
        layers(calls, "pipe=2", "layers:pipe").jaxpr(BATCHES, WEIGHTS)


def test_other_layers_give_the_same_results_in_stages():
    """An op that mixes rows, and neither raises an error (`check_along`) nor declares it, fails here."""
    calls = {name: info.run_example for name, info in OF_ROWS.items() if not info.mixes_rows}
    staged = layers(calls, "pipe=2", "layers:pipe")(BATCHES, WEIGHTS)
    for name, want in layers(calls, "data=2", "b:data")(BATCHES, WEIGHTS).items():
        assert_same(staged[name], want.array, name=name)
