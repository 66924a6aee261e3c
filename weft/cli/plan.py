"""`weft plan`: report what a program will do and cost, before it runs."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional, arg

from ..core.field_types import PositiveInt
from .flag_errors import validate_flags
from .output_files import check_output_path, terminal_width, write_output
from .preset_targets import load_plan_target
from .targets import CommandFailure, UsageError, user_code, virtual_devices

if TYPE_CHECKING:
    from ..core.layout import Layout
    from ..core.program import Program
    from ..hardware.profile import Hardware
    from ..plan.plan import Plan


@dataclass
class PlanCommand:
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

    target: Annotated[Positional[str], arg(metavar="FILE.py:FN|PRESET")]
    """A Python file and a function in it that returns what to plan, or the name of a known model."""
    mesh: Annotated[str | None, arg(metavar="AXES", help_behavior_hint="")] = None
    """The device mesh, such as "data=4 model=2" (default: one device)."""
    layout: Annotated[str | None, arg(metavar="RULES", help_behavior_hint="")] = None
    """Which dims are split over which axes, such as "batch:data d_ff:model" (default: none)."""
    params: Annotated[str | None, arg(metavar="RULES", help_behavior_hint="")] = None
    """Additional rules for stored parameters, such as "d_model:data" (ZeRO-3)."""
    optimizer: Annotated[str | None, arg(metavar="RULES", help_behavior_hint="")] = None
    """Additional rules for the optimizer state (default: those of --params)."""
    hardware: Annotated[str | None, arg(metavar="NAME", help_behavior_hint="")] = None
    """Predict the time on this hardware: a name from `weft hardware list`, or a TOML file."""
    train: Annotated[str | None, arg(metavar="OPTIMIZER", help_behavior_hint="")] = None
    """Plan a preset's train step: adafactor, adamw, lion, momentum or sgd."""
    batch: Annotated[PositiveInt | None, arg(metavar="ROWS", help_behavior_hint="")] = None
    """Rows in a preset's batch (default: the preset's training batch)."""
    length: Annotated[PositiveInt | None, arg(metavar="LENGTH", help_behavior_hint="")] = None
    """Sequence length of a preset's batch."""
    json: Annotated[bool, arg(help_behavior_hint="")] = False
    """Print JSON instead of text."""
    html: Annotated[Path | None, arg(metavar="OUT", help_behavior_hint="")] = None
    """Also write a self-contained HTML page to this file."""
    diff: Annotated[tuple[str, ...] | None, arg(metavar="MESH LAYOUT", help_behavior_hint="")] = None
    """Print how the plan changes with a second mesh and layout."""
    check: Annotated[Path | None, arg(metavar="GOLDEN", help_behavior_hint="")] = None
    """Compare with a plan printed earlier by --json; if it changed, print the changes and exit with 1."""
    compile: Annotated[bool, arg(help_behavior_hint="")] = False
    """Also compile for virtual CPU devices, and print XLA's memory next to the planned memory."""

    def run(self) -> None:
        """Plan, and print or write the plan."""
        validate_flags(self)
        outputs = [self.json, self.diff is not None, self.check is not None, self.compile]
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
        if self.compile:
            virtual_devices(self.mesh)
        fn, args = load_plan_target(self.target, self.train, self.batch, self.length)
        program = self._program(fn, self.mesh, self.layout)
        plan = self._plan(program, args)
        if self.html is not None:
            write_output(self.html, plan.to_html(profile))
            print(f"wrote {self.html}", file=sys.stderr)
        if golden is not None:
            _check_golden(golden, plan, self.check)
        elif self.compile:
            print(_compare_with_xla(program, args, plan))
        elif self.json:
            print(_to_json(plan, profile))
        elif self.diff is not None:
            print(plan.diff(self._plan(self._program(fn, *self.diff), args)), end="")
        else:
            print(plan.explain(profile, terminal_width()), end="")

    def _program(self, fn: Callable[..., Any], mesh: str | None, layout: str | None) -> Program:
        from ..core.program import Program, spmd
        from ..models.checked_layout import CheckedLayout

        if not isinstance(fn, Program):
            return spmd(fn, mesh, CheckedLayout(layout or "", params=self.params, optimizer=self.optimizer))
        rules = _override_layout(fn.layout, layout, self.params, self.optimizer)
        return spmd(fn.fn, fn.mesh if mesh is None else mesh, rules, static=fn.static, donate=fn.donate)

    def _plan(self, program: Program, args: tuple[Any, ...]) -> Plan:
        name = getattr(program.fn, "__name__", "the function")
        with user_code(f"tracing {name} of {self.target} failed"):
            return program.plan(*args)


def _override_layout(layout: Layout, rules: str | None, params: str | None, optimizer: str | None) -> Layout:
    """A program's layout with the rules that are not None replaced."""
    from ..core.layout import ROLES
    from ..models.checked_layout import CheckedLayout

    base, stored, state = map(layout.rules_for, ROLES)
    further = [{n: axes for n, axes in more.items() if base.get(n) != axes} for more in (stored, state)]
    # If the state has the rules of the parameters, None makes it follow them, even where --params replaces
    # them.
    state_rules = further[1] if optimizer is None and state != stored else optimizer
    return CheckedLayout(
        base if rules is None else rules,
        params=further[0] if params is None else params,
        optimizer=state_rules,
    )


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


def _compare_with_xla(program: Program, args: tuple[Any, ...], plan: Plan) -> str:
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
        [f"XLA on virtual CPU devices: {human_bytes(total)} per device", *lines]
        + [f"planned: {human_bytes(plan.memory.peak)} ({plan.memory.peak / total:.2f} of XLA's)"]
    )


def _to_json(plan: Plan, profile: Hardware | None) -> str:
    import json

    data = plan.to_data()
    if profile is not None:
        data["time"] = plan.time(profile).to_data()
    return json.dumps(data, indent=1)
