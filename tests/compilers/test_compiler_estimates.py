"""The compilers' own estimates, and the corrections of their known errors."""

import json

import pytest
from hlo_text import entry

from weft.compilers.estimates import estimates_of
from weft.compilers.target import Target

pytestmark = pytest.mark.nodevice


def estimate(target, text, operands=("f32[8]",), costs=None):
    lines = [f"%x{n} = {type_} parameter({n})" for n, type_ in enumerate(operands)]
    module = entry(*lines, text)
    return estimates_of(Target.of(target), costs or {})(module, module.entry, module.entry.root)


def tpu(cycles):
    config = {} if cycles is None else {"window_config": {"estimated_cycles": str(cycles)}}
    return f"%r = f32[8] negate(%x0), backend_config={json.dumps({'flag_configs': []} | config)}"


@pytest.mark.parametrize(
    "target, cycles, seconds",
    [
        ("tpu-v5e:2x2", 1500, 1e-6),
        ("tpu-v2:2x2", 700, 1e-6),
        ("tpu-v5e:2x2", 0, 0.0),
        ("tpu-v5e:2x2", None, None),
        ("tpu-v5e:2x2", 9223372036854775807, None),  # stands for no estimate
    ],
)
def test_cycles_of_a_tpu(target, cycles, seconds):
    assert estimate(target, tpu(cycles)) == pytest.approx(seconds)


def gpu(text, *models, **config):
    listed = [{"name": name, "exec_time_us": time} for name, time in models]
    return f"%r = {text}, backend_config={json.dumps(config | {'reification_cost': listed})}"


@pytest.mark.parametrize(
    "models, microseconds",
    [
        ([("", 5.0), ("sol", 7.0)], 7.0),  # "sol" has the measured tables
        ([("", 5.0)], 5.0),
        ([("indexing-cost-model", 5.0)], None),
        ([("sol", "Infinity")], None),
        ([("sol", "NaN")], None),
        ([], None),
    ],
)
def test_models_of_the_gpu_compiler(models, microseconds):
    seconds = estimate("h100:8", gpu("f32[8] fusion(%x0), kind=kLoop, calls=%f", *models))
    assert seconds == (None if microseconds is None else pytest.approx(microseconds * 1e-6))


def test_only_one_model_knows_the_fusions_of_triton():
    text = "f32[8] fusion(%x0), kind=kCustom, calls=%f"
    models = [("sol", 0.0), ("", 3e9), ("indexing-cost-model", 4.0)]
    triton = gpu(text, *models, fusion_backend_config={"kind": "__triton"})
    assert estimate("h100:8", triton) == pytest.approx(4e-6)
    assert estimate("h100:8", gpu(text, *models[:2], fusion_backend_config={"kind": "__triton"})) is None
    other = gpu(text, ("sol", 2.0), fusion_backend_config={"kind": "__custom_fusion"})
    assert estimate("h100:8", other) == pytest.approx(2e-6)


def test_estimates_that_the_text_does_not_have():
    text = gpu("((f32[8]), f32[1]) reduce-scatter-start(%x0), replica_groups={}")
    assert estimate("h100:8", text, costs={"r": 12.0, "s": 1.0}) == pytest.approx(12e-6)
    assert estimate("h100:8", text, costs={"s": 1.0}) is None


def matmul(types, microseconds, size=4096):
    left, right, out = (f"{dtype}[{size},{size}]" for dtype in types)
    text = f'({out}, s8[4194304]) custom-call(%x0, %x1), custom_call_target="__cublas$lt$matmul"'
    return gpu(text, ("sol", microseconds)), (left, right)


@pytest.mark.parametrize(
    "types, factor",
    [
        (("bf16", "bf16", "bf16"), 1),
        (("f32", "f32", "f32"), 1),
        (("f8e4m3fn", "f8e5m2", "bf16"), 1),
        # Not in the tables: 64 times too slow, 4 bytes to the third power.
        (("bf16", "bf16", "f32"), 64),
        (("f16", "f16", "f16"), 8),
    ],
    ids=str,
)
def test_matmuls_of_dtypes_that_the_tables_do_not_have(types, factor):
    text, operands = matmul(types, 11274.0)
    assert estimate("h100:8", text, operands) == pytest.approx(11274e-6 / factor)


def test_the_tables_of_matmuls_ignore_the_memory():
    text = 'bf16[8,4096], s8[4194304]) custom-call(%x0, %x1), custom_call_target="__cublas$lt$matmul"'
    operands = ("bf16[8,4096]", "bf16[4096,4096]")
    moved = 2 * (8 * 4096 + 4096 * 4096 + 8 * 4096)
    assert estimate("h100:8", gpu("(" + text, ("sol", 0.64)), operands) == pytest.approx(moved / 3.35e12)
