"""`plan.on(hardware)`: the plan as the compiler of a GPU or TPU compiles the program."""

import copy
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

import weft as wf
from benchmarks.memory import transformer
from weft.core.errors import ProgramError
from weft.hardware.profile import Hardware

MACHINES = ["h100", "tpu-v2", "tpu-v5e"]
BOTH = "data=4 model=2", "batch:data d_ff:model heads:model vocab:model"


def traffic(plan):
    return sum(w.bytes * w.count for w in plan.work)


def peak(plan):
    return plan.memory.peak


def plan_of(fn, *specs):
    return wf.spmd(fn).plan(*specs)


@pytest.mark.parametrize("machine", MACHINES)
def test_only_work_and_memory_depend_on_the_machine(machine):
    program, args = transformer(*BOTH, remat="nothing")
    plan = program.plan(*args)
    on = plan.on(machine)
    assert [(c.kind, c.axes, c.bytes, c.count) for c in on.collectives] == [
        (c.kind, c.axes, c.bytes, c.count) for c in plan.collectives
    ]
    assert (on.flops, on.unique_flops, on.stored) == (plan.flops, plan.unique_flops, plan.stored)
    assert traffic(on) < traffic(plan) and peak(on) < peak(plan)
    assert on.on(machine) == on and on.on("cpu") == plan


def test_the_plan_itself_is_that_of_cpus():
    plan = plan_of(wf.exp, wf.spec("a=4"))
    assert plan.on("cpu") == plan


def test_a_copied_plan_has_no_program():
    plan = plan_of(wf.exp, wf.spec("a=4"))
    assert copy.deepcopy(plan) == plan
    with pytest.raises(ProgramError, match="without its program"):
        copy.deepcopy(plan).on("h100")


def test_phases_are_those_of_the_program():
    program, args = transformer(*BOTH)
    on = program.plan(*args).on("tpu-v5e")
    phases = list(dict.fromkeys(w.phase for w in on.work))
    assert phases == ["forward", "backward", "update"]


def test_a_kernel_has_the_name_and_the_flops_of_its_matmul():
    def fn(x, w):
        return wf.relu(wf.einsum(x, w, out="a c") * 2.0)

    def matmuls(machine):
        plan = plan_of(fn, wf.spec("a=256 b=512"), wf.spec("b=512 c=128")).on(machine)
        return [(w.op.name, w.flops, w.bytes) for w in plan.work if w.flops]

    floats = 4 * (256 * 512 + 512 * 128 + 256 * 128)
    # The matmul writes its result in each case: on TPUs after the function.
    assert matmuls("tpu-v2") == matmuls("h100") == [("einsum", 2 * 256 * 512 * 128, floats)]
    tpu = plan_of(fn, wf.spec("a=256 b=512"), wf.spec("b=512 c=128")).on("tpu-v2")
    assert traffic(tpu) == floats  # the function costs nothing
    gpu = plan_of(fn, wf.spec("a=256 b=512"), wf.spec("b=512 c=128")).on("h100")
    assert traffic(gpu) == floats + 2 * 4 * 256 * 128


def test_exp_is_computed_once():
    def fn(x):
        y = wf.exp(x)
        return y * 2.0, wf.cumsum(y, "b")

    # One kernel reads x and writes exp and the product; the sum reads exp and writes its result.
    assert traffic(plan_of(fn, wf.spec("a=512 b=512")).on("h100")) == 5 * 4 * 512 * 512


def test_what_is_computed_from_sums_of_rows_reads_the_rows_once():
    softmax = plan_of(lambda x: wf.softmax(x, "b"), wf.spec("a=512 b=512"))
    size = 4 * 512 * 512
    assert traffic(softmax.on("h100")) < 4 * size < traffic(softmax)


def test_arrays_on_the_chip_cost_no_traffic():
    def fn(x, v, w):
        return wf.einsum(wf.einsum(x, v, out="a c"), w, out="a d")

    plan = plan_of(
        fn, *(wf.spec(dims, jnp.bfloat16) for dims in ("a=1024 b=64", "b=64 c=1024", "c=1024 d=64"))
    )
    machine = Hardware.of("tpu-v5e")
    without = plan.on(replace(machine, on_chip_bytes=0))
    small = plan.on(replace(machine, on_chip_bytes=1 << 20))  # too small for 2 MiB
    assert traffic(without) == traffic(small) == traffic(plan.on(machine)) + 2 * 2 * 1024 * 1024


def test_tpus_round_stacked_weights_before_the_loop():
    specs = wf.spec("a=8 b=256", jnp.bfloat16), wf.spec("layers=16 b=256 c=256")

    def fn(x, stack):
        def layer(x, w):
            return wf.einsum(x, w.astype(jnp.bfloat16), out="a c").rename(c="b"), None

        return wf.scan(layer, x, stack, "layers")[0]

    plan = plan_of(fn, *specs)
    added = peak(plan.on("tpu-v2")) - peak(plan.on("h100"))
    rounded, layer = 2 * 16 * 256 * 256, 2 * 256 * 256
    assert rounded - layer <= added <= rounded


def test_tpus_copy_between_tiles():
    def fn(x):
        return wf.dropout(x, 0.1, jax.random.key(0))

    plan = plan_of(fn, wf.spec("a=512 b=512"))
    # Random bits are drawn along one dim: two arrays of counts, and what is compared with the rate.
    assert traffic(plan.on("tpu-v2")) > traffic(plan.on("h100")) + 4 * 512 * 512


def test_gpus_concatenate_weights_of_small_matmuls():
    def fn(x, v, w):
        return wf.einsum(x, v, out="a c"), wf.einsum(x, w, out="a c")

    specs = [wf.spec(dims, jnp.bfloat16) for dims in ("a=8 b=512", "b=512 c=512", "b=512 c=512")]
    plan = plan_of(fn, *specs)
    assert traffic(plan.on("h100")) == traffic(plan.on("tpu-v2")) + 2 * 2 * (2 * 512 * 512)
    large = [wf.spec(dims, jnp.bfloat16) for dims in ("a=8 b=8192", "b=8192 c=8192", "b=8192 c=8192")]
    assert traffic(plan_of(fn, *large).on("h100")) == traffic(plan_of(fn, *large).on("tpu-v2"))


def test_tpus_compute_masks_in_the_loop():
    def fn(x, stack):
        mask = wf.arange("a=512") >= wf.arange("b=512")

        def layer(x, w):
            return wf.where(mask, x * w, -1.0), None

        return wf.scan(layer, x, stack, "layers")[0]

    plan = plan_of(fn, wf.spec("a=512 b=512 c=64"), wf.spec("layers=4 c=64"))
    assert peak(plan.on("tpu-v2")) <= peak(plan)
