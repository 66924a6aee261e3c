"""`weft checkpoint`: what is in a run's folder, without the model's code."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from tyro.conf import Positional, arg

from .output_files import check_output_path, print_table, report_write_errors
from .targets import CommandFailure, UsageError

FolderArgument = Annotated[Positional[Path], arg(metavar="FOLDER")]


@dataclass
class CheckpointListCommand:
    """The checkpoints of a folder, one to a line: step, size, date, and whether it is whole or what is wrong.

    Every byte is compared with the sums that were stored."""

    folder: FolderArgument
    """Where the checkpoints of a run are, or the run's own folder."""
    json: bool = False
    """Print JSON instead of text."""

    def run(self) -> None:
        from ..checkpoint.inspect import UNFINISHED, list_checkpoints
        from ..plan.units import human_bytes

        found = list_checkpoints(_of_run(self.folder))
        if self.json:
            _print(
                {
                    "step": one.step,
                    "path": str(one.path),
                    "bytes": one.bytes,
                    "date": _date(one.seconds),
                    "tensors": one.tensors,
                    "whole": one.damage is None,
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
            first, *more = (one.damage or "whole").splitlines()
            state = f"{first}; and {len(more)} more files" if more else first
            tensors = "?" if one.tensors is None else str(one.tensors)
            state = state if one.damage is None or UNFINISHED in first else f"damaged: {state}"
            rows.append((str(one.step), human_bytes(one.bytes), _date(one.seconds), tensors, state))
        print_table(rows)


@dataclass
class CheckpointInspectCommand:
    """The tensors of a checkpoint: dims, type, bytes; and the numbers that were stored with them."""

    folder: FolderArgument
    """Where the checkpoints of a run are."""
    step: Annotated[int | None, arg(metavar="N", help_behavior_hint="")] = None
    """Of which step; by default the last one."""
    values: bool = False
    """Read the tensors too: mean, standard deviation, ends, and how many values are NaN."""
    json: bool = False
    """Print JSON instead of text."""

    def run(self) -> None:
        from ..checkpoint.inspect import entry_bytes, open_checkpoint, summarize_values
        from ..plan.units import human_bytes

        folder, step = _at(self.folder, self.step)
        found = open_checkpoint(folder, step, verify=self.values)
        said: dict[str, dict[str, Any]] = {
            name: {**entry.to_json(), "bytes": entry_bytes(entry)} for name, entry in found.entries.items()
        }
        if self.values:
            for name, array in found.arrays():
                said[name] |= asdict(summarize_values(array))
        total = sum(one["bytes"] for one in said.values())
        if self.json:
            head = {"step": found.step, "path": str(found.path), "extra": found.extra, "bytes": total}
            _print(head | {"tensors": said})
            return
        columns = ("mean", "std", "min", "max", "nan") if self.values else ()
        rows: list[Any] = [("tensor", ">bytes", *(f">{name}" for name in columns), "type and dims")]
        for name, entry in found.entries.items():
            numbers = [f"{said[name][column]:.4g}" for column in columns]
            rows.append((name, f"{said[name]['bytes']:,}", *numbers, str(entry)))
        print(f"step {found.step} in {found.path}\n")
        print_table(rows)
        print(f"\n{len(said)} tensors, {human_bytes(total)} in all")
        for part in ("model", "state"):
            own = [one["bytes"] for name, one in said.items() if name.partition(".")[0] == part]
            print(f"  {part}: {len(own)} tensors, {human_bytes(sum(own))}")
        if found.extra:
            print("\nextra:")
            for name, value in found.extra.items():
                print(f"  {name}: {json.dumps(value, ensure_ascii=False)}")


@dataclass
class CheckpointDiffCommand:
    """Compare two checkpoints, tensor by tensor. FOLDER@STEP is a step of a folder; else it is the last one.

    Tensors that are in one only or have other dims or types are listed, and for the others that differ, how
    many elements do and the largest difference. Exit 1 if they differ."""

    first: Annotated[Positional[Path], arg(metavar="FOLDER[@STEP]")]
    """A folder of checkpoints."""
    second: Annotated[Positional[Path], arg(metavar="FOLDER[@STEP]")]
    """Another, or another step of the same."""
    json: bool = False
    """Print JSON instead of text."""

    def run(self) -> None:
        from ..checkpoint.inspect import diff_checkpoints, open_checkpoint

        one, other = (open_checkpoint(*_at(given)) for given in (self.first, self.second))
        found = diff_checkpoints(one, other)
        if self.json:
            _print(
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
            print_table([("tensor", ">unequal", ">largest", ""), *map(_difference, found)])
        else:
            print(f"all {len(one.entries)} tensors are the same")
        if found:
            raise CommandFailure(f"{len(found)} tensors differ between {one.path} and {other.path}")


def _difference(d: Any) -> tuple[str, str, str, str]:
    if d.unequal:
        return d.name, f"{d.unequal:,}", f"{d.largest:.3g}", d.types[0]
    if None in d.types:
        which, shown = ("first", d.types[0]) if d.types[1] is None else ("second", d.types[1])
        return d.name, "", "", f"only in the {which}: {shown}"
    return d.name, "", "", f"{d.types[0]} and {d.types[1]}"


@dataclass
class CheckpointExportCommand:
    """Write the model of a checkpoint to one safetensors file, for other programs to read.

    Tensors go by their names; their dims are in the file's metadata. The optimizer's state is left out. Of a
    run of weft train it is the model that weft eval scores: the running mean, if there is one."""

    folder: FolderArgument
    """Where the checkpoints of a run are."""
    file: Annotated[Positional[Path], arg(metavar="FILE.safetensors")]
    """What to write. It appears when it is whole."""
    step: Annotated[int | None, arg(metavar="N", help_behavior_hint="")] = None
    """Of which step; by default the last one."""

    def run(self) -> None:
        from ..checkpoint.inspect import open_checkpoint
        from ..train.safetensors import export_safetensors

        _check_name(self.file)
        check_output_path(self.file)
        found = open_checkpoint(*_at(self.folder, self.step))
        with report_write_errors(self.file):
            count = export_safetensors(found, self.file)
        print(f"{count} tensors", file=sys.stderr)
        print(self.file)


@dataclass
class CheckpointImportCommand:
    """Make a checkpoint of a file that weft checkpoint export wrote, to start a run from.

    weft train --folder RUN begins with the model in RUN/checkpoints if that was imported as step 0."""

    file: Annotated[Positional[Path], arg(metavar="FILE.safetensors")]
    """What to read."""
    folder: FolderArgument
    """Where the checkpoint goes, or the folder of a run that has some; it is made if need be."""
    step: Annotated[int, arg(metavar="N")]
    """Which step it is to be of."""

    def run(self) -> None:
        from ..checkpoint.manifest import step_folder
        from ..train.safetensors import import_safetensors

        _check_name(self.file)
        if self.step < 0:
            raise UsageError(
                f"--step {self.step} is not a number of steps",
                rule="a checkpoint is called by its step, a whole number from 0 on",
                hint="--step 0, to start a run from it",
            )
        folder = _of_run(self.folder)
        count = import_safetensors(self.file, folder, self.step)
        print(f"{count} tensors", file=sys.stderr)
        print(step_folder(folder, self.step))


@dataclass
class CheckpointCommand:
    """The checkpoints of a run: what is there, what is in one, how two differ; to and from safetensors."""

    do: (
        Annotated[CheckpointListCommand, tyro.conf.subcommand("list")]
        | Annotated[CheckpointInspectCommand, tyro.conf.subcommand("inspect")]
        | Annotated[CheckpointDiffCommand, tyro.conf.subcommand("diff")]
        | Annotated[CheckpointExportCommand, tyro.conf.subcommand("export")]
        | Annotated[CheckpointImportCommand, tyro.conf.subcommand("import")]
    )

    def run(self) -> None:
        import jax

        jax.config.update("jax_platforms", "cpu")  # files are looked at: no device is needed for that
        self.do.run()


def _at(given: Path, step: int | None = None) -> tuple[Path, int | None]:
    """FOLDER@STEP as a folder and a step."""
    folder, at, number = str(given).rpartition("@")
    if given.exists() or not at or not number.isdecimal():
        return _of_run(given), step
    if step is not None and step != int(number):
        raise UsageError(f"{given} and --step {step}", rule="these are two steps", hint="give one of them")
    return _of_run(Path(folder)), int(number)


def _of_run(folder: Path) -> Path:
    """A folder of checkpoints, also where the folder of a run is given that has them in one of its own."""
    from ..checkpoint.manifest import CHECKPOINTS_FOLDER, list_step_folders

    inner = folder / CHECKPOINTS_FOLDER
    return inner if inner.is_dir() and not list_step_folders(folder) else folder


def _check_name(file: Path) -> None:
    if file.suffix != ".safetensors":
        raise UsageError(
            f"{file} is not called .safetensors",
            rule="a model is written to, and read from, one safetensors file",
            hint=str(file.with_suffix(".safetensors")),
        )


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def _print(data: Any) -> None:
    from ..train.plain_json import plain_json

    print(plain_json(data, indent=1))
