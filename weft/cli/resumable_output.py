"""Lines out: to stdout, or to a file that a second call goes on with.

While it is made, the file OUT is called OUT.part; each line is with the system as soon as it is there. Beside
it OUT.part.json says what it is made of: a call with the same input, model and settings goes on behind the
last whole line, any other is refused. At the end OUT.part becomes OUT.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from .output_files import check_output_path, write_output
from .targets import UsageError

WriteLine = Callable[[str], None]


def check_resumable(out: Path | None, inputs: tuple[str, ...] = ()) -> None:
    """An error if a file can't be written; asked before any work is done."""
    if out is None:
        return
    if str(out) == "-" or (out.exists() and not out.is_file() and not out.is_dir()):
        raise UsageError(
            f"-o {out} is {'stdout' if str(out) == '-' else 'no plain file'}",
            rule="the lines go to a file that a second call can go on with",
            hint="without -o they go to stdout, which can be sent anywhere: > or |",
        )
    out = _named(out)
    check_output_path(out)
    for name in inputs:
        if out.exists() and Path(name).exists() and out.samefile(name):
            raise UsageError(f"{name} is read, and {out} is the same file", hint="-o names another file")


@contextlib.contextmanager
def resumable_writer(out: Path | None, made_of: Mapping[str, Any]) -> Iterator[tuple[int, WriteLine]]:
    """How many lines are there already, and what writes one more.

    Args:
      out: the file; None is stdout.
      made_of: all that the lines depend on, as JSON.
    """
    if out is None:
        _as_utf8()
        yield 0, _print
        return
    out = _named(out)
    part = out.with_name(out.name + ".part")
    with part.open("ab+", buffering=0) as file:
        _lock(file, part)
        done = _done(file, part, made_of)

        def append(line: str) -> None:
            nonlocal done
            text = line.encode() + b"\n"
            size, written = os.fstat(file.fileno()).st_size, file.write(text)  # one call: whole for signals
            if written != len(text):  # a full disk takes what it can
                file.truncate(size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(part))
            done += 1

        if done:
            print(f"{part} has {done:,} lines: it goes on behind them", file=sys.stderr)
        try:
            yield done, append
        except BaseException:
            if done:
                print(f"{done:,} lines are in {part}; run the same command again to resume", file=sys.stderr)
            else:
                part.unlink()
                _about(part).unlink()
            raise
        os.fsync(file.fileno())
        part.replace(out)
        _about(part).unlink()


def _named(out: Path) -> Path:
    """The file itself: a link to it stays one."""
    return Path(os.path.realpath(out)) if out.is_symlink() else out


def _about(part: Path) -> Path:
    return part.with_name(part.name + ".json")


def _done(file: Any, part: Path, made_of: Mapping[str, Any]) -> int:
    """How many whole lines there are of the same making; half a line, left by a crash, goes."""
    file.seek(0)
    content, about = file.read(), _about(part)
    if not content:
        write_output(about, json.dumps(made_of, indent=1, ensure_ascii=False) + "\n")
        return 0
    try:
        before = json.loads(about.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        before = {}
    if before != made_of:
        names = [*made_of, *(name for name in before if name not in made_of)]
        wrong = [
            f"{name}: {_shown(before, name)} before, {_shown(made_of, name)} now"
            for name in names
            if before.get(name) != made_of.get(name)
        ]
        lines = wrong if before else [f"{about} is missing: what the lines are made of is not known"]
        count = content.count(b"\n")
        raise UsageError(
            f"{part} has {count:,} lines that are made of something else",
            *lines,
            rule="a file goes on with the same input, model and settings (mesh, layout and rows may differ)",
            hint=f"the same command as before; or remove {part} to begin anew; or another -o",
        )
    whole = content.rfind(b"\n") + 1
    file.truncate(whole)
    return content.count(b"\n", 0, whole)


def _shown(made_of: Mapping[str, Any], name: str) -> str:
    text = json.dumps(made_of[name], ensure_ascii=False) if name in made_of else "not given"
    return text if len(text) <= 60 else text[:59] + "…"


def _lock(file: Any, part: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        ours = os.path.samestat(os.fstat(file.fileno()), part.stat())  # else it was just given its name
    except OSError:
        ours = False
    if not ours:
        raise UsageError(
            f"another process is writing {part}",
            rule="one process writes a file",
            hint="wait for it, end it, or give another -o",
        )


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _as_utf8() -> None:
    """Texts may have any letter, whatever the terminal's language is."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(encoding="utf-8")
