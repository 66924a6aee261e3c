"""`weft search`: the best mesh and layout for a program and a machine."""

from __future__ import annotations

import dataclasses
import itertools
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional, arg

from ..core.errors import nearest
from .output_files import check_output_path, write_output
from .preset_targets import is_preset, load_plan_target
from .targets import CommandFailure, UsageError, user_code

UNITS = {"GiB": 2**30, "MiB": 2**20, "GB": 10**9, "MB": 10**6}
MIN_BYTES = 2**20  # bytes: where less is said, the unit was forgotten


@dataclass
class SearchCommand:
    """The best mesh and layout for a program and a machine: the least predicted time that fits the memory.
    Nothing is run, and no devices are needed.

        weft search lm-4.9b --train adafactor --devices 512 --hardware tpu-v2
        weft search train.py:example --devices 8 --hardware a100 --compare "batch:data d_ff:model"

    A model goes by its name (weft models lists them); FILE.py:FN is as for weft plan. All meshes of so many
    devices are tried, with all legal layouts; and, where there are parameters and optimizer state, storing
    these in further pieces (ZeRO). For each a lower bound is known at once, and what could be better than the
    best is planned: what is printed is what weft plan says."""

    target: Annotated[Positional[str], arg(metavar="FILE.py:FN|PRESET")]
    """The Python file, and the function in it that returns what to search for; or a known model."""
    devices: Annotated[int | None, arg(metavar="N", help_behavior_hint="")] = None
    """How many devices there are."""
    hardware: Annotated[str | None, arg(metavar="NAME", help_behavior_hint="")] = None
    """The machine: a name of `weft hardware list`, or a TOML file."""
    mesh: Annotated[str | None, arg(metavar="AXES", help_behavior_hint="")] = None
    """Only this mesh, "data=64 model=8", in place of --devices."""
    axes: Annotated[int, arg(help_behavior_hint="")] = 2
    """How many axes a mesh may have, 1 to 3."""
    dims: Annotated[tuple[str, ...], arg(metavar="DIM", help_behavior_hint="")] = ()
    """The only dims to try to split, batch d_ff heads; by default all that something of weight has."""
    stored: Annotated[bool, arg(help_behavior_hint="")] = True
    """Do not try storing parameters and optimizer state in further pieces (ZeRO)."""  # of --no-stored
    memory: Annotated[str | None, arg(metavar="SIZE", help_behavior_hint="")] = None
    """What a device may use, "6GiB"; by default all that it has."""
    objective: Annotated[str, arg(help_behavior_hint="")] = "time"
    """What is to be least: time, or memory."""
    train: Annotated[str | None, arg(metavar="OPTIMIZER", help_behavior_hint="")] = None
    """A preset's train step: adafactor, adamw, lion, momentum or sgd."""
    batch: Annotated[int | None, arg(metavar="ROWS", help_behavior_hint="")] = None
    """Rows in a preset's batch; by default those it is trained with."""
    length: Annotated[int | None, arg(metavar="LENGTH", help_behavior_hint="")] = None
    """Positions in a row of a preset's batch."""
    remat: Annotated[tuple[str, ...], arg(metavar="POLICY", help_behavior_hint="")] = ()
    """With --train: policies of re-materialisation to try beside keeping everything: nothing, dots, sums."""
    micro: Annotated[tuple[int, ...], arg(metavar="N", help_behavior_hint="")] = ()
    """With --train: in how many parts to try computing a batch, beside one."""
    pipeline: Annotated[tuple[str, ...], arg(metavar="SCHEDULE", help_behavior_hint="")] = ()
    """With --train: schedules to try, beside gpipe, where layers are split: 1f1b."""
    pipeline_micro: Annotated[tuple[int, ...], arg(metavar="N", help_behavior_hint="")] = ()
    """With --train: numbers of micro-batches to try where layers are split, beside the usual one."""
    top: Annotated[int, arg(help_behavior_hint="")] = 1
    """How many of the best are to be found for certain."""
    front: Annotated[bool, arg(help_behavior_hint="")] = False
    """Find also what is fastest with less and less memory."""
    compare: Annotated[str | None, arg(metavar="RULES", help_behavior_hint="")] = None
    """Say why the best is better than these rules, "batch:data d_ff:model", on the best mesh for them."""
    json: Annotated[bool, arg(help_behavior_hint="")] = False
    """Print JSON instead of text."""
    html: Annotated[Path | None, arg(metavar="OUT", help_behavior_hint="")] = None
    """Also write one self-contained page to this file."""

    def run(self) -> None:
        """Search, and print or write what was found."""
        if self.devices is not None and self.mesh is not None:
            raise UsageError(
                f"--devices {self.devices} and --mesh {self.mesh!r}",
                rule="a search is over all meshes of so many devices, or for one mesh",
                hint="leave one of them out",
            )
        missing = ["--hardware"] if self.hardware is None else []
        missing += ["--devices or --mesh"] if self.devices is None and self.mesh is None else []
        if self.hardware is None or missing:
            raise UsageError(
                f"weft search {self.target} without {', and without '.join(missing)}",
                rule="a search is for one machine, and for so many devices or one mesh",
                hint="weft search lm-4.9b --train adafactor --devices 512 --hardware tpu-v2",
            )
        cap = _bytes(self.memory) if self.memory is not None else None
        self._check_numbers(cap)
        if self.html is not None:
            check_output_path(self.html)
        os.environ.setdefault("JAX_PLATFORMS", "cpu")  # planning needs no devices
        from ..autolayout import search
        from ..autolayout.ranking import OBJECTIVES
        from ..hardware.profile import Hardware

        if self.objective not in OBJECTIVES:
            raise UsageError(
                f"--objective {self.objective}{nearest(self.objective, OBJECTIVES)}",
                rule=f"what is to be least is one of {', '.join(OBJECTIVES)}",
                hint="leave it out: it is time by default",
            )
        machine = Hardware.of(self.hardware)
        fn, args = load_plan_target(self.target, self.train, self.batch, self.length)
        with user_code(f"{self.target} failed while it was traced"):
            # First of all, so that a mistake in the rules is told before the work.
            other = self._compared(fn, args, machine, cap) if self.compare is not None else None
            found = search(
                fn,
                args,
                devices=self.devices,
                hardware=machine,
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
                print(f"\nto train with it: {_train_flags(found.best) or 'no flags are needed'}")
        if found.best is None:
            raise CommandFailure(self._levers(fn, args, machine, cap))

    def _check_numbers(self, cap: int | None) -> None:
        """An error in the words of the command line, where `wf.search` would tell it in Python's."""
        rules = {
            f"--devices {self.devices}": (self.devices, None, "--devices 8"),
            f"--axes {self.axes}": (self.axes, 3, "--axes 2"),
            f"--top {self.top}": (self.top, None, "--top 1"),
            f"--memory {self.memory}": (cap, None, "--memory 6GiB"),
        }
        for flag, given in (("--micro", self.micro), ("--pipeline-micro", self.pipeline_micro)):
            rules |= {f"{flag} {one}": (one, None, f"{flag} 4") for one in given}
        wrong = {
            said: (f"{said.split()[0]} is a whole number, {f'1 to {most}' if most else 'at least 1'}", hint)
            for said, (value, most, hint) in rules.items()
            if value is not None and (value < 1 or (most is not None and value > most))
        }
        if wrong:
            told, hints = zip(*wrong.values(), strict=True)
            raise UsageError(" and ".join(wrong), rule="; ".join(told), hint=" ".join(hints))

    def _variants(self, fn: Any, args: Any) -> dict[str, tuple[Any, ...]]:
        """The same step with other remat policies, micro-batches and pipelines."""
        asked = ["remat", "micro", "pipeline", "pipeline_micro"]
        if not any(getattr(self, name) for name in asked):
            return {}
        if self.train is None or not is_preset(self.target):
            flags = [f"--{name.replace('_', '-')}" for name in asked if getattr(self, name)]
            raise UsageError(
                f"{' and '.join(flags)} with what is no train step of a preset",
                hint=f"weft search lm-4.9b --train adafactor {flags[0]} … --devices 512 --hardware tpu-v2",
            )
        from .. import nn
        from ..core.program import spmd
        from ..models import Transformer
        from ..train import train_step

        def variant(parts: int, **changes: Any) -> tuple[Any, Any]:
            model = nn.specs(Transformer(args[0].config.replace(**changes)))
            return spmd(train_step(fn.fn.optimizer, micro=parts), donate=(0, 1)), (model, *args[1:])

        found: dict[str, tuple[Any, ...]] = {}
        for policy in (None, *self.remat):
            for parts in (1, *self.micro):
                words = [f"remat {policy}"] * (policy is not None) + [f"micro {parts}"] * (parts > 1)
                if words:
                    found[", ".join(words)] = variant(parts, remat=policy)
        for schedule in ("gpipe", *self.pipeline):
            for count in (None, *self.pipeline_micro):
                words = [f"pipeline {schedule}"] * (schedule != "gpipe")
                words += [f"pipeline-micro {count}"] * (count is not None)
                if words:
                    made = variant(1, pipeline=schedule, pipeline_micro=count)
                    found[", ".join(words)] = *made, "layers"
        return found

    def _compared(self, fn: Any, args: Any, machine: Any, cap: int | None) -> Any:
        """The user's own rules on the best mesh that they can have."""
        from ..autolayout.ranking import RankedLayout
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
            axes = axes or ["data"]  # nothing split
            every = mesh_shapes(self.devices, len(axes)) if self.devices > 0 else [()]
            most = max(map(len, every))  # of a prime number it is 1: the other axes are of size 1
            padded = [(*one, *[1] * (len(axes) - most)) for one in every if len(one) == most]
            sizes = sorted({order for one in padded for order in itertools.permutations(one)})
            meshes = [Mesh(list(zip(axes, one, strict=True))) for one in sizes]
        made = []
        for mesh in meshes:
            plan = program_on(fn, mesh, layout).plan(*args)
            groups = tuple(
                frozenset(d for d, names in layout.rules_for().items() if axis in names)
                for axis in mesh.names
            )
            candidate = Candidate(tuple(n for _, n in mesh.axes), groups, axes=mesh.names)
            made.append(RankedLayout(candidate, plan, plan.time(machine), 0.0))
        fitting = [one for one in made if one.bytes <= (cap or machine.memory_bytes)] or made
        return min(fitting, key=lambda one: one.seconds)

    def _levers(self, fn: Any, args: Any, machine: Any, cap: int | None) -> str:
        """What would give the memory that is missing."""
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
        lines = ["nothing fits; what would help:"]
        for name, one in tries.items():
            try:
                best = search(
                    fn,
                    args,
                    devices=one.devices,
                    mesh=self.mesh,
                    hardware=machine,
                    memory=sys.maxsize,
                    axes=self.axes,
                    dims=self.dims or None,
                    stored=self.stored,
                    objective="memory",
                    variants=one._variants(fn, args),
                ).best
            except ShapeError:  # the rows of the batch can't be dealt out so
                continue
            if best is not None:
                fits = "fits" if best.bytes <= (cap or machine.memory_bytes) else "still too much"
                lines.append(f"  {name}: at least {human_bytes(best.bytes)} ({fits})")
        if len(lines) == 1:
            return "nothing fits, and nothing that was tried would help\n\nhint: a smaller model or batch"
        return "\n".join(lines)


def _train_flags(best: Any) -> str:
    """The flags of `weft train` that say the same, the mesh and the rules in their short forms."""
    from ..autolayout.report import train_flags

    return train_flags(best).replace("--layout.mesh ", "--mesh ").replace("--layout.rules ", "--layout ")


def _progress(planned: int, best: Any) -> None:
    from ..plan.units import human_seconds

    yet = f", the best yet {human_seconds(best.seconds)}" if best is not None else ""
    print(f"\r\033[K{planned} planned{yet}", end="", file=sys.stderr, flush=True)


def _bytes(text: str) -> int:
    """`6GiB` as a number of bytes."""
    for unit, size in UNITS.items():
        number = text.removesuffix(unit).strip()
        if text.endswith(unit) and number.replace(".", "", 1).isdecimal():
            return int(float(number) * size)
    if text.isdecimal() and 0 < int(text) < MIN_BYTES:
        raise UsageError(
            f"--memory {text} is {text} bytes",
            rule=f"without a unit it is in bytes, and a device has more; the units are {', '.join(UNITS)}",
            hint=f"--memory {text}GiB",
        )
    if text.isdecimal():
        return int(text)
    raise UsageError(
        f"--memory {text} is no size",
        rule=f"a size is a number of bytes, or a number with one of {', '.join(UNITS)}",
        hint="--memory 6GiB",
    )
