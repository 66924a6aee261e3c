"""A folder with a small program for tests of commands: `pytest_plugins = ["command_fixtures"]`."""

import sys

import pytest
from commands import PROGRAM


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A current folder with PROGRAM in train.py, and without the hardware profiles of this machine's user."""
    (tmp_path / "train.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr("warnings.showwarning", print)
    sys.modules.pop("train", None)
    yield tmp_path
    sys.modules.pop("train", None)
