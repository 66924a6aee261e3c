"""`weft compile` and `weft plan --compile`: flags, outputs and errors. The compiler is a stand-in."""

import json
from importlib.metadata import PackageNotFoundError

import pytest
from commands import MESH, run

from weft.compilers import compiled, process
from weft.compilers.process import CompilerOutput
from weft.core.errors import CompileError

pytest_plugins = ["command_fixtures"]
FOR = ["--for", "tpu-v5e:2x4"]

# One matmul and one all-reduce over "model", as libtpu prints them.
HLO = """HloModule jit_call, is_scheduled=true, num_partitions=8

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %add = f32[] add(%a, %b)
}

ENTRY %main (x: f32[16,32], w: f32[32,64]) -> f32[16,64] {
  %x = f32[16,32]{1,0:T(8,128)} parameter(0)
  %w = f32[32,64]{1,0:T(8,128)} parameter(1)
  %dot = f32[16,64]{1,0:T(8,128)} dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}, metadata={op_name="jit(step)/shard_map/einsum[batch,d_model \\302\\267 d_model,d_ff \\342\\206\\222 batch,d_ff]/dot_general"}, backend_config={"window_config":{"estimated_cycles":"3000"}}
  ROOT %all-reduce = f32[16,64]{1,0:T(8,128)} all-reduce(%dot), replica_groups={{0,1},{2,3},{4,5},{6,7}}, to_apply=%sum, metadata={op_name="jit(step)/shard_map/einsum[batch,d_model \\302\\267 d_model,d_ff \\342\\206\\222 batch,d_ff]/psum"}
}
"""


@pytest.fixture
def compiler(monkeypatch):
    """A stand-in for the vendor's compiler: returns HLO, and records what it was called with."""
    calls = []

    def run_compiler(program, target, mesh, order, donated, options, **settings):
        calls.append({"target": target.name, "mesh": mesh, "order": order, "options": options, **settings})
        settings["progress"]("compiling", 3.0)
        memory = {"arguments": 1 << 20, "outputs": 1 << 10, "temporaries": 1 << 30, "aliased": 0, "code": 512}
        return CompilerOutput("libtpu 1.2.3", HLO, "TPU v5 lite", 12.5, memory, {})

    monkeypatch.setattr(compiled, "run_compiler", run_compiler)
    return calls


def test_the_report(folder, capsys, compiler):
    code, out, err = run(capsys, "compile", "train.py:example", *MESH, *FOR)
    assert code == 0 and "for tpu-v5e:2x4: compiling, 3 s" in err
    assert "compiled for tpu-v5e:2x4 (TPU v5 lite) by libtpu 1.2.3 in 12.5 s; nothing ran" in out
    assert "1 GiB of 16 GiB, fits" in " ".join(out.split())
    assert "einsum[batch,d_model · d_model,d_ff → batch,d_ff]" in " ".join(out.split())
    (call,) = compiler
    assert call["mesh"] == (("data", 4), ("model", 2)) and sorted(call["order"]) == [*range(8)]


def test_json_is_the_compiled_program(folder, capsys, compiler):
    code, out, _ = run(capsys, "compile", "train.py:example", *MESH, *FOR, "--json")
    data = json.loads(out)
    assert code == 0 and data["target"] == "tpu-v5e:2x4" and data["memory"]["fits"] is True
    assert data["flops"] == 2 * 16 * 64 * 32
    assert data["comm_bytes"] == {"model": 4 * 16 * 64}
    (collective,) = data["collectives"]
    assert collective["kind"] == collective["requested"] == "all-reduce" and not collective["asynchronous"]
    assert data["estimated_seconds"] == 3000 / 1.5e9


def test_further_outputs(folder, capsys, compiler):
    code, _, err = run(
        capsys, "compile", "train.py:example", *MESH, *FOR, "--html", "page.html", "--hlo", "step.hlo"
    )
    assert code == 0 and "wrote page.html" in err and "wrote step.hlo" in err
    assert (folder / "step.hlo").read_text() == HLO
    assert "planned" in (folder / "page.html").read_text()


def test_options_and_the_timeout_reach_the_compiler(folder, capsys, compiler):
    options = ["--options", "xla_tpu_a=true", "xla_tpu_b=false", "xla_tpu_c=3", "--timeout", "60"]
    assert run(capsys, "compile", "train.py:example", *MESH, *FOR, *options)[0] == 0
    assert compiler[0]["options"] == {"xla_tpu_a": True, "xla_tpu_b": False, "xla_tpu_c": "3"}
    assert compiler[0]["timeout"] == 60


def test_planned_next_to_compiled(folder, capsys, compiler):
    code, out, _ = run(capsys, "plan", "train.py:example", *MESH, "--compile", "tpu-v5e:2x4")
    assert code == 0 and "planned   compiled   plan is" in out and "memory at the peak" in out
    assert "bytes over data" in out  # planned, and not in the stand-in's program


MISTAKES = {
    "no target": ([], ["--for is missing", "--for tpu-v5e:4x4"]),
    "an unknown target": (["--for", "tpu-v5:2x4"], ["unknown target 'tpu-v5:2x4' (did you mean tpu-v5"]),
    "a target without a shape": (["--for", "tpu-v5e"], ["tpu-v5e:2x2"]),
    "a mesh that does not fill it": (["--for", "tpu-v5e:4x4"], ["has 8 devices, and tpu-v5e:4x4 has 16"]),
    "an option without a value": ([*FOR, "--options", "xla_tpu_a"], ["is not NAME=VALUE", "hint:"]),
    "an option of another kind": ([*FOR, "--options", "a=b"], ["has the name of one of XLA's flags"]),
    "no time": ([*FOR, "--timeout", "0"], ["--timeout 0", "at least 1"]),
    "no folder for the page": ([*FOR, "--html", "no/page.html"], ["no folder no"]),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_reported_and_exits_with_2(name, folder, capsys, compiler):
    flags, parts = MISTAKES[name]
    code, out, err = run(capsys, "compile", "train.py:example", *MESH, *flags)
    assert (code, out) == (2, "") and not compiler
    for part in parts:
        assert part in err


def test_without_the_compiler(folder, capsys, monkeypatch):
    def missing(package):
        raise PackageNotFoundError(package)

    monkeypatch.setattr(process, "version", missing)
    code, _, err = run(capsys, "compile", "train.py:example", *MESH, *FOR)
    assert code == 2 and "MissingExtraError" in err and 'pip install "weft[tpu-compiler]"' in err
    code, _, err = run(capsys, "compile", "train.py:example", *MESH, "--for", "h100:1x8")
    assert code == 2 and 'pip install "weft[gpu-compiler]"' in err


def test_a_program_that_the_compiler_rejects_exits_with_1(folder, capsys, monkeypatch):
    def rejects(*_, **__):
        raise CompileError("libtpu 1.2.3 can't compile step", "RESOURCE_EXHAUSTED", hint="it does not fit")

    monkeypatch.setattr(compiled, "run_compiler", rejects)
    code, out, err = run(capsys, "compile", "train.py:example", *MESH, *FOR)
    assert (code, out) == (1, "") and "CompileError: libtpu 1.2.3 can't compile" in err
