"""Advice: warnings about a plan, and suggestions for a better layout. One function for each kind."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..core.labels import OPTAX_LABEL
from ..core.layout import axes_of
from ..hardware.profile import Hardware
from .facts import Advice, Collective, Work
from .network import compiled_kind
from .pipelines import bubble_share
from .units import human_bytes, human_count

if TYPE_CHECKING:
    from .plan import Plan

# GPipe (Huang et al., 2019): the bubble is negligible with 4 micro-batches per stage, (K-1)/(5K-1) < 0.2.
MAX_IDLE_SHARE = 0.2
MIN_SHARE = 0.05  # saving less of all work or memory is not worth another rule


def generate_advice(plan: Plan) -> Iterator[Advice]:
    """All advice on a plan: first the warnings that its numbers are incomplete, then the largest savings."""
    for kind in (
        unbounded_loops,
        unknown_primitives,
        resharded_inputs,
        optax_updates,
        duplicated_work,
        pipeline_bubbles,
        replicated_tensors,
        dominant_collective,
        uneven_splits,
    ):
        yield from kind(plan)


def hardware_advice(plan: Plan, hardware: Hardware) -> Iterator[Advice]:
    """Advice about a plan on a machine."""
    yield from _exceeds_memory(plan, hardware.memory_bytes)
    yield from _entire_slice_collectives(plan, hardware)


def _entire_slice_collectives(plan: Plan, hardware: Hardware) -> Iterator[Advice]:
    """Collectives that a TPU's compiler turns into all-reduces, because they run over an entire slice."""
    changed: dict[str, list[Collective]] = defaultdict(list)
    for c in plan.collectives:
        if compiled_kind(c.kind, plan.mesh.ways(c.axes), hardware) != c.kind:
            changed[c.over].append(c)
    for axes, group in changed.items():
        kinds = " and ".join(sorted({f"{c.kind}s" for c in group}))
        size = human_bytes(sum(c.bytes * c.count for c in group))
        yield Advice(
            "warning",
            f"{axes} spans all of {hardware.label}, where libtpu compiles {kinds} ({size}) to all-reduces of "
            "twice the bytes; along an axis that spans a part of the slice it does not",
        )


def _exceeds_memory(plan: Plan, available: int) -> Iterator[Advice]:
    """If the peak exceeds the memory of a device: ways to reduce it, for the largest parts first.

    Args:
      plan: the plan.
      available: the bytes of memory of a device.
    """
    m = plan.memory
    if m.peak <= available:
        return
    remedies = {
        "are saved for the backward pass: recompute them (wf.remat; --model.remat nothing), or use "
        "micro-batches (train_step(micro=4); --optimizer.micro 4)": m.activations,
        'are parameters: store them split (params="dim:axis")': m.params,
        'are optimizer state: store it split (optimizer="dim:axis")': m.optimizer,
    }
    large = ((size, remedy) for remedy, size in remedies.items() if size > MIN_SHARE * m.peak)
    parts = [f"{human_bytes(size)} {remedy}" for size, remedy in sorted(large, reverse=True)]
    parts.append("a smaller batch, rules for more dims, or more devices reduce everything")
    fact = f"the peak exceeds the memory of a device by {human_bytes(m.peak - available)}"
    yield Advice("warning", f"{fact}; {'; '.join(parts)}; weft search finds layouts that fit")


def unbounded_loops(plan: Plan) -> Iterator[Advice]:
    """Loops with an unknown number of iterations: the totals are too low."""
    for loop in plan.loops:
        yield Advice(
            "warning",
            f"one iteration of {loop.op} is counted in all numbers; the number of iterations is not known",
            loop.source,
        )


def unknown_primitives(plan: Plan) -> Iterator[Advice]:
    """Primitives that the plan has no rule for: their FLOPs and fusion are not known."""
    for one in plan.unknown:
        yield Advice(
            "warning",
            f"the cost of JAX's primitive {one.primitive}, in {one.op}, is not known: it is counted as one "
            "pass over its operands and results, without FLOPs; weft/plan/primitives.py has no row for it",
            one.source,
        )


def resharded_inputs(plan: Plan) -> Iterator[Advice]:
    """Inputs that are resharded before each call."""
    for m in plan.moved:
        yield Advice(
            "warning",
            f"input {m.name} is {m.given} and is resharded to {m.wanted} before each call; a device receives "
            f"up to {human_bytes(m.bytes)}, which no other number includes; wf.place it once with the "
            "program's layout",
        )


def optax_updates(plan: Plan) -> Iterator[Advice]:
    """Optax updates after the SPMD part, which XLA's partitioner splits."""
    if plan.mesh.size > 1 and any(w.op == OPTAX_LABEL for w in plan.work):
        yield Advice(
            "warning",
            "an optax transformation runs after the SPMD part, and XLA splits it: its memory traffic is "
            "counted as if each device did all of it, and its collectives are not counted; the optimizers in "
            "weft.optim are planned exactly",
        )


def duplicated_work(plan: Plan) -> Iterator[Advice]:
    """Ops that several devices duplicate."""
    by_op: dict[tuple[str, str], list[Work]] = defaultdict(list)
    for w in plan.work:
        if w.flops:
            # By line, not by layer: one rule changes all layers that run this line.
            by_op[str(w.op), w.source].append(w)
    rows = []
    for (op, source), work in by_op.items():
        done = sum(w.flops * w.count for w in work) * plan.mesh.size
        unique = sum(w.unique_flops * w.count for w in work)
        # Compared with the work of the entire plan: a small op that is duplicated is not worth a rule.
        if done > unique and done - unique > MIN_SHARE * plan.flops * plan.mesh.size:
            rows.append((done - unique, op, source, done / unique))
    # One missing rule usually duplicates many ops; the largest five are enough to name it.
    for extra, op, source, duplication in sorted(rows, reverse=True)[:5]:
        yield Advice(
            "warning",
            f"{op} is done {duplication:.3g} times over ({human_count(extra)} extra FLOPs on all devices): "
            "some axes split none of its dims; a rule for one of them would divide the work",
            source,
        )


def pipeline_bubbles(plan: Plan) -> Iterator[Advice]:
    """Pipelines with too few micro-batches for their stages."""
    for s in plan.pipelines:
        if s.bubble > MAX_IDLE_SHARE:
            more = next(
                m for m in itertools.count(s.micro) if bubble_share(s.stages, m, s.schedule) <= MAX_IDLE_SHARE
            )
            yield Advice(
                "advice",
                f"each of the {s.stages} stages of {s.layers} is idle for {s.bubble:.0%} of the time; with "
                f"{more} micro-batches instead of {s.micro}, for "
                f"{bubble_share(s.stages, more, s.schedule):.0%} (the number must divide the batch)",
            )


def replicated_tensors(plan: Plan) -> Iterator[Advice]:
    """Large replicated inputs that an unused axis could split."""
    for s in sorted(plan.stored, key=lambda s: -s.bytes):
        used = axes_of(tuple(axes for _, _, axes in s.dims))
        unused = [(axis, n) for axis, n in plan.mesh.axes if n > 1 and axis not in used]
        if s.kind != "input" or s.bytes < MIN_SHARE * plan.memory.peak:
            continue
        rules = [
            (n, size, name, axis)
            for axis, n in unused
            for name, size, axes in s.dims
            if not axes and size > 1 and _is_legal(name, axis, s.role, plan)
        ]
        if not rules:
            continue
        # The largest axis saves most. A dim smaller than the axis leaves devices with nothing but padding,
        # and the largest dim has the least padding.
        ways, size, name, axis = max(rules, key=lambda rule: (rule[0], rule[1] >= rule[0], rule[1]))
        saved = human_bytes(s.bytes - s.bytes * -(-size // ways) / size)
        remedy = {
            "param": f'params="{name}:{axis}" would store it split and gather it at each use',
            "optimizer": f'optimizer="{name}:{axis}" would store it split',
            "value": f'if it is a parameter, wf.parameter and params="{name}:{axis}" would store it split',
        }[s.role]
        subject = f"input {s.name}" if s.role == "value" else s.name
        yield Advice(
            "advice",
            f"{subject} ({human_bytes(s.bytes)}) is replicated along {axis}: {remedy}, "
            f"{saved} less on each device",
        )


def _is_legal(name: str, axis: str, role: str, plan: Plan) -> bool:
    """Whether a rule is legal for all tensors with this role: none with the dim may use the axis already."""
    affected = [s.dims for s in plan.stored if s.role == role and name in {dim for dim, _, _ in s.dims}]
    return not any(axis in axes for dims in affected for _, _, axes in dims)


def dominant_collective(plan: Plan) -> Iterator[Advice]:
    """A collective that causes more than half of the traffic."""
    total = sum(c.wire_bytes * c.count for c in plan.collectives)
    by_op: dict[tuple[str, str, str, str], list[Collective]] = defaultdict(list)
    for c in plan.collectives:
        by_op[str(c.op), c.source, c.kind, c.over].append(c)
    for (op, source, kind, over), group in by_op.items():
        share = sum(c.wire_bytes * c.count for c in group) / total if total else 0
        # The only collective of a program is always all of its traffic.
        if share > 0.5 and len(by_op) > 1:
            yield Advice(
                "advice",
                f"the {kind} over {over} for {op} is {share:.0%} of all traffic",
                source,
            )


def uneven_splits(plan: Plan) -> Iterator[Advice]:
    """Dims whose size is not a multiple of the number of slices, if that wastes much."""
    seen = set()
    for s in plan.stored:
        for name, size, axes in s.dims:
            ways = plan.mesh.ways(axes)
            block = -(-size // ways)
            waste = 1 - size / (block * ways)
            if waste > MIN_SHARE and (name, size, axes) not in seen:
                seen.add((name, size, axes))
                # Both neighbours: the smaller one saves memory, the larger one loses no capacity. Never 0.
                divisible = sorted({size // ways * ways or ways, block * ways})
                yield Advice(
                    "warning",
                    f"{name}={size} over {'+'.join(axes)} ({ways} ways) is padded to {block * ways}: "
                    f"{waste:.0%} of it is padding; {' and '.join(map(str, divisible))} would have none",
                )
