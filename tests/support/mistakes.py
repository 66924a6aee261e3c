"""Wrong programs for tests of error messages.

A test file has a table of `Mistakes`: each is a function that raises, and its failing line ends with `# wrong`. The
`mistake` fixture compares the message with a golden text in `tests/messages/`, and checks that it points to that line.
"""

import numpy as np

import weft as wf

MESH, LAYOUT = wf.Mesh("data=4 model=2"), wf.Layout("batch:data d_ff:model")
OTHER_MESH = wf.Mesh("data=2")


class Mistakes(dict):
    """Wrong programs by name, as functions without arguments."""

    def add(self, fn):
        """Add a function under its own name (a decorator)."""
        self[fn.__name__] = fn
        return fn


def ones(dims, dtype=np.float32):
    dims = wf.dims(dims)
    return wf.tensor(np.ones([d.size for d in dims], dtype), dims)


def staged(fn, *args, mesh=MESH, layout="batch:data"):
    """Trace a program without compiling it."""
    return wf.spmd(fn, mesh, layout).jaxpr(*args)
