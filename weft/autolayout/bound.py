"""Lower bounds on the time and memory of candidates, for all candidates of a mesh at once.

**Work.** The axes of an op's dims divide its work, and no others do: `seconds / Π sizes`.

**Collectives.** A collective of the universal trace occurs in a candidate that has one of its trigger dims on
an axis. It runs over those axes, on data that the other axes shrink. Dims that share an axis can save
collectives: a renamed dim needs no gather if its new name is on the same axis, a sum becomes a
reduce-scatter, and sums of the same value become one. Groups of dims where this can happen count less.
Collectives that can overlap with the work of their phase count only where they exceed it.

**Memory.** The stored tensors and the buffers of the universal trace, each divided by the axes of its dims.

A candidate chooses one group of dims for each axis, and every term is a product of one factor per axis. The
bounds of all candidates of a mesh are therefore a few matrix products over parts × groups (`_sum_products`).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ..core.labels import OpLabel
from ..core.mesh import Mesh
from ..hardware.profile import Hardware
from ..plan.events import wire_bytes
from ..plan.facts import Collective
from ..plan.memory.buffers import Buffer
from ..plan.network import collective_seconds
from ..plan.time import can_overlap, main_dtype, work_seconds
from .cost_atoms import CostAtoms, WorkAtom
from .space import Candidate, DimGroup, MeshShape, StorageLevels, extra_storage_dims

# Plans round sizes to whole bytes, and a split program may fuse a little more than the universal trace.
SLACK = 1 - 2e-3
# A split program may fuse better than the universal trace, and then needs less memory for buffers. The tests
# compare the bound with the plans of all layouts of several programs.
MIN_BUFFER_SHARE = 0.8
LARGE_MESSAGE = 1 << 40  # bytes; large enough that latency does not affect the measured rate
PHASES = ("forward", "backward", "update")
# A *sharding* is the group of dims on each axis. Values, stored parameters and stored optimizer state each
# have one: the last two include the extra dims of the storage level. The extra dims alone are two more
# shardings, because gathers of stored parameters run over these only.
SHARDING_OF_ROLE = {"value": "value", "param": "param", "optimizer": "state"}
EXTRA_SHARDINGS = {"param extra": "params", "state extra": "optimizer"}


@dataclass(frozen=True)
class CollectiveCost:
    """A collective of the universal trace, or a gather that a storage level adds.

    Attributes:
      trigger_sharding: the sharding whose dims cause it.
      payload_sharding: the sharding by which the other axes shrink its data.
      kind: as of `Collective`.
      trigger_dims, payload_dims: as of `CollectiveAtom`.
      bytes, count: as of `Collective`.
      is_gradient: whether it sums a gradient.
      index: tells equal collectives apart.
    """

    trigger_sharding: str
    payload_sharding: str
    kind: str
    trigger_dims: DimGroup
    payload_dims: DimGroup
    bytes: float
    count: int
    is_gradient: bool
    index: int


@dataclass(frozen=True)
class WorkCost:
    """The seconds of some work, the dims that divide it, and the layers dim of its pipeline, or "".

    Negative seconds cancel work that only runs in a pipeline, where the layers are not split into stages.
    """

    dims: DimGroup
    seconds: float
    pipeline: str


class LowerBound:
    """Lower bounds for the candidates of one program.

    Args:
      atoms: the costs of the program.
      hardware: the machine.
      devices: the number of devices.
      groups: the groups of dims that an axis can split.
    """

    def __init__(self, atoms: CostAtoms, hardware: Hardware, devices: int, groups: Sequence[DimGroup]):
        self.atoms, self.hardware, self.groups = atoms, hardware, groups
        self.dtype = main_dtype(atoms.plan)
        # Virtual devices share cores, and everything takes longer by this factor (`plan/time.py`).
        self.slowdown = devices / hardware.shared_cores if hardware.shared_cores else 1.0
        self.state = [tensor for tensor in atoms.inputs if tensor.role != "value"]
        # By role, because each role has a sharding of its own.
        self._inputs: dict[str, list[tuple[DimGroup, int]]] = defaultdict(list)
        for tensor in atoms.inputs:
            dims = frozenset(name for name, n, _ in tensor.dims if n > 1)
            self._inputs[tensor.role].append((dims, tensor.bytes))
        self.work = self._collect_work()
        self.collectives = self._collect_collectives()
        gathers = (atom.trigger_dims for atom in atoms.collectives if atom.collective.kind == "all-gather")
        self._gathered_dims: DimGroup = frozenset().union(*gathers)
        # The same few values are needed for thousands of candidates.
        self._rates: dict[tuple[MeshShape, tuple[int, ...], str], tuple[float, float]] = {}
        self._savings: dict[DimGroup, tuple[set[int], bool]] = {}
        self._shares: dict[tuple[DimGroup, int], float] = {}
        self._storage_dims: dict[tuple[DimGroup, int], DimGroup] = {}

    def mesh_seconds(self, sizes: MeshShape, levels: StorageLevels) -> np.ndarray:
        """The bounds in seconds of all candidates of a mesh, indexed by one group for each axis."""
        zeros = np.zeros([len(self.groups)] * len(sizes))
        exposed, work, hidden = zeros, dict.fromkeys(PHASES, zeros), dict.fromkeys(PHASES, zeros)
        for phase, costs in self.work.items():
            factors = []
            for size, level in zip(sizes, levels, strict=True):
                shardings = self._axis_shardings(size, level)
                choices = [shardings[self._work_sharding(phase, cost.dims, levels)] for cost in costs]
                shares = self._share_table([cost.dims for cost in costs], choices, size)
                factors.append(shares * self._pipeline_factors(costs, choices, size))
            work[phase] = _sum_products(np.array([cost.seconds for cost in costs]), factors)
        for (phase, overlaps), collectives in self._all_collectives(levels):
            seconds = self._mesh_collective_seconds(collectives, sizes, levels)
            if overlaps:
                hidden[phase] = hidden[phase] + seconds
            else:
                exposed = exposed + seconds
        # `plan/time.py` hides collectives behind the work of their phase: the longer of the two counts.
        return SLACK * (exposed + sum(np.maximum(work[phase], hidden[phase]) for phase in PHASES))

    def candidate_seconds(self, candidate: Candidate) -> float:
        """The bound in seconds of one candidate; tighter than `mesh_seconds`.

        A product of one factor per axis can't see that two axes split the same dim, whose slices then have
        `ceil(n / (a · b))` elements. It can't see either which array limits the traffic of some work.
        """
        levels, sizes = candidate.levels, candidate.sizes
        shardings = self._candidate_shardings(candidate)
        exposed, work, hidden = 0.0, defaultdict[str, float](float), defaultdict[str, float](float)
        share = functools.cache(lambda dims, sharding: self._device_share(dims, sizes, shardings[sharding]))
        stages = self._ways(frozenset(self.atoms.pipelines), sizes, candidate.groups)
        for atom in self.atoms.work:
            seconds = self._atom_seconds(atom, share, levels)
            if atom.pipeline in stages and atom.work.kind == "matmul":
                seconds *= self._bubble_factor(atom.pipeline, stages[atom.pipeline])
                if self._is_recomputed(atom):
                    work["backward"] += seconds
            work[atom.work.phase] += seconds
        for (phase, overlaps), costs in self._all_collectives(levels):
            for cost in costs:
                seconds = self._candidate_collective_seconds(cost, sizes, levels, shardings)
                if overlaps:
                    hidden[phase] += seconds
                else:
                    exposed += seconds
        return SLACK * (exposed + sum(max(work[phase], hidden[phase]) for phase in PHASES))

    def _collect_work(self) -> dict[str, list[WorkCost]]:
        """The seconds of all work on full-size tensors, by phase; atoms with the same dims are added up."""
        totals = defaultdict[tuple[str, DimGroup, str, bool], float](float)
        for atom in self.atoms.work:
            compute, memory = work_seconds(atom.work, self.hardware, self.dtype)
            seconds = compute + memory if self.hardware.shared_cores else max(compute, memory)
            seconds *= self.slowdown * atom.work.count
            pipeline = atom.pipeline if atom.work.kind == "matmul" else ""
            totals[atom.work.phase, atom.dims, pipeline, False] += seconds
            if pipeline and self._is_recomputed(atom):
                # Recomputed only if the layers are split into stages. The negative cost cancels it
                # otherwise, so that the bound stays one sum of products.
                totals["backward", atom.dims, pipeline, False] += seconds
                totals["backward", atom.dims, pipeline, True] -= seconds
        costs: dict[str, list[WorkCost]] = defaultdict(list)
        for (phase, dims, pipeline, _), seconds in totals.items():
            costs[phase].append(WorkCost(dims, seconds, pipeline))
        return costs

    def _is_recomputed(self, atom: WorkAtom) -> bool:
        """Whether the backward pass of a pipeline computes this work a second time."""
        return atom.work.phase == "forward" and self.atoms.pipelines[atom.pipeline].recomputes

    def _work_sharding(self, phase: str, dims: DimGroup, levels: StorageLevels) -> str:
        """The sharding that divides some work.

        Updates run on stored state. Work whose dims are all a parameter's may run on the stored slice, for
        example a cast before the gather.
        """
        if phase == "update":
            return "state"
        on_stored = "params" in levels and any(dims <= stored for stored, _ in self._inputs.get("param", ()))
        return "param" if on_stored else "value"

    def _pipeline_factors(
        self, costs: Sequence[WorkCost], choices: Sequence[Sequence[DimGroup]], size: int
    ) -> np.ndarray:
        """The factor by which pipeline bubbles lengthen each work, by the group on an axis."""
        factors = np.ones([len(costs), len(self.groups)])
        for n, (cost, groups) in enumerate(zip(costs, choices, strict=True)):
            if cost.pipeline:
                is_staged = np.array([cost.pipeline in group for group in groups])
                # A negative cost cancels recomputation, which does take place in stages.
                staged = 0.0 if cost.seconds < 0 else self._bubble_factor(cost.pipeline, size)
                factors[n] = np.where(is_staged, staged, 1.0)
        return factors

    def _bubble_factor(self, layers: str, stages: int) -> float:
        """(M + K - 1) / M: K stages take this many ticks per micro-batch."""
        pipeline = self.atoms.pipelines[layers]
        return 1 + (stages - 1) / (pipeline.micro or min(4 * stages, pipeline.batch.size))

    def _atom_seconds(
        self, atom: WorkAtom, share: Callable[[DimGroup, str], float], levels: StorageLevels
    ) -> float:
        """The least seconds of some work, given the share of a tensor that is on one device.

        Each array it accesses shrinks only along its own dims, so its traffic can exceed its share of the
        total: a weight that is read for a slice of the batch is read in full.
        """
        sharding = self._work_sharding(atom.work.phase, atom.dims, levels)
        full = work_seconds(atom.work, self.hardware, self.dtype)
        compute, memory = (seconds * share(atom.dims, sharding) for seconds in full)
        traffic = sum(bytes * share(dims, sharding) for bytes, dims in atom.accesses)
        if sharding == "param" and atom.work.phase == "backward" and atom.work.op.name == "astype":
            # A gradient is cast before it is scattered: the result is written at the size of the value.
            bytes, dims = atom.accesses[-1]
            traffic += bytes * (share(dims, "value") - share(dims, sharding))
        memory = max(memory, traffic / self.hardware.memory_bandwidth)
        # Virtual devices compute and copy on the same cores, so that nothing overlaps (`plan/time.py`).
        seconds = compute + memory if self.hardware.shared_cores else max(compute, memory)
        return self.slowdown * seconds * atom.work.count

    def _all_collectives(self, levels: StorageLevels) -> list[tuple[tuple[str, bool], list[CollectiveCost]]]:
        """The collectives of the program and of its storage levels, by phase and whether they can overlap."""
        return [*self.collectives.items(), *self._storage_gathers(levels).items()]

    def _collect_collectives(self) -> dict[tuple[str, bool], list[CollectiveCost]]:
        """The collectives of the universal trace, without those that a real layout may not have.

        With every dim on its own axis, the gradient of a parameter may be summed several times, once for each
        use. In a real layout these can be one sum, so only one counts for each parameter. The same holds for
        sums of values that differ only by the name of a dim.
        """
        stored = [frozenset(name for name, n, _ in tensor.dims if n > 1) for tensor in self.atoms.inputs]
        remaining = {dims: stored.count(dims) for dims in stored}
        seen: set[tuple[DimGroup, DimGroup]] = set()
        # A gradient is an all-reduce or a reduce-scatter, by the layout of the state.
        sums_overlap = not {"all-reduce", "reduce-scatter"}.isdisjoint(self.hardware.overlapped)
        costs: dict[tuple[str, bool], list[CollectiveCost]] = defaultdict(list)
        # Largest first: of several sums that become one, the largest is the one that stays.
        atoms = sorted(self.atoms.collectives, key=lambda a: -a.collective.bytes * a.collective.count)
        for index, atom in enumerate(atoms):
            c, dims = atom.collective, atom.payload_dims
            count, is_gradient = c.count, False
            is_backward_sum = c.phase == "backward" and c.kind == "all-reduce"
            if is_backward_sum and dims in remaining:
                if not remaining[dims]:
                    continue
                # Once, even if the trace sums it in each iteration of a loop: a real layout may leave it
                # pending.
                remaining[dims], count, is_gradient = remaining[dims] - 1, 1, True
            renamed = [group for group in self.atoms.renamed if group & dims]
            if is_backward_sum and renamed:
                key = atom.trigger_dims, dims.union(*renamed)
                if key in seen:
                    continue
                seen.add(key)
            is_gradient = is_gradient or (c.phase == "backward" and any(dims <= s for s in stored if dims))
            is_hidden = is_gradient and sums_overlap
            overlaps = not self.hardware.shared_cores and (
                is_hidden or can_overlap(c, self.atoms.plan, self.hardware)
            )
            trigger = "state" if c.phase == "update" else "value"
            # A gradient may be sliced to the layout of stored state before it is summed, and is smaller then.
            payload = "state" if is_gradient else trigger
            costs[c.phase, overlaps].append(
                CollectiveCost(
                    trigger, payload, c.kind, atom.trigger_dims, dims, c.bytes, count, is_gradient, index
                )
            )
        return costs

    def _storage_gathers(self, levels: StorageLevels) -> dict[tuple[str, bool], list[CollectiveCost]]:
        """The all-gathers of parameters that are stored, or updated, split along extra dims."""
        params = self._inputs.get("param", [])
        costs: dict[tuple[str, bool], list[CollectiveCost]] = {}
        if params and "params" in levels:
            # Gathered where they are used, possibly after a cast to half of their width: a lower bound has to
            # assume the cast.
            costs["forward", not self.hardware.shared_cores] = [
                CollectiveCost("param extra", "value", "all-gather", dims, dims, bytes / 2, 1, False, index)
                for index, (dims, bytes) in enumerate(params)
            ]
        # Updates run on the splits of the optimizer state, and their results are gathered to those of
        # parameters.
        if params and "optimizer" in levels:
            costs["update", False] = [
                CollectiveCost("state extra", "param", "all-gather", dims, dims, bytes, 1, False, index)
                for index, (dims, bytes) in enumerate(params)
            ]
        return costs

    def _mesh_collective_seconds(
        self, costs: list[CollectiveCost], sizes: MeshShape, levels: StorageLevels
    ) -> np.ndarray:
        """The seconds of collectives for all candidates of a mesh.

        The duration depends on the set of axes a collective runs over, which is not a product over axes. So
        each set of axes is a sum of its own: of the collectives that run over exactly these axes.
        """
        axes_range = range(len(sizes))
        # One table of collectives × groups for each axis: `_sum_products` multiplies one factor of each.
        weights, shares = [], []
        for size, level in zip(sizes, levels, strict=True):
            shardings = self._axis_shardings(size, level)
            weights.append(
                np.array(
                    [
                        [self._collective_weight(c, group) for group in shardings[c.trigger_sharding]]
                        for c in costs
                    ]
                )
            )
            payloads = [shardings[c.payload_sharding] for c in costs]
            shares.append(self._share_table([c.payload_dims for c in costs], payloads, size))
        counts = np.array([c.count * self.slowdown for c in costs])
        # All gradient sums of a step start as one collective (`plan/time.py`): their latency is not counted.
        starts = counts * [not c.is_gradient for c in costs]
        bytes = np.array([c.bytes for c in costs])
        total = np.zeros([len(self.groups)] * len(sizes))
        for axes in _axis_subsets(axes_range):
            kinds = [self._collective_kind(c, levels, axes) for c in costs]
            latency, rate = np.array([self._latency_and_rate(sizes, axes, kind) for kind in kinds]).T
            occurs = [weights[n] if n in axes else 1.0 * (weights[n] == 0) for n in axes_range]
            sends = [occurs[n] if n in axes else occurs[n] * shares[n] for n in axes_range]
            total += _sum_products(starts * latency, occurs) + _sum_products(counts * bytes * rate, sends)
        return total

    def _candidate_collective_seconds(
        self,
        cost: CollectiveCost,
        sizes: MeshShape,
        levels: StorageLevels,
        shardings: dict[str, list[DimGroup]],
    ) -> float:
        """The seconds of a collective for one candidate; 0 if no axis triggers it."""
        weights = [self._collective_weight(cost, group) for group in shardings[cost.trigger_sharding]]
        axes = tuple(n for n, weight in enumerate(weights) if weight)
        if not axes:
            return 0.0
        latency, rate = self._latency_and_rate(sizes, axes, self._collective_kind(cost, levels, axes))
        others = [
            frozenset[str]() if n in axes else group
            for n, group in enumerate(shardings[cost.payload_sharding])
        ]
        bytes = cost.bytes * self._device_share(cost.payload_dims, sizes, others)
        if cost.trigger_sharding in EXTRA_SHARDINGS:
            # A gather of stored slices also transfers their padding.
            stored = shardings[cost.trigger_sharding.removesuffix(" extra")]
            bytes *= self._padding_factor(cost.payload_dims, sizes, stored)
        latency *= not cost.is_gradient  # merged with others, as in `_mesh_collective_seconds`
        seconds = self.slowdown * cost.count * (latency + bytes * rate)
        return seconds * math.prod(weights[n] for n in axes)

    @staticmethod
    def _collective_kind(cost: CollectiveCost, levels: StorageLevels, axes: tuple[int, ...]) -> str:
        """The kind of a collective: a gradient sum is a reduce-scatter where state has extra dims."""
        is_scattered = cost.is_gradient and any(levels[n] for n in axes)
        return "reduce-scatter" if is_scattered and cost.kind == "all-reduce" else cost.kind

    def _collective_weight(self, cost: CollectiveCost, group: DimGroup) -> float:
        """The share of a collective that at least occurs if an axis splits a group of dims.

        0 if the group does not trigger it or another collective may include it, and 0.5 if the all-reduce may
        become a reduce-scatter, which sends half as much.
        """
        if not cost.trigger_dims & group:
            return 0.0
        if cost.trigger_sharding in EXTRA_SHARDINGS:
            return 1.0
        if group not in self._savings:
            has_rename = any(group & dims for dims in self.atoms.renamed)
            self._savings[group] = self._mergeable_sums(group), has_rename
        mergeable, has_rename = self._savings[group]
        if cost.index in mergeable:
            return 0.0
        if has_rename:  # the gather is not needed if the new name is on the same axis
            return 0.5 if cost.kind == "all-reduce" else 0.0
        # If the summed value has another dim on the same axis, or had one before a gather, the sum is
        # scattered along that dim.
        is_scattered = cost.payload_dims & group or (cost.is_gradient and self._gathered_dims & group)
        return 0.5 if cost.kind == "all-reduce" and is_scattered else 1.0

    def _mergeable_sums(self, group: DimGroup) -> set[int]:
        """The sums that may merge into others if the group shares an axis: all but the largest per phase."""
        merged = [sums for sums in self.atoms.mergeable if all(dims & group for dims in sums)]
        trigger_dims = frozenset[DimGroup]().union(*merged)
        indices: set[int] = set()
        for costs in self.collectives.values():
            sums = sorted(
                (c for c in costs if c.trigger_dims in trigger_dims), key=lambda c: c.bytes * c.count
            )
            # The largest stays: a merged sum is at least as large as each of its parts.
            indices.update(c.index for c in sums[:-1])
        return indices

    def _latency_and_rate(self, sizes: MeshShape, axes: tuple[int, ...], kind: str) -> tuple[float, float]:
        """The seconds of an empty collective over some axes, and the seconds for each further byte."""
        key = sizes, axes, kind
        if key not in self._rates:
            mesh = Mesh([(f"x{n}", size) for n, size in enumerate(sizes)])
            names, ways = tuple(f"x{n}" for n in axes), math.prod(sizes[n] for n in axes)
            no_op = OpLabel.unlabeled("")
            large = wire_bytes(kind, LARGE_MESSAGE, ways)
            seconds, latency = (
                collective_seconds(Collective(kind, names, size, 1, no_op, "", "", sent), mesh, self.hardware)
                for size, sent in ((LARGE_MESSAGE, large), (0, 0))
            )
            # All-to-alls and permutes send slices: these axes divide the data as well.
            rate = (seconds - latency) / LARGE_MESSAGE / (ways if kind in ("all-to-all", "permute") else 1)
            # A sum is one collective. The others may be lowered to one collective per axis, and the cheaper
            # of the two is the lower bound.
            if len(axes) > 1 and kind != "all-reduce":
                single = [self._latency_and_rate(sizes, (axis,), kind) for axis in axes]
                latency = min(latency, sum(one for one, _ in single))
                rate = min(rate, max(one for _, one in single))
            self._rates[key] = latency, rate
        return self._rates[key]

    def _device_share(self, dims: DimGroup, sizes: MeshShape, sharding: Sequence[DimGroup]) -> float:
        """The share of a tensor with these dims on one device, padding included."""
        ways = self._ways(dims, sizes, sharding)
        return math.prod(self._axis_share(frozenset([dim]), n) for dim, n in ways.items())

    def _ways(self, dims: DimGroup, sizes: MeshShape, sharding: Sequence[DimGroup]) -> dict[str, int]:
        """The number of slices of each dim; an axis splits at most one dim of a tensor."""
        ways: dict[str, int] = defaultdict(lambda: 1)
        for size, group in zip(sizes, sharding, strict=True):
            # Work can count a dim under all of its names. The largest of them has the least padding.
            if group & dims:
                ways[max(group & dims, key=lambda dim: (self.atoms.dims[dim], dim))] *= size
        return ways

    def _padding_factor(self, dims: DimGroup, sizes: MeshShape, sharding: Sequence[DimGroup]) -> float:
        """The size of a tensor with the padding of its slices, relative to its size without."""
        ways = self._ways(dims, sizes, sharding)
        return math.prod(n * self._axis_share(frozenset([dim]), n) for dim, n in ways.items())

    def _share_table(
        self, parts: Sequence[DimGroup], choices: Sequence[Sequence[DimGroup]], size: int
    ) -> np.ndarray:
        """The share of each part on one device, parts × groups.

        Args:
          parts: the dims of each part.
          choices: for each part the groups that may be on the axis.
          size: the size of the axis.
        """
        pairs = zip(parts, choices, strict=True)
        return np.array(
            [[self._axis_share(dims & group, size) for group in groups] for dims, groups in pairs]
        )

    def _axis_share(self, candidates: DimGroup, size: int) -> float:
        """The share that an axis leaves if it splits one of these dims, the one that divides best."""
        if (candidates, size) not in self._shares:
            dim_sizes = [self.atoms.dims[dim] for dim in candidates]
            self._shares[candidates, size] = min((-(-n // size) / n for n in dim_sizes), default=1.0)
        return self._shares[candidates, size]

    def _axis_shardings(self, size: int, level: str) -> dict[str, list[DimGroup]]:
        """The dims on an axis in each sharding, for each group that the axis can take."""
        extra = [self.storage_dims(group, size) for group in self.groups]
        return _dims_by_sharding(self.groups, extra, [level] * len(extra))

    def _candidate_shardings(self, candidate: Candidate) -> dict[str, list[DimGroup]]:
        """The dims on each axis of a candidate, in each sharding."""
        axes = zip(candidate.groups, candidate.sizes, strict=True)
        extra = [self.storage_dims(group, size) for group, size in axes]
        return _dims_by_sharding(candidate.groups, extra, candidate.levels)

    def storage_dims(self, group: DimGroup, size: int) -> DimGroup:
        """The extra dims along which an axis with this group stores state."""
        if (group, size) not in self._storage_dims:
            self._storage_dims[group, size] = extra_storage_dims(
                group, size, self.state, self.atoms.unsplittable
            )
        return self._storage_dims[group, size]

    def mesh_stored_bytes(self, sizes: MeshShape, levels: StorageLevels) -> np.ndarray:
        """The bytes of the inputs on one device, for all candidates of a mesh."""
        total = np.zeros([len(self.groups)] * len(sizes))
        shardings = [self._axis_shardings(size, level) for size, level in zip(sizes, levels, strict=True)]
        for role, tensors in self._inputs.items():
            parts = [dims for dims, _ in tensors]
            shares = [
                self._share_table(parts, [sharding[SHARDING_OF_ROLE[role]]] * len(parts), size)
                for size, sharding in zip(sizes, shardings, strict=True)
            ]
            total += _sum_products(np.array([float(bytes) for _, bytes in tensors]), shares)
        return total

    def candidate_bytes(self, candidate: Candidate) -> float:
        """The bound in bytes of one candidate, buffers included."""
        shardings, sizes = self._candidate_shardings(candidate), candidate.sizes
        stored = sum(
            bytes * self._device_share(dims, sizes, shardings[SHARDING_OF_ROLE[role]])
            for role, tensors in self._inputs.items()
            for dims, bytes in tensors
        )
        # With parameters in extra slices, gradients are scattered as they are computed.
        scattered = "params" in candidate.levels
        sharding_of_phase = {
            phase: shardings["state" if phase == "update" or (phase == "backward" and scattered) else "value"]
            for phase in PHASES
        }
        split_dims = frozenset[str]().union(*candidate.groups)

        def size(buffer: Buffer) -> float:
            atom = self.atoms.buffers[buffer.value]
            # A stage works on one micro-batch at a time and stores other activations than the trace. Their
            # size depends on the schedule, so the bound leaves them out.
            if atom.pipeline in split_dims:
                return 0.0
            return buffer.size * self._device_share(atom.dims, sizes, sharding_of_phase[atom.phase])

        peak = self.atoms.assignment.peak(size)
        buffers = self.atoms.peak_ratio * (peak.outputs + peak.temporary)
        return SLACK * (stored + MIN_BUFFER_SHARE * buffers)


def _dims_by_sharding(
    groups: Sequence[DimGroup], extra: Sequence[DimGroup], levels: Sequence[str]
) -> dict[str, list[DimGroup]]:
    """The dims on axes in each sharding.

    Args:
      groups: the dims that each axis splits.
      extra: the extra dims for stored state.
      levels: the storage levels.
    """
    axes = list(zip(groups, extra, levels, strict=True))
    return {
        "value": list(groups),
        "param": [group | more if level == "params" else group for group, more, level in axes],
        "state": [group | more if level else group for group, more, level in axes],
        **{
            sharding: [more if level == its_level else frozenset() for _, more, level in axes]
            for sharding, its_level in EXTRA_SHARDINGS.items()
        },
    }


def _axis_subsets(axes: Sequence[int]) -> list[tuple[int, ...]]:
    """All non-empty subsets of axes."""
    return [subset for n in range(1, len(axes) + 1) for subset in itertools.combinations(axes, n)]


def _sum_products(amounts: np.ndarray, factors: Sequence[np.ndarray]) -> np.ndarray:
    """Σ over parts of `amount · factor_1[part, g_1] · factor_2[part, g_2] …`, for all groups g_1, g_2, ….

    Args:
      amounts: one for each part.
      factors: for each axis a table of parts × groups.
    """
    if not factors:
        return amounts.sum()
    *first, last = factors
    rows = amounts[:, None]
    for factor in first:
        rows = (rows[:, :, None] * factor[:, None, :]).reshape(len(amounts), -1)
    # The last axis is a matrix product: an outer product of all axes would be parts × groups ** axes.
    shape = [factor.shape[1] for factor in factors]
    return (rows.T @ last).reshape(shape)
