"""Mistakes on the command line exit with 2, explain themselves on stderr, and leave stdout empty."""

import json
import os

import pytest
from commands import MESH, PROGRAM, run, weft

pytest_plugins = ["command_fixtures"]


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
    "two outputs": (["train.py:example", "--json", "--compile", "cpu"], ["are mutually exclusive"]),
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
