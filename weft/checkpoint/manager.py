"""The checkpoint manager: saves a model and its optimizer state, and restores them under any mesh and layout.

    checkpoints = checkpoint.CheckpointManager("runs/first", keep=3)
    checkpoints.save(step, model, state, {"example": 51_200, "seed": 0})   # returns before it is written
    step, model, state, extra = checkpoints.restore(model, state, mesh, layout)

Tensors are stored unsharded in their true sizes, by name and dims; the files don't depend on the mesh or the
layout. On `restore` each device reads its own slices, padded with zeros where a dim is split unevenly.

`save` copies the tensors to the host and returns; Orbax writes them in the background. Unfinished and damaged
checkpoints are never loaded: see `manifest`.
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import jax

from weft.core.context import active
from weft.core.errors import ProgramError, TensorTypeError, user_frame
from weft.core.extras import from_extra
from weft.core.layout import Layout, Placement
from weft.core.mesh import Mesh
from weft.core.types import PyTree
from weft.distributed import processes
from weft.distributed.shared_folder import check_shared_folder

from ..core.call_errors import checks_arguments, reports_construction
from ..core.errors import CheckpointError, CheckpointWarning
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
from .orbax import make_writer

EXTRA_TYPES = (bool, int, float, str, type(None))
# Orbax reads entire chunks: with small chunks a device reads little beyond its slice.
ORBAX_CHUNK_BYTES = 64 * 2**20


@reports_construction
class CheckpointManager:
    """Manages the checkpoints of one run in one folder. Only one run may write there at a time.

    Leaving its context calls `wait()`; so does the exit of Python.

    Attributes:
      folder: the folder of the checkpoints; the first `save` creates it.
      keep: the number of checkpoints to keep. Older ones are removed when a new one is complete.
    """

    def __init__(self, folder: str | Path, keep: int = 3):
        if not isinstance(keep, int) or keep < 1:
            raise TensorTypeError(
                f"keep={keep!r}",
                rule="keep is the number of checkpoints to keep, an integer of at least 1",
                hint='CheckpointManager("runs/first", keep=3)',
            ).located("CheckpointManager(folder, keep)")
        if not isinstance(folder, str | os.PathLike):
            raise TensorTypeError(
                f"the folder is {folder!r}",
                rule="the checkpoints of a run are in one folder, given by its path",
                hint='CheckpointManager("runs/first", keep=3)',
            ).located("CheckpointManager(folder, keep)")
        self.folder, self.keep = Path(folder).absolute(), keep
        self._thread: threading.Thread | None = None
        self._error: CheckpointError | None = None
        self._damaged: set[int] = set()  # steps found to be damaged by `restore`
        self._waits_at_exit = False
        self._folder_is_shared = False  # whether all hosts are known to see the folder

    @checks_arguments
    def save(
        self,
        step: int,
        model: PyTree,
        state: PyTree,
        extra: dict[str, Any] | None = None,
        wait: bool = False,
    ) -> None:
        """Save a model and its optimizer state.

        Returns when they are copied to the host, so they may be donated afterwards. Only one save runs at a
        time; a second one waits for the first. The next call raises an error that occurs while writing.

        Args:
          step: the number of steps done. A checkpoint of the same step is replaced.
          model: a pytree of tensors; other leaves are not stored.
          state: a pytree of tensors, raw arrays and JAX keys.
          extra: numbers, strings, booleans and None by name, such as the position in the data.
          wait: whether to return only when the checkpoint is on disk.
        """
        with error_context(f"CheckpointManager.save(step={step})"):
            self._finish()
            _check_call(step, extra or {})
            leaves = checkpoint_leaves(model, state)
            tensors = {name: entry.to_json() for name, entry in manifest_entries(leaves).items()}
            if not self._folder_is_shared:
                check_shared_folder(self.folder)
                self._folder_is_shared = True
            with processes.watchdog(f"the checkpoint of step {step}"):
                arrays = copy_to_host(leaves)
                self._begin(int(step), arrays, {"step": int(step), "extra": extra or {}, "tensors": tensors})
            if wait:
                self._finish()

    def wait(self) -> None:
        """Wait for the running save, and raise its error, if any."""
        with error_context("CheckpointManager.wait()"):
            self._finish()

    def check(self) -> None:
        """Raise the error of a save that has already failed, without waiting.

        With several processes only the next `save` raises it: before that they may be at different steps.
        """
        if self._thread is not None and not self._thread.is_alive() and not processes.is_multiprocess():
            with error_context("CheckpointManager.check()"):
                self._finish()

    def steps(self) -> list[int]:
        """The steps of the checkpoints with an intact manifest. Warns of the others."""
        self.wait()
        found = []
        for step, path in recover_step_folders(self.folder).items():
            try:
                read_manifest(path)
                found.append(step)
            except DamagedCheckpoint as damage:
                _warn(path, str(damage))
        return found

    @checks_arguments
    def restore(
        self,
        like_model: PyTree,
        like_state: PyTree,
        mesh: Mesh | str | None = None,
        layout: Layout | str | None = None,
        step: int | None = None,
    ) -> tuple[int, PyTree, PyTree, dict[str, Any]]:
        """Restore the newest intact checkpoint: its step, model, state and extra data.

        If a checkpoint is damaged or unfinished, `restore` warns and tries the one before it.

        Args:
          like_model: a pytree of tensors, specs or declared parameters with the expected names, dims, dtypes
            and roles.
          like_state: likewise; None skips the optimizer's state.
          mesh: the mesh for the tensors; by default the mesh of the tensors in `like_…`, or one device.
          layout: the layout of the tensors, including its rules for params and optimizer state.
          step: restore exactly this step.
        """
        with error_context("CheckpointManager.restore(like_model, like_state, …)"):
            self._finish()
            placement = None if mesh is None else Placement.of(mesh, layout)
            path, manifest = self._find_intact_on_all(step)
            wanted = checkpoint_leaves(like_model, like_state)
            stored = entries_from_manifest(manifest["tensors"])
            if like_state is None:
                stored = {name: entry for name, entry in stored.items() if not name.startswith("state")}
            check_compatible(path, stored, manifest_entries(wanted))
            model, state = restore_trees(path / ARRAYS_FOLDER, stored, like_model, like_state, placement)
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
            # Don't replace the exception that is already propagating.
            warnings.warn(str(late), CheckpointWarning, stacklevel=2)

    # Writing

    def _begin(self, step: int, arrays: dict[str, Any], content: dict[str, Any]) -> None:
        with from_extra("train"):
            import orbax.checkpoint as ocp  # here, because the import takes a second

        self._wait_at_exit()
        first, part = jax.process_index() == 0, writing_folder(self.folder, step)
        # Keys are numbered: draw all three now, so that a process that fails in between stays in step.
        begun, met, done = (processes.unique_key(f"the checkpoint of step {step}") for _ in range(3))

        def create_folder() -> str:
            _check_free_space(begin_writing(self.folder, step), sum(a.nbytes for a in arrays.values()))
            return ""

        with self._explain_errors(step):
            processes.run_on_first(begun, create_folder)
            processes.barrier(met)
            writer = make_writer(met)
            try:
                if arrays:
                    chunks = {name: ocp.SaveArgs(chunk_byte_size=ORBAX_CHUNK_BYTES) for name in arrays}
                    writer.save(part / ARRAYS_FOLDER, args=ocp.args.PyTreeSave(arrays, save_args=chunks))
            except BaseException:
                writer.close()
                raise

        def wait_for_writer() -> None:
            try:
                with _silence_orbax():
                    writer.wait_until_finished()
            finally:
                writer.close()

        def wait_and_seal() -> str:
            wait_for_writer()
            return str(seal(part, content))

        def finish() -> None:
            try:
                with self._explain_errors(step):
                    if not first:
                        wait_for_writer()
                    processes.run_on_first(done, wait_and_seal)
                if first:
                    self._remove_old(step)
            except CheckpointError as error:
                self._error = error

        self._thread = threading.Thread(target=finish, name="weft checkpoint")
        self._thread.start()

    def _wait_at_exit(self) -> None:
        """Make Python's exit wait for the last save. `atexit` is too late: Orbax's threads have ended."""
        register = getattr(threading, "_register_atexit", None)
        if register is not None and not self._waits_at_exit:
            register(self.wait)
            self._waits_at_exit = True

    @contextmanager
    def _explain_errors(self, step: int) -> Iterator[None]:
        """Remove the unfinished folder after an error, and report which checkpoint is still good."""
        try:
            yield
        except Exception as error:
            if jax.process_index() == 0:
                shutil.rmtree(writing_folder(self.folder, step), ignore_errors=True)
            steps = list(recover_step_folders(self.folder))
            newest = (
                f"the newest checkpoint is that of step {steps[-1]}" if steps else "there is no earlier one"
            )
            free = shutil.disk_usage(next(p for p in (self.folder, *self.folder.parents) if p.exists())).free
            raise CheckpointError(
                f"the checkpoint of step {step} could not be written to {self.folder}",
                _reason(error),
                f"free on that disk: {free / 1e9:,.3f} GB",
                rule=f"a checkpoint is valid only when all of it is on disk, so this one is not; {newest}",
                hint="free some space, check quotas and permissions, or use another folder; then save again",
            ) from error

    def _finish(self) -> None:
        if self._thread is not None:
            with processes.watchdog("writing a checkpoint"):
                self._thread.join()
            self._thread = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _remove_old(self, new: int) -> None:
        """Remove the damaged and the oldest checkpoints, now that there is a new one."""
        self._damaged.discard(new)
        folders = recover_step_folders(self.folder)
        others = [step for step in folders if step != new and step not in self._damaged]
        oldest = others[: max(0, len(others) - self.keep + 1)]  # `new` is one of the `keep`
        for step in {*self._damaged & set(folders), *oldest}:
            try:
                remove_checkpoint(folders[step])
            except OSError as error:
                raise CheckpointError(
                    f"the old checkpoint {folders[step]} could not be removed",
                    _reason(error),
                    rule=f"{self.keep} checkpoints are kept; that of step {new} is complete",
                    hint="check the folder's permissions, or remove it by hand",
                ) from error
        self._damaged.clear()

    # Reading

    def _find_intact_on_all(self, step: int | None) -> tuple[Path, dict[str, Any]]:
        """The result of `_find_intact` in process 0: all processes use the same, verified once."""
        found: list[tuple[Path, dict[str, Any]]] = []

        def find() -> str:
            found.append(self._find_intact(step))
            path, manifest = found[0]
            return f"{path.name} {manifest['sha256']}"

        text = processes.run_on_first(processes.unique_key("a checkpoint to restore"), find)
        if not processes.is_multiprocess():
            return found[0]
        folder, _, digest = text.partition(" ")
        problem = ""
        if not found:
            try:
                found.append((self.folder / folder, read_manifest(self.folder / folder)))
                problem = "" if found[0][1]["sha256"] == digest else f"{MANIFEST_FILE} is a different one"
            except DamagedCheckpoint as damage:
                problem = str(damage)
        own = f"process {processes.process_index()} on {socket.gethostname()}: {problem}" if problem else ""
        texts = processes.gather_texts(processes.unique_key("a checkpoint to restore"), own)
        wrong = [text for text in texts if text]
        if wrong:  # raised in all processes: otherwise those that can read it would wait for the others
            raise CheckpointError(
                f"process 0 restores {self.folder / folder}, but not all processes can read it",
                *wrong,
                rule="all processes read the same files",
                hint="put the folder on a disk that all hosts share",
            )
        return found[0]

    def _find_intact(self, step: int | None) -> tuple[Path, dict[str, Any]]:
        """The newest checkpoint, or the one of a given step, whose files match their checksums."""
        folders = recover_step_folders(self.folder)
        candidates = folders if step is None else {n: p for n, p in folders.items() if n == step}
        unfinished = list_unfinished_folders(self.folder) if step is None else {}
        for number, path in unfinished.items():
            if number > max(folders, default=-1):
                _warn(path, "it was never finished; trying the one before it")
        reasons = []
        for number, path in sorted(candidates.items(), reverse=True):
            try:
                manifest = read_manifest(path)
                check_files(path, manifest)
                return path, manifest
            except DamagedCheckpoint as damage:
                reasons += [f"{path.name}: {line}" for line in str(damage).splitlines()]
                if step is None:
                    if not isinstance(damage, UnreadableCheckpoint):
                        self._damaged.add(number)
                    _warn(path, f"{damage}; trying the one before it")
        of_step = "" if step is None else f" of step {step}"
        available = ", ".join(map(str, folders)) or "none"
        if reasons:
            raise CheckpointError(
                f"no checkpoint{of_step} in {self.folder} is intact",
                *reasons,
                rule="a checkpoint is loaded only if all files match their SHA-256 checksums",
                hint=f"copy the files from a backup, or start a new run; available steps: {available}",
            )
        raise CheckpointError(
            f"there is no checkpoint{of_step} in {self.folder}",
            f"available steps: {available}",
            rule=f"a checkpoint is a folder step_NUMBER with a manifest; {len(unfinished)} are unfinished",
            hint="check the folder's name; checkpoints.steps() lists the steps that can be restored",
        )


def _check_free_space(folder: Path, needed: int) -> None:
    """Fail before writing anything if the disk has too little space."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        fact = f"{os.strerror(errno.ENOSPC)}; {needed:,} bytes to write, {free:,} bytes free"
        raise OSError(errno.ENOSPC, fact)


@contextmanager
def _silence_orbax() -> Iterator[None]:
    """Suppress Orbax's logs: it logs every error that it raises, with the stacks of all its threads."""
    log, hook = logging.getLogger("absl"), sys.unraisablehook
    not_orbax = lambda record: f"{os.sep}orbax{os.sep}" not in record.pathname  # noqa: E731
    log.addFilter(not_orbax)
    sys.unraisablehook = functools.partial(_ignore_closed_loop, hook)
    try:
        yield
        sys.unraisablehook = hook  # after an error the hook stays: other writes may fail later
    finally:
        log.removeFilter(not_orbax)


def _ignore_closed_loop(hook: Callable[[sys.UnraisableHookArgs], Any], error: sys.UnraisableHookArgs) -> None:
    """Report an error of a thread, unless a failed write ended after Orbax closed its event loop."""
    if str(error.exc_value) != "Event loop is closed":
        hook(error)


def _reason(error: Exception) -> str:
    """The operating system's message. Orbax hides its error code in a long line."""
    text = (str(error).splitlines() or [""])[0]
    code = re.search(r"os_error_code='(\d+)'", text)
    message = os.strerror(int(code[1])) if code else getattr(error, "strerror", None)
    if message:
        return f"system error: {message}"
    return f"{type(error).__name__}: {text if len(text) < 200 else '…' + text[-200:]}"


def _warn(path: Path, reason: str) -> None:
    one_line = reason.replace("\n", "; ")
    frame = user_frame()
    location = ("<unknown>", 1) if frame is None else (frame.f_code.co_filename, frame.f_lineno)
    warnings.warn_explicit(f"skipping checkpoint {path}: {one_line}", CheckpointWarning, *location)


def _check_call(step: int, extra: dict[str, Any]) -> None:
    if active.context is not None:
        raise ProgramError(
            "a checkpoint can't be saved inside a program",
            rule="a program is traced: its tensors have no values yet",
            hint="save the program's results",
        )
    if isinstance(step, bool) or not hasattr(step, "__index__") or step < 0:
        raise TensorTypeError(
            f"step={step!r} is not a number of steps",
            rule="a checkpoint is named by its step, an integer of at least 0",
            hint="checkpoints.save(200, model, state)",
        )
    wrong = [
        f"{k!r}: {type(v).__name__}"
        for k, v in extra.items()
        if type(v) not in EXTRA_TYPES or type(k) is not str
    ]
    if wrong:
        raise TensorTypeError(
            f"extra has {', '.join(wrong)}",
            rule="extra data are numbers, strings, booleans and None, by name",
            hint="convert NumPy and JAX scalars to Python: int(x), float(x); put arrays into the state",
        )
