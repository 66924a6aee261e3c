"""Completion in real shells: TAB is pressed on a pseudo-terminal, or the shell's own completion is called."""

import os
import pty
import re
import select
import shutil
import subprocess
import time

import pytest

from weft.cli.completion import completed_commands
from weft.cli.completion_scripts import SCRIPTS
from weft.cli.main import main
from weft.hardware.profile import known_profiles
from weft.models import presets

pytestmark = pytest.mark.nodevice

COMMANDS = {one.path: one for one in completed_commands()}

# A line that ends where TAB is pressed, and words that are among its completions.
LINES = {
    "weft pl": {"plan"},
    "weft hardware ": {"list", "show", "measure"},
    "weft hardware show a1": {"a100"},
    "weft plan tiny-": {name for name in presets() if name.startswith("tiny-")},
    "weft search tiny-": {name for name in presets() if name.startswith("tiny-")},
    "weft plan --ha": {"--hardware"},
    "weft plan mlp.py:f --hardware tpu-": {name for name in known_profiles() if name.startswith("tpu-")},
    "weft train tr": {"translate"},
    "weft train lm --data.ro": {"--data.rows"},
    "weft train lm --optimizer.kind ada": {"adafactor", "adamw"},
    "weft completion f": {"fish"},
    "weft plan exam": {"example.py"},
    "weft plan tiny-lm --html exam": {"example.py"},
}


def needs(shell):
    return pytest.mark.skipif(shutil.which(shell) is None, reason=f"no {shell} on this machine")


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("completion")
    (folder / "example.py").touch()
    for name, script in SCRIPTS.items():
        (folder / f"weft.{name}").write_text(script([*COMMANDS.values()]))
    return folder


@pytest.mark.parametrize("line", LINES)
def test_bash_completes(line, scripts):
    """`compgen -F` is not usable here: call the function with bash's variables, and readline's fallback to files."""
    words = line.split(" ")
    code = f"""
      source ./weft.bash
      COMP_WORDS=({" ".join(f"'{word}'" for word in words)}) COMP_CWORD={len(words) - 1}
      _weft; (( ${{#COMPREPLY[@]}} )) || COMPREPLY=($(compgen -f -- '{words[-1]}'))
      printf '%s\\n' "${{COMPREPLY[@]}}" """
    done = subprocess.run(["bash", "--norc", "-c", code], cwd=scripts, capture_output=True, text=True)
    assert done.stderr == "" and LINES[line] == set(done.stdout.split()), done.stdout


@needs("fish")
@pytest.mark.parametrize("line", LINES)
def test_fish_completes(line, scripts):
    code = f"source ./weft.fish; complete -C '{line}'"
    done = subprocess.run(["fish", "--no-config", "-c", code], cwd=scripts, capture_output=True, text=True)
    found = {row.partition("\t")[0] for row in done.stdout.splitlines()}
    assert done.stderr == "" and LINES[line] <= found, done.stdout
    if not line.endswith(" "):
        assert all(line.split(" ")[-1].lstrip("-") in one for one in found), (
            found
        )  # fish also matches inside words


class Terminal:
    """An interactive shell on a pseudo-terminal."""

    def __init__(self, command, folder):
        self.file, terminal = pty.openpty()
        environment = {"PATH": os.environ["PATH"], "TERM": "dumb", "HOME": str(folder), "PS1": "> "}
        streams = dict.fromkeys(("stdin", "stdout", "stderr"), terminal)
        self.process = subprocess.Popen(
            command, cwd=folder, env=environment, start_new_session=True, **streams
        )
        os.close(terminal)

    def type(self, text, until, seconds=20):
        """Type a text, and read until a pattern appears."""
        os.write(self.file, text.encode())
        shown, end = "", time.monotonic() + seconds
        while not re.search(until, shown):
            assert time.monotonic() < end, f"{until!r} is not in {shown!r}"
            if select.select([self.file], [], [], 0.1)[0]:
                shown += os.read(self.file, 4096).decode(errors="replace")
        return shown

    def close(self):
        self.process.kill()
        self.process.wait()
        os.close(self.file)


SHELLS = {
    "bash": (["bash", "--norc", "--noprofile", "-i"], "source ./weft.bash"),
    "zsh": (["zsh", "-f", "-i"], "autoload -Uz compinit && compinit -u -d ./dump && source ./weft.zsh"),
}


@pytest.mark.parametrize("shell", [pytest.param(name, marks=needs(name)) for name in SHELLS])
def test_tab_completes(shell, scripts):
    """One completion is inserted; several are listed."""
    command, setup = SHELLS[shell]
    terminal = Terminal(command, scripts)
    try:
        terminal.type(f"{setup}; echo rea''dy\r", "ready")
        terminal.type("weft hardw\t", r"weft hardw\W*are ")
        terminal.type("sh\t", "show ")
        terminal.type("h1\t", "h100 ")
        terminal.type("\x15weft plan tiny-lm --hardware tpu-v\t\t", "tpu-v2[^$]*tpu-v6e")
        terminal.type("\x15weft train lm --data.tokenizer-e\t", "--data.tokenizer-examples ")
    finally:
        terminal.close()


@pytest.mark.parametrize(
    "path", [path for path in COMMANDS if path not in ("weft", "weft train", "weft eval")]
)
def test_the_flags_are_those_of_the_help(path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    with pytest.raises(SystemExit):
        main([*path.split()[1:], "--help"])
    options = capsys.readouterr().out.partition("options ")[2]
    boxes = re.findall(r"^\W? {0,2}(-\S.*?)(?:  |│|$)", options, re.MULTILINE)
    shown = {name for box in boxes for name in re.findall(r"(?<!\S)--?[a-z][\w.-]*", box)} - {"-h", "--help"}
    assert {name for flag in COMMANDS[path].flags for name in flag.names} == shown


def test_the_command_prints_a_script(capsys):
    assert main(["completion", "bash"]) == 0
    assert capsys.readouterr().out == SCRIPTS["bash"]([*COMMANDS.values()])


def test_another_shell_is_a_usage_error(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["completion", "tcsh"])
    assert stop.value.code == 2 and "fish" in capsys.readouterr().err
