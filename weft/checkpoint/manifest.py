"""Folders of checkpoints: written under another name, sealed by a manifest, checked before they are read.

    runs/first/step_200/manifest.json     what is stored, and the SHA-256 of every file; written last
    runs/first/step_200/arrays/…          Orbax's files
    runs/first/.writing-step_300/…        not whole: being written, or left behind by a crash

A folder gets its true name when the manifest and all that it lists are on the disk. Orbax itself does not see
a flipped bit in most of its bytes: the sums do. The manifest holds its own sum, of its text without it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from weft.core.errors import WeftError

CHECKPOINTS_FOLDER = "checkpoints"  # in the folder of a run
MANIFEST_FILE, ARRAYS_FOLDER = "manifest.json", "arrays"
STEP_PREFIX, WRITING_PREFIX, OLD_PREFIX, REMOVING_PREFIX = "step_", ".writing-", ".old-", ".going-"
FORMAT_VERSION = 1


class CheckpointError(WeftError, OSError):
    """A checkpoint that can't be written or read."""


class CheckpointWarning(UserWarning):
    """A checkpoint that is damaged or half-written, and left out."""


class DamagedCheckpoint(Exception):
    """What is wrong with a checkpoint, and in which file."""


class UnreadableCheckpoint(DamagedCheckpoint):
    """Why it can't be read here and now: it may be whole all the same, and is never removed for it."""


# Where they are


def step_folder(folder: Path, step: int) -> Path:
    """The folder of a step's checkpoint."""
    return folder / f"{STEP_PREFIX}{step}"


def writing_folder(folder: Path, step: int) -> Path:
    """The folder of one that is being written."""
    return folder / f"{WRITING_PREFIX}{STEP_PREFIX}{step}"


# Which there are


def recover_step_folders(folder: Path) -> dict[int, Path]:
    """The folders that are named as checkpoints, by step, oldest first."""
    for step, path in list(_by_step(folder, OLD_PREFIX + STEP_PREFIX)):
        if not step_folder(folder, step).exists():  # a crash came between the two renames of `seal`
            with suppress(FileNotFoundError):  # another process was faster
                path.rename(step_folder(folder, step))
    return list_step_folders(folder)


def list_step_folders(folder: Path) -> dict[int, Path]:
    """The same as they are now: nothing is mended, so a run may be writing there."""
    return dict(sorted(_by_step(folder, STEP_PREFIX)))


def list_unfinished_folders(folder: Path) -> dict[int, Path]:
    """Those that were never finished."""
    return dict(sorted(_by_step(folder, WRITING_PREFIX + STEP_PREFIX)))


def _by_step(folder: Path, before: str) -> Iterator[tuple[int, Path]]:
    for path in folder.iterdir() if folder.is_dir() else ():
        if match := re.fullmatch(re.escape(before) + "(0|[1-9][0-9]*)", path.name):
            yield int(match[1]), path


# Writing


def begin_writing(folder: Path, step: int) -> Path:
    """A new folder to write into; what crashes have left behind goes."""
    folder.mkdir(parents=True, exist_ok=True)
    recover_step_folders(folder)
    for path in folder.iterdir():
        if path.name.startswith(
            tuple(word + STEP_PREFIX for word in (WRITING_PREFIX, OLD_PREFIX, REMOVING_PREFIX))
        ):
            shutil.rmtree(path)
    part = writing_folder(folder, step)
    part.mkdir()
    return part


def seal(part: Path, content: dict[str, Any]) -> Path:
    """Add the manifest to a folder that is filled, and give it its true name."""
    files = {}
    for path in _files(part):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            files[path.relative_to(part).as_posix()] = {"bytes": file.tell(), "sha256": digest}
    with (part / MANIFEST_FILE).open("wb") as file:
        file.write(_sealed({"format": FORMAT_VERSION, **content, "files": files}))
        file.flush()
        os.fsync(file.fileno())
    for path in (*(p for p in part.rglob("*") if p.is_dir()), part):
        _sync_folder(path)
    final, old = (part.with_name(part.name.replace(WRITING_PREFIX, word)) for word in ("", OLD_PREFIX))
    if final.exists():  # the same step once more; a folder can't be renamed over a full one
        final.rename(old)
    part.rename(final)
    _sync_folder(final.parent)
    shutil.rmtree(old, ignore_errors=True)
    return final


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint. It loses its name first, so that no half of one is taken for a whole."""
    going = path.with_name(REMOVING_PREFIX + path.name)
    path.rename(going)
    shutil.rmtree(going)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _sealed(content: dict[str, Any]) -> bytes:
    """A manifest's text, with the sum of the text without it."""
    own = hashlib.sha256(_text(content)).hexdigest()
    return _text({**content, "sha256": own})


def _text(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, indent=1) + "\n").encode()


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# Reading


def read_manifest(folder: Path) -> dict[str, Any]:
    """A checkpoint's manifest, if that is whole."""
    try:
        text = (folder / MANIFEST_FILE).read_bytes()
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{MANIFEST_FILE} is missing: the checkpoint is half-written") from None
    except OSError as error:
        raise UnreadableCheckpoint(f"{MANIFEST_FILE} can't be read: {error.strerror}") from None
    try:
        content = json.loads(text)
        whole = _sealed({key: value for key, value in content.items() if key != "sha256"}) == text
    except (ValueError, AttributeError, RecursionError):
        whole = False
    if not whole:
        raise DamagedCheckpoint(
            f"{MANIFEST_FILE} ({len(text):,} bytes) does not have the SHA-256 that it holds"
        )
    if content["format"] != FORMAT_VERSION:
        raise UnreadableCheckpoint(
            f"{MANIFEST_FILE} is of format {content['format']}; this version reads format {FORMAT_VERSION}"
        )
    return content


def check_files(folder: Path, manifest: dict[str, Any]) -> None:
    """An error that names each file that is not as it was written."""
    wrong, kind = [], DamagedCheckpoint
    for name, said in manifest["files"].items():
        try:
            with (folder / name).open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size != said["bytes"]:
                    wrong.append(f"{name} has {size:,} bytes instead of {said['bytes']:,}")
                elif hashlib.file_digest(file, "sha256").hexdigest() != said["sha256"]:
                    wrong.append(f"{name} ({size:,} bytes) has another SHA-256 than when it was written")
        except FileNotFoundError:
            wrong.append(f"{name} is missing")
        except OSError as error:
            wrong.append(f"{name} can't be read: {error.strerror}")
            kind = UnreadableCheckpoint
    if wrong:
        raise kind("\n".join(wrong))
