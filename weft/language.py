"""All names of the language: what `import weft as wf` gives."""

from __future__ import annotations

import typing as _typing

from . import random as random
from .autodiff import custom_vjp as custom_vjp
from .autodiff import grad as grad
from .autodiff import jvp as jvp
from .autodiff import remat as remat
from .autodiff import value_and_grad as value_and_grad
from .autodiff import vjp as vjp
from .dims import Dim as Dim
from .dims import dims as dims
from .errors import DimError as DimError
from .errors import LayoutError as LayoutError
from .errors import LayoutWarning as LayoutWarning
from .errors import MeshError as MeshError
from .errors import ProgramError as ProgramError
from .errors import ShapeError as ShapeError
from .errors import TensorTypeError as TensorTypeError
from .errors import WeftError as WeftError
from .escape import callback as callback
from .escape import debug as debug
from .escape import local as local
from .layout import Layout as Layout
from .mesh import Mesh as Mesh
from .mesh import cpu_devices as cpu_devices
from .ops import *  # noqa: F403
from .optimizer import optimizer as optimizer
from .placing import parameter as parameter
from .placing import place as place
from .placing import spec as spec
from .placing import tensor as tensor
from .plan.plan import Plan as Plan
from .plan.verify import verify as verify
from .random import dropout as dropout
from .search import search as search
from .spmd import Program as Program
from .spmd import spmd as spmd
from .tensor import Tensor as Tensor
from .tensor import is_tensor as is_tensor

if _typing.TYPE_CHECKING:  # the element-wise functions are made from tables, which a type checker can't read

    def __getattr__(name: str) -> _typing.Any: ...
