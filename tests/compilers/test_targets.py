"""Targets: names, shapes, the arguments of topologies, and the descriptions of GPUs."""

import itertools
import math
import re

import pytest

from weft.compilers.gpus import GPUS
from weft.compilers.target import TPUS, Target, known_shapes, nearest_shapes
from weft.core.errors import HardwareError
from weft.hardware.profile import Hardware

pytestmark = pytest.mark.nodevice


def message(name):
    with pytest.raises(HardwareError) as caught:
        Target.of(name)
    return str(caught.value)


# -- Names and shapes


@pytest.mark.parametrize(
    "name, platform, shape, devices",
    [
        ("tpu-v2:16x16", "tpu", (16, 16), 512),  # two cores a chip
        ("tpu-v3:2x2", "tpu", (2, 2), 8),
        ("tpu-v4:4x4x8", "tpu", (4, 4, 8), 128),
        ("tpu-v5e:1x1", "tpu", (1, 1), 1),
        ("tpu-v5e:2x4", "tpu", (2, 4), 8),
        ("tpu-v5p:2x2x1", "tpu", (2, 2, 1), 4),
        ("tpu-v5p:16x16x24", "tpu", (16, 16, 24), 6144),
        ("tpu-v6e:16x16", "tpu", (16, 16), 256),
        ("a100:4", "cuda", (1, 4), 4),
        ("h100:8", "cuda", (1, 8), 8),
        ("h100:16x8", "cuda", (16, 8), 128),
        ("h200:3x2", "cuda", (3, 2), 6),
        ("b200:100x8", "cuda", (100, 8), 800),
    ],
)
def test_a_target_is_a_name_with_a_shape(name, platform, shape, devices):
    target = Target.of(name)
    assert str(target) == target.name == name
    assert (target.platform, target.shape, target.devices) == (platform, shape, devices)
    assert target.hardware.name == name.partition(":")[0]
    assert target.extra == {"tpu": "tpu-compiler", "cuda": "gpu-compiler"}[platform]
    assert (target.generation is None) == (platform == "cuda")
    assert Target.of(target) is target


@pytest.mark.parametrize("kind", [*TPUS, *GPUS])
def test_every_target_has_a_profile(kind):
    assert Hardware.of(kind).name == kind


KNOWN = "known: tpu-v2, tpu-v3, tpu-v4, tpu-v5e, tpu-v5p, tpu-v6e, a100, h100, h200, b200"


@pytest.mark.parametrize(
    "name, suggestion",
    [
        ("tpu-v5:4x4", " (did you mean tpu-v5"),
        ("v5e:4x4", " (did you mean tpu-v5e?)"),
        ("TPU-V6E:4x4", " (did you mean tpu-v6e?)"),
        ("H100:8", " (did you mean h100?)"),
        ("h1000:8", " (did you mean h100?)"),
        ("abacus:8", ""),
        ("", ""),
        (8, ""),
        (None, ""),
    ],
)
def test_an_unknown_target(name, suggestion):
    lines = message(name).splitlines()
    assert lines[0].startswith(f"unknown target {name!r}{suggestion}")
    assert ("did you mean" in lines[0]) == bool(suggestion)
    assert lines[1:] == [
        "  " + KNOWN,
        "  a target is one of these names and the shape of a slice",
        "",
        'hint: for example "tpu-v5e:16x16", "tpu-v5p:4x4x8", "h100:16x8" (16 hosts of 8)',
    ]


@pytest.mark.parametrize(
    "name, reason, near",
    [
        ("tpu-v5e", "it has no shape", "tpu-v5e:1x1, tpu-v5e:2x2, tpu-v5e:2x4"),
        ("tpu-v5e:", "it has no shape", "tpu-v5e:1x1, tpu-v5e:2x2, tpu-v5e:2x4"),
        ("h100", "it has no shape", "h100:1x1, h100:1x2, h100:1x4"),
        ("tpu-v5e:4x", "'4x' is not a shape", None),
        ("tpu-v5e:4 x 4", "'4 x 4' is not a shape", None),
        ("tpu-v5e:-4x4", "'-4x4' is not a shape", None),
        ("tpu-v5e:4X4", "'4X4' is not a shape", None),
        ("h100:16x8:2", "'16x8:2' is not a shape", None),
        ("h100:" + "9" * 5000, f"'{'9' * 5000}' is not a shape", None),
        ("tpu-v5e:16", "it has 1 sides, not 2", "tpu-v5e:4x4, tpu-v5e:2x4, tpu-v5e:4x8"),
        ("tpu-v5e:4x4x4", "it has 3 sides, not 2", "tpu-v5e:8x8, tpu-v5e:4x8, tpu-v5e:8x16"),
        ("tpu-v5p:4x4", "it has 2 sides, not 3", "tpu-v5p:2x2x4, tpu-v5p:2x2x2, tpu-v5p:2x4x4"),
        ("tpu-v5e:0x4", "a side is 0", "tpu-v5e:1x1, tpu-v5e:2x2, tpu-v5e:2x4"),
        ("h100:0", "a side is 0", None),
        ("h100:2x0", "a side is 0", None),
        ("tpu-v5e:3x4", "a host has 2 x 2 chips, so the first two sides are even", None),
        ("tpu-v5e:4x5", "a host has 2 x 2 chips, so the first two sides are even", None),
        ("tpu-v4:1x2x2", "a host has 2 x 2 chips, so the first two sides are even", None),
        ("tpu-v5e:16x32", "the largest one is 16x16", "tpu-v5e:16x16, tpu-v5e:8x16, tpu-v5e:8x8"),
        ("tpu-v2:2x18", "the largest one is 16x16", None),
        ("tpu-v5p:16x16x26", "the largest one is 16x16x24", None),
        ("tpu-v4:18x2x2", "the largest one is 16x16x16", None),
        ("h100:16x16", "a host has at most 8 GPUs, not 16", "h100:32x8, h100:16x8, h100:64x8"),
        ("h100:12", "a host has at most 8 GPUs, not 12", None),
        ("h100:2x2x8", "it has 3 numbers, not 2", "h100:4x8, h100:2x8, h100:8x8"),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else "",
)
def test_a_shape_that_a_target_can_not_have(name, reason, near):
    kind = name.partition(":")[0]
    lines = message(name).splitlines()
    assert lines[:-1] == [
        f"{name!r} is not a slice of {kind}: {reason}",
        "  the shape of a TPU slice has the sides of its torus in chips; that of a GPU cluster the number of "
        "hosts and of GPUs in each",
        "",
    ]
    assert lines[-1].startswith(f"hint: the nearest ones: {kind}:")
    if near is not None:
        assert lines[-1] == f"hint: the nearest ones: {near}"


def test_the_third_side_may_be_odd():
    assert Target.of("tpu-v5p:4x4x3").devices == 48


# -- Nearest shapes


@pytest.mark.parametrize("kind", [*TPUS, *GPUS])
def test_all_suggestions_are_targets(kind):
    shapes = known_shapes(kind)
    assert len(shapes) == len(set(shapes)) >= 8
    sizes = [Target.of(f"{kind}:{'x'.join(map(str, shape))}").devices for shape in shapes]
    # Each has twice the devices of the one before, but for the step from one chip to a host.
    assert all(b in (2 * a, 4 * a) for a, b in itertools.pairwise(sizes))
    for devices in (1, 2, 3, 7, 8, 100, 512, 5000, 10**6):
        suggested = [Target.of(name).devices for name in nearest_shapes(kind, devices)]
        distances = sorted(abs(math.log(size / devices)) for size in sizes)
        found = [abs(math.log(size / devices)) for size in suggested]
        assert found == pytest.approx(distances[:3])
        # A number of devices that a target has is suggested first.
        assert (devices in sizes) == (suggested[0] == devices)


def test_the_nearest_shapes_of_a_chip_with_two_devices():
    assert nearest_shapes("tpu-v2", 8) == ["tpu-v2:2x2", "tpu-v2:2x4", "tpu-v2:1x1"]
    assert nearest_shapes("tpu-v5e", 8) == ["tpu-v5e:2x4", "tpu-v5e:2x2", "tpu-v5e:4x4"]
    assert nearest_shapes("h100", 0) == ["h100:1x1", "h100:1x2", "h100:1x4"]


# -- The arguments of topologies


@pytest.mark.parametrize(
    "name, arguments",
    [
        ("tpu-v5e:16x16", {"topology_name": "v5e:16x16", "platform": "tpu"}),
        ("tpu-v2:4x8", {"topology_name": "v2:4x8", "platform": "tpu"}),
        # A chip of v4 is one device, as in the profile.
        ("tpu-v4:4x4x4", {"topology_name": "v4:4x4x4", "platform": "tpu", "chip_config_name": "megacore"}),
        ("tpu-v5p:2x2x1", {"topology_name": "v5p:2x2x1", "platform": "tpu"}),
        # One chip is not a host of four.
        ("tpu-v6e:1x1", {"topology_name": "v6e:1x1", "platform": "tpu", "chips_per_host_bounds": [1, 1, 1]}),
        (
            "tpu-v4:1x1x1",
            {
                "topology_name": "v4:1x1x1",
                "platform": "tpu",
                "chip_config_name": "megacore",
                "chips_per_host_bounds": [1, 1, 1],
            },
        ),
    ],
)
def test_the_topology_of_a_tpu(name, arguments):
    assert Target.of(name).topology == arguments
    assert Target.of(name).options == {}


@pytest.mark.parametrize("name, hosts", [("h100:16x8", "16x1x8"), ("h100:4", "1x1x4"), ("b200:2x1", "2x1x1")])
def test_the_topology_of_gpus(name, hosts):
    topology = Target.of(name).topology
    assert {key: topology[key] for key in topology if key != "target_config"} == {
        "topology_name": name,
        "platform": "cuda",
        "topology": hosts,
    }


# -- Descriptions of GPUs

# NVIDIA's data sheets and tuning guides: multiprocessors, KiB of shared memory of each, MiB of second-level cache,
# compute capability, FP32 units.
DATA_SHEETS = {
    "a100": (108, 164, 40, 8, 64),
    "h100": (132, 228, 50, 9, 128),
    "h200": (132, 228, 50, 9, 128),
    "b200": (148, 228, 126, 10, 128),
}


def fields(text):
    """The fields of a protocol buffer's text, without the nesting."""
    return dict(re.findall(r'(\w+): ("[^"]*"|\S+)', text))


@pytest.mark.parametrize("kind", GPUS)
def test_the_description_of_a_gpu(kind):
    target = Target.of(f"{kind}:8")
    text = target.topology["target_config"]
    found = fields(text)
    multiprocessors, shared, cache, major, units = DATA_SHEETS[kind]
    assert int(found["core_count"]) == multiprocessors
    assert int(found["shared_memory_per_core"]) == shared * 1024
    assert int(found["shared_memory_per_block_optin"]) == (shared - 1) * 1024
    assert int(found["l2_cache_size"]) == cache * 1024**2
    assert (int(found["fpus_per_core"]), int(found["threads_per_warp"])) == (units, 32)
    assert int(found["device_memory_size"]) == target.hardware.memory_bytes
    assert float(found["memory_bandwidth"]) == target.hardware.memory_bandwidth
    # major is also that of the version of cuDNN, after it.
    assert re.search(rf"cuda_compute_capability {{ major: {major} feature_extension: (\w+) }}", text)[1] == (
        "NONE" if major < 9 else "ACCELERATED_FEATURES"
    )
    # The peak for f32 outside of the matrix units: a multiply and an add on each unit.
    peaks = {"a100": 19.5e12, "h100": 66.9e12, "h200": 66.9e12, "b200": 75e12}
    assert 2 * multiprocessors * units * float(found["clock_rate_ghz"]) * 1e9 == pytest.approx(
        peaks[kind], rel=0.01
    )
    assert found["name"] == found["device_description_str"] and kind.upper() in found["name"]
    assert text.count("{") == text.count("}") == 3


@pytest.mark.parametrize("kind", GPUS)
def test_the_options_of_a_gpu(kind):
    options = Target.of(f"{kind}:8").options
    assert options.pop("xla_gpu_enable_triton_gemm") is False
    # XLA's cost model has no tables of the A100, and its statistics fail to compile without them.
    assert options == ({} if kind == "a100" else {"xla_gpu_collect_cost_model_stats": True})
