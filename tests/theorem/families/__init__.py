"""All families of ops. A row has a function that draws an op, its Weft function, and its oracle in plain JAX.

An op without a row gets one that is derived from its example, with Weft on one device as its oracle.

Oracles work on NumPy and JAX arrays (`rows.A` picks the module). Programs are drawn with concrete NumPy values, which
compile nothing, so that steps which would depend on rounding (a comparison of nearly equal numbers, a logarithm near 0)
are detected and not drawn.
"""

from . import (
    calculus,
    control,
    derived,
    elementwise,
    linalg,
    lookup,
    moves,
    neighbours,
    numbers,
    order,
    random,
    reduce,
    shape,
)
from .rows import Op as Op
from .rows import Rows

FAMILIES: dict[str, Rows] = {
    "elementwise": elementwise.ELEMENTWISE,
    "binary": elementwise.BINARY,
    "discrete": elementwise.DISCRETE,
    "complex": elementwise.COMPLEX,
    "contract": reduce.CONTRACT,
    "reduce": reduce.REDUCE,
    "order": order.ORDER,
    "shape": shape.SHAPE,
    "moves": moves.MOVES,
    "lookup": lookup.LOOKUP,
    "neighbours": neighbours.NEIGHBOURS,
    "linalg": linalg.LINALG,
    "fft": linalg.FFT,
    "random": random.RANDOM,
    "control": control.CONTROL,
    "calculus": calculus.CALCULUS,
}
FAMILIES["derived"] = derived.derived_rows(name for rows in FAMILIES.values() for name in rows)
# Typed programs draw exact ops more often, and mix Python numbers with tensors.
TYPED: dict[str, Rows] = FAMILIES | {"mixed": numbers.MIXED}
TYPED |= {
    f"{name}, exact": {n: row for n, row in rows.items() if row.exact}
    for name, rows in FAMILIES.items()
    if any(row.exact for row in rows.values())
}
OPS = {name: row for rows in TYPED.values() for name, row in rows.items()}
