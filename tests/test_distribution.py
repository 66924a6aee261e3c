"""The distributions: the sdist is the repository, the wheel is built from it and complete, and both install.

The fast tests install the wheel next to the packages of the test environment. The slow ones install it with its
dependencies, on every Python from 3.11 to 3.13 that is found: they need an index of packages.
"""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email import message_from_string
from pathlib import Path

import pytest

pytestmark = pytest.mark.nodevice

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NAME = f"weft-{PROJECT['version']}"
PYTHONS = ["3.11", "3.12", "3.13"]
CORE_PACKAGES, CORE_DOWNLOAD = 15, 200e6  # docs/install.md

RUN = """
import weft as wf
wf.cpu_devices(8)
from mlp import batch, d_h, d_io, loss
params = wf.parameter(wf.full([d_io, d_h], 1 / 256)), wf.parameter(wf.full([d_h, d_io], 2 / 1024))
step = wf.spmd(wf.value_and_grad(loss), "data=4 model=2", "batch:data d_h:model")
value, _ = step(params, wf.ones([batch, d_io]))
print(wf.__file__, value.item())
"""


def run(*command, cwd):
    """Run a command without the settings of this process: it would import the checkout, and another JAX may
    not know the flags."""
    own = ("PYTHONPATH", "COLUMNS", "XLA_FLAGS")
    environment = {k: v for k, v in os.environ.items() if k not in own}
    done = subprocess.run([*map(str, command)], cwd=cwd, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def repository():
    """The files of the repository."""
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("the list of the repository's files needs git")
    listed = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", cwd=ROOT)
    return sorted(name for name in set(listed.split("\0")[:-1]) if (ROOT / name).exists())


@pytest.fixture(scope="module")
def distributions(tmp_path_factory, repository):
    """The sdist, built from a copy of the repository, and the wheel, built from the sdist."""
    source, unpacked, built = (tmp_path_factory.mktemp(name) for name in ("source", "unpacked", "dist"))
    for name in repository:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, source / name)

    def build(what, folder):
        code = f"from setuptools import build_meta; build_meta.build_{what}({str(built)!r})"
        run(sys.executable, "-c", code, cwd=folder)

    build("sdist", source)
    with tarfile.open(built / f"{NAME}.tar.gz") as archive:
        archive.extractall(unpacked, filter="data")
    build("wheel", unpacked / NAME)
    return built / f"{NAME}.tar.gz", built / f"{NAME}-py3-none-any.whl"


def test_the_sdist_is_the_repository(distributions, repository):
    with tarfile.open(distributions[0]) as archive:
        names = {one.name.removeprefix(f"{NAME}/") for one in archive.getmembers() if one.isfile()}
    added = {"PKG-INFO", "setup.cfg"} | {name for name in names if name.startswith("weft.egg-info/")}
    assert names - added == set(repository) - {".gitignore"}
    assert {"LICENSE", "CHANGELOG.md", "examples/mnist.py", "docs/index.md", "Makefile"} <= names


def test_the_wheel_is_the_package(distributions, repository):
    with zipfile.ZipFile(distributions[1]) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
        metadata = message_from_string(archive.read(f"{NAME}.dist-info/METADATA").decode())
        assert archive.read(f"{NAME}.dist-info/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()
        entry_points = archive.read(f"{NAME}.dist-info/entry_points.txt").decode()
    assert names == {name for name in repository if name.startswith("weft/")}
    assert metadata["License-Expression"] == "Apache-2.0" and metadata["Requires-Python"] == ">=3.11"
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata.get_payload() == (ROOT / "README.md").read_text()
    assert "weft = weft.cli.main:main" in entry_points
    versions = [one for one in metadata.get_all("Classifier") if one.startswith("Programming Language")]
    assert {f"Programming Language :: Python :: {one}" for one in PYTHONS} <= set(versions)


def check_readme_program(python, folder):
    """Run the README's first program, and plan it with the README's command."""
    readme = (ROOT / "README.md").read_text()
    (folder / "mlp.py").write_text(re.search(r'```python title="mlp.py"\n(.*?)```', readme, re.DOTALL)[1])
    where, value = run(python, "-c", RUN, cwd=folder).split()
    assert Path(where).is_relative_to(folder) and float(value) == 1.0
    command = re.search(r"^weft (plan mlp.py:example .*)$", readme, re.MULTILINE)[1]
    words = re.findall(r'"[^"]*"|\S+', command)
    plan = run(python.with_name("weft"), *(word.strip('"') for word in words), cwd=folder)
    (shown,) = re.findall(r"```text\n(on each device.*?)```", readme, re.DOTALL)
    assert {line.rstrip() for line in shown.splitlines()} <= {line.rstrip() for line in plan.splitlines()}


def test_the_wheel_runs_the_readme(distributions, tmp_path):
    """Installed without its dependencies, next to those of the test environment."""
    run(sys.executable, "-m", "venv", "--without-pip", "env", cwd=tmp_path)
    python = tmp_path / "env" / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-index", "--no-deps"]
    run(*pip, distributions[1], cwd=tmp_path)
    (packages,) = tmp_path.glob("env/lib/python*/site-packages")
    mine = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "test-environment.pth").write_text("\n".join(mine))
    check_readme_program(python, tmp_path)


def find_python(version):
    """The path of a Python: on PATH, or one of pyenv's."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    others = sorted(pyenv.glob(f"versions/{version}.*/bin/python"), reverse=True)
    for python in [*others, shutil.which(f"python{version}")]:
        if python is not None:
            done = subprocess.run([python, "-c", "import ensurepip, venv"], capture_output=True)
            if done.returncode == 0:
                return python
    return None


@pytest.mark.slow
@pytest.mark.parametrize("version", PYTHONS)
def test_the_core_install(version, distributions, tmp_path):
    """`pip install weft` in an empty environment: its packages, the size of the download, and the README."""
    found = find_python(version)
    if found is None:
        pytest.skip(f"no Python {version} on this machine")
    run(found, "-m", "venv", "env", cwd=tmp_path)
    python = tmp_path / "env" / "bin" / "python"
    pip = [python, "-m", "pip", "--disable-pip-version-check"]
    run(*pip, "download", "-q", "-d", "wheels", distributions[1], cwd=tmp_path)
    wheels = [*(tmp_path / "wheels").iterdir()]
    assert len(wheels) <= CORE_PACKAGES, wheels
    assert sum(wheel.stat().st_size for wheel in wheels) <= CORE_DOWNLOAD
    run(*pip, "install", "-q", "--no-index", "--find-links", "wheels", "weft", cwd=tmp_path)
    check_readme_program(python, tmp_path)
