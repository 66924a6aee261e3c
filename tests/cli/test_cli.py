"""The command line as a process: memory, streams, interrupts, written files and help."""

import json
import os
import signal
import stat
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import pytest
from commands import MESH, command, run, weft

from weft.cli.main import main
from weft.cli.output_files import write_output
from weft.cli.targets import CommandFailure, UsageError

pytest_plugins = ["command_fixtures"]

ROOT = Path(__file__).parents[2]


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


def test_a_reader_that_has_enough_is_no_failure(folder):
    arguments = [*command(), "plan", "train.py:example", *MESH, "--json"]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=120) == 0


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
        monkeypatch.setattr(os, "umask", None)  # reading the umask means changing it, for all threads
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
