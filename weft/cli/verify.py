"""`weft verify`: the same call under several layouts, compared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from tyro.conf import Positional, arg

from .preset_targets import is_preset, load_verify_target
from .targets import CommandFailure, UsageError, user_code, virtual_devices


@dataclass
class VerifyCommand:
    """Run a function on one device and under several layouts, and compare every result; on virtual CPU
    devices.

    FN is a function without arguments in FILE.py. It returns the function to run and a tuple of its
    arguments (as for weft plan); specs are filled with random numbers. To compare gradients too, return
    wf.value_and_grad(fn).

        weft verify train.py:example --mesh "data=4 model=2" --layouts "batch:data" "batch:data d_ff:model"

    A known model goes by its name (weft models lists them): its loss and gradients are compared.

    Exit 1 if some result differs by more than rounding explains."""

    target: Annotated[Positional[str], arg(metavar="FILE.py:FN|PRESET")]
    """The Python file, and the function in it that returns what to run; or a known model."""
    mesh: Annotated[str, arg(metavar="AXES")]
    """The processor mesh, "data=4 model=2"."""
    layouts: Annotated[tuple[str, ...], arg(metavar="RULES ...")]
    """The layouts to try, each in quotes."""
    seed: int = 0
    """For the random numbers that fill specs."""

    def run(self) -> None:
        """Run, compare, and print a line for each result."""
        import jax

        from ..models.checked_layout import CheckedLayout
        from ..verification import VerificationError, verify

        jax.config.update("jax_platforms", "cpu")
        if not self.layouts:
            raise UsageError("no layouts to compare", hint='--layouts "batch:data" "d_ff:model"')
        virtual_devices(self.mesh)
        layouts = [CheckedLayout(rules) for rules in self.layouts]
        fn, args = load_verify_target(self.target)
        try:
            with user_code(f"{self.target} failed"):
                found = verify(fn, _filled(args, self.seed, _ids(self.target)), self.mesh, layouts)
        except VerificationError as error:
            raise CommandFailure(str(error)) from None
        for entry in found:
            print(f"{entry.difference:.1e}  {entry.name}  {entry.layout}")


def _ids(target: str) -> int:
    """How many values whole numbers may have: those of a known model are tokens."""
    from ..models import preset

    return preset(target).config.vocab if is_preset(target) else 2


def _filled(args: Any, seed: int, ids: int) -> Any:
    """The arguments with values in place of specs."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from ..core.placement import tensor, with_role
    from ..core.tensor import is_tensor

    draw = np.random.default_rng(seed)

    def fill(t: Any) -> Any:
        if not is_tensor(t) or not isinstance(t.storage, jax.ShapeDtypeStruct):
            return t
        shape = tuple(d.size for d in t.dims)
        if jnp.issubdtype(t.dtype, jnp.inexact):
            values = draw.standard_normal(shape) / np.sqrt(max(shape, default=1))
        else:
            values = draw.integers(0, ids, shape)
        return with_role(tensor(jnp.asarray(values, t.dtype), t.dims), t.role)

    return jax.tree.map(fill, args, is_leaf=is_tensor)
