"""The command line, as a user meets it: a process with stdout, stderr and an exit code."""

import functools
import importlib
import io
import json
import os
import signal
import stat
import subprocess
import sys
import time
import warnings
from importlib.metadata import version
from pathlib import Path

import pytest

import weft as wf
from weft.cli.main import main
from weft.cli.output_files import write_output
from weft.cli.targets import CommandFailure, UsageError, load_target
from weft.hardware.profile import load_profile as load_hardware
from weft.hardware.profile import parse_profile

PROGRAM = """
import weft as wf

batch, d_model, d_ff = wf.dims("batch=64 d_model=32 d_ff=128")


def loss(w, v, x):
    h = wf.relu(wf.einsum(x, w, out=[batch, d_ff]))
    return wf.mean(wf.square(wf.einsum(h, v, out=[batch, d_model]) - x))


step = wf.value_and_grad(loss, argnums=(0, 1))


def example():
    w, v = wf.spec([d_model, d_ff]), wf.spec([d_ff, d_model])
    return step, (w, v, wf.spec([batch, d_model]))


def staged():
    return wf.spmd(step, "data=4", "batch:data"), example()[1]


def stored():
    layout = wf.Layout("batch:data", params="d_model:data", optimizer="d_ff:data")
    return wf.spmd(step, "data=4", layout), example()[1]


def fails_in_its_own_line():
    def broken(x):
        return inner(x)

    def inner(x):
        return wf.sum(x, "batch") + undefined_name  # here

    return broken, (wf.spec([batch, d_model]),)


def fails_in_jax():
    def broken(x):
        return x.array @ x.array  # and here

    return broken, (wf.spec([batch, d_model]),)


def fails_before_tracing():
    raise KeyError("no such thing")


def leaves():
    raise SystemExit(3)


def returns_nothing():
    pass


def returns_too_much():
    return step, example()[1], {}
"""
ROOT = Path(__file__).parents[2]
MESH = ["--mesh", "data=4 model=2", "--layout", "batch:data d_ff:model"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with train.py in it, where the test is; no profiles of this machine's user."""
    (tmp_path / "train.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr("warnings.showwarning", print)
    sys.modules.pop("train", None)
    yield tmp_path
    sys.modules.pop("train", None)


@functools.cache
def command():
    script = Path(sys.executable).with_name("weft")
    return [str(script)] if script.exists() else [sys.executable, "-m", "weft.cli.main"]


def weft(*arguments, **more):
    """A whole process, as a shell would start it."""
    return subprocess.run([*command(), *arguments], capture_output=True, text=True, timeout=120, **more)


def run(capsys, *arguments):
    """The same in this process: exit code, stdout, stderr."""
    try:
        code = main(arguments)
    except SystemExit as exit:  # the parser's own
        code = exit.code
    out, err = capsys.readouterr()
    return code, out, err


# -- memory and streams ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        MemoryError("Unable to allocate 373. GiB"),
        RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 8 bytes.\nmore lines"),
    ],
    ids=lambda error: str(error)[:20],
)
def test_too_little_memory_is_a_message(error, capsys, monkeypatch):
    def fails(_):
        raise error

    monkeypatch.setattr("weft.cli.dispatch._parse_command", fails)
    code, out, err = run(capsys, "models")
    assert (code, out) == (1, "") and err.startswith("error: out of memory\n")
    assert str(error).split("\n")[0] in err and "more lines" not in err
    assert "weft plan" in err and "When memory is short" in err


@pytest.mark.parametrize(
    "error, code", [(OSError("the disk is gone"), 1), (MemoryError(), 1), (UsageError("no such flag"), 2)]
)
def test_other_processes_learn_of_a_failure(error, code, capsys, monkeypatch):
    def fails(_):
        raise error

    reported = []
    monkeypatch.setattr("weft.cli.dispatch._parse_command", fails)
    monkeypatch.setattr("weft.distributed.rendezvous.mark_failed", reported.append)
    assert run(capsys, "models")[0] == code and reported == [code]


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_streams_may_be_closed(closed):
    arguments = ["sh", "-c", f'"$@" models {closed}', "sh", *command()]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert ("tiny-lm" in done.stdout) == (">&-" not in closed.replace("2>&-", ""))


def test_letters_that_a_stream_lacks_are_escaped():
    done = weft("plan", "tiny-lm", env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stderr) == (0, "") and "\\u" in done.stdout


def test_an_interrupt_is_not_lost_in_a_callback():
    """As one is that comes while Python collects garbage."""
    script = [
        "import sys, weft.cli.dispatch as d, weft.cli.main as m",
        "def interrupt(self): raise KeyboardInterrupt",
        "d._parse_command = lambda given: type('Asked', (), {'run': print, '__del__': interrupt})()",
        "sys.exit(m.main())",
    ]
    arguments = [sys.executable, "-c", "\n".join(script)]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


ENTRY = "import sys; from weft.cli.main import main; print('on', flush=True); sys.exit(main())"


def test_an_interrupt_at_any_moment_prints_one_line():
    """From the first import of the command line on: in imports, while tracing, while searching."""
    arguments = ["search", "lm-4.9b", "--train", "adafactor", "--devices", "512", "--hardware", "tpu-v2"]
    for seconds in (0.01, 0.03, 0.06, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.7, 1.0):
        command = [sys.executable, "-c", ENTRY, *arguments]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout.readline() == "on\n"
                time.sleep(seconds)
                process.send_signal(signal.SIGINT)
                out, err = process.communicate(timeout=60)
            finally:
                process.kill()
        assert (process.returncode, out, err) == (130, "", "interrupted\n"), seconds


IMPORTS = """
import os, signal
try:
    os.kill(os.getpid(), signal.SIGINT)
except BaseException:  # as an extension that is initialized may fail
    raise ImportError("initialization failed") from None
"""


def test_an_interrupt_in_an_import_is_no_import_error(folder):
    (folder / "imports.py").write_text(IMPORTS)
    done = weft("plan", "imports.py:example")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


def test_little_runs_before_an_interrupt_is_handled():
    """Nothing outside the standard library, and none of its slow modules."""
    script = "import re, sys; before = {*sys.modules}; import weft.cli.main; print(*{*sys.modules} - before)"
    done = subprocess.run(
        [sys.executable, "-S", "-c", script], capture_output=True, text=True, timeout=60, cwd=ROOT
    )
    loaded = {*done.stdout.split()}
    assert {one for one in loaded if one.startswith("weft")} == {"weft", "weft.cli", "weft.cli.main"}
    assert len(loaded) < 25 and not loaded & {"typing", "pathlib", "importlib.metadata"}


def test_another_error_of_jax_is_not_hidden(capsys, monkeypatch):
    monkeypatch.setattr(
        "weft.cli.dispatch._parse_command", lambda _: (_ for _ in ()).throw(RuntimeError("INTERNAL"))
    )
    with pytest.raises(RuntimeError, match="INTERNAL"):
        main(["models"])


def test_known_models_as_data(capsys):
    code, out, _ = run(capsys, "models", "--json")
    assert code == 0 and {"name": "tiny-lm", "parameters": 172352} in json.loads(out)
    assert run(capsys, "models", "list", "--json") == (0, out, "")
    code, out, _ = run(capsys, "models", "show", "tiny-lm", "--json")
    assert code == 0 and run(capsys, "models", "--json", "show", "tiny-lm") == (0, out, "")


# -- plan -------------------------------------------------------------------------------------------


def test_a_cold_plan_is_fast_and_prints_only_the_plan(folder):
    done = weft("plan", "train.py:example", *MESH, "--hardware", "tpu-v4")
    assert (done.returncode, done.stderr) == (0, "")
    assert 'on mesh "data=4 model=2"' in done.stdout and "predicted time" in done.stdout
    assert "train.py:8" in done.stdout and "\x1b" not in done.stdout


def test_json_is_the_plan_and_its_time(folder, capsys):
    code, out, err = run(capsys, "plan", "train.py:example", *MESH, "--hardware", "h100", "--json")
    assert (code, err) == (0, "")
    data = json.loads(out)
    fn, args = load_target("train.py:example")
    plan = wf.spmd(fn, *MESH[1::2]).plan(*args)
    assert data["flops"] == plan.flops and data["comm_bytes"] == plan.comm_bytes
    assert data["time"]["hardware"] == "h100" and data["time"]["total_seconds"] > 0
    code, out, _ = run(capsys, "plan", "train.py:example", *MESH, "--json")
    assert "time" not in json.loads(out)


def test_roles_have_layouts_of_their_own(folder, capsys):
    roles = ["--params", "d_model:data", "--optimizer", "d_model:data"]
    code, out, _ = run(capsys, "plan", "train.py:example", *MESH, *roles, "--json")
    assert code == 0 and 'params="d_model:data"' in json.loads(out)["layout"]


def test_a_program_brings_its_own_mesh_and_layout(folder, capsys):
    _, out, _ = run(capsys, "plan", "train.py:staged", "--json")
    assert json.loads(out)["mesh"] == [["data", 4]]
    _, out, _ = run(capsys, "plan", "train.py:staged", *MESH, "--json")
    assert json.loads(out)["mesh"] == [["data", 4], ["model", 2]]


@pytest.mark.parametrize(
    "name, flags, layout",
    [
        ("staged", ["--params", "d_model:data"], wf.Layout("batch:data", params="d_model:data")),
        ("staged", ["--optimizer", "d_ff:data"], wf.Layout("batch:data", optimizer="d_ff:data")),
        ("stored", [], wf.Layout("batch:data", params="d_model:data", optimizer="d_ff:data")),
        ("stored", ["--layout", ""], wf.Layout("", params="d_model:data", optimizer="d_ff:data")),
        ("stored", ["--params", ""], wf.Layout("batch:data", optimizer="d_ff:data")),
        ("stored", ["--optimizer", ""], wf.Layout("batch:data", params="d_model:data", optimizer="")),
    ],
    ids=str,
)
def test_a_programs_rules_are_the_default_of_each_flag(name, flags, layout, folder, capsys):
    code, out, err = run(capsys, "plan", f"train.py:{name}", *flags, "--json")
    assert code == 0 and json.loads(out)["layout"] == repr(layout), err


def test_one_device_is_the_default(folder, capsys):
    _, out, _ = run(capsys, "plan", "train.py:example", "--json")
    assert json.loads(out)["mesh"] == [] and json.loads(out)["comm_bytes"] == {}


def test_check_detects_a_changed_plan(folder, capsys):
    layout = ("--mesh", "data=4 model=2", "--layout", "batch:data d_ff:model")
    code, out, _ = run(capsys, "plan", "train.py:example", *layout, "--json")
    (folder / "golden.json").write_text(out)
    assert run(capsys, "plan", "train.py:example", *layout, "--check", "golden.json")[0] == 0
    other = ("--mesh", "data=4 model=2", "--layout", "batch:data")
    code, out, err = run(capsys, "plan", "train.py:example", *other, "--check", "golden.json")
    assert code == 1 and out == ""
    assert "flops: " in err and "- backward: all-reduce over model" not in out
    code, out, _ = run(capsys, "plan", "train.py:example", *layout, "--json")
    golden = json.loads(out)
    changed = next(e for e in golden["events"] if e["type"] == "work" and not e["flops"])
    changed["bytes"] += 8  # local work counts too
    (folder / "golden.json").write_text(json.dumps(golden | {"memory": 3}))
    code, _, err = run(capsys, "plan", "train.py:example", *layout, "--check", "golden.json")
    assert code == 1 and f"{changed['bytes']} bytes" in err and "memory peak: None" in err
    (folder / "golden.json").write_text("{")
    code, _, err = run(capsys, "plan", "train.py:example", *layout, "--check", "golden.json")
    assert code == 2 and "is not JSON" in err
    assert run(capsys, "plan", "train.py:example", *layout, "--check", "none.json")[0] == 2


def test_a_file_may_have_the_name_of_a_module_that_is_loaded(folder, capsys):
    (folder / "json.py").write_text((folder / "train.py").read_text())
    code, out, err = run(capsys, "plan", "json.py:example", "--json")
    assert code == 0 and json.loads(out)["name"], err


def test_compile_prints_xlas_memory_beside_ours(folder, capsys):
    code, out, _ = run(capsys, "plan", "train.py:staged", "--compile")
    assert code == 0 and "XLA on virtual CPU devices" in out and "planned: " in out


def test_verify_runs_and_compares(folder, capsys):
    layouts = ("batch:data", "batch:data d_ff:model", "d_model:model")
    code, out, _ = run(
        capsys, "verify", "train.py:example", "--mesh", "data=4 model=2", "--layouts", *layouts
    )
    assert code == 0 and len(out.splitlines()) == 9


def test_verify_on_what_is_left_of_the_devices(folder):
    done = weft("verify", "train.py:example", "--mesh", "data=-1 model=2", "--layouts", "batch:data")
    assert done.returncode == 0 and len(done.stdout.splitlines()) == 3, done.stderr


def test_verify_fails_where_results_differ(folder, capsys):
    (folder / "wrong.py").write_text(
        "import weft as wf, jax.numpy as jnp\n"
        "def example():\n"
        "    def f(x):\n"
        "        return wf.local(lambda a: jnp.cumsum(a), x, out=x.dims, splittable=['a'])\n"
        "    return f, (wf.spec('a=8'),)\n"
    )
    code, _, err = run(capsys, "verify", "wrong.py:example", "--mesh", "x=2", "--layouts", "a:x")
    assert code == 1 and "differs by" in err


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("width", [60, 80, 160])
def test_a_plan_is_as_wide_as_the_terminal(width, folder, capsys, monkeypatch):
    """Nothing is lost where it is narrow; a file or a pipe has 118 columns whatever the terminal has."""
    monkeypatch.setenv("COLUMNS", str(width))
    arguments = ["plan", "train.py:example", *MESH, "--hardware", "tpu-v4"]
    _, wide, _ = run(capsys, *arguments)
    assert 100 < max(map(len, wide.splitlines())) <= 118
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    assert main(arguments) == 0
    text = terminal.getvalue()
    assert max(map(len, text.splitlines())) <= width
    headers = "line" * 2 if width < 118 else ""  # there lines of source have no column of their own
    letters, all_letters = (sorted("".join(one.replace("─", "").split())) for one in (text + headers, wide))
    assert letters == all_letters
    for words in ("predicted time", "all-reduce", "train.py:8", "train.py:9", "328 KFLOP"):
        assert words in text, words


def test_diff_of_two_layouts(folder, capsys):
    code, out, _ = run(capsys, "plan", "train.py:example", *MESH, "--diff", "data=8", "batch:data")
    assert code == 0 and 'mesh "data=8"' in out and "all-reduce" in out


def test_html_is_written_atomically(folder, capsys):
    """Beside the plan itself on stdout, which is that without a page."""
    _, plan, _ = run(capsys, "plan", "train.py:example", *MESH)
    code, out, err = run(capsys, "plan", "train.py:example", *MESH, "--html", "page.html")
    assert (code, out, err) == (0, plan, "wrote page.html\n") and "on each device" in out
    assert (folder / "page.html").read_text().lstrip().lower().startswith("<!doctype html")
    assert sorted(p.name for p in folder.glob("*page*")) == ["page.html"]


@pytest.mark.parametrize("rule", ["other:data", "heads:data"], ids=["far from any dim", "a dim of presets"])
def test_a_rule_without_effect_is_a_warning_on_stderr(rule, folder, capsys):
    """Also where it is one letter away from a dim, but known models have a dim of that name."""
    (folder / "head.py").write_text(PROGRAM.replace("d_ff", "head"))
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        code, out, err = run(capsys, "plan", "head.py:example", "--mesh", "data=4", "--layout", rule)
    assert code == 0 and err.startswith(f"warning: rule {rule} has no effect") and "warning" not in out[:200]


MISSPELT = {
    "plan": ["--mesh", "data=4", "--layout", "bacth:data"],
    "plan params": ["--mesh", "data=4", "--params", "bach:data"],
    "plan optimizer": ["--mesh", "data=4", "--optimizer", "batchh:data"],
    "plan diff": ["--mesh", "data=4", "--diff", "data=4", "match:data"],
    "search": ["--devices", "4", "--hardware", "a100", "--compare", "btach:data"],
    "verify": ["--mesh", "data=4", "--layouts", "d_ff:data", "botch:data"],
}


@pytest.mark.parametrize("name", MISSPELT)
def test_a_misspelt_rule_is_an_error_before_anything_runs(name, folder, capsys, monkeypatch):
    monkeypatch.setattr(wf.Program, "_run", None)
    monkeypatch.setattr(importlib.import_module("weft.autolayout"), "search", None)
    code, out, err = run(capsys, name.split()[0], "train.py:example", *MISSPELT[name])
    assert (code, out) == (2, "")
    assert err.startswith("LayoutError: no tensor of the program has a dim ") and "did you mean batch?" in err
    rules, carets = err.splitlines()[1:3]
    assert rules[carets.index("^") :].startswith(MISSPELT[name][-1])


def test_all_misspelt_rules_are_reported(folder, capsys):
    arguments = ["--mesh", "data=4 model=2", "--layout", "bacth:data d_ff:model", "--params", "d_modl:data"]
    code, out, err = run(capsys, "plan", "train.py:staged", *arguments)
    assert (code, out) == (2, "")
    assert "a dim bacth (did you mean batch?), d_modl (did you mean d_model?)\n" in err
    assert "  rules: bacth:data d_ff:model (params d_modl:data)\n         ^ " in err


def test_a_reader_that_has_enough_is_no_failure(folder):
    arguments = [*command(), "plan", "train.py:example", *MESH, "--json"]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=120) == 0


# -- mistakes: exit 2, and nothing on stdout ----------------------------------------------------------

MISTAKES = {
    "no file": (["trian.py:example"], ["no such file: trian.py", "did you mean train.py?"]),
    "no function": (["train.py:exampel"], ["no function exampel", "did you mean example?"]),
    "no colon": (["train.py"], ["'train.py' is not FILE.py:FN"]),
    "not a function": (["train.py:wf"], ["no function wf"]),
    "takes arguments": (["train.py:loss"], ["takes arguments (w, v, x)", "def example():"]),
    "returns nothing": (["train.py:returns_nothing"], ["returned None", "a pair"]),
    "returns too much": (["train.py:returns_too_much"], ["returned (", "a pair"]),
    "leaves": (["train.py:leaves"], ["sys.exit(3)"]),
    "fails before tracing": (["train.py:fails_before_tracing"], ["KeyError: 'no such thing'", "line "]),
    "unknown axis": (
        ["train.py:example", "--mesh", "data=4", "--layout", "batch:dta"],
        ["no axis dta", "data?"],
    ),
    "broken layout": (["train.py:example", "--layout", "batch:"], ["LayoutError", "^"]),
    "broken mesh": (["train.py:example", "--mesh", "data=four"], ["MeshError", "^"]),
    "illegal layout": (
        ["train.py:example", "--mesh", "data=4", "--layout", "batch:data d_ff:data"],
        ["LayoutError: batch and d_ff", "at train.py:8"],
    ),
    "unknown hardware": (["train.py:example", "--hardware", "tpu-v44"], ["tpu-v44", "did you mean tpu-v4?"]),
    "no hardware file": (["train.py:example", "--hardware", "my.toml"], ["there is no file my.toml"]),
    "half a diff": (
        ["train.py:example", "--diff", "data=2"],
        ["--diff takes 2 values, not 1: 'data=2'", "each in quotes", "hint: --diff "],
    ),
    "no diff": (["train.py:example", "--diff"], ["--diff takes 2 values, not 0: none"]),
    "two outputs": (["train.py:example", "--json", "--compile"], ["are mutually exclusive"]),
    "no folder": (["train.py:example", "--html", "no/x.html"], ["no folder no"]),
    "a folder": (["train.py:example", "--html", "."], ["is a folder"]),
    "in a file": (["train.py:example", "--html", "train.py/x.html"], ["train.py is a file", "hint: "]),
    "in a folder that takes no files": (
        ["train.py:example", "--html", "/proc/x.html"],
        [
            "can't write /proc/x.html\n  ",
            "then renamed",
            "hint: check the permissions of",
        ],
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_reported_and_exits_with_2(name, folder, capsys):
    arguments, parts = MISTAKES[name]
    code, out, err = run(capsys, "plan", *arguments)
    assert (code, out) == (2, "")
    for part in parts:
        assert part in err
    assert "weft/cli" not in err.replace(os.sep, "/")
    assert not list(folder.glob("*.html"))


@pytest.mark.parametrize("name, line", [("fails_in_its_own_line", "# here"), ("fails_in_jax", "# and here")])
def test_a_function_that_fails_shows_its_own_traceback(name, line, folder, capsys):
    code, out, err = run(capsys, "plan", f"train.py:{name}", *MESH)
    assert (code, out) == (2, "") and f"error: tracing broken of train.py:{name} failed\n" in err
    assert line in err and "train.py" in err
    assert err.count("File ") == (2 if name == "fails_in_its_own_line" else 1)
    for library in ("site-packages", "weft/ops", "weft/spmd", "JAX_TRACEBACK_FILTERING"):
        assert library not in err


def test_a_file_that_is_not_python(folder, capsys):
    (folder / "broken.py").write_text("def f(:\n    pass\n")
    code, _, err = run(capsys, "plan", "broken.py:f")
    assert code == 2 and "SyntaxError" in err and "line 1" in err and "^" in err
    (folder / "missing.py").write_text("import no_such_module\n")
    code, _, err = run(capsys, "plan", "missing.py:f")
    assert code == 2 and "No module named 'no_such_module'" in err


def test_a_file_may_import_its_neighbours(folder, capsys):
    (folder / "sub").mkdir()
    (folder / "sub" / "parts_of_it.py").write_text(PROGRAM)
    (folder / "sub" / "whole.py").write_text("from parts_of_it import example\n")
    code, out, _ = run(capsys, "plan", "sub/whole.py:example", "--json")
    assert code == 0 and json.loads(out)["flops"] > 0


@pytest.mark.parametrize(
    "arguments", [[], ["plan"], ["plant"], ["plan", "a.py:f", "--mish", "x"], ["hardware"]]
)
def test_usage_errors_exit_with_2_and_leave_stdout_empty(arguments, folder, capsys):
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "") and err


@pytest.mark.parametrize("more", [[], ["--help"], ["tiny-lm", "--steps", "3"]])
@pytest.mark.parametrize(
    "arguments, meant, called",
    [("trian", "train", "weft"), ("hardware lst", "list", "weft hardware")],
    ids=["command", "inner"],
)
def test_an_unknown_command_is_a_mistake_also_with_help(arguments, meant, called, more, folder, capsys):
    code, out, err = run(capsys, *arguments.split(), *more)
    assert (code, out) == (2, "")
    assert err.startswith(
        f"error: unknown command: {called} {arguments.split()[-1]} (did you mean {meant}?)\n"
    )
    assert f"hint: {called} --help describes each command" in err


@pytest.mark.parametrize(
    "command", [["train", "lm", "--folder"], ["demo", "--folder"], ["eval"]], ids=" ".join
)
def test_a_name_that_is_not_utf8_raises_before_any_work(command, folder, capsys):
    code, out, err = run(capsys, *command, os.fsdecode(b"runs/\xff"))
    assert (code, out) == (2, "") and err.startswith("error: runs/\\xff is not UTF-8\n") and "hint: " in err
    assert not (folder / "runs").exists()


def test_a_wrong_value_points_to_the_commands_own_help(folder, capsys):
    code, out, err = run(capsys, "plan", "tiny-lm", "--batch", "x")
    assert (code, out) == (2, "") and "weft plan --help" in err
    assert "--batch: x is not an integer" in err and "None" not in err


@pytest.mark.parametrize(
    ("words", "wrong"), [(["2", "x"], "x"), (["2.5"], "2.5"), (["2,4"], "2,4")], ids=["word", "part", "comma"]
)
def test_a_wrong_number_in_a_list_is_named(folder, capsys, words, wrong):
    code, out, err = run(capsys, "search", "tiny-lm", "--micro", *words)
    assert (code, out) == (2, "") and "weft search --help" in err
    assert f"--micro: {wrong} is not an integer" in err and "valid parse" not in err


def test_help_of_a_subcommand_has_no_repetitions(folder, capsys, monkeypatch):
    monkeypatch.setenv("NO_COLOR", "1")
    code, out, _ = run(capsys, "hardware", "measure", "--help")
    assert code == 0 and out.startswith("usage: weft hardware measure ")
    assert "do options" not in out and out.count("Measure this CPU") == 1


def test_a_broken_profile_shows_line_and_caret(folder, capsys):
    (folder / "my.toml").write_text('name = "x"\n[peak_flops\n')
    code, out, err = run(capsys, "plan", "train.py:example", "--hardware", "my.toml")
    assert (code, out) == (2, "")
    assert "my.toml, line 2:\n  [peak_flops\n             ^" in err


def test_a_mistake_in_a_real_process(folder):
    done = weft("plan", "train.py:example", "--mesh", "data=4", "--layout", "batch:dta")
    assert (done.returncode, done.stdout) == (2, "") and done.stderr.startswith("LayoutError: ")
    assert "\n  at " not in done.stderr  # there is no line of the user's


# -- hardware ---------------------------------------------------------------------------------------


def test_hardware_list_names_every_profile(folder, capsys):
    (folder / "config" / "weft").mkdir(parents=True)
    _, toml, _ = run(capsys, "hardware", "show", "h100")
    (folder / "config" / "weft" / "mine.toml").write_text(toml.replace('"h100"', '"mine"'))
    code, out, err = run(capsys, "hardware", "list")
    assert (code, err) == (0, "")
    names = [line.split()[0] for line in out.splitlines()[1:]]
    assert {"tpu-v2", "tpu-v6e", "b200", "cpu", "mine"} <= set(names) and names == sorted(names)
    code, out, _ = run(capsys, "hardware", "list", "--json")
    assert [machine["name"] for machine in json.loads(out)] == names


def test_hardware_show_prints_a_file_that_can_be_read_back(folder, capsys):
    code, out, err = run(capsys, "hardware", "show", "tpu-v5p")
    assert code == 0 and parse_profile(out).name == "tpu-v5p" and "tpu-v5p.toml" in err
    code, out, err = run(capsys, "hardware", "show", "h10")
    assert (code, out) == (2, "") and "did you mean h100?" in err


def test_hardware_measure_writes_a_profile(folder):
    done = weft("hardware", "measure", "--devices", "2")
    assert done.returncode == 0, done.stderr
    path = folder / "config" / "weft" / "cpu.toml"
    assert done.stdout.strip() == str(path)
    machine = load_hardware(path)
    assert machine.name == "cpu" and machine.shared_cores >= 1
    assert machine.peak("f32") > 1e8 and machine.network[0].bandwidth > 1e6
    assert [p.name for p in path.parent.iterdir()] == ["cpu.toml"]


def test_hardware_measure_with_one_device_is_a_mistake(folder, capsys):
    code, out, err = run(capsys, "hardware", "measure", "--devices", "1")
    assert (code, out) == (2, "") and "at least 2" in err


# -- output and help --------------------------------------------------------------------------------


def test_a_failed_write_leaves_the_old_file_and_nothing_else(folder, monkeypatch):
    path = folder / "page.html"
    path.write_text("old")

    def fail(*_):
        raise OSError("the disk is full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(CommandFailure, match=r"can't write .*page\.html\n  the disk is full"):
        write_output(path, "new")
    assert path.read_text() == "old" and {p.name for p in folder.iterdir()} == {"page.html", "train.py"}
    monkeypatch.undo()
    write_output(path, "new")
    assert path.read_text() == "new" and stat.S_IMODE(path.stat().st_mode) & 0o400
    with pytest.raises(UsageError, match="no folder"):
        write_output(folder / "no" / "x.html", "new")


def test_a_file_has_the_rights_of_any_new_one(folder, monkeypatch):
    before = os.umask(0o027)
    try:
        monkeypatch.setattr(os, "umask", None)  # to ask for it is to change it, for all threads
        write_output(folder / "page.html", "new")
    finally:
        monkeypatch.undo()
        os.umask(before)
    assert stat.S_IMODE((folder / "page.html").stat().st_mode) == 0o640


def test_help_explains_how_to_write_the_function(folder):
    done = weft("plan", "--help", env=os.environ | {"NO_COLOR": "1"})
    assert done.returncode == 0 and "def example():" in done.stdout and "--layout" in done.stdout
    assert "\x1b" not in done.stdout


ALONE = """
import sys
from weft.cli.main import main
try:
    main(["--version"])
    main(["--help"])
except SystemExit:
    pass
print(sorted({"jax", "numpy", "weft.core.tensor"} & {*sys.modules}), file=sys.stderr)
"""


def test_help_waits_for_nothing_heavy():
    done = subprocess.run(
        [sys.executable, "-c", ALONE], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.startswith(f"weft {version('weft')}\n") and "weft plan" in done.stdout
    assert done.stderr.splitlines()[-1] == "[]"


NAMES = """
import weft.core.dims, weft.autolayout.space
import weft as wf
assert callable(wf.dims) and callable(wf.search) and callable(wf.tensor)
assert wf.dims("a=2")[0] == wf.Dim("a", 2)
assert {"Dim", "einsum", "search", "random"} <= {*dir(wf)} and "context" not in dir(wf)
assert not hasattr(wf, "nothing_of_this_name")
"""


def test_functions_are_not_hidden_by_the_files_that_they_are_in():
    subprocess.run([sys.executable, "-c", NAMES], timeout=60, check=True)
