"""ZeRO as published: bytes per device of parameters and optimizer state, planned and measured.

Rajbhandari and others (2020), table 1, for float32 AdamW without a separate copy of the weights: of Ψ parameters
on N devices, stage 1 stores 4Ψ bytes of parameters and 8Ψ/N of moments, stage 3 stores 4Ψ/N and 8Ψ/N. With M-way
model parallelism besides, Ψ is what is on one device of `model`.
"""

import jax
import pytest

import weft as wf
from weft import nn, optim, train
from weft.models import preset

CHOSEN = preset("tiny-lm")
STEP = train.train_step(optim.AdamW(1e-3))
MODEL_RULES = "d_ff:model heads:model vocab:model"
STORED = "d_model"  # every parameter of a Transformer with bias=False has this dim
MESHES = {"data=8": ("batch:data", 8, 1), "data=4 model=2": (f"batch:data {MODEL_RULES}", 4, 2)}
STAGES = {
    0: lambda rules: wf.Layout(rules),
    1: lambda rules: wf.Layout(rules, optimizer=f"{STORED}:data"),
    3: lambda rules: wf.Layout(rules, params=f"{STORED}:data"),
}


def on_one_device_of_model(model, ways):
    """Ψ: the number of parameters that one device of `model` has, apart from ZeRO."""
    split = {"d_ff", "heads", "vocab"}
    return sum(
        p.size // (ways if split & {d.name for d in p.dims} else 1) for p in nn.parameters(model).values()
    )


def expected(stage, psi, devices):
    """Bytes of parameters and of moments on one device."""
    return (
        4 * psi // (devices if stage == 3 else 1),
        8 * psi // (devices if stage >= 1 else 1),
    )


def on_devices(tree):
    """The bytes that each device holds of a tree of tensors; all of them the same."""
    stored_bytes = {}
    for t in jax.tree.leaves(tree, is_leaf=wf.is_tensor):
        for shard in t.storage.addressable_shards:
            stored_bytes[shard.device] = stored_bytes.get(shard.device, 0) + shard.data.nbytes
    (one,) = set(stored_bytes.values())
    assert len(stored_bytes) == 8
    return one


def test_every_parameter_has_the_stored_dim():
    """Parameters without the dim would be replicated; there are none, and the dim is divisible by 8."""
    without = [n for n, p in nn.parameters(CHOSEN.model()).items() if STORED not in {d.name for d in p.dims}]
    assert without == [] and CHOSEN.config.d_model % 8 == 0


@pytest.mark.parametrize(
    "mesh, stage", [("data=8", 0), *((mesh, stage) for mesh in MESHES for stage in (1, 3))]
)
def test_bytes_are_the_papers(mesh, stage):
    rules, devices, ways = MESHES[mesh]
    layout, psi = STAGES[stage](rules), on_one_device_of_model(CHOSEN.model(), ways)
    params, moments = expected(stage, psi, devices)
    step = 4  # the number of updates, on every device

    model = nn.specs(CHOSEN.model())
    program = wf.spmd(STEP, mesh, layout, donate=(0, 1))
    memory = program.plan(model, STEP.init(model), CHOSEN.batch_specs(16, 8), None).memory
    assert (memory.params, memory.optimizer) == (params, moments + step)

    model = nn.init(CHOSEN.model(), jax.random.key(0), mesh, layout)
    state = STEP.init(model)
    assert on_devices(model) == params
    assert (on_devices(state["mean"]), on_devices(state["variance"])) == (moments // 2, moments // 2)
    assert on_devices(state["step"]) == step


class Map(nn.Module):
    """A linear map."""

    linear: nn.Linear

    def loss(self, batch, key):
        return wf.mean(wf.square(self.linear(batch)))


@pytest.mark.parametrize("stage", [1, 3])
def test_bytes_stay_so(stage):
    """The results of a step are stored like its arguments."""
    layout, x = STAGES[stage]("batch:data"), wf.ones("batch=8 d_model=16")
    model = nn.init(Map(nn.Linear([x.dims[1]], [wf.Dim("d_ff", 3)])), jax.random.key(0), "data=8", layout)
    state = STEP.init(model)
    before = on_devices(model), on_devices(state)
    _, model, state = wf.spmd(STEP, "data=8", layout, donate=(0, 1))(model, state, x, None)
    assert (on_devices(model), on_devices(state)) == before
    params, moments = expected(stage, nn.count(model), 8)
    assert before == (params, moments + 4)


def test_average_is_split_like_the_moments():
    """An average of the parameters adds 4Ψ/N."""
    step, model = train.train_step(optim.AdamW(1e-3), average=0.999), nn.specs(CHOSEN.model())
    program = wf.spmd(step, "data=8", STAGES[1]("batch:data"), donate=(0, 1))
    memory = program.plan(model, step.init(model), CHOSEN.batch_specs(16, 8), None).memory
    assert memory.optimizer == 12 * nn.count(model) // 8 + 4


@pytest.mark.parametrize("stage", [1, 3])
def test_traffic_is_the_papers(stage):
    """Stage 1 sends 2Ψ: a reduce-scatter and an all-gather; stage 3 sends 3Ψ: two gathers, if they are repeated.

    Here the backward pass reuses what the forward pass gathered, unless remat= changes that, so it is 2Ψ.
    """
    model = nn.specs(CHOSEN.model())
    program = wf.spmd(STEP, "data=8", STAGES[stage]("batch:data"))
    plan = program.plan(model, STEP.init(model), CHOSEN.batch_specs(16, 8), None)
    sent = {}
    for c in plan.collectives:
        sent[c.kind] = sent.get(c.kind, 0) + c.bytes * c.count
    psi = nn.count(model)
    positions = nn.parameters(model)["decoder.positions.weight"].size
    # Learned positions are added to rows: their gradient is summed before it is looked up backwards.
    assert sent["reduce-scatter"] == 4 * (psi - positions)
    assert sent["all-gather"] == 4 * psi
