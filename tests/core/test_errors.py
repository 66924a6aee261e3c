"""Every mistake gets a message that says what was asked, what is wrong, the rule, and a way out.

A mistake is a row or a function below; its offending line ends in `# wrong`. The message must be the golden one in
`tests/messages/` (the line's number left out), and the line that it shows must be the offending one.

It is one long table: each row is a small wrong program, and there are many ways to be wrong.
"""

import linecache
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import weft as wf
from weft import nn
from weft.core.describe import format_call
from weft.core.errors import LayoutWarning, WeftError, nearest
from weft.models import Batch, Config, Transformer
from weft.optim import AdamW
from weft.train import train_step

MESH, LAYOUT = wf.Mesh("data=4 model=2"), wf.Layout("batch:data d_ff:model")
OTHER_MESH = wf.Mesh("data=2")

MISTAKES = {}


def mistake(fn):
    MISTAKES[fn.__name__] = fn
    return fn


def ones(dims, dtype=np.float32):
    dims = wf.dims(dims)
    return wf.tensor(np.ones([d.size for d in dims], dtype), dims)


def staged(fn, *args, mesh=MESH, layout="batch:data"):
    """Trace a program; nothing is compiled."""
    return wf.spmd(fn, mesh, layout).jaxpr(*args)


# -- names ------------------------------------------------------------------------------------------

MISTAKES |= {
    "sum_misspelt_dim": lambda: wf.sum(ones("batch=4 length=3"), "lenght"),  # wrong
    "sum_by_position": lambda: wf.sum(ones("batch=4 length=3"), 0),  # wrong
    "sum_dim_of_another_size": lambda: wf.sum(ones("batch=4 length=3"), wf.Dim("length", 5)),  # wrong
    "einsum_misspelt_out": lambda: wf.einsum(ones("batch=4 d_io=3"), ones("d_io=3 d_h=5"), out=["batch", "d_hh"]),  # wrong
    "einsum_out_of_no_operand": lambda: wf.einsum(ones("batch=4 d_io=3"), ones("d_io=3 d_h=5"), out=[wf.Dim("batch", 4), wf.Dim("vocab", 7)]),  # wrong
    "einsum_with_out_and_reduce": lambda: wf.einsum(ones("batch=4 d_io=3"), ones("d_io=3 d_h=5"), out=["batch"], reduce=["d_io"]),  # wrong
    "einsum_without_out": lambda: wf.einsum(ones("batch=4 d_io=3"), ones("d_io=3 d_h=5")),  # wrong
    "rename_misspelt_dim": lambda: ones("batch=4 length=3").rename(bacth="rows"),  # wrong
    "rename_to_a_dim_it_has": lambda: ones("batch=4 length=3").rename(batch="length"),  # wrong
    "index_misspelt_dim": lambda: ones("batch=4 length=3")["lengt", 0],  # wrong
    "einsum_with_a_formula": lambda: wf.einsum("bd,df->bf", ones("b=4 d=3"), ones("d=3 f=5")),  # wrong
    "local_that_returns_a_number": lambda: wf.local(lambda a: 1.0, ones("a=2"), out="a", splittable=["a"]),  # wrong
    "local_that_returns_a_pair": lambda: wf.local(lambda a: (a, a), ones("a=2"), out="a", splittable=["a"]),  # wrong
    "arange_of_two_dims": lambda: wf.arange("a=2 b=3"),  # wrong
    "full_of_a_vector": lambda: wf.full("a=2 b=2", wf.arange(wf.Dim("a", 2))),  # wrong
    "index_without_dim": lambda: ones("batch=4 length=3")[0],  # wrong
    "index_out_of_range": lambda: ones("batch=4 length=3")["length", 3],  # wrong
    "index_empty_slice": lambda: ones("batch=4 length=3")["length", 2:1],  # wrong
    "numpy_misspelt_dim": lambda: ones("batch=4 length=3").numpy("batch", "lenght"),  # wrong
    "numpy_without_all_dims": lambda: ones("batch=4 length=3").numpy("batch"),  # wrong
    "transpose_without_all_dims": lambda: wf.transpose(ones("batch=4 length=3"), ["length"]),  # wrong
    "dim_without_size": lambda: wf.Dim("batch", "many"),  # wrong
    "dim_of_size_zero": lambda: wf.Dim("batch", 0),  # wrong
    "dim_with_a_blank_in_its_name": lambda: wf.Dim("my batch", 4),  # wrong
    "dims_string_with_an_inner_dim": lambda: wf.dims("batch=4 _length=3"),  # wrong
    "dims_string": lambda: wf.dims("batch=4 length 3"),  # wrong
}  # fmt: skip


# -- sizes and kinds --------------------------------------------------------------------------------

MISTAKES |= {
    "size_clash": lambda: wf.einsum(ones("batch=4 d_io=3"), ones("d_io=5 d_h=2"), ones("d_h=2 batch=4"), out=["batch"]),  # wrong
    "size_clash_of_operator": lambda: ones("batch=4 d_io=3") + ones("d_io=5"),  # wrong
    "array_with_too_few_dims": lambda: wf.tensor(np.ones((2, 3)), "batch=2"),  # wrong
    "array_with_dims_in_another_order": lambda: wf.tensor(np.ones((2, 3)), "length=3 batch=2"),  # wrong
    "tensor_of_keys": lambda: wf.tensor(jax.random.split(jax.random.key(0), 9), "batch=9"),  # wrong
    "spec_of_keys": lambda: wf.spec("batch=9", jax.random.key(0).dtype),  # wrong
    "tensor_of_a_tensor": lambda: wf.tensor(ones("batch=2"), "rows=2"),  # wrong
    "tensor_with_a_dim_twice": lambda: wf.tensor(np.ones((2, 2)), "batch=2 batch=2"),  # wrong
    "zeros_with_sizes_only": lambda: wf.zeros((4, 3)),  # wrong
    "zeros_with_names_only": lambda: wf.zeros(["batch", "length"]),  # wrong
    "raw_array_as_operand": lambda: ones("batch=4") * np.ones(4),  # wrong
    "raw_array_on_the_left": lambda: np.ones(4) * ones("batch=4"),  # wrong
    "tensor_of_text": lambda: wf.tensor("abc", "batch=3"),  # wrong
    "tensor_of_unequal_rows": lambda: wf.tensor([[1, 2], [3]], "batch=2 length=2"),  # wrong
    "spec_as_operand": lambda: wf.spec("batch=4") * 2,  # wrong
    "spec_looked_at": lambda: wf.spec("batch=4").numpy(),  # wrong
    "spec_differentiated": lambda: wf.grad(lambda x: wf.sum(x))(wf.spec("batch=4")),  # wrong
    "maximum_of_complex_numbers": lambda: wf.max(ones("batch=4", np.complex64), "batch"),  # wrong
    "matmul": lambda: ones("batch=4 d_io=3") @ ones("d_io=3 d_h=5"),  # wrong
    "place_of_an_array": lambda: wf.place(np.ones(4), MESH, LAYOUT),  # wrong
    "list_as_operand": lambda: wf.maximum(ones("batch=4"), [1.0, 2.0]),  # wrong
    "none_as_operand": lambda: wf.relu(None),  # wrong
    "softmax_of_integers": lambda: wf.softmax(ones("batch=4 vocab=3", np.int32), "vocab"),  # wrong
    "clip_with_a_bound_twice": lambda: wf.clip(ones("batch=4"), 0.0, min=1.0),  # wrong
    "unknown_dtype": lambda: ones("batch=4").astype("float23"),  # wrong
    "zeros_of_an_unknown_dtype": lambda: wf.zeros("batch=4", "float23"),  # wrong
    "grad_of_integers": lambda: wf.grad(lambda x: wf.sum(x))(ones("batch=4", np.int32)),  # wrong
    "grad_of_a_vector": lambda: wf.grad(lambda x: x * x)(ones("batch=4")),  # wrong
    "grad_of_an_argument_that_is_not_there": lambda: wf.grad(lambda x: wf.sum(x), argnums=1)(ones("batch=4")),  # wrong
    "grad_without_aux": lambda: wf.grad(lambda x: wf.sum(x), has_aux=True)(ones("batch=4")),  # wrong
    "tangent_of_other_dims": lambda: wf.jvp(lambda x: x * x, (ones("batch=4"),), (ones("length=4"),)),  # wrong
    "unknown_remat_policy": lambda: wf.remat(lambda x: x, policy="dot"),  # wrong
    "reshape_sizes": lambda: wf.reshape(ones("batch=4 length=3"), "rows=5 columns=2"),  # wrong
    "split_sizes": lambda: wf.split(ones("batch=4 length=6"), "length", wf.dims("blocks=2 block=4")),  # wrong
    "merge_sizes": lambda: wf.merge(ones("batch=4 length=6"), ["batch", "length"], wf.Dim("rows", 20)),  # wrong
    "broadcast_that_drops_a_dim": lambda: wf.broadcast_to(ones("batch=4 length=6"), wf.dims("batch=4 heads=2")),  # wrong
    "stack_of_one_tensor": lambda: wf.stack(ones("batch=4"), "layer"),  # wrong
    "concat_of_one_tensor": lambda: wf.concat(ones("batch=4 length=3"), "length"),  # wrong
    "stack_of_different_dims": lambda: wf.stack([ones("batch=4"), ones("length=4")], "layer"),  # wrong
    "concat_of_different_dims": lambda: wf.concat([ones("batch=4 length=3"), ones("batch=5 length=3")], "length"),  # wrong
    "slice_too_long": lambda: wf.slice(ones("batch=4"), "batch", 0, 5),  # wrong
    "slice_beyond_the_end": lambda: wf.slice(ones("batch=4"), "batch", 3, 2),  # wrong
    "update_before_the_beginning": lambda: wf.update(ones("batch=4"), "batch", -5, ones("batch=2")),  # wrong
    "update_of_another_dim": lambda: wf.update(ones("batch=4"), "batch", 0, ones("length=2")),  # wrong
    "pad_by_less_than_nothing": lambda: wf.pad(ones("batch=4"), "batch", -1, 0),  # wrong
    "item_of_many": lambda: ones("batch=4").item(),  # wrong
}  # fmt: skip


@mistake
def size_clash_inside_program():
    def program(x, y):
        h = wf.relu(x)
        return h * y  # wrong

    staged(program, ones("batch=4 d_io=3"), ones("d_io=5"))


@mistake
def spec_given_to_a_program():
    program = wf.spmd(lambda x: x, MESH, "batch:data")
    program(wf.spec("batch=4"))  # wrong


@mistake
def where_with_numbers():
    x = ones("batch=4")
    wf.where(x, x, 0.0)  # wrong


@mistake
def bitwise_and_of_floats():
    x = ones("batch=4")
    x & x  # wrong


@mistake
def custom_vjp_without_derivative():
    clipped = wf.custom_vjp(wf.relu)
    clipped(ones("batch=4"))  # wrong


@mistake
def custom_vjp_with_too_few_cotangents():
    scaled = wf.custom_vjp(lambda x, y: x * y)
    scaled.defvjp(lambda x, y: (x * y, y), lambda y, g: (g * y,))
    wf.grad(lambda x: wf.sum(scaled(x, x)))(ones("batch=4"))  # wrong


@mistake
def jvp_with_too_few_tangents():
    x = ones("batch=4")
    wf.jvp(lambda x, y: x * y, (x, x), (x,))  # wrong


@mistake
def spmd_of_no_function():
    wf.spmd(3, MESH, "batch:data")  # wrong


@mistake
def verify_without_layouts():
    wf.verify(wf.exp, (ones("batch=4"),), MESH, [])  # wrong


@mistake
def verify_of_a_tensor():
    wf.verify(wf.exp, ones("batch=4"), MESH, "batch:data")  # wrong


@mistake
def verify_with_a_negative_tolerance():
    wf.verify(wf.exp, (ones("batch=4"),), MESH, "batch:data", tolerance=-1.0)  # wrong


@mistake
def cpu_devices_of_no_number():
    wf.cpu_devices(0)  # wrong


@mistake
def truth_of_many():
    if ones("batch=4") > 0:  # wrong
        pass


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


# -- meshes and layouts --------------------------------------------------------------------------

MISTAKES |= {
    "mesh_string": lambda: wf.Mesh("data=4 model2"),  # wrong
    "mesh_size": lambda: wf.Mesh("data=four"),  # wrong
    "mesh_axis_twice": lambda: wf.Mesh("data=4 data=2"),  # wrong
    "mesh_axis_of_size_zero": lambda: wf.Mesh([("data", 0), ("model", 2)]),  # wrong
    "mesh_pair": lambda: wf.Mesh([("data", 4.0)]),  # wrong
    "mesh_with_a_truth_as_size": lambda: wf.Mesh([("data", True)]),  # wrong
    "mesh_with_too_few_devices": lambda: wf.Mesh("data=2 model=2", jax.devices()[:2]),  # wrong
    "mesh_with_too_many_devices": lambda: wf.Mesh("data=2", jax.devices()[:3]),  # wrong
    "mesh_of_a_number": lambda: wf.Mesh(8),  # wrong
    "mesh_rest_not_whole": lambda: wf.Mesh("data=-1 model=3"),  # wrong
    "mesh_two_rests": lambda: wf.Mesh("data=-1 model=-1"),  # wrong
    "place_on_too_large_a_mesh": lambda: wf.place(ones("batch=4"), wf.Mesh("data=512"), wf.Layout("batch:data")),  # wrong
    "layout_string": lambda: wf.Layout("batch:data d_ff>model"),  # wrong
    "layout_rule_twice": lambda: wf.Layout("batch:data d_ff:model batch:model"),  # wrong
    "layout_axis_twice_in_a_rule": lambda: wf.Layout("batch:data+data"),  # wrong
    "layout_pair": lambda: wf.Layout([("batch", 3)]),  # wrong
    "layout_of_an_inner_dim": lambda: wf.Layout({"_batch": "data"}),  # wrong
    "layout_misspelt_axis": lambda: wf.spmd(lambda x: x, MESH, "batch:dat d_ff:model"),  # wrong
    "layout_without_a_mesh": lambda: wf.spmd(lambda x: x, layout="batch:data d_ff:model"),  # wrong
    "place_misspelt_axis": lambda: wf.place(ones("batch=4"), MESH, wf.Layout("batch:modell")),  # wrong
    "two_dims_on_one_axis": lambda: wf.place(ones("batch=4 heads=8"), MESH, wf.Layout("batch:data heads:data")),  # wrong
    "cpu_devices_too_late": lambda: wf.cpu_devices(16),  # wrong
    "callback_of_another_shape": lambda: wf.from_callback(lambda where: np.ones((2, 2)), "batch=4", OTHER_MESH, "batch:data"),  # wrong
    "vmap_misspelt_dim": lambda: wf.vmap(lambda x: x, "bacth")(ones("batch=4")),  # wrong
}  # fmt: skip


@mistake
def mesh_too_large():
    program = wf.spmd(lambda x: x + 1, "data=32 model=16", "batch:data")
    program(ones("batch=4"))  # wrong


@mistake
def compile_for_too_large_a_mesh():
    program = wf.spmd(lambda x: x + 1, "data=512", "batch:data")
    program.compile(wf.spec("batch=1024"))  # wrong


@mistake
def export_for_too_large_a_mesh():
    wf.spmd(lambda x: x + 1, "data=512", "batch:data").export(wf.spec("batch=1024"))  # wrong


@mistake
def two_dims_of_a_result_on_one_axis():
    def program(x, y):
        return x + y  # wrong

    staged(program, ones("batch=4"), ones("heads=8"), layout="batch:data heads:data")


@mistake
def two_dims_of_an_einsum_on_one_axis():
    def program(x, w):
        return wf.einsum(x, w, out=["batch"])  # wrong

    staged(program, ones("batch=4"), ones("heads=8"), layout="batch:data heads:data")


@mistake
def rename_onto_an_axis_in_use():
    def program(x):
        return x.rename(heads="d_ff")  # wrong

    staged(program, ones("heads=4 vocab=8"), layout="d_ff:model vocab:model")


@mistake
def two_meshes():
    x = wf.place(ones("batch=4"), MESH, LAYOUT)
    y = wf.place(ones("batch=4"), OTHER_MESH, "batch:data")
    x + y  # wrong


@mistake
def two_layouts():
    x = wf.place(ones("batch=4"), MESH, LAYOUT)
    y = wf.place(ones("batch=4"), MESH, "batch:model")
    wf.maximum(x, y)  # wrong


@mistake
def input_of_another_mesh():
    program = wf.spmd(lambda x: x + 1, MESH, LAYOUT)
    program(wf.place(ones("batch=4"), OTHER_MESH, "batch:data"))  # wrong


@mistake
def captured_tensor_of_another_mesh():
    y = wf.place(ones("batch=4"), OTHER_MESH, "batch:data")

    def program(x):
        return x + y  # wrong

    staged(program, ones("batch=4"))


@mistake
def nested_program_with_another_mesh():
    inner = wf.spmd(lambda x: x + 1, OTHER_MESH, "batch:data")

    def program(x):
        return inner(x)  # wrong

    staged(program, ones("batch=4"))


@mistake
def vmap_over_an_axis_in_use():
    def program(x, y):
        return wf.vmap(lambda x: x + y, "batch")(x)  # wrong

    staged(program, ones("batch=4"), ones("heads=8"), layout="batch:data heads:data")


# -- programs ------------------------------------------------------------------------------------

MISTAKES |= {
    "static_name_misspelt": lambda: wf.spmd(lambda x, sizes: x, MESH, LAYOUT, static=("size",)),  # wrong
    "donated_name_misspelt": lambda: wf.spmd(lambda params, x: x, MESH, LAYOUT, donate="parms"),  # wrong
    "donated_position_out_of_range": lambda: wf.spmd(lambda x: x + 1, MESH, LAYOUT, donate=(1,)),  # wrong
}  # fmt: skip


@mistake
def python_if_on_a_tensor():
    def program(x):
        if wf.sum(x) > 0:  # wrong
            return x
        return -x

    staged(program, ones("batch=4"))


@mistake
def numpy_inside_a_program():
    def program(x):
        return x.numpy().sum()  # wrong

    staged(program, ones("batch=4"))


@mistake
def np_function_of_a_tensor_inside_a_program():
    def program(x):
        return np.asarray(x)  # wrong

    staged(program, ones("batch=4"))


@mistake
def place_inside_a_program():
    def program(x):
        return wf.place(x, MESH, "batch:model")  # wrong

    staged(program, ones("batch=4"))


@mistake
def leaked_tensor():
    leaked = []
    staged(lambda x: leaked.append(x + 1), ones("batch=4"))
    leaked[0] * 2  # wrong


@mistake
def leaked_tensor_given_to_a_program():
    leaked = []
    staged(lambda x: leaked.append(x + 1), ones("batch=4"))
    program = wf.spmd(lambda x: x, MESH, "batch:data")
    program(leaked[0])  # wrong


@mistake
def another_tensor_captured_each_time():
    turns = iter([ones("d=2") for _ in range(3)])
    wf.spmd(lambda x: x + next(turns), MESH, "batch:data")(ones("batch=4"))  # wrong


@mistake
def rule_of_an_eager_op_that_captures_what_is_traced():
    def gradient(x, g):
        rule = wf.custom_vjp(wf.square)
        rule.defvjp(
            lambda x: (wf.square(x), None),
            lambda kept, c: (c * g,),  # wrong
        )
        return wf.grad(lambda x: wf.sum(wf.cond(wf.sum(x) > 0.0, rule, wf.square, x)))(x)

    jax.jit(gradient)(ones("d=2"), ones("d=2"))


@mistake
def leaked_tensor_captured_by_a_program():
    leaked = []
    staged(lambda x: leaked.append(x + 1), ones("batch=4"))

    def program(x):
        return x + leaked[0]  # wrong

    staged(program, ones("batch=4"))


@mistake
def leaked_tensor_of_another_mesh_captured():
    leaked = []
    staged(lambda x: leaked.append(x + 1), ones("batch=4"), mesh=OTHER_MESH)

    def program(x):
        return x + leaked[0]  # wrong

    staged(program, ones("batch=4"))


@mistake
def leaked_tensor_looked_at():
    leaked = []
    staged(lambda x: leaked.append(x + 1), ones("batch=4"))
    leaked[0].numpy()  # wrong


@mistake
def raw_slice_returned():
    program = wf.spmd(lambda x: x.array, MESH, "batch:data")
    program(ones("batch=4"))  # wrong


@mistake
def raw_slice_named_as_whole():
    def program(x):
        return wf.tensor(x.array * 2, "batch=1")  # wrong

    staged(program, ones("batch=4"))


@mistake
def set_as_an_argument():
    program = wf.spmd(lambda x, options: x, MESH, LAYOUT)
    program(ones("batch=4"), {1, 2})  # wrong


@mistake
def unhashable_static_argument():
    program = wf.spmd(lambda x, sizes: x, MESH, LAYOUT, static=("sizes",))
    program(ones("batch=4"), [1, 2])  # wrong


@mistake
def optax_update_inside_a_program():
    tx = optax.adam(0.1)

    def program(grads, state):
        return tx.update(grads, state)  # wrong

    w = ones("batch=4")
    staged(program, w, tx.init(w))


@mistake
def optax_init_inside_a_program():
    def program(w):
        return optax.adam(0.1).init(w)  # wrong

    staged(program, ones("batch=4"))


@mistake
def optax_apply_updates_inside_a_program():
    def program(w, g):
        return optax.apply_updates(w, g)  # wrong

    staged(program, ones("batch=4"), ones("batch=4"))


@mistake
def optimizer_result_used_inside():
    opt = wf.optimizer(optax.sgd(0.1))

    def program(w, g, state):
        w, state = opt.apply(g, state, w)
        return wf.sum(w), state  # wrong

    w = wf.parameter(ones("batch=4"))
    staged(program, w, w, opt.init(w))


@mistake
def optimizer_of_a_number():
    wf.optimizer(3)  # wrong


@mistake
def optimizer_given_what_it_does_not_take():
    opt = wf.optimizer(optax.GradientTransformation(lambda p: (), lambda g, s, p: (g, s)))
    opt.apply(ones("d=3"), (), ones("d=3"), value=1.0)  # wrong


@mistake
def optimizer_with_too_few_gradients():
    opt = wf.optimizer(optax.sgd(0.1))
    w = [wf.parameter(ones("batch=4")), wf.parameter(ones("length=3"))]
    opt.apply(w[:1], opt.init(w), w)  # wrong


@mistake
def optimizer_with_gradients_of_other_dims():
    opt = wf.optimizer(optax.sgd(0.1))
    w = wf.parameter(ones("batch=4"))
    opt.apply(ones("length=4"), opt.init(w), w)  # wrong


@mistake
def optax_outside_on_a_padded_tensor():
    w = wf.place(ones("batch=6"), MESH, "batch:data")
    optax.adafactor(0.1).init(w)  # wrong


# -- arrays that JAX has changed --------------------------------------------------------------------

MISTAKES |= {
    "array_sliced_by_tree_map": lambda: wf.mean(jax.tree.map(lambda a: a[:2], ones("batch=6 length=3"))),  # wrong
    "array_stacked_by_tree_map": lambda: wf.sum(jax.tree.map(lambda *a: jnp.stack(a), ones("d_model=3"), ones("d_model=3"))),  # wrong
    "array_transposed_by_tree_map": lambda: jax.tree.map(jnp.transpose, ones("batch=6 length=3")).numpy(),  # wrong
    "array_of_another_shape_by_tree_map": lambda: wf.sum(jax.tree.map(lambda a: jnp.tile(a, 2), ones("batch=6 length=3"))),  # wrong
    "no_array_by_tree_map": lambda: wf.sum(jax.tree.map(lambda a: True, ones("batch=6 length=3"))),  # wrong
    "jax_vmap_over_a_tensor": lambda: jax.vmap(lambda row: wf.sum(row))(ones("batch=6 length=3")),  # wrong
    "jax_scan_over_a_tensor": lambda: jax.lax.scan(lambda c, row: (c, wf.sum(row)), 0.0, ones("batch=6 length=3")),  # wrong
}  # fmt: skip


@mistake
def padded_array_sliced_by_tree_map():
    placed = wf.place(ones("batch=6 length=3"), MESH, "batch:data")
    wf.sum(jax.tree.map(lambda a: a[:6], placed))  # wrong


@mistake
def jax_vmap_of_a_draw():
    drawn = jax.vmap(lambda key: wf.random.normal(key, "d_model=3"))(jax.random.split(jax.random.key(0), 4))
    wf.sum(drawn)  # wrong


@mistake
def slice_changed_by_tree_map():
    def program(x):
        return wf.sum(jax.tree.map(lambda a: a[1:], x))  # wrong

    staged(program, ones("batch=12 length=3"))


@mistake
def jax_jvp_in_a_program():
    def program(x):
        return jax.jvp(wf.sum, (x,), (x,))[1]  # wrong

    staged(program, ones("batch=4"))


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


@mistake
def branch_inside_a_program():
    def program(x, flag):
        scale = wf.sum(x).array
        if scale > flag:  # wrong
            return x
        return -x

    staged(program, ones("batch=4"), 1.0)


# -- control flow --------------------------------------------------------------------------------

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


@mistake
def grad_of_a_while_loop():
    double = lambda x: wf.while_loop(lambda c: wf.sum(c) < 9, lambda c: c * 2, x)
    wf.grad(lambda x: wf.sum(double(x)))(ones("batch=4"))  # wrong


@mistake
def grad_of_a_while_loop_in_a_program():
    def program(x):
        double = lambda x: wf.while_loop(lambda c: wf.sum(c) < 9, lambda c: c * 2, x)
        return wf.grad(lambda x: wf.sum(double(x)))(x)  # wrong

    staged(program, ones("batch=4"))


@mistake
def cond_with_many_predicates():
    def program(x):
        return wf.cond(x > 0, lambda x: x, lambda x: -x, x)  # wrong

    staged(program, ones("batch=4"))


@mistake
def cond_with_a_split_raw_predicate():
    def program(x):
        return wf.cond(x.array[0] > 0, lambda x: x, lambda x: -x, x)  # wrong

    staged(program, ones("batch=4"))


@mistake
def cond_with_a_number():
    x = ones("batch=4")
    wf.cond(wf.sum(x), lambda x: x, lambda x: -x, x)  # wrong


@mistake
def cond_branches_of_other_dims():
    x = ones("batch=4 length=3")
    wf.cond(wf.sum(x) > 0, lambda x: x, lambda x: wf.sum(x, "length"), x)  # wrong


@mistake
def cond_branches_of_other_structure():
    x = ones("batch=4")
    wf.cond(wf.sum(x) > 0, lambda x: (x, x), lambda x: x, x)  # wrong


@mistake
def cond_branches_of_other_dtypes():
    x = ones("batch=4")
    wf.cond(wf.sum(x) > 0, lambda x: x, lambda x: x > 0, x)  # wrong


@mistake
def while_with_many_predicates():
    def program(x):
        return wf.while_loop(lambda x: x < 10, lambda x: x * 2, x)  # wrong

    staged(program, ones("batch=4"))


@mistake
def while_carry_of_other_dims():
    x = ones("batch=4")
    wf.while_loop(lambda x: wf.sum(x) < 10, lambda x: wf.sum(x), x)  # wrong


@mistake
def while_carry_of_another_dtype():
    n = wf.tensor(1, ())
    wf.while_loop(lambda n: n < 10, lambda n: n * 1.5, n)  # wrong


@mistake
def scan_carry_of_other_dims():
    x = ones("step=3 batch=4")
    wf.scan(lambda c, x: (c + x, None), 0.0, x, "step")  # wrong


@mistake
def scan_carry_of_another_dtype():
    x = ones("step=3")
    wf.scan(lambda c, x: (c + x, None), 0, x, "step")  # wrong


@mistake
def scan_carry_of_another_structure():
    x = ones("step=3")
    wf.scan(lambda c, x: ((c, x), None), 0.0, x, "step")  # wrong


@mistake
def scan_without_pair():
    x = ones("step=3")
    wf.scan(lambda c, x: c + x, 0.0, x, "step")  # wrong


@mistake
def inside_scan():
    def body(carry, x):
        h = carry + x
        return wf.sum(h, "lenght"), None  # wrong

    wf.scan(body, ones("length=4"), ones("step=3 length=4"), "step")


@mistake
def inside_grad_inside_remat_inside_scan():
    def layer(x, w):
        return wf.einsum(x, w, out=["d_out"])  # wrong

    def loss(w, x):
        body = wf.remat(lambda c, w: (layer(c, w), None))
        return wf.sum(wf.scan(body, x, w, "layer")[0])

    staged(wf.grad(loss), ones("layer=2 d=3"), ones("d=3"))


@mistake
def inside_jax_grad():
    def loss(x):
        return wf.sum(x * ones("batch=5")).array  # wrong

    jax.grad(loss)(ones("batch=4"))


# -- escapes -------------------------------------------------------------------------------------


@mistake
def local_of_an_undeclared_split():
    def program(x):
        return wf.local(jnp.cumsum, x, out=x.dims)  # wrong

    staged(program, ones("batch=4"))


@mistake
def local_misspelt_splittable():
    def program(x):
        return wf.local(jnp.exp, x, out=x.dims, splittable=["bacth"])  # wrong

    staged(program, ones("batch=4"))


@mistake
def local_result_of_another_shape():
    def program(x):
        return wf.local(lambda a: jnp.ones(4), x, out=x.dims, splittable=["batch"])  # wrong

    staged(program, ones("batch=8"))


@mistake
def local_result_that_differs():
    def program(x):
        return wf.local(jnp.sum, x, out=(), splittable=["batch"])  # wrong

    staged(program, ones("batch=4"))


@mistake
def power_of_an_integer_that_is_negative():
    wf.tensor([1, 2, 3], "a=3") ** -1  # wrong


@mistake
def dim_too_large_to_count():
    wf.spmd(lambda x: wf.argmax(x, "a")).plan(wf.spec("a=3000000000"))  # wrong


@mistake
def local_with_too_few_results():
    x = ones("batch=4")
    wf.local(lambda a: (a,), x, out=[x.dims, x.dims])  # wrong


@mistake
def callback_without_derivative():
    def loss(x):
        return wf.sum(wf.callback(np.sin, x, out=wf.spec(x.dims)))  # wrong

    staged(wf.grad(loss), ones("batch=4"))


@mistake
def callback_without_spec():
    x = ones("batch=4")
    wf.callback(np.sin, x, out=x.dims)  # wrong


@mistake
def argument_that_was_donated():
    step, y = wf.spmd(lambda x, y: x + y, "data=4", "batch:data", donate=(0,)), ones("batch=4")
    x = step(ones("batch=4"), y)
    step(x, y)
    step(x, y)  # wrong


@mistake
def argument_that_was_donated_on_one_device():
    step, x = wf.spmd(lambda x, y: x + y, donate=(0,)), ones("batch=4")
    step(x, ones("batch=4"))
    step(x, ones("batch=4"))  # wrong


@mistake
def argument_that_is_donated_and_given_again():
    step, x = wf.spmd(lambda x, y: (x + y, y), donate=(0,)), ones("batch=4")
    step(x, x)  # wrong


@mistake
def arrays_of_a_donated_state_that_are_one():
    def step(state, rate):
        return {name: rate * t for name, t in state.items()}

    params = {"w": ones("d=2 h=2"), "b": ones("h=2")}
    state = {f"{name}{more}": t for name, t in params.items() for more in ("", "_ema")}
    wf.spmd(step, donate="state")(state, 0.5)  # wrong


@mistake
def argument_that_is_donated_and_captured():
    x = ones("batch=4")
    wf.spmd(lambda y: x + y, donate=(0,))(x)  # wrong


# -- the tests -----------------------------------------------------------------------------------

WHERE = re.compile(r"  at (\S+):(\d+)$", re.MULTILINE)


def check_line(text):
    """The message shows one line: this file's, the offending one. It is left out of the golden text."""
    (file, line), *more = WHERE.findall(text)
    assert not more and file.replace("\\", "/") == "tests/core/test_errors.py", text
    shown = linecache.getline(__file__, int(line))
    assert shown.rstrip().endswith("# wrong"), f"the line shown is {shown}\n{text}"
    return WHERE.sub(r"  at \1:LINE", text)


@pytest.fixture(autouse=True)
def _from_the_root(monkeypatch, request):
    monkeypatch.chdir(request.config.rootpath)  # files are shown relative to where one is


@pytest.mark.parametrize("name", MISTAKES)
def test_message(name, golden):
    with pytest.raises(WeftError) as caught:
        MISTAKES[name]()
    error = caught.value
    assert isinstance(error, ValueError | TypeError)
    for part in ("call", "fact", "rule", "hint"):
        assert getattr(error, part), f"the message has no part: {part}\n{error}"
    golden(name, f"{type(error).__name__}: {check_line(str(error))}")


def test_warning(golden):
    """A rule whose dim never occurs is a warning from the program that ran."""
    program = wf.spmd(lambda x: x + 1, MESH, "batch:data d_fff:model")
    with pytest.warns(LayoutWarning) as caught:
        program.jaxpr(ones("batch=8 d_ff=4"))  # wrong
    (warning,) = caught
    assert warning.filename == __file__
    assert linecache.getline(__file__, warning.lineno).rstrip().endswith("# wrong")
    golden("rule_without_effect", f"LayoutWarning: {check_line(str(warning.message))}")


def test_every_golden_text_has_its_mistake():
    names = {path.stem for path in (Path(__file__).parents[1] / "messages").glob("*.txt")}
    assert names == {*MISTAKES, "rule_without_effect"}


@pytest.mark.parametrize(
    "name, known, meant",
    [
        ("nope", ["tiny-moe", "tiny-lm"], ""),
        ("moe", ["tiny-lm", "tiny-moe"], "tiny-moe"),
        ("ml", ["lm", "translate"], "lm"),
        ("dta", ["data", "model"], "data"),
        ("lenght", ["heads", "length"], "length"),
        ("x", ["y"], ""),
    ],
)
def test_only_what_is_close_is_suggested(name, known, meant):
    assert nearest(name, known) == (f" (did you mean {meant}?)" if meant else "")


def test_types_are_shown_by_their_names():
    """NumPy's have a shape and a dtype, and were taken for arrays."""
    assert format_call("cast", (np.float32, jnp.bfloat16), {"to": int}) == "cast(float32, bfloat16, to=int)"


def test_long_arguments_are_shown_by_their_type():
    """A model's description, and its optimizer's state, made the line of what was asked pages long."""
    model = nn.specs(Transformer(Config(vocab=32, d_model=8, d_ff=16, heads=2, d_kv=4, layers=1)))
    optimizer = AdamW(1e-3)
    rows = Batch(wf.spec("batch=3 length=4", "int32"), wf.spec("batch=3 length=4", "int32"))
    with pytest.raises(wf.ShapeError) as error:
        wf.spmd(train_step(optimizer, micro=2)).plan(model, optimizer.init(model), rows, None)
    asked = "program step(Transformer(…), {step: i32[], mean: {…}, variance: {…}}, Batch(…), None)"
    assert error.value.call == asked


@pytest.mark.parametrize("name, meant", [("einsun", "did you mean einsum?"), *wf.ELSEWHERE.items()])
def test_names_that_are_not_there(name, meant):
    with pytest.raises(AttributeError, match=re.escape(meant)):
        getattr(wf, name)
    assert meant not in wf.ELSEWHERE.values() or hasattr(wf, meant)
