"""The flags that name a program, its mesh and its layout, for the commands that trace it but don't run it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from tyro.conf import Positional, arg

from ..core.field_types import PositiveInt
from .preset_targets import load_plan_target
from .targets import user_code

if TYPE_CHECKING:
    from ..core.layout import Layout
    from ..core.program import Program
    from ..core.traced import Traced


@dataclass
class ProgramFlags:
    """What to trace, and for which mesh and layout."""

    target: Annotated[Positional[str], arg(metavar="FILE.py:FN|PRESET")]
    """A Python file and a function in it that returns the function and its arguments, or the name of a known
    model."""
    mesh: Annotated[str | None, arg(metavar="AXES", help_behavior_hint="")] = None
    """The device mesh, such as "data=4 model=2" (default: one device)."""
    layout: Annotated[str | None, arg(metavar="RULES", help_behavior_hint="")] = None
    """Which dims are split over which axes, such as "batch:data d_ff:model" (default: none)."""
    params: Annotated[str | None, arg(metavar="RULES", help_behavior_hint="")] = None
    """Additional rules for stored parameters, such as "d_model:data" (ZeRO-3)."""
    optimizer: Annotated[str | None, arg(metavar="RULES", help_behavior_hint="")] = None
    """Additional rules for the optimizer state (default: those of --params)."""
    train: Annotated[str | None, arg(metavar="OPTIMIZER", help_behavior_hint="")] = None
    """A preset's train step: adafactor, adamw, lion, momentum or sgd."""
    batch: Annotated[PositiveInt | None, arg(metavar="ROWS", help_behavior_hint="")] = None
    """Rows in a preset's batch (default: the preset's training batch)."""
    length: Annotated[PositiveInt | None, arg(metavar="LENGTH", help_behavior_hint="")] = None
    """Sequence length of a preset's batch."""

    def load(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """The function, or the program, and its arguments."""
        return load_plan_target(self.target, self.train, self.batch, self.length)

    def stage(self, fn: Callable[..., Any], mesh: str | None, layout: str | None) -> Program:
        """The program for a mesh and a layout; if `fn` is one, its own are the defaults."""
        from ..core.program import Program, spmd
        from ..models.checked_layout import CheckedLayout

        if not isinstance(fn, Program):
            return spmd(fn, mesh, CheckedLayout(layout or "", params=self.params, optimizer=self.optimizer))
        rules = _override_layout(fn.layout, layout, self.params, self.optimizer)
        return spmd(
            fn.fn,
            fn.mesh if mesh is None else mesh,
            rules,
            static=fn.static,
            donate=fn.donate,
            compiler_options=fn.compiler_options,
        )

    def trace(self, program: Program, args: tuple[Any, ...]) -> Traced:
        """The program traced for its arguments."""
        name = getattr(program.fn, "__name__", "the function")
        with user_code(f"tracing {name} of {self.target} failed"):
            return program.trace(*args)


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
