"""The process that runs a vendor's compiler: its result, its cache, its failures.

A script stands in for the compiler.
"""

import json
import os
import signal
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from textwrap import dedent

import pytest

from weft.compilers import process
from weft.compilers.process import run_compiler
from weft.compilers.target import Target
from weft.core.errors import CompileError, MissingExtraError

pytestmark = pytest.mark.nodevice

START = """
import json, os, signal, subprocess, sys, time
from pathlib import Path

folder = Path(sys.argv[1])
request = json.loads((folder / "request.json").read_text())
program = (folder / "program").read_bytes()


def finish(hlo, **facts):
    (folder / "compiled.hlo").write_text(hlo)
    result = {"device_kind": "TPU v5 lite", "seconds": 1.5, "memory": {"code": 8}, "costs": {"a2a": 2.5}}
    (folder / "compiled.json").write_text(json.dumps(result | facts))


"""
ECHO = 'print("compiling", flush=True)\nfinish(json.dumps([request, program.decode()]))'


class Compiler:
    """The compiler under test, with a script in place of libtpu."""

    def __init__(self, tmp_path, monkeypatch):
        self.folder, self.monkeypatch = tmp_path, monkeypatch
        self.runs = tmp_path / "runs"
        self.cache = tmp_path / "cache" / "weft" / "compiled"
        self.script(ECHO)

    def script(self, text):
        path = self.folder / "stand_in.py"
        counting = f"notes = Path({str(self.folder)!r})\n"
        counting += "with (notes / 'runs').open('a') as runs:\n    runs.write(f'{os.getpid()}\\n')\n"
        path.write_text(START + counting + dedent(text))
        self.monkeypatch.setattr(process, "WORKER", path)

    def run(self, program=b"a program", target="tpu-v5e:2x2", **changes):
        given = {
            "mesh": [("data", 4)],
            "order": [0, 1, 3, 2],
            "donated": [1],
            "options": {"xla_fast": True},
        } | changes
        settings = {"timeout": 30.0, "name": "step"} | {
            key: given.pop(key) for key in ("timeout", "progress", "name") if key in given
        }
        return run_compiler(program, Target.of(target), *given.values(), **settings)

    @property
    def count(self):
        """How often the script ran."""
        return len(self.pids)

    @property
    def pids(self):
        return [int(line) for line in self.runs.read_text().splitlines()] if self.runs.exists() else []

    def entries(self):
        return sorted(path for path in self.cache.iterdir() if path.is_dir())


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(process, "POLL", 0.005)
    monkeypatch.setattr(process, "compiler_name", lambda target: "libtpu 1.2.3")
    return Compiler(tmp_path, monkeypatch)


def is_running(pid):
    try:
        # A killed process is a zombie until its parent waits for it.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(condition, seconds=10.0):
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.005)
    assert condition()


# -- Results


def test_the_result_of_the_compiler(compiler):
    output = compiler.run()
    assert (output.compiler, output.device_kind, output.seconds) == ("libtpu 1.2.3", "TPU v5 lite", 1.5)
    assert (output.memory, output.costs) == ({"code": 8}, {"a2a": 2.5})
    request, program = json.loads(output.hlo)
    assert program == "a program"
    assert request == {
        "topology": {"topology_name": "v5e:2x2", "platform": "tpu"},
        "mesh": [["data", 4]],
        "order": [0, 1, 3, 2],
        "donated": [1],
        "options": {"xla_fast": True},
    }


def test_the_options_of_the_user_are_over_those_of_the_target(compiler, monkeypatch):
    monkeypatch.setitem(process.PACKAGES, "cuda", ("jax-cuda12-plugin", "jaxlib"))
    output = compiler.run(target="h100:4", options={"xla_gpu_enable_triton_gemm": True, "xla_other": 2})
    request, _ = json.loads(output.hlo)
    assert request["options"] == {
        "xla_gpu_enable_triton_gemm": True,
        "xla_gpu_collect_cost_model_stats": True,
        "xla_other": 2,
    }
    assert request["topology"]["topology"] == "1x1x4"


def test_settings_for_other_backends_are_dropped(compiler, monkeypatch):
    for name in (
        "XLA_FLAGS",
        "LIBTPU_INIT_ARGS",
        "JAX_ENABLE_X64",
        "JAX_PLATFORMS",
        "JAX_COMPILATION_CACHE_DIR",
    ):
        monkeypatch.setenv(name, "mine")
    monkeypatch.setenv("UNRELATED", "kept")
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "0")
    compiler.script("finish(json.dumps(dict(os.environ)))")
    environment = json.loads(compiler.run().hlo)
    assert environment["UNRELATED"] == "kept"
    assert environment["JAX_PLATFORMS"] == "cpu" and environment["TPU_SKIP_MDS_QUERY"] == "1"
    dropped = [name for name in environment if name.startswith(("XLA_FLAGS", "LIBTPU", "JAX_"))]
    assert dropped == ["JAX_PLATFORMS"]
    assert environment.get("PATH") == os.environ.get("PATH")


def test_modules_beside_the_worker_are_not_imported(compiler):
    (compiler.folder / "costs.py").write_text("raise RuntimeError('wrong')")
    compiler.script("import importlib.util\nfinish(str(importlib.util.find_spec('costs')))")
    assert compiler.run().hlo == "None"


def test_progress_is_reported(compiler):
    compiler.script("""
        for step in ("starting", "lowering", "compiling"):
            if step != "starting":
                print(step, flush=True)
            while not (notes / f"saw {step}").exists():
                time.sleep(0.001)
        finish("hlo")
    """)
    reports = []

    def progress(step, seconds):
        reports.append((step, seconds))
        (compiler.folder / f"saw {step}").touch()

    compiler.run(progress=progress)
    assert [*dict.fromkeys(step for step, _ in reports)] == ["starting", "lowering", "compiling"]
    seconds = [one for _, one in reports]
    assert seconds == sorted(seconds) and 0 <= seconds[0] < seconds[-1]


def test_an_exception_in_progress_stops_the_compiler(compiler):
    compiler.script("time.sleep(60)")

    def progress(step, seconds):
        if compiler.count:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compiler.run(progress=progress)
    assert not is_running(compiler.pids[0])
    assert compiler.entries() == []
    # The lock is free again.
    compiler.script(ECHO)
    assert compiler.run(timeout=5.0).device_kind == "TPU v5 lite"


# -- The cache


def test_an_equal_call_is_answered_from_the_cache(compiler):
    first = compiler.run()
    reports = []
    second = compiler.run(progress=lambda *report: reports.append(report), timeout=0.0, name="another name")
    assert first == second and compiler.count == 1 and reports == []


@pytest.mark.parametrize(
    "changes",
    [
        {"program": b"another program"},
        {"target": "tpu-v6e:2x2"},
        {"mesh": [("data", 2), ("model", 2)]},
        {"mesh": [("model", 4)]},
        {"order": [0, 1, 2, 3]},
        {"donated": []},
        {"options": {}},
        {"options": {"xla_fast": False}},
    ],
    ids=str,
)
def test_another_call_is_not_answered_from_the_cache(compiler, changes):
    compiler.run()
    compiler.run(**changes)
    assert compiler.count == 2 and len(compiler.entries()) == 2


def test_another_version_is_not_answered_from_the_cache(compiler, monkeypatch):
    compiler.run()
    monkeypatch.setattr(process, "compiler_name", lambda target: "libtpu 1.2.4")
    assert compiler.run().compiler == "libtpu 1.2.4"
    monkeypatch.setattr(process, "version", lambda package: f"another {package}")
    compiler.run()
    compiler.script("finish('of another worker')")
    assert compiler.run().hlo == "of another worker"
    assert compiler.count == 4


DAMAGE = {
    "no text": lambda entry: (entry / "compiled.hlo.z").unlink(),
    "no facts": lambda entry: (entry / "compiled.json").unlink(),
    "half a text": lambda entry: (entry / "compiled.hlo.z").write_bytes(
        (entry / "compiled.hlo.z").read_bytes()[:20]
    ),
    "another text": lambda entry: (entry / "compiled.hlo.z").write_bytes(b"not compressed"),
    "empty facts": lambda entry: (entry / "compiled.json").write_text(""),
    "half the facts": lambda entry: (entry / "compiled.json").write_text('{"seconds": 1.5}'),
    "other facts": lambda entry: (entry / "compiled.json").write_text('{"later": 1, "version": 2}'),
    "a list": lambda entry: (entry / "compiled.json").write_text("[]"),
    "binary": lambda entry: (entry / "compiled.json").write_bytes(b"\xff\xfe\x00"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_result_is_compiled_again(compiler, name):
    first = compiler.run()
    (entry,) = compiler.entries()
    DAMAGE[name](entry)
    assert compiler.run() == first and compiler.count == 2
    assert compiler.run() == first and compiler.count == 2
    assert compiler.entries() == [entry]


def test_an_unfinished_result_of_a_process_that_died_is_replaced(compiler):
    first = compiler.run()
    (entry,) = compiler.entries()
    entry.rename(entry.with_name(f".{entry.name}.part"))
    assert compiler.run() == first and compiler.count == 2
    assert compiler.entries() == [entry]


def test_the_oldest_results_are_removed(compiler, monkeypatch):
    monkeypatch.setattr(process, "MOST_CACHED", 3)
    made = {}
    for n in range(3):
        compiler.run(program=str(n).encode())
        (made[n],) = set(compiler.entries()) - set(made.values())
        os.utime(made[n], (n, n))  # the seconds of a clock would be equal
    compiler.run(program=b"0")  # used again: 1 is now the oldest
    compiler.run(program=b"3")
    assert len(compiler.entries()) == 3
    assert [made[n].exists() for n in range(3)] == [True, False, True]


def test_the_cache_is_in_the_users_cache_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
    assert process.cache_folder() == tmp_path / "elsewhere" / "weft" / "compiled"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert process.cache_folder() == tmp_path / ".cache" / "weft" / "compiled"
    assert process.cache_folder().is_dir()


# -- Failures


def failure(compiler, **changes):
    with pytest.raises(CompileError) as caught:
        compiler.run(**changes)
    # Nothing is kept, and the next call runs again.
    assert compiler.entries() == []
    return str(caught.value)


def test_a_timeout_stops_the_compiler_and_what_it_runs(compiler):
    compiler.script("""
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        (notes / "child").write_text(str(child.pid))
        time.sleep(60)
    """)
    started = time.monotonic()
    assert failure(compiler, timeout=0.5) == (
        "libtpu 1.2.3 did not compile step for tpu-v5e:2x2 in 0.5 s\n"
        "  a compilation that takes longer than the timeout is stopped\n"
        "\n"
        "hint: give it more time with timeout=, on the command line --timeout; fewer layers that are not in a scan "
        "compile faster"
    )
    assert time.monotonic() - started < 20
    (pid,) = compiler.pids
    assert not is_running(pid)
    child = compiler.folder / "child"
    if child.exists():  # a slow machine may not have come this far
        wait_until(lambda: not is_running(int(child.read_text())))


def test_a_compiler_that_is_killed(compiler):
    compiler.script("""
        for n in range(9):
            print("log line", n, file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """)
    assert failure(compiler) == (
        "libtpu 1.2.3 ended with code -9 while it compiled step for tpu-v5e:2x2\n"
        + "".join(f"  log line {n}\n" for n in range(4, 9))
        + "  a code below 0 is a signal: -9 usually means that the machine ran out of memory\n"
        "\n"
        "hint: compile a smaller program: fewer layers, or a smaller batch"
    )
    compiler.script(ECHO)
    assert compiler.run().seconds == 1.5


def test_a_compiler_that_exits_without_a_result(compiler):
    compiler.script("raise ImportError('no module named libtpu')")
    lines = failure(compiler).splitlines()
    assert lines[0] == "libtpu 1.2.3 ended with code 1 while it compiled step for tpu-v5e:2x2"
    assert "  ImportError: no module named libtpu" in lines
    assert lines[-1] == "hint: the lines above are the last ones that the compiler wrote"
    compiler.script("pass")
    assert failure(compiler).splitlines()[0].startswith("libtpu 1.2.3 ended with code 0 while")


def test_a_crash_after_the_result_is_complete(compiler):
    """The compilers' libraries may crash while they unload."""
    compiler.script("finish('complete')\nos.kill(os.getpid(), signal.SIGSEGV)")
    assert compiler.run().hlo == "complete"


@pytest.mark.parametrize(
    "message, lines, hint",
    [
        (
            "INTERNAL: Mosaic failed\n\n  at op dot\n" + "\n".join(f"line {n}" for n in range(9)),
            ["INTERNAL: Mosaic failed", "  at op dot", "line 0", "line 1", "line 2", "line 3"],
            "the first line is the compiler's own message; compile smaller parts to find the op",
        ),
        (
            "ABORTED: The TPU is already in use by process with pid 12. libtpu.so is in use",
            ["ABORTED: The TPU is already in use by process with pid 12. libtpu.so is in use"],
            "another process uses libtpu: end it, or wait for it",
        ),
        (
            "INVALID_ARGUMENT: No such compile option: 'xla_fast'",
            ["INVALID_ARGUMENT: No such compile option: 'xla_fast'"],
            "compiler_options= takes the options of the target's compiler: xla_tpu_… or xla_gpu_…",
        ),
        (
            "",
            ["JaxRuntimeError"],
            "the first line is the compiler's own message; compile smaller parts to find the op",
        ),
    ],
    ids=["long", "in use", "option", "empty"],
)
def test_a_program_that_the_compiler_rejects(compiler, message, lines, hint):
    failed = json.dumps({"error": "JaxRuntimeError", "message": message})
    compiler.script(f"(folder / 'failed.json').write_text({failed!r})")
    assert failure(compiler) == "\n".join(
        [
            "libtpu 1.2.3 can't compile step for tpu-v5e:2x2",
            *(f"  {line}" for line in lines),
            "",
            f"hint: {hint}",
        ]
    )


@pytest.mark.parametrize(
    "target, missing, extra",
    [
        ("tpu-v5e:2x2", "libtpu", "tpu-compiler"),
        ("h100:8", "jax-cuda12-plugin", "gpu-compiler"),
        ("h100:8", "jax-cuda12-pjrt", "gpu-compiler"),
    ],
)
def test_a_compiler_that_is_not_installed(tmp_path, monkeypatch, target, missing, extra):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def version(package):
        if package == missing:
            raise PackageNotFoundError(package)
        return "1.2.3"

    monkeypatch.setattr(process, "version", version)
    with pytest.raises(MissingExtraError) as caught:
        run_compiler(b"", Target.of(target), [], [0], [], {})
    lines = str(caught.value).splitlines()
    assert lines[0] == f"the package {missing} is not installed"
    assert lines[-1] == f'hint: pip install "weft[{extra}]"'
    assert [*tmp_path.iterdir()] == []


def test_the_name_of_a_compiler_has_its_version(monkeypatch):
    monkeypatch.setattr(process, "version", lambda package: {"libtpu": "0.0.42.1"}.get(package, "0.10.2"))
    assert process.compiler_name(Target.of("tpu-v4:2x2x1")) == "libtpu 0.0.42.1"
    assert process.compiler_name(Target.of("b200:8")) == "jax-cuda12-plugin 0.10.2"


# -- One at a time

HOLD = "import fcntl, sys; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); print(flush=True); sys.stdin.read()"


@pytest.fixture
def other(compiler):
    """Another process that compiles: it holds the lock until its input ends."""
    compiler.cache.mkdir(parents=True, exist_ok=True)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(compiler.cache / "lock")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    holder.stdout.readline()
    yield holder
    holder.communicate()


def test_another_compilation_is_waited_for(compiler, other):
    reports = []

    def progress(step, seconds):
        reports.append(step)
        if reports == ["waiting for another compilation"] * 3:
            assert compiler.count == 0
            other.stdin.close()

    other.stdin.flush()
    assert compiler.run(progress=progress).device_kind == "TPU v5 lite"
    assert reports[:3] == ["waiting for another compilation"] * 3
    assert reports[-1] in ("starting", "compiling") and compiler.count == 1
    other.stdin = None


def test_the_other_compilation_may_have_the_result(compiler, other):
    compiler.cache.rename(compiler.folder / "aside")
    first = compiler.run()  # in a folder without the lock
    (entry,) = compiler.entries()
    (made,) = [entry.rename(compiler.folder / entry.name)]
    compiler.cache.rename(compiler.folder / "used")
    (compiler.folder / "aside").rename(compiler.cache)

    def progress(step, seconds):
        if not entry.exists():
            made.rename(entry)
            other.stdin.close()

    assert compiler.run(progress=progress) == first and compiler.count == 1
    other.stdin = None


def test_another_compilation_that_takes_too_long(compiler, other):
    assert failure(compiler, timeout=0.05) == (
        "another process has been compiling for 0.05 s\n"
        "  one compilation runs at a time, as libtpu requires\n"
        "\n"
        "hint: wait for it, or end it"
    )
    assert compiler.count == 0


def test_a_lock_of_a_process_that_was_killed_is_free(compiler, other):
    other.send_signal(signal.SIGKILL)
    other.wait()
    assert compiler.run(timeout=10.0).seconds == 1.5
