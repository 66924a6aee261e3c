"""Packages of extras: each import names the extra it comes from, and without it only its function fails."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import weft
from weft.checkpoint import orbax
from weft.core.errors import MissingExtraError
from weft.core.extras import COMPILER_EXTRAS, EXTRAS, from_extra
from weft.data import SentencePiece, shuffle
from weft.train.run_folder import RunFolderWriter

pytestmark = pytest.mark.nodevice

ROOT = Path(__file__).parent.parent.parent
PACKAGE = ROOT / "weft"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OPTIONAL = PROJECT["optional-dependencies"]


def distributions(requirements):
    return {normalized(re.match(r"[\w.-]+", one)[0]) for one in requirements}


def normalized(name):
    return re.sub(r"[-_.]+", "-", name).lower()


CORE = distributions(PROJECT["dependencies"]) | {"jaxlib", "ml-dtypes", "scipy"}  # JAX's own


def third_party(path):
    """The packages that a file imports, neither Weft's nor Python's, each with the extra it is imported from."""

    def visit(node, extra):
        if isinstance(node, ast.With) and isinstance(call := node.items[0].context_expr, ast.Call):
            extra = call.args[0].value if ast.unparse(call.func) == "from_extra" else extra
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            return
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module] if isinstance(node, ast.ImportFrom) and not node.level else []
        for name in names:
            top = name.partition(".")[0]
            if top not in sys.stdlib_module_names | {"weft"}:
                yield top, extra
        for child in ast.iter_child_nodes(node):
            yield from visit(child, extra)

    yield from visit(ast.parse(path.read_text()), "serve" if path.parent == PACKAGE / "serve" else None)


def test_every_import_is_of_the_core_or_names_its_extra():
    """`weft/serve/__init__.py` imports the files of its folder from the extra serve."""
    used = {name: set() for name in EXTRAS}
    for path in sorted(PACKAGE.rglob("*.py")):
        for package, extra in third_party(path):
            found = normalized({"orbax": "orbax-checkpoint"}.get(package, package))
            if extra is None:
                assert found in CORE, f"{path.relative_to(ROOT)}: `import {package}` is not in from_extra()"
            elif found not in CORE:
                assert found in distributions(OPTIONAL[extra]), f"{path.relative_to(ROOT)}: {found}, {extra}"
                used[extra].add(found)
    for extra, found in used.items():  # an extra lists nothing else; other extras may need the same package
        assert distributions(OPTIONAL[extra]) <= found | set().union(*used.values()) and found, extra


def test_the_extras_are_those_of_the_project():
    assert {*EXTRAS, *COMPILER_EXTRAS, "all", "dev", "peers"} == set(OPTIONAL)
    assert OPTIONAL["all"] == [f"weft[{','.join(sorted(EXTRAS))}]"]
    page = (ROOT / "docs" / "install.md").read_text()
    assert set(re.findall(r"^\| `([\w-]+)` \|", page, re.MULTILINE)) == {*EXTRAS, *COMPILER_EXTRAS, "all"}


# Packages of an extra, each with a function that needs it.
USES = {
    "babel": lambda: weft.data.Phrases(1, kinds=("date",))[0],
    "grain": lambda: shuffle._index_shuffle.__wrapped__(),
    "num2words": lambda: weft.data.Phrases(1, seed=1, kinds=("number",))[0],
    "orbax.checkpoint": orbax.make_reader,
    "sacrebleu": lambda: weft.generate.corpus_scores(["a"], [["a"]]),
    "sentencepiece": lambda: SentencePiece("absent.model").vocab,
}


@pytest.fixture
def without(monkeypatch):
    """Make a package appear not to be installed."""

    def hide(name):
        monkeypatch.setitem(sys.modules, name, None)
        for loaded in [one for one in sys.modules if one.startswith(f"{name}.")]:
            monkeypatch.delitem(sys.modules, loaded)

    return hide


@pytest.mark.parametrize("package", USES)
def test_a_function_without_its_package(package, without):
    without(package)
    with pytest.raises(MissingExtraError) as caught:
        USES[package]()
    error = caught.value
    assert isinstance(error, ImportError) and error.name.startswith(package)
    assert (
        f"the package {package.partition('.')[0]} is not installed" == error.fact
        and error.hint == 'pip install "weft[train]"'
    )
    assert "test_extras.py" in error.where


def test_the_message(mistake, without):
    without("sentencepiece")
    mistake("missing_extra", lambda: SentencePiece("m.model").vocab, "messages/extras")  # wrong


def test_other_missing_modules_keep_their_error():
    with pytest.raises(ModuleNotFoundError) as caught, from_extra("zstd"):
        import weft.absent  # noqa: F401
    assert not isinstance(caught.value, MissingExtraError)


def test_the_core_needs_no_package_of_an_extra():
    """With all of them hidden, every module but those of serve is imported, and `weft plan` runs."""
    optional = {package for path in PACKAGE.rglob("*.py") for package, extra in third_party(path) if extra}
    hidden = sorted(package for package in optional if normalized(package) not in CORE)
    assert {"optax", "orbax", "rich", "starlette"} <= set(hidden)
    modules = sorted(
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for path in PACKAGE.rglob("*.py")
        if path.parent != PACKAGE / "serve"
    )
    code = (
        f"import importlib, sys\n"
        f"sys.modules.update(dict.fromkeys({hidden}))\n"
        f"[importlib.import_module(name) for name in {modules}]\n"
        f"from weft.cli.main import main\n"
        f"print(main(['serve', '.']), file=sys.stderr)\n"
        f"sys.exit(main(['plan', 'tiny-lm', '--train', 'adamw', '--hardware', 'a100']))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "predicted time" in done.stdout
    assert done.stderr.startswith("MissingExtraError: the package starlette is not installed\n")
    assert done.stderr.endswith('hint: pip install "weft[serve]"\n2\n') and "Traceback" not in done.stderr


def test_a_run_is_recorded_without_plots(without, tmp_path):
    """One warning says why there is no plot."""
    without("matplotlib")
    with pytest.warns(UserWarning, match=r'loss.png is not drawn: .*pip install "weft\[plots\]"'):
        with RunFolderWriter(tmp_path, 0) as writer:
            writer.write(1, {"loss": 1.0})
    assert (tmp_path / "metrics.jsonl").exists() and not (tmp_path / "loss.png").exists()
