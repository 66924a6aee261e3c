"""A program as a vendor's compiler compiled it, without the vendor's device.

    compiled = program.compile_for("tpu-v5e:16x16", *args)
    print(compiled.explain())
    print(program.plan(*args).diff(compiled))

Nothing ran: what will run is exact, and how long it takes is estimated.
"""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..core.errors import MeshError, ProgramError
from ..core.field_types import PositiveInt
from ..core.fields import argument_types, check_values
from ..core.mesh import Mesh
from ..core.traced import Traced
from ..hardware.topology import Assignment
from ..plan.facts import UnboundedLoop, to_jsonable
from ..plan.network import assign_mesh
from ..plan.units import human_bytes, human_seconds
from .analysis import analyze
from .facts import VERSION, CompiledCollective, CompiledMemory, CompiledWork, LiveArray, PaddedArray
from .process import TIMEOUT, Progress, run_compiler
from .target import Target, nearest_shapes

if TYPE_CHECKING:
    from ..plan.plan import Plan


@dataclass(frozen=True, repr=False)
class Compiled:
    """What a vendor's compiler made of one call of a program, on each device.

    Attributes:
      name: the name of the function.
      target: what it was compiled for.
      mesh, layout: the mesh and the layout.
      assignment: where the axes of the mesh lie on the target's network, and the order of the devices.
      compiler: the compiler and its version.
      device_kind: the compiler's name of the device.
      seconds: how long the compiler took.
      memory: bytes on one device.
      work: the local work, by instruction, in the order in which it runs.
      collectives: the collectives as compiled, in order.
      largest: the largest arrays that are live when the program needs the most memory.
      padded: arrays that take more memory than their elements.
      loops: loops with an unknown number of iterations; one is counted.
      hlo: the text of the compiled program.
    """

    name: str
    target: Target
    mesh: Mesh
    layout: str
    assignment: Assignment
    compiler: str
    device_kind: str
    seconds: float
    memory: CompiledMemory
    work: tuple[CompiledWork, ...]
    collectives: tuple[CompiledCollective, ...]
    largest: tuple[LiveArray, ...]
    padded: tuple[PaddedArray, ...]
    loops: tuple[UnboundedLoop, ...]
    hlo: str

    def __repr__(self) -> str:
        fits = "fits" if self.memory.fits else "does not fit"
        return (
            f'<{self.name} on mesh "{self.mesh}" with {self.layout}, compiled for {self.target} by '
            f"{self.compiler}: {human_bytes(self.memory.peak)} of memory, which {fits}; "
            f"{human_seconds(self.local_seconds)} of local work by the roofline>"
        )

    @functools.cached_property
    def flops(self) -> int:
        """FLOPs of matmuls and convolutions on one device."""
        return sum(w.flops * w.count for w in self.work)

    @functools.cached_property
    def traffic(self) -> int:
        """Bytes that one device reads from and writes to its main memory."""
        return sum(w.bytes * w.count for w in self.work)

    @functools.cached_property
    def comm_bytes(self) -> dict[str, int]:
        """Bytes of collectives on one device by axis, as `Plan.comm_bytes`."""
        total: Counter[str] = Counter()
        for c in self.collectives:
            total[c.over] += c.bytes * c.count
        return dict(total)

    @functools.cached_property
    def local_seconds(self) -> float:
        """The roofline of the local work."""
        return sum(w.roofline_seconds * w.count for w in self.work)

    @functools.cached_property
    def estimated_seconds(self) -> float:
        """The compiler's own estimate of the local work; work without one counts at its roofline."""
        return sum(w.likely_seconds * w.count for w in self.work)

    @functools.cached_property
    def has_estimates(self) -> bool:
        """Whether the compiler estimated any work."""
        return any(w.estimated_seconds is not None for w in self.work)

    @functools.cached_property
    def network_seconds(self) -> float:
        """The time of all collectives on the target's network, by the network model of plans."""
        return sum(c.network_seconds * c.count for c in self.collectives)

    @functools.cached_property
    def exposed_seconds(self) -> float:
        """The part of `network_seconds` that no other work overlaps with."""
        return sum(c.exposed_seconds * c.count for c in self.collectives)

    @property
    def step_seconds(self) -> tuple[float, float]:
        """The range of the time of a call: local work by the roofline, and by the compiler's estimates, each
        with the collectives that nothing overlaps with."""
        ends = sorted((self.local_seconds, self.estimated_seconds))
        return ends[0] + self.exposed_seconds, ends[1] + self.exposed_seconds

    @functools.cached_property
    def copies(self) -> tuple[CompiledWork, ...]:
        """Copies and transposes in the main memory, which the program does not request; the largest first."""
        copies = [w for w in self.work if w.kind == "copy" and w.bytes]
        return tuple(sorted(copies, key=lambda w: -w.bytes * w.count))

    def explain(self, width: PositiveInt | None = None) -> str:
        """The compiled program as text.

        Args:
          width: the line width; 118 by default.
        """
        from .text import explain

        hint = "leave it out for lines of 118 characters"
        check_values(argument_types(Compiled.explain), {"width": width}, ProgramError, hint, "explain")
        return explain(self, width)

    def to_data(self) -> dict[str, Any]:
        """The compiled program as JSON-compatible data."""
        return {
            "version": VERSION,
            "name": self.name,
            "target": self.target.name,
            "mesh": [list(axis) for axis in self.mesh.axes],
            "layout": self.layout,
            "assignment": self.assignment.describe(),
            "compiler": self.compiler,
            "device_kind": self.device_kind,
            "compile_seconds": self.seconds,
            "memory": to_jsonable(self.memory) | {"peak": self.memory.peak, "fits": self.memory.fits},
            "flops": self.flops,
            "traffic": self.traffic,
            "comm_bytes": self.comm_bytes,
            "local_seconds": self.local_seconds,
            "estimated_seconds": self.estimated_seconds if self.has_estimates else None,
            "network_seconds": self.network_seconds,
            "exposed_seconds": self.exposed_seconds,
            "collectives": to_jsonable(self.collectives),
            "work": to_jsonable(self.work),
            "largest": to_jsonable(self.largest),
            "padded": to_jsonable(self.padded),
            "loops": to_jsonable(self.loops),
        }

    def to_json(self) -> str:
        """The compiled program as JSON; `version` is the version of the format."""
        return json.dumps(self.to_data(), indent=1)

    def to_html(self, plan: Plan | None = None) -> str:
        """The compiled program as one self-contained page.

        Args:
          plan: adds the numbers of a plan of the same call next to the compiled ones.
        """
        from .html import compiled_page

        return compiled_page(self, plan)


def compile_traced(
    traced: Traced,
    target: Target | str,
    *,
    options: Mapping[str, Any] | None = None,
    timeout: float | None = None,
    progress: Progress | None = None,
) -> Compiled:
    """Compile a traced program for a target, with the vendor's compiler, in a process of its own.

    Args:
      traced: the program.
      target: `tpu-v5e:16x16`, `h100:16x8` (16 hosts of 8).
      options: options of the compiler, over those of the program.
      timeout: seconds after which the compiler is stopped.
      progress: is called with each step of the compiler and the seconds since its start.
    """
    target, mesh = Target.of(target), traced.placement.mesh
    if mesh.size != target.devices:
        raise MeshError(
            f'mesh "{mesh}" has {mesh.size} devices, and {target} has {target.devices}',
            rule="the mesh of a program has one position for each device of the target",
            hint=f"choose another mesh, or a target of {mesh.size} devices: "
            f"{', '.join(nearest_shapes(target.hardware.name, mesh.size))}",
        ).located(f"compile_for({target.name!r})")
    assignment = assign_mesh(traced.collectives(), mesh, target.hardware)
    assert assignment is not None  # a target has a shape
    output = run_compiler(
        traced.export_for(target.platform),
        target,
        mesh.axes,
        assignment.order,
        traced.donated,
        {**traced.program.compiler_options, **(options or {})},
        timeout=TIMEOUT if timeout is None else timeout,
        progress=progress,
        name=traced.name,
    )
    analysis = analyze(output, target, mesh, assignment)
    return Compiled(
        name=traced.name,
        target=target,
        mesh=mesh,
        layout=repr(traced.placement.layout),
        assignment=assignment,
        compiler=output.compiler,
        device_kind=output.device_kind,
        seconds=output.seconds,
        memory=CompiledMemory(**output.memory, available=target.hardware.memory_bytes),
        work=analysis.work,
        collectives=analysis.collectives,
        largest=analysis.largest,
        padded=analysis.padded,
        loops=analysis.loops,
        hlo=output.hlo,
    )
