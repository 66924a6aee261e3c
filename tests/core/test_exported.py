"""Exported programs: saved with names, mesh and layout, and loaded without the code they were traced from."""

import functools
import json
import subprocess
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from compare import assert_same, real
from every_op import EVERY_OP
from mistakes import Mistakes, ones
from op_examples import OPERANDS

import weft as wf
from weft.core.exported import MAGIC

MESH, LAYOUT = "x=2 y=2", wf.Layout("a:x", params="b:y")
CAPTURED = real(1, "b=3")


class Linear(eqx.Module):
    w: wf.Tensor
    b: wf.Tensor


def model():
    return Linear(wf.parameter(real(2, "b=3 c=2")), wf.parameter(real(3, "c=2")))


def f(model, x, rate, *, mode, keep=None):
    y = wf.einsum(x + CAPTURED, model.w, out=["a", "c"]) * rate + model.b
    scaled = Linear(model.w * 2.0, model.b)
    return {
        "y": wf.tanh(y) if mode == "tanh" else y,
        "both": (wf.sum(y), [None, rate]),
        "model": scaled,
        "mode": mode,
    }


@pytest.fixture(scope="module")
def exported():
    program = wf.spmd(f, MESH, LAYOUT, static=("mode",))
    return program, program.export(model(), wf.spec("a=5 b=3"), 2.0, mode="tanh")


def test_a_saved_program_computes_the_same(exported, tmp_path):
    program, stored = exported
    stored.save(tmp_path / "new folder" / "f.weft")
    assert [p.name for p in (tmp_path / "new folder").iterdir()] == ["f.weft"]
    loaded = wf.load(tmp_path / "new folder" / "f.weft")
    assert repr(loaded) == repr(stored)
    x, layer = real(4, "a=5 b=3"), model()
    want = program(layer, x, 3.0, mode="tanh")
    for run in (stored, loaded):
        for given in (
            layer,
            {"w": layer.w, "b": layer.b},
            {"b": layer.b, "w": wf.tensor(layer.w.array, layer.w.dims)},
        ):
            got = run(given, x, 3.0, mode="tanh")
            fields = got.pop("model")
            assert fields.keys() == {"w", "b"} and fields["w"].role == "value"
            assert_same(fields["w"], want["model"].w, rtol=0, atol=0)
            assert got["mode"] == "tanh" and got["both"][1][0] is None
            for a, b in zip((got["y"], got["both"][0]), (want["y"], want["both"][0]), strict=True):
                assert_same(a, b, rtol=0, atol=0)
                assert a.storage.sharding == b.storage.sharding
            assert got["both"][1][1].weak_type == want["both"][1][1].weak_type


def test_a_fresh_process_needs_no_user_code(exported, tmp_path):
    program, stored = exported
    stored.save(tmp_path / "f.weft")
    x, layer = real(4, "a=5 b=3"), model()
    np.savez(tmp_path / "arrays.npz", x=x.numpy(), w=layer.w.numpy(), b=layer.b.numpy())
    code = """
import sys
import numpy as np
import weft as wf
wf.cpu_devices(int(sys.argv[2]))
arrays = np.load(sys.argv[1] + "/arrays.npz")
run = wf.load(sys.argv[1] + "/f.weft")
w, b = wf.tensor(arrays["w"], "b=3 c=2"), wf.tensor(arrays["b"], "c=2")
y = run({"w": w, "b": b}, wf.tensor(arrays["x"], "a=5 b=3"), 2.0, mode="tanh")["y"]
np.save(sys.argv[1] + "/y.npy", y.numpy("a", "c"))
"""
    run = lambda devices: subprocess.run(
        [sys.executable, "-c", code, tmp_path, devices], capture_output=True, text=True
    )
    done = run("4")
    assert done.returncode == 0, done.stderr
    want = program(layer, x, 2.0, mode="tanh")["y"]
    np.testing.assert_allclose(np.load(tmp_path / "y.npy"), want.numpy(), rtol=1e-6)
    assert 'mesh "x=2 y=2" needs 4 devices, and there are 2' in run("2").stderr


def test_other_kinds_of_arguments_and_results():
    x = real(0, "a=5")
    program = wf.spmd(lambda key, x: wf.random.normal(key, x.dims) + x, "x=2", "a:x")
    key = jax.random.key(3)
    loaded = wf.load(program.export(key, x).to_bytes())
    assert_same(loaded(key, x), program(key, x), rtol=0, atol=0)
    half = wf.tensor(jnp.arange(4, dtype=jnp.bfloat16), "a=4")
    loaded = wf.load(wf.spmd(lambda x: x + half).export(wf.spec("a=4", jnp.bfloat16)).to_bytes())
    assert_same(loaded(half), half.array * 2)


def test_every_op_can_be_exported():
    """JAX rejects custom calls that it does not know, such as an order of an array's dimensions."""

    def examples(operands):
        python = {"callback", "debug"}
        results = {name: info.run_example(operands) for name, info in EVERY_OP.items() if name not in python}
        return {name: jax.tree.leaves(one, is_leaf=wf.is_tensor) for name, one in results.items()}

    wf.load(wf.spmd(examples, "x=2 y=2", "a:x b:y").export(OPERANDS).to_bytes())


def test_a_transform_and_its_gradient():
    program = wf.spmd(wf.grad(lambda x: wf.sum(wf.abs(wf.fft.fft(x, "b")))), "x=2 y=2", "a:x b:y")
    x = real(5, "a=5 b=3")
    assert_same(wf.load(program.export(x).to_bytes())(x), program(x), rtol=0, atol=0)


def test_results_of_optax():
    """They leave the program after the others, whatever their order in the result."""
    tx = wf.optimizer(optax.adam(0.1))
    params = {"w": real(0, "a=5")}

    def step(params, state):
        grads = wf.grad(lambda p: wf.sum(p["w"] * p["w"]))(params)
        updates, state = tx.update(grads, state, params)
        return updates, wf.sum(params["w"]), state

    program, state = wf.spmd(step, "x=2", "a:x"), tx.init(params)
    loaded = wf.load(program.export(params, state).to_bytes())
    got, want = loaded(params, state), program(params, state)
    assert_same(got[0], want[0], rtol=0, atol=0)
    assert_same(got[1], want[1], rtol=0, atol=0)


def test_the_header_is_json(exported):
    contents = exported[1].to_bytes()
    assert contents.startswith(MAGIC)
    end = len(MAGIC) + 8
    header = json.loads(contents[end : end + int.from_bytes(contents[len(MAGIC) : end], "big")])
    assert header["version"] == 1 and header["mesh"] == [["x", 2], ["y", 2]]
    assert header["layout"]["param"] == {"a": ["x"], "b": ["y"]}


MISTAKES = Mistakes()


@functools.cache
def double():
    return wf.spmd(lambda x, *, mode="": x + x, "x=2", "a:x").export(wf.spec("a=4 b=2"), mode="fast")


@functools.cache
def contents():
    return double().to_bytes()


MISTAKES |= {
    "load_of_no_file": lambda: wf.load("nowhere/program.weft"),  # wrong
    "load_of_another_file": lambda: wf.load(b"PK\x03\x04"),  # wrong
    "load_of_half_a_header": lambda: wf.load(contents()[:100]),  # wrong
    "load_of_a_damaged_program": lambda: wf.load(contents()[:-9] + bytes(9)),  # wrong
    "load_of_a_later_version": lambda: wf.load(contents().replace(b'"version": 1', b'"version": 2')),  # wrong
    "exported_with_other_dims": lambda: double()(ones("a=5 b=2"), mode="fast"),  # wrong
    "exported_with_another_dtype": lambda: double()(ones("a=4 b=2", np.int32), mode="fast"),  # wrong
    "exported_with_another_setting": lambda: double()(ones("a=4 b=2"), mode="slow"),  # wrong
    "exported_with_too_few_arguments": lambda: double()(ones("a=4 b=2")),  # wrong
    "exported_with_a_raw_array": lambda: double()(np.ones((4, 2)), mode="fast"),  # wrong
}  # fmt: skip


@MISTAKES.add
def exported_inside_a_program():
    program = wf.spmd(lambda x: double()(x, mode="fast"), "x=2", "a:x")  # wrong
    program(ones("a=4 b=2"))


@MISTAKES.add
def save_of_a_static_object():
    program = wf.spmd(lambda x, dim: wf.sum(x, dim), "x=2", "a:x")
    program.export(ones("a=4 b=2"), wf.Dim("b", 2)).to_bytes()  # wrong


@pytest.mark.parametrize("name", MISTAKES)
def test_message(name, mistake):
    mistake(name, MISTAKES[name], "messages")


@pytest.mark.parametrize("size", [0.5, 0.99])
def test_a_truncated_program(size):
    have = int(len(contents()) * size)
    with pytest.raises(wf.ProgramError, match=f"incomplete: it has {have} of {len(contents())} bytes"):
        wf.load(contents()[:have])


def test_a_program_that_jax_cannot_read(monkeypatch):
    monkeypatch.setattr("zlib.crc32", lambda _: 0)
    broken = double().to_bytes()
    start = broken.index(b"}", broken.rindex(b'"crc32"')) + 1
    with pytest.raises(wf.ProgramError, match="can't read this program"):
        wf.load(broken[:start] + bytes(len(broken) - start))
