"""Library fusion: the reductions that XLA's CPU backend computes by calls of YNNPACK, with the work around them.

`fuse_library_calls(body)` replaces each such group of nodes by one node, `library`. It starts from reductions
and from matmuls. A group around a reduction grows to operands that only the group reads, and to the only
reader of its result, as long as the library has these operations. Values at its border are in memory: XLA's
loop fusion, which comes next, does not fuse into library calls.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import numpy as np
from jax.core import ShapedArray

from .graph import Body, Node
from .primitives import aval_of

LIBRARY = "library"
_FLOATS = frozenset(["float32", "bfloat16", "float64"])
_REDUCTIONS = frozenset(["reduce_sum", "reduce_max", "reduce_min"])
_ELEMENTWISE = frozenset(
    """
    abs add add_any ceil convert_element_type cos div erf exp expm1 floor integer_pow log log1p logistic max
    min mul neg pow round rsqrt sign sin sqrt square sub tan tanh
    """.split()
)
_MIN_ELEMENTS = 4096  # a call of the library costs more than it saves for smaller arrays


def fuse_library_calls(body: Body) -> None:
    """Replace groups of nodes by library calls."""
    finder = _Groups(body)
    groups = [group for node in reversed(body.nodes) if (group := finder.grow(node))]
    grouped = {id(node): group for group in groups for node in group}
    nodes = []
    for node in body.nodes:
        group = grouped.get(id(node))
        if group is None:
            nodes.append(node)
        # In the place of its last node: all operands are then computed.
        elif node is max(group, key=finder.position.__getitem__):
            nodes.append(_call(group, finder))
    body.nodes = nodes


def _call(group: list[Node], finder: _Groups) -> Node:
    root, start = max(group, key=finder.position.__getitem__), group[0]
    inside = {n for node in group for n in node.results}
    ordered = sorted(group, key=finder.position.__getitem__)
    operands = dict.fromkeys(n for node in ordered for n in node.operands if n not in inside)
    return Node(
        LIBRARY, [*operands], root.results, root.eqn, start.scope, start.source, start.enclosing_source
    )


class _Groups:
    """Finds the groups of a body."""

    def __init__(self, body: Body):
        self.position = {node: index for index, node in enumerate(body.nodes)}
        self.producer = {n: node for node in body.nodes for n in node.results}
        self.users: dict[int, list[Node]] = defaultdict(list)
        for node in body.nodes:
            for n in dict.fromkeys(node.operands):
                self.users[n].append(node)
        self.returned = {*body.outputs, *(n for pair in body.aliases for n in pair)}
        self.fused: set[int] = set()

    def grow(self, start: Node) -> list[Node]:
        """The group around a node that starts one; empty for any other node."""
        if id(start) in self.fused or not _starts(start):
            return []
        group = [start]
        self.fused.add(id(start))
        if start.primitive in _REDUCTIONS:
            # A value inside the group may lose its last reader outside when the group grows further.
            while self._grow_up(group) or self._grow_down(group):
                pass
        return group

    def _grow_up(self, group: list[Node]) -> bool:
        grown = False
        for node in group:
            for n in node.operands:
                maker = self.producer.get(n)
                only_here = maker is not None and n not in self.returned and self._all_in(group, self.users[n])
                if maker is not None and only_here and id(maker) not in self.fused and _is_supported(maker):
                    self.fused.add(id(maker))
                    group.append(maker)
                    grown = True
        return grown

    def _grow_down(self, group: list[Node]) -> bool:
        root = max(group, key=self.position.__getitem__)
        outside = [user for user in self.users[root.results[0]] if user not in group]
        if root.results[0] in self.returned or len(outside) != 1:
            return False
        (user,) = outside
        if id(user) in self.fused or not _is_supported(user) or not self._is_closed(group, root):
            return False
        self.fused.add(id(user))
        group.append(user)
        return True

    def _is_closed(self, group: list[Node], root: Node) -> bool:
        """Whether nothing outside reads a value of the group other than its result."""
        return all(
            self._all_in(group, self.users[n]) for node in group if node is not root for n in node.results
        )

    @staticmethod
    def _all_in(group: list[Node], users: Iterable[Node]) -> bool:
        return all(user in group for user in users)


def _starts(node: Node) -> bool:
    return node.primitive in (*_REDUCTIONS, "dot_general") and _is_supported(node)


def _is_supported(node: Node) -> bool:
    """Whether the library has the operation of a node."""
    operands, result = [aval_of(v) for v in node.eqn.invars], aval_of(node.eqn.outvars[0])
    if not all(_is_float(aval) for aval in (*operands, result)):
        return False
    if node.primitive == "broadcast_in_dim":
        return True
    if node.primitive == "dot_general":
        return _is_matrix_product(node)
    is_large = any(aval.size >= _MIN_ELEMENTS for aval in (*operands, result))
    return is_large and node.primitive in (_ELEMENTWISE | _REDUCTIONS)


def _is_float(aval: ShapedArray) -> bool:
    return np.dtype(getattr(aval, "dtype", bool)).name in _FLOATS


def _is_matrix_product(node: Node) -> bool:
    """Whether both operands of a dot_general have dims of their own."""
    (left, right), (left_batch, right_batch) = node.eqn.params["dimension_numbers"]
    return all(
        aval_of(operand).size > np.prod([aval_of(operand).shape[n] for n in (*contracted, *batch)], initial=1)
        for operand, contracted, batch in zip(
            node.eqn.invars, (left, right), (left_batch, right_batch), strict=True
        )
    )
