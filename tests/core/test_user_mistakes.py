"""Mistakes of users who come from NumPy, JAX, PyTorch or Haliax, one table for the whole public interface.

Each row is a program that such a user would write: an argument of the other library, a position instead of a name, a
function that was called too early, Python control flow on tensors, the wrong order of arguments. The message of each
has the failing call, the fact, the rule, a hint and the user's line, never a traceback of Python or JAX alone. The
other tables of mistakes are in the tests of their modules.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mistakes import LAYOUT, MESH, Mistakes, ones, staged

import weft as wf
from weft import checkpoint, models, nn, optim, train

MISTAKES = Mistakes()
KEY = jax.random.key(0)
d, h = wf.dims("d=3 h=5")


def x():
    return ones("batch=4 length=3")


def v():
    return ones("batch=4")


# -- arguments of other libraries' methods and functions ---------------------------------------------

MISTAKES |= {
    "sum_over_an_axis": lambda: x().sum(axis=0),  # wrong
    "sum_with_keepdims": lambda: x().sum("batch", keepdims=True),  # wrong
    "mean_over_a_dim_of_pytorch": lambda: x().mean(dim=-1),  # wrong
    "max_over_two_arguments": lambda: x().max("batch", "length"),  # wrong
    "softmax_over_the_last": lambda: x().softmax(-1),  # wrong
    "softmax_over_nothing": lambda: x().softmax(),  # wrong
    "std_with_ddof": lambda: x().std("batch", ddof=1),  # wrong
    "transpose_by_positions": lambda: x().transpose(1, 0),  # wrong
    "transpose_by_separate_names": lambda: x().transpose("length", "batch"),  # wrong
    "reshape_to_numbers": lambda: x().reshape(2, 6),  # wrong
    "reshape_to_a_shape": lambda: x().reshape((2, 6)),  # wrong
    "reshape_to_an_inferred_size": lambda: x().reshape("rows=-1 columns=2"),  # wrong
    "flatten_of_everything": lambda: x().flatten(),  # wrong
    "flatten_from_a_position": lambda: x().flatten(start_dim=1),  # wrong
    "flatten_to_a_wrong_size": lambda: x().flatten("batch length", wf.Dim("rows", 11)),  # wrong
    "unflatten_of_a_misspelt_dim": lambda: x().unflatten("bacth", "a=2 b=2"),  # wrong
    "unflatten_into_names": lambda: x().unflatten("batch", "a b"),  # wrong
    "unflatten_into_a_dim_it_has": lambda: x().unflatten("batch", "length=2 b=2"),  # wrong
    "argmax_of_everything": lambda: x().argmax(),  # wrong
    "sort_in_reverse": lambda: wf.sort(x(), "batch", reverse=True),  # wrong
    "top_k_by_a_number": lambda: x().top_k("length", 2),  # wrong
    "take_by_a_list": lambda: x().take([0, 1], "length"),  # wrong
    "take_along_an_axis": lambda: wf.take(x(), wf.tensor([0], "k=1"), axis=0),  # wrong
    "clip_by_the_names_of_numpy": lambda: x().clip(a_min=0, a_max=1),  # wrong
    "astype_of_a_short_name": lambda: x().astype("bf16"),  # wrong
    "rename_by_a_dict": lambda: x().rename({"batch": "rows"}),  # wrong
    "numpy_with_a_dtype": lambda: x().numpy(dtype=np.float64),  # wrong
    "item_of_a_position": lambda: x().item(0),  # wrong
    "exp_into_an_array": lambda: wf.exp(v(), v()),  # wrong
    "einsum_with_output": lambda: wf.einsum(x(), x(), output="batch"),  # wrong
    "einsum_of_a_list": lambda: wf.einsum([x(), x()], out="batch"),  # wrong
    "concat_of_separate_tensors": lambda: wf.concat(v(), v(), "batch"),  # wrong
    "concat_of_nothing": lambda: wf.concat([], "batch"),  # wrong
    "stack_along_an_axis": lambda: wf.stack([v(), v()], axis=0),  # wrong
    "stack_of_a_missing_tensor": lambda: wf.stack([v(), None], "layer"),  # wrong
    "roll_in_the_order_of_numpy": lambda: wf.roll(x(), 1, "batch"),  # wrong
    "pad_by_pairs": lambda: wf.pad(x(), ((1, 1), (0, 0))),  # wrong
    "where_of_a_condition_alone": lambda: wf.where(x() > 0),  # wrong
    "where_of_floats": lambda: wf.where(x(), x(), 0.0),  # wrong
    "method_of_pytorch": lambda: x().numel(),  # wrong
    "function_as_a_method": lambda: x().gelu(),  # wrong
    "gradient_switched_on": lambda: setattr(x(), "requires_grad", True),  # wrong
}  # fmt: skip


# -- strings of dims ---------------------------------------------------------------------------------

MISTAKES |= {
    "one_of_two_names_misspelt": lambda: x().sum("batch, lenght"),  # wrong
    "name_given_twice": lambda: x().sum("batch batch"),  # wrong
    "dims_separated_by_a_slash": lambda: x().sum("batch/length"),  # wrong
    "layout_as_dims": lambda: x().sum("batch:data"),  # wrong
    "size_that_is_wrong": lambda: x().sum("batch=5"),  # wrong
    "size_that_is_a_fraction": lambda: wf.zeros("a=2.5"),  # wrong
    "size_that_is_a_name": lambda: wf.zeros("a=2, b=x"),  # wrong
    "dims_as_a_list": lambda: wf.dims(["a=4"]),  # wrong
    "dims_as_separate_strings": lambda: wf.dims("a=4", "b=3"),  # wrong
    "dims_without_sizes": lambda: wf.dims("batch d_h"),  # wrong
    "dim_with_size_and_name_exchanged": lambda: wf.Dim(4, "batch"),  # wrong
    "dim_from_a_string": lambda: wf.Dim("batch=4"),  # wrong
    "dim_of_a_negative_size": lambda: wf.Dim("batch", -3),  # wrong
    "dim_of_a_size_that_is_not_a_number": lambda: wf.Dim("batch", float("nan")),  # wrong
    "tensor_as_dims": lambda: wf.sum(x(), v()),  # wrong
    "no_dims": lambda: wf.ones(None),  # wrong
}  # fmt: skip


# -- creation and values -----------------------------------------------------------------------------

MISTAKES |= {
    "tensor_without_dims": lambda: wf.tensor(np.ones(3)),  # wrong
    "tensor_with_a_dtype": lambda: wf.tensor(np.ones(3), "a=3", dtype=np.float16),  # wrong
    "tensor_of_a_generator": lambda: wf.tensor((n for n in range(3)), "a=3"),  # wrong
    "tensor_of_nothing": lambda: wf.tensor(None, "a=2"),  # wrong
    "zeros_on_a_mesh": lambda: wf.zeros("a=2", mesh=MESH),  # wrong
    "full_with_arguments_exchanged": lambda: wf.full(0.0, "a=2"),  # wrong
    "arange_of_a_number": lambda: wf.arange(5),  # wrong
    "arange_from_to": lambda: wf.arange(0, 5),  # wrong
    "linspace_with_num": lambda: wf.linspace(0, 1, num=5),  # wrong
    "linspace_of_a_number": lambda: wf.linspace(0, 1, 5),  # wrong
    "linspace_to_nothing": lambda: wf.linspace(0, None, "a=5"),  # wrong
    "linspace_between_arrays": lambda: wf.linspace(np.zeros(2), 1, "a=5"),  # wrong
    "names_for_an_array_of_another_rank": lambda: wf.tensor(np.ones((3, 4)), "row"),  # wrong
    "eye_of_a_number": lambda: wf.eye(3),  # wrong
    "eye_of_one_string": lambda: wf.eye("a=3 b=3"),  # wrong
    "tril_without_dims": lambda: wf.tril(ones("row=3 column=3")),  # wrong
    "triu_of_a_diagonal": lambda: wf.triu(ones("row=3 column=3"), "row", "column", diagonal=1),  # wrong
    "one_hot_of_a_number": lambda: wf.one_hot(ones("a=3", np.int32), 10),  # wrong
}  # fmt: skip


# -- order, quantiles, linear algebra, Fourier transforms ---------------------------------------------

MATRIX = "row=3 column=3"
MISTAKES |= {
    "diff_along_an_axis": lambda: wf.diff(x(), axis=0),  # wrong
    "searchsorted_exchanged": lambda: wf.searchsorted(0.5, v(), "batch"),  # wrong
    "searchsorted_without_dim": lambda: wf.searchsorted(v(), 0.5),  # wrong
    "median_along_an_axis": lambda: wf.median(x(), axis=0),  # wrong
    "median_of_complex_numbers": lambda: wf.median(ones("a=3", np.complex64)),  # wrong
    "quantile_of_a_list": lambda: wf.quantile(x(), [0.1, 0.5], "batch"),  # wrong
    "quantile_exchanged": lambda: wf.quantile(x(), "batch", 0.5),  # wrong
    "isclose_with_eps": lambda: wf.isclose(x(), x(), eps=1e-3),  # wrong
    "allclose_of_other_sizes": lambda: wf.allclose(x(), ones("batch=5")),  # wrong
    "real_of_a_list": lambda: wf.real([1, 2]),  # wrong
    "approx_max_k_by_a_number": lambda: wf.approx_max_k(v(), 2),  # wrong
    "inv_of_a_misspelt_dim": lambda: wf.linalg.inv(ones(MATRIX), "row", "col"),  # wrong
    "cholesky_without_dims": lambda: wf.linalg.cholesky(ones(MATRIX)),  # wrong
    "solve_for_an_array": lambda: wf.linalg.solve(ones(MATRIX), np.ones(3), "row", "column"),  # wrong
    "qr_into_a_number": lambda: wf.linalg.qr(ones(MATRIX), "row", "column", 3),  # wrong
    "svd_without_new_dim": lambda: wf.linalg.svd(ones(MATRIX), "row", "column"),  # wrong
    "norm_along_an_axis": lambda: wf.linalg.norm(x(), axis=0),  # wrong
    "fft_of_a_length": lambda: wf.fft.fft(v(), "batch", n=8),  # wrong
    "fft_without_dims": lambda: wf.fft.fft(v()),  # wrong
    "fft_with_an_unknown_norm": lambda: wf.fft.fft(v(), "batch", norm="orto"),  # wrong
    "irfft_of_a_negative_size": lambda: wf.fft.irfft(v(), "batch", size=-2),  # wrong
}  # fmt: skip


# -- Python: indices, conversions, operators ----------------------------------------------------------

MISTAKES |= {
    "index_of_columns": lambda: x()[:, 0],  # wrong
    "index_by_none": lambda: x()[None],  # wrong
    "index_by_a_mask": lambda: x()[x() > 0],  # wrong
    "index_of_a_dim_by_a_mask": lambda: x()["batch", v() > 0],  # wrong
    "index_by_a_name_alone": lambda: x()["batch"],  # wrong
    "index_by_a_dict": lambda: x()[{"batch": 0}],  # wrong
    "index_of_a_list_by_a_tensor": lambda: ["a", "b"][wf.argmax(v(), "batch")],  # wrong
    "range_of_a_tensor": lambda: range(wf.sum(v())),  # wrong
    "float_of_a_vector": lambda: float(v()),  # wrong
    "format_of_a_vector": lambda: f"{v():.3f}",  # wrong
    "largest_by_python": lambda: max(v()),  # wrong
    "tensor_as_a_key": lambda: {v(): 1},  # wrong
    "deletion_of_an_element": lambda: x().__delitem__(("batch", 0)),  # wrong
    "list_added": lambda: v() + [1, 2, 3, 4],  # wrong
    "dim_multiplied": lambda: v() * wf.Dim("batch", 4),  # wrong
    "function_added": lambda: v() + wf.exp,  # wrong
    "method_not_called": lambda: wf.exp(v().sum),  # wrong
    "text_compared": lambda: v() == "one",  # wrong
    "sum_of_a_list": lambda: wf.sum([v(), v()]),  # wrong
    "root_by_math": lambda: math.sqrt(v()),  # wrong
}  # fmt: skip


def traced(name, fn):
    """A mistake inside a program, whose function is on the line of the call."""
    MISTAKES[name] = lambda: staged(fn, v())


traced("mask_in_an_if", lambda x: x if x > 0 else -x)  # wrong
traced("masks_joined_by_and", lambda x: (x > 0) and (x < 2))  # wrong
traced("comparison_in_a_chain", lambda x: 0 < x < 1)  # wrong
traced("number_of_a_traced_tensor", lambda x: float(wf.sum(x)))  # wrong
traced("loop_up_to_a_traced_tensor", lambda x: [x for _ in range(wf.sum(x))])  # wrong
traced("text_of_a_traced_tensor", lambda x: f"{wf.sum(x):.3f}")  # wrong
traced("rows_of_a_traced_tensor", lambda x: [row * 2 for row in x])  # wrong
traced("where_of_numpy", lambda x: np.where(x > 0, x, 0))  # wrong
traced("array_added_in_a_program", lambda x: np.ones(4) + x)  # wrong
traced("key_from_a_traced_tensor", lambda x: jax.random.normal(jax.random.key(x), (3,)))  # wrong


# -- functions of JAX ----------------------------------------------------------------------------------

MISTAKES |= {
    "jnp_add": lambda: jnp.add(v(), v()),  # wrong
    "jnp_norm": lambda: jnp.linalg.norm(v()),  # wrong
    "jnp_fft": lambda: jnp.fft.fft(v()),  # wrong
    "jnp_concatenate": lambda: jnp.concatenate([v(), v()]),  # wrong
    "jnp_einsum": lambda: jnp.einsum("bl,bl->b", x(), x()),  # wrong
    "array_indexed_by_a_tensor": lambda: jnp.arange(4)[v().astype(int)],  # wrong
    "jax_permutation": lambda: jax.random.permutation(KEY, v()),  # wrong
    "jax_cond": lambda: jax.lax.cond(wf.any(v() > 0), lambda x: x, lambda x: -x, v()),  # wrong
    "jax_map": lambda: jax.lax.map(wf.exp, v()),  # wrong
    "jax_jacobian_used": lambda: wf.sum(jax.jacobian(lambda x: x * x)(v())),  # wrong
    "jit_of_a_reshape": lambda: jax.jit(lambda x: x.reshape(2, 2))(v()),  # wrong
    "tree_map_without_a_tree": lambda: wf.tree_map(wf.exp),  # wrong
    "tree_map_exchanged": lambda: wf.tree_map(x(), wf.exp),  # wrong
    "tree_map_of_other_keys": lambda: wf.tree_map(wf.add, {"a": v()}, {"b": v()}),  # wrong
}  # fmt: skip


@MISTAKES.add
def shard_map_of_jax():
    mesh, spec = wf.Mesh("data=2").jax_mesh, jax.P("data")
    jax.shard_map(lambda t: t + t, mesh=mesh, in_specs=spec, out_specs=spec)(v())  # wrong


# -- functions that take functions ----------------------------------------------------------------------

MISTAKES |= {
    "grad_of_a_value": lambda: wf.grad(wf.sum(v())),  # wrong
    "grad_by_a_name": lambda: wf.grad(wf.sum, argnums="x")(v()),  # wrong
    "grad_of_a_function_without_return": lambda: wf.grad(lambda x: None)(v()),  # wrong
    "jacobian_of_a_value": lambda: wf.jacobian(wf.exp(v())),  # wrong
    "hessian_by_a_name": lambda: wf.hessian(wf.sum, argnums="x")(v()),  # wrong
    "remat_of_a_value": lambda: wf.remat(wf.exp(v())),  # wrong
    "custom_vjp_of_a_value": lambda: wf.custom_vjp(wf.exp(v())),  # wrong
    "jvp_without_tuples": lambda: wf.jvp(wf.exp, v(), v()),  # wrong
    "vjp_of_a_number": lambda: wf.vjp(wf.exp, v())[1](1.0),  # wrong
    "eval_shape_of_a_value": lambda: wf.eval_shape(wf.exp(v())),  # wrong
    "eval_shape_of_a_shape": lambda: wf.eval_shape(wf.exp, (3,)),  # wrong
    "vmap_over_an_axis": lambda: wf.vmap(wf.sum, in_axes=0)(x()),  # wrong
    "vmap_over_a_position": lambda: wf.vmap(wf.sum, 0)(x()),  # wrong
    "vmap_of_a_tensor": lambda: wf.vmap(x(), "batch"),  # wrong
    "map_exchanged": lambda: wf.map(v(), wf.exp, "batch"),  # wrong
    "map_of_a_value": lambda: wf.map(wf.exp(v()), v(), "batch"),  # wrong
    "associative_scan_along_an_axis": lambda: wf.associative_scan(wf.add, v(), axis=0),  # wrong
    "associative_scan_of_one_argument": lambda: wf.associative_scan(lambda a: a, v(), "batch"),  # wrong
    "scan_of_a_length": lambda: wf.scan(lambda c, x: (c, x), 0.0, None, length=3),  # wrong
    "scan_with_the_carry_first": lambda: wf.scan(0.0, lambda c, x: (c, x), v(), "batch"),  # wrong
    "scan_of_one_argument": lambda: wf.scan(lambda c: (c, None), 0.0, v(), "batch"),  # wrong
    "scan_that_returns_three": lambda: wf.scan(lambda c, x: (c, x, x), 0.0, v(), "batch"),  # wrong
    "fori_of_one_argument": lambda: wf.fori_loop(0, 3, lambda x: x, v()),  # wrong
    "while_of_a_value": lambda: wf.while_loop(wf.any(v() > 0), lambda x: x, v()),  # wrong
    "while_with_the_carry_first": lambda: wf.while_loop(v(), lambda x: wf.sum(x) < 1, lambda x: x),  # wrong
    "cond_of_values": lambda: wf.cond(True, wf.exp(v()), wf.sin(v())),  # wrong
    "cond_of_a_word": lambda: wf.cond("yes", wf.exp, wf.sin, v()),  # wrong
    "cond_of_functions_without_arguments": lambda: wf.cond(True, lambda: v(), lambda: v(), v()),  # wrong
    "cond_without_operands": lambda: wf.cond(True, wf.exp, wf.sin),  # wrong
    "switch_exchanged": lambda: wf.switch([wf.exp, wf.sin], 0, v()),  # wrong
    "switch_of_values": lambda: wf.switch(0, [wf.exp(v()), wf.sin(v())], v()),  # wrong
    "local_without_out": lambda: wf.local(jnp.exp, v()),  # wrong
}  # fmt: skip


# -- meshes, layouts, placement ---------------------------------------------------------------------------

MISTAKES |= {
    "mesh_of_a_shape": lambda: wf.Mesh((2, 4)),  # wrong
    "mesh_by_keywords": lambda: wf.Mesh(data=4),  # wrong
    "mesh_of_a_shape_and_names": lambda: wf.Mesh((2, 4), ("data", "model")),  # wrong
    "mesh_of_a_number_of_devices": lambda: wf.Mesh("data=2", devices=2),  # wrong
    "mesh_written_as_a_layout": lambda: wf.Mesh("batch:data"),  # wrong
    "layout_of_a_partition_spec": lambda: wf.Layout(jax.P("data")),  # wrong
    "layout_by_keywords": lambda: wf.Layout(batch="data"),  # wrong
    "layout_with_a_misspelt_role": lambda: wf.Layout("batch:data", param="d:model"),  # wrong
    "layout_of_a_list_of_names": lambda: wf.Layout(["batch", "data"]),  # wrong
    "layout_of_axes_that_are_numbers": lambda: wf.Layout({"batch": ("data", 3)}),  # wrong
    "layout_that_replicates_by_none": lambda: wf.Layout({"batch": None}),  # wrong
    "place_without_a_layout": lambda: wf.place(v(), MESH),  # wrong
    "place_with_a_partition_spec": lambda: wf.place(v(), MESH, jax.P("data")),  # wrong
    "place_exchanged": lambda: wf.place(v(), LAYOUT, MESH),  # wrong
    "cpu_devices_as_text": lambda: wf.cpu_devices("8"),  # wrong
}  # fmt: skip


# -- programs ------------------------------------------------------------------------------------------------


def program():
    return wf.spmd(lambda x: x + 1, "data=2", "batch:data")


MISTAKES |= {
    "spmd_with_shardings": lambda: wf.spmd(lambda x: x, MESH, in_shardings=None),  # wrong
    "spmd_with_static_argnums": lambda: wf.spmd(lambda x: x, MESH, static_argnums=0),  # wrong
    "spmd_with_donate_argnums": lambda: wf.spmd(lambda x: x, MESH, donate_argnums=0),  # wrong
    "spmd_with_arguments_exchanged": lambda: wf.spmd(lambda x: x, "batch:data", "data=4"),  # wrong
    "spmd_with_a_layout_not_called": lambda: wf.spmd(lambda x: x, MESH, wf.Layout),  # wrong
    "spmd_of_a_value": lambda: wf.spmd(wf.exp(v()), MESH),  # wrong
    "spmd_with_a_static_fraction": lambda: wf.spmd(lambda x: x, static=1.5),  # wrong
    "program_without_arguments": lambda: program()(),  # wrong
    "program_with_too_many_arguments": lambda: program()(v(), v()),  # wrong
    "program_with_an_unknown_name": lambda: program()(y=v()),  # wrong
    "plan_without_arguments": lambda: program().plan(),  # wrong
    "plan_on_hardware": lambda: program().plan(v(), hardware="h100"),  # wrong
    "export_without_arguments": lambda: program().export(),  # wrong
    "verify_of_a_function_alone": lambda: wf.verify(wf.exp),  # wrong
    "verify_with_arguments_exchanged": lambda: wf.verify(wf.exp, (v(),), "batch:data", "data=4"),  # wrong
    "verify_on_a_misspelt_axis": lambda: wf.verify(wf.exp, (v(),), "data=2", "batch:dat"),  # wrong
    "search_without_hardware": lambda: wf.search(wf.exp, (v(),)),  # wrong
    "search_on_a_mesh": lambda: wf.search(wf.exp, (v(),), "data=2"),  # wrong
    "load_of_a_number": lambda: wf.load(3),  # wrong
    "load_of_an_empty_file": lambda: wf.load(b""),  # wrong
}  # fmt: skip


@MISTAKES.add
def array_returned_from_a_program():
    raw = wf.spmd(lambda x: x.array + np.ones(1), MESH, "batch:data")
    raw.jaxpr(v())  # wrong


@MISTAKES.add
def save_into_a_file_as_a_folder():
    exported = program().export(v())
    exported.save("/dev/null/program.weft")  # wrong


# -- random numbers ---------------------------------------------------------------------------------------------

MISTAKES |= {
    "draw_without_a_key": lambda: wf.random.normal("batch=4"),  # wrong
    "draw_with_arguments_exchanged": lambda: wf.random.normal("batch=4", KEY),  # wrong
    "draw_of_a_shape": lambda: wf.random.normal(KEY, (4,)),  # wrong
    "draw_by_a_generator_of_numpy": lambda: wf.random.normal(np.random.default_rng(0), "batch=4"),  # wrong
    "draw_by_a_tensor": lambda: wf.random.uniform(v(), "batch=4"),  # wrong
    "categorical_along_an_axis": lambda: wf.random.categorical(KEY, v(), axis=-1),  # wrong
    "randint_without_bounds": lambda: wf.random.randint(KEY, 0, 10),  # wrong
    "dropout_without_a_key": lambda: wf.dropout(v(), 0.5),  # wrong
    "dropout_in_percent": lambda: wf.dropout(v(), 50, KEY),  # wrong
    "dropout_in_training": lambda: wf.dropout(v(), 0.5, KEY, training=True),  # wrong
}  # fmt: skip


# -- modules, optimizers, training ---------------------------------------------------------------------------------


class Model(nn.Module):
    linear: nn.Linear

    def __init__(self):
        self.linear = nn.Linear(d, h)

    def loss(self, batch, key):
        return wf.mean(self.linear(batch))


def spec():
    return nn.specs(Model())


MISTAKES |= {
    "linear_of_numbers": lambda: nn.Linear(3, 5),  # wrong
    "linear_of_names": lambda: nn.Linear("d", "h"),  # wrong
    "linear_of_one_dim": lambda: nn.Linear(d),  # wrong
    "linear_with_use_bias": lambda: nn.Linear(d, h, use_bias=True),  # wrong
    "linear_before_init": lambda: nn.Linear(d, h)(ones("d=3")),  # wrong
    "linear_called_with_two": lambda: nn.specs(nn.Linear(d, h))(ones("d=3"), KEY),  # wrong
    "embedding_of_numbers": lambda: nn.Embedding(100, 3),  # wrong
    "layer_norm_of_nothing": lambda: nn.LayerNorm(),  # wrong
    "attention_of_numbers": lambda: nn.Attention(64, 8),  # wrong
    "model_with_an_argument": lambda: Model(64),  # wrong
    "init_without_a_key": lambda: nn.init(Model()),  # wrong
    "init_exchanged": lambda: nn.init(KEY, Model()),  # wrong
    "count_of_a_class": lambda: nn.count(Model),  # wrong
    "stack_of_a_class": lambda: nn.stack(Model, wf.Dim("layers", 3)),  # wrong
    "stack_by_a_number": lambda: nn.stack(Model(), 3),  # wrong
    "declare_without_an_initializer": lambda: nn.declare([d]),  # wrong
    "declare_with_values": lambda: nn.declare([d], wf.zeros("d=3")),  # wrong
    "cross_entropy_without_vocab": lambda: nn.cross_entropy(ones("a=2 v=4"), ones("a=2", np.int32)),  # wrong
    "causal_mask_of_a_number": lambda: nn.causal(4),  # wrong
    "config_with_a_misspelt_field": lambda: models.Config(d_modle=4),  # wrong
    "transformer_without_a_config": lambda: models.Transformer(),  # wrong
    "transformer_of_a_dict": lambda: models.Transformer({"d_model": 4}),  # wrong
    "adamw_with_lr": lambda: optim.AdamW(lr=1e-3),  # wrong
    "adamw_with_betas": lambda: optim.AdamW(1e-3, betas=(0.9, 0.999)),  # wrong
    "adamw_of_parameters": lambda: optim.AdamW(spec(), 1e-3),  # wrong
    "adamw_without_a_rate": lambda: optim.AdamW(),  # wrong
    "cosine_without_steps": lambda: optim.Cosine(),  # wrong
    "init_of_an_optimizer_without_parameters": lambda: optim.AdamW(1e-3).init(),  # wrong
    "update_without_parameters": lambda: optim.AdamW(1e-3).update(spec(), {}),  # wrong
    "clipping_exchanged": lambda: optim.clip_by_global_norm(1.0, spec()),  # wrong
    "step_of_a_class": lambda: train.train_step(optim.AdamW),  # wrong
    "step_of_a_name": lambda: train.train_step("adamw"),  # wrong
    "step_with_a_misspelt_option": lambda: train.train_step(optim.AdamW(1e-3), clp=1.0),  # wrong
    "step_without_a_batch": lambda: train.train_step(optim.AdamW(1e-3))(spec(), {}),  # wrong
    "step_of_a_layer": lambda: train.train_step(optim.AdamW(1e-3))(nn.Linear(d, h), {}, v(), None),  # wrong
    "checkpoints_without_a_folder": lambda: checkpoint.CheckpointManager(),  # wrong
    "checkpoints_in_a_number": lambda: checkpoint.CheckpointManager(3),  # wrong
    "checkpoint_without_a_step": lambda: checkpoint.CheckpointManager("nowhere").save(spec(), {}),  # wrong
    "checkpoint_restored_without_parameters": lambda: checkpoint.CheckpointManager("nowhere").restore(),  # wrong
    "parameter_of_an_array": lambda: wf.parameter(np.ones(3)),  # wrong
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_message(name, mistake):
    mistake(name, MISTAKES[name], "messages/user")


def test_every_golden_text_has_its_mistake(request):
    folder = request.config.rootpath / "tests" / "messages" / "user"
    assert {path.stem for path in folder.glob("*.txt")} == set(MISTAKES)
