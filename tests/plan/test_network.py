"""Meshes on machines with a shape: the assignment of axes to links, the order of devices, and the rates."""

import itertools
import math

import numpy as np
import pytest

import weft as wf
from weft.core.errors import HardwareError, MeshError
from weft.core.labels import OpLabel
from weft.hardware.profile import Hardware
from weft.hardware.topology import (
    Assignment,
    Part,
    arrange,
    device_count,
    directions_of,
    possible_assignments,
)
from weft.plan.events import wire_bytes
from weft.plan.facts import Collective
from weft.plan.network import assign_mesh, collective_seconds, compiled_kind, ring_segments

pytestmark = pytest.mark.nodevice

GB = 10**9
LATENCY = pytest.approx(1, rel=2e-3)  # of a ratio: large messages take much longer than the latency


def collective(kind, axes, size, mesh):
    return Collective(
        kind, axes, size, 1, OpLabel.unlabeled(""), "", "", wire_bytes(kind, size, mesh.ways(axes))
    )


def assigned(hardware, axes, **sizes):
    """The assignment of a mesh whose axes send all-gathers of these sizes in GB."""
    hardware, mesh = Hardware.of(hardware), wf.Mesh(axes)
    calls = [collective("all-gather", (axis,), int(size * GB), mesh) for axis, size in sizes.items()]
    return assign_mesh(calls, mesh, hardware)


# -- Directions ----------------------------------------------------------------------------------------

SHAPES = {
    "tpu-v5e:4x8": [("x", 4, False), ("y", 8, False)],
    "tpu-v5e:16x16": [("x", 16, True), ("y", 16, True)],
    "tpu-v2:16x16": [("chip", 2, False), ("x", 16, True), ("y", 16, True)],
    "tpu-v5p:4x4x8": [("x", 4, True), ("y", 4, True), ("z", 8, True)],
    "tpu-v4:2x2x4": [("x", 2, False), ("y", 2, False), ("z", 4, True)],
    "h100:16x8": [("NVLink", 8, False), ("InfiniBand", 16, False)],
    "h100:8": [("NVLink", 8, False)],
}


@pytest.mark.parametrize("name", SHAPES)
def test_directions(name):
    hardware = Hardware.of(name)
    assert [(d.name, d.size, d.closes) for d in directions_of(hardware)] == SHAPES[name]
    assert device_count(hardware) == math.prod(size for _, size, _ in SHAPES[name])
    assert hardware.label == name


WRONG_SHAPES = [
    "tpu-v5e:4",
    "tpu-v5e:4x4x4",
    "tpu-v5p:4x4",
    "h100:2x16",
    "h100:2x2x8",
    "tpu-v5e:0x4",
    "cpu:2x2",
]


@pytest.mark.parametrize("name", WRONG_SHAPES)
def test_a_shape_that_a_machine_cannot_have(name):
    with pytest.raises(HardwareError, match="has no shape"):
        Hardware.of(name)


# -- Assignments ---------------------------------------------------------------------------------------

ASSIGNED = {
    # Each axis has a ring of its own.
    ("tpu-v5e:16x16", "data=16 model=16"): {"data": ["y"], "model": ["x"]},
    # TPU v2: the busy axis of 32 has the two cores of a chip and a ring; the other has the other ring.
    ("tpu-v2:16x16", "data=16 model=32"): {"data": ["y"], "model": ["chip", "x"]},
    # The busy axis stays inside of the hosts.
    ("h100:16x8", "data=16 model=8"): {"data": ["InfiniBand"], "model": ["NVLink"]},
    ("h100:4x8", "model=8 data=4"): {"data": ["InfiniBand"], "model": ["NVLink"]},
    # It is longer than a host: it fills the host, and leaves it with its last factor of 2.
    ("h100:16x8", "data=8 model=16"): {"data": ["InfiniBand"], "model": ["NVLink", "InfiniBand"]},
    # Blocks of 2 x 2 chips are rings, and lines of 4 are not.
    ("tpu-v5e:4x4", "data=4 model=4"): {"data": ["x", "y"], "model": ["x", "y"]},
    ("tpu-v5p:4x4x8", "data=16 model=8"): {"data": ["x", "y"], "model": ["z"]},
}


@pytest.mark.parametrize(("hardware", "axes"), ASSIGNED)
def test_the_busiest_axis_gets_the_fastest_links(hardware, axes):
    found = assigned(hardware, axes, model=8, data=1)
    names = {
        name: [found.directions[part.direction].name for part in parts]
        for (name, _), parts in zip(found.axes, found.parts, strict=True)
    }
    assert names == ASSIGNED[hardware, axes]


@pytest.mark.parametrize(("hardware", "axes"), ASSIGNED)
def test_the_order_of_the_devices_is_that_of_the_assignment(hardware, axes):
    """Neighbors along an axis are as many steps apart in the network as the assignment states."""
    directions = directions_of(Hardware.of(hardware))
    strides = np.cumprod([1, *(d.size for d in directions)])
    for found in possible_assignments(directions, wf.Mesh(axes).axes):
        sizes = [size for _, size in found.axes]
        order = np.array(found.order).reshape(sizes)
        assert sorted(found.order) == [*range(math.prod(sizes))]
        for axis, parts in enumerate(found.parts):
            first = np.moveaxis(order, axis, 0).reshape(sizes[axis], -1)[:, 0]
            coordinates = {
                tuple((n // s) % d.size for s, d in zip(strides, directions, strict=False)) for n in first
            }
            for number, direction in enumerate(directions):
                own = [part for part in parts if part.direction == number]
                values = sorted({place[number] for place in coordinates})
                wanted = [k * own[0].stride for k in range(own[0].size)] if own else [0]
                assert values == wanted, (direction.name, found.describe())


def test_every_assignment_of_a_small_torus():
    """Counted by hand: the axes trade sides, or each takes a half of both sides, in four orders."""
    directions = directions_of(Hardware.of("tpu-v5e:4x4"))
    found = possible_assignments(directions, (("a", 4), ("b", 4)))
    assert len(found) == 2 + 4
    assert [sum(map(len, one.parts)) for one in found] == [2, 2, 4, 4, 4, 4]  # simple ones first
    assert Part(0, 2, 2) in {part for one in found for parts in one.parts for part in parts}


def test_axes_that_do_not_fill_the_machine():
    with pytest.raises(MeshError, match="has 8 devices, and tpu-v5e:4x4 has 16"):
        assigned("tpu-v5e:4x4", "data=8", data=1)


def test_a_machine_without_a_shape_has_no_assignment():
    assert assigned("tpu-v5e", "data=4 model=4", model=1) is None


def test_what_the_plan_shows():
    assert assigned("tpu-v2:16x16", "data=16 model=32", model=8, data=1).describe() == [
        "data: y (a ring of 16)",
        "model: chip (a group of 2) and x (a ring of 16)",
    ]
    program = wf.spmd(lambda x: wf.sum(x, "d"), "data=4 model=2", "batch:data d:model")
    plan = program.plan(wf.spec("batch=8 d=6"))
    lines = plan.time("tpu-v5e:2x4").to_data()["assignment"]
    assert lines == ["data: y (a line of 4)", "model: x (a line of 2)"]
    assert set(lines) <= {*plan.explain("tpu-v5e:2x4").splitlines()}
    assert plan.time("tpu-v5e").assignment is None


class Device:
    """A device of a slice, as JAX describes it."""

    def __init__(self, id, coords, core_on_chip=0):
        self.id, self.coords, self.core_on_chip = id, coords, core_on_chip


def test_devices_are_arranged_by_their_coordinates():
    """JAX may list them in any order."""
    found = assigned("tpu-v2:2x4", "data=4 model=4", model=8, data=1)
    places = list(itertools.product(range(4), range(2), range(2)))  # y, x, core
    devices = [Device(n, [x, y, 0], core) for n, (y, x, core) in enumerate(places)]
    arranged = arrange([*reversed(devices)], found.order)
    assert [device.id for device in arranged] == found.order


# -- Rates ---------------------------------------------------------------------------------------------


def seconds(hardware, axes, kind="all-gather", over=("model",), size=16 * GB, **sizes):
    given, mesh = Hardware.of(hardware), wf.Mesh(axes)
    found = assigned(hardware, axes, **(sizes or dict.fromkeys(over, 1)))
    return collective_seconds(collective(kind, over, size, mesh), mesh, given, found)


def test_a_ring_uses_both_directions_of_a_link():
    link = Hardware.of("tpu-v5e").network[0].bandwidth
    ring = seconds("tpu-v5e:16x16", "data=16 model=16")
    assert ring * 2 * link / (16 * GB * 15 / 16) == LATENCY


PARTS = {
    # Links that a device uses at once, by the parts that its group is laid over.
    "a side that closes": ("tpu-v5e:16x16", [Part(0, 16, 1)], 2),
    "a side that does not": ("tpu-v5e:4x4", [Part(0, 4, 1)], 1),
    "8 neighbors of 16": ("tpu-v5e:16x16", [Part(0, 8, 1)], 1),
    "every second one of 16: a ring, and two of them share each link": ("tpu-v5e:16x16", [Part(0, 8, 2)], 1),
    "a block of 2 x 4 has a ring through all": ("tpu-v5e:4x4", [Part(0, 2, 1), Part(1, 4, 1)], 2),
    "a block with groups in between": ("tpu-v5e:16x16", [Part(0, 4, 4), Part(1, 8, 2)], 1 / 2),
    "two entire sides": ("tpu-v5p:4x4x8", [Part(0, 4, 1), Part(2, 8, 1)], 4),
}


@pytest.mark.parametrize("name", PARTS)
def test_links_of_a_group(name):
    hardware, parts, links = PARTS[name]
    directions = directions_of(Hardware.of(hardware))
    found = Assignment(directions, (("a", math.prod(p.size for p in parts)),), (tuple(parts),))
    (segment,) = ring_segments(("a",), wf.Mesh(found.axes), Hardware.of(hardware), found)
    assert segment.rate == directions[0].level.bandwidth * links


def test_entire_directions_use_all_their_links_at_once():
    link = Hardware.of("tpu-v5p").network[0].bandwidth
    found = assigned("tpu-v5p:4x4x8", "data=16 model=8", data=8, model=8)
    (segment,) = ring_segments(("data",), wf.Mesh("data=16 model=8"), Hardware.of("tpu-v5p:4x4x8"), found)
    assert segment.rate == 4 * link


def test_no_assignment_is_faster_than_the_bound_of_a_collective():
    """The search bounds the time of each collective by its best assignment."""
    hardware, mesh = Hardware.of("tpu-v5p:2x4x4"), wf.Mesh("a=4 b=2 c=4")
    for kind, over in itertools.product(
        ["all-reduce", "all-gather", "all-to-all"], [("a",), ("b", "c"), ("a", "c")]
    ):
        call = collective(kind, over, GB, mesh)
        bound = collective_seconds(call, mesh, hardware)
        found = possible_assignments(directions_of(hardware), mesh.axes)
        times = [collective_seconds(call, mesh, hardware, one) for one in found]
        assert bound == min(times) and max(times) > bound


# -- Kinds ---------------------------------------------------------------------------------------------

COMPILED_KINDS = {
    # As libtpu 0.0.42.1 compiled them.
    ("tpu-v5p:4x4x4", "all-gather", 64): "all-reduce",
    ("tpu-v5p:4x4x4", "reduce-scatter", 64): "all-reduce",
    ("tpu-v5p:4x4x4", "all-gather", 16): "all-gather",
    ("tpu-v5p:4x4x4", "reduce-scatter", 16): "reduce-scatter",
    ("tpu-v5p:2x2x4", "all-gather", 16): "all-gather",
    ("tpu-v5p:2x2x4", "reduce-scatter", 16): "all-reduce",
    ("tpu-v4:4x4x4", "all-gather", 64): "all-reduce",
    ("tpu-v5e:4x4", "all-gather", 16): "all-gather",
    ("tpu-v5e:4x4", "reduce-scatter", 16): "all-reduce",
    ("tpu-v6e:4x4", "reduce-scatter", 16): "all-reduce",
    ("tpu-v2:4x4", "reduce-scatter", 32): "all-reduce",
    ("tpu-v2:4x4", "all-gather", 32): "all-gather",
    ("tpu-v5e:4x4", "all-to-all", 16): "all-to-all",
    ("h100:2x8", "reduce-scatter", 16): "reduce-scatter",
    ("tpu-v5e", "reduce-scatter", 16): "reduce-scatter",  # without a shape, the slice is not known
}


@pytest.mark.parametrize(("hardware", "kind", "members"), COMPILED_KINDS)
def test_kinds_over_an_entire_slice(hardware, kind, members):
    assert compiled_kind(kind, members, Hardware.of(hardware)) == COMPILED_KINDS[hardware, kind, members]


def test_a_gather_that_becomes_a_sum_takes_twice_as_long():
    gather = seconds("tpu-v5p:4x4x4", "data=64", over=("data",))
    total = seconds("tpu-v5p:4x4x4", "data=64", kind="all-reduce", over=("data",))
    assert gather == total


def test_the_plan_warns_of_collectives_over_an_entire_slice():
    def loss(w, x):
        return wf.sum(wf.square(wf.einsum(x, w, reduce="d")))

    program = wf.spmd(wf.grad(loss), "data=64", wf.Layout("batch:data", params="d:data"))
    plan = program.plan(wf.spec("d=1024 h=1024", role="param"), wf.spec("batch=128 d=1024"))
    text = " ".join(plan.explain("tpu-v5p:4x4x4").split())
    assert "data spans all of tpu-v5p:4x4x4, where libtpu compiles all-gathers and reduce-scatters" in text
    assert "libtpu compiles" not in plan.explain("tpu-v5p") + plan.explain("h100:8x8")
