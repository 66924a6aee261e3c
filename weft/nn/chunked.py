"""Functions of a sequence done piece by piece, so that what is inside is held for one piece at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

import weft as wf
from weft.core import context
from weft.core.errors import ShapeError
from weft.core.operands import as_slice
from weft.core.tensor import Tensor, is_tensor


def chunked(f: Callable[..., Any], args: Any, dim: str, pieces: int) -> Any:
    """`f(*args)`, computed for pieces of a dim one after the other, in the backward pass anew.

    Args:
      f: a function that treats the dim's elements alike, each by itself. What it draws, for dropout perhaps,
        goes by the place in the whole: it is as without pieces, bit for bit, if they divide the size.
      args: a tensor or a tuple of them, all with the dim.
      dim: its name.
      pieces: how many; they need not divide the size. If a layout splits the dim, let it split a piece
        evenly too: then nothing is sent for the cutting; else the dim is gathered first.
    """
    given = args if isinstance(args, tuple) else (args,)
    whole = next(d for d in given[0].dims if d.name == dim)
    if not 1 <= pieces <= whole.size:
        raise ShapeError(
            f"{pieces} pieces of {whole}",
            rule="a dim has at least one piece, and at most as many as elements",
            hint=f"ask for 1 to {whole.size} pieces",
        )
    size = -(-whole.size // pieces)
    # Each piece takes every pieces-th element: the dim's own name stays in front, and if it is split, pieces
    # are made of what each device has.
    inner, piece = whole.resize(size), wf.Dim("piece", pieces)

    def cut(t: Tensor) -> Tensor:
        return wf.split(wf.pad(t, dim, 0, size * pieces - whole.size), dim, [inner, piece])

    def of_piece(number: Tensor, *one: Tensor) -> Any:
        # Draws inside go by the place in the whole, as in a pipeline: else all pieces would drop the same.
        with context.require().part_of_dim(inner, piece, as_slice(number)._array):
            return f(*one)

    def step(_: None, one: tuple[Tensor, ...]) -> tuple[None, Any]:
        return None, wf.remat(of_piece)(*one)

    _, out = wf.scan(step, None, (wf.arange(piece), *(cut(t) for t in given)), piece)

    def whole_again(t: Tensor) -> Tensor:
        order = [d for d in t.dims if d != piece]
        place = order.index(inner)
        t = wf.transpose(t, [*order[: place + 1], piece, *order[place + 1 :]])
        merged = wf.merge(t, [inner, piece], whole.resize(size * pieces))
        return merged[dim, : whole.size] if size * pieces != whole.size else merged

    return jax.tree.map(whole_again, out, is_leaf=is_tensor)
