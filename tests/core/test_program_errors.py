"""Messages of mistakes with programs: their arguments, captures, optimizers and donated tensors."""

import jax
import numpy as np
import optax
import pytest
from mistakes import LAYOUT, MESH, OTHER_MESH, Mistakes, ones, staged

import weft as wf

MISTAKES = Mistakes()


# -- programs ------------------------------------------------------------------------------------

MISTAKES |= {
    "static_name_misspelt": lambda: wf.spmd(lambda x, sizes: x, MESH, LAYOUT, static=("size",)),  # wrong
    "donated_name_misspelt": lambda: wf.spmd(lambda params, x: x, MESH, LAYOUT, donate="parms"),  # wrong
    "donated_position_out_of_range": lambda: wf.spmd(lambda x: x + 1, MESH, LAYOUT, donate=(1,)),  # wrong
}  # fmt: skip


@MISTAKES.add
def python_if_on_a_tensor():
    def program(x):
        if wf.sum(x) > 0:  # wrong
            return x
        return -x

    staged(program, ones("batch=4"))


@MISTAKES.add
def numpy_inside_a_program():
    def program(x):
        return x.numpy().sum()  # wrong

    staged(program, ones("batch=4"))


@MISTAKES.add
def np_function_of_a_tensor_inside_a_program():
    def program(x):
        return np.asarray(x)  # wrong

    staged(program, ones("batch=4"))


@MISTAKES.add
def place_inside_a_program():
    def program(x):
        return wf.place(x, MESH, "batch:model")  # wrong

    staged(program, ones("batch=4"))


@MISTAKES.add
def leaked_tensor():
    leaked = []
    staged(lambda x: leaked.append(x + 1), ones("batch=4"))
    leaked[0] * 2  # wrong


@MISTAKES.add
def leaked_tensor_given_to_a_program():
    leaked = []
    staged(lambda x: leaked.append(x + 1), ones("batch=4"))
    program = wf.spmd(lambda x: x, MESH, "batch:data")
    program(leaked[0])  # wrong


@MISTAKES.add
def another_tensor_captured_each_time():
    turns = iter([ones("d=2") for _ in range(3)])
    wf.spmd(lambda x: x + next(turns), MESH, "batch:data")(ones("batch=4"))  # wrong


@MISTAKES.add
def rule_of_an_eager_op_that_captures_what_is_traced():
    def gradient(x, g):
        rule = wf.custom_vjp(wf.square)
        rule.defvjp(
            lambda x: (wf.square(x), None),
            lambda residuals, c: (c * g,),  # wrong
        )
        return wf.grad(lambda x: wf.sum(wf.cond(wf.sum(x) > 0.0, rule, wf.square, x)))(x)

    jax.jit(gradient)(ones("d=2"), ones("d=2"))


@MISTAKES.add
def leaked_tensor_captured_by_a_program():
    leaked = []
    staged(lambda x: leaked.append(x + 1), ones("batch=4"))

    def program(x):
        return x + leaked[0]  # wrong

    staged(program, ones("batch=4"))


@MISTAKES.add
def leaked_tensor_of_another_mesh_captured():
    leaked = []
    staged(lambda x: leaked.append(x + 1), ones("batch=4"), mesh=OTHER_MESH)

    def program(x):
        return x + leaked[0]  # wrong

    staged(program, ones("batch=4"))


@MISTAKES.add
def leaked_tensor_looked_at():
    leaked = []
    staged(lambda x: leaked.append(x + 1), ones("batch=4"))
    leaked[0].numpy()  # wrong


@MISTAKES.add
def raw_slice_returned():
    program = wf.spmd(lambda x: x.array, MESH, "batch:data")
    program(ones("batch=4"))  # wrong


@MISTAKES.add
def raw_slice_named_as_whole():
    def program(x):
        return wf.tensor(x.array * 2, "batch=1")  # wrong

    staged(program, ones("batch=4"))


@MISTAKES.add
def set_as_an_argument():
    program = wf.spmd(lambda x, options: x, MESH, LAYOUT)
    program(ones("batch=4"), {1, 2})  # wrong


@MISTAKES.add
def unhashable_static_argument():
    program = wf.spmd(lambda x, sizes: x, MESH, LAYOUT, static=("sizes",))
    program(ones("batch=4"), [1, 2])  # wrong


@MISTAKES.add
def optax_update_inside_a_program():
    tx = optax.adam(0.1)

    def program(grads, state):
        return tx.update(grads, state)  # wrong

    w = ones("batch=4")
    staged(program, w, tx.init(w))


@MISTAKES.add
def optax_init_inside_a_program():
    def program(w):
        return optax.adam(0.1).init(w)  # wrong

    staged(program, ones("batch=4"))


@MISTAKES.add
def optax_apply_updates_inside_a_program():
    def program(w, g):
        return optax.apply_updates(w, g)  # wrong

    staged(program, ones("batch=4"), ones("batch=4"))


@MISTAKES.add
def optimizer_result_used_inside():
    opt = wf.optimizer(optax.sgd(0.1))

    def program(w, g, state):
        w, state = opt.apply(g, state, w)
        return wf.sum(w), state  # wrong

    w = wf.parameter(ones("batch=4"))
    staged(program, w, w, opt.init(w))


@MISTAKES.add
def optimizer_of_a_number():
    wf.optimizer(3)  # wrong


@MISTAKES.add
def optimizer_given_what_it_does_not_take():
    opt = wf.optimizer(optax.GradientTransformation(lambda p: (), lambda g, s, p: (g, s)))
    opt.apply(ones("d=3"), (), ones("d=3"), value=1.0)  # wrong


@MISTAKES.add
def optimizer_with_too_few_gradients():
    opt = wf.optimizer(optax.sgd(0.1))
    w = [wf.parameter(ones("batch=4")), wf.parameter(ones("length=3"))]
    opt.apply(w[:1], opt.init(w), w)  # wrong


@MISTAKES.add
def optimizer_with_gradients_of_other_dims():
    opt = wf.optimizer(optax.sgd(0.1))
    w = wf.parameter(ones("batch=4"))
    opt.apply(ones("length=4"), opt.init(w), w)  # wrong


@MISTAKES.add
def optax_outside_on_a_padded_tensor():
    w = wf.place(ones("batch=6"), MESH, "batch:data")
    optax.adafactor(0.1).init(w)  # wrong


# -- objects, and numbers that are inputs -----------------------------------------------------------


class Scaled:
    """An object that is no pytree."""

    def __init__(self):
        self.scale = 2.0

    @wf.spmd
    def call(self, x):
        return x * self.scale


MISTAKES |= {
    "object_as_an_argument": lambda: wf.spmd(lambda batch, x: x)({"scaled": Scaled()}, ones("batch=4")),  # wrong
    "object_as_self": lambda: Scaled().call(ones("batch=4")),  # wrong
    "method_as_an_argument": lambda: wf.spmd(lambda f, x: f(x))(Scaled().__init__, ones("batch=4")),  # wrong
    "static_object": lambda: wf.spmd(lambda scaled, x: x, static=("scaled",))(Scaled(), ones("batch=4")),  # wrong
    "generator_returned": lambda: wf.spmd(lambda x: (t * 2 for t in [x]))(ones("batch=4")),  # wrong
    "range_of_a_number_argument": lambda: wf.spmd(lambda x, n: [x for _ in range(n)])(ones("batch=4"), 3),  # wrong
    "branch_on_a_number_argument": lambda: wf.spmd(lambda x, n, rate: x if n else -x)(ones("batch=4"), 1, rate=0.5),  # wrong
    "branch_on_an_array_argument": lambda: wf.spmd(lambda x, a: x if a.sum() else -x)(ones("batch=4"), np.ones(2)),  # wrong
    "dim_of_a_number_argument": lambda: wf.spmd(lambda n: wf.zeros([wf.Dim("new", n)]))(3),  # wrong
    "dropout_by_a_number_argument": lambda: wf.spmd(lambda x, rate: wf.dropout(x, rate, jax.random.key(0)))(ones("batch=4"), 0.5),  # wrong
    "shift_by_a_number_argument": lambda: wf.spmd(lambda x, n: wf.shift(x, "batch", n))(ones("batch=4"), 1),  # wrong
    "pad_by_a_number_argument": lambda: wf.spmd(lambda x, n: wf.pad(x, "batch", n, 0))(ones("batch=4"), 1),  # wrong
    "stride_by_a_number_argument": lambda: wf.spmd(lambda x, n: wf.max_pool(x, {"batch": 2}, stride={"batch": n}))(ones("batch=4"), 1),  # wrong
    "slice_by_a_number_argument": lambda: wf.spmd(lambda x, n: x["batch", :n])(ones("batch=4"), 1),  # wrong
    "index_by_an_array": lambda: ones("batch=4")["batch", np.array([0, 1])],  # wrong
    "local_that_branches": lambda: wf.local(lambda a: a if a.sum() > 0 else -a, ones("batch=4"), out="batch", splittable=["batch"]),  # wrong
}  # fmt: skip


@MISTAKES.add
def branch_inside_a_program():
    def program(x, flag):
        scale = wf.sum(x).array
        if scale > flag:  # wrong
            return x
        return -x

    staged(program, ones("batch=4"), 1.0)


# -- donated arguments ----------------------------------------------------------------------------


@MISTAKES.add
def argument_that_was_donated():
    step, y = wf.spmd(lambda x, y: x + y, "data=4", "batch:data", donate=(0,)), ones("batch=4")
    x = step(ones("batch=4"), y)
    step(x, y)
    step(x, y)  # wrong


@MISTAKES.add
def argument_that_was_donated_on_one_device():
    step, x = wf.spmd(lambda x, y: x + y, donate=(0,)), ones("batch=4")
    step(x, ones("batch=4"))
    step(x, ones("batch=4"))  # wrong


@MISTAKES.add
def argument_that_is_donated_and_given_again():
    step, x = wf.spmd(lambda x, y: (x + y, y), donate=(0,)), ones("batch=4")
    step(x, x)  # wrong


@MISTAKES.add
def arrays_of_a_donated_state_that_are_one():
    def step(state, rate):
        return {name: rate * t for name, t in state.items()}

    params = {"w": ones("d=2 h=2"), "b": ones("h=2")}
    state = {f"{name}{more}": t for name, t in params.items() for more in ("", "_ema")}
    wf.spmd(step, donate="state")(state, 0.5)  # wrong


@MISTAKES.add
def argument_that_is_donated_and_captured():
    x = ones("batch=4")
    wf.spmd(lambda y: x + y, donate=(0,))(x)  # wrong


@pytest.mark.parametrize("name", MISTAKES)
def test_message(name, mistake):
    mistake(name, MISTAKES[name], "messages")
