"""Advice: what in a plan is worth knowing, or worth changing. One function for each kind."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ..core.deferred import OPTAX_LABEL
from ..core.layout import axes_of
from .facts import Advice, Collective, Work
from .pipelines import bubble_share
from .units import human_bytes, human_count

if TYPE_CHECKING:
    from .plan import Plan

MAX_IDLE_SHARE = 0.2  # of the time of a pipeline's stage
MIN_SHARE = 0.05  # of all work or memory, below which nothing is said


def generate_advice(plan: Plan) -> Iterator[Advice]:
    """Everything worth saying about a plan, the gravest first."""
    for kind in (
        unbounded_loops,
        resharded_inputs,
        optax_updates,
        duplicated_work,
        pipeline_bubbles,
        replicated_tensors,
        dominant_collective,
        uneven_splits,
    ):
        yield from kind(plan)


def exceeds_memory(plan: Plan, device: int) -> Iterator[Advice]:
    """What would help where a device's memory is not enough: what takes most of it comes first.

    Args:
      device: the bytes of memory that it has.
    """
    m = plan.memory
    if m.peak <= device:
        return
    ways = {
        "are kept for the backward pass: recompute them (wf.remat; --model.remat nothing), or use "
        "micro-batches (train_step(micro=4); --optimizer.micro 4)": m.activations,
        'are parameters: store them split (params="dim:axis")': m.params,
        'are optimizer state: store it split (optimizer="dim:axis")': m.optimizer,
    }
    largest = sorted(((size, way) for way, size in ways.items() if size > MIN_SHARE * m.peak), reverse=True)
    helps = [f"{human_bytes(size)} {way}" for size, way in largest]
    helps.append("a smaller batch, rules for more dims, or more devices need less of everything")
    fact = f"the peak exceeds the memory of a device by {human_bytes(m.peak - device)}"
    yield Advice("warning", f"{fact}; {'; '.join(helps)}; weft search finds what fits")


def unbounded_loops(plan: Plan) -> Iterator[Advice]:
    """Loops that run as often as they run: the totals are too low."""
    for loop in plan.loops:
        yield Advice(
            "warning",
            f"one round of {loop.op} is counted in all numbers; how many there will be is not known",
            loop.source,
        )


def resharded_inputs(plan: Plan) -> Iterator[Advice]:
    """Inputs that are laid out anew for each call."""
    for m in plan.moved:
        yield Advice(
            "warning",
            f"input {m.name} is {m.given} and is moved to {m.wanted} before each call, for which a device is "
            f"sent up to {human_bytes(m.bytes)} that no other number counts; wf.place it once by the "
            "program's layout",
        )


def optax_updates(plan: Plan) -> Iterator[Advice]:
    """What optax does after the SPMD part: XLA splits it up, as it likes."""
    if plan.mesh.size > 1 and any(w.op == OPTAX_LABEL for w in plan.work):
        yield Advice(
            "warning",
            "an optax transformation runs after the SPMD part, split up by XLA: its memory traffic is "
            "counted as if each device did all of it, and its collectives are not counted; the optimizers of "
            "weft.train are planned exactly",
        )


def duplicated_work(plan: Plan) -> Iterator[Advice]:
    """Ops that several devices do alike."""
    by_op: dict[tuple[str, str], list[Work]] = defaultdict(list)
    for w in plan.work:
        if w.flops:
            by_op[w.op, w.source].append(w)
    rows = []
    for (op, source), work in by_op.items():
        done = sum(w.flops * w.count for w in work) * plan.mesh.size
        unique = sum(w.unique_flops * w.count for w in work)
        if done > unique and done - unique > MIN_SHARE * plan.flops * plan.mesh.size:
            rows.append((done - unique, op, source, done / unique))
    for extra, op, source, times in sorted(rows, reverse=True)[:5]:
        yield Advice(
            "warning",
            f"{op} is done {times:.3g} times over ({human_count(extra)} FLOPs too many on all devices): "
            "no dim of it is split over some axes; a rule for one of its dims would share the work",
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
                f"{more} micro-batches in place of {s.micro} for "
                f"{bubble_share(s.stages, more, s.schedule):.0%} "
                "(their number divides the batch)",
            )


def replicated_tensors(plan: Plan) -> Iterator[Advice]:
    """Large stored tensors of which devices hold copies, although an idle axis could split them."""
    for s in sorted(plan.stored, key=lambda s: -s.bytes):
        used = axes_of(axes for _, _, axes in s.dims)
        idle = [(axis, n) for axis, n in plan.mesh.axes if n > 1 and axis not in used]
        if s.kind != "input" or s.bytes < MIN_SHARE * plan.memory.peak:
            continue
        rules = [
            (n, size, name, axis)
            for axis, n in idle
            for name, size, axes in s.dims
            if not axes and size > 1 and _is_legal(name, axis, s.role, plan)
        ]
        if not rules:
            continue
        ways, size, name, axis = max(rules, key=lambda rule: (rule[0], rule[1] >= rule[0], rule[1]))
        saved = human_bytes(s.bytes - s.bytes * -(-size // ways) / size)
        way = {
            "param": f'params="{name}:{axis}" would store it split and gather it where it is used',
            "optimizer": f'optimizer="{name}:{axis}" would store it split',
            "value": f'if it is a parameter, wf.parameter and params="{name}:{axis}" would store it split',
        }[s.role]
        what = f"input {s.name}" if s.role == "value" else s.name
        yield Advice(
            "advice",
            f"{what} ({human_bytes(s.bytes)}) is the same on all devices along {axis}: {way}, "
            f"{saved} less on each device",
        )


def _is_legal(name: str, axis: str, role: str, plan: Plan) -> bool:
    """Whether all that is stored in a role, and has a dim, may be split along it over an axis."""
    alike = [s.dims for s in plan.stored if s.role == role and name in {one for one, _, _ in s.dims}]
    return not any(axis in axes for dims in alike for _, _, axes in dims)


def dominant_collective(plan: Plan) -> Iterator[Advice]:
    """One collective that is most of the traffic."""
    total = sum(c.wire_bytes * c.count for c in plan.collectives)
    by_op: dict[tuple[str, str, str, str], list[Collective]] = defaultdict(list)
    for c in plan.collectives:
        by_op[c.op, c.source, c.kind, c.over].append(c)
    for (op, source, kind, over), some in by_op.items():
        share = sum(c.wire_bytes * c.count for c in some) / total if total else 0
        if share > 0.5 and len(by_op) > 1:
            yield Advice(
                "advice",
                f"the {kind} over {over} for {op} is {share:.0%} of all traffic",
                source,
            )


def uneven_splits(plan: Plan) -> Iterator[Advice]:
    """Dims that don't divide, where padding is a good part of what is stored."""
    seen = set()
    for s in plan.stored:
        for name, size, axes in s.dims:
            ways = plan.mesh.ways(axes)
            block = -(-size // ways)
            waste = 1 - size / (block * ways)
            if waste > MIN_SHARE and (name, size, axes) not in seen:
                seen.add((name, size, axes))
                fitting = sorted({size // ways * ways or ways, block * ways})
                yield Advice(
                    "warning",
                    f"{name}={size} over {'+'.join(axes)} ({ways} ways) is padded to {block * ways}: "
                    f"{waste:.0%} of it is padding; {' and '.join(map(str, fitting))} would have none",
                )
