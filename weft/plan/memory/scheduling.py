"""Scheduling: the order in which XLA runs the kernels of a body."""

from __future__ import annotations

import heapq
from collections import Counter, deque

from ..graph import Body, Node
from ..primitives import FUSIBLE, Fusion
from .kernels import post_order

Reads = dict[int, dict[int, bool]]


def breadth_first(body: Body, reads: Reads, sizes: list[int]) -> list[Node]:
    """The nodes of a body in the order in which they become ready.

    XLA's CPU scheduler prefers work that can run concurrently: first in, first out.
    """
    nodes = post_order(body, lambda node: reads[id(node)])
    pending, users = _dependencies(nodes, reads)
    ready = deque(index for index, count in enumerate(pending) if not count)
    order = []
    while ready:
        index = ready.popleft()
        order.append(nodes[index])
        for user in users[index]:
            pending[user] -= 1
            if not pending[user]:
                ready.append(user)
    return order


def least_memory_order(body: Body, reads: Reads, sizes: list[int]) -> list[Node]:
    """The order of nodes that needs the least memory, among those that XLA tries.

    Args:
      body: the body; those of its loops have their order.
      reads: the values that each node reads.
      sizes: the bytes of each value.
    """
    depth_first = post_order(body, lambda node: reads[id(node)])
    candidates = [
        _program_order(body.nodes, reads),
        depth_first,
        most_freed_first(depth_first, reads, sizes),
    ]
    return min(candidates, key=lambda order: peak_of(order, body, reads, sizes))


def _dependencies(nodes: list[Node], reads: Reads) -> tuple[list[int], list[list[int]]]:
    """The number of nodes that each node waits for, and the nodes that wait for it."""
    producer = {n: index for index, node in enumerate(nodes) for n in node.results}
    pending: list[int] = []
    users: list[list[int]] = [[] for _ in nodes]
    for index, node in enumerate(nodes):
        needed = {producer[n] for n in reads[id(node)] if n in producer} - {index}
        pending.append(len(needed))
        for other in needed:
            users[other].append(index)
    return pending, users


def _program_order(nodes: list[Node], reads: Reads) -> list[Node]:
    """The nodes as they are, except that each comes after those that it needs.

    Arrays of zeros and the like, which depend on nothing, are computed where they are first read.
    """
    pending, users = _dependencies(nodes, reads)
    first = [
        min(found, default=index) if not count else index
        for index, (found, count) in enumerate(zip(users, pending, strict=True))
    ]
    ready = [(first[index], index) for index, count in enumerate(pending) if not count]
    heapq.heapify(ready)
    order = []
    while ready:
        _, index = heapq.heappop(ready)
        order.append(nodes[index])
        for user in users[index]:
            pending[user] -= 1
            if not pending[user]:
                heapq.heappush(ready, (first[user], user))
    return order


def most_freed_first(nodes: list[Node], reads: Reads, sizes: list[int]) -> list[Node]:
    """List scheduling: of the nodes that are ready, the one that frees the most memory runs first."""
    producer = {n: index for index, node in enumerate(nodes) for n in node.results}
    readers: dict[int, list[int]] = {}
    for index, node in enumerate(nodes):
        for n in reads[id(node)]:
            readers.setdefault(n, []).append(index)
    uses = {n: len(found) for n, found in readers.items()}
    pending, users = _dependencies(nodes, reads)

    def entry(index: int) -> tuple[int, int]:
        # The inputs of the body stay.
        dying = sum(sizes[n] for n in reads[id(nodes[index])] if uses[n] == 1 and n in producer)
        return sum(sizes[n] for n in nodes[index].results) - dying, index

    ready = [entry(index) for index, count in enumerate(pending) if not count]
    heapq.heapify(ready)
    order, done = list[Node](), set[int]()
    while ready:
        found = heapq.heappop(ready)
        index = found[1]
        if index in done:
            continue
        # What it frees may have changed since it became ready.
        if entry(index) != found:
            heapq.heappush(ready, entry(index))
            continue
        done.add(index)
        order.append(nodes[index])
        for n in reads[id(nodes[index])]:
            uses[n] -= 1
            if uses[n] == 1:
                for other in readers[n]:
                    if other not in done and not pending[other]:
                        heapq.heappush(ready, entry(other))
        for user in users[index]:
            pending[user] -= 1
            if not pending[user]:
                heapq.heappush(ready, entry(user))
    return order


def peak_of(order: list[Node], body: Body, reads: Reads, sizes: list[int]) -> int:
    """The most bytes of results that are live at once."""
    last = {n: index for index, node in enumerate(order) for n in reads[id(node)]}
    leaving = {*body.outputs, *(new for _, new in body.aliases)}
    dying: Counter[int] = Counter()
    live = peak = 0
    owned = {n for node in order for n in node.results}
    for index, node in enumerate(order):
        inner = max((peak_of(inside.nodes, inside, reads, sizes) for inside in node.bodies), default=0)
        # Loops, updates and elementwise work overwrite operands that nothing else reads.
        free = [n for n in reads[id(node)] if n in owned and n not in leaving and last[n] == index]
        for n in node.results:
            reused = next((m for m in free if sizes[m] == sizes[n]), None) if _overwrites(node) else None
            if reused is not None:
                free.remove(reused)
                dying[index] -= sizes[reused]
            else:
                live += sizes[n]
            if n not in leaving:
                dying[last.get(n, index)] += sizes[n]
        peak = max(peak, live + inner)
        live -= dying[index]
    return peak


def _overwrites(node: Node) -> bool:
    return bool(node.bodies) or node.fusion is Fusion.UPDATE or node.fusion in FUSIBLE
