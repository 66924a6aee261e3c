"""Functions of a sequence, computed chunk by chunk to save memory."""

from __future__ import annotations

from collections.abc import Callable

import jax

import weft as wf
from weft.core.context import active
from weft.core.dims import DimLike, select_dim
from weft.core.errors import ShapeError
from weft.core.operands import as_slice
from weft.core.tensor import Tensor, is_tensor
from weft.core.types import PyTree


def chunked(f: Callable[..., PyTree], args: Tensor | tuple[Tensor, ...], dim: DimLike, chunks: int) -> PyTree:
    """`f(*args)`, computed for one chunk of a dim after the other, and recomputed in the backward pass.

    Only one chunk's intermediate results are in memory at a time.

    Args:
      f: a function that treats the dim's elements independently. Its random draws, for dropout perhaps,
        depend on the position in the whole dim: they are bit-identical to those without chunks if the number
        of chunks divides the size.
      args: a tensor or a tuple of tensors, all with the dim.
      dim: the dim, or its name.
      chunks: how many; they need not divide the size. If a layout splits the dim, choose chunks that it
        splits evenly too: forming them then moves no data; otherwise the dim is gathered first.
    """
    given = args if isinstance(args, tuple) else (args,)
    full = select_dim(given[0].dims, dim)
    name = full.name
    if not 1 <= chunks <= full.size:
        raise ShapeError(
            f"{chunks} chunks of {full}",
            rule="the number of chunks is at least 1 and at most the size of the dim",
            hint=f"use 1 to {full.size} chunks",
        )
    size = -(-full.size // chunks)
    # Each chunk takes every chunks-th element, not a contiguous block. The dim then stays in front when it is
    # split in two, so a device's slice of the dim contributes to every chunk, and nothing is exchanged.
    inner, chunk = full.resize(size), wf.Dim("chunk_index", chunks)

    def split(t: Tensor) -> Tensor:
        return wf.split(wf.pad(t, name, 0, size * chunks - full.size), name, [inner, chunk])

    def run_chunk(number: Tensor, *one: Tensor) -> PyTree:
        # Draws depend on the position in the whole dim, as in a pipeline. Otherwise all chunks would drop the
        # same elements.
        with active.context.in_part_of_dim(inner, chunk, as_slice(number)._read()):
            return f(*one)

    def step(_: None, one: tuple[Tensor, ...]) -> tuple[None, PyTree]:
        return None, wf.remat(run_chunk)(*one)

    _, out = wf.scan(step, None, (wf.arange(chunk), *(split(t) for t in given)), chunk)

    def merge(t: Tensor) -> Tensor:
        order = [d for d in t.dims if d != chunk]
        position = order.index(inner)
        t = wf.transpose(t, [*order[: position + 1], chunk, *order[position + 1 :]])
        merged = wf.merge(t, [inner, chunk], full.resize(size * chunks))
        return merged[name, : full.size] if size * chunks != full.size else merged

    return jax.tree.map(merge, out, is_leaf=is_tensor)
