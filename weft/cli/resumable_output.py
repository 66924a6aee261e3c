"""Output lines: to stdout, or to a file that a second call can resume.

Until it is complete, the file OUT is named OUT.part; each line is written unbuffered. OUT.part.json records
the provenance of the lines: a call with the same input, model and settings resumes after the last complete
line, and any other call raises an error. At the end OUT.part is renamed to OUT.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from io import RawIOBase
from pathlib import Path
from typing import Any

from .output_files import check_output_path, write_output
from .targets import UsageError

WriteLine = Callable[[str], None]


def check_resumable(out: Path | None, inputs: tuple[str, ...] = ()) -> None:
    """Raise an error, before any work is done, if a file can't be written."""
    if out is None:
        return
    if str(out) == "-" or (out.exists() and not out.is_file() and not out.is_dir()):
        raise UsageError(
            f"-o {out} is {'stdout' if str(out) == '-' else 'not a regular file'}",
            rule="-o writes a file that a second call can resume",
            hint="without -o, lines go to stdout, which can be redirected: > or |",
        )
    out = _resolve_link(out)
    check_output_path(out)
    for name in inputs:
        if out.exists() and Path(name).exists() and out.samefile(name):
            raise UsageError(f"{name} and {out} are the same file", hint="choose another file for -o")


@contextlib.contextmanager
def resumable_writer(out: Path | None, provenance: Mapping[str, Any]) -> Iterator[tuple[int, WriteLine]]:
    """The number of lines already written, and a function that writes another.

    Args:
      out: the file; None is stdout.
      provenance: everything that the lines depend on, as JSON.
    """
    if out is None:
        _use_utf8()
        yield 0, _print_line
        return
    out = _resolve_link(out)
    part = out.with_name(out.name + ".part")
    with part.open("ab+", buffering=0) as file:
        _lock(file, part)
        done = _count_done(file, part, provenance)

        def append(line: str) -> None:
            nonlocal done
            text = line.encode() + b"\n"
            size, written = (
                os.fstat(file.fileno()).st_size,
                file.write(text),
            )  # a single call, which a signal can't interrupt halfway
            if written != len(text):  # a full disk accepts a part of it
                file.truncate(size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(part))
            done += 1

        if done:
            print(f"resuming after {done:,} lines in {part}", file=sys.stderr)
        try:
            yield done, append
        except BaseException:
            if done:
                print(f"{done:,} lines are in {part}; run the same command again to resume", file=sys.stderr)
            else:
                part.unlink()
                _provenance_file(part).unlink()
            raise
        os.fsync(file.fileno())
        part.replace(out)
        _provenance_file(part).unlink()


def _resolve_link(out: Path) -> Path:
    """The target of a symbolic link, so that renaming does not replace the link."""
    return Path(os.path.realpath(out)) if out.is_symlink() else out


def _provenance_file(part: Path) -> Path:
    return part.with_name(part.name + ".json")


def _count_done(file: RawIOBase, part: Path, provenance: Mapping[str, Any]) -> int:
    """Count the complete lines, if they have the same provenance; remove a partial line left by a crash."""
    file.seek(0)
    content, record = file.read() or b"", _provenance_file(part)
    if not content:
        write_output(record, json.dumps(provenance, indent=1, ensure_ascii=False) + "\n")
        return 0
    try:
        before = json.loads(record.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        before = {}
    if before != provenance:
        names = [*provenance, *(name for name in before if name not in provenance)]
        wrong = [
            f"{name}: {_format_value(before, name)} before, {_format_value(provenance, name)} now"
            for name in names
            if before.get(name) != provenance.get(name)
        ]
        lines = wrong if before else [f"{record} is missing, so their origin is unknown"]
        count = content.count(b"\n")
        raise UsageError(
            f"{part} has {count:,} lines from a different command",
            *lines,
            rule="resuming needs the same input, model and settings (mesh, layout and rows may differ)",
            hint=f"run the same command as before, remove {part} to start over, or choose another -o",
        )
    end = content.rfind(b"\n") + 1
    file.truncate(end)
    return content.count(b"\n", 0, end)


def _format_value(provenance: Mapping[str, Any], name: str) -> str:
    text = json.dumps(provenance[name], ensure_ascii=False) if name in provenance else "not given"
    return text if len(text) <= 60 else text[:59] + "…"


def _lock(file: RawIOBase, part: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        ours = os.path.samestat(os.fstat(file.fileno()), part.stat())  # otherwise it was just renamed
    except OSError:
        ours = False
    if not ours:
        raise UsageError(
            f"another process is writing {part}",
            rule="only one process can write a file",
            hint="wait for it, stop it, or choose another -o",
        )


def _print_line(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _use_utf8() -> None:
    """Write UTF-8 whatever the locale: texts may contain any character."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(encoding="utf-8")
