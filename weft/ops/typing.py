"""Types of the arguments that ops take, for annotations."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

import jax
import numpy as np

from ..core.tensor import Tensor

Number = int | float | complex | np.number
Operand: TypeAlias = Tensor | Number  # an operator's left or right side; a number broadcasts
ArrayFn = Callable[..., jax.Array]  # a function of arrays, such as jax.numpy.exp
