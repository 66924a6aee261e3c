"""The registry of ops (`weft/core/registry.py`), with the rows of all modules."""

import weft as wf
from weft.core.registry import OPS

for _name in wf.__all__:  # a module adds the rows of its ops when it is imported
    getattr(wf, _name)

EVERY_OP = dict(OPS)
