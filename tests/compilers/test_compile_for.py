"""`program.compile_for`: mistakes, and what reaches the compiler."""

from importlib.metadata import PackageNotFoundError

import pytest

import weft as wf
from weft.compilers import compiled, process
from weft.compilers.process import CompilerOutput
from weft.core.errors import (
    HardwareError,
    MeshError,
    MissingExtraError,
    ProgramError,
    TensorTypeError,
)

X = wf.spec("batch=8 d=6")


def program(**options):
    return wf.spmd(lambda x: wf.sum(x, "d"), "data=4 model=2", "batch:data d:model", **options)


def never(x):
    raise AssertionError("the program must not be traced")


MISTAKES = {
    "unknown target": (HardwareError, "did you mean tpu-v5e", lambda: program().compile_for("v5e:2x4", X)),
    "no target": (HardwareError, "unknown target f32", lambda: program().compile_for(X)),
    "nothing at all": (TensorTypeError, "needs target", lambda: program().compile_for()),
    "too many chips": (MeshError, "tpu-v5e:4x4 has 16", lambda: program().compile_for("tpu-v5e:4x4", X)),
    "a target of a plan": (TensorTypeError, "is not a plan", lambda: program().plan(X).diff("tpu-v5e:2x4")),
    "options as text": (ProgramError, "compiler_options= is 'a'", lambda: program(compiler_options="a")),
    "an option that the CPU does not have": (
        ProgramError,
        "does not take all of compiler_options",
        lambda: wf.spmd(lambda x: x + 1, compiler_options={"xla_tpu_unknown": 1})(wf.ones("a=2")),
    ),
    "a slice of another size": (
        MeshError,
        "tpu-v5e:4x4 has 16",
        lambda: program().plan(X).time("tpu-v5e:4x4"),
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(name):
    kind, part, call = MISTAKES[name]
    with pytest.raises(kind) as caught:
        call()
    error = caught.value
    assert part in str(error) and error.rule and error.hint
    assert error.call and error.where.startswith("tests/compilers/test_compile_for.py:")


def test_the_target_is_checked_before_the_program_is_traced():
    with pytest.raises(HardwareError):
        wf.spmd(never).compile_for("tpu-v5e", X)


def test_without_the_extra(monkeypatch):
    def missing(package):
        raise PackageNotFoundError(package)

    monkeypatch.setattr(process, "version", missing)
    with pytest.raises(MissingExtraError, match="weft\\[tpu-compiler\\]") as caught:
        program().compile_for("tpu-v5e:2x4", X)
    assert caught.value.call == "Program.compile_for"


def test_what_reaches_the_compiler(monkeypatch):
    calls = []

    def run_compiler(exported, target, mesh, order, donated, options, **settings):
        calls.append((target.name, dict(mesh), sorted(order), tuple(donated), options, settings))
        memory = dict.fromkeys(("arguments", "outputs", "temporaries", "aliased", "code"), 0)
        hlo = "HloModule step\n\nENTRY %main () -> f32[] {\n  ROOT %c = f32[] constant(0)\n}\n"
        return CompilerOutput("libtpu 1.2.3", hlo, "TPU v5 lite", 1.0, memory, {})

    monkeypatch.setattr(compiled, "run_compiler", run_compiler)
    options = {"xla_tpu_a": True}
    step = wf.spmd(lambda w, x: w + x, "data=8", "batch:data", donate=(0,), compiler_options=options)
    found = step.trace(X, X).compile_for("tpu-v5e:2x4", options={"xla_tpu_b": 3}, timeout=7)
    ((target, mesh, order, donated, given, settings),) = calls
    assert (target, mesh, order, donated) == ("tpu-v5e:2x4", {"data": 8}, [*range(8)], (0,))
    assert given == {"xla_tpu_a": True, "xla_tpu_b": 3} and settings["timeout"] == 7
    assert found.memory.fits and found.compiler == "libtpu 1.2.3" and "nothing ran" in found.explain()


def test_compiler_options_of_a_program_that_runs():
    """They are those of `jax.jit`."""
    step = wf.spmd(lambda x: x + 1, compiler_options={"xla_embed_ir_in_executable": False})
    assert step(wf.ones("a=2")).numpy().tolist() == [2, 2]
