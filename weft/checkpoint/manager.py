"""Checkpoints: a model and its optimizer's state on disk, for any mesh and layout to go on from.

    checkpoints = checkpoint.Checkpoints("runs/first", keep=3)
    checkpoints.save(step, model, state, {"example": 51_200, "seed": 0})   # training goes on meanwhile
    step, model, state, extra = checkpoints.restore(model, state, mesh, layout)

Tensors are stored whole in their true sizes, by name and dims: nothing of the mesh or the layout is in the
files. At `restore` each device reads its own slices of them, padded with zeros where a dim is split unevenly.

`save` copies the tensors to the host and returns; Orbax writes them from there. What is not finished or not
as it was written is never loaded: see `checkpoint_files`.
"""

from __future__ import annotations

import errno
import functools
import logging
import os
import re
import shutil
import socket
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax

from weft.core import context
from weft.core.errors import ProgramError, TensorTypeError, user_frame
from weft.core.layout import Layout
from weft.core.mesh import Mesh
from weft.distributed import processes
from weft.distributed.shared_folder import check_shared_folder

from ..optim.named_tree import error_context
from .arrays import (
    check_compatible,
    checkpoint_leaves,
    copy_to_host,
    entries_from_manifest,
    manifest_entries,
    restore_trees,
)
from .manifest import (
    ARRAYS_FOLDER,
    MANIFEST_FILE,
    CheckpointError,
    CheckpointWarning,
    DamagedCheckpoint,
    UnreadableCheckpoint,
    begin_writing,
    check_files,
    list_unfinished_folders,
    read_manifest,
    recover_step_folders,
    remove_checkpoint,
    seal,
    writing_folder,
)
from .orbax import make_writer as orbax_writer

EXTRA_TYPES = (bool, int, float, str, type(None))
ORBAX_CHUNK_BYTES = (
    64 * 2**20
)  # bytes of a tensor that are read at once; a device that wants a slice reads few


class CheckpointManager:
    """The checkpoints of one run, in one folder. One run writes there at a time.

    As a context it ends with `wait()`; Python's exit waits too.

    Attributes:
      folder: where they are; it is made when the first is saved.
      keep: how many are kept. Older ones go when a new one is whole.
    """

    def __init__(self, folder: Any, keep: int = 3):
        if not isinstance(keep, int) or keep < 1:
            raise TensorTypeError(
                f"keep={keep!r}",
                rule="keep is the number of checkpoints that stay, at least 1",
                hint='Checkpoints("runs/first", keep=3)',
            ).located("Checkpoints(folder, keep)")
        self.folder, self.keep = Path(folder).absolute(), keep
        self._thread: threading.Thread | None = None
        self._error: CheckpointError | None = None
        self._damaged: set[int] = set()  # known from restoring
        self._waited_at_exit = False
        self._shared = False  # whether it is known that all hosts see the folder

    def save(
        self, step: int, model: Any, state: Any, extra: dict[str, Any] | None = None, wait: bool = False
    ) -> None:
        """Store a model and its optimizer's state as they are now.

        It returns once they are copied to the host: they may be donated then. One save is under way at a
        time, so a second one waits for the first. An error while writing is raised by the next call.

        Args:
          step: the number of steps done. A checkpoint of the same step is replaced.
          model: a tree with tensors; other leaves are not stored.
          state: another. Raw arrays and JAX keys are stored as well.
          extra: numbers, strings, truth values and None by name, such as the data's position.
          wait: whether to return only when all is on the disk.
        """
        with error_context(f"Checkpoints.save(step={step})"):
            self._finish()
            _check_call(step, extra or {})
            found = checkpoint_leaves(model, state)
            said = {name: entry.as_json() for name, entry in manifest_entries(found).items()}
            if not self._shared:
                check_shared_folder(self.folder)
                self._shared = True
            with processes.watchdog(f"the checkpoint of step {step}"):
                arrays = copy_to_host(found)
                self._begin(int(step), arrays, {"step": int(step), "extra": extra or {}, "tensors": said})
            if wait:
                self._finish()

    def wait(self) -> None:
        """Wait for the save that is under way; its error, if it had one, is raised."""
        with error_context("Checkpoints.wait()"):
            self._finish()

    def check(self) -> None:
        """Raise the error of a save that has failed, if it has by now; nothing is waited for.

        Of several processes only the next `save` raises it: until then they may be at different steps.
        """
        if self._thread is not None and not self._thread.is_alive() and not processes.is_multiprocess():
            with error_context("Checkpoints.check()"):
                self._finish()

    def steps(self) -> list[int]:
        """The steps of which there is a checkpoint with a whole manifest. The others are warned of."""
        self.wait()
        found = []
        for step, path in recover_step_folders(self.folder).items():
            try:
                read_manifest(path)
                found.append(step)
            except DamagedCheckpoint as damage:
                _warn(path, str(damage))
        return found

    def restore(
        self, like_model: Any, like_state: Any, mesh: Any = None, layout: Any = None, step: int | None = None
    ) -> tuple[int, Any, Any, dict[str, Any]]:
        """The newest checkpoint that is whole: its step, model, state and extra data.

        One that is damaged or half-written is warned of, and the one before it is taken.

        Args:
          like_model: declared, a spec or real; it gives the names, dims, types and roles.
          like_state: likewise; None leaves the optimizer's state out.
          mesh: where to place the tensors; by default where those of `like_…` are, or on one device.
          layout: how they are stored there (its rules for params and optimizer state included).
          step: of which step; then none other is taken.
        """
        with error_context("Checkpoints.restore(like_model, like_state, …)"):
            self._finish()
            place = None if mesh is None else (Mesh.of(mesh), Layout.of(layout))
            if place is not None:
                place[1].check(place[0])
            path, manifest = self._whole_for_all(step)
            wanted = checkpoint_leaves(like_model, like_state)
            stored = entries_from_manifest(manifest["tensors"])
            if like_state is None:
                stored = {name: entry for name, entry in stored.items() if not name.startswith("state")}
            check_compatible(path, stored, manifest_entries(wanted))
            model, state = restore_trees(path / ARRAYS_FOLDER, stored, like_model, like_state, place)
            return manifest["step"], model, state, manifest["extra"]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.wait()
        except CheckpointError as late:
            if error is None:
                raise
            # The error that is on its way stays the one that is raised.
            warnings.warn(str(late), CheckpointWarning, stacklevel=2)

    # Writing

    def _begin(self, step: int, arrays: dict[str, Any], content: dict[str, Any]) -> None:
        import orbax.checkpoint as ocp  # here, since it takes a second

        self._wait_at_exit()
        first, part = jax.process_index() == 0, writing_folder(self.folder, step)
        # All names at once: a process that fails in between has taken as many as the others.
        begun, met, done = (processes.unique_key(f"the checkpoint of step {step}") for _ in range(3))

        def room() -> str:
            _check_room(begin_writing(self.folder, step), sum(array.nbytes for array in arrays.values()))
            return ""

        with self._writing(step):
            processes.run_on_first(begun, room)
            processes.barrier(met)
            writer = orbax_writer(met)
            try:
                if arrays:
                    chunks = {name: ocp.SaveArgs(chunk_byte_size=ORBAX_CHUNK_BYTES) for name in arrays}
                    writer.save(part / ARRAYS_FOLDER, args=ocp.args.PyTreeSave(arrays, save_args=chunks))
            except BaseException:
                writer.close()
                raise

        def written() -> None:
            try:
                with _quiet():
                    writer.wait_until_finished()
            finally:
                writer.close()

        def sealed() -> str:
            written()
            return str(seal(part, content))

        def finish() -> None:
            try:
                with self._writing(step):
                    if not first:
                        written()
                    processes.run_on_first(done, sealed)
                if first:
                    self._remove_old(step)
            except CheckpointError as error:
                self._error = error

        self._thread = threading.Thread(target=finish, name="weft checkpoint")
        self._thread.start()

    def _wait_at_exit(self) -> None:
        """Let Python's exit wait for the last save. At `atexit` it is too late: Orbax's threads are shut."""
        register = getattr(threading, "_register_atexit", None)
        if register is not None and not self._waited_at_exit:
            register(self.wait)
            self._waited_at_exit = True

    @contextmanager
    def _writing(self, step: int) -> Iterator[None]:
        """Turn what goes wrong into an error that says what is still good; nothing half-written stays."""
        try:
            yield
        except Exception as error:
            if jax.process_index() == 0:
                shutil.rmtree(writing_folder(self.folder, step), ignore_errors=True)
            whole = list(recover_step_folders(self.folder))
            before = f"step {whole[-1]} is the newest that is there" if whole else "there is none before it"
            free = shutil.disk_usage(next(p for p in (self.folder, *self.folder.parents) if p.exists())).free
            raise CheckpointError(
                f"the checkpoint of step {step} could not be written to {self.folder}",
                _reason(error),
                f"free on that disk: {free / 1e9:,.3f} GB",
                rule=f"a checkpoint counts when all of it is on the disk, so this one does not; {before}",
                hint="free space, look at quotas and rights, or give another folder; then save again",
            ) from error

    def _finish(self) -> None:
        if self._thread is not None:
            with processes.watchdog("a checkpoint that is being written"):
                self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _remove_old(self, new: int) -> None:
        """Remove those known to be damaged and the oldest, now that there is a new one."""
        self._damaged.discard(new)
        folders = recover_step_folders(self.folder)
        others = [step for step in folders if step != new and step not in self._damaged]
        oldest = others[: max(0, len(others) - self.keep + 1)]  # `new` is one of those that stay
        for step in {*self._damaged & set(folders), *oldest}:
            try:
                remove_checkpoint(folders[step])
            except OSError as error:
                raise CheckpointError(
                    f"the old checkpoint {folders[step]} could not be removed",
                    _reason(error),
                    rule=f"{self.keep} are kept; that of step {new} is whole",
                    hint="look at the folder's rights, or remove it by hand",
                ) from error
        self._damaged.clear()

    # Reading

    def _whole_for_all(self, step: int | None) -> tuple[Path, dict[str, Any]]:
        """What `_whole` finds. Of several processes the first looks: all take the same, and read it once."""
        found: list[tuple[Path, dict[str, Any]]] = []

        def look() -> str:
            found.append(self._whole(step))
            path, manifest = found[0]
            return f"{path.name} {manifest['sha256']}"

        said = processes.run_on_first(processes.unique_key("a checkpoint to restore"), look)
        if not processes.is_multiprocess():
            return found[0]
        folder, _, digest = said.partition(" ")
        problem = ""
        if not found:
            try:
                found.append((self.folder / folder, read_manifest(self.folder / folder)))
                problem = "" if found[0][1]["sha256"] == digest else f"{MANIFEST_FILE} is another one"
            except DamagedCheckpoint as damage:
                problem = str(damage)
        mine = f"process {processes.process_index()} on {socket.gethostname()}: {problem}" if problem else ""
        wrong = [
            one
            for one in processes.gather_texts(processes.unique_key("a checkpoint to restore"), mine)
            if one
        ]
        if wrong:  # in all processes: else those that can read it would wait for the others
            raise CheckpointError(
                f"process 0 restores {self.folder / folder}, and not all processes can read it",
                *wrong,
                rule="all processes read the same files",
                hint="put the folder on a disk that all hosts share",
            )
        return found[0]

    def _whole(self, step: int | None) -> tuple[Path, dict[str, Any]]:
        """The newest checkpoint, or one of a step, that is as it was written."""
        folders = recover_step_folders(self.folder)
        wanted = folders if step is None else {n: p for n, p in folders.items() if n == step}
        half = list_unfinished_folders(self.folder) if step is None else {}
        for late, path in half.items():
            if late > max(folders, default=-1):
                _warn(path, "it was never finished; the one before it is tried")
        reasons = []
        for number, path in sorted(wanted.items(), reverse=True):
            try:
                manifest = read_manifest(path)
                check_files(path, manifest)
                return path, manifest
            except DamagedCheckpoint as damage:
                reasons += [f"{path.name}: {line}" for line in str(damage).splitlines()]
                if step is None:
                    if not isinstance(damage, UnreadableCheckpoint):
                        self._damaged.add(number)
                    _warn(path, f"{damage}; the one before it is tried")
        asked = "" if step is None else f" of step {step}"
        there = ", ".join(map(str, folders)) or "none"
        if reasons:
            raise CheckpointError(
                f"no checkpoint{asked} in {self.folder} is whole",
                *reasons,
                rule="only what is as it was written, by its SHA-256, is loaded",
                hint=f"copy the files from a backup, or start anew; steps that are there: {there}",
            )
        raise CheckpointError(
            f"there is no checkpoint{asked} in {self.folder}",
            f"steps that are there: {there}",
            rule=f"a checkpoint is a folder step_NUMBER, with its manifest; {len(half)} were never finished",
            hint="look at the folder's name; checkpoints.steps() lists what can be restored",
        )


def _check_room(folder: Path, needed: int) -> None:
    """Fail before anything is written, if it is known that there is no room."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        said = f"{os.strerror(errno.ENOSPC)}; {needed:,} bytes are to be written, and {free:,} are free"
        raise OSError(errno.ENOSPC, said)


@contextmanager
def _quiet() -> Iterator[None]:
    """Orbax logs every error that it raises, with a page of its threads' stacks: raised once is enough."""
    log, hook = logging.getLogger("absl"), sys.unraisablehook
    unheard = lambda record: f"{os.sep}orbax{os.sep}" not in record.pathname  # noqa: E731
    log.addFilter(unheard)
    sys.unraisablehook = functools.partial(_unless_late, hook)
    try:
        yield
        sys.unraisablehook = hook  # not after an error: what else was being written may end later still
    finally:
        log.removeFilter(unheard)


def _unless_late(hook: Any, error: Any) -> None:
    """Show a thread's error; not that a part of a failed write ended after Orbax had closed its loop."""
    if str(error.exc_value) != "Event loop is closed":
        hook(error)


def _reason(error: Exception) -> str:
    """What the system said. In Orbax's errors that is at the end of a long line."""
    text = (str(error).splitlines() or [""])[0]
    code = re.search(r"os_error_code='(\d+)'", text)
    said = os.strerror(int(code[1])) if code else getattr(error, "strerror", None)
    if said:
        return f"the system says: {said}"
    return f"{type(error).__name__}: {text if len(text) < 200 else '…' + text[-200:]}"


def _warn(path: Path, what: str) -> None:
    shown = what.replace("\n", "; ")
    frame = user_frame()
    place = ("<unknown>", 1) if frame is None else (frame.f_code.co_filename, frame.f_lineno)
    warnings.warn_explicit(f"checkpoint {path} is left out: {shown}", CheckpointWarning, *place)


def _check_call(step: Any, extra: dict[str, Any]) -> None:
    if context.current() is not None:
        raise ProgramError(
            "a checkpoint can't be saved inside a program",
            rule="a program is traced: its tensors have no values yet",
            hint="save what the program returns",
        )
    if isinstance(step, bool) or not hasattr(step, "__index__") or step < 0:
        raise TensorTypeError(
            f"step={step!r} is not a number of steps",
            rule="a checkpoint is called by its step, a whole number from 0 on",
            hint="checkpoints.save(200, model, state)",
        )
    odd = [
        f"{k!r}: {type(v).__name__}"
        for k, v in extra.items()
        if type(v) not in EXTRA_TYPES or type(k) is not str
    ]
    if odd:
        raise TensorTypeError(
            f"extra has {', '.join(odd)}",
            rule="extra data are numbers, strings, truth values and None, by name",
            hint="turn NumPy's and JAX's numbers into Python's: int(x), float(x); arrays go into the state",
        )
