"""Loop fusion: which nodes XLA's CPU backend computes inside the loops of their consumers.

The rules are those of XLA's `InstructionFusion` and its subclass for CPUs. From the last kernel to the first,
producers are fused into their consumers. A cheap producer is repeated in each consumer; an expensive one, or
one that would increase the memory traffic, has a buffer.
"""

from __future__ import annotations

from ..graph import Node
from ..primitives import ELEMENTWISE, Fusion
from .kernels import Kernel, Kernels, is_broadcast, topological_order

# A node of these has a loop over the elements of its result, which can compute its operands.
_LOOPS = ELEMENTWISE | {Fusion.BROADCAST, Fusion.INDEX, Fusion.PERMUTE, Fusion.SLICE, Fusion.REDUCE}
_MAX_CONCATENATED = 8
_MAX_GENERATED = 15  # more would take LLVM too long
# Their code has branches, so what one branch computes is not available in the next.
_BRANCHES = frozenset(["concatenate", "stack", "pad", "dynamic_update_slice"])
_TREE_REDUCTION = 32  # longer sums that no library computes are sums of sums of this length


def fuse_loops(kernels: Kernels) -> None:
    """Fuse producers into the loops of their consumers."""
    stored = _Stored(kernels).kernels
    queue = [*kernels.alive]
    while queue:
        consumer = queue.pop()
        if consumer not in kernels.alive or not has_loop(consumer, kernels):
            continue
        # The latest producer first: earlier ones may then have only this consumer.
        for producer in sorted(kernels.producers_of(consumer), key=lambda k: -k.index):
            if producer not in stored and should_fuse(producer, consumer, kernels):
                kernels.fuse(producer, consumer)
                stored.discard(consumer)
                queue.append(consumer)
                break


def has_loop(kernel: Kernel, kernels: Kernels) -> bool:
    """Whether a kernel can be fused with its operands or its consumers."""
    node = kernel.root
    if kernel.is_library or node.bodies or len(node.results) != 1:
        return False
    if node.fusion is Fusion.REDUCE:
        return not _is_tree(node, kernels)
    return node.fusion in _LOOPS or node.primitive == "dynamic_update_slice"


def should_fuse(producer: Kernel, consumer: Kernel, kernels: Kernels) -> bool:
    """Whether XLA fuses a producer into a consumer."""
    node, root = producer.root, consumer.root
    # A fusion is not fused into another one.
    if len(producer.nodes) > 1 or len(node.results) != 1:
        return False
    if not has_loop(producer, kernels) or not has_loop(consumer, kernels):
        return False
    # Rows are concatenated by copying memory, which is faster than a branch for each element.
    if copies_rows(node, kernels) or (len(consumer.nodes) == 1 and copies_rows(root, kernels)):
        return False
    # The array that is updated must be in memory, or the update would compute all of it.
    if root.primitive == "dynamic_update_slice" and root.operands[0] in node.results:
        return False
    if len(consumer.nodes) > 1 and _duplicates_code(producer, consumer, kernels):
        return False
    expensive = is_expensive(node, kernels)
    is_repeated = kernels.users[producer] != {consumer} or producer in kernels.returned
    return not (expensive and (is_repeated or _repeats_elements(consumer, node.results[0], kernels)))


def copies_rows(node: Node, kernels: Kernels) -> bool:
    """Whether a node concatenates along the last dim, or many arrays."""
    if node.primitive not in ("concatenate", "stack"):
        return False
    if len(node.operands) > _MAX_CONCATENATED:
        return True
    aval = kernels.graph.avals[node.results[0]]
    params = node.eqn.params
    is_last = aval.ndim > 1 and params.get("dimension", params.get("axis")) == aval.ndim - 1
    return is_last and aval.shape[-1] * aval.dtype.itemsize >= 64 and aval.size * aval.dtype.itemsize >= 2048


def is_expensive(node: Node, kernels: Kernels) -> bool:
    """Whether a node is too expensive to compute twice."""
    # CPUs have no instruction for it: rounding to bfloat16 checks for NaN.
    if node.primitive == "convert_element_type":
        types = kernels.dtype(node.operands[0]), kernels.dtype(node.results[0])
        return types == ("float32", "bfloat16")
    return node.fusion in (Fusion.EXPENSIVE, Fusion.REDUCE) or node.primitive == "gather"


def _is_tree(node: Node, kernels: Kernels) -> bool:
    if node.primitive in ("argmax", "argmin"):
        return False
    shape = kernels.graph.avals[node.operands[0]].shape
    axes = node.eqn.params.get("axes", ())
    return any(n < len(shape) and shape[n] > _TREE_REDUCTION for n in axes)


def _repeats_elements(consumer: Kernel, n: int, kernels: Kernels) -> bool:
    """Whether a consumer uses the elements of a value more than once."""
    repeated: set[int] = set()
    for node in reversed(topological_order(consumer.nodes)):
        grows = node.fusion is Fusion.BROADCAST and (
            kernels.graph.elements(node.operands[0]) < kernels.graph.elements(node.results[0])
        )
        if grows or not repeated.isdisjoint(node.results):
            repeated.update(node.operands)
    return n in repeated


def _duplicates_code(producer: Kernel, consumer: Kernel, kernels: Kernels) -> bool:
    """Whether fusing a producer into a fused consumer would generate its code too often.

    Its code is generated once for each index that it is read at. Producers with branches are not fused at all
    if they are read more than once: values cannot be reused across branches.
    """
    node, (value,) = producer.root, producer.root.results
    # A broadcast is always fused: its result would need far more memory than its operand.
    if node.fusion is Fusion.BROADCAST:
        return False
    count = _generated(consumer, kernels)[value]
    if node.primitive in _BRANCHES or node.fusion is Fusion.REDUCE:
        uses = sum(value in one.operands for user in kernels.users[producer] for one in user.nodes)
        return count > 1 or uses > 1
    return count > _MAX_GENERATED


def _generated(kernel: Kernel, kernels: Kernels) -> dict[int, int]:
    """How often the code of each value that a kernel computes or reads is generated."""
    shapes = kernels.graph.avals
    # The nodes that compute an index for a value: those that read it and change its shape, or their readers.
    indexed_by: dict[int, set[Node]] = {n: {kernel.root} for n in kernel.root.results}
    count = {kernel.root: 1}
    for node in reversed(topological_order(kernel.nodes)):
        own = indexed_by[node.results[0]]
        count[node] = sum(count[user] for user in own)
        for n in node.operands:
            is_same = node.primitive == "transpose" or shapes[n].shape == shapes[node.results[0]].shape
            indexed_by.setdefault(n, set()).update(own if is_same else {node})
    return {n: sum(count[user] for user in users) for n, users in indexed_by.items()}


class _Stored:
    """Finds the kernels that XLA does not repeat in their consumers, because that would increase the traffic.

    A kernel may be fused if it reads no more than it writes, or if each path to each of its users is fused:
    otherwise its buffer is needed anyway.
    """

    def __init__(self, kernels: Kernels):
        self.all = kernels
        self.kernels: set[Kernel] = set()
        self._ancestors: dict[Kernel, set[Kernel]] = {}
        self._ordered = [*kernels.alive]
        self._position = {kernel: index for index, kernel in enumerate(self._ordered)}
        for kernel in kernels.alive:
            producers = kernels.producers_of(kernel)
            self._ancestors[kernel] = {*producers}.union(*(self._ancestors[p] for p in producers))
        # Users first: whether a path is fused depends on the kernels that were found to be stored.
        for kernel in reversed(self._ordered):
            if self._is_stored(kernel):
                self.kernels.add(kernel)

    def _is_stored(self, kernel: Kernel) -> bool:
        node, kernels = kernel.root, self.all
        if kernel.is_library or not node.results:
            return False
        rank = max(map(kernels.true_rank, node.results))
        large = [n for n in node.operands if kernels.true_rank(n) >= rank and not self._is_broadcast(n)]
        read = sum(kernels.graph.elements(n) for n in {*node.operands})
        if len(large) <= 1 or read <= sum(map(kernels.graph.elements, node.results)):
            return False
        is_fused = has_loop(kernel, kernels) and kernel not in kernels.returned
        return not (is_fused and self._is_fused_on_all_paths(kernel))

    def _is_broadcast(self, n: int) -> bool:
        return n in self.all.producer and is_broadcast(self.all.producer[n].root)

    def _is_fused_on_all_paths(self, producer: Kernel) -> bool:
        """Whether each user of a producer is fused with all kernels between the producer and itself."""
        kernels, users = self.all, self.all.users[producer]
        if not all(should_fuse(producer, user, kernels) for user in users):
            return False
        if len(users) == 1:
            return True  # there is only one path
        last = max((user.index for user in users), default=producer.index)
        fused = {producer: True}
        # In post-order, so that the kernels in between come first. Paths can be too long for a recursion.
        for kernel in self._ordered[self._position[producer] + 1 :]:
            if kernel.index > last:
                break
            if producer in self._ancestors[kernel]:
                between = [k for k in kernels.producers_of(kernel) if k in fused]
                fused[kernel] = has_loop(kernel, kernels) and all(
                    fused[k] and k not in self.kernels and should_fuse(k, kernel, kernels) for k in between
                )
        return all(fused[user] for user in users)
