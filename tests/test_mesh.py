"""Meshes: sizes of any whole kind, and the devices that they are made of."""

import jax
import numpy as np

import weft as wf


def test_sizes_are_whole_numbers_of_any_kind():
    """NumPy's were refused."""
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
