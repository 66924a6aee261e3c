"""The predicted time of a plan: rooflines and ring formulas, by hand; and hardware files, good and bad."""

import dataclasses
import math
from pathlib import Path

import jax
import pytest

import weft as wf
from weft.core.errors import HardwareError, WeftError
from weft.core.labels import OpLabel
from weft.hardware import profile
from weft.hardware.profile import (
    Hardware,
    NetworkLevel,
    find_profile,
    known_profiles,
    load_profile,
    parse_profile,
    to_toml,
)
from weft.plan.events import wire_bytes
from weft.plan.facts import Collective
from weft.plan.network import collective_seconds, ring_segments
from weft.plan.time import estimate_time

pytestmark = pytest.mark.nodevice

SWITCH = Hardware(
    name="box",
    source="made up",
    devices_per_node=8,
    peak_flops={"f32": 1e12, "bf16": 4e12},
    matmul_efficiency=0.5,
    memory_bytes=10**9,
    memory_bandwidth=1e11,
    network=(NetworkLevel("inner", 1e9, 1e-6, 8), NetworkLevel("outer", 1e8, 1e-5)),
)
TORUS = dataclasses.replace(
    SWITCH, network=(NetworkLevel("torus", 1e9, 1e-6, 256, 2, 4), NetworkLevel("far", 1e7, 1e-5))
)
CPU = dataclasses.replace(SWITCH, shared_cores=2, network=(NetworkLevel("copies", 1e9, 1e-6),))


def collective(kind, axes, size, mesh, **more):
    ways = mesh.ways(axes)
    facts = {"count": 1, "op": OpLabel("sum", [("a",)]), "phase": "forward", "source": ""} | more
    return Collective(kind, axes, size, wire_bytes=wire_bytes(kind, size, ways), **facts)


def seconds(kind, axis, mesh, hardware, size=8 * 10**6):
    mesh = wf.Mesh(mesh)
    axes = tuple(axis.split("+"))
    return collective_seconds(collective(kind, axes, size, mesh), mesh, hardware)


# -- rings ------------------------------------------------------------------------------------------

V = 8e6


@pytest.mark.parametrize(
    "kind, expected",
    [
        ("all-gather", V * 3 / 4 / 1e9 + 3e-6),
        ("reduce-scatter", V * 3 / 4 / 1e9 + 3e-6),
        ("all-reduce", 2 * V * 3 / 4 / 1e9 + 6e-6),
        ("all-to-all", V * 3 / 4 / 1e9 + 3e-6),
        ("permute", V / 1e9 + 1e-6),
    ],
)
def test_a_ring_of_four_on_a_switch(kind, expected):
    assert seconds(kind, "model", "data=2 model=4", SWITCH) == pytest.approx(expected, rel=1e-12)


def test_the_last_axis_is_on_the_innermost_level():
    near = seconds("all-gather", "model", "data=8 model=8", SWITCH)
    far = seconds("all-gather", "data", "data=8 model=8", SWITCH)
    assert near == pytest.approx(V * 7 / 8 / 1e9 + 7e-6)
    assert far == pytest.approx(V * 7 / 8 / 1e8 + 7e-5)


def test_an_axis_across_nodes_leaves_a_node_through_all_its_adapters():
    # 16 devices, 8 in each node: 8 adapters of 1e8 are 8e8, slower than the 1e9 inside.
    ring = seconds("all-reduce", "data", "data=16", SWITCH)
    assert ring == pytest.approx(2 * V * 15 / 16 / 8e8 + 2 * (7 * 1e-6 + 1 * 1e-5))
    # Beside an axis of 4 inside, two members share a node, and two adapters.
    ring = seconds("all-gather", "data", "data=4 model=4", SWITCH)
    assert ring == pytest.approx(V * 3 / 4 / 2e8 + (1 * 1e-6 + 1 * 1e-5))
    # Each byte of an all-to-all that leaves the node does so through its own device's adapter.
    swap = seconds("all-to-all", "data", "data=16", SWITCH)
    assert swap == pytest.approx(V * 8 / 16 / 1e8 + 7e-6 + 1e-5)


def test_a_torus_uses_both_directions_of_a_ring_and_one_of_a_line():
    ring = seconds("all-gather", "model", "data=2 model=8", TORUS)
    line = seconds("all-gather", "model", "data=2 model=6", TORUS)
    assert ring == pytest.approx(V * 7 / 8 / 2e9 + 7e-6)
    assert line == pytest.approx(V * 5 / 6 / 1e9 + 5e-6, rel=1e-6)
    assert seconds("all-to-all", "model", "model=8", TORUS) == pytest.approx(V * 8 / 4 / 2e9 + 7e-6)
    assert seconds("permute", "model", "model=8", TORUS) == pytest.approx(V / 1e9 + 1e-6)


def test_an_axis_longer_than_a_torus_side_uses_two_of_its_directions():
    # 256 devices are 16 × 16; 64 are laid as 8 × 8.
    both = seconds("all-reduce", "data", "data=64", TORUS)
    assert both == pytest.approx(2 * V * 63 / 64 / 4e9 + 2 * 14e-6, rel=1e-6)
    rings = ring_segments(("data",), wf.Mesh("data=32"), TORUS)  # 8 × 4: two rings
    lines = ring_segments(("data",), wf.Mesh("data=36"), TORUS)  # 6 × 6: two lines
    assert (rings[0].rate, lines[0].rate) == (4e9, 2e9)


def test_two_cores_of_a_chip_share_its_links():
    v3 = Hardware.of("tpu-v3")
    mesh = wf.Mesh("data=32 core=2")
    alone = ring_segments(("data",), mesh, v3)
    together = ring_segments(("data", "core"), mesh, v3)
    assert [c.level.name for c in alone] == ["ICI"] and [c.level.name for c in together] == ["chip", "ICI"]
    assert together[1].rate == 2 * alone[0].rate


def test_axes_of_one_device_cost_nothing():
    assert seconds("all-reduce", "data", "data=1 model=4", SWITCH) == 0


@pytest.mark.parametrize("kind", ["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "permute"])
@pytest.mark.parametrize("base", [SWITCH, TORUS], ids=["switch", "torus"])
def test_faster_networks_are_never_slower(kind, base):
    for axis in ("pod", "data", "pod+model"):
        times = []
        for factor in (1, 2, 8):
            levels = tuple(
                dataclasses.replace(v, bandwidth=v.bandwidth * factor, latency=v.latency / factor)
                for v in base.network
            )
            faster = dataclasses.replace(base, network=levels)
            times.append(seconds(kind, axis, "pod=2 data=4 model=6", faster))
        assert times[0] == pytest.approx(2 * times[1]) == pytest.approx(8 * times[2])
        assert all(t > 0 for t in times)


# -- plans ------------------------------------------------------------------------------------------

rows, inner, columns = wf.dims("rows=4096 inner=4096 columns=8192")


def product(x, w):
    return wf.einsum(x, w, out=[rows, columns])


def planned(mesh="", layout="", dtype="float32", **roles):
    x, w = wf.spec([rows, inner], dtype), wf.parameter(wf.spec([inner, columns], dtype))
    return wf.spmd(product, mesh, wf.Layout(layout, **roles)).plan(x, w)


def test_a_big_matmul_takes_its_flops_over_the_achievable_peak():
    v4 = Hardware.of("tpu-v4")
    time = planned(dtype="bfloat16").time("tpu-v4")
    flops = 2 * rows.size * inner.size * columns.size
    assert time.total_seconds == pytest.approx(flops / (275e12 * v4.matmul_efficiency))
    assert time.total_seconds == time.compute_seconds == time.overlapped_seconds
    assert time.bound == "compute" and time.network_seconds == {}
    assert time.flops_share == pytest.approx(v4.matmul_efficiency)


def test_a_matmul_by_a_vector_takes_its_bytes_over_the_bandwidth():
    one = wf.Dim("one", 1)
    x, w = wf.spec([one, inner], "float32"), wf.spec([inner, columns], "float32")
    time = wf.spmd(lambda x, w: wf.einsum(x, w, out=[one, columns]), "", "").plan(x, w).time("tpu-v4")
    moved = 4 * (inner.size * columns.size + inner.size + columns.size)
    assert time.memory_seconds == pytest.approx(moved / 1.2e12)
    assert time.bound == "memory"


def test_parts_add_up_and_the_timeline_has_every_event_in_order():
    plan = planned("data=4 model=2", "rows:data inner:model")
    time = estimate_time(plan, "h100")
    assert time.total_seconds == pytest.approx(
        time.compute_seconds + time.memory_seconds + sum(time.network_seconds.values())
    )
    assert [e["index"] for e in time.events] == list(range(len(plan.events)))
    assert time.events[-1]["start"] + time.events[-1]["seconds"] == pytest.approx(time.total_seconds)
    assert [e["start"] for e in time.events] == sorted(e["start"] for e in time.events)
    for row in time.events:
        event = plan.events[row["index"]]
        assert (row["kind"] == "network") == isinstance(event, Collective)
        assert row["axis"] == ("model" if row["kind"] == "network" else "")
    sent = next(c for c in plan.collectives)
    assert time.network_seconds == {"model": collective_seconds(sent, plan.mesh, Hardware.of("h100"))}


def test_a_faster_dtype_is_faster():
    assert planned(dtype="bfloat16").time(SWITCH).compute_seconds == pytest.approx(
        planned(dtype="float32").time(SWITCH).compute_seconds / 4
    )


def test_trip_counts_multiply():
    layers = wf.Dim("layers", 6)

    square = wf.Dim("columns", inner.size)
    x, w = wf.spec([rows, inner]), wf.spec([layers, inner, square])

    def many(x, w):
        def layer(x, w):
            return wf.einsum(x, w, out=[rows, square]).rename(columns="inner"), None

        return wf.scan(layer, x, w, layers)[0]

    time = wf.spmd(many, "model=4", "columns:model").plan(x, w).time(SWITCH)
    once = 2 * rows.size * inner.size * inner.size / 4 / (1e12 * 0.5)
    assert time.compute_seconds == pytest.approx(6 * once)
    mesh = wf.Mesh("model=4")
    gather = collective("all-gather", ("model",), 4 * rows.size * inner.size, mesh)
    assert time.network_seconds["model"] == pytest.approx(6 * collective_seconds(gather, mesh, SWITCH))


def test_virtual_devices_share_the_cores():
    # Twice the devices on the same cores: each has half the work, and takes as long.
    times = [planned(f"data={n}", "rows:data").time(CPU).compute_seconds for n in (1, 2, 8)]
    assert times[0] == pytest.approx(times[1]) == pytest.approx(times[2])
    assert times[0] == pytest.approx(2 * rows.size * inner.size * columns.size / (1e12 * 0.5) / 2)
    # Replicated work on shared cores takes as many times as long as there are devices.
    replicated_seconds = [planned(f"data={n}", "").time(CPU).compute_seconds for n in (1, 8)]
    assert replicated_seconds[1] == pytest.approx(8 * replicated_seconds[0])
    plan = planned("data=8", "inner:data")
    (sent,) = plan.collectives
    expected = collective_seconds(sent, plan.mesh, CPU) * 8 / 2
    assert plan.time(CPU).network_seconds == {"data": pytest.approx(expected)}


# -- overlap ----------------------------------------------------------------------------------------

batch, d_model, d_ff, layers = wf.dims("batch=64 d_model=32 d_ff=128 layers=3")


def loss(params, x):
    def layer(x, both):
        w, v = both
        h = wf.relu(wf.einsum(x, w, out=[batch, d_ff]))
        return x + wf.einsum(h, v, out=[batch, d_model]), None

    return wf.mean(wf.square(wf.scan(layer, x, params, layers)[0]))


def train(params, x):
    value, grads = wf.value_and_grad(loss)(params, x)
    return value, jax.tree.map(lambda p, g: p - 0.1 * g, params, grads, is_leaf=wf.is_tensor)


def trained(layout, hardware=SWITCH, **roles):
    w, v = (wf.parameter(wf.spec([layers, *dims])) for dims in ([d_model, d_ff], [d_ff, d_model]))
    program = wf.spmd(train, "data=4 model=2", wf.Layout(layout, **roles))
    plan = program.plan((w, v), wf.spec([batch, d_model]))
    time = plan.time(hardware)
    hideable = [plan.events[e["index"]] for e in time.events if e["hideable"]]
    return plan, time, hideable


def test_gradient_sums_may_hide_and_activation_sums_may_not():
    plan, time, hideable = trained("batch:data d_ff:model")
    assert {c.op for c in hideable} == {"gradient[layers,d_model,d_ff]", "gradient[layers,d_ff,d_model]"}
    assert all(c.axes == ("data",) and c.phase == "backward" for c in hideable)
    assert any(c.axes == ("model",) for c in plan.collectives)
    assert time.overlapped_seconds < time.total_seconds


def test_stored_parameters_are_fetched_ahead():
    _, _, hideable = trained("batch:data d_ff:model", params="d_model:data")
    kinds = {(c.kind, c.phase) for c in hideable}
    assert ("all-gather", "forward") in kinds and ("reduce-scatter", "backward") in kinds
    assert all(c.axes == ("data",) for c in hideable)
    assert not any(c.kind == "all-reduce" for c in hideable)


def test_no_more_hides_than_there_is_compute_in_the_phase():
    plan, time, _ = trained("batch:data d_ff:model")
    backward = sum(
        e["seconds"]
        for e in time.events
        if e["kind"] == "compute" and plan.events[e["index"]].phase == "backward"
    )
    hidden = sum(e["seconds"] for e in time.events if e["hideable"])
    assert time.total_seconds - time.overlapped_seconds == pytest.approx(min(backward, hidden))
    slow = dataclasses.replace(SWITCH, memory_bandwidth=1e3)
    _, time, _ = trained("batch:data d_ff:model", slow)
    hidden = sum(e["seconds"] for e in time.events if e["hideable"])
    assert time.total_seconds - time.overlapped_seconds == pytest.approx(hidden)


def test_nothing_hides_on_shared_cores():
    _, time, hideable = trained("batch:data d_ff:model", CPU)
    assert time.overlapped_seconds == time.total_seconds and not hideable


# -- profiles ---------------------------------------------------------------------------------------


def test_every_profile_is_sound():
    names = {path.stem for path in (Path(profile.__file__).parent / "profiles").glob("*.toml")}
    assert {"tpu-v2", "h100", "cpu"} <= names <= set(known_profiles())
    for name in names:
        machine = Hardware.of(name)
        assert machine.name == name and len(machine.source) > 40
        assert 0.5 <= machine.matmul_efficiency <= 1
        assert 1e10 <= machine.peak("f32") and machine.peak("f16") == machine.peak("bf16") <= 3e15
        assert 1e9 <= machine.memory_bytes <= 2e11
        assert (machine.shared_cores > 0) == (name == "cpu")
        rates = [level.bandwidth for level in machine.network]
        assert rates == sorted(rates, reverse=True) and machine.network[-1].devices is None


@pytest.mark.parametrize("name", known_profiles())
def test_a_profile_is_written_as_it_is_read(name):
    """Lines of the source were written as they are, which TOML does not have between quotes."""
    machine = Hardware.of(name)
    again = parse_profile(to_toml(machine))
    assert again == machine and list(again.peak_flops) == list(machine.peak_flops)


def test_any_text_is_written_as_it_is_read():
    machine = dataclasses.replace(SWITCH, source='a "quote", a \\ backslash,\na line, \ta tab, \x7f and é')
    assert parse_profile(to_toml(machine)) == machine


def test_newer_machines_are_faster():
    for slower, faster in [
        ("tpu-v2", "tpu-v3"),
        ("tpu-v4", "tpu-v5p"),
        ("tpu-v5e", "tpu-v6e"),
        ("a100", "h100"),
        ("h100", "b200"),
    ]:
        a, b = Hardware.of(slower), Hardware.of(faster)
        assert a.peak("bf16") < b.peak("bf16") and a.memory_bandwidth < b.memory_bandwidth


def test_a_users_own_file_by_path_and_by_name(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "weft").mkdir()
    mine = tmp_path / "weft" / "mine.toml"
    mine.write_text(to_toml(dataclasses.replace(SWITCH, name="mine")))
    assert Hardware.of("mine") == Hardware.of(str(mine)) == Hardware.of(mine)
    (tmp_path / "weft" / "cpu.toml").write_text(to_toml(dataclasses.replace(CPU, name="cpu")))
    assert load_profile(find_profile("cpu")).peak("f32") == 1e12
    assert planned().time("mine").total_seconds > 0


GOOD = to_toml(TORUS)

BAD = {
    "broken_toml": GOOD.replace("[memory]", "[memory"),
    "ends_early": GOOD[: GOOD.index("source") + 9],
    "missing_field": GOOD.replace("devices_per_node = 8\n", ""),
    "misspelt_field": GOOD.replace("matmul_efficiency", "matmul_eficiency"),
    "missing_field_of_a_level": GOOD.replace("latency = 1e-05", ""),
    "wrong_type": GOOD.replace("bandwidth = 1e+07", 'bandwidth = "10 MB/s"'),
    "out_of_range": GOOD.replace("matmul_efficiency = 0.5", "matmul_efficiency = 50"),
    "not_whole": GOOD.replace("torus = 2", "torus = 1.5"),
    "negative": GOOD.replace("f32 = 1e+12", "f32 = -1e+12"),
    "table_that_is_none": GOOD.replace("[memory]", "memory.x = 1\n[mem]"),
    "unknown_field": GOOD.replace("wrap = 4", "warp = 4"),
    "without_network": GOOD[: GOOD.index("[[network]]")],
    "levels_inwards": GOOD.replace("devices = 256\n", ""),
    "last_level_inwards": GOOD + "devices = 4\n",
}


@pytest.mark.parametrize("name", BAD)
def test_the_error_of_a_bad_file_points_to_its_line(name, golden):
    with pytest.raises(HardwareError) as error:
        parse_profile(BAD[name], "mine.toml")
    golden(name, f"HardwareError: {error.value}", "messages/hardware")


def test_unknown_hardware(golden, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", "/home/me/.config")
    with pytest.raises(HardwareError) as error:
        planned().time("tpu_v4")
    golden("unknown", f"HardwareError: {error.value}", "messages/hardware")
    assert isinstance(error.value, WeftError) and isinstance(error.value, ValueError)
    with pytest.raises(HardwareError, match="there is no file"):
        Hardware.of("no/such.toml")
    with pytest.raises(HardwareError, match="unknown hardware 3"):
        Hardware.of(3)
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe")
    with pytest.raises(HardwareError, match=r"can't be read"):
        Hardware.of(binary)


def test_time_as_data_is_json():
    import json

    data = planned("data=4", "inner:data").time("b200").to_data()
    assert json.loads(json.dumps(data)) == data
    assert math.isfinite(data["total_seconds"]) and data["bound"] in ("compute", "memory", "network")


def test_the_share_of_the_peak_is_that_of_the_type_that_is_multiplied():
    """Parameters in float32, products in bfloat16: no machine does more than its peak."""
    a, b, c = wf.dims("a=4096 b=4096 c=4096")

    def product(x, w):
        return wf.einsum(x.astype("bfloat16"), w.astype("bfloat16"), out=[a, c])

    time = wf.spmd(product).plan(wf.spec([a, b]), wf.spec([b, c])).time("a100")
    assert 0.3 < time.flops_share < 1
