"""pipeline: what can't be asked of it, and what it says then."""

from pathlib import Path

import jax.numpy as jnp
import pytest

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


def held(x, w):
    """What a layer holds has a gradient, which this schedule does not send back."""
    run = lambda gain: wf.sum(wf.pipeline(lambda x, w: x * w * gain, x, w, schedule="1f1b"))
    wf.spmd(wf.grad(run), "pipe=4", "layers:pipe")(wf.ones(""))  # wrong


def twice(x, w):
    inner = lambda w: lambda x, one: wf.pipeline(scaled, x * one, w)  # wrong
    wf.spmd(lambda x, w: wf.pipeline(inner(w), x, w), "pipe=4", "layers:pipe").jaxpr(x, w)


def mapped(x, w):
    """Each place of the axis has a member of its own, and can't be a stage for all of them."""
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
    "gradient_of_what_a_layer_holds": lambda: held(X, W),
    "rows_that_a_layer_holds": lambda: staged(X, W, lambda x, w: x * w * wf.ones("batch=12")),  # wrong
    "pipeline_in_a_pipeline": lambda: twice(X, W),
    "vmap_on_the_axis_of_the_stages": lambda: mapped(wf.ones("member=4 batch=12 d=4"), W),
    "dim_inside_on_the_axis_of_the_stages": lambda: staged(X, W, widened, "layers:pipe e:pipe"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_messages(name, mistake):
    mistake(name, MISTAKES[name], "messages/pipeline")


def test_every_text_is_of_a_mistake():
    here = {path.stem for path in (Path(__file__).parent / "messages" / "pipeline").glob("*.txt")}
    assert here == set(MISTAKES)


MIXING = {
    "sum": lambda x: x - wf.sum(x, "batch"),
    "all": lambda x: x * wf.sum(x),
    "softmax": lambda x: wf.softmax(x, "batch"),
    "einsum": lambda x: x + wf.einsum(x, x, out=["d"]),
    "cumsum": lambda x: wf.cumsum(x, "batch"),
    "index": lambda x: x + x["batch", 0],
    "roll": lambda x: wf.roll(x, "batch", 1),
    "take": lambda x: x + wf.take(x, 0, "batch"),
}


@pytest.mark.parametrize("name", MIXING)
def test_a_layer_that_mixes_rows_is_an_error(name):
    """A layout must not change results, and a stage has some of the rows at a time."""
    x, w = wf.ones("batch=4 d=4"), wf.ones("layers=2")

    def run(x, w):
        return wf.pipeline(lambda x, w: MIXING[name](x) * w, x, w, micro=2)

    wf.spmd(run, "data=2", "d:data")(x, w)  # without stages it is a scan
    with pytest.raises(wf.ProgramError, match="works along batch, of which it has a micro-batch at a time"):
        wf.spmd(run, "pipe=2", "layers:pipe")(x, w)
