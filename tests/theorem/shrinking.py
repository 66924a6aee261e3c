"""Shrink a failing case as a program: fewer results, steps, inputs, rules and axes, and smaller dims."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

import weft as wf
from weft.core.errors import LayoutError, LayoutWarning

from .checking import check
from .families import OPS
from .program import Body, Case, Named, Step, run_oracle


def reduced(case: Case, error: BaseException, tries: int = 150) -> Case:
    """The smallest case found that fails with the same kind of error."""
    seen = {repr(case)}
    progress = True
    while progress:
        progress = False
        for smaller in _smaller(case):
            if repr(smaller) in seen or not _valid(smaller):
                continue
            seen.add(repr(smaller))
            tries -= 1
            if tries < 0:
                return case
            if _fails(smaller, type(error)):
                case, progress = smaller, True
                break
    return case


def _valid(case: Case) -> bool:
    try:
        with jax.enable_x64(True):
            env = run_oracle(case.steps, _values(case))
        # At least one float result, and one input with a gradient
        return any(env[n].kind == "f" for n in case.results) and any(
            given.has_gradient for given in case.inputs
        )
    except Exception:
        return False


def _values(case: Case) -> list[Named]:
    return [
        Named(i.values(), tuple(d.name for d in wf.dims(i.dims)), i.kind not in ("real", "positive"))
        for i in case.inputs
    ]


def _fails(case: Case, kind: type[BaseException]) -> bool:
    try:
        check(case)
    except (LayoutError, LayoutWarning) as error:
        return isinstance(error, kind)
    except Exception as error:
        return type(error) is kind
    return False


def _smaller(case: Case) -> Iterator[Case]:
    replace = dataclasses.replace
    for n in case.results:
        yield _pruned(replace(case, results=(n,), plain=tuple(m for m in case.plain if m == n)))
    for n in case.results:
        yield _pruned(replace(case, results=tuple(m for m in case.results if m != n)))
    for steps, results in _shorter(case.steps, len(case.inputs), case.results):
        yield _pruned(replace(case, steps=steps, results=results, plain=()))
    if case.params is not None:
        inputs = tuple(replace(i, role="value") if i.role == "param" else i for i in case.inputs)
        yield replace(case, params=None, inputs=inputs)
    if case.optimizer is not None:
        inputs = tuple(replace(i, role="value") if i.role == "optimizer" else i for i in case.inputs)
        yield replace(case, optimizer=None, inputs=inputs)
    for field in ("layout", "params", "optimizer"):
        for rules in _fewer_rules(getattr(case, field) or ""):
            yield replace(case, **{field: rules})
    yield from _smaller_meshes(case)
    for n, given in enumerate(case.inputs):
        for new in ({"captured": False}, {"kind": "real"}, {"role": "value"}, {"seed": 0}):
            changed = replace(given, **new)
            yield replace(case, inputs=(*case.inputs[:n], changed, *case.inputs[n + 1 :]))
    for name in sorted(set(re.findall(r"(\w+)=\d+", " ".join(i.dims for i in case.inputs)))):
        for size in (1, 2, 3, 4, 5):
            yield _resized(case, name, size)
    yield replace(case, plain=case.results)
    yield replace(case, alone=False)
    yield replace(case, eager=False)


def _fewer_rules(text: str) -> Iterator[str]:
    rules = text.split()
    for n, rule in enumerate(rules):
        yield " ".join(rules[:n] + rules[n + 1 :])
        name, axes = rule.split(":")
        for axis in axes.split("+") if "+" in axes else ():
            fewer = f"{name}:{'+'.join(a for a in axes.split('+') if a != axis)}"
            yield " ".join([*rules[:n], fewer, *rules[n + 1 :]])


def _smaller_meshes(case: Case) -> Iterator[Case]:
    axes = case.mesh.split()
    used = " ".join([case.layout, case.params or "", case.optimizer or ""])
    for n, axis in enumerate(axes):
        name, size = axis.split("=")
        if not re.search(rf"[:+]{name}\b", used) and len(axes) > 1:
            yield dataclasses.replace(case, mesh=" ".join(axes[:n] + axes[n + 1 :]))
        for new in range(2, int(size)):
            yield dataclasses.replace(case, mesh=" ".join([*axes[:n], f"{name}={new}", *axes[n + 1 :]]))


def _resized(case: Case, name: str, size: int) -> Case:
    """The case with another size of a dim, in all inputs and options."""

    def resize(option: Any) -> Any:
        if isinstance(option, Body):
            return Body(tuple(map(step, option.steps)), option.result)
        if isinstance(option, tuple) and len(option) == 2 and option[0] == name:
            return (name, size)
        if isinstance(option, tuple | list):
            return type(option)(map(resize, option))
        return option

    def step(one: Step) -> Step:
        return Step(one.op, one.operands, {k: resize(v) for k, v in one.options.items()})

    inputs = tuple(
        dataclasses.replace(i, dims=re.sub(rf"\b{name}=\d+", f"{name}={size}", i.dims)) for i in case.inputs
    )
    if size >= max([int(n) for i in case.inputs for n in re.findall(rf"\b{name}=(\d+)", i.dims)]):
        return case
    return dataclasses.replace(case, inputs=inputs, steps=tuple(map(step, case.steps)))


# Removing steps


def _count(step: Step) -> int:
    """The number of results of a step."""
    if step.op == "scan":
        return 1 if step.options["keep"] is None else 2
    return len(step.operands) if step.op == "grad" else OPS[step.op].count


def _shorter(
    steps: Sequence[Step], given: int, results: Sequence[int]
) -> Iterator[tuple[tuple[Step, ...], tuple[int, ...]]]:
    """Programs with one step less, whose results another value replaces, or with one step less in a body."""
    start = given
    starts = []
    for step in steps:
        starts.append(start)
        start += _count(step)
    for n in reversed(range(len(steps))):
        step, first, count = steps[n], starts[n], _count(steps[n])
        for stand_in in dict.fromkeys([*step.operands, *range(given)]):

            def moved(m: int, f: int = first, c: int = count, s: int = stand_in) -> int:
                return m if m < f else s if m < f + c else m - c

            rest = [_renumbered(s, moved) for s in steps[n + 1 :]]
            yield (*steps[:n], *rest), tuple(dict.fromkeys(map(moved, results)))
        for key, body in step.options.items():
            if not isinstance(body, Body):
                continue
            inside = _arguments(step, key)
            extra = [step.options["keep"]] if step.options.get("keep") is not None else []
            for shorter, ends in _shorter(body.steps, inside, (body.result, *extra)):
                if len(ends) == 1 + len(extra):
                    options = step.options | {key: Body(shorter, ends[0])}
                    options |= {"keep": ends[1]} if extra else {}
                    new = Step(step.op, step.operands, options)
                    yield (*steps[:n], new, *steps[n + 1 :]), tuple(results)


def _arguments(step: Step, key: str) -> int:
    """The number of arguments of a body."""
    return len(step.operands) + {"fori_loop": 1, "while_loop": 1, "cond": -1}.get(step.op, 0)


def _renumbered(step: Step, moved: Callable[[int], int]) -> Step:
    return Step(step.op, tuple(map(moved, step.operands)), step.options)


def _pruned(case: Case) -> Case:
    """The case without unused steps and inputs."""
    start = len(case.inputs)
    starts = []
    for step in case.steps:
        starts.append(start)
        start += _count(step)
    needed, needed_steps = set(case.results), []
    for n in reversed(range(len(case.steps))):
        step = case.steps[n]
        if any(m in needed for m in range(starts[n], starts[n] + _count(step))):
            needed |= set(step.operands)
            needed_steps.insert(0, n)
    inputs = [n for n in range(len(case.inputs)) if n in needed]
    if not any(case.inputs[n].has_gradient for n in inputs):
        inputs.append(next(n for n, given in enumerate(case.inputs) if given.has_gradient))
    new_numbers, end = {n: m for m, n in enumerate(sorted(inputs))}, len(inputs)
    for n in needed_steps:
        for m in range(_count(case.steps[n])):
            new_numbers[starts[n] + m] = end
            end += 1
    return dataclasses.replace(
        case,
        inputs=tuple(case.inputs[n] for n in sorted(inputs)),
        steps=tuple(_renumbered(case.steps[n], new_numbers.__getitem__) for n in needed_steps),
        results=tuple(new_numbers[n] for n in case.results),
        plain=tuple(new_numbers[n] for n in case.plain if n in case.results),
    )
