"""pipeline: unsupported uses and their error messages."""

import inspect
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


def summed_up(x):
    return wf.scan(lambda total, row: (total + row, None), wf.zeros("d=4"), x, "batch")[0]


FIRST = wf.tensor([0], "pick=1")
MIXING = {  # of four rows by one stage, of two by two stages
    "sum": lambda x: x - wf.sum(x, "batch"),
    "sum of all": lambda x: x * wf.sum(x),
    "mean": lambda x: x - wf.mean(x, "batch"),
    "any": lambda x: wf.where(wf.any(x > 0, "batch"), x, 0.0),
    "all": lambda x: wf.where(wf.all(x > 0, "batch"), x, 0.0),
    "max": lambda x: x - wf.max(x, "batch"),
    "min": lambda x: x - wf.min(x, "batch"),
    "prod": lambda x: x - wf.prod(x, "batch"),
    "var": lambda x: x - wf.var(x, "batch"),
    "std": lambda x: x - wf.std(x, "batch"),
    "logsumexp": lambda x: x - wf.logsumexp(x, "batch"),
    "argmax": lambda x: x + wf.argmax(x, "batch"),
    "argmin": lambda x: x + wf.argmin(x, "batch"),
    "top_k": lambda x: x + wf.sum(wf.top_k(x, "batch", wf.Dim("best", 1))[0], "best"),
    "sort": lambda x: wf.sort(x, "batch"),
    "argsort": lambda x: x + wf.argsort(x, "batch"),
    "softmax": lambda x: wf.softmax(x, "batch"),
    "log_softmax": lambda x: wf.log_softmax(x, "batch"),
    "einsum": lambda x: x + wf.einsum(x, x, out=["d"]),
    "cumsum": lambda x: wf.cumsum(x, "batch"),
    "cumprod": lambda x: wf.cumprod(x, "batch"),
    "index": lambda x: x + x["batch", 0],
    "slice": lambda x: x + wf.sum(wf.slice(x, "batch", 0, 1).rename(batch="one"), "one"),
    "update": lambda x: wf.update(x, "batch", 0, wf.zeros("batch=1 d=4")),
    "roll": lambda x: wf.roll(x, "batch", 1),
    "shift": lambda x: wf.shift(x, "batch", 1),
    "flip": lambda x: wf.flip(x, "batch"),
    "pad": lambda x: x + wf.sum(wf.pad(x, "batch", 1, 1).rename(batch="rows"), "rows"),
    "concat": lambda x: x + wf.sum(wf.concat([x, x], "batch").rename(batch="rows"), "rows"),
    "take": lambda x: x + wf.take(x, 0, "batch"),
    "scatter_add": lambda x: wf.scatter_add(x, FIRST, wf.ones("pick=1 d=4"), "batch"),
    "merge": lambda x: x - wf.mean(wf.merge(x, ["batch", "d"], "all"), "all"),
    "split": lambda x: (
        x - wf.mean(wf.split(x, "batch", [wf.Dim("pairs", x.dims[0].size // 2), wf.Dim("pair", 2)]))
    ),
    "reshape": lambda x: wf.reshape(wf.transpose(x, ["d", "batch"]), x.dims),
    "unstack": lambda x: x - wf.unstack(x, "batch")[0],
    "scan": lambda x: x - summed_up(x),
    "max_pool": lambda x: wf.max_pool(x, {"batch": 3}, stride=1, padding="SAME"),
    "avg_pool": lambda x: wf.avg_pool(x, {"batch": 3}, stride=1, padding="SAME"),
    "windows": lambda x: wf.sum(wf.windows(x, "batch", wf.Dim("w", 3), padding="SAME"), "w"),
    "conv": lambda x: wf.conv(x, wf.ones("tap=3"), window={"batch": "tap"}, padding="SAME"),
    "local": lambda x: x - wf.local(lambda a: a.sum(0), x, out="d", splittable=["d"]),
    "callback": lambda x: x - wf.callback(lambda a: a.sum(0), x, out=wf.spec("d=4")),
}


# Their dims are new ones, all that there are, or mapped over one by one.
NOT_ALONG = set(
    "arange broadcast_to from_callback full ones one_hot pipeline stack tensor transpose vmap zeros".split()
)


def test_all_that_works_along_a_dim_is_here():
    """An op that takes dims has a row in `MIXING`: it must raise for the batch (`operands.check_along`)."""
    public = {name: getattr(wf, name) for name in dir(wf)}
    ops = {n: f for n, f in public.items() if inspect.isfunction(f) and f.__module__.startswith("weft.ops")}
    along = {
        n for n, f in ops.items() if {"dim", "dims", "into", "window"} & {*inspect.signature(f).parameters}
    }
    assert along - NOT_ALONG <= set(MIXING), sorted(along - NOT_ALONG - set(MIXING))


@pytest.mark.parametrize("name", MIXING)
def test_a_layer_that_mixes_rows_is_an_error(name):
    """A layout must not change results, and a stage has some of the rows at a time."""
    x, w = wf.ones("batch=4 d=4"), wf.ones("layers=2")

    def run(x, w):
        return wf.pipeline(lambda x, w: MIXING[name](x) * w, x, w, micro=2)

    wf.spmd(run, "data=2", "d:data")(x, w)  # without stages it is a scan
    with pytest.raises(wf.ProgramError, match="works along batch, and it sees one micro-batch at a time"):
        wf.spmd(run, "pipe=2", "layers:pipe")(x, w)
