"""Run a vendor's compiler in a process of its own, one at a time, with a timeout and a cache.

Input: a program that JAX exported for the platform, and a target. Output: the text of the compiled program
and what the compiler reports about it. Results are kept in `~/.cache/weft/compiled`, by a hash of the
program, the target, the options and the version of the compiler.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from ..core.errors import CompileError
from ..core.extras import from_extra
from .target import Target

TIMEOUT = 1800.0  # seconds; a train step of GPT-2 took libtpu half a minute to a minute on two busy cores
POLL = 0.1  # seconds between looks at the compiler's progress
MOST_CACHED = 1000  # results, of a few hundred kilobytes each
WORKER = Path(__file__).with_name("worker.py")
# The packages of a compiler, the first of which names its version.
PACKAGES = {"tpu": ("libtpu", "jaxlib"), "cuda": ("jax-cuda12-plugin", "jax-cuda12-pjrt", "jaxlib")}
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",  # no look-up of a TPU's metadata
    # A job on this machine's TPU, or the user's own JAX, may hold libtpu's lock.
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
# A user's settings for other backends, which the compiler may not know.
DROPPED = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_")

Progress = Callable[[str, float], None]  # the step, and the seconds since the start


@dataclass(frozen=True)
class CompilerOutput:
    """What a compiler returns.

    Attributes:
      compiler: its name and version, `libtpu 0.0.42.1`.
      hlo: the text of the compiled program.
      device_kind: the compiler's name of the device.
      seconds: how long it took, also if the result comes from the cache.
      memory: the bytes of arguments, outputs, temporaries, aliased outputs and code.
      costs: estimates that the text does not have, by instruction.
    """

    compiler: str
    hlo: str
    device_kind: str
    seconds: float
    memory: Mapping[str, int]
    costs: Mapping[str, float]


def compiler_name(target: Target) -> str:
    """The compiler of a target with its version; raises an error if it is not installed."""
    package = PACKAGES[target.platform][0]
    with from_extra(target.extra):
        return f"{package} {version(package)}"


def run_compiler(
    program: bytes,
    target: Target,
    mesh: Sequence[tuple[str, int]],
    order: Sequence[int],
    donated: Sequence[int],
    options: Mapping[str, Any],
    *,
    timeout: float = TIMEOUT,
    progress: Progress | None = None,
    name: str = "the program",
) -> CompilerOutput:
    """Compile a program, or return the result of an equal earlier call.

    Args:
      program: the program, exported for the target's platform.
      target: what to compile it for.
      mesh: the axes of the mesh.
      order: for each place of the mesh, in row-major order, the number of its device in the topology.
      donated: the numbers of donated inputs.
      options: the compiler's options.
      timeout: seconds after which it is stopped.
      progress: is called with each step.
      name: of the function, for errors.
    """
    compiler = compiler_name(target)
    request = {
        "topology": target.topology,
        "mesh": [list(axis) for axis in mesh],
        "order": list(order),
        "donated": list(donated),
        "options": {**target.options, **options},
    }
    key = _key(compiler, target, request, program)
    folder = cache_folder()
    if found := _read_cached(folder / key, compiler):
        return found
    report = progress or (lambda step, seconds: None)
    with _one_at_a_time(folder, timeout, report), tempfile.TemporaryDirectory() as scratch:
        # Another process may have compiled the same program meanwhile.
        if found := _read_cached(folder / key, compiler):
            return found
        work = Path(scratch)
        (work / "request.json").write_text(json.dumps(request))
        (work / "program").write_bytes(program)
        _run_worker(work, timeout, report, f"{name} for {target}", compiler)
        _store(work, folder / key)
        output = _read_cached(folder / key, compiler)
    assert output is not None
    return output


def _key(compiler: str, target: Target, request: Mapping[str, Any], program: bytes) -> str:
    """The name of a result in the cache: a hash of all that it depends on."""
    with from_extra(target.extra):
        others = [f"{package} {version(package)}" for package in PACKAGES[target.platform][1:]]
    key = hashlib.sha256(json.dumps([compiler, others, request], sort_keys=True).encode())
    for part in (WORKER.read_bytes(), program):
        key.update(hashlib.sha256(part).digest())
    return key.hexdigest()


def cache_folder() -> Path:
    """The folder of earlier results."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(base) / "weft" / "compiled"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _run_worker(work: Path, timeout: float, report: Progress, what: str, compiler: str) -> None:
    """Run the worker in a folder until it has written its result there."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(DROPPED)} | ENVIRONMENT
    started = time.monotonic()
    with (work / "steps").open("w") as steps, (work / "log").open("w") as log:
        process = subprocess.Popen(
            # -P: the modules beside the worker are not to be imported by their bare names.
            [sys.executable, "-P", str(WORKER), str(work)],
            stdin=subprocess.DEVNULL,
            stdout=steps,
            stderr=log,
            env=environment,
            start_new_session=True,
        )
        try:
            while process.poll() is None:
                seconds = time.monotonic() - started
                if seconds > timeout:
                    raise CompileError(
                        f"{compiler} did not compile {what} in {timeout:g} s",
                        rule="a compilation that takes longer than the timeout is stopped",
                        hint="give it more time with timeout=, on the command line --timeout; fewer layers "
                        "that are not in a scan compile faster",
                    )
                lines = (work / "steps").read_text().splitlines()
                report(lines[-1] if lines else "starting", seconds)
                time.sleep(POLL)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # with the assemblers that it runs
                process.wait()
    if (work / "failed.json").exists():
        raise _failure(json.loads((work / "failed.json").read_text()), what, compiler)
    # Written last: with it, the result is complete, even if the compiler crashes while it exits.
    if not (work / "compiled.json").exists():
        log_lines = (work / "log").read_text(errors="replace").strip().splitlines()
        raise CompileError(
            f"{compiler} ended with code {process.returncode} while it compiled {what}",
            *log_lines[-5:],
            rule="a code below 0 is a signal: -9 usually means that the machine ran out of memory",
            hint="compile a smaller program: fewer layers, or a smaller batch"
            if process.returncode < 0
            else "the lines above are the last ones that the compiler wrote",
        )


def _failure(failed: Mapping[str, str], what: str, compiler: str) -> CompileError:
    """The error for a program that the compiler rejects."""
    lines = [line for line in failed["message"].splitlines() if line.strip()] or [failed["error"]]
    hint = "the first line is the compiler's own message; compile smaller parts to find the op"
    if "libtpu" in failed["message"] and ("in use" in failed["message"] or "lockfile" in failed["message"]):
        hint = "another process uses libtpu: end it, or wait for it"
    if "RESOURCE_EXHAUSTED" in failed["message"]:
        hint = "it does not fit a device; weft plan, or program.plan(*args), shows what needs the memory"
    if "No such compile option" in failed["message"]:
        hint = "compiler_options= takes the options of the target's compiler: xla_tpu_… or xla_gpu_…"
    return CompileError(f"{compiler} can't compile {what}", *lines[:6], hint=hint)


@contextlib.contextmanager
def _one_at_a_time(folder: Path, timeout: float, report: Progress) -> Iterator[None]:
    """Wait until no other process compiles: libtpu admits one."""
    with (folder / "lock").open("w") as lock:
        started = time.monotonic()
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                seconds = time.monotonic() - started
                if seconds > timeout:
                    raise CompileError(
                        f"another process has been compiling for {timeout:g} s",
                        rule="one compilation runs at a time, as libtpu requires",
                        hint="wait for it, or end it",
                    ) from None
                report("waiting for another compilation", seconds)
                time.sleep(POLL)
        yield


# The cache


def _store(work: Path, entry: Path) -> None:
    """Keep a result: the entry is complete or absent. The oldest ones are removed.

    The caller has the lock, so no other process stores results. An entry that is there already is damaged.
    """
    draft = entry.with_name(f".{entry.name}.part")
    for leftover in (draft, entry):
        shutil.rmtree(leftover, ignore_errors=True)
    draft.mkdir()
    (draft / "compiled.hlo.z").write_bytes(zlib.compress((work / "compiled.hlo").read_bytes()))
    shutil.copy(work / "compiled.json", draft / "compiled.json")
    draft.rename(entry)
    entries = [p for p in entry.parent.iterdir() if p.is_dir()]
    for old in sorted(entries, key=lambda p: p.stat().st_mtime)[:-MOST_CACHED]:
        shutil.rmtree(old, ignore_errors=True)


def _read_cached(entry: Path, compiler: str) -> CompilerOutput | None:
    """The result in an entry of the cache; None if there is none, or if it is damaged."""
    try:
        facts = json.loads((entry / "compiled.json").read_text())
        hlo = zlib.decompress((entry / "compiled.hlo.z").read_bytes()).decode()
        os.utime(entry)
        return CompilerOutput(compiler, hlo, **facts)
    except (OSError, ValueError, TypeError, zlib.error):
        return None
