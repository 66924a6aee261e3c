"""pipeline: layers in stages, against a plain loop of JAX; what it sends, what the plan says of it."""

import functools

import jax
import jax.numpy as jnp
import pytest
from compare import real, same
from jax import lax

import weft as wf

SCHEDULES = ("gpipe", "1f1b")
schedules = pytest.mark.parametrize("schedule", SCHEDULES)


# -- values and gradients -----------------------------------------------------------------------------


def layer(x, p, rows, scale):
    """A layer with two products; `rows` is of the batch, `scale` is not."""
    h = wf.tanh(wf.einsum(x, p["up"], out=["batch", "d_ff"]) + p["bias"])
    return x + wf.einsum(h, p["down"], out=["batch", "d"]) * rows * scale


def raw_layer(x, p, rows, scale):
    return x + jnp.tanh(x @ p["up"] + p["bias"]) @ p["down"] * rows[:, None] * scale


def stack(layers):
    """Parameters of so many layers; their dim is not always in front."""
    return {
        "up": wf.parameter(real(1, f"d=4 layers={layers} d_ff=6", -0.6, 0.6)),
        "down": wf.parameter(real(2, f"d_ff=6 d=4 layers={layers}", -0.6, 0.6)),
        "bias": wf.parameter(real(3, f"layers={layers} d_ff=6")),
    }


def raw_stack(params):
    """The same as arrays, the layers in front."""
    return {name: jnp.moveaxis(p.array, [d.name for d in p.dims].index("layers"), 0) for name, p in params.items()}


def given(layers, batch):
    return real(0, f"batch={batch} d=4"), stack(layers), real(4, f"batch={batch}"), real(5, "d=4")


def loss(x, params, rows, scale, **options):
    out = wf.pipeline(layer, x, params, shared=(rows, scale), **options)
    return wf.mean(wf.sin(out * 2.0)), out


@functools.cache
def expected(layers, batch):
    """Value, result and gradients by JAX."""
    x, params, rows, scale = given(layers, batch)

    def raw(x, params, rows, scale):
        out = lax.scan(lambda x, p: (raw_layer(x, p, rows, scale), None), x, params)[0]
        return jnp.mean(jnp.sin(out * 2.0)), out

    run = jax.jit(jax.value_and_grad(raw, (0, 1, 2, 3), has_aux=True))
    return run(x.array, raw_stack(params), rows.array, scale.array)


PLACES = [
    # mesh, layout, layers, batch, micro
    ("pipe=2", "layers:pipe", 4, 8, 1),
    ("pipe=2", "layers:pipe", 5, 8, 4),
    ("pipe=4", "layers:pipe", 6, 8, 2),
    ("pipe=8", "layers:pipe", 8, 8, 8),
    ("pipe=4 data=2", "layers:pipe batch:data", 4, 16, 8),
    ("data=4 pipe=2", "layers:pipe batch:data", 4, 6, 2),
    ("data=4 pipe=2", "layers:pipe batch:data", 4, 6, 3),
    ("pipe=2 model=2", "layers:pipe d_ff:model", 4, 8, 2),
    ("pipe=2 model=2", "layers:pipe d:model", 4, 8, 8),
    ("pipe=2 data=2 model=2", "layers:pipe batch:data d_ff:model", 3, 8, 2),
    ("a=2 b=2", "layers:b+a", 6, 4, 2),
    ("pipe=4 data=2", "layers:pipe batch:data", 5, 7, None),
]


@schedules
@pytest.mark.parametrize("mesh, layout, layers, batch, micro", PLACES, ids=lambda v: str(v).replace(" ", ","))
def test_a_pipeline_equals_a_loop(mesh, layout, layers, batch, micro, schedule):
    run = functools.partial(loss, micro=micro, schedule=schedule)
    program = wf.spmd(wf.value_and_grad(run, argnums=(0, 1, 2, 3), has_aux=True), mesh, layout)
    args = given(layers, batch)
    (value, out), grads = program(*args)
    (want_value, want), want_grads = expected(layers, batch)
    same(value, want_value)
    same(out, want)
    assert grads[1]["up"].role == "param"
    for name, got, expect in zip(("x", "params", "rows", "scale"), grads, want_grads, strict=True):
        for part in got if isinstance(got, dict) else [None]:
            g, w = (got, expect) if part is None else (wf.transpose(got[part], ["layers", *(d for d in got[part].dims if d.name != "layers")]), expect[part])
            same(g, w, f"the gradient of {part or name}")
