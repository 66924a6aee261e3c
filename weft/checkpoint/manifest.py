"""Checkpoint folders: written under a temporary name, sealed by a manifest, verified before they are read.

    runs/first/step_200/manifest.json     the stored tensors and the SHA-256 of every file; written last
    runs/first/step_200/arrays/…          Orbax's files
    runs/first/.writing-step_300/…        unfinished: being written, or left by a crash

A folder gets its final name when the manifest and all files that it lists are on disk. The checksums are
necessary because Orbax does not detect a flipped bit in most of its bytes. The manifest contains its own
checksum, computed over its text without it.
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

CHECKPOINTS_FOLDER = "checkpoints"  # in the run folder
MANIFEST_FILE, ARRAYS_FOLDER = "manifest.json", "arrays"
STEP_PREFIX, WRITING_PREFIX, OLD_PREFIX, REMOVING_PREFIX = "step_", ".writing-", ".old-", ".going-"
FORMAT_VERSION = 1


class DamagedCheckpoint(Exception):
    """The damage of a checkpoint, by file."""


class UnreadableCheckpoint(DamagedCheckpoint):
    """A checkpoint can't be read here and now. It may be intact, so it is never removed."""


# Paths


def step_folder(folder: Path, step: int) -> Path:
    """The folder of a finished checkpoint."""
    return folder / f"{STEP_PREFIX}{step}"


def writing_folder(folder: Path, step: int) -> Path:
    """The folder of a checkpoint that is being written."""
    return folder / f"{WRITING_PREFIX}{STEP_PREFIX}{step}"


# Listing


def recover_step_folders(folder: Path) -> dict[int, Path]:
    """The finished folders by step, oldest first, after completing a rename that a crash interrupted."""
    for step, path in list(_by_step(folder, OLD_PREFIX + STEP_PREFIX)):
        if not step_folder(folder, step).exists():  # a crash between the two renames of `seal`
            with suppress(FileNotFoundError):  # another process was faster
                path.rename(step_folder(folder, step))
    return list_step_folders(folder)


def list_step_folders(folder: Path) -> dict[int, Path]:
    """The finished folders by step, oldest first. Changes nothing, so a run may be writing there."""
    return dict(sorted(_by_step(folder, STEP_PREFIX)))


def list_unfinished_folders(folder: Path) -> dict[int, Path]:
    """The unfinished folders by step."""
    return dict(sorted(_by_step(folder, WRITING_PREFIX + STEP_PREFIX)))


def _by_step(folder: Path, prefix: str) -> Iterator[tuple[int, Path]]:
    for path in folder.iterdir() if folder.is_dir() else ():
        if match := re.fullmatch(re.escape(prefix) + "(0|[1-9][0-9]*)", path.name):
            yield int(match[1]), path


# Writing


def begin_writing(folder: Path, step: int) -> Path:
    """Create a folder to write into, and remove the folders that crashes left."""
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
    """Add the manifest to a folder with all its files, and rename it to its final name."""
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
    if final.exists():  # the step is saved again; a folder can't be renamed over a non-empty one
        final.rename(old)
    part.rename(final)
    _sync_folder(final.parent)
    shutil.rmtree(old, ignore_errors=True)
    return final


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint. It is renamed first, so that a partly removed one is never taken for complete."""
    removing = path.with_name(REMOVING_PREFIX + path.name)
    path.rename(removing)
    shutil.rmtree(removing)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _sealed(content: dict[str, Any]) -> bytes:
    """The text of a manifest, with the checksum of the text without it."""
    checksum = hashlib.sha256(_text(content)).hexdigest()
    return _text({**content, "sha256": checksum})


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
    """Read and verify the manifest of a checkpoint."""
    try:
        text = (folder / MANIFEST_FILE).read_bytes()
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{MANIFEST_FILE} is missing: the checkpoint is incomplete") from None
    except OSError as error:
        raise UnreadableCheckpoint(f"{MANIFEST_FILE} can't be read: {error.strerror}") from None
    try:
        content = json.loads(text)
        intact = _sealed({key: value for key, value in content.items() if key != "sha256"}) == text
    except (ValueError, AttributeError, RecursionError):
        intact = False
    if not intact:
        raise DamagedCheckpoint(f"{MANIFEST_FILE} ({len(text):,} bytes) does not match its own SHA-256")
    if content["format"] != FORMAT_VERSION:
        raise UnreadableCheckpoint(
            f"{MANIFEST_FILE} is of format {content['format']}; this version reads format {FORMAT_VERSION}"
        )
    return content


def check_files(folder: Path, manifest: dict[str, Any]) -> None:
    """Raise an error that lists every file that does not match its checksum in the manifest."""
    wrong, kind = [], DamagedCheckpoint
    for name, expected in manifest["files"].items():
        try:
            with (folder / name).open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size != expected["bytes"]:
                    wrong.append(f"{name} has {size:,} bytes instead of {expected['bytes']:,}")
                elif hashlib.file_digest(file, "sha256").hexdigest() != expected["sha256"]:
                    wrong.append(f"{name} ({size:,} bytes) does not match its SHA-256")
        except FileNotFoundError:
            wrong.append(f"{name} is missing")
        except OSError as error:
            wrong.append(f"{name} can't be read: {error.strerror}")
            kind = UnreadableCheckpoint
    if wrong:
        raise kind("\n".join(wrong))
