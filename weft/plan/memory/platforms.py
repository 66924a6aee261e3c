"""What distinguishes XLA's compilers for CPUs, GPUs and TPUs: one table."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Platform:
    """The choices of one compiler.

    Attributes:
      name: cpu, gpu or tpu.
      orders_dims: operands of matmuls, convolutions and collectives are copied into the dim order that these
        require. Other compilers choose the order of each array such that most of the copies are unnecessary.
      fuses_products: elementwise work is computed inside matmuls and convolutions.
      tiles_arrays: arrays are stored in tiles of their last two dims, and those of one dim in other tiles.
      merges_products: small matmuls that share an operand become one, and their other operands are
        concatenated.
      repeats_broadcasts: what is broadcast to many times its size is computed in loops, not before them.
      hoists_casts: if a loop reads an array only to round its slices, all of it is rounded before the loop.
    """

    name: str
    orders_dims: bool = False
    fuses_products: bool = False
    tiles_arrays: bool = False
    merges_products: bool = False
    repeats_broadcasts: bool = False
    hoists_casts: bool = False


PLATFORMS = {
    platform.name: platform
    for platform in (
        Platform("cpu", orders_dims=True),
        Platform("gpu", merges_products=True, repeats_broadcasts=True),
        Platform("tpu", fuses_products=True, tiles_arrays=True, repeats_broadcasts=True, hoists_casts=True),
    )
}
CPU = PLATFORMS["cpu"]
