"""Meshes: integer sizes of any type, and their devices."""

import jax
import numpy as np
import pytest

import weft as wf
from weft import nn
from weft.core.errors import LayoutError, ProgramError

pytestmark = pytest.mark.nodevice


def test_sizes_are_integers_of_any_kind():
    """NumPy integers raised an error."""
    mesh = wf.Mesh([("data", np.int64(4)), ("model", np.int32(2))])
    assert mesh == wf.Mesh("data=4 model=2")
    assert all(type(size) is int for size in mesh.shape.values())


def test_devices_are_in_the_order_given():
    """They were handed to JAX, which may put them in another one."""
    given = jax.devices()[7:3:-1]
    mesh = wf.Mesh("data=2 model=2", given)
    assert mesh.jax_mesh.devices.tolist() == [given[:2], given[2:]]
    assert wf.Mesh("data=2 model=2", np.array(given).reshape(2, 2)) == mesh
    x = wf.place(wf.ones("batch=4"), mesh, "batch:data+model")
    assert [shard.device for shard in sorted(x.array.addressable_shards, key=lambda s: s.index)] == given


def test_an_open_axis_takes_the_devices_given():
    assert wf.Mesh("data=-1 model=2", jax.devices()[:6]).shape == {"data": 3, "model": 2}


def test_off_the_mesh_onto_one_device():
    """A tensor that was placed on `Mesh()` stayed on its eight devices."""
    x = wf.place(wf.ones("a=8"), "data=8", "a:data")
    for off in (wf.place(x, wf.Mesh(), ""), wf.place(x, None, None)):
        assert off.array.devices() == {jax.devices()[0]}
        np.testing.assert_array_equal(off.numpy(), x.numpy())


@pytest.mark.parametrize("axes", ["", "data=1"])
def test_a_mesh_of_one_named_device(axes):
    """Its device was not used: arrays and results stayed on the first one."""
    device = jax.devices()[3]
    mesh = wf.Mesh(axes, devices=[device])
    drawn = nn.init(nn.Linear(wf.Dim("d", 4), wf.Dim("e", 3)), jax.random.key(0), mesh, "")
    made = wf.spmd(lambda: wf.ones("a=2"), mesh)()
    called = wf.from_callback(lambda where: np.ones(2)[where], "a=2", mesh, "")
    tripled = wf.spmd(lambda x, n: x * n, mesh)(wf.ones("a=2"), jax.device_put(3.0, jax.devices()[1]))
    for t in (*jax.tree.leaves(drawn, is_leaf=wf.is_tensor), made, called, tripled):
        assert t.array.devices() == {device}


def test_a_role_is_given_where_a_tensor_lies():
    """It was gathered on one device, and split again."""
    layout = wf.Layout("c:data", params="b:data")
    x = wf.place(wf.tensor(np.arange(35.0).reshape(5, 7), "a=5 b=7"), "data=4", layout)
    w = wf.parameter(x)
    assert w.role == "param" and repr(w).startswith("f32[a=5, b=7/data·4]")
    np.testing.assert_array_equal(w.numpy(), x.numpy())
    same = wf.place(wf.ones("c=4"), "data=4", "c:data")
    assert wf.parameter(same).array is same.array


def test_named_devices_apart_and_together():
    """Under jax.grad arrays stayed where they were; results forgot their mesh, and so that they can't meet."""
    first, second = (wf.Mesh("", devices=[device]) for device in jax.devices()[2:4])
    square = wf.spmd(lambda x: x * x, first)
    there = jax.device_put(np.float32(3.0), jax.devices()[0])
    assert jax.grad(lambda a: square(wf.tensor(a, "")).array)(there) == 6.0
    a, b = square(wf.tensor(2.0, "")), wf.spmd(lambda x: x + 1.0, second)(wf.tensor(2.0, ""))
    with pytest.raises(LayoutError, match='mesh "" of other devices, and this runs on mesh ""'):
        a + b
    assert (wf.place(a, None, None) + wf.place(b, None, None)).item() == 7.0
    with pytest.raises(ProgramError, match="donat"):
        wf.spmd(lambda x, y: x + y, first, donate=(0,))(a, a)
