"""The facts behind the time to the first step, counted: frames, equations, compilations and imports."""

import resource
import subprocess
import sys

import jax
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

import weft as wf
from benchmarks import handwritten, lm
from weft.core.call_stack import call_with_room

TINY = handwritten.Size(layers=2, d_model=16, d_ff=32, heads=4, d_kv=8, vocab=40, length=6, batch=8)
COMPILATION = "/jax/core/compile/backend_compile_duration"


def frames_between(user, primitive, run):
    """The number of frames between a function and the first call of a JAX function that it leads to."""
    found = []

    def record(frame, event, _):
        if event != "call" or frame.f_code is not primitive.__code__:
            return
        callers = []
        while frame.f_back is not None:
            frame = frame.f_back
            callers.append(frame.f_code)
        if user.__code__ in callers:
            found.append(callers.index(user.__code__))

    run()  # modules are imported when they are first used
    sys.setprofile(record)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found[0]


# The public op, the lowering and `elementwise`; of einsum also `contract`, `_product`, `_einsum` and `_dot`.
@pytest.mark.parametrize(
    "user, primitive, limit",
    [
        (lambda x, w: wf.einsum(x, w, out=["batch", "hidden"]), jax.lax.dot_general, 6),
        (lambda x, w: wf.rsqrt(x), jax.lax.rsqrt, 3),
    ],
    ids=["einsum", "rsqrt"],
)
def test_frames_between_an_op_and_its_primitive(user, primitive, limit):
    x, w = wf.spec("batch=8 io=4"), wf.spec("io=4 hidden=6")
    trace = lambda: wf.spmd(user, "data=4 model=2", "batch:data io:model").jaxpr(x, w)
    assert frames_between(user, primitive, trace) <= limit


def equations(jaxpr):
    inner = [one for eqn in jaxpr.eqns for one in jaxprs_in_params(eqn.params)]
    return len(jaxpr.eqns) + sum(map(equations, inner))


def test_equations_of_a_train_step():
    """JAX's time is proportional to the equations. Of einsum's, the reshapes are worth it (`_product`)."""
    mesh = handwritten.make_mesh()
    arrays = handwritten.init(0, TINY), *handwritten.batch(0, TINY)
    by_hand = handwritten.shard_map_step(mesh).trace(*arrays).jaxpr
    ours = lm.step(TINY).jaxpr(*lm.specs(TINY))
    assert equations(ours.jaxpr) <= 1.1 * equations(by_hand.jaxpr)


def called():
    """A function whose frame is larger than those of `mapped_pages`: at some depth it is the one that doesn't fit."""


called.__code__ = called.__code__.replace(co_stacksize=100)


def mapped_pages(depth=0):
    """The most pages that the system maps for 1,000 calls, at any depth of the stack."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(1000):
        called()
    mapped = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    return mapped if depth == 300 else max(mapped, mapped_pages(depth + 1))


def test_calls_with_room_cross_no_boundary_of_the_stack():
    assert call_with_room(mapped_pages) < 500
    if sys.version_info < (3, 13):  # later versions keep a chunk for the next call
        assert mapped_pages() >= 900


@pytest.fixture
def compilations():
    """The names of the programs that XLA has compiled since the test began."""
    found = []
    listen = lambda event, seconds, **more: found.append(more) if event == COMPILATION else None
    jax.monitoring.register_event_duration_secs_listener(listen)
    yield found
    jax.monitoring.unregister_event_duration_listener(listen)


def test_compilations_before_the_first_step(compilations):
    params, rows = handwritten.init(0, TINY), handwritten.batch(0, TINY)
    mesh = handwritten.make_mesh()
    handwritten.repeat(handwritten.shard_map_step(mesh), *handwritten.place(mesh, params, *rows))()
    by_hand = len(compilations)
    lm.case(lm.step(TINY), TINY, (params, *rows))()
    assert by_hand == 1 and len(compilations) == 2 * by_hand


@pytest.mark.parametrize("dtype", ["float32", "float64", "int64", "bool", "complex64", "bfloat16"])
def test_a_tensor_of_a_numpy_array(dtype, compilations):
    given = np.ones((3, 17), jax.numpy.dtype(dtype))
    made = wf.tensor(given, "a=3 b=17")
    assert not compilations
    expected = jax.numpy.asarray(given)
    assert (made.dtype, made.weak_type) == (expected.dtype, expected.weak_type)
    given[:] = 0  # the tensor has its own memory
    assert made.numpy().all()


def test_modules_of_a_first_program():
    script = """
import sys, jax
before = {*sys.modules}
import weft
weft.spmd, weft.einsum, weft.value_and_grad, weft.cpu_devices
print(*sorted({name.partition(".")[0] for name in {*sys.modules} - before}))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert set(done.stdout.split()) <= {"jax", "weft"} | sys.stdlib_module_names, done.stdout + done.stderr
