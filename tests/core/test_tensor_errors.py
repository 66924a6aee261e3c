"""Messages of mistakes with tensors: misspelt dims, wrong sizes and dtypes, and arrays that JAX has changed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mistakes import LAYOUT, MESH, Mistakes, ones, staged

import weft as wf

MISTAKES = Mistakes()


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
    "eye_of_one_name": lambda: wf.eye(wf.Dim("a", 2), wf.Dim("a", 2)),  # wrong
    "diff_of_too_few_elements": lambda: wf.diff(ones("batch=4"), "batch", 4),  # wrong
    "tril_of_a_traced_diagonal": lambda: wf.tril(ones("a=2 b=2"), "a", "b", wf.tensor(1, "")),  # wrong
    "quantile_in_percent": lambda: wf.quantile(ones("batch=4"), 50),  # wrong
    "quantile_of_an_unknown_method": lambda: wf.quantile(ones("batch=4"), 0.5, method="liner"),  # wrong
    "quantile_of_a_matrix_of_shares": lambda: wf.quantile(ones("batch=4"), ones("a=2 b=2")),  # wrong
    "searchsorted_in_its_own_dim": lambda: wf.searchsorted(ones("a=4"), ones("a=4"), "a"),  # wrong
    "searchsorted_on_no_side": lambda: wf.searchsorted(ones("a=4"), 0.5, "a", side="middle"),  # wrong
    "approx_max_k_of_recall_in_percent": lambda: wf.approx_max_k(ones("a=4"), "a", wf.Dim("k", 2), 95),  # wrong
    "grad_of_a_complex_loss": lambda: wf.grad(lambda x: wf.sum(x))(ones("batch=4", np.complex64)),  # wrong
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


@MISTAKES.add
def size_clash_inside_program():
    def program(x, y):
        h = wf.relu(x)
        return h * y  # wrong

    staged(program, ones("batch=4 d_io=3"), ones("d_io=5"))


@MISTAKES.add
def spec_given_to_a_program():
    program = wf.spmd(lambda x: x, MESH, "batch:data")
    program(wf.spec("batch=4"))  # wrong


@MISTAKES.add
def where_with_numbers():
    x = ones("batch=4")
    wf.where(x, x, 0.0)  # wrong


@MISTAKES.add
def bitwise_and_of_floats():
    x = ones("batch=4")
    x & x  # wrong


@MISTAKES.add
def custom_vjp_without_derivative():
    clipped = wf.custom_vjp(wf.relu)
    clipped(ones("batch=4"))  # wrong


@MISTAKES.add
def custom_vjp_with_too_few_cotangents():
    scaled = wf.custom_vjp(lambda x, y: x * y)
    scaled.defvjp(lambda x, y: (x * y, y), lambda y, g: (g * y,))
    wf.grad(lambda x: wf.sum(scaled(x, x)))(ones("batch=4"))  # wrong


@MISTAKES.add
def jvp_with_too_few_tangents():
    x = ones("batch=4")
    wf.jvp(lambda x, y: x * y, (x, x), (x,))  # wrong


@MISTAKES.add
def spmd_of_no_function():
    wf.spmd(3, MESH, "batch:data")  # wrong


@MISTAKES.add
def verify_without_layouts():
    wf.verify(wf.exp, (ones("batch=4"),), MESH, [])  # wrong


@MISTAKES.add
def verify_of_a_tensor():
    wf.verify(wf.exp, ones("batch=4"), MESH, "batch:data")  # wrong


@MISTAKES.add
def verify_with_a_negative_tolerance():
    wf.verify(wf.exp, (ones("batch=4"),), MESH, "batch:data", tolerance=-1.0)  # wrong


@MISTAKES.add
def verify_with_a_tolerance_that_is_a_word():
    wf.verify(wf.exp, (ones("batch=4"),), MESH, "batch:data", tolerance="x")  # wrong


@MISTAKES.add
def verify_with_more_meshes_than_layouts():
    wf.verify(wf.exp, (ones("batch=4"),), ["data=2", "data=4", "data=8"], ["batch:data", ""])  # wrong


@MISTAKES.add
def explain_of_no_width():
    wf.spmd(wf.exp, MESH).plan(ones("batch=4")).explain(width=-3)  # wrong


@MISTAKES.add
def cpu_devices_of_no_number():
    wf.cpu_devices(0)  # wrong


@MISTAKES.add
def truth_of_many():
    if ones("batch=4") > 0:  # wrong
        pass


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


@MISTAKES.add
def padded_array_sliced_by_tree_map():
    placed = wf.place(ones("batch=6 length=3"), MESH, "batch:data")
    wf.sum(jax.tree.map(lambda a: a[:6], placed))  # wrong


@MISTAKES.add
def jax_vmap_of_a_draw():
    drawn = jax.vmap(lambda key: wf.random.normal(key, "d_model=3"))(jax.random.split(jax.random.key(0), 4))
    wf.sum(drawn)  # wrong


@MISTAKES.add
def slice_changed_by_tree_map():
    def program(x):
        return wf.sum(jax.tree.map(lambda a: a[1:], x))  # wrong

    staged(program, ones("batch=12 length=3"))


@MISTAKES.add
def jax_jvp_in_a_program():
    def program(x):
        return jax.jvp(wf.sum, (x,), (x,))[1]  # wrong

    staged(program, ones("batch=4"))


@pytest.mark.parametrize("name", MISTAKES)
def test_message(name, mistake):
    mistake(name, MISTAKES[name], "messages")
