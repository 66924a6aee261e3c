"""`weft search`: find the best mesh and layout for a program on given hardware."""

from __future__ import annotations

import dataclasses
import itertools
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional, arg

from ..core.field_types import PositiveInt
from .flag_errors import naming_flags, validate_flags
from .output_files import check_output_path, write_output
from .preset_targets import is_preset, load_plan_target
from .targets import CommandFailure, UsageError, user_code

if TYPE_CHECKING:
    from ..autolayout.results import RankedLayout
    from ..core.program import Program
    from ..hardware.profile import Hardware

UNITS = {"GiB": 2**30, "MiB": 2**20, "GB": 10**9, "MB": 10**6}
MIN_BYTES = 2**20  # a smaller --memory means that the unit was forgotten


@dataclass
class SearchCommand:
    """Find the mesh and layout with the lowest predicted time that fits into memory. Nothing runs, and no
    devices are needed.

        weft search lm-4.9b --train adafactor --devices 512 --hardware tpu-v2
        weft search train.py:example --devices 8 --hardware a100 --compare "batch:data d_ff:model"

    A known model is given by its name (see weft models); FILE.py:FN is as for weft plan. The search covers
    all meshes of N devices with all legal layouts, and the sharding of stored parameters and optimizer state
    (ZeRO). It computes a lower bound for each candidate and plans those that could beat the best so far: the
    printed costs are those of weft plan."""

    target: Annotated[Positional[str], arg(metavar="FILE.py:FN|PRESET")]
    """A Python file and a function in it that returns the program, or the name of a known model."""
    devices: Annotated[int | None, arg(metavar="N", help_behavior_hint="")] = None
    """The number of devices."""
    hardware: Annotated[str | None, arg(metavar="NAME", help_behavior_hint="")] = None
    """The hardware: a name from `weft hardware list`, or a TOML file."""
    mesh: Annotated[str | None, arg(metavar="AXES", help_behavior_hint="")] = None
    """Search only this mesh, such as "data=64 model=8", instead of --devices."""
    axes: Annotated[int, arg(help_behavior_hint="")] = 2
    """The maximum number of mesh axes, 1 to 3."""
    dims: Annotated[tuple[str, ...], arg(metavar="DIM", help_behavior_hint="")] = ()
    """The dims to try to split, such as batch d_ff heads (default: all dims that matter for the cost)."""
    stored: Annotated[bool, arg(help_behavior_hint="")] = True
    """Don't try sharding stored parameters and optimizer state (ZeRO)."""  # the help of --no-stored
    memory: Annotated[str | None, arg(metavar="SIZE", help_behavior_hint="")] = None
    """The memory limit per device, such as "6GiB" (default: the device's memory)."""
    objective: Annotated[str, arg(help_behavior_hint="")] = "time"
    """What to minimize: time or memory."""
    train: Annotated[str | None, arg(metavar="OPTIMIZER", help_behavior_hint="")] = None
    """Search for a preset's train step: adafactor, adamw, lion, momentum or sgd."""
    batch: Annotated[int | None, arg(metavar="ROWS", help_behavior_hint="")] = None
    """Rows in a preset's batch (default: the preset's training batch)."""
    length: Annotated[int | None, arg(metavar="LENGTH", help_behavior_hint="")] = None
    """Sequence length of a preset's batch."""
    remat: Annotated[tuple[str, ...], arg(metavar="POLICY", help_behavior_hint="")] = ()
    """With --train: remat policies to try, besides saving everything: nothing, dots, sums."""
    micro: Annotated[tuple[PositiveInt, ...], arg(metavar="N", help_behavior_hint="")] = ()
    """With --train: numbers of micro-batches (gradient accumulation) to try, besides 1."""
    pipeline: Annotated[tuple[str, ...], arg(metavar="SCHEDULE", help_behavior_hint="")] = ()
    """With --train: pipeline schedules to try, besides gpipe, where layers are split: 1f1b."""
    pipeline_micro: Annotated[tuple[PositiveInt, ...], arg(metavar="N", help_behavior_hint="")] = ()
    """With --train: numbers of pipeline micro-batches to try, besides the default."""
    top: Annotated[int, arg(help_behavior_hint="")] = 1
    """The number of top candidates that are guaranteed to be the best."""
    front: Annotated[bool, arg(help_behavior_hint="")] = False
    """Also find the Pareto front of time and memory."""
    compare: Annotated[str | None, arg(metavar="RULES", help_behavior_hint="")] = None
    """Explain why the best is better than this layout, "batch:data d_ff:model", on its best mesh."""
    json: Annotated[bool, arg(help_behavior_hint="")] = False
    """Print JSON instead of text."""
    html: Annotated[Path | None, arg(metavar="OUT", help_behavior_hint="")] = None
    """Also write a self-contained HTML page to this file."""

    def run(self) -> None:
        """Search, and print or write the result."""
        if self.devices is not None and self.mesh is not None:
            raise UsageError(
                f"--devices {self.devices} and --mesh {self.mesh!r}",
                rule="a search covers either all meshes of N devices or a single mesh",
                hint="omit one of them",
            )
        missing = ["--hardware"] if self.hardware is None else []
        missing += ["--devices or --mesh"] if self.devices is None and self.mesh is None else []
        if self.hardware is None or missing:
            raise UsageError(
                f"weft search {self.target} needs {', and '.join(missing)}",
                rule="a search is for given hardware, and for a number of devices or a single mesh",
                hint="weft search lm-4.9b --train adafactor --devices 512 --hardware tpu-v2",
            )
        cap = _parse_bytes(self.memory) if self.memory is not None else None
        validate_flags(self)
        os.environ.setdefault("JAX_PLATFORMS", "cpu")  # planning needs no devices
        from ..autolayout import search
        from ..autolayout.ranking import check_arguments
        from ..hardware.profile import Hardware

        with naming_flags():
            devices = {} if self.devices is None else {"devices": self.devices}
            check_arguments(**devices, axes=self.axes, objective=self.objective, top=self.top, memory=cap)
        if self.html is not None:
            check_output_path(self.html)
        profile = Hardware.of(self.hardware)
        fn, args = load_plan_target(self.target, self.train, self.batch, self.length)
        with user_code(f"tracing {self.target} failed"):
            # First, so that an error in the rules is reported before the search.
            other = self._plan_compared(fn, args, profile, cap) if self.compare is not None else None
            found = search(
                fn,
                args,
                devices=self.devices,
                hardware=profile,
                mesh=self.mesh,
                memory=cap,
                axes=self.axes,
                dims=self.dims or None,
                stored=self.stored,
                objective=self.objective,
                variants=self._variants(fn, args),
                top=self.top,
                front=self.front,
                progress=_progress if sys.stderr.isatty() else None,
            )
        if sys.stderr.isatty():
            print("\r\033[K", end="", file=sys.stderr)
        if self.html is not None:
            write_output(self.html, found.to_html(other))
            print(f"wrote {self.html}", file=sys.stderr)
        if self.json:
            import json

            print(json.dumps(found.to_data(other), indent=1))
        else:
            print(found.explain(other), end="")
            if found.best is not None and self.train is not None:
                print(f"\nto train with it: {_train_flags(found.best) or 'no flags needed'}")
        if found.best is None:
            raise CommandFailure(self._suggest_memory_savings(fn, args, profile, cap))

    def _variants(self, fn: Any, args: tuple[Any, ...]) -> dict[str, tuple[Any, ...]]:
        """The same step with other remat policies, micro-batches and pipeline schedules."""
        settings = ["remat", "micro", "pipeline", "pipeline_micro"]
        if not any(getattr(self, name) for name in settings):
            return {}
        if self.train is None or not is_preset(self.target):
            given = [f"--{name.replace('_', '-')}" for name in settings if getattr(self, name)]
            raise UsageError(
                f"{' and '.join(given)} without the train step of a preset",
                rule="these flags change a preset's train step",
                hint=f"weft search lm-4.9b --train adafactor {given[0]} … --devices 512 --hardware tpu-v2",
            )
        from .. import nn
        from ..autolayout.space import TrainVariant
        from ..core.program import spmd
        from ..models import Transformer
        from ..train import train_step

        def variant(micro: int, **changes: str | int | None) -> tuple[Program, tuple[Any, ...]]:
            model = nn.specs(Transformer(args[0].config.replace(**changes)))
            return spmd(train_step(fn.fn.optimizer, micro=micro), donate=(0, 1)), (model, *args[1:])

        found: dict[str, tuple[Any, ...]] = {}
        for policy in (None, *self.remat):
            for micro in (1, *self.micro):
                flags = {"--model.remat": policy, "--optimizer.micro": micro if micro > 1 else None}
                if name := TrainVariant.of(flags):
                    found[name] = variant(micro, remat=policy)
        for schedule in ("gpipe", *self.pipeline):
            for count in (None, *self.pipeline_micro):
                changed = schedule if schedule != "gpipe" else None
                flags = {"--model.pipeline": changed, "--model.pipeline-micro": count}
                if name := TrainVariant.of(flags):
                    program = variant(1, pipeline=schedule, pipeline_micro=count)
                    found[name] = *program, "layers"
        return found

    def _plan_compared(
        self, fn: Callable[..., Any], args: tuple[Any, ...], profile: Hardware, cap: int | None
    ) -> RankedLayout:
        """Plan the rules of --compare on the best mesh for them."""
        from ..autolayout.results import RankedLayout
        from ..autolayout.space import Candidate, mesh_shapes
        from ..autolayout.universal_trace import program_on
        from ..core.mesh import Mesh
        from ..models.checked_layout import CheckedLayout

        assert self.compare is not None
        layout = CheckedLayout(self.compare)
        axes = list(dict.fromkeys(axis for names in layout.rules_for().values() for axis in names))
        if self.mesh is not None:
            meshes = [Mesh(self.mesh)]
        else:
            assert self.devices is not None
            axes = axes or ["data"]  # no dim is split
            every = mesh_shapes(self.devices, len(axes)) if self.devices > 0 else [()]
            most = max(map(len, every))  # 1 for a prime number: the other axes get size 1
            padded = [(*one, *[1] * (len(axes) - most)) for one in every if len(one) == most]
            sizes = sorted({order for one in padded for order in itertools.permutations(one)})
            meshes = [Mesh(list(zip(axes, one, strict=True))) for one in sizes]
        planned = []
        for mesh in meshes:
            plan = program_on(fn, mesh, layout).plan(*args)
            groups = tuple(
                frozenset(d for d, names in layout.rules_for().items() if axis in names)
                for axis in mesh.names
            )
            candidate = Candidate(tuple(n for _, n in mesh.axes), groups, axes=mesh.names)
            planned.append(RankedLayout(candidate, plan, plan.time(profile), 0.0))
        fitting = [one for one in planned if one.bytes <= (cap or profile.memory_bytes)] or planned
        return min(fitting, key=lambda one: one.seconds)

    def _suggest_memory_savings(
        self, fn: Callable[..., Any], args: tuple[Any, ...], profile: Hardware, cap: int | None
    ) -> str:
        """Which changes would make the program fit."""
        from ..autolayout import search
        from ..core.errors import ShapeError
        from ..plan.units import human_bytes

        tries: dict[str, SearchCommand] = {}
        if self.devices is not None:
            tries[f"{2 * self.devices} devices"] = dataclasses.replace(self, devices=2 * self.devices)
        if self.train is not None and not self.remat:
            tries["--remat nothing"] = dataclasses.replace(self, remat=("nothing",))
        if self.train is not None and not self.micro:
            tries["--micro 4"] = dataclasses.replace(self, micro=(4,))
        lines = ["nothing fits; these changes would help:"]
        for name, one in tries.items():
            try:
                best = search(
                    fn,
                    args,
                    devices=one.devices,
                    mesh=self.mesh,
                    hardware=profile,
                    memory=sys.maxsize,
                    axes=self.axes,
                    dims=self.dims or None,
                    stored=self.stored,
                    objective="memory",
                    variants=one._variants(fn, args),
                ).best
            except ShapeError:  # the batch can't be split this way
                continue
            if best is not None:
                fits = "fits" if best.bytes <= (cap or profile.memory_bytes) else "still too much"
                lines.append(f"  {name}: at least {human_bytes(best.bytes)} ({fits})")
        if len(lines) == 1:
            return (
                "nothing fits, and none of the changes tried would help\n\nhint: use a smaller model or batch"
            )
        return "\n".join(lines)


def _train_flags(best: RankedLayout) -> str:
    """The equivalent flags of `weft train`, with --mesh and --layout in their short forms."""
    from ..autolayout.report import train_flags

    return train_flags(best).replace("--layout.mesh ", "--mesh ").replace("--layout.rules ", "--layout ")


def _progress(planned: int, best: RankedLayout | None) -> None:
    from ..plan.units import human_seconds

    so_far = f", best so far {human_seconds(best.seconds)}" if best is not None else ""
    print(f"\r\033[K{planned} planned{so_far}", end="", file=sys.stderr, flush=True)


def _parse_bytes(text: str) -> int:
    """Parse a size such as `6GiB`."""
    for unit, size in UNITS.items():
        number = text.removesuffix(unit).strip()
        if text.endswith(unit) and number.replace(".", "", 1).isdecimal():
            return int(float(number) * size)
    if text.isdecimal() and 0 < int(text) < MIN_BYTES:
        raise UsageError(
            f"--memory {text} is {text} bytes",
            rule=f"the default unit is bytes, and a device has more; the units are {', '.join(UNITS)}",
            hint=f"--memory {text}GiB",
        )
    if text.isdecimal():
        return int(text)
    raise UsageError(
        f"--memory {text} is not a size",
        rule=f"a size is a number of bytes, or a number followed by one of {', '.join(UNITS)}",
        hint="--memory 6GiB",
    )
