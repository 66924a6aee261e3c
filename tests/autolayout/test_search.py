"""The search finds what planning every legal candidate finds, and its bounds are below all plans."""

import functools
import itertools

import pytest
from every_layout import best_of_all, drawn
from search_cases import LONG, PROGRAMS, QUICK, chain

import weft as wf
from weft.autolayout import search
from weft.autolayout.bound import LowerBound
from weft.autolayout.candidates import CandidateSpace
from weft.autolayout.cost_atoms import dims_in_label, trace_cost_atoms
from weft.core.errors import WeftError
from weft.core.labels import OpLabel
from weft.hardware.profile import Hardware

MACHINES = ("tpu-v2", "a100", "h100", "cpu")


@functools.cache
def every(name):
    """All legal candidates of a program with their plans, those that the search leaves out included."""
    make, devices, axes = PROGRAMS[name]
    fn, args = make()
    dims = [*trace_cost_atoms(fn, tuple(args)).dims]
    space = CandidateSpace("", fn, tuple(args), devices, axes, Hardware.of("cpu"), dims=dims)
    found = {}
    for sizes in space.meshes:
        for levels in space.levels(sizes, stored=True):
            for assignment in itertools.product(range(len(space.groups)), repeat=len(sizes)):
                for candidate in space.candidates(sizes, levels, assignment):
                    found[candidate] = space.planned(candidate)
    return space, found


def holds(name, machine, monkeypatch):
    space, plans = every(name)
    hardware, (make, devices, axes) = Hardware.of(machine), PROGRAMS[name]
    bound = LowerBound(space.bound.atoms, hardware, devices, space.groups)
    seconds = {}
    for candidate, plan in plans.items():
        if isinstance(plan, WeftError):
            continue
        seconds[candidate] = plan.time(hardware).overlapped_seconds
        assignment = tuple(space.groups.index(group) for group in candidate.groups)
        loose = bound.mesh_seconds(candidate.sizes, candidate.levels)[assignment]
        assert loose <= seconds[candidate] * (1 + 1e-9), (candidate.mesh, candidate.layout)
        assert bound.candidate_seconds(candidate) <= seconds[candidate] * (1 + 1e-9), (
            candidate.mesh,
            candidate.layout,
        )
        assert bound.candidate_bytes(candidate) <= plan.memory.peak * (1 + 1e-9), (
            candidate.mesh,
            candidate.layout,
        )
    made = []

    def planned(_, candidate):
        made.append(candidate)
        return plans[candidate]

    monkeypatch.setattr(CandidateSpace, "planned", planned)
    found = search(*make(), devices=devices, hardware=machine, axes=axes)
    # Equal, but for the order in which a twin's seconds were added up.
    assert found.best.seconds == pytest.approx(min(seconds.values()), rel=1e-12)
    assert found.legal <= len(plans)
    counted = len(found.ranked) + len(found.too_large) + found.refused + found.by_memory + found.by_bound
    assert found.legal == counted
    assert len(made) == len(set(made)) <= len(plans)


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("name", QUICK)
def test_the_best_of_all(name, machine, monkeypatch):
    holds(name, machine, monkeypatch)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("name", LONG)
def test_the_best_of_all_at_length(name, machine, monkeypatch):
    holds(name, machine, monkeypatch)


@pytest.mark.parametrize("name", ["chain", "two layers trained", "gated"])
def test_memory(name, monkeypatch):
    """The least memory; and the least time among those that fit."""
    _, plans = every(name)
    make, devices, axes = PROGRAMS[name]
    good = {c: plan for c, plan in plans.items() if not isinstance(plan, WeftError)}
    peaks = sorted({plan.memory.peak for plan in good.values()})
    monkeypatch.setattr(CandidateSpace, "planned", lambda _, candidate: plans[candidate])
    run_search = functools.partial(search, *make(), devices=devices, axes=axes, hardware="a100")
    assert run_search(objective="memory").best.bytes == peaks[0]
    for cap in (peaks[0], peaks[len(peaks) // 2]):
        fitting = [plan for plan in good.values() if plan.memory.peak <= cap]
        least = min(plan.time("a100").overlapped_seconds for plan in fitting)
        assert run_search(memory=cap).best.seconds == least
    nothing = run_search(memory=peaks[0] - 1)
    assert nothing.best is None
    assert nothing.legal == len(nothing.too_large) + nothing.refused + nothing.by_memory


SEEDS = [(fixed, seed) for fixed in (True, False) for seed in range(15)]  # with a mesh, with a device count
FAST = [(True, 0), (True, 2), (True, 6), (False, 3), (False, 8)]


def is_best_of_all_layouts(fixed, seed):
    one = drawn(seed, fixed=fixed)
    best, mesh, layout, legal = best_of_all(one)
    found = one.search().best
    print(f"{one.name} on {one.mesh or one.devices} × {one.hardware}: {legal} layouts")
    # Equal, but for the order in which a twin's seconds were added up.
    assert found.seconds == pytest.approx(best, rel=1e-9), (
        f'"{mesh}" {layout}, not "{found.mesh}" {found.layout!r}'
    )


@pytest.mark.parametrize(("fixed", "seed"), FAST)
def test_random_programs(fixed, seed):
    """The search finds the best of all legal layouts, planned one by one."""
    is_best_of_all_layouts(fixed, seed)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("fixed", "seed"), SEEDS)
def test_random_programs_at_length(fixed, seed):
    is_best_of_all_layouts(fixed, seed)


GIVEN = {
    "sort": (lambda x: wf.sort(wf.exp(x), "a"), "b:pod+data", "a=4096 b=64"),
    "elementwise": (wf.exp, "batch:pod+data", "batch=4096 d=4"),
    "mlp": (
        lambda x, w: wf.relu(wf.einsum(x, w, reduce="d")),
        "batch:pod+data",
        "batch=65536 d=512",
        "d=512 h=64",
    ),
    "merge": (lambda x: wf.merge(wf.exp(x), ["a", "b"], "c"), "a:data+pod c:data", "a=6 b=4096 d=3"),
}


@pytest.mark.parametrize("name", GIVEN)
def test_a_dim_on_both_axes_of_a_given_mesh(name):
    """Meshes with equal neighbouring axes were skipped, as if the mesh that merges these axes were tried too."""
    fn, rules, *dims = GIVEN[name]
    args = tuple(map(wf.spec, dims))
    better = wf.spmd(fn, "pod=2 data=4", rules).plan(*args).time("h100").overlapped_seconds
    found = search(fn, args, mesh="pod=2 data=4", hardware="h100")
    assert found.best.seconds <= better * (1 + 1e-9)


def test_every_order_is_counted():
    """The number of candidates is that of the orders of axes that are tried."""
    x = wf.spec("a=64 b=64")
    fn = functools.partial(wf.merge, dims=["a", "b"], into="c")
    space = CandidateSpace("", fn, (x,), 8, 3, Hardware.of("h100"), wf.Mesh("x=2 y=2 z=2"))
    (sizes,) = space.meshes
    counts = space.order_counts(sizes)
    assert counts.max() == 36
    for assignment in itertools.product(range(len(space.groups)), repeat=3):
        assert counts[assignment] == len({*space.candidates(sizes, ("",) * 3, assignment)})


def test_the_best_ten(monkeypatch):
    """The requested number of results is sorted, and no better and different result is missing."""
    space, plans = every("two layers")
    monkeypatch.setattr(CandidateSpace, "planned", lambda _, candidate: plans[candidate])
    make, devices, axes = PROGRAMS["two layers"]
    found = search(*make(), devices=devices, axes=axes, hardware="h100", top=10)

    def is_own(c):
        return space.is_distinct(c.sizes, c.levels)[tuple(space.groups.index(group) for group in c.groups)]

    own = [plan for c, plan in plans.items() if is_own(c) and not isinstance(plan, WeftError)]
    times = sorted(plan.time("h100").overlapped_seconds for plan in own)
    assert [one.seconds for one in found.ranked[:10]] == pytest.approx(times[:10], rel=1e-9)


def test_of_two_variants_the_better_one_is_found():
    fn, args = chain()

    def twice(*args):
        return fn(*args) + fn(*args) * 2.0

    found = search(twice, args, devices=2, axes=1, hardware="h100", variants={"once": (fn, args)})
    assert found.best.candidate.variant == "once"


MISTAKES = {
    "no_devices": lambda: search(*chain(), devices=0, hardware="h100"),  # wrong
    "neither_devices_nor_mesh": lambda: search(*chain(), hardware="h100"),  # wrong
    "wrong_types": lambda: search(*chain(), devices=2, hardware="h100", memory="8G", top=True, stored="yes"),  # wrong
    "no_such_objective": lambda: search(*chain(), devices=2, hardware="h100", objective="tme"),  # wrong
    "args_of_one_tensor": lambda: search(wf.exp, wf.spec("a=4"), devices=2, hardware="h100"),  # wrong
    "too_many_axes": lambda: search(*chain(), devices=2, hardware="h100", axes=7),  # wrong
}  # fmt: skip


@pytest.mark.parametrize("name", MISTAKES)
def test_messages(name, mistake):
    mistake(name, MISTAKES[name], "messages/search")


@pytest.mark.parametrize("op", [OpLabel("scale"), OpLabel("scale", [()]), OpLabel.unlabeled(""), None])
def test_an_op_without_named_dims_may_have_any(op):
    """One of keyword operands only had an empty name; its work was bounded as if no dim shared it out."""
    known = frozenset(["batch", "io"])
    assert dims_in_label(op, known) == known
    assert dims_in_label(OpLabel("scale", [("batch", "other")]), known) == {"batch"}


def test_what_was_found_is_printed_as_a_table():
    x = wf.spec("batch=64 d=64")
    found = wf.search(lambda x: wf.sum(wf.exp(x)), (x,), devices=8, hardware="h100")
    assert str(found) == found.explain()
    assert repr(found).startswith(f"<search of {found.legal} candidates on 8 × h100: ")
