"""Ops as methods of tensors: `x.sum("batch")` is `wf.sum(x, "batch")`.

`METHODS` lists the ops that are methods of the arrays of NumPy, JAX or PyTorch. A method has the signature
and the docstring of its op. `methods.pyi` has them for type checkers and editors; a test writes it.
"""

import types

from .operators import public_ops

METHODS = """
    sum mean max min prod any all var std logsumexp softmax log_softmax
    argmax argmin sort argsort top_k cumsum cumprod take
    transpose reshape broadcast_to merge split flatten unflatten
    astype clip round abs square sqrt exp log tanh sigmoid relu"""


class _Method:
    """An op, looked up when it is used: ops import the Tensor class, so it can't import them."""

    def __init__(self, name):
        self.name = name

    def __get__(self, tensor, _):
        op = getattr(public_ops(), self.name)
        return op if tensor is None else types.MethodType(op, tensor)


class Methods:
    """The methods of a tensor that are ops."""

    __slots__ = ()


for _name in METHODS.split():
    setattr(Methods, _name, _Method(_name))
