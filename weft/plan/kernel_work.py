"""The work of a program as the compiler of a GPU or TPU runs it: one event for each kernel.

A kernel reads the arrays that it needs from memory and writes its results there. On a machine with memory on
the chip (`Hardware.on_chip_bytes`), the compiler keeps arrays there from the kernel that computes them to the
last one that reads them, if there is room: those arrays cost no traffic.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from ..hardware.profile import Hardware
from . import primitives
from .events import TracedEvent, with_phases, work_of
from .facts import Work
from .graph import Body, Graph, Node
from .memory.accelerator_fusion import PRODUCTS, written_values
from .memory.buffers import BufferAssignment
from .memory.kernels import Kernel
from .primitives import Fusion, aval_of


def kernel_events(
    graph: Graph, assignment: BufferAssignment, hardware: Hardware, traced: list[TracedEvent]
) -> list[TracedEvent]:
    """The events of a program on a machine: its collectives, and the work of its kernels.

    Args:
      graph: the program, with its kernels in the order in which they run.
      assignment: its buffers and kernels.
      hardware: the machine.
      traced: the events of the program before fusion, in program order.
    """
    # Kernels are listed where the program has the node that computes their result.
    order = {id(one.node.eqn): n for n, one in enumerate(traced)}
    collectives = [(order[id(one.node.eqn)], one) for one in traced if not isinstance(one.event, Work)]
    reader = _Reader(graph, assignment.kernels, hardware)
    kernels, position = [], 0
    for one in reader.events(graph.body, 1):
        position = order.get(id(one.node.eqn), position)
        kernels.append((position, one))
    return with_phases([one for _, one in sorted(collectives + kernels, key=lambda pair: pair[0])])


class _Reader:
    """Reads the work of the kernels of a graph."""

    def __init__(self, graph: Graph, kernels: dict[int, Kernel], hardware: Hardware):
        self.graph, self.kernels, self.hardware = graph, kernels, hardware

    def events(self, body: Body, count: int) -> Iterator[TracedEvent]:
        """The work of a body that runs `count` times."""
        on_chip = self._on_chip(body)
        for node in body.nodes:
            if node.primitive == "cond":
                branches = [[*self.events(branch, count)] for branch in node.bodies]
                yield from max(branches, key=lambda events: sum(map(self._seconds, events)))
            elif node.bodies:
                trips = node.eqn.params["length"] if node.primitive == "scan" else 1
                for inside in node.bodies:
                    yield from self.events(inside, count * trips)
            elif not node.row.collective:
                yield from self._work(self.kernels[id(node)], count, on_chip)

    def _work(self, kernel: Kernel, count: int, on_chip: set[int]) -> Iterator[TracedEvent]:
        flops = sum(primitives.flops(node.eqn) for node in kernel.nodes if _counts(node))
        # A product has the name of its kernel: it takes most of the time.
        named = next((node for node in kernel.nodes if node.primitive in PRODUCTS), kernel.root)
        read = sum(size for n, size in kernel.access.items() if n not in on_chip)
        traffic = read + sum(self._writes(kernel, on_chip).values())
        if flops or traffic:
            yield TracedEvent(work_of(named, self.graph.mesh, count, flops, round(traffic)), kernel.root, [])

    def _writes(self, kernel: Kernel, on_chip: set[int]) -> dict[int, float]:
        """The bytes that a kernel writes to memory, by value."""
        root, sizes = kernel.root, self.graph.sizes
        if root.primitive == "zeros" and self.hardware.platform == "tpu":
            return {}  # results of loops that are written in full are allocated only
        if root.fusion is not Fusion.UPDATE:
            return {n: sizes[n] for n in root.results if n not in on_chip}
        if self._is_updated_on_chip(root):
            return {n: 2 * sizes[n] for n in root.results}
        is_slice = root.primitive == "dynamic_update_slice"
        update = written_values(root)[0 if is_slice else -1]
        written = self.graph.elements(update) * aval_of(root.eqn.outvars[0]).dtype.itemsize
        # A scatter reads what it adds to.
        return {-1: written * (1 if is_slice else 2)}

    def _is_updated_on_chip(self, node: Node) -> bool:
        """Whether a scatter's array is moved to the chip, updated there, and moved back."""
        # libtpu does so with a KV cache. It adds to arrays where they are.
        return node.primitive == "scatter" and (
            self.graph.sizes[node.operands[0]] <= self.hardware.on_chip_bytes
        )

    def _seconds(self, event: TracedEvent) -> float:
        work = event.event
        assert isinstance(work, Work)
        compute = work.flops / self.hardware.peak(work.dtype)
        return work.count * max(compute, work.bytes / self.hardware.memory_bandwidth)

    def _on_chip(self, body: Body) -> set[int]:
        """The values of a body that are kept on the chip: those that save the most traffic for their size."""
        capacity, sizes = self.hardware.on_chip_bytes, self.graph.sizes
        if not capacity:
            return set()
        made = {n: index for index, node in enumerate(body.nodes) for n in node.results}
        last: dict[int, int] = {}
        saved: Counter[int] = Counter()
        leaving = {*body.outputs, *(n for pair in body.aliases for n in pair)}
        for index, node in enumerate(body.nodes):
            kernel = self.kernels[id(node)]
            for n in kernel.operands:
                last[n] = index
            if node.bodies or node.row.collective:
                leaving.update(kernel.operands, node.results)
            else:
                saved.update({n: round(size) for n, size in kernel.access.items()})
                saved.update({n: sizes[n] for n in node.results})
            # A scan's update of a stacked result has no other operand than what it adds.
            is_update = node.fusion is Fusion.UPDATE and len(node.operands) > 1
            if is_update and not self._is_updated_on_chip(node):
                leaving.update(node.results, node.operands[:1])
        chosen, used = set[int](), [0] * len(body.nodes)
        updated = {n for node in body.nodes if self._is_updated_on_chip(node) for n in node.results}
        stays = updated.union(made) - leaving | updated
        candidates = [n for n in made if n in last and n in stays and 0 < sizes[n] <= capacity]
        for n in sorted(candidates, key=lambda n: (-saved[n] / sizes[n], last[n] - made[n], -sizes[n])):
            span = range(made[n], last[n] + 1)
            if max(used[k] for k in span) + sizes[n] <= capacity:
                chosen.add(n)
                for k in span:
                    used[k] += sizes[n]
        return chosen


def _counts(node: Node) -> bool:
    """Whether a node is the one of its equation whose FLOPs count, and not one that XLA adds."""
    return node.primitive == node.eqn.primitive.name
