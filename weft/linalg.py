"""Linear algebra over two named dims of a tensor; its other dims are batch dims, and may be split."""

from .ops.linalg import cholesky as cholesky
from .ops.linalg import det as det
from .ops.linalg import eigh as eigh
from .ops.linalg import inv as inv
from .ops.linalg import norm as norm
from .ops.linalg import qr as qr
from .ops.linalg import slogdet as slogdet
from .ops.linalg import solve as solve
from .ops.linalg import svd as svd
from .ops.linalg import triangular_solve as triangular_solve
