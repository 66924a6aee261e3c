"""Programs that are not Transformers, written as users would: the oracle of memory plans is XLA on each of them.

    python -m plan_corpus                        # a table of all cases: planned and compiled, sorted by ratio
    python -m plan_corpus --largest stencil      # the largest live buffers planned for one case
    python -m plan_corpus --dump DIR stencil     # and XLA's buffer assignment, in DIR/stencil

with `tests/support` and the repository in PYTHONPATH.
"""

from . import estimation, images, learning, reported, simulations, tables
from .case import Case

_MODULES = (reported, simulations, images, learning, estimation, tables)
CORPUS = tuple(value for module in _MODULES for value in vars(module).values() if isinstance(value, Case))
