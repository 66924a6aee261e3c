"""The house: imports go one way, and every file is one idea."""

import ast
import inspect
import re
from pathlib import Path
from typing import get_args, get_type_hints

import jax
import pytest
from depends import depends

from weft import optim
from weft.cli.dispatch import COMMANDS, DESCRIPTION
from weft.train.config import OptimizerConfig
from weft.train.optimizer_setup import OPTIMIZERS

pytestmark = pytest.mark.nodevice

PACKAGE = Path(__file__).parent.parent / "weft"

# Each folder imports only itself and those before it.
ORDER = [
    {"core"},
    {"ops", "random", "linalg", "fft", "autodiff", "pipelines"},
    {"hardware"},
    {"plan"},
    {"compilers"},
    {"verification"},
    {"autolayout"},
    {"__init__"},
    {"distributed"},
    {"nn"},
    {"models"},
    {"optim"},
    {"checkpoint"},
    {"data"},
    {"train", "generate"},
    {"serve"},
    {"cli"},
]
# Imported when they are called: an operator's op, a program's plan, and the public table, which loads nothing.
LATE = {("core", "__init__"), ("core", "plan"), ("core", "compilers"), ("plan", "compilers")}


def rank(name):
    return next(n for n, names in enumerate(ORDER) if name in names)


def imported(path):
    """The top-level modules of the package that a file imports."""
    here = ("weft", *path.relative_to(PACKAGE).parts)
    for node in ast.walk(ast.parse(path.read_text())):
        for _, full in targets(node, here[:-1]):
            yield full[1] if len(full) > 1 else "__init__"


def targets(node, package):
    """The candidates that an import statement refers to: the module, and the module with each imported name."""
    if isinstance(node, ast.Import):
        names = [tuple(alias.name.split(".")) for alias in node.names]
        yield from ((name, name) for name in names if name[0] == "weft")
    if isinstance(node, ast.ImportFrom):
        base = package[: len(package) - node.level + 1] if node.level else ()
        base += tuple((node.module or "").split(".") * bool(node.module))
        yield from ((base, (*base, alias.name)) for alias in node.names if base[0] == "weft")


FILES = sorted(p for p in PACKAGE.rglob("*.py") if p != PACKAGE / "__init__.py")


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_one_way(path):
    mine = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    for other in imported(path):
        if (mine, other) not in LATE:
            assert rank(other) <= rank(mine), f"{mine} imports {other}"


def test_no_two_test_files_have_the_same_name():
    """pytest imports test files by their base names, and `make soak` collects all of them at once."""
    names = [path.name for path in (PACKAGE.parent / "tests").rglob("test_*.py")]
    assert {name for name in names if names.count(name) > 1} == set()


def modules():
    """Every module of the package, by its full name, with its file."""
    for path in FILES:
        parts = ("weft", *path.relative_to(PACKAGE).with_suffix("").parts)
        yield (parts[:-1] if parts[-1] == "__init__" else parts), path


def loaded_by(name, path, known):
    """The modules that Python loads first when it loads this one: what its top level imports."""
    package = name if path.name == "__init__.py" else name[:-1]
    for node in ast.parse(path.read_text()).body:
        for base, full in targets(node, package):
            target = full if full in known else base
            yield from (target[:n] for n in range(2, len(target) + 1) if target[:n] in known)


def test_any_module_can_be_loaded_first():
    """No cycles: `import weft` loads nothing, so each module may be the first that a user imports."""
    known = dict(modules())
    edges = {
        name: {*loaded_by(name, path, known)} - {name[:n] for n in range(len(name) + 1)}
        for name, path in known.items()
    }
    done, path = set(), []

    def visit(name):
        assert name not in path, " -> ".join(".".join(n) for n in [*path[path.index(name) :], name])
        if name not in done:
            path.append(name)
            for other in sorted(edges[name]):
                visit(other)
            path.pop()
            done.add(name)

    for name in known:
        visit(name)


def test_only_collectives_calls_jax_lax_collectives():
    names = {
        "psum",
        "pmax",
        "pmin",
        "all_gather",
        "psum_scatter",
        "all_to_all",
        "ppermute",
        "pcast",
    }
    for path in FILES:
        if path.stem == "collectives":
            continue
        used = {
            node.attr
            for node in ast.walk(ast.parse(path.read_text()))
            if isinstance(node, ast.Attribute) and ast.unparse(node.value).endswith("lax")
        }
        assert not used & names, f"{path.name} calls {used & names}"


# JAX documents these modules, and deprecates a name before it changes it.
STABLE_MODULES = set(
    """
    checkpoint_policies config debug distributed dtypes errors export lax nn numpy random scipy sharding stages tree
    tree_util typing
    """.split()
)


def names_of_jax(path):
    """The dotted names of JAX that a file imports or uses, with their lines."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            names = [ast.unparse(node)] if isinstance(node, ast.Attribute) else []
        yield from ((name, node.lineno) for name in names if re.fullmatch(r"jax\.[\w.]+|jaxlib[\w.]*", name))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_one_file_has_the_names_of_jax_without_a_stability_guarantee(path):
    if path == PACKAGE / "core" / "jax_compat.py":
        return
    # Runs in a process of its own, which imports nothing of Weft.
    allowed = {"jax.experimental.topologies"} if path == PACKAGE / "compilers" / "worker.py" else set()
    for name, line in names_of_jax(path):
        if name in allowed:
            continue
        module = name.split(".")[1] if name.startswith("jax.") else name
        is_module = inspect.ismodule(getattr(jax, module, jax))
        assert module in STABLE_MODULES or not is_module, (
            f"{path.name}:{line} uses {name}: it belongs in core/jax_compat.py, with its reason and a test"
        )


def test_what_a_soaked_test_depends_on():
    """A change of the command line starts no random program over; one of an op does."""
    theorem, kills = (
        {str(p.relative_to(PACKAGE.parent)) for p in depends(Path(__file__).parent / name)}
        for name in ("theorem/test_theorem.py", "train/test_train_kills.py")
    )
    assert {
        "weft/ops/einsum.py",
        "weft/random/draws.py",
        "tests/theorem/program.py",
        "tests/conftest.py",
    } <= theorem
    assert not any(name.startswith(("weft/cli", "weft/nn", "weft/train")) for name in theorem)
    assert {"weft/cli/main.py", "weft/checkpoint/manager.py", "weft/ops/einsum.py"} <= kills


# -- Names that are listed in several files -----------------------------------------------------------------


def test_every_command_is_documented():
    page = (PACKAGE.parent / "docs" / "commands.md").read_text()
    assert set(re.findall(r"^\| `weft (\w+)` \|", page, re.MULTILINE)) == set(COMMANDS)
    assert set(re.findall(r"weft\s+(\w+)", DESCRIPTION)) == set(COMMANDS)


def test_every_optimizer_can_be_selected():
    kinds = get_args(get_type_hints(OptimizerConfig)["kind"])
    assert sorted(kinds) == sorted(OPTIMIZERS)
    made = {type(make(0.1, OptimizerConfig())) for make in OPTIMIZERS.values()}
    assert made == {
        x for x in vars(optim).values() if isinstance(x, type) and issubclass(x, optim.Optimizer)
    } - {optim.Optimizer}
    page = (PACKAGE.parent / "docs" / "training.md").read_text()
    assert set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) >= set(OPTIMIZERS)
    for command in ("program_flags", "search"):  # whose help lists them without loading them
        (text,) = re.findall(r'train step: (.*)\."""', (PACKAGE / "cli" / f"{command}.py").read_text())
        assert {*re.findall(r"\w+", text)} >= set(OPTIMIZERS)
    tests = (PACKAGE.parent / "tests" / "optim" / "test_optimizers.py").read_text()
    pairs = tests[tests.index("PAIRS = {") :].partition("\n}")[0]
    assert {kind.__name__ for kind in made if f"optim.{kind.__name__}(" not in pairs} == set()


def test_every_room_is_on_the_page_of_the_architecture():
    page = (PACKAGE.parent / "docs" / "architecture.md").read_text()
    rooms = {p.name for p in PACKAGE.glob("*.py")} | {
        f"{p.parent.name}/" for p in PACKAGE.glob("*/__init__.py")
    }
    assert {room for room in rooms - {"__init__.py"} if f"`{room}" not in page} == set()
