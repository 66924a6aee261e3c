"""`weft verify`: run a call under several layouts and compare the results."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from tyro.conf import Positional, arg

from .preset_targets import is_preset, load_verify_target
from .targets import CommandFailure, UsageError, user_code, virtual_devices


@dataclass
class VerifyCommand:
    """Run a function on one device and under several layouts, and compare all results, on virtual CPU
    devices.

    FN is a function in FILE.py that takes no arguments. It returns the function to run and a tuple of its
    arguments, as for weft plan; specs are filled with random values. To compare gradients too, return
    wf.value_and_grad(fn).

        weft verify train.py:example --mesh "data=4 model=2" --layouts "batch:data" "batch:data d_ff:model"

    For a known model, give its name (see weft models): its loss and gradients are compared.

    Exits with 1 if a result differs by more than rounding errors."""

    target: Annotated[Positional[str], arg(metavar="FILE.py:FN|PRESET")]
    """A Python file and a function in it that returns what to run, or the name of a known model."""
    mesh: Annotated[str, arg(metavar="AXES")]
    """The device mesh, such as "data=4 model=2"."""
    layouts: Annotated[tuple[str, ...], arg(metavar="RULES ...")]
    """The layouts to compare, each in quotes."""
    seed: int = 0
    """The seed of the random values that fill specs."""

    def run(self) -> None:
        """Run, compare, and print one line per result."""
        import jax

        from ..core.errors import VerificationError
        from ..models.checked_layout import CheckedLayout
        from ..verification import verify

        jax.config.update("jax_platforms", "cpu")
        if not self.layouts:
            raise UsageError("no layouts to compare", hint='--layouts "batch:data" "d_ff:model"')
        virtual_devices(self.mesh)
        layouts = [CheckedLayout(rules) for rules in self.layouts]
        fn, args = load_verify_target(self.target)
        try:
            with user_code(f"{self.target} failed"):
                found = verify(fn, _fill_specs(args, self.seed, _vocab(self.target)), self.mesh, layouts)
        except VerificationError as error:
            raise CommandFailure(str(error)) from None
        for entry in found:
            print(f"{entry.difference:.1e}  {entry.name}  {entry.layout}")


def _vocab(target: str) -> int:
    """The number of values that random integers take: the integers of a known model are tokens."""
    from ..models import preset

    return preset(target).config.vocab if is_preset(target) else 2


def _fill_specs(args: tuple[Any, ...], seed: int, vocab: int) -> tuple[Any, ...]:
    """Replace specs by random values."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from ..core.placement import tensor, with_role
    from ..core.tensor import Tensor, is_tensor

    rng = np.random.default_rng(seed)

    def fill(t: Tensor) -> Tensor:
        if not is_tensor(t) or not isinstance(t.storage, jax.ShapeDtypeStruct):
            return t
        shape = tuple(d.size for d in t.dims)
        if jnp.issubdtype(t.dtype, jnp.inexact):
            values = rng.standard_normal(shape) / np.sqrt(max(shape, default=1))
        else:
            values = rng.integers(0, vocab, shape)
        return with_role(tensor(jnp.asarray(values, t.dtype), t.dims), t.role)

    return jax.tree.map(fill, args, is_leaf=is_tensor)
