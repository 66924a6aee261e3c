"""Messages of mistakes with meshes and layouts."""

import jax
import numpy as np
import pytest
from mistakes import LAYOUT, MESH, OTHER_MESH, Mistakes, ones, staged

import weft as wf

MISTAKES = Mistakes()


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


@MISTAKES.add
def mesh_too_large():
    program = wf.spmd(lambda x: x + 1, "data=32 model=16", "batch:data")
    program(ones("batch=4"))  # wrong


@MISTAKES.add
def compile_for_too_large_a_mesh():
    program = wf.spmd(lambda x: x + 1, "data=512", "batch:data")
    program.compile(wf.spec("batch=1024"))  # wrong


@MISTAKES.add
def lower_for_too_large_a_mesh():
    traced = wf.spmd(lambda x: x + 1, "data=512", "batch:data").trace(wf.spec("batch=1024"))
    traced.lower()  # wrong


@MISTAKES.add
def export_for_too_large_a_mesh():
    wf.spmd(lambda x: x + 1, "data=512", "batch:data").export(wf.spec("batch=1024"))  # wrong


@MISTAKES.add
def two_dims_of_a_result_on_one_axis():
    def program(x, y):
        return x + y  # wrong

    staged(program, ones("batch=4"), ones("heads=8"), layout="batch:data heads:data")


@MISTAKES.add
def two_dims_of_an_einsum_on_one_axis():
    def program(x, w):
        return wf.einsum(x, w, out=["batch"])  # wrong

    staged(program, ones("batch=4"), ones("heads=8"), layout="batch:data heads:data")


@MISTAKES.add
def rename_onto_an_axis_in_use():
    def program(x):
        return x.rename(heads="d_ff")  # wrong

    staged(program, ones("heads=4 vocab=8"), layout="d_ff:model vocab:model")


@MISTAKES.add
def two_meshes():
    x = wf.place(ones("batch=4"), MESH, LAYOUT)
    y = wf.place(ones("batch=4"), OTHER_MESH, "batch:data")
    x + y  # wrong


@MISTAKES.add
def two_layouts():
    x = wf.place(ones("batch=4"), MESH, LAYOUT)
    y = wf.place(ones("batch=4"), MESH, "batch:model")
    wf.maximum(x, y)  # wrong


@MISTAKES.add
def input_of_another_mesh():
    program = wf.spmd(lambda x: x + 1, MESH, LAYOUT)
    program(wf.place(ones("batch=4"), OTHER_MESH, "batch:data"))  # wrong


@MISTAKES.add
def captured_tensor_of_another_mesh():
    y = wf.place(ones("batch=4"), OTHER_MESH, "batch:data")

    def program(x):
        return x + y  # wrong

    staged(program, ones("batch=4"))


@MISTAKES.add
def nested_program_with_another_mesh():
    inner = wf.spmd(lambda x: x + 1, OTHER_MESH, "batch:data")

    def program(x):
        return inner(x)  # wrong

    staged(program, ones("batch=4"))


@MISTAKES.add
def vmap_over_an_axis_in_use():
    def program(x, y):
        return wf.vmap(lambda x: x + y, "batch")(x)  # wrong

    staged(program, ones("batch=4"), ones("heads=8"), layout="batch:data heads:data")


@pytest.mark.parametrize("name", MISTAKES)
def test_message(name, mistake):
    mistake(name, MISTAKES[name], "messages")
