"""Messages of mistakes in calls of ops: lookups, order, neighbours, draws, raw functions and callbacks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mistakes import Mistakes, ones, staged

import weft as wf
from weft import nn
from weft.models import Config, Transformer

MISTAKES = Mistakes()


# -- look-up, order, neighbours, draws -----------------------------------------------------------

MISTAKES |= {
    "take_out_of_range": lambda: wf.take(ones("vocab=3 d_model=2"), 3, "vocab"),  # wrong
    "take_by_floats": lambda: wf.take(ones("vocab=3 d_model=2"), ones("length=3"), "vocab"),  # wrong
    "take_with_ids_that_have_the_dim": lambda: wf.take(ones("vocab=3 d_model=2"), ones("vocab=3", np.int32), "vocab"),  # wrong
    "scatter_of_a_lost_dim": lambda: wf.scatter_add(ones("vocab=3"), ones("length=3", np.int32), ones("length=3 heads=2"), "vocab"),  # wrong
    "scatter_add_of_truths": lambda: wf.scatter_add(wf.zeros("n=5", bool), wf.tensor([0, 1], "a=2"), True, "n"),  # wrong
    "one_hot_of_an_unknown_dtype": lambda: wf.one_hot(ones("length=3", np.int32), wf.Dim("vocab", 4), dtype="foo"),  # wrong
    "one_hot_of_a_name": lambda: wf.one_hot(ones("length=3", np.int32), "vocab"),  # wrong
    "top_k_of_too_many": lambda: wf.top_k(ones("batch=4"), "batch", wf.Dim("best", 5)),  # wrong
    "conv_without_window": lambda: wf.conv(ones("h=8 c=2"), ones("kh=3 c=2 o=4"), ["h"]),  # wrong
    "conv_misspelt_stride": lambda: wf.conv(ones("high=8 c=2"), ones("kh=3 c=2 o=4"), {"high": "kh"}, stride={"hihg": 2}),  # wrong
    "conv_window_too_large": lambda: wf.conv(ones("h=8 c=2"), ones("kh=9 c=2 o=4"), {"h": "kh"}, padding="VALID"),  # wrong
    "conv_padding_word": lambda: wf.conv(ones("h=8 c=2"), ones("kh=3 c=2 o=4"), {"h": "kh"}, padding="FULL"),  # wrong
    "conv_that_loses_a_dim": lambda: wf.conv(ones("batch=2 h=8 c=2"), ones("kh=3 c=2 o=4"), {"h": "kh"}, out=["h", "o"]),  # wrong
    "pool_stride_zero": lambda: wf.max_pool(ones("h=8 c=2"), {"h": 2}, stride=0),  # wrong
    "bits_of_another_width": lambda: wf.random.bits(jax.random.key(0), "batch=4", 7),  # wrong
    "draw_of_an_unknown_dtype": lambda: wf.random.normal(jax.random.key(0), "batch=4", dtype="foo"),  # wrong
    "draw_with_a_seed": lambda: wf.random.normal(0, "batch=4"),  # wrong
    "init_with_a_seed": lambda: nn.init(Transformer(Config()), 0),  # wrong
    "init_of_a_config": lambda: nn.init(Config(), jax.random.key(0)),  # wrong
    "draw_with_two_keys": lambda: wf.random.normal(jax.random.split(jax.random.key(0)), "batch=4"),  # wrong
    "draw_with_another_generator": lambda: wf.random.uniform(jax.random.key(0, impl="rbg"), "batch=4"),  # wrong
    "draw_of_integers_as_normal": lambda: wf.random.normal(jax.random.key(0), "batch=4", dtype=jnp.int32),  # wrong
    "randint_of_nothing": lambda: wf.random.randint(jax.random.key(0), "batch=4", 3, 3),  # wrong
    "randint_with_a_seed": lambda: wf.random.randint(0, "batch=4", 0, 3),  # wrong
    "dropout_rate": lambda: wf.dropout(ones("batch=4"), 1.5, jax.random.key(0)),  # wrong
    "dropout_by_a_key": lambda: wf.dropout(ones("batch=4"), jax.random.key(0), 0.1),  # wrong
}  # fmt: skip


# -- linear algebra and Fourier transforms -----------------------------------------------------------------

MATRICES = "batch=2 row=3 column=3"
MISTAKES |= {
    "matrices_that_are_not_square": lambda: wf.linalg.inv(ones("row=3 column=4"), "row", "column"),  # wrong
    "matrices_with_one_dim": lambda: wf.linalg.cholesky(ones(MATRICES), "row", "row"),  # wrong
    "matrices_of_16_bits": lambda: wf.linalg.det(ones(MATRICES, jnp.bfloat16), "row", "column"),  # wrong
    "qr_into_a_dim_of_another_size": lambda: wf.linalg.qr(ones("row=5 column=3"), "row", "column", wf.Dim("k", 5)),  # wrong
    "qr_into_a_dim_it_has": lambda: wf.linalg.qr(ones(MATRICES), "row", "column", "batch"),  # wrong
    "solve_for_a_dim_that_is_there": lambda: wf.linalg.solve(ones(MATRICES), ones("row=3 column=3"), "row", "column"),  # wrong
    "solve_without_the_rows": lambda: wf.linalg.solve(ones(MATRICES), ones("batch=2 column=3"), "row", "column"),  # wrong
    "norm_of_another_order": lambda: wf.linalg.norm(ones("batch=4"), "batch", 3),  # wrong
    "norm_by_a_word": lambda: wf.linalg.norm(ones("batch=4"), "batch", "fro"),  # wrong
    "fft_along_four_dims": lambda: wf.fft.fft(ones("a=2 b=2 c=2 d=2"), ["a", "b", "c", "d"]),  # wrong
    "rfft_of_complex_numbers": lambda: wf.fft.rfft(ones("time=4", jnp.complex64), "time"),  # wrong
    "irfft_to_a_fraction": lambda: wf.fft.irfft(ones("time=4"), "time", size=6.5),  # wrong
    "fftfreq_of_a_name": lambda: wf.fft.fftfreq("time"),  # wrong
}  # fmt: skip


# -- raw functions and callbacks -------------------------------------------------------------------------------------


@MISTAKES.add
def local_of_an_undeclared_split():
    def program(x):
        return wf.local(jnp.cumsum, x, out=x.dims)  # wrong

    staged(program, ones("batch=4"))


@MISTAKES.add
def local_misspelt_splittable():
    def program(x):
        return wf.local(jnp.exp, x, out=x.dims, splittable=["bacth"])  # wrong

    staged(program, ones("batch=4"))


@MISTAKES.add
def local_result_of_another_shape():
    def program(x):
        return wf.local(lambda a: jnp.ones(4), x, out=x.dims, splittable=["batch"])  # wrong

    staged(program, ones("batch=8"))


@MISTAKES.add
def local_result_that_differs():
    def program(x):
        return wf.local(jnp.sum, x, out=(), splittable=["batch"])  # wrong

    staged(program, ones("batch=4"))


@MISTAKES.add
def power_of_an_integer_that_is_negative():
    wf.tensor([1, 2, 3], "a=3") ** -1  # wrong


@MISTAKES.add
def dim_too_large_to_count():
    wf.spmd(lambda x: wf.argmax(x, "a")).plan(wf.spec("a=3000000000"))  # wrong


@MISTAKES.add
def local_with_too_few_results():
    x = ones("batch=4")
    wf.local(lambda a: (a,), x, out=[x.dims, x.dims])  # wrong


@MISTAKES.add
def callback_without_derivative():
    def loss(x):
        return wf.sum(wf.callback(np.sin, x, out=wf.spec(x.dims)))  # wrong

    staged(wf.grad(loss), ones("batch=4"))


@MISTAKES.add
def callback_without_spec():
    x = ones("batch=4")
    wf.callback(np.sin, x, out=x.dims)  # wrong


@pytest.mark.parametrize("name", MISTAKES)
def test_message(name, mistake):
    mistake(name, MISTAKES[name], "messages")
