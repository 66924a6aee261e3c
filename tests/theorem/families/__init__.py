"""All families of ops, a row each: how it is drawn, how Weft does it, and how plain JAX does it.

The oracle's side works on arrays of NumPy as well as of JAX (`rows.A` picks the module): programs are drawn
with concrete NumPy values at hand, which compile nothing, so that what would depend on rounding (a
comparison of nearly equal numbers, a logarithm near 0) is seen and not drawn.
"""

from . import calculus, control, elementwise, lookup, moves, neighbours, numbers, order, random, reduce, shape
from .rows import Op as Op
from .rows import Rows

FAMILIES: dict[str, Rows] = {
    "elementwise": elementwise.ELEMENTWISE,
    "binary": elementwise.BINARY,
    "discrete": elementwise.DISCRETE,
    "contract": reduce.CONTRACT,
    "reduce": reduce.REDUCE,
    "order": order.ORDER,
    "shape": shape.SHAPE,
    "moves": moves.MOVES,
    "lookup": lookup.LOOKUP,
    "neighbours": neighbours.NEIGHBOURS,
    "random": random.RANDOM,
    "control": control.CONTROL,
    "calculus": calculus.CALCULUS,
}
# For typed programs: more of what rounding leaves alone, and numbers among tensors.
TYPED: dict[str, Rows] = FAMILIES | {"mixed": numbers.MIXED}
TYPED |= {
    f"{name}, exact": {n: row for n, row in rows.items() if row.exact}
    for name, rows in FAMILIES.items()
    if any(row.exact for row in rows.values())
}
OPS = {name: row for rows in TYPED.values() for name, row in rows.items()}
