"""The public names, for type checkers and editors; at run time they come from `NAMES` in `__init__.py`."""

from typing import Any

from . import checkpoint as checkpoint
from . import data as data
from . import distributed as distributed
from . import fft as fft
from . import generate as generate
from . import linalg as linalg
from . import models as models
from . import nn as nn
from . import optim as optim
from . import random as random
from . import serve as serve
from . import train as train
from .autodiff.custom import custom_vjp as custom_vjp
from .autodiff.grad import grad as grad
from .autodiff.grad import jvp as jvp
from .autodiff.grad import value_and_grad as value_and_grad
from .autodiff.grad import vjp as vjp
from .autodiff.jacobian import hessian as hessian
from .autodiff.jacobian import jacobian as jacobian
from .autodiff.remat import remat as remat
from .autolayout.ranking import search as search
from .compilers.compiled import Compiled as Compiled
from .core.devices import cpu_devices as cpu_devices
from .core.dims import Dim as Dim
from .core.dims import DimLike as DimLike
from .core.dims import DimsLike as DimsLike
from .core.dims import dims as dims
from .core.errors import CheckpointError as CheckpointError
from .core.errors import CheckpointWarning as CheckpointWarning
from .core.errors import CompileError as CompileError
from .core.errors import DataError as DataError
from .core.errors import DataWarning as DataWarning
from .core.errors import DimError as DimError
from .core.errors import DistributedError as DistributedError
from .core.errors import HardwareError as HardwareError
from .core.errors import LayoutError as LayoutError
from .core.errors import LayoutWarning as LayoutWarning
from .core.errors import MeshError as MeshError
from .core.errors import MissingExtraError as MissingExtraError
from .core.errors import ModelError as ModelError
from .core.errors import PeerTimeoutError as PeerTimeoutError
from .core.errors import ProgramError as ProgramError
from .core.errors import RunFolderError as RunFolderError
from .core.errors import ShapeError as ShapeError
from .core.errors import TensorAttributeError as TensorAttributeError
from .core.errors import TensorTypeError as TensorTypeError
from .core.errors import TrainingError as TrainingError
from .core.errors import VerificationError as VerificationError
from .core.errors import WeftError as WeftError
from .core.eval_shape import eval_shape as eval_shape
from .core.exported import ExportedProgram as ExportedProgram
from .core.exported import load as load
from .core.layout import Layout as Layout
from .core.layout import LayoutLike as LayoutLike
from .core.mesh import Mesh as Mesh
from .core.mesh import MeshLike as MeshLike
from .core.placement import parameter as parameter
from .core.placement import place as place
from .core.placement import spec as spec
from .core.placement import tensor as tensor
from .core.program import Program as Program
from .core.program import spmd as spmd
from .core.role_layout import store as store
from .core.role_layout import under_layout as under_layout
from .core.tensor import Tensor as Tensor
from .core.tensor import is_tensor as is_tensor
from .core.tensor import tree_map as tree_map
from .ops.associative_scan import associative_scan as associative_scan
from .ops.control import cond as cond
from .ops.control import fori_loop as fori_loop
from .ops.control import switch as switch
from .ops.control import while_loop as while_loop
from .ops.conv import conv as conv
from .ops.creation import arange as arange
from .ops.creation import eye as eye
from .ops.creation import from_callback as from_callback
from .ops.creation import full as full
from .ops.creation import full_like as full_like
from .ops.creation import linspace as linspace
from .ops.creation import ones as ones
from .ops.creation import ones_like as ones_like
from .ops.creation import tril as tril
from .ops.creation import triu as triu
from .ops.creation import zeros as zeros
from .ops.creation import zeros_like as zeros_like
from .ops.einsum import einsum as einsum
from .ops.elementwise import add as add
from .ops.elementwise import astype as astype
from .ops.elementwise import clip as clip
from .ops.elementwise import conj as conj
from .ops.elementwise import divide as divide
from .ops.elementwise import imag as imag
from .ops.elementwise import isclose as isclose
from .ops.elementwise import multiply as multiply
from .ops.elementwise import negative as negative
from .ops.elementwise import power as power
from .ops.elementwise import real as real
from .ops.elementwise import round as round
from .ops.elementwise import stop_gradient as stop_gradient
from .ops.elementwise import subtract as subtract
from .ops.elementwise import where as where
from .ops.indexing import index as index
from .ops.indexing import slice as slice
from .ops.indexing import update as update
from .ops.local import callback as callback
from .ops.local import debug as debug
from .ops.local import local as local
from .ops.lookup import one_hot as one_hot
from .ops.lookup import scatter_add as scatter_add
from .ops.lookup import take as take
from .ops.map import map as map
from .ops.optax import optimizer as optimizer
from .ops.pool import avg_pool as avg_pool
from .ops.pool import max_pool as max_pool
from .ops.pool import windows as windows
from .ops.reduce import all as all
from .ops.reduce import allclose as allclose
from .ops.reduce import any as any
from .ops.reduce import log_softmax as log_softmax
from .ops.reduce import logsumexp as logsumexp
from .ops.reduce import max as max
from .ops.reduce import mean as mean
from .ops.reduce import median as median
from .ops.reduce import min as min
from .ops.reduce import prod as prod
from .ops.reduce import quantile as quantile
from .ops.reduce import softmax as softmax
from .ops.reduce import std as std
from .ops.reduce import sum as sum
from .ops.reduce import var as var
from .ops.scan import scan as scan
from .ops.shape import broadcast_to as broadcast_to
from .ops.shape import flatten as flatten
from .ops.shape import merge as merge
from .ops.shape import rename as rename
from .ops.shape import reshape as reshape
from .ops.shape import split as split
from .ops.shape import stack as stack
from .ops.shape import transpose as transpose
from .ops.shape import unflatten as unflatten
from .ops.shape import unstack as unstack
from .ops.shifting import concat as concat
from .ops.shifting import diff as diff
from .ops.shifting import flip as flip
from .ops.shifting import pad as pad
from .ops.shifting import roll as roll
from .ops.shifting import shift as shift
from .ops.sorting import approx_max_k as approx_max_k
from .ops.sorting import argmax as argmax
from .ops.sorting import argmin as argmin
from .ops.sorting import argsort as argsort
from .ops.sorting import cumprod as cumprod
from .ops.sorting import cumsum as cumsum
from .ops.sorting import searchsorted as searchsorted
from .ops.sorting import sort as sort
from .ops.sorting import top_k as top_k
from .ops.vmap import vmap as vmap
from .pipelines.pipeline import pipeline as pipeline
from .plan.plan import Plan as Plan
from .random.draws import dropout as dropout
from .verification import verify as verify

NAMES: dict[str, str]
MODULES: str
ELSEWHERE: dict[str, str]
__version__: str

def abs(x: Any, **options: Any) -> Tensor: ...
def arccos(x: Any, **options: Any) -> Tensor: ...
def arccosh(x: Any, **options: Any) -> Tensor: ...
def arcsin(x: Any, **options: Any) -> Tensor: ...
def arcsinh(x: Any, **options: Any) -> Tensor: ...
def arctan(x: Any, **options: Any) -> Tensor: ...
def arctan2(x: Any, y: Any) -> Tensor: ...
def arctanh(x: Any, **options: Any) -> Tensor: ...
def bitwise_and(x: Any, y: Any) -> Tensor: ...
def bitwise_not(x: Any, **options: Any) -> Tensor: ...
def bitwise_or(x: Any, y: Any) -> Tensor: ...
def bitwise_xor(x: Any, y: Any) -> Tensor: ...
def cbrt(x: Any, **options: Any) -> Tensor: ...
def ceil(x: Any, **options: Any) -> Tensor: ...
def cos(x: Any, **options: Any) -> Tensor: ...
def cosh(x: Any, **options: Any) -> Tensor: ...
def elu(x: Any, **options: Any) -> Tensor: ...
def equal(x: Any, y: Any) -> Tensor: ...
def erf(x: Any, **options: Any) -> Tensor: ...
def erfc(x: Any, **options: Any) -> Tensor: ...
def erfinv(x: Any, **options: Any) -> Tensor: ...
def exp(x: Any, **options: Any) -> Tensor: ...
def exp2(x: Any, **options: Any) -> Tensor: ...
def expm1(x: Any, **options: Any) -> Tensor: ...
def floor(x: Any, **options: Any) -> Tensor: ...
def floor_divide(x: Any, y: Any) -> Tensor: ...
def gelu(x: Any, **options: Any) -> Tensor: ...
def greater(x: Any, y: Any) -> Tensor: ...
def greater_equal(x: Any, y: Any) -> Tensor: ...
def hypot(x: Any, y: Any) -> Tensor: ...
def isfinite(x: Any, **options: Any) -> Tensor: ...
def isinf(x: Any, **options: Any) -> Tensor: ...
def isnan(x: Any, **options: Any) -> Tensor: ...
def leaky_relu(x: Any, **options: Any) -> Tensor: ...
def left_shift(x: Any, y: Any) -> Tensor: ...
def less(x: Any, y: Any) -> Tensor: ...
def less_equal(x: Any, y: Any) -> Tensor: ...
def lgamma(x: Any, **options: Any) -> Tensor: ...
def log(x: Any, **options: Any) -> Tensor: ...
def log10(x: Any, **options: Any) -> Tensor: ...
def log1p(x: Any, **options: Any) -> Tensor: ...
def log2(x: Any, **options: Any) -> Tensor: ...
def log_sigmoid(x: Any, **options: Any) -> Tensor: ...
def logaddexp(x: Any, y: Any) -> Tensor: ...
def logical_and(x: Any, y: Any) -> Tensor: ...
def logical_not(x: Any, **options: Any) -> Tensor: ...
def logical_or(x: Any, y: Any) -> Tensor: ...
def logical_xor(x: Any, y: Any) -> Tensor: ...
def maximum(x: Any, y: Any) -> Tensor: ...
def minimum(x: Any, y: Any) -> Tensor: ...
def mod(x: Any, y: Any) -> Tensor: ...
def not_equal(x: Any, y: Any) -> Tensor: ...
def pow(x: Any, y: Any) -> Tensor: ...
def reciprocal(x: Any, **options: Any) -> Tensor: ...
def relu(x: Any, **options: Any) -> Tensor: ...
def relu6(x: Any, **options: Any) -> Tensor: ...
def remainder(x: Any, y: Any) -> Tensor: ...
def right_shift(x: Any, y: Any) -> Tensor: ...
def rsqrt(x: Any, **options: Any) -> Tensor: ...
def selu(x: Any, **options: Any) -> Tensor: ...
def sigmoid(x: Any, **options: Any) -> Tensor: ...
def sign(x: Any, **options: Any) -> Tensor: ...
def silu(x: Any, **options: Any) -> Tensor: ...
def sin(x: Any, **options: Any) -> Tensor: ...
def sinh(x: Any, **options: Any) -> Tensor: ...
def softplus(x: Any, **options: Any) -> Tensor: ...
def softsign(x: Any, **options: Any) -> Tensor: ...
def sqrt(x: Any, **options: Any) -> Tensor: ...
def square(x: Any, **options: Any) -> Tensor: ...
def swish(x: Any, **options: Any) -> Tensor: ...
def tan(x: Any, **options: Any) -> Tensor: ...
def tanh(x: Any, **options: Any) -> Tensor: ...
