"""The call path is direct: how many files one op passes through, counted with Python's own profiler."""

import itertools
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import weft as wf
from weft.core.context import Context
from weft.core.layout import Placement

PACKAGE = Path(wf.__file__).parent
# The vocabulary and the state that every file uses.
VOCABULARY = {f"core/{name}.py" for name in ("dims", "mesh", "layout", "tensor", "context")}
PLACEMENT = "data=4 model=2", "batch:data io:model"
batch, io, hidden = wf.Dim("batch", 8), wf.Dim("io", 4), wf.Dim("hidden", 6)


def layer(x, w):
    return wf.relu(wf.einsum(x, w, out=[batch, hidden]))


def calls(fn):
    """The (file, function) of every call into the package, in order; `lax.psum` is listed too."""
    found = []

    def record(frame, event, _):
        code = frame.f_code
        if event != "call":
            return
        if code is jax.lax.psum.__code__:
            found.append(("psum", "psum"))
        elif code.co_filename.startswith(f"{PACKAGE}/"):
            found.append((str(Path(code.co_filename).relative_to(PACKAGE)), code.co_name))

    sys.setprofile(record)
    try:
        fn()
    finally:
        sys.setprofile(None)
    return found


@pytest.fixture
def staged():
    """The calls of one staged trace. The function is first traced for another mesh: modules are imported, and labels
    built, when they are first used."""
    x, w = wf.spec([batch, io]), wf.spec([io, hidden])
    wf.spmd(layer, "x=2", "io:x").jaxpr(x, w)
    program = wf.spmd(layer, *PLACEMENT)
    return calls(lambda: program.jaxpr(x, w))


def test_files_from_einsum_to_psum(staged):
    first = next(n for n, (file, _) in enumerate(staged) if file == "core/op.py")
    last = staged.index(("psum", "psum"))
    assert first < last
    files = {file for file, _ in staged[first:last]} - VOCABULARY
    assert len(files) <= 6, sorted(files)


def test_file_switches_of_a_staged_call(staged):
    files = [file for file, _ in staged if file != "psum"]
    switches = sum(a != b for a, b in itertools.pairwise(files))
    assert switches <= 160, switches


def test_files_of_the_second_eager_call():
    x, w = (wf.place(wf.ones(dims), *PLACEMENT) for dims in ([batch, io], [io, hidden]))
    product = lambda: wf.einsum(x, w, out=[batch, hidden])
    product()
    files = {file for file, _ in calls(product)}
    assert files and len(files) <= 6, sorted(files)


def test_a_context_has_few_fields():
    fields = vars(Context(Placement(wf.Mesh(), wf.Layout())))
    assert len(fields) <= 10, sorted(fields)


def test_placements_are_interned():
    one, other = (Placement(wf.Mesh("x=2"), wf.Layout("a:x")) for _ in range(2))
    assert one is other and Placement.of("x=2", "a:x") is one
    assert one is not Placement.of("x=2", "b:x")


def test_traced_programs_know_their_inputs_and_outputs():
    def step(params, x):
        return {"loss": wf.sum(wf.einsum(x, params["w"], reduce="io"))}

    program = wf.spmd(step, *PLACEMENT, donate=("params",))
    traced = program.trace({"w": wf.spec([io, hidden])}, wf.spec([batch, io]))
    assert [name for name, _ in traced.inputs] == ["params.w", "x"]
    assert [(out.name, out.dims, out.dtype) for out in traced.outputs] == [("result.loss", (), jnp.float32)]
    assert traced.donated == (0,) and traced.name == "step"
    assert str(traced.jaxpr) == str(program.jaxpr({"w": wf.spec([io, hidden])}, wf.spec([batch, io])))
    assert [c.kind for c in traced.collectives()] == [c.kind for c in traced.plan().collectives]
    assert "module" in traced.lower().as_text()
    assert repr(traced) == f"<traced step on {program.placement}>"
    assert traced.program is program and not traced.kwargs


def test_a_traced_program_replaces_the_function_and_its_arguments():
    program = wf.spmd(lambda x, n: wf.sum(x * n, "io"), *PLACEMENT, static=("n",))
    traced = program.trace(wf.spec([batch, io]), 2)
    assert wf.search(traced, devices=2, hardware="h100").best.mesh.size == 2
    x = wf.ones([batch, io])
    summed = wf.spmd(lambda x: wf.sum(x, "io"), *PLACEMENT)
    for args in ((), [], (x,)):
        assert all(one.agrees for one in wf.verify(summed.trace(x), args, *PLACEMENT))
    with pytest.raises(wf.WeftError, match="keyword arguments: x"):
        wf.search(summed.trace(x=x), devices=2, hardware="h100")
