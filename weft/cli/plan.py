"""`weft plan`: what a program will do and cost, before it runs."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional, arg

from .loading import UserError, load, user_code
from .output import check_folder, write


@dataclass
class Plan:
    """What a program will do and cost on each device: work, collectives, memory and time. Nothing is run, and
    the mesh needs no devices.

    FN is a function without arguments in FILE.py. It returns the function to plan and a tuple of its
    arguments; these may be specs, which have dims but no values:

        def example():
            return step, (params, wf.spec([batch, length], "int32"))

    Then

        weft plan train.py:example --mesh "data=4 model=2" --layout "batch:data d_ff:model" --hardware tpu-v4

    If what FN returns is a program already (wf.spmd), its own mesh and layout are the default."""

    target: Annotated[Positional[str], arg(metavar="FILE.py:FN")]
    """The Python file, and the function in it that returns what to plan."""
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
    json: Annotated[bool, arg(help_behavior_hint="")] = False
    """Print JSON instead of text."""
    html: Annotated[Path | None, arg(metavar="OUT", help_behavior_hint="")] = None
    """Write one self-contained page to this file."""
    diff: Annotated[tuple[str, str] | None, arg(metavar="MESH LAYOUT", help_behavior_hint="")] = None
    """Print what this second mesh and layout does differently."""

    def run(self) -> None:
        """Plan, and print or write the plan."""
        if self.json + (self.html is not None) + (self.diff is not None) > 1:
            raise UserError("--json, --html and --diff are different outputs\n\nhint: ask for one of them")
        if self.html is not None:
            check_folder(self.html)
        # Planning needs no devices: leave those of this machine to whoever is using them.
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        from ..plan.hardware import Hardware

        machine = Hardware.of(self.hardware) if self.hardware else None
        fn, args = load(self.target)
        plan = self._planned(fn, args, self.mesh, self.layout)
        if self.json:
            print(_as_json(plan, machine))
        elif self.html is not None:
            write(self.html, plan.to_html(machine))
            print(f"wrote {self.html}", file=sys.stderr)
        elif self.diff is not None:
            print(plan.diff(self._planned(fn, args, *self.diff)), end="")
        else:
            print(plan.explain(machine), end="")

    def _planned(self, fn: Any, args: tuple[Any, ...], mesh: Any, layout: str | None) -> Any:
        from ..layout import Layout
        from ..spmd import Program, spmd

        more: dict[str, Any] = {}
        rules = Layout(layout or "", params=self.params, optimizer=self.optimizer)
        if isinstance(fn, Program):
            more = {"static": fn.static, "donate": fn.donate}
            mesh = fn.mesh if mesh is None else mesh
            rules = fn.layout if (layout, self.params, self.optimizer) == (None, None, None) else rules
            fn = fn.fn
        program = spmd(fn, mesh, rules, **more)
        with user_code(
            f"{getattr(fn, '__name__', 'the function')} of {self.target} failed while it was traced"
        ):
            return program.plan(*args)


def _as_json(plan: Any, machine: Any) -> str:
    import json

    data = plan.to_data()
    if machine is not None:
        data["time"] = plan.time(machine).to_data()
    return json.dumps(data, indent=1)
