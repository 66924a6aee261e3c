"""The theorem: layouts never change results. Random programs, represented as data, are run in several ways.

A `Case` is a program (inputs, steps and the results that enter its loss), a mesh and a layout. It is run

- by Weft on its mesh, with its layout,
- by plain JAX on arrays without names or devices (the *oracle*: `families` has a line for each op),
- one in four cases also by Weft on one device, and one in forty also eagerly, op by op.

All runs must agree on the loss, the results and the gradients of the loss. A case prints as a program, and its
`repr` is a Python expression that recreates it.
"""

from .checking import check as check
from .drawing import cases as cases
from .program import Body as Body
from .program import Case as Case
from .program import Input as Input
from .program import Step as Step
from .shrinking import reduced as reduced
