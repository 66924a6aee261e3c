"""Copies and pickles: tensors, meshes, layouts and plans round-trip, also to another process; programs explain why not."""

import copy
import pickle
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import cosines
from mistakes import MESH, Mistakes, ones

import weft as wf

MISTAKES = Mistakes()


def placed(role="value", dtype=np.float32):
    t = cosines("batch=5 d=3").astype(dtype)
    t = wf.parameter(t) if role == "param" else t
    return wf.place(t, "data=2 model=2", wf.Layout("batch:data", params="d:model"))


TENSORS = {
    "unplaced": lambda: cosines("batch=5 d=3"),
    "placed, uneven": placed,
    "a parameter": lambda: placed("param"),
    "bfloat16": lambda: placed(dtype=jnp.bfloat16),
    "weakly typed": lambda: wf.place(wf.where(cosines("a=5") > 0, 0.0, 1.0), "data=2", "a:data"),
    "chosen devices": lambda: wf.place(cosines("a=5"), wf.Mesh("x=2", jax.devices()[3:5]), "a:x"),
    "a spec": lambda: wf.spec("a=5"),
    "a placed spec": lambda: wf.place(wf.spec("a=5"), "data=2", "a:data"),
}
OTHERS = {
    "a dim": lambda: wf.Dim("a", 5),
    "a mesh": lambda: wf.Mesh("data=4 model=2"),
    "a used mesh": lambda: placed().mesh,
    "a mesh of chosen devices": lambda: wf.Mesh("x=2", jax.devices()[3:5]),
    "a layout": lambda: wf.Layout("batch:pod+data", params="d:model"),
    "a plan": lambda: wf.spmd(wf.sum, MESH, "batch:data").plan(wf.spec("batch=8 d=4")),
    "a search": lambda: wf.search(wf.sum, (wf.spec("batch=8 d=4"),), devices=2, hardware="h100"),
}
COPIES = {"pickle": lambda x: pickle.loads(pickle.dumps(x)), "copy": copy.copy, "deepcopy": copy.deepcopy}


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("name", TENSORS)
def test_tensors(name, how):
    t = TENSORS[name]()
    got = COPIES[how](t)
    assert repr(got) == repr(t)
    assert (got.dims, got.dtype, got.weak_type, got.role) == (t.dims, t.dtype, t.weak_type, t.role)
    assert got.placement is t.placement
    if isinstance(t._data, jax.Array):
        assert got.storage.sharding.is_equivalent_to(t.storage.sharding, t.ndim)
        np.testing.assert_array_equal(got.numpy(), t.numpy())


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("name", OTHERS)
def test_other_objects(name, how):
    x = OTHERS[name]()
    got = COPIES[how](x)
    assert repr(got) == repr(x)
    if not name.startswith("a search"):
        assert got == x and hash(got) == hash(x)


CHILD = """
import pickle, sys, weft as wf
wf.cpu_devices(int(sys.argv[1]))
t, mesh, layout = pickle.load(sys.stdin.buffer)
assert hash(layout) == hash(wf.Layout("batch:data", params="d:model")), "a stale hash"
assert hash(mesh) == hash(wf.Mesh("data=2 model=2")), "a stale hash"
assert t.placement is wf.place(wf.ones("batch=2"), mesh, layout).placement
print(float(wf.sum(t)))
"""


def in_another_process(devices):
    t = placed()
    return subprocess.run(
        [sys.executable, "-c", CHILD, str(devices)],
        input=pickle.dumps((t, t.mesh, t.layout)),
        capture_output=True,
        timeout=120,
    )


def test_another_process():
    """Hashes of strings differ there, and meshes and layouts are parts of cache keys."""
    done = in_another_process(devices=4)
    assert done.returncode == 0, done.stderr.decode()
    assert float(done.stdout) == pytest.approx(float(wf.sum(placed())), rel=1e-5)


def test_another_process_with_too_few_devices():
    done = in_another_process(devices=1)
    assert b'MeshError: mesh "data=2 model=2" needs 4 devices, and there are 1' in done.stderr


def test_a_deep_copy_survives_donation():
    t = placed()
    kept = copy.deepcopy({"w": t})["w"]
    wf.spmd(lambda t: t + 1, t.mesh, t.layout, donate=[0])(t)
    np.testing.assert_array_equal(kept.numpy(), placed().numpy())


def test_copies_inside_a_program_are_uses():
    """A copy of a slice is the slice: a copied list of its users would hide a use from `grad`."""
    x, program = (
        placed(),
        wf.spmd(wf.grad(lambda x: wf.sum(copy.deepcopy(x) * copy.copy(x))), MESH, "batch:data"),
    )
    np.testing.assert_allclose(program(wf.place(x, None, None)).numpy(), 2 * x.numpy(), rtol=1e-6)


@pytest.mark.parametrize("how", COPIES)
def test_an_exported_program(how):
    x = cosines("batch=4 d=3")
    stored = wf.spmd(lambda x: wf.sum(x, "d"), MESH, "batch:data").export(x)
    got = COPIES[how](stored)
    assert repr(got) == repr(stored)
    np.testing.assert_array_equal(got(x).numpy(), stored(x).numpy())


def test_a_program_is_its_own_copy():
    program = wf.spmd(wf.sum, MESH, "batch:data")
    assert copy.deepcopy([program])[0] is program and copy.copy(program) is program


# -- mistakes ---------------------------------------------------------------------------------------

MISTAKES |= {
    "pickle_of_a_program": lambda: pickle.dumps(wf.spmd(wf.sum, MESH, "batch:data")),  # wrong
    "pickle_of_a_traced_program": lambda: pickle.dumps(wf.spmd(wf.sum, MESH, "batch:data").trace(ones("batch=4"))),  # wrong
}  # fmt: skip


@MISTAKES.add
def pickle_inside_a_program():
    def program(x):
        return pickle.dumps(x)  # wrong

    wf.spmd(program, MESH, "batch:data").jaxpr(ones("batch=4"))


@MISTAKES.add
def copy_of_a_donated_tensor():
    t = placed()
    wf.spmd(lambda t: t + 1, t.mesh, t.layout, donate=[0])(t)
    copy.deepcopy(t)  # wrong


@MISTAKES.add
def unpickled_mesh_of_missing_devices():
    class Missing:
        id = 63

    data = pickle.dumps(wf.Mesh("x=1", [Missing()]))
    pickle.loads(data)  # wrong


@pytest.mark.parametrize("name", MISTAKES)
def test_message(name, mistake):
    mistake(name, MISTAKES[name], "messages/arrays")
