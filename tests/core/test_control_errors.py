"""Messages of mistakes with loops, branches and derivatives of them."""

import jax
import numpy as np
import pytest
from mistakes import Mistakes, ones, staged

import weft as wf

MISTAKES = Mistakes()


MISTAKES |= {
    "fori_up_to_a_fraction": lambda: wf.fori_loop(0, 2.5, lambda n, x: x * 2, ones("batch=4")),  # wrong
    "fori_up_to_a_tensor_of_floats": lambda: wf.fori_loop(0, ones(""), lambda n, x: x * 2, ones("batch=4")),  # wrong
    "fori_up_to_an_array": lambda: wf.fori_loop(0, np.ones(2, int), lambda n, x: x * 2, ones("batch=4")),  # wrong
    "fori_carry_of_another_structure": lambda: wf.fori_loop(0, 3, lambda n, x: (x, n), ones("batch=4")),  # wrong
    "scan_without_dim": lambda: wf.scan(lambda c, _: (c + 1, None), 0, None, "step"),  # wrong
    "scan_misspelt_dim": lambda: wf.scan(lambda c, x: (c + x, None), 0.0, ones("step=3"), "stpe"),  # wrong
    "scan_of_a_raw_array_of_another_length": lambda: wf.scan(lambda c, x: (c, None), 0.0, (ones("step=4"), np.ones(3)), "step"),  # wrong
    "scan_of_a_number": lambda: wf.scan(lambda c, x: (c, None), 0.0, (ones("step=4"), 2.0), "step"),  # wrong
    "scan_of_two_lengths": lambda: wf.scan(lambda c, x: (c, None), 0.0, (ones("step=3"), ones("step=4")), "step"),  # wrong
}  # fmt: skip


@MISTAKES.add
def grad_of_a_while_loop():
    double = lambda x: wf.while_loop(lambda c: wf.sum(c) < 9, lambda c: c * 2, x)
    wf.grad(lambda x: wf.sum(double(x)))(ones("batch=4"))  # wrong


@MISTAKES.add
def grad_of_a_while_loop_in_a_program():
    def program(x):
        double = lambda x: wf.while_loop(lambda c: wf.sum(c) < 9, lambda c: c * 2, x)
        return wf.grad(lambda x: wf.sum(double(x)))(x)  # wrong

    staged(program, ones("batch=4"))


@MISTAKES.add
def cond_with_many_predicates():
    def program(x):
        return wf.cond(x > 0, lambda x: x, lambda x: -x, x)  # wrong

    staged(program, ones("batch=4"))


@MISTAKES.add
def cond_with_a_split_raw_predicate():
    def program(x):
        return wf.cond(x.array[0] > 0, lambda x: x, lambda x: -x, x)  # wrong

    staged(program, ones("batch=4"))


@MISTAKES.add
def cond_with_a_number():
    x = ones("batch=4")
    wf.cond(wf.sum(x), lambda x: x, lambda x: -x, x)  # wrong


MISTAKES |= {
    "switch_by_a_fraction": lambda: wf.switch(1.5, [wf.exp, wf.sin], ones("batch=4")),  # wrong
    "switch_by_many_indices": lambda: wf.switch(ones("batch=4", int), [wf.exp, wf.sin], ones("batch=4")),  # wrong
    "switch_without_branches": lambda: wf.switch(0, [], ones("batch=4")),  # wrong
    "switch_branches_of_other_dims": lambda: wf.switch(0, [wf.exp, wf.sin, wf.sum], ones("batch=4")),  # wrong
    "map_of_a_raw_array": lambda: wf.map(wf.exp, (ones("batch=4"), np.ones(4)), "batch"),  # wrong
    "map_misspelt_dim": lambda: wf.map(wf.exp, ones("batch=4"), "bacth"),  # wrong
    "map_in_batches_of_none": lambda: wf.map(wf.exp, ones("batch=4"), "batch", batch_size=0),  # wrong
    "associative_scan_of_an_array": lambda: wf.associative_scan(wf.add, np.ones(4), "batch"),  # wrong
    "associative_scan_to_another_structure": lambda: wf.associative_scan(lambda a, b: (a, b), ones("batch=4"), "batch"),  # wrong
    "associative_scan_to_other_dims": lambda: wf.associative_scan(lambda a, b: wf.sum(a), ones("batch=4 d=2"), "batch"),  # wrong
    "associative_scan_to_another_dtype": lambda: wf.associative_scan(lambda a, b: a < b, ones("batch=4"), "batch"),  # wrong
    "jacobian_of_integers": lambda: wf.jacobian(wf.square)(ones("batch=4", int)),  # wrong
    "jacobian_of_a_comparison": lambda: wf.jacobian(lambda x: x > 0)(ones("batch=4")),  # wrong
    "jacobian_of_an_argument_that_is_not_there": lambda: wf.jacobian(wf.exp, argnums=1)(ones("batch=4")),  # wrong
    "hessian_of_a_vector": lambda: wf.hessian(wf.exp)(ones("batch=4")),  # wrong
}  # fmt: skip


@MISTAKES.add
def cond_branches_of_other_dims():
    x = ones("batch=4 length=3")
    wf.cond(wf.sum(x) > 0, lambda x: x, lambda x: wf.sum(x, "length"), x)  # wrong


@MISTAKES.add
def cond_branches_of_other_structure():
    x = ones("batch=4")
    wf.cond(wf.sum(x) > 0, lambda x: (x, x), lambda x: x, x)  # wrong


@MISTAKES.add
def cond_branches_of_other_dtypes():
    x = ones("batch=4")
    wf.cond(wf.sum(x) > 0, lambda x: x, lambda x: x > 0, x)  # wrong


@MISTAKES.add
def while_with_many_predicates():
    def program(x):
        return wf.while_loop(lambda x: x < 10, lambda x: x * 2, x)  # wrong

    staged(program, ones("batch=4"))


@MISTAKES.add
def while_carry_of_other_dims():
    x = ones("batch=4")
    wf.while_loop(lambda x: wf.sum(x) < 10, lambda x: wf.sum(x), x)  # wrong


@MISTAKES.add
def while_carry_of_another_dtype():
    n = wf.tensor(1, ())
    wf.while_loop(lambda n: n < 10, lambda n: n * 1.5, n)  # wrong


@MISTAKES.add
def scan_carry_of_other_dims():
    x = ones("step=3 batch=4")
    wf.scan(lambda c, x: (c + x, None), 0.0, x, "step")  # wrong


@MISTAKES.add
def scan_carry_of_another_dtype():
    x = ones("step=3")
    wf.scan(lambda c, x: (c + x, None), 0, x, "step")  # wrong


@MISTAKES.add
def scan_carry_of_another_structure():
    x = ones("step=3")
    wf.scan(lambda c, x: ((c, x), None), 0.0, x, "step")  # wrong


@MISTAKES.add
def scan_without_pair():
    x = ones("step=3")
    wf.scan(lambda c, x: c + x, 0.0, x, "step")  # wrong


@MISTAKES.add
def inside_scan():
    def body(carry, x):
        h = carry + x
        return wf.sum(h, "lenght"), None  # wrong

    wf.scan(body, ones("length=4"), ones("step=3 length=4"), "step")


@MISTAKES.add
def inside_grad_inside_remat_inside_scan():
    def layer(x, w):
        return wf.einsum(x, w, out=["d_out"])  # wrong

    def loss(w, x):
        body = wf.remat(lambda c, w: (layer(c, w), None))
        return wf.sum(wf.scan(body, x, w, "layer")[0])

    staged(wf.grad(loss), ones("layer=2 d=3"), ones("d=3"))


@MISTAKES.add
def inside_jax_grad():
    def loss(x):
        return wf.sum(x * ones("batch=5")).array  # wrong

    jax.grad(loss)(ones("batch=4"))


@pytest.mark.parametrize("name", MISTAKES)
def test_message(name, mistake):
    mistake(name, MISTAKES[name], "messages")
