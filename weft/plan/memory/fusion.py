"""Fusion: which nodes XLA computes inside their consumers, and the order in which it runs the others.

`fuse(body, graph, platform)` removes the nodes that need no buffer and puts the rest in XLA's order. It
returns the kernel of each remaining node.
"""

from __future__ import annotations

from ..graph import Body, Graph
from ..primitives import Fusion
from .accelerator_fusion import fuse_into_kernels
from .kernels import Kernel, Kernels, is_broadcast, topological_order
from .library_fusion import fuse_library_calls
from .loop_fusion import fuse_loops
from .platforms import CPU, Platform
from .scheduling import breadth_first, least_memory_order


def fuse(body: Body, graph: Graph, platform: Platform) -> dict[int, Kernel]:
    """Remove fused nodes from a body and from its inner bodies, and order the rest.

    Args:
      body: the nodes of one device; changed in place.
      graph: the graph of the body.
      platform: whose compiler it is.

    Returns:
      The kernel that computes each remaining node, by the id of the node.
    """
    alive = _cpu_kernels(body, graph) if platform is CPU else fuse_into_kernels(body, graph, platform)
    kernels = {id(kernel.root): kernel for kernel in alive}
    for kernel in alive:
        kernel.reads = _reads(kernel)
    body.nodes = [kernel.root for kernel in alive]
    for node in body.nodes:
        for inside in node.bodies:
            kernels |= fuse(inside, graph, platform)
    reads = {key: kernel.reads for key, kernel in kernels.items()}
    order = breadth_first if platform is CPU else least_memory_order
    body.nodes = order(body, reads, graph.sizes)
    return kernels


def _cpu_kernels(body: Body, graph: Graph) -> list[Kernel]:
    kernels = Kernels.of(body, graph)
    fuse_library_calls(kernels)
    fuse_loops(kernels)
    return [*kernels.alive]


# An element of the result is not where it is in the operand.
_MOVES_DATA = frozenset([Fusion.PERMUTE, Fusion.SLICE, Fusion.REDUCE])


def _reads(kernel: Kernel) -> dict[int, bool]:
    """The values that a kernel reads, and whether its result may overwrite each.

    It may if the kernel reads each element where it writes the result, along every path from the operand.
    """
    in_place: dict[int, bool] = {}
    for node in reversed(topological_order(kernel.nodes)):
        same_position = not is_broadcast(node) and node.fusion not in _MOVES_DATA
        # An update in the middle of a kernel writes a few elements, but the kernel writes all of its result.
        is_inner_update = node.fusion is Fusion.UPDATE and node is not kernel.root
        so_far = all(in_place.get(n, True) for n in node.results)
        for n in node.operands:
            in_place[n] = in_place.get(n, True) and so_far and same_position and not is_inner_update
    return {n: in_place.get(n, True) and not kernel.is_library for n in kernel.operands}
