"""The search finds what planning every legal candidate finds, and its bounds are below all plans."""

import functools
import itertools

import pytest

import weft as wf
from weft.errors import WeftError
from weft.plan.hardware import Hardware
from weft.search import best, search
from weft.search.bound import Bound
from weft.search.facts import facts_of, planned
from weft.search.space import Candidate, factorisations, independent

MACHINES = ("tpu-v2", "a100", "h100", "cpu")


def of(dims):
    return wf.spec(dims)


def parameter(dims):
    return wf.spec(dims, role="param")


def chain():
    """Three products in a row."""

    def run(x, y, z):
        return wf.einsum(wf.einsum(x, y, reduce="b"), z, reduce="c")

    return run, (of("a=512 b=256"), of("b=256 c=1024"), of("c=1024 d=96"))


def two_layers():
    """The paper's example, with gradients."""

    def loss(params, x):
        w, v = params
        return wf.mean(wf.square(wf.einsum(wf.relu(wf.einsum(x, w, reduce="io")), v, reduce="hidden")))

    return wf.value_and_grad(loss), (
        (parameter("io=1024 hidden=4096"), parameter("hidden=4096 io'=1024")),
        of("batch=4096 io=1024"),
    )


def attention():
    """Heads over two sequences, one of an odd length."""

    def run(q, k, v):
        weights = wf.softmax(wf.einsum(q, k, reduce="d"), "keys")
        return wf.einsum(weights, v, reduce="keys")

    return run, (
        of("batch=16 heads=6 queries=256 d=64"),
        of("batch=16 heads=6 keys=129 d=64"),
        of("batch=16 heads=6 keys=129 d=64"),
    )


PROGRAMS = {"chain": (chain, 4, 2), "two layers": (two_layers, 8, 2), "attention": (attention, 4, 1)}


@functools.cache
def every(name):
    """The facts of a program, and all its candidates with their plans."""
    make, devices, axes = PROGRAMS[name]
    fn, args = make()
    facts = facts_of(fn, args)
    names = [dim for dim, size in facts.dims.items() if size > 1]
    groups = independent(names, facts.meetings["value"])
    found = {}
    for sizes in factorisations(devices, axes):
        for chosen in itertools.product(groups, repeat=len(sizes)):
            candidate = Candidate(sizes, chosen)
            found[candidate] = planned(fn, args, candidate.mesh, candidate.layout)
    return facts, found


def known(plans, made):
    """Plans that are there already."""

    def planned(fn, args, mesh, layout):
        key = next(c for c in plans if c.mesh == mesh and c.layout == layout)
        made.append(key)
        return plans[key]

    return planned


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_best_of_all(name, machine, monkeypatch):
    facts, plans = every(name)
    hardware, (_, devices, axes) = Hardware.of(machine), PROGRAMS[name]
    bound = Bound(facts, hardware, devices)
    seconds = {}
    for candidate, plan in plans.items():
        if not isinstance(plan, WeftError):
            seconds[candidate] = plan.time(hardware).overlapped_seconds
            assert bound.seconds(candidate) <= seconds[candidate] * (1 + 1e-9), candidate
    made = []
    monkeypatch.setattr(best, "planned", known(plans, made))
    fn, args = PROGRAMS[name][0]()
    found = search(fn, args, devices=devices, hardware=machine, axes=axes)
    assert found.best.seconds == min(seconds.values())
    assert found.legal == len(plans)
    assert (
        found.legal
        == len(found.ranked) + len(found.too_large) + found.refused + found.by_memory + found.by_bound
    )
    assert len(made) < len(plans)


@pytest.mark.parametrize("name", PROGRAMS)
def test_memory(name, monkeypatch):
    """The least memory; and the least time among those that fit."""
    _, plans = every(name)
    make, devices, axes = PROGRAMS[name]
    good = {c: plan for c, plan in plans.items() if not isinstance(plan, WeftError)}
    peaks = sorted({plan.memory.peak for plan in good.values()})
    monkeypatch.setattr(best, "planned", known(plans, []))
    asked = functools.partial(search, *make(), devices=devices, axes=axes, hardware="a100")
    assert asked(objective="memory").best.bytes == peaks[0]
    for cap in (peaks[0], peaks[len(peaks) // 2]):
        fitting = [plan for plan in good.values() if plan.memory.peak <= cap]
        least = min(plan.time("a100").overlapped_seconds for plan in fitting)
        assert asked(memory=cap).best.seconds == least
    nothing = asked(memory=peaks[0] - 1)
    assert nothing.best is None
    assert nothing.legal == len(nothing.too_large) + nothing.refused + nothing.by_memory


def test_of_two_variants_the_better_one_is_found():
    fn, args = chain()

    def twice(*args):
        return fn(*args) + fn(*args) * 2.0

    found = search(twice, args, devices=2, axes=1, hardware="h100", variants={"once": (fn, args)})
    assert found.best.candidate.variant == "once"


MISTAKES = {
    "no_devices": lambda: search(*chain(), devices=0, hardware="h100"),  # wrong
    "no_such_objective": lambda: search(*chain(), devices=2, hardware="h100", objective="tme"),  # wrong
}


@pytest.mark.parametrize("name", MISTAKES)
def test_messages(name, mistake):
    mistake(name, MISTAKES[name], "messages/search")
