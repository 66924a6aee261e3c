"""Every family of programs compiles for TPUs, a part of them for GPUs, and the compiled program is the planned one.

Needs the vendors' compilers, but no TPU or GPU, and nothing runs. `make test-compilers` compiles all programs in an
environment of its own, and `make test-compilers-quick` a part of them for TPUs.
"""

import json
import math
import time
from importlib.util import find_spec

import jax
import pytest
from compiled_families import CASES, OPS, PYTHON, ops
from every_op import EVERY_OP

import weft as wf
from weft.core.errors import CompileError, ProgramError

# The package of each compiler, and its module.
COMPILERS = {"tpu": ("libtpu", "libtpu"), "gpu": ("jax-cuda12-plugin", "jax_cuda12_plugin")}
MISSING = {kind: package for kind, (package, module) in COMPILERS.items() if find_spec(module) is None}
if len(MISSING) == len(COMPILERS):
    reason = f"{' and '.join(MISSING.values())} are not installed: make test-compilers"
    pytest.skip(reason, allow_module_level=True)

needs = {
    kind: pytest.mark.skipif(kind in MISSING, reason=f"{package} is not installed: make test-compilers")
    for kind, (package, _) in COMPILERS.items()
}
TARGETS = {
    ("tpu", 8): "tpu-v5e:2x4",
    ("tpu", 1): "tpu-v5e:1x1",
    ("gpu", 8): "h100:1x8",
    ("gpu", 1): "h100:1x1",
}
GENERATIONS = {
    "tpu": ("tpu-v2:2x2", "tpu-v3:2x2", "tpu-v4:2x2x2", "tpu-v5p:2x2x2", "tpu-v6e:2x4"),
    "gpu": ("a100:1x8", "h100:2x4", "h200:1x8", "b200:1x8"),
}
GPU_QUICK = ("ops: reductions", "train: tiny-lm", "two layers: layout E")

# Where a compiled program differs from its plan: the FLOPs of matmuls and convolutions, the bytes over an axis of the
# mesh, as multiples of the planned ones, or between two of them; and the loops with an unknown number of iterations.
NARROW = (
    "the TPU compiler sends operands of float32 matmuls and convolutions in bfloat16, as the units take them"
)
SMALL = "small products are computed as elementwise products and sums"
MERGED = "a sum of sums over the same axis is one collective"
EQUAL = "equal collectives of several ops are one"
BOOLEANS = "TPUs send booleans as 32-bit integers, in tiles of 512 bytes"
CONDITION = "the collectives in the condition of a loop are not in the report"
EXPANDED = "factorizations and Fourier transforms, which have FLOPs of their own kind in a plan, become matmuls in loops"
EDGES = "a plan counts the products with the padding of an unsplit dim"
FOLDED = "the TPU compiler moves parts of a spatial dim to the batch, with the halos between them"
WIDENED = "TPUs sum float16 in float32"
OPTAX = "optax's norm of the gradients is summed after the program, which a plan does not cover"
TWICE = "the plan counts zeros in the gradient of a dilated convolution's kernel"

TPU = {
    "ops: elementwise": ({"flops": 0.0}, SMALL),
    "ops: reductions": ({"x": 10.77, "x+y": 4.0}, BOOLEANS, EQUAL),
    "ops: shapes": ({"x": 0.964, "y": 0.5}, EQUAL),
    "ops: transformations": ({"flops": 0.0}, SMALL),
    "ops: factorizations": ({"flops": math.inf, "loops": 3}, EXPANDED),
    "ops: Fourier transforms": ({"flops": math.inf}, EXPANDED),
    "ops: Fourier transforms to real numbers": ({"flops": math.inf}, EXPANDED),
    "gradients of ops: elementwise": ({"flops": 0.0}, SMALL),
    "gradients of ops: reductions": ({"x": 5.016}, BOOLEANS, EQUAL),
    "gradients of ops: shapes": ({"x": 0.974, "y": 0.5}, EQUAL),
    "gradients of ops: convolution and pooling": ({"x": 0.955}, NARROW),
    "gradients of ops: transformations": ({"flops": 0.0}, SMALL),
    "gradients of ops: factorizations": ({"flops": 3.414, "y": 0.827, "loops": 3}, EXPANDED, NARROW),
    "gradients of ops: Fourier transforms to real numbers": ({"flops": math.inf}, EXPANDED),
    "train: tiny-tr": ({"model": 0.960}, MERGED),
    "train: tiny-moe, experts on data": ({"flops": 0.998, "data": 0.810}, SMALL, NARROW),
    "train: tiny-moe, experts on data, bfloat16": ({"flops": 0.998}, SMALL),
    "train: tiny-moe, experts on their own axis": ({"flops": 0.998}, SMALL),
    "train: tiny-moe, batch on both axes": ({"flops": 0.999, "expert": 0.75}, SMALL, NARROW),
    "train: tiny-moe, batch on both axes, bfloat16": ({"flops": 0.999}, SMALL),
    "train: optax's clip and lion": ({"model": 1.00005}, OPTAX),
    "train: ZeRO-3": ({"data": 0.808}, NARROW),
    "train: ZeRO-3 and model": ({"data": 0.815}, NARROW),
    "train: sequence": ({"seq": 0.765}, NARROW),
    "train: float16": ({"model": 1.811}, WIDENED),
    "train: LSH attention": ({"flops": 0.998}, SMALL),
    "train: relative positions, tied": ({"data": 0.900}, MERGED),
    "pipeline: gpipe, ZeRO-3": ({"data": 0.815}, NARROW),
    "pipeline: gpipe, experts": ({"flops": 0.999, "data": 0.813}, SMALL, NARROW),
    "pipeline: gpipe, translation": ({"pipe": 0.950, "model": 0.971}, NARROW, MERGED),
    "pipeline: 1f1b, ZeRO-3": ({"data": 0.815}, NARROW),
    "pipeline: 1f1b, experts": ({"flops": 0.999, "data": 0.795}, SMALL, NARROW),
    "pipeline: 1f1b, translation": ({"pipe": 0.923, "model": 0.976}, NARROW, MERGED),
    "generation: decode, tiny-lm": ({"flops": 0.941, "model": 1.607, "data": (3.2, 4.0)}, SMALL, BOOLEANS, CONDITION),
    "generation: decode, tiny-tr": ({"flops": 0.923, "model": 1.465, "data": (3.2, 4.0)}, SMALL, BOOLEANS, CONDITION),
    "generation: decode, tiny-llama": ({"model": 1.607, "data": (3.2, 4.0)}, BOOLEANS, CONDITION),
    "generation: decode, split cache": ({"flops": 0.970, "model": 1.313, "data": (3.2, 4.0)}, SMALL, BOOLEANS, CONDITION),
    "generation: decode, two models": ({"flops": 0.941, "model": 1.344, "data": (3.2, 4.0)}, SMALL, BOOLEANS, CONDITION),
    "generation: decode, reversible": ({"flops": 0.941, "model": 1.607, "data": (3.2, 4.0)}, SMALL, BOOLEANS, CONDITION),
    "generation: decode some rows, tiny-lm": ({"flops": 0.846, "model": 1.394}, SMALL, BOOLEANS),
    "generation: beam search, tiny-lm": ({"data": (0.0, 4.0)}, BOOLEANS, CONDITION),
    "generation: beam search, tiny-tr": ({"data": (0.0, 4.0)}, BOOLEANS, CONDITION),
    "generation: beam search, tiny-llama": ({"data": (0.0, 4.0)}, BOOLEANS, CONDITION),
    "convolutions: height split": ({"flops": 0.979, "x": 0.772}, EDGES, NARROW),
    "convolutions: batch and height split": ({"flops": 1.166, "x": 0.708}, EDGES, FOLDED, NARROW),
    "convolutions: 3-D U-Net": ({"flops": (1.09, 1.17), "deep": 0.745, "high": 0.746}, EDGES, FOLDED, TWICE, NARROW),
}  # fmt: skip
GPU = {
    "ops: elementwise": ({"flops": 0.0}, SMALL),
    "ops: reductions": ({"x": 0.962}, EQUAL),
    "ops: shapes": ({"x": 0.964}, EQUAL),
    "ops: transformations": ({"flops": 0.0}, SMALL),
    "gradients of ops: elementwise": ({"flops": 0.0}, SMALL),
    "gradients of ops: reductions": ({"x": 0.968}, EQUAL),
    "gradients of ops: shapes": ({"x": 0.974}, EQUAL),
    "gradients of ops: transformations": ({"flops": 0.0}, SMALL),
    "train: tiny-tr": ({"model": 0.960}, MERGED),
    "train: tiny-moe, experts on data": ({"flops": 0.998}, SMALL),
    "train: tiny-moe, batch on both axes": ({"flops": 0.999}, SMALL),
    "train: optax's clip and lion": ({"model": 1.00005}, OPTAX),
    "train: LSH attention": ({"flops": 0.998}, SMALL),
    "generation: decode, tiny-tr": ({"flops": 0.923, "data": (0.8, 1.0)}, SMALL, CONDITION),
    "generation: beam search, tiny-tr": ({"data": (0.0, 1.0)}, CONDITION),
    "convolutions: height split": ({"flops": 0.982}, EDGES),
    # cuDNN's convolutions have no dilation, so its zeros are written out, and multiplied.
    "convolutions: 3-D U-Net": ({"flops": (1.00, 1.08)}, EDGES, TWICE),
}
DIFFERS = {"tpu": TPU, "gpu": GPU}


def cases():
    for kind in COMPILERS:
        for case in CASES.values():
            if kind == "tpu" or case.gpu:
                quick = case.quick if kind == "tpu" else case.name in GPU_QUICK
                marks = [needs[kind], *([] if quick else [pytest.mark.slow])]
                yield pytest.param(case.name, kind, id=f"{kind}: {case.name}", marks=marks)


def compiled(program, args, target):
    """The plan, and the compiled program."""
    traced = program.trace(*args)
    return traced.plan(), traced.compile_for(target)


def facts(plan):
    """The FLOPs of matmuls and convolutions, the unknown loops, and the bytes over each axis."""
    flops = sum(w.flops * w.count for w in plan.work if w.kind in ("matmul", "conv"))
    return {"flops": flops, "loops": len(plan.loops), **plan.comm_bytes}


def check_facts(plan, found, differs):
    """The compiled program has the facts of the plan, or of a row of the table."""
    planned = facts(plan)
    measured = {"flops": found.flops, "loops": len(found.loops), **found.comm_bytes}
    wrong = [f"{name} of the table is not a fact" for name in differs.keys() - {*planned, *measured}]
    for name in sorted(planned.keys() | measured.keys()):
        before, after = planned.get(name, 0), measured.get(name, 0)
        if name == "loops":
            expected, fits = differs.get(name, before), after == differs.get(name, before)
        else:
            ratio = after / before if before else math.inf if after else 1.0
            expected = differs.get(name, 1.0)
            low, high = expected if isinstance(expected, tuple) else (expected, expected)
            # Without a row the two are equal. A ratio in the table has three digits.
            fits = low * 0.999 <= ratio <= high * 1.001 if name in differs else after == before
            # A row that says that they differ is removed once they don't.
            fits = fits and not (name in differs and after == before and not low <= 1.0 <= high)
        if not fits:
            wrong.append(f"{name}: planned {before}, compiled {after}, expected {expected}")
    assert not wrong, "\n".join([*wrong, plan.diff(found)])


def check_report(found, program, target):
    """The report names the target, and every collective runs over axes of the mesh."""
    text = found.explain()
    assert f"compiled for {target}" in text and found.compiler in text and "nothing ran" in text
    assert found.target.name == target and found.memory.fits
    assert bool(found.loops) == ("the number of iterations of" in text)
    for one in found.collectives:
        assert one.axes and set(one.axes) <= set(program.mesh.names), one
        assert one.bytes > 0 and one.count > 0, one
    data = json.loads(found.to_json())
    assert data["flops"] == found.flops and data["comm_bytes"] == found.comm_bytes
    # The names of ops survive: each matmul has one.
    assert all(w.op.name for w in found.work if w.flops)


@pytest.mark.parametrize("name, kind", list(cases()))
def test_family(name, kind):
    program, args = CASES[name].make()
    target = TARGETS[kind, program.mesh.size]
    plan, found = compiled(program, args, target)
    check_facts(plan, found, DIFFERS[kind].get(name, ({},))[0])
    check_report(found, program, target)
    if program.donate:
        # All results that replace donated arguments reuse their memory. The others are scalars.
        scalars = sum(s.kind == "output" and s.role == "value" and not s.dims for s in plan.stored)
        small = 4096 * (scalars + 1)
        assert found.memory.aliased > 0 and found.memory.outputs - found.memory.aliased <= small


@pytest.mark.slow
@pytest.mark.parametrize(
    "target",
    [
        pytest.param(target, marks=needs[kind], id=f"{kind}: {target}")
        for kind, targets in GENERATIONS.items()
        for target in targets
    ],
)
def test_every_generation(target):
    program, args = CASES["train: tiny-lm"].make()
    plan, found = compiled(program, args, target)
    check_facts(plan, found, {})
    check_report(found, program, target)


def test_the_tables_name_cases():
    for kind, table in DIFFERS.items():
        assert table.keys() <= {n for n, c in CASES.items() if kind == "tpu" or c.gpu}


def test_every_op_is_compiled():
    names = {name for names in OPS.values() for name in names.split()}
    missing = [n for n, info in EVERY_OP.items() if not names & {n, info.family} and n not in PYTHON]
    assert not missing


def test_the_pieces_of_a_program_that_call_python():
    """They can't be exported; JAX's message would be about the mesh."""

    def row(total, x):
        return total + x, wf.debug(total)

    x = wf.spec("a=8 b=4")
    functions = {
        "callback": lambda x: wf.callback(lambda array: array * 2, x, out=wf.spec(x.dims)),
        "debug": lambda x: wf.debug(x) * 2,
        "debug[b]": lambda x: wf.scan(row, wf.zeros("b=4"), x, "a"),
        "local": lambda x: wf.local(
            lambda a: (jax.debug.print("{}", a.sum()), a)[1], x, out=x.dims, splittable=x.dims
        ),
    }
    for name, fn in functions.items():
        with pytest.raises(ProgramError, match="the program calls Python") as caught:
            wf.spmd(fn, "x=4 y=2", "a:x b:y").trace(x).compile_for("tpu-v5e:2x4")
        error = caught.value
        assert (
            error.fact.startswith(f"the program calls Python: {name}") and "test_families.py:" in error.fact
        )
        assert error.rule and "wf.debug" in error.hint and "test_families.py:" in error.where
    both = wf.spmd(lambda x: (wf.debug(x), wf.debug(wf.sum(x, "a"))), "x=4 y=2", "a:x b:y")
    with pytest.raises(ProgramError, match=r"debug\[a,b\] at .*, debug\[b\] at "):
        both.trace(x).compile_for("tpu-v5e:2x4")


# -- what reaches the compiler ---------------------------------------------------------------------

ASYNCHRONOUS = "xla_tpu_enable_async_collective_fusion"


def sharded_step(**options):
    """A train step whose gathers the TPU compiler overlaps with matmuls."""
    program, args = CASES["train: ZeRO-3 and model, bfloat16"].make()
    return wf.spmd(program.fn, program.mesh, program.layout, donate=program.donate, **options), args


@needs["tpu"]
def test_compiler_options():
    program, args = sharded_step()
    assert any(c.asynchronous for c in program.compile_for("tpu-v5e:2x4", *args).collectives)
    program, args = sharded_step(compiler_options={ASYNCHRONOUS: False})
    traced = program.trace(*args)
    assert not any(c.asynchronous for c in traced.compile_for("tpu-v5e:2x4").collectives)
    # Those of the call have priority.
    found = traced.compile_for("tpu-v5e:2x4", options={ASYNCHRONOUS: True})
    assert any(c.asynchronous for c in found.collectives)


@needs["tpu"]
def test_an_unknown_compiler_option():
    program, args = sharded_step(compiler_options={"xla_tpu_unknown": True})
    with pytest.raises(CompileError, match="xla_tpu_unknown") as caught:
        program.compile_for("tpu-v5e:2x4", *args)
    assert "compiler_options= takes the options of the target's compiler" in caught.value.hint


@needs["tpu"]
def test_results_are_cached():
    found = []
    # In a loop, because the key of a result contains the lines of the calls.
    for _ in range(2):
        program, args = sharded_step()
        traced, steps, started = program.trace(*args), [], time.monotonic()
        one = traced.compile_for("tpu-v5e:2x4", progress=lambda step, _: steps.append(step))
        found.append(one)
    assert time.monotonic() - started < 0.9 and not steps
    first, again = found
    assert again.hlo == first.hlo and again.seconds == first.seconds and again.memory == first.memory
    # Options are a part of the key.
    assert traced.compile_for("tpu-v5e:2x4", options={ASYNCHRONOUS: False}).hlo != first.hlo


@needs["tpu"]
@pytest.mark.slow
def test_ops_of_one_device():
    """Without a mesh there is nothing to send."""
    program, args = ops(OPS["reductions"])
    plan, found = compiled(wf.spmd(program.fn), args, "tpu-v5e:1x1")
    assert not plan.collectives and not found.collectives and "no collectives" in found.explain()
