"""`weft checkpoint`: inspect the checkpoints of a run without the model's code."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from tyro.conf import Positional, arg

from .output_files import check_output_path, print_table, report_write_errors
from .targets import CommandFailure, UsageError

if TYPE_CHECKING:
    from ..checkpoint.inspect import TensorDifference

FolderArgument = Annotated[Positional[Path], arg(metavar="FOLDER")]


@dataclass
class CheckpointListCommand:
    """List the checkpoints in a folder: step, size, date, and whether each is complete or damaged.

    Every byte is checked against the stored checksums."""

    folder: FolderArgument
    """The folder of a run, or its folder of checkpoints."""
    json: bool = False
    """Print JSON instead of text."""

    def run(self) -> None:
        from ..checkpoint.inspect import UNFINISHED, list_checkpoints
        from ..plan.units import human_bytes

        found = list_checkpoints(_checkpoints_folder(self.folder))
        if self.json:
            _print_json(
                {
                    "step": one.step,
                    "path": str(one.path),
                    "bytes": one.bytes,
                    "date": _date(one.seconds),
                    "tensors": one.tensors,
                    "complete": one.damage is None,
                    "damage": one.damage,
                }
                for one in found
            )
            return
        if not found:
            print(f"no checkpoints in {self.folder}", file=sys.stderr)
            return
        rows = [(">step", ">size", "date", ">tensors", "")]
        for one in found:
            first, *more = (one.damage or "complete").splitlines()
            state = f"{first}; and {len(more)} more files" if more else first
            tensors = "?" if one.tensors is None else str(one.tensors)
            state = state if one.damage is None or UNFINISHED in first else f"damaged: {state}"
            rows.append((str(one.step), human_bytes(one.bytes), _date(one.seconds), tensors, state))
        print_table(rows)


@dataclass
class CheckpointInspectCommand:
    """Show the tensors of a checkpoint (dims, dtype, bytes) and the numbers stored with them."""

    folder: FolderArgument
    """The folder of a run, or its folder of checkpoints."""
    step: Annotated[int | None, arg(metavar="N", help_behavior_hint="")] = None
    """The step of the checkpoint (default: the latest)."""
    values: bool = False
    """Also read the tensors: mean, standard deviation, minimum, maximum, and number of NaNs."""
    json: bool = False
    """Print JSON instead of text."""

    def run(self) -> None:
        from ..checkpoint.inspect import entry_bytes, open_checkpoint, summarize_values
        from ..plan.units import human_bytes

        folder, step = _folder_and_step(self.folder, self.step)
        found = open_checkpoint(folder, step, verify=self.values)
        tensors: dict[str, dict[str, Any]] = {
            name: {**entry.to_json(), "bytes": entry_bytes(entry)} for name, entry in found.entries.items()
        }
        if self.values:
            for name, array in found.arrays():
                tensors[name] |= asdict(summarize_values(array))
        total = sum(one["bytes"] for one in tensors.values())
        if self.json:
            head = {"step": found.step, "path": str(found.path), "extra": found.extra, "bytes": total}
            _print_json(head | {"tensors": tensors})
            return
        columns = ("mean", "std", "min", "max", "nan") if self.values else ()
        rows: list[Any] = [("tensor", ">bytes", *(f">{name}" for name in columns), "dtype and dims")]
        for name, entry in found.entries.items():
            numbers = [f"{tensors[name][column]:.4g}" for column in columns]
            rows.append((name, f"{tensors[name]['bytes']:,}", *numbers, str(entry)))
        print(f"step {found.step} in {found.path}\n")
        print_table(rows)
        print(f"\n{len(tensors)} tensors, {human_bytes(total)} in total")
        for part in ("model", "state"):
            sizes = [one["bytes"] for name, one in tensors.items() if name.partition(".")[0] == part]
            print(f"  {part}: {len(sizes)} tensors, {human_bytes(sum(sizes))}")
        if found.extra:
            print("\nextra:")
            for name, value in found.extra.items():
                print(f"  {name}: {json.dumps(value, ensure_ascii=False)}")


@dataclass
class CheckpointDiffCommand:
    """Compare two checkpoints tensor by tensor. FOLDER@STEP selects a step; the default is the latest.

    Lists tensors that exist in only one of them or whose dims or dtypes differ. For tensors whose values
    differ, shows how many elements differ and the largest difference. Exits with 1 if the checkpoints
    differ."""

    first: Annotated[Positional[Path], arg(metavar="FOLDER[@STEP]")]
    """A folder of checkpoints."""
    second: Annotated[Positional[Path], arg(metavar="FOLDER[@STEP]")]
    """Another folder, or another step of the same folder."""
    json: bool = False
    """Print JSON instead of text."""

    def run(self) -> None:
        from ..checkpoint.inspect import diff_checkpoints, open_checkpoint

        one, other = (open_checkpoint(*_folder_and_step(given)) for given in (self.first, self.second))
        found = diff_checkpoints(one, other)
        if self.json:
            _print_json(
                {
                    "first": str(one.path),
                    "second": str(other.path),
                    "same": len(one.entries) - sum(d.types[0] is not None for d in found),
                    "differences": [
                        {
                            "name": d.name,
                            "first": d.types[0],
                            "second": d.types[1],
                            "unequal": d.unequal,
                            "largest": d.largest,
                        }
                        for d in found
                    ],
                }
            )
        elif found:
            print_table([("tensor", ">unequal", ">largest", ""), *map(_difference_row, found)])
        else:
            print(f"all {len(one.entries)} tensors are equal")
        if found:
            raise CommandFailure(f"{len(found)} tensors differ between {one.path} and {other.path}")


def _difference_row(d: TensorDifference) -> tuple[str, str, str, str]:
    if d.unequal:
        return d.name, f"{d.unequal:,}", f"{d.largest:.3g}", d.types[0] or ""
    if None in d.types:
        which, shown = ("first", d.types[0]) if d.types[1] is None else ("second", d.types[1])
        return d.name, "", "", f"only in the {which}: {shown}"
    return d.name, "", "", f"{d.types[0]} and {d.types[1]}"


@dataclass
class CheckpointExportCommand:
    """Export the model of a checkpoint to a safetensors file.

    Tensors keep their names; their dims are in the file's metadata. The optimizer's state is not exported.
    For a run of weft train, this exports the model that weft eval evaluates: the EMA of the parameters, if
    there is one."""

    folder: FolderArgument
    """The folder of a run, or its folder of checkpoints."""
    file: Annotated[Positional[Path], arg(metavar="FILE.safetensors")]
    """The file to write. It is written atomically."""
    step: Annotated[int | None, arg(metavar="N", help_behavior_hint="")] = None
    """The step of the checkpoint (default: the latest)."""

    def run(self) -> None:
        from ..checkpoint.inspect import open_checkpoint
        from ..train.safetensors import export_safetensors

        _check_suffix(self.file)
        check_output_path(self.file)
        found = open_checkpoint(*_folder_and_step(self.folder, self.step))
        with report_write_errors(self.file):
            count = export_safetensors(found, self.file)
        print(f"{count} tensors", file=sys.stderr)
        print(self.file)


@dataclass
class CheckpointImportCommand:
    """Create a checkpoint from a file written by weft checkpoint export, to start a run from.

    If a model was imported into RUN as step 0, weft train --folder RUN starts with it."""

    file: Annotated[Positional[Path], arg(metavar="FILE.safetensors")]
    """The file to read."""
    folder: FolderArgument
    """The folder of a run with checkpoints, or a folder of checkpoints; it is created if necessary."""
    step: Annotated[int, arg(metavar="N")]
    """The step of the new checkpoint."""

    def run(self) -> None:
        from ..checkpoint.manifest import step_folder
        from ..train.safetensors import import_safetensors

        _check_suffix(self.file)
        if self.step < 0:
            raise UsageError(
                f"--step {self.step} is negative",
                rule="a checkpoint is named after its step, an integer from 0",
                hint="--step 0, to start a run from it",
            )
        folder = _checkpoints_folder(self.folder)
        count = import_safetensors(self.file, folder, self.step)
        print(f"{count} tensors", file=sys.stderr)
        print(step_folder(folder, self.step))


@dataclass
class CheckpointCommand:
    """List, inspect and compare the checkpoints of a run; convert them to and from safetensors."""

    do: (
        Annotated[CheckpointListCommand, tyro.conf.subcommand("list")]
        | Annotated[CheckpointInspectCommand, tyro.conf.subcommand("inspect")]
        | Annotated[CheckpointDiffCommand, tyro.conf.subcommand("diff")]
        | Annotated[CheckpointExportCommand, tyro.conf.subcommand("export")]
        | Annotated[CheckpointImportCommand, tyro.conf.subcommand("import")]
    )

    def run(self) -> None:
        import jax

        jax.config.update("jax_platforms", "cpu")  # only files are read: don't claim an accelerator
        self.do.run()


def _folder_and_step(given: Path, step: int | None = None) -> tuple[Path, int | None]:
    """Split FOLDER@STEP into a folder and a step."""
    folder, at, number = str(given).rpartition("@")
    if given.exists() or not at or not number.isdecimal():
        return _checkpoints_folder(given), step
    if step is not None and step != int(number):
        raise UsageError(
            f"{given} and --step {step}", rule="these are two different steps", hint="give only one of them"
        )
    return _checkpoints_folder(Path(folder)), int(number)


def _checkpoints_folder(folder: Path) -> Path:
    """The folder of checkpoints; given the folder of a run, the one inside it."""
    from ..checkpoint.manifest import CHECKPOINTS_FOLDER, list_step_folders

    inner = folder / CHECKPOINTS_FOLDER
    return inner if inner.is_dir() and not list_step_folders(folder) else folder


def _check_suffix(file: Path) -> None:
    if file.suffix != ".safetensors":
        raise UsageError(
            f"{file} does not end in .safetensors",
            rule="models are exported to and imported from a single safetensors file",
            hint=str(file.with_suffix(".safetensors")),
        )


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _print_json(data: Mapping[str, Any] | Iterable[Mapping[str, Any]]) -> None:
    from ..train.plain_json import plain_json

    print(plain_json(data, indent=1))
