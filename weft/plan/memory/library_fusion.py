"""Library fusion: the reductions that XLA's CPU backend computes by calls of YNNPACK.

A call starts at a reduction. It grows to operands that nothing else reads, and to the only reader of its
result, as long as the library has these operations. Values at its border are in memory: loop fusion, which
comes next, does not fuse into library calls.
"""

from __future__ import annotations

from ..graph import Node
from .kernels import Kernel, Kernels

_FLOATS = frozenset(["float32", "bfloat16", "float64"])
_REDUCTIONS = frozenset(["reduce_sum", "reduce_max", "reduce_min"])
_ELEMENTWISE = frozenset(
    """
    abs add add_any ceil convert_element_type cos div erf exp expm1 floor integer_pow log log1p logistic max
    min mul neg pow round rsqrt sign sin sqrt square sub tan tanh
    """.split()
)
_MIN_ELEMENTS = 4096  # a call of the library costs more than it saves for smaller arrays


def fuse_library_calls(kernels: Kernels) -> None:
    """Fuse the work around reductions into library calls."""
    # From the results on: a reduction may be absorbed by the call of a later one.
    for kernel in reversed([*kernels.alive]):
        is_new = kernel in kernels.alive and not kernel.is_library
        if is_new and kernel.root.primitive in _REDUCTIONS and _is_supported(kernel.root, kernels):
            kernel.is_library = True
            _grow(kernel, kernels)


def _grow(call: Kernel, kernels: Kernels) -> None:
    # Growing in one direction may remove the last other reader in the other.
    while True:
        if producer := _fusible_producer(call, kernels):
            kernels.fuse(producer, call)
        elif user := _fusible_user(call, kernels):
            user.is_library = True
            kernels.fuse(call, user)
            call = user
        else:
            return


def _fusible_producer(call: Kernel, kernels: Kernels) -> Kernel | None:
    for producer in kernels.producers_of(call):
        is_own = kernels.users[producer] == {call} and producer not in kernels.returned
        if is_own and not producer.is_library and _is_supported(producer.root, kernels):
            return producer
    return None


def _fusible_user(call: Kernel, kernels: Kernels) -> Kernel | None:
    if len(kernels.users[call]) != 1 or call in kernels.returned:
        return None
    (user,) = kernels.users[call]
    return user if not user.is_library and _is_supported(user.root, kernels) else None


def _is_supported(node: Node, kernels: Kernels) -> bool:
    """Whether the library has the operation of a node, and XLA prefers it."""
    if node.bodies or len(node.results) != 1:
        return False
    values = (*node.operands, *node.results)
    if any(kernels.dtype(n) not in _FLOATS for n in values):
        return False
    # However small its operand: in the library a broadcast is only a stride of 0.
    if node.primitive == "broadcast_in_dim":
        return True
    if node.primitive == "dot_general":
        return _is_matrix_product(node)
    is_large = any(kernels.graph.elements(n) >= _MIN_ELEMENTS for n in values)
    return is_large and node.primitive in (_ELEMENTWISE | _REDUCTIONS)


def _is_matrix_product(node: Node) -> bool:
    """Whether a dot_general contracts the last dim of its left operand, and both have free dims."""
    (left, right), (left_batch, right_batch) = node.eqn.params["dimension_numbers"]
    ranks = [len(getattr(v.aval, "shape", ())) for v in node.eqn.invars]
    is_last = len(left) == 1 and left[0] == ranks[0] - 1
    return is_last and ranks[0] > len(left_batch) + 1 and ranks[1] > len(right_batch) + len(right)
