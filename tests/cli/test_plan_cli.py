"""`weft plan` and `weft verify`: their output, flags and layouts."""

import importlib
import io
import json
import sys
import warnings

import pytest
from commands import MESH, PROGRAM, run, weft

import weft as wf
from weft.cli.main import main
from weft.cli.targets import load_target

pytest_plugins = ["command_fixtures"]


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
    code, out, _ = run(capsys, "plan", "train.py:staged", "--compile", "cpu")
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
    headers = "where" * 2 if width < 118 else ""  # narrow tables have no column for source lines
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
    """Also if the name is one letter away from a dim, when known models have a dim of that name."""
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
