"""All families of ops. Each op has a row: how to draw it, its Weft function, and its oracle in plain JAX.

Oracles work on NumPy and JAX arrays (`rows.A` picks the module). Programs are drawn with concrete NumPy values, which
compile nothing, so that steps which would depend on rounding (a comparison of nearly equal numbers, a logarithm near 0)
are detected and not drawn.
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
# Typed programs draw exact ops more often, and mix Python numbers with tensors.
TYPED: dict[str, Rows] = FAMILIES | {"mixed": numbers.MIXED}
TYPED |= {
    f"{name}, exact": {n: row for n, row in rows.items() if row.exact}
    for name, rows in FAMILIES.items()
    if any(row.exact for row in rows.values())
}
OPS = {name: row for rows in TYPED.values() for name, row in rows.items()}
