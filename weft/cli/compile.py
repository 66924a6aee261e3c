"""`weft compile`: compile a program for TPUs or GPUs that are not there, and report what will run."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import arg

from ..core.field_types import PositiveInt
from .flag_errors import validate_flags
from .output_files import check_output_path, terminal_width, write_output
from .program_flags import ProgramFlags
from .targets import CommandFailure, UsageError

if TYPE_CHECKING:
    from ..compilers.compiled import Compiled
    from ..compilers.target import Target
    from ..core.traced import Traced

REPORT_INTERVAL = 15.0  # seconds between reports where a line can't be overwritten
CLEAR_LINE = "\r\x1b[K"


@dataclass
class CompileCommand(ProgramFlags):
    """Compile a program with the compiler of the TPU or GPU that it will run on, and report what will run:
    the memory, whether it fits, the work, every collective, copies and padding. Nothing runs, and no TPU or
    GPU is needed.

    The compilers are extras: pip install "weft[tpu-compiler]", "weft[gpu-compiler]". A result is kept, so the
    same command returns at once when it is repeated.

        weft compile lm-4.9b --train adafactor --for tpu-v2:16x16 --mesh "data=16 model=32"
          --layout "batch:data vocab:model d_ff:model heads:model"

    FN is a function in FILE.py that takes no arguments. It returns the function to compile and a tuple of its
    arguments, as for weft plan."""

    for_: Annotated[str | None, arg(name="for", metavar="TARGET", help_behavior_hint="")] = None
    """What to compile for: a TPU slice by its sides in chips, such as tpu-v5e:16x16 or tpu-v5p:4x4x8, or GPUs
    by hosts and GPUs in each, such as h100:16x8."""
    options: Annotated[tuple[str, ...], arg(metavar="NAME=VALUE ...", help_behavior_hint="")] = ()
    """Options of the compiler, such as xla_tpu_enable_async_collective_fusion=true."""
    timeout: Annotated[PositiveInt, arg(metavar="SECONDS")] = 1800
    """Stop the compiler after this time."""
    json: Annotated[bool, arg(help_behavior_hint="")] = False
    """Print JSON instead of text."""
    html: Annotated[Path | None, arg(metavar="OUT", help_behavior_hint="")] = None
    """Also write a self-contained HTML page, with planned next to compiled."""
    hlo: Annotated[Path | None, arg(metavar="OUT", help_behavior_hint="")] = None
    """Also write the text of the compiled program."""

    def run(self) -> None:
        """Compile, and print or write the result."""
        validate_flags(self)
        if self.for_ is None:
            raise UsageError(
                "--for is missing",
                rule="a program is compiled for a TPU slice or a number of GPUs",
                hint="--for tpu-v5e:4x4, or --for h100:2x8 (2 hosts of 8)",
            )
        for path in (self.html, self.hlo):
            if path is not None:
                check_output_path(path)
        # Compiling needs no devices: do not claim an accelerator that another process may be using.
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        target, options = parse_target(self.for_), _parse_options(self.options)
        fn, args = self.load()
        traced = self.trace(self.stage(fn, self.mesh, self.layout), args)
        compiled = compile_with_progress(traced, target, options, self.timeout)
        if self.hlo is not None:
            write_output(self.hlo, compiled.hlo)
            print(f"wrote {self.hlo}", file=sys.stderr)
        if self.html is not None:
            write_output(self.html, compiled.to_html(traced.plan()))
            print(f"wrote {self.html}", file=sys.stderr)
        if self.json:
            print(compiled.to_json())
        else:
            print(compiled.explain(terminal_width()), end="")


def parse_target(name: str | None) -> Target:
    """The target with this name."""
    from ..compilers.target import Target

    return Target.of(name or "")


def compile_with_progress(
    traced: Traced, target: Target, options: dict[str, Any] | None = None, timeout: float | None = None
) -> Compiled:
    """Compile a traced program, with progress on stderr."""
    from ..core.errors import CompileError

    progress = _Progress(f"{traced.name} for {target}")
    try:
        return traced.compile_for(target, options=options, timeout=timeout, progress=progress)
    except CompileError as error:
        raise CommandFailure(f"{type(error).__name__}: {error}") from None
    finally:
        progress.end()


class _Progress:
    """Reports the steps of the compiler: a line that is overwritten on a terminal, otherwise new lines."""

    def __init__(self, what: str):
        self.what, self.step, self.is_terminal = what, "", sys.stderr.isatty()
        self.reported = 0.0

    def __call__(self, step: str, seconds: float) -> None:
        text = f"{self.what}: {step}, {seconds:.0f} s"
        if self.is_terminal:
            print(f"{CLEAR_LINE}{text}", end="", file=sys.stderr, flush=True)
        elif step != self.step or time.monotonic() - self.reported > REPORT_INTERVAL:
            print(text, file=sys.stderr, flush=True)
            self.reported = time.monotonic()
        self.step = step

    def end(self) -> None:
        """Remove the line."""
        if self.is_terminal and self.step:
            print(CLEAR_LINE, end="", file=sys.stderr, flush=True)


def _parse_options(given: tuple[str, ...]) -> dict[str, Any]:
    """Compiler options from `name=value`; booleans and numbers have their types."""
    options: dict[str, Any] = {}
    for one in given:
        name, equals, value = one.partition("=")
        if not name.startswith("xla_") or not equals:
            raise UsageError(
                f"--options {one!r} is not NAME=VALUE",
                rule="an option has the name of one of XLA's flags, without dashes",
                hint="--options xla_tpu_enable_async_collective_fusion=true",
            )
        options[name] = {"true": True, "false": False}.get(value.lower(), value)
    return options
