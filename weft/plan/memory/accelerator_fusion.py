"""Fusion on GPUs and TPUs: which values are in memory, and which kernel computes each of them.

Most elementwise work is computed inside the kernels that read it, again in each of them. It has a result in
memory only if this saves traffic: if recomputing it would read more than writing it once and reading it back.
Kernels that work on the same elements become one kernel with several results.

The vendors' compilers decide by models of their own, which are not public for TPUs. Here, traffic decides.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..graph import Body, Graph, Node, like, program_order
from ..primitives import CHAIN, FUSIBLE, Fusion
from .kernels import Kernel
from .platforms import Platform

PRODUCTS = frozenset(["dot_general", "conv_general_dilated"])
# Each element is where it is in the operand, or the operand is smaller.
_POINTWISE = CHAIN
Access = dict[int, float]  # the bytes that are read of each value in memory


def fuse_into_kernels(body: Body, graph: Graph, platform: Platform) -> list[Kernel]:
    """The kernels of a body, in an order in which they can run; nodes that no kernel needs are left out."""
    fusion = _Fusion(body, graph, platform)
    fusion.store_shared_values()
    return merge_kernels(fusion.kernels(), fusion)


def written_values(node: Node) -> list[int]:
    """The values that an update in place adds to its first operand."""
    # A scan's updates of its stacked results have no other operand.
    return node.operands if len(node.operands) == 1 else node.operands[1:]


def read_share(node: Node, n: int, graph: Graph) -> float:
    """The share of an operand that a node reads: of a slice only the slice, of an update in place nothing."""
    if node.fusion is Fusion.UPDATE:
        return 1.0 if n in written_values(node) else 0.0
    if node.row.window is None or n != node.operands[0]:
        return 1.0
    return min(1.0, graph.elements(node.results[0]) / max(1, graph.elements(n)))


class _Fusion:
    """The values of a body that are in memory, and what has to be read to compute the others."""

    def __init__(self, body: Body, graph: Graph, platform: Platform):
        self.graph, self.platform = graph, platform
        self.nodes = program_order(body.nodes)
        self.position = {node: n for n, node in enumerate(self.nodes)}
        self.producer = {n: node for node in self.nodes for n in node.results}
        self.users: dict[int, list[Node]] = {n: [] for n in self.producer}
        for node in self.nodes:
            for n in dict.fromkeys(node.operands):
                if n in self.users:
                    self.users[n].append(node)
        # Carries of a loop, and results, are in memory between iterations.
        leaving = {*body.outputs, *(new for _, new in body.aliases)}
        # What the loops of the body read besides their operands is in memory, too.
        for node in self.nodes:
            for inside in node.bodies:
                leaving.update(n for one in inside.walk() for n in one.operands)
        self.leaving = leaving
        self.stored = {n for n, node in self.producer.items() if not self._can_be_inside(n, node)}
        self._store_products()

    def _can_be_inside(self, n: int, node: Node) -> bool:
        """Whether a value can be computed inside all kernels that read it."""
        if n in self.leaving or len(node.results) != 1 or node.bodies or node.has_side_effects:
            return False
        is_product = node.primitive in PRODUCTS and self.platform.fuses_products
        if not is_product and (node.fusion not in FUSIBLE or node.primitive == "gather"):
            return False
        return all(self._absorbs(user, n) for user in self.users[n])

    def _absorbs(self, user: Node, n: int) -> bool:
        """Whether a node can compute an operand itself."""
        if user.bodies:
            return False
        if user.primitive in PRODUCTS:
            return self.platform.fuses_products
        if user.primitive == "dynamic_update_slice":
            # The array that is updated must be in memory, or the update would compute all of it.
            return n in written_values(user) and (len(user.operands) == 1 or n != user.operands[0])
        if user.primitive == "gather":  # it would compute elements that many rows look up many times
            return n not in user.operands[:1]
        return user.fusion in FUSIBLE or user.fusion is Fusion.REDUCE

    def _store_products(self) -> None:
        """A kernel has at most one product, which it computes once, with elementwise work behind it."""
        # For each value with a product inside: the smallest value from the product on, which can be stored.
        narrowest: dict[int, int] = {}
        sizes = self.graph.sizes
        for node in self.nodes:
            inner = [n for n in dict.fromkeys(node.operands) if n in narrowest and n not in self.stored]
            is_next = node.fusion in _POINTWISE and len(node.results) == 1
            for n in inner:
                # A reduction, or a second product, would repeat the product for each of its elements.
                same_size = is_next and self.graph.elements(n) == self.graph.elements(node.results[0])
                if not same_size or len(self.users[n]) > 1 or n != inner[0]:
                    self.stored.add(narrowest[n])
            if node.primitive in PRODUCTS:
                narrowest.update({n: n for n in node.results})
            for n in inner[:1]:
                (result,) = node.results if is_next else (n,)
                # If the stored value comes before this operand, the rest is computed where it is read.
                if self.stored.isdisjoint((n, narrowest[n])) and is_next:
                    best = narrowest[n]
                    narrowest[result] = result if sizes[result] <= sizes[best] else best

    # What is read

    def reads(self, roots: list[Node]) -> list[Access]:
        """The bytes that the kernels of some nodes read, by value in memory."""
        # In program order instead of recursively: chains can be long.
        known: dict[int, Access] = {}
        found: dict[Node, Access] = {}
        for node in self.inside(roots):
            access: Access = {}
            for n in dict.fromkeys(node.operands):
                if self.graph.elements(n) == 1:  # numbers are parameters of the kernel
                    continue
                share = read_share(node, n, self.graph)
                is_inside = n in self.producer and n not in self.stored
                for m, size in (known[n] if is_inside else {n: float(self.graph.sizes[n])}).items():
                    access[m] = max(access.get(m, 0.0), size * share)
            found[node] = access
            known.update(dict.fromkeys(node.results, access))
        return [found[node] for node in roots]

    def inside(self, roots: list[Node]) -> list[Node]:
        """The nodes that the kernels of some nodes compute; producers come before consumers."""
        found, stack = {*roots}, [*roots]
        while stack:
            for n in stack.pop().operands:
                if n in self.producer and n not in self.stored and self.producer[n] not in found:
                    found.add(self.producer[n])
                    stack.append(self.producer[n])
        return sorted(found, key=self.position.__getitem__)

    def sinks(self, n: int) -> Iterator[Node]:
        """The nodes with results in memory, or without any, that a value is computed inside of."""
        stack, seen = [*self.users[n]], set[Node]()
        while stack:
            node = stack.pop()
            if node in seen:
                continue
            seen.add(node)
            if node.results and not self.stored.issuperset(node.results):
                stack += (user for m in node.results for user in self.users[m])
            else:
                yield node

    def _traffic(self, roots: list[Node]) -> float:
        return sum(sum(access.values()) for access in self.reads(roots))

    def store_shared_values(self) -> None:
        """Store the values of several readers if that saves traffic."""
        for node in self.nodes:
            if len(node.results) != 1 or node.results[0] in self.stored or node.fusion is Fusion.INDEX:
                continue
            sinks = [*self.sinks(node.results[0])]
            if len(sinks) < 2:
                continue
            # Kernels that read the same arrays anyway compute it for nothing: compare all that they read.
            least, best = self._traffic(sinks), -1
            # `exp` and the like are computed once.
            if node.fusion is Fusion.EXPENSIVE:
                least = float("inf")
            for n in self._chain(node) if least < float("inf") else node.results:
                self.stored.add(n)
                traffic = self._traffic([*sinks, self.producer[n]]) + self.graph.sizes[n]
                self.stored.discard(n)
                if traffic < least:
                    least, best = traffic, n
            if best >= 0:
                self.stored.add(best)

    def _chain(self, node: Node) -> Iterator[int]:
        """The result of a node, and the smaller values that it is computed from alone."""
        smallest = self.graph.sizes[node.results[0]] + 1
        while True:
            (n,) = node.results
            if self.graph.sizes[n] < smallest:
                smallest = self.graph.sizes[n]
                yield n
            inner = [m for m in node.operands if m in self.producer and m not in self.stored]
            large = [m for m in inner if self.graph.elements(m) == self.graph.elements(n)]
            large = [m for m in large if self.producer[m].fusion not in (Fusion.BROADCAST, Fusion.INDEX)]
            if len(large) != 1 or len(self.producer[large[0]].results) != 1:
                return
            node = self.producer[large[0]]

    def kernels(self) -> list[Kernel]:
        """A kernel for each node with results in memory, or without any."""
        kernels = []
        for index, node in enumerate(self.nodes):
            if not node.results or not self.stored.isdisjoint(node.results) or node.bodies:
                inner = self.inside([node])
                results = {n for one in inner for n in one.results}
                operands = [n for one in inner for n in one.operands if n not in results]
                (access,) = self.reads([node])
                kernels.append(Kernel(node, index, inner, [*dict.fromkeys(operands)], access=access))
        return kernels


def merge_kernels(kernels: list[Kernel], fusion: _Fusion) -> list[Kernel]:
    """Merge each kernel into the one whose result it reads, if both work on the same elements."""
    maker = {n: kernel for kernel in kernels for n in kernel.root.results}
    group = {kernel: [kernel] for kernel in kernels}

    def needs(kernel: Kernel, target: list[Kernel]) -> bool:
        """Whether a kernel, with those that it was merged with, depends on a group."""
        stack, seen = [kernel], set[int]()
        while stack:
            members = group[stack.pop()]
            if members is target:
                return True
            if id(members) not in seen:
                seen.add(id(members))
                stack += (maker[n] for one in members for n in one.operands if n in maker)
        return False

    for kernel in kernels:
        size = _space(kernel, fusion)
        for n in kernel.operands if size else ():
            first = group[maker[n]] if n in maker else []
            if not first or first is group[kernel] or _space(first[0], fusion) != size:
                continue
            # What is computed from a sum of each row can be computed with it: the row is still on the chip.
            # Not if a product computes the row, in tiles.
            sums = [m for m in kernel.operands if m in maker and group[maker[m]] is first]
            sums = [m for m in sums if fusion.graph.elements(m) != size]
            if sums and (_has_product(first) or not all(_sums_rows(maker[m].root, fusion) for m in sums)):
                continue
            # What runs between them must not need the first and be needed by the second.
            others = [maker[m] for m in kernel.operands if m in maker and group[maker[m]] is not first]
            if not any(needs(other, first) for other in others):
                first.append(kernel)
                group[kernel] = first
                break
    return [*_joined(group)]


def _has_product(kernels: list[Kernel]) -> bool:
    return any(node.primitive in PRODUCTS for kernel in kernels for node in kernel.nodes)


def _sums_rows(node: Node, fusion: _Fusion) -> bool:
    """Whether a node reduces the last dims."""
    if node.fusion is not Fusion.REDUCE:
        return False
    rank = len(fusion.graph.avals[node.operands[0]].shape)
    axes = sorted(node.eqn.params.get("axes", ()))
    return axes == [*range(rank - len(axes), rank)]


def _space(kernel: Kernel, fusion: _Fusion) -> int:
    """The number of elements that a kernel works on, or 0 if it cannot be merged."""
    root = kernel.root
    if root.bodies or len(root.results) != 1:
        return 0
    has_product = _has_product([kernel])
    if root.fusion is Fusion.REDUCE:
        return fusion.graph.elements(root.operands[0])
    if root.fusion in _POINTWISE or (has_product and root.primitive in PRODUCTS):
        if has_product and not fusion.platform.fuses_products:
            return 0
        return fusion.graph.elements(root.results[0])
    return 0


def _joined(group: dict[Kernel, list[Kernel]]) -> Iterator[Kernel]:
    """A kernel for each group, with the results of all of its members."""
    for kernel, members in group.items():
        if members[-1] is not kernel:
            continue
        if len(members) > 1:
            nodes = [*dict.fromkeys(node for one in members for node in one.nodes)]
            computed = {n for node in nodes for n in node.results}
            kernel.nodes = nodes
            kernel.operands = [*dict.fromkeys(n for one in nodes for n in one.operands if n not in computed)]
            kernel.access = {}
            for one in members:
                for n, size in one.access.items():
                    if n not in computed:
                        kernel.access[n] = max(size, kernel.access.get(n, 0.0))
            # A new node: the others still compute their own results only.
            results = [n for one in members for n in one.root.results]
            kernel.root = like(kernel.root, kernel.root.primitive, kernel.operands, results)
        yield kernel
