"""`weft search`: its output, and its results for published models and examples."""

import json
import shlex

import jax
import pytest
from search_cases import two_layers_trained

import weft as wf
from weft import nn
from weft.autolayout import search
from weft.autolayout.space import TrainVariant
from weft.cli.main import main
from weft.cli.preset_targets import load_plan_target
from weft.core.errors import LayoutError
from weft.core.placement import without_values
from weft.train import config_io
from weft.train.auto_layout import dims_to_search
from weft.train.config import recipe
from weft.train.setup import prepare_run

PROGRAM = """
import weft as wf


def product():
    def run(x, y):
        return wf.einsum(x, y, reduce="b")

    return run, (wf.spec("a=10 b=5"), wf.spec("b=5 c=20"))


def broken():
    def run(x):
        return wf.sum(x, "nothing")

    return run, (wf.spec("a=10 b=5"),)


def kernel():
    def run(x):
        return wf.local(lambda v: v.cumsum(1), x, out=x.dims, splittable=["a"])

    return run, (wf.spec("a=16 b=8"),)


def many():
    return (lambda *xs: [wf.sum(x) for x in xs]), tuple(wf.spec(f"d{n}=64") for n in range(18))


def too_many():
    return (lambda *xs: [wf.sum(x) for x in xs]), tuple(wf.spec(f"d{n}=64") for n in range(65))
"""


@pytest.fixture
def program(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "program.py").write_text(PROGRAM)


def run_search(capsys, *arguments, code=0):
    assert main(["search", *arguments]) == code
    out = capsys.readouterr()
    return out.out, out.err


def test_auto_mtf_on_a_mesh(program, capsys):
    """auto_mtf's first published example: a 4 × 2 mesh, and memory to be least."""
    out, _ = run_search(
        capsys, "program.py:product", "--mesh", "m1=4 m2=2", "--hardware", "cpu", "--objective", "memory"
    )
    assert 'layout  "a:m2 c:m1"' in out


def test_auto_mtf_chooses_a_mesh(program, capsys):
    """Its second: 8 processors. It answers with 4 × 2, the larger for c and the smaller for a."""
    arguments = ("--devices", "8", "--hardware", "cpu", "--objective", "memory", "--json")
    out, _ = run_search(capsys, "program.py:product", *arguments)
    best = json.loads(out)["ranked"][0]
    sizes = dict(wf.Mesh(best["mesh"]).axes)
    rules = dict(rule.split(":") for rule in best["rules"].split())
    assert {dim: sizes[axis] for dim, axis in rules.items()} == {"a": 2, "c": 4}


def test_text_page_and_comparison(program, capsys, tmp_path):
    arguments = ("program.py:product", "--devices", "4", "--hardware", "h100")
    out, _ = run_search(capsys, *arguments, "--front", "--compare", "b:model")
    for words in ("legal candidates", "with less and less memory", 'compared with mesh "model=4"', "network"):
        assert words in out
    text, _ = run_search(capsys, *arguments)
    assert run_search(capsys, *arguments, "--html", "page.html") == (text, "wrote page.html\n")
    page = (tmp_path / "page.html").read_text()
    assert page.startswith("<!doctype html>") and "<svg" in page and "http" not in page.split("</head>")[1]


def test_nothing_fits(program, capsys):
    arguments = ("--devices", "4", "--hardware", "h100", "--memory", "0.0001MB")
    out, err = run_search(capsys, "program.py:product", *arguments, code=1)
    assert "nothing fits. The nearest needs" in out and "8 devices: at least" in err


def test_levers_keep_to_the_dims_and_the_cap(program, capsys):
    """What would help is found among the same layouts, and comes up against the same cap."""
    arguments = ("--devices", "4", "--hardware", "h100", "--memory", "0.00059MB", "--dims", "a")
    _, err = run_search(capsys, "program.py:product", *arguments, code=1)
    assert "8 devices: at least 600 B (still too much)" in err


@pytest.mark.slow
def test_levers_are_added_to_the_given_flags(capsys):
    """More devices never need more memory on each, and a batch that does not divide evenly is not an error here."""
    flags = ("--hardware", "h100", "--dims", "batch", "--axes", "1", "--memory", "1MB", "--json")
    out, err = run_search(
        capsys,
        "tiny-lm",
        "--train",
        "adamw",
        "--batch",
        "6",
        "--devices",
        "2",
        "--remat",
        "nothing",
        *flags,
        code=1,
    )
    needed = json.loads(out)["nearest"]["bytes"]
    lever = next(line for line in err.splitlines() if "4 devices: at least" in line)
    amount, unit = lever.split("at least ")[1].split()[:2]
    assert float(amount) * {"KiB": 2**10, "MiB": 2**20}[unit] < needed
    assert "--micro 4" not in err


def test_comparisons_are_data_too(program, capsys, tmp_path):
    arguments = ("program.py:product", "--devices", "4", "--hardware", "h100", "--compare", "b:x")
    out, _ = run_search(capsys, *arguments, "--json")
    assert json.loads(out)["compare"]["mesh"] == "x=4"
    run_search(capsys, *arguments, "--html", "page.html")
    assert "compared with mesh" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize(("devices", "rules", "mesh"), [("7", "a:x c:y", "x=1 y=7"), ("4", "", "data=4")])
def test_comparisons_with_any_rules(devices, rules, mesh, program, capsys):
    """A prime number of devices with two axes, and rules that split nothing."""
    flags = ("--devices", devices, "--hardware", "h100", "--compare", rules)
    out, _ = run_search(capsys, "program.py:product", *flags)
    assert f'compared with mesh "{mesh}"' in out


def test_dims_that_a_kernel_cannot_split_are_not_searched(program, capsys):
    out, _ = run_search(capsys, "program.py:kernel", "--devices", "8", "--hardware", "h100")
    assert 'layout  "a:model"' in out and "or excluded): b" in out


def test_flags_of_variants():
    """The command line to paste contains the variant too. A name in Python may be any text."""
    fn, args = two_layers_trained()
    known = TrainVariant.of({"--model.remat": "dots", "--optimizer.micro": 2, "--model.pipeline": None})
    variants = {known: (fn, args), "micro 2, of my own": (fn, args)}
    found = search(fn, args, devices=1, hardware="h100", variants=variants, top=3)
    flags = {row["variant"]: row["train_flags"] for row in found.to_data()["ranked"]}
    assert flags == {
        "": "",
        "remat dots, micro 2": "--model.remat dots --optimizer.micro 2",
        "micro 2, of my own": "",
    }


def test_flags_to_train_with_are_those_of_train(capsys):
    """They are the short ones, and give the layout that was found."""
    flags = ("--train", "adamw", "--devices", "2", "--hardware", "h100", "--dims", "batch", "--axes", "1")
    out, _ = run_search(capsys, "tiny-lm", *flags)
    command_line = out.splitlines()[-1].removeprefix("to train with it: ")
    assert command_line == '--mesh "data=2" --layout "batch:data"'
    layout = config_io.apply_flags(recipe("lm"), shlex.split(command_line)).layout
    assert (layout.mesh, layout.rules) == ("data=2", "batch:data")


TELLING = {
    "the program has no dim zz": ("program.py:product", "--devices", "8", "--dims", "a", "zz"),
    "--memory is an integer of at least 1": ("program.py:product", "--devices", "8", "--memory", "0"),
    "hint: --memory 12GiB": ("program.py:product", "--devices", "8", "--memory", "12"),
    "--memory ² is not a size": ("program.py:product", "--devices", "8", "--memory", "²"),
    "--axes is an integer from 1 to 3": ("program.py:product", "--devices", "8", "--axes", "5"),
    "--top is an integer of at least 1": ("program.py:product", "--devices", "8", "--top", "0"),
    "--devices is an integer of at least 1": ("program.py:product", "--devices", "0"),
    "--micro is a list in which each item is an integer of at least 1": (
        "tiny-lm",
        "--train",
        "adamw",
        "--devices",
        "8",
        "--micro",
        "2",
        "0",
    ),
    "--devices 0, --top 0": ("program.py:product", "--devices", "0", "--top", "0"),
    "did you mean memory?": ("program.py:product", "--devices", "8", "--objective", "memry"),
    "omit one of them": ("program.py:product", "--devices", "8", "--mesh", "x=8"),
    "program.py is a file": ("program.py:many", "--devices", "8", "--html", "program.py/x.html"),
    "can't write /proc/x.html": ("program.py:many", "--devices", "8", "--html", "/proc/x.html"),
    "too many layouts": ("program.py:many", "--devices", "8"),
    "more than 64 dims": ("program.py:too_many", "--devices", "8"),
}


@pytest.mark.parametrize("words", TELLING)
def test_mistakes_are_reported(words, program, capsys):
    out, err = run_search(capsys, *TELLING[words], "--hardware", "cpu", code=2)
    assert not out and words in err and "hint: " in err


MISSING = {
    "needs --hardware\n": ("--devices", "8"),
    "needs --devices or --mesh\n": ("--hardware", "cpu"),
    "needs --hardware, and --devices or --mesh\n": (),
}


@pytest.mark.parametrize("words", MISSING)
def test_what_is_missing_is_named(words, program, capsys):
    out, err = run_search(capsys, "program.py:product", *MISSING[words], code=2)
    assert not out and f"weft search program.py:product {words}" in err and "hint: " in err


MISTAKES = {
    "no devices": ("program.py:product", "--hardware", "cpu"),
    "zero devices": ("program.py:product", "--devices", "0", "--hardware", "cpu"),
    "no such machine": ("program.py:product", "--devices", "8", "--hardware", "cpuu"),
    "no such file": ("other.py:product", "--devices", "8", "--hardware", "cpu"),
    "can't be traced": ("program.py:broken", "--devices", "8", "--hardware", "cpu"),
    "no size": ("program.py:product", "--devices", "8", "--hardware", "cpu", "--memory", "much"),
    "remat of a file": ("program.py:product", "--devices", "8", "--hardware", "cpu", "--remat", "dots"),
    "illegal rules": ("program.py:product", "--devices", "8", "--hardware", "cpu", "--compare", "a:x b:x"),
    "a mesh and devices": ("program.py:product", "--devices", "8", "--mesh", "x=4", "--hardware", "cpu"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes(name, program, capsys):
    out, err = run_search(capsys, *MISTAKES[name], code=2)
    assert not out and "Traceback" not in err and ("rror" in err)


def test_stored_layouts_are_found():
    """If memory is short, the state is sharded; the printed flags can be pasted and planned."""
    fn, args = two_layers_trained()
    found = search(fn, args, devices=4, axes=1, hardware="h100", memory=200 * 2**20)
    assert found.best.candidate.storage_rules and found.best.bytes <= 200 * 2**20
    data = found.to_data()["ranked"][0]
    layout = wf.Layout(data["rules"], params=data["params"] or None, optimizer=data["optimizer"] or None)
    plan = wf.spmd(fn.fn, data["mesh"], layout, donate=fn.donate).plan(*args)
    assert plan.memory.peak == data["bytes"]
    assert plan.time("h100").overlapped_seconds == data["seconds"]


def authors(name, mesh):
    fn, args = load_plan_target(name, "adafactor", None, None)
    layout = "batch:batch vocab:model d_ff:model heads:model"
    plan = wf.spmd(fn.fn, mesh, layout, donate=fn.donate).plan(*args)
    return (fn, args), plan.time("tpu-v2").overlapped_seconds


@pytest.mark.slow
def test_the_papers_largest_model():
    """On 512 cores it finds something at least as fast as the authors' layout, with few plans."""
    (fn, args), theirs = authors("lm-4.9b", "batch=16 model=32")
    found = search(fn, args, devices=512, hardware="tpu-v2")
    assert found.best.seconds <= theirs
    assert found.best.bytes <= found.cap
    assert len(found.ranked) + len(found.too_large) <= 8
    assert found.legal > 5_000
    assert found.best.bound > 0.97 * found.best.seconds


def test_a_run_lays_itself_out(tmp_path):
    """`weft train --mesh … --layout auto` uses the result of a search on that mesh."""
    flags = ["--mesh", "data=4 model=2", "--layout", "auto", "--folder", str(tmp_path)]
    config = config_io.apply_flags(recipe("lm"), [*flags, "--preset", "tiny-lm", "--data.length", "32"])
    run = prepare_run(config)
    assert str(run.mesh) == "data=4 model=2"
    assert run.config.layout.rules not in ("", "auto")
    args = _given(run)
    found = search(run.trainer.program, args, mesh=run.mesh, hardware="cpu", dims=dims_to_search(args))
    assert repr(found.best.layout) == repr(run.layout)


def test_a_run_that_lays_itself_out_takes_no_rules(tmp_path):
    flags = [
        "--preset",
        "tiny-lm",
        "--layout",
        "auto",
        "--layout.params",
        "d_ff:data",
        "--folder",
        str(tmp_path),
    ]
    with pytest.raises(LayoutError, match=r"--layout auto with --layout\.params"):
        prepare_run(config_io.apply_flags(recipe("lm"), flags))


def _given(run):
    batch = jax.tree.map(without_values, run.train.step(0).batch, is_leaf=wf.is_tensor)
    return *run.trainer.init(nn.specs(run.model)), batch, run.key(0)
