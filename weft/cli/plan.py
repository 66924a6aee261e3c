"""`weft plan`: report what a program will do and cost, before it runs."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import arg

from .compile import compile_with_progress, parse_target
from .flag_errors import validate_flags
from .output_files import check_output_path, terminal_width, write_output
from .program_flags import ProgramFlags
from .targets import CommandFailure, UsageError, virtual_devices

if TYPE_CHECKING:
    from ..core.traced import Traced
    from ..hardware.profile import Hardware
    from ..plan.plan import Plan

CPU = "cpu"  # of --compile: virtual devices of this machine


@dataclass
class PlanCommand(ProgramFlags):
    """Report what a program will do and cost on each device: work, collectives, memory and time. Nothing
    runs, and the mesh needs no devices.

    FN is a function in FILE.py that takes no arguments. It returns the function to plan and a tuple of its
    arguments, which may be specs (dims and dtype without values):

        def example():
            return step, (params, wf.spec([batch, length], "int32"))

    Then

        weft plan train.py:example --mesh "data=4 model=2" --layout "batch:data d_ff:model" --hardware tpu-v4

    If FN returns a program (wf.spmd), the program's mesh and layout are the defaults of --mesh, --layout,
    --params and --optimizer.

    To plan a known model, give its name (see weft models): its logits, or its train step with --train:

        weft plan lm-4.9b --train adafactor --mesh "data=16 model=32" --layout "batch:data vocab:model
          d_ff:model heads:model" --hardware tpu-v2"""

    hardware: Annotated[str | None, arg(metavar="NAME", help_behavior_hint="")] = None
    """Predict the time on this hardware: a name from `weft hardware list`, or a TOML file."""
    json: Annotated[bool, arg(help_behavior_hint="")] = False
    """Print JSON instead of text."""
    html: Annotated[Path | None, arg(metavar="OUT", help_behavior_hint="")] = None
    """Also write a self-contained HTML page to this file."""
    diff: Annotated[tuple[str, ...] | None, arg(metavar="MESH LAYOUT", help_behavior_hint="")] = None
    """Print how the plan changes with a second mesh and layout."""
    check: Annotated[Path | None, arg(metavar="GOLDEN", help_behavior_hint="")] = None
    """Compare with a plan printed earlier by --json; if it changed, print the changes and exit with 1."""
    compile: Annotated[str | None, arg(metavar="FOR", help_behavior_hint="")] = None
    """Also compile, and print planned next to compiled: for a TPU slice or GPUs, such as tpu-v5e:4x4 or
    h100:2x8 (see weft compile), or for "cpu", virtual devices of this machine."""

    def run(self) -> None:
        """Plan, and print or write the plan."""
        validate_flags(self)
        outputs = [self.json, self.diff is not None, self.check is not None, self.compile is not None]
        if sum(outputs) > 1:
            raise UsageError(
                "--json, --diff, --check and --compile are mutually exclusive",
                hint="use one of them",
            )
        if self.diff is not None and len(self.diff) != 2:
            raise UsageError(
                f"--diff takes 2 values, not {len(self.diff)}: {', '.join(map(repr, self.diff)) or 'none'}",
                rule="the values are the mesh and the layout of a second plan, each in quotes",
                hint='--diff "data=4 model=2" "batch:data d_ff:model"; the layout "" splits nothing',
            )
        golden = _read_golden(self.check) if self.check is not None else None
        if self.html is not None:
            check_output_path(self.html)
        # Planning needs no devices: do not claim an accelerator that another process may be using.
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        from ..hardware.profile import Hardware

        profile = Hardware.of(self.hardware) if self.hardware else None
        if self.compile == CPU:
            virtual_devices(self.mesh)
        target = parse_target(self.compile) if self.compile not in (None, CPU) else None
        fn, args = self.load()
        program = self.stage(fn, self.mesh, self.layout)
        traced = self.trace(program, args)
        plan = traced.plan()
        if self.html is not None:
            write_output(self.html, plan.to_html(profile))
            print(f"wrote {self.html}", file=sys.stderr)
        if golden is not None:
            _check_golden(golden, plan, self.check)
        elif target is not None:
            print(plan.diff(compile_with_progress(traced, target)), end="")
        elif self.compile == CPU:
            print(_compare_with_xla(traced, plan))
        elif self.json:
            print(_to_json(plan, profile))
        elif self.diff is not None:
            print(plan.diff(self.trace(self.stage(fn, *self.diff), args).plan()), end="")
        else:
            print(plan.explain(profile, terminal_width()), end="")


def _read_golden(path: Path) -> dict[str, Any]:
    """Read a plan in JSON."""
    import json

    hint = "create it with weft plan … --json"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"can't read {path}: {error.strerror}", hint=hint) from None
    except ValueError as error:
        raise UsageError(f"{path} is not JSON: {error}", hint=hint) from None
    if not isinstance(data, dict) or "version" not in data:
        raise UsageError(f"{path} is not a plan", hint=hint)
    return data


def _check_golden(golden: dict[str, Any], plan: Plan, path: Path | None) -> None:
    import json

    from ..plan.diff import golden_changes

    found = golden_changes(golden, json.loads(plan.to_json()))
    if found:
        raise CommandFailure(f"the plan differs from {path}\n  " + "\n  ".join(found))
    print(f"the plan equals {path}", file=sys.stderr)


def _compare_with_xla(traced: Traced, plan: Plan) -> str:
    from ..plan.units import human_bytes

    found = traced.lower().compile().memory_analysis()
    parts = {
        "arguments": found.argument_size_in_bytes,
        "results": found.output_size_in_bytes,
        "temporaries": found.temp_size_in_bytes,
        "results in donated arguments": -found.alias_size_in_bytes,
    }
    total = sum(parts.values())
    lines = [f"  {name}: {human_bytes(size)}" for name, size in parts.items()]
    return "\n".join(
        [f"XLA on virtual CPU devices: {human_bytes(total)} per device", *lines]
        + [f"planned: {human_bytes(plan.memory.peak)} ({plan.memory.peak / total:.2f} of XLA's)"]
    )


def _to_json(plan: Plan, profile: Hardware | None) -> str:
    import json

    data = plan.to_data()
    if profile is not None:
        data["time"] = plan.time(profile).to_data()
    return json.dumps(data, indent=1)
