"""All names of the language: what `import weft as wf` gives."""

import importlib as _importlib
import typing as _typing

from . import random as random
from .autodiff import custom_vjp as custom_vjp
from .autodiff import grad as grad
from .autodiff import jvp as jvp
from .autodiff import remat as remat
from .autodiff import value_and_grad as value_and_grad
from .autodiff import vjp as vjp
from .cpu import cpu_devices as cpu_devices
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
from .ops.contract import einsum as einsum
from .ops.control import cond as cond
from .ops.control import fori_loop as fori_loop
from .ops.control import while_loop as while_loop
from .ops.conv import conv as conv
from .ops.cut import index as index
from .ops.cut import slice as slice
from .ops.cut import update as update
from .ops.elementwise import *  # noqa: F403
from .ops.lookup import one_hot as one_hot
from .ops.lookup import scatter_add as scatter_add
from .ops.lookup import take as take
from .ops.make import arange as arange
from .ops.make import from_callback as from_callback
from .ops.make import full as full
from .ops.make import full_like as full_like
from .ops.make import ones as ones
from .ops.make import ones_like as ones_like
from .ops.make import zeros as zeros
from .ops.make import zeros_like as zeros_like
from .ops.moves import concat as concat
from .ops.moves import flip as flip
from .ops.moves import pad as pad
from .ops.moves import roll as roll
from .ops.moves import shift as shift
from .ops.order import argmax as argmax
from .ops.order import argmin as argmin
from .ops.order import argsort as argsort
from .ops.order import cumprod as cumprod
from .ops.order import cumsum as cumsum
from .ops.order import sort as sort
from .ops.order import top_k as top_k
from .ops.pipeline import pipeline as pipeline
from .ops.pool import avg_pool as avg_pool
from .ops.pool import max_pool as max_pool
from .ops.pool import windows as windows
from .ops.reduce import all as all
from .ops.reduce import any as any
from .ops.reduce import log_softmax as log_softmax
from .ops.reduce import logsumexp as logsumexp
from .ops.reduce import max as max
from .ops.reduce import mean as mean
from .ops.reduce import min as min
from .ops.reduce import prod as prod
from .ops.reduce import softmax as softmax
from .ops.reduce import std as std
from .ops.reduce import sum as sum
from .ops.reduce import var as var
from .ops.scan import scan as scan
from .ops.shape import broadcast_to as broadcast_to
from .ops.shape import merge as merge
from .ops.shape import rename as rename
from .ops.shape import reshape as reshape
from .ops.shape import split as split
from .ops.shape import stack as stack
from .ops.shape import transpose as transpose
from .ops.shape import unstack as unstack
from .ops.vmap import vmap as vmap
from .optimizer import optimizer as optimizer
from .placing import parameter as parameter
from .placing import place as place
from .placing import spec as spec
from .placing import tensor as tensor
from .random import dropout as dropout
from .spmd import Program as Program
from .spmd import spmd as spmd
from .tensor import Tensor as Tensor
from .tensor import is_tensor as is_tensor

if _typing.TYPE_CHECKING:
    from .plan.plan import Plan as Plan
    from .plan.verify import verify as verify
    from .search import search as search

# Loaded when they are asked for: a program that is only run does not wait for them.
LATER = {"Plan": ".plan.plan", "verify": ".plan.verify", "search": ".search"}


def __getattr__(name: str) -> _typing.Any:
    if name not in LATER:
        raise AttributeError(f"weft has no {name!r}")
    return getattr(_importlib.import_module(LATER[name], __package__), name)
