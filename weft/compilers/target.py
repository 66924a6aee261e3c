"""Targets: what a program can be compiled for, `tpu-v5e:16x16` or `h100:16x8`.

A target is a hardware profile and the shape of a slice of it: the sides of a TPU's torus in chips, or the
number of hosts and of GPUs in each. A chip of TPU v2 and v3 has two devices, of the others one.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from ..core.errors import HardwareError, nearest
from ..hardware.profile import Hardware
from ..hardware.topology import device_count
from .gpus import GPUS, compile_options, describe_gpu

EXAMPLES = '"tpu-v5e:16x16", "tpu-v5p:4x4x8", "h100:16x8" (16 hosts of 8)'


@dataclass(frozen=True)
class TpuGeneration:
    """What libtpu calls a generation, and how its estimates become seconds.

    Attributes:
      topology: its name in topologies.
      clock: cycles per second.
      sides: the number of sides of a slice.
      largest: the largest slice.
      options: further arguments of the topology.
    """

    topology: str
    clock: float
    sides: int
    largest: tuple[int, ...]
    options: tuple[tuple[str, str], ...] = ()


# Clocks: Jouppi et al. for v2 and v3 (CACM 2020) and v4 (ISCA 2023). Of the others: the published peak over
# the FLOPs of a cycle, 2 · side² for each matrix unit (v5e 4 of 128², v5p 8 of 128², v6e 4 of 256²).
# "megacore": a chip is one device, as in the profile.
TPUS = {
    "tpu-v2": TpuGeneration("v2", 700e6, 2, (16, 16)),
    "tpu-v3": TpuGeneration("v3", 940e6, 2, (32, 32)),
    "tpu-v4": TpuGeneration("v4", 1050e6, 3, (16, 16, 16), (("chip_config_name", "megacore"),)),
    "tpu-v5e": TpuGeneration("v5e", 1500e6, 2, (16, 16)),
    "tpu-v5p": TpuGeneration("v5p", 1750e6, 3, (16, 16, 24)),
    "tpu-v6e": TpuGeneration("v6e", 1750e6, 2, (16, 16)),
}
_SHAPE = re.compile(r"[0-9]{1,6}(x[0-9]{1,6})*")
# A host has 2 x 2 chips, so the first two sides of a slice are even.
HOST_SIDE = 2
MOST_GPUS = 8  # of a host


@dataclass(frozen=True)
class Target:
    """What a program is compiled for.

    Attributes:
      name: `tpu-v5e:16x16`.
      hardware: the profile with its shape: the sides of a TPU slice in chips, or the hosts and the GPUs in
        each.
    """

    name: str
    hardware: Hardware

    @classmethod
    def of(cls, given: Target | str) -> Target:
        """The target with this name."""
        return given if isinstance(given, Target) else _parse(given)

    def __str__(self) -> str:
        return self.name

    @property
    def shape(self) -> tuple[int, ...]:
        """The sides of a TPU slice in chips; the hosts, and the GPUs in each."""
        return self.hardware.shape

    @property
    def platform(self) -> str:
        """JAX's name of the platform."""
        return "tpu" if self.hardware.name in TPUS else "cuda"

    @property
    def extra(self) -> str:
        """The extra of Weft that installs the compiler."""
        return f"{'tpu' if self.platform == 'tpu' else 'gpu'}-compiler"

    @property
    def devices(self) -> int:
        """The number of devices."""
        return device_count(self.hardware)

    @property
    def generation(self) -> TpuGeneration | None:
        """The TPU generation; None for GPUs."""
        return TPUS.get(self.hardware.name)

    @property
    def options(self) -> dict[str, Any]:
        """Compiler options of every compilation."""
        return {} if self.platform == "tpu" else compile_options(self.hardware)

    @cached_property
    def topology(self) -> dict[str, Any]:
        """The arguments of `jax.experimental.topologies.get_topology_desc`."""
        sides = "x".join(map(str, self.shape))
        if self.generation is not None:
            name = f"{self.generation.topology}:{sides}"
            single = {"chips_per_host_bounds": [1, 1, 1]} if math.prod(self.shape) == 1 else {}
            return {"topology_name": name, "platform": "tpu", **dict(self.generation.options), **single}
        hosts, gpus = self.shape
        return {
            "topology_name": self.name,
            "platform": "cuda",
            "target_config": describe_gpu(self.hardware),
            # Partitions of one NVLink domain, hosts in a partition, GPUs in a host.
            "topology": f"{hosts}x1x{gpus}",
        }


def _parse(name: str) -> Target:
    known = [*TPUS, *GPUS]
    kind, _, sides = name.partition(":") if isinstance(name, str) else ("", "", "")
    if kind not in known:
        close = kind and (nearest(kind.lower(), known) or nearest(f"tpu-{kind.lower()}", known))
        raise HardwareError(
            f"unknown target {name!r}{close}",
            f"known: {', '.join(known)}",
            rule="a target is one of these names and the shape of a slice",
            hint=f"for example {EXAMPLES}",
        )
    shape = tuple(map(int, sides.split("x"))) if _SHAPE.fullmatch(sides) else ()
    generation = TPUS.get(kind)
    missing = f"{sides!r} is not a shape" if sides else "it has no shape"
    rule = _broken_rule(shape, generation) if shape else missing
    if rule:
        close = ", ".join(nearest_shapes(kind, math.prod(shape) * _devices_per_chip(kind)))
        raise HardwareError(
            f"{name!r} is not a slice of {kind}: {rule}",
            rule="the shape of a TPU slice has the sides of its torus in chips; that of a GPU cluster the "
            "number of hosts and of GPUs in each",
            hint=f"the nearest ones: {close}",
        )
    shape = shape if generation or len(shape) == 2 else (1, *shape)
    return Target(name, replace(Hardware.of(kind), shape=shape))


def _broken_rule(shape: tuple[int, ...], generation: TpuGeneration | None) -> str:
    """What is wrong with a shape, or ""."""
    if min(shape) == 0:
        return "a side is 0"
    if generation is None:
        if len(shape) > 2:
            return f"it has {len(shape)} numbers, not 2"
        return f"a host has at most {MOST_GPUS} GPUs, not {shape[-1]}" if shape[-1] > MOST_GPUS else ""
    if len(shape) != generation.sides:
        return f"it has {len(shape)} sides, not {generation.sides}"
    if math.prod(shape) > 1 and any(side % HOST_SIDE for side in shape[:2]):
        return "a host has 2 x 2 chips, so the first two sides are even"
    if any(side > most for side, most in zip(sorted(shape), sorted(generation.largest), strict=True)):
        return f"the largest one is {'x'.join(map(str, generation.largest))}"
    return ""


def nearest_shapes(kind: str, devices: int) -> list[str]:
    """Targets of about this many devices."""
    chips = max(devices, 1) / _devices_per_chip(kind)
    sizes = sorted(known_shapes(kind), key=lambda shape: (abs(math.log(math.prod(shape) / chips)), shape))
    return [f"{kind}:{'x'.join(map(str, shape))}" for shape in sizes[:3]]


def _devices_per_chip(kind: str) -> int:
    generation = TPUS.get(kind)
    single = (1,) * (generation.sides if generation else 2)
    return device_count(replace(Hardware.of(kind), shape=single))


def known_shapes(kind: str) -> list[tuple[int, ...]]:
    """The usual slices of a generation, and clusters of GPUs: powers of two, as square as they can be."""
    generation = TPUS.get(kind)
    if generation is None:
        return [(1, 1), (1, 2), (1, 4), *((2**n, MOST_GPUS) for n in range(11))]
    shapes = [(1,) * generation.sides]
    shape: tuple[int, ...] = (2, 2) if generation.sides == 2 else (2, 2, 1)
    while not _broken_rule(shape, generation):
        shapes.append(shape)
        # The last of the smallest sides doubles.
        at = max(n for n, side in enumerate(shape) if side == min(shape))
        shape = tuple(sorted(side * 2 if n == at else side for n, side in enumerate(shape)))
    return shapes
