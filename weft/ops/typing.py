"""Types of the arguments that ops take, for annotations."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import numpy as np

from ..core.dims import Dim, DimLike
from ..core.tensor import Tensor

Number = int | float | complex | np.number
Operand = Tensor | Number  # an operator's left or right side; a number broadcasts
DimsLike = str | Dim | Sequence[DimLike]  # "batch=64 d=32", a Dim, a name, or several of them
ArrayFn = Callable[..., jax.Array]  # a function of arrays, such as jax.numpy.exp
