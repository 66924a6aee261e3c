"""The theorem: layouts never change results. Programs drawn at random, as data, run in several ways.

A `Case` is a program (inputs, steps, what its loss is made of), a mesh and a layout. It is run

- by Weft on its mesh, with its layout,
- by plain JAX on arrays without names or devices (the *oracle*: `families` has a line for each op),
- every fourth by Weft on one device as well, and every fortieth eagerly, op by op,

and all must agree: loss, outputs, and the gradients of the loss. A case prints as a program, and its
`repr` is Python that makes it again.
"""

from .checking import check as check
from .drawing import cases as cases
from .program import Body as Body
from .program import Case as Case
from .program import Input as Input
from .program import Step as Step
from .shrinking import reduced as reduced
