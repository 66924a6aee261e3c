"""Weft: distributed tensor programs over named dimensions."""

from .autodiff import grad as grad
from .autodiff import value_and_grad as value_and_grad
from .dims import Dim as Dim
from .dims import dims as dims
from .layout import Layout as Layout
from .mesh import Mesh as Mesh
from .mesh import cpu_devices as cpu_devices
from .ops import *  # noqa: F403
from .spmd import spmd as spmd
from .tensor import Tensor as Tensor
from .tensor import is_tensor as is_tensor
from .tensor import parameter as parameter
from .tensor import place as place
from .tensor import spec as spec
from .tensor import tensor as tensor
