"""`weft plan`: what a program will do and cost, before it runs."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional, arg

from .output_files import check_output_path, terminal_width, write_output
from .preset_targets import load_plan_target
from .targets import CommandFailure, UsageError, user_code, virtual_devices


@dataclass
class PlanCommand:
    """What a program will do and cost on each device: work, collectives, memory and time. Nothing is run, and
    the mesh needs no devices.

    FN is a function without arguments in FILE.py. It returns the function to plan and a tuple of its
    arguments; these may be specs, which have dims but no values:

        def example():
            return step, (params, wf.spec([batch, length], "int32"))

    Then

        weft plan train.py:example --mesh "data=4 model=2" --layout "batch:data d_ff:model" --hardware tpu-v4

    If what FN returns is a program already (wf.spmd), its own mesh and layout are the default,
    for each of --mesh, --layout, --params and --optimizer that is left out.

    A known model goes by its name (weft models lists them), --train with an optimizer, else its logits:

        weft plan lm-4.9b --train adafactor --mesh "data=16 model=32" --layout "batch:data vocab:model
          d_ff:model heads:model" --hardware tpu-v2"""

    target: Annotated[Positional[str], arg(metavar="FILE.py:FN|PRESET")]
    """The Python file, and the function in it that returns what to plan; or a known model."""
    mesh: Annotated[str | None, arg(metavar="AXES", help_behavior_hint="")] = None
    """The processor mesh, "data=4 model=2". By default one device."""
    layout: Annotated[str | None, arg(metavar="RULES", help_behavior_hint="")] = None
    """Which dims are split over which axes, "batch:data d_ff:model". By default none."""
    params: Annotated[str | None, arg(metavar="RULES", help_behavior_hint="")] = None
    """Further rules for stored parameters, "d_model:data" (ZeRO-3)."""
    optimizer: Annotated[str | None, arg(metavar="RULES", help_behavior_hint="")] = None
    """Further rules for the optimizer's state; by default those of --params."""
    hardware: Annotated[str | None, arg(metavar="NAME", help_behavior_hint="")] = None
    """Predict the time on this machine: a name of `weft hardware list`, or a TOML file."""
    train: Annotated[str | None, arg(metavar="OPTIMIZER", help_behavior_hint="")] = None
    """Plan a preset's train step: adafactor, adamw, lion, momentum or sgd."""
    batch: Annotated[int | None, arg(metavar="ROWS", help_behavior_hint="")] = None
    """Rows in a preset's batch; by default those it is trained with."""
    length: Annotated[int | None, arg(metavar="LENGTH", help_behavior_hint="")] = None
    """Positions in a row of a preset's batch."""
    json: Annotated[bool, arg(help_behavior_hint="")] = False
    """Print JSON instead of text."""
    html: Annotated[Path | None, arg(metavar="OUT", help_behavior_hint="")] = None
    """Also write one self-contained page to this file."""
    diff: Annotated[tuple[str, ...] | None, arg(metavar="MESH LAYOUT", help_behavior_hint="")] = None
    """Print what this second mesh and layout does differently."""
    check: Annotated[Path | None, arg(metavar="GOLDEN", help_behavior_hint="")] = None
    """Compare with a plan that --json printed before: exit 1, and the difference, if it has changed."""
    compile: Annotated[bool, arg(help_behavior_hint="")] = False
    """Compile for virtual CPU devices too, and print XLA's own memory beside ours."""

    def run(self) -> None:
        """Plan, and print or write the plan."""
        asked = [self.json, self.diff is not None, self.check is not None, self.compile]
        if sum(asked) > 1:
            raise UsageError(
                "--json, --diff, --check and --compile are different outputs",
                hint="ask for one of them",
            )
        if self.diff is not None and len(self.diff) != 2:
            raise UsageError(
                f"--diff has {len(self.diff)} values, not 2: {', '.join(map(repr, self.diff)) or 'none'}",
                rule="a second plan has a mesh and a layout of its own, each in quotes",
                hint='--diff "data=4 model=2" "batch:data d_ff:model"; the layout "" splits nothing',
            )
        golden = _stored(self.check) if self.check is not None else None
        if self.html is not None:
            check_output_path(self.html)
        # Planning needs no devices: leave those of this machine to whoever is using them.
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        from ..hardware.profile import Hardware

        machine = Hardware.of(self.hardware) if self.hardware else None
        if self.compile:
            virtual_devices(self.mesh)
        fn, args = load_plan_target(self.target, self.train, self.batch, self.length)
        program = self._program(fn, self.mesh, self.layout)
        plan = self._planned(program, args)
        if self.html is not None:
            write_output(self.html, plan.to_html(machine))
            print(f"wrote {self.html}", file=sys.stderr)
        if golden is not None:
            _check(golden, plan, self.check)
        elif self.compile:
            print(_beside_xla(program, args, plan))
        elif self.json:
            print(_as_json(plan, machine))
        elif self.diff is not None:
            print(plan.diff(self._planned(self._program(fn, *self.diff), args)), end="")
        else:
            print(plan.explain(machine, terminal_width()), end="")

    def _program(self, fn: Any, mesh: Any, layout: str | None) -> Any:
        from ..core.program import Program, spmd
        from ..models.checked_layout import CheckedLayout

        if not isinstance(fn, Program):
            return spmd(fn, mesh, CheckedLayout(layout or "", params=self.params, optimizer=self.optimizer))
        rules = _with_own(fn.layout, layout, self.params, self.optimizer)
        return spmd(fn.fn, fn.mesh if mesh is None else mesh, rules, static=fn.static, donate=fn.donate)

    def _planned(self, program: Any, args: tuple[Any, ...]) -> Any:
        name = getattr(program.fn, "__name__", "the function")
        with user_code(f"{name} of {self.target} failed while it was traced"):
            return program.plan(*args)


def _with_own(own: Any, rules: Any, params: Any, optimizer: Any) -> Any:
    """A layout of the rules that are given, and of a program's own where they are None."""
    from ..core.layout import ROLES
    from ..models.checked_layout import CheckedLayout

    base, stored, state = map(own.rules_for, ROLES)
    further = [{n: axes for n, axes in more.items() if base.get(n) != axes} for more in (stored, state)]
    rules = base if rules is None else rules
    params = further[0] if params is None else params
    if optimizer is None and state != stored:  # if they are the same, it goes on having those of params
        optimizer = further[1]
    return CheckedLayout(rules, params=params, optimizer=optimizer)


def _stored(path: Path) -> dict[str, Any]:
    """A plan that was stored as JSON."""
    import json

    hint = "make it with weft plan … --json"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"can't read {path}: {error.strerror}", hint=hint) from None
    except ValueError as error:
        raise UsageError(f"{path} is not JSON: {error}", hint=hint) from None
    if not isinstance(data, dict) or "version" not in data:
        raise UsageError(f"{path} is not a plan", hint=hint)
    return data


def _check(golden: dict[str, Any], plan: Any, path: Path | None) -> None:
    import json

    from ..plan.diff import golden_changes

    found = golden_changes(golden, json.loads(plan.to_json()))
    if found:
        raise CommandFailure(f"the plan differs from {path}\n  " + "\n  ".join(found))
    print(f"the plan is that of {path}", file=sys.stderr)


def _beside_xla(program: Any, args: tuple[Any, ...], plan: Any) -> str:
    from ..plan.units import human_bytes

    found = program.compile(*args).memory_analysis()
    parts = {
        "arguments": found.argument_size_in_bytes,
        "results": found.output_size_in_bytes,
        "temporaries": found.temp_size_in_bytes,
        "results in donated arguments": -found.alias_size_in_bytes,
    }
    total = sum(parts.values())
    lines = [f"  {name}: {human_bytes(size)}" for name, size in parts.items()]
    return "\n".join(
        [f"XLA on virtual CPU devices: {human_bytes(total)} on each device", *lines]
        + [f"planned: {human_bytes(plan.memory.peak)} ({plan.memory.peak / total:.2f} of it)"]
    )


def _as_json(plan: Any, machine: Any) -> str:
    import json

    data = plan.to_data()
    if machine is not None:
        data["time"] = plan.time(machine).to_data()
    return json.dumps(data, indent=1)
