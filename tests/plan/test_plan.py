"""The plan agrees exactly with the compiler, and with Table 1 of the paper."""

import dataclasses
import json
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from every_op import EVERY_OP
from hlo import collective_bytes, multiplications
from networks import (
    PAPER,
    accumulated,
    batch,
    hidden,
    io,
    micro,
    parameters,
    random,
    small,
    two_layers,
)
from op_examples import OPERANDS

import weft as wf
from benchmarks import lm
from benchmarks.handwritten import Size
from weft.hardware.profile import Hardware
from weft.plan.advice import hardware_advice
from weft.plan.primitives import PRIMITIVES

SMALL = Size(layers=3, d_model=32, d_ff=64, heads=4, d_kv=8, vocab=64, length=16, batch=8)


def exact(program, *args):
    """The plan, checked against the compiled HLO: FLOPs, and bytes of every kind of collective on every axis."""
    plan = program.plan(*args)
    text = program.compile(*args).as_text()
    assert plan.flops == multiplications(text)
    sent = Counter()
    for c in plan.collectives:
        sent[c.kind, tuple(axis for axis in program.mesh.names if axis in c.axes)] += c.bytes * c.count
    assert collective_bytes(text, program.mesh) == sent
    return plan


@pytest.mark.parametrize(("mesh", "layout"), [p[1:3] for p in PAPER], ids="ABCDE")
def test_two_layers(mesh, layout):
    program = wf.spmd(wf.grad(two_layers, argnums=(0, 1, 2)), mesh, layout)
    exact(program, wf.spec([io, hidden]), wf.spec([hidden, io]), wf.spec([batch, io]))


SEQUENCE = "batch:data length:seq"
LM = {
    # name: (mesh, layout) and, if any, the policy of remat
    "data": ("data=8", "batch:data"),
    "model": ("model=4", "d_ff:model heads:model vocab:model"),
    "both": ("data=4 model=2", lm.LAYOUT),
    "zero": ("data=4 model=2", wf.Layout(lm.LAYOUT, params="d_model:data")),
    "zero, remat": ("data=4 model=2", wf.Layout(lm.LAYOUT, params="d_model:data"), "nothing"),
    "sequence": ("data=2 seq=4", SEQUENCE),
    "sequence, zero, remat": ("data=2 seq=4", wf.Layout(SEQUENCE, params="d_model:data"), "dots"),
}


def lm_specs(size):
    params, *rows = lm.specs(size)
    return {n: wf.parameter(p) for n, p in params.items()}, *rows


@pytest.mark.parametrize("name", LM)
def test_lm_step(name):
    exact(lm.step(SMALL, *LM[name]), *lm_specs(SMALL))


def test_remat_of_the_lm_step_counts_its_blocks_again():
    plain, again = (
        lm.step(SMALL, "data=4 model=2", lm.LAYOUT, remat).plan(*lm_specs(SMALL))
        for remat in (None, "nothing")
    )
    tokens = SMALL.batch * SMALL.length // 4
    heads, d_ff = SMALL.heads * SMALL.d_kv // 2, SMALL.d_ff // 2
    block = 2 * tokens * (4 * SMALL.d_model * heads + 2 * SMALL.length * heads + 2 * SMALL.d_model * d_ff)
    # What the backward pass does not need is not computed again: the last product of a block, with w2.
    last = 2 * tokens * SMALL.d_model * d_ff
    assert again.flops - plain.flops == SMALL.layers * (block - last)


def test_micro_batches():
    program = wf.spmd(accumulated, "data=4 model=2", "batch:data d_ff:model")
    exact(program, parameters(), random(micro, small, wf.Dim("d_model", 16)))


def test_remat_counts_twice():
    rows, d = wf.dims("rows=8 d=16")

    def loss(w, x):
        def layer(h, w):
            return wf.tanh(wf.einsum(h, w, out=[rows, d.rename("e")])).rename(e="d"), None

        return wf.sum(wf.scan(wf.remat(layer), x, w, "layers")[0])

    w, x = wf.spec([wf.Dim("layers", 3), d, d.rename("e")]), wf.spec([rows, d])
    program = wf.spmd(wf.grad(loss, argnums=(0, 1)), "x=2", "d:x")
    exact(program, w, x)


def test_a_conv_net_with_split_height():
    rows, h, w, c, k, m, n = wf.dims("rows=2 h=16 w=8 c=4 k=8 m=3 n=3")

    def loss(kernel, second, x):
        y = wf.relu(wf.conv(x, kernel, window={"h": "m", "w": "n"}))
        y = wf.conv(y, second, window={"h": "m", "w": "n"}, stride=2)
        return wf.mean(wf.square(y))

    args = wf.spec([m, n, c, k]), wf.spec([m, n, k, c]), wf.spec([rows, h, w, c])
    forward = exact(wf.spmd(loss, "x=4", "h:x"), *args)
    both = exact(wf.spmd(wf.grad(loss, argnums=(0, 1, 2)), "x=4", "h:x"), *args)
    # Each convolution has two gradients, of as many products as itself.
    assert both.flops == 3 * forward.flops
    assert forward.flops == 2 * 9 * c.size * k.size * rows.size * (4 * w.size + 2 * w.size // 2)


@pytest.mark.parametrize("sizes", [(64, 32, 128), (24, 48, 96), (16, 16, 256)], ids=str)
def test_table_1_of_the_paper(sizes):
    """The paper's worked example: computation, communication and memory of the five layouts."""
    b, d_io, d_h = sizes
    batch, io, hidden = wf.Dim("batch", b), wf.Dim("io", d_io), wf.Dim("hidden", d_h)

    def loss(w, v, x):
        h = wf.relu(wf.einsum(x, w, out=[batch, hidden]))
        return wf.sum(wf.square(wf.einsum(h, v, out=[batch, io]) - 1.0))

    for _, mesh, layout, _ in PAPER:
        program = wf.spmd(wf.grad(loss, argnums=(0, 1, 2)), mesh, layout)
        plan = program.plan(wf.spec([io, hidden]), wf.spec([hidden, io]), wf.spec([batch, io]))
        n = {d: program.mesh.ways(program.layout.rules_for().get(d, ())) for d in ("batch", "io", "hidden")}
        x, y, z = b / n["batch"], d_io / n["io"], d_h / n["hidden"]
        assert plan.flops == 6 * 2 * x * y * z  # six einsums, two FLOPs each
        summed = {"hidden": x * y, "io": x * z, "batch": y * z}
        values = sum(2 * size for d, size in summed.items() if n[d] > 1)
        scalars = sum(c.bytes for c in plan.collectives if c.bytes == 4)
        assert sum(plan.comm_bytes.values()) - scalars == 4 * values
        assert plan.memory.inputs == 4 * (x * y + 2 * y * z)
        assert plan.duplication == program.mesh.size / (n["batch"] * n["io"] * n["hidden"])


def test_the_source_is_the_users_line():
    plan = lm.step(SMALL).plan(*lm.specs(SMALL))
    assert all(c.source.startswith("benchmarks/lm.py:") for c in plan.collectives)
    assert all(w.source.startswith("benchmarks/lm.py:") for w in plan.work if w.flops)
    assert {c.phase for c in plan.collectives} == {"forward", "backward"}


def test_names_are_those_of_ops():
    plan = wf.spmd(two_layers, "all=2", "io:all").plan(
        wf.spec([io, hidden]), wf.spec([hidden, io]), wf.spec([batch, io])
    )
    assert plan.collectives[0].op == "einsum[batch,io · io,hidden → batch,hidden]"


def test_a_mesh_without_devices_can_be_planned():
    size = Size(batch=128)
    plan = lm.step(size, "data=64 model=4").plan(*lm.specs(size))
    assert plan.mesh.size == 256 and plan.flops > 0


def test_json_is_versioned_and_complete():
    plan = lm.step(SMALL).plan(*lm.specs(SMALL))
    data = json.loads(plan.to_json())
    assert data["version"] == 2
    assert sum(e["flops"] * e["count"] for e in data["events"] if e["type"] == "work") == plan.flops
    assert data["comm_bytes"] == plan.comm_bytes


def test_explain_and_diff_are_golden(golden):
    plan = lm.step(SMALL).plan(*lm.specs(SMALL))
    golden("lm_small", plan.explain(), folder="plans")
    other = lm.step(SMALL, "data=8", "batch:data").plan(*lm.specs(SMALL))
    golden("lm_small_diff", plan.diff(other), folder="plans")


def test_advice_names_what_is_duplicated_replicated_and_padded():
    uneven = Size(layers=2, d_model=32, d_ff=60, heads=3, d_kv=8, vocab=64, length=16, batch=9)
    plan = lm.step(uneven, "data=4 model=2", "batch:data heads:model vocab:model").plan(*lm_specs(uneven))
    messages = "\n".join(a.text for a in plan.advice)
    assert "times over" in messages and "d_ff" in messages
    assert "batch=9 over data (4 ways) is padded to 12" in messages
    large = lm.step(Size(), "data=4 model=2").plan(*lm_specs(Size()))
    assert "params.embedding" in large.advice[0].text and 'params="d_model:data"' in large.advice[0].text


def test_advice_names_loops_whose_rounds_are_not_known():
    """Their bodies were counted once, without a warning."""

    def loops(x, rounds):
        for _ in range(2):
            x = wf.while_loop(lambda x: wf.max(x) > 1, lambda x: x / 2, x)
        x = wf.fori_loop(0, 5, lambda n, x: x / 2, x)
        return wf.scan(lambda x, _: (wf.fori_loop(0, rounds, lambda n, x: x / 2, x), None), x, None, micro)[0]

    plan = wf.spmd(loops, "x=2", "batch:x").plan(wf.spec([batch]), wf.spec("", jnp.int32))
    messages = [(a.level, a.text.partition(" is counted")[0]) for a in plan.advice[:2]]
    assert messages == [
        ("warning", "one iteration of while_loop[batch]"),
        ("warning", "one iteration of fori_loop[ · batch]"),
    ]
    assert len(plan.loops) == 2 and all("test_plan.py" in loop.source for loop in plan.loops)
    assert [loop["op"] for loop in plan.to_data()["loops"]] == [loop.op for loop in plan.loops]


def test_advice_names_primitives_that_the_table_does_not_know():
    """A renamed or new primitive was counted as an unfused op, silently."""
    mystery = jax.extend.core.Primitive("mystery")
    mystery.def_abstract_eval(lambda x: x)
    f = lambda x: wf.exp(wf.local(mystery.bind, x, out=x.dims, splittable=["batch"]))
    plan = wf.spmd(f, "x=2", "batch:x").plan(wf.spec([batch, io]))
    (unknown,) = plan.unknown
    assert (unknown.primitive, unknown.op.name) == ("mystery", "local") and "test_plan.py" in unknown.source
    assert "JAX's primitive mystery, in local[batch,io], is not known" in plan.advice[0].text
    assert not wf.spmd(wf.exp, "x=2", "batch:x").plan(wf.spec([batch, io])).unknown


def test_the_table_knows_the_primitives_of_all_ops():
    """Under a layout that splits the dims of their examples; an op with a new primitive needs a row."""

    def examples(operands):
        results = {name: info.run_example(operands) for name, info in EVERY_OP.items()}
        return {name: jax.tree.leaves(one, is_leaf=wf.is_tensor) for name, one in results.items()}

    plan = wf.spmd(examples, "x=2 y=2", "a:x b:y").plan(OPERANDS)
    assert not plan.unknown


def test_every_primitive_in_the_table_has_its_facts():
    for name, row in PRIMITIVES.items():
        assert bool(row.flops) == (row.kind != "other"), name


def test_advice_names_inputs_that_are_moved():
    """They are moved before the program begins, and were not counted anywhere."""
    x = wf.place(wf.ones("batch=9 d=6"), "data=4 model=2", "d:model")
    program = wf.spmd(lambda x, free: x["x"] * free, "data=4 model=2", "batch:data")
    replicated = wf.place(wf.ones("batch=9"), "data=4 model=2", "")
    plan = program.plan({"x": x}, replicated)
    [moved] = plan.moved  # the replicated tensor is not moved: each device uses its slice
    assert moved.given == "f32[batch=9, d=6/model·2]" and moved.wanted == "f32[batch=9/data·4, d=6]"
    assert (moved.name, moved.bytes) == ("x.x", 3 * 3 * 4)  # half of three rows
    assert "input x.x is f32[batch=9, d=6/model·2] and is resharded to" in plan.advice[0].text
    placed = [wf.place(t, "data=4 model=2", "batch:data") for t in (x, replicated)]
    assert not program.plan({"x": placed[0]}, placed[1]).moved


def test_uneven_pieces_that_are_cut_further_are_moved():
    """Blocks of three rows, then of two: the fourth device needs rows 6 and 7, and has 3 to 5."""
    x = wf.place(wf.ones("batch=9"), "data=4 model=2", "batch:data")
    [moved] = wf.spmd(lambda x: x, "data=4 model=2", "batch:data+model").plan(x).moved
    assert moved.bytes == 2 * 4


def test_advice_distinguishes_inputs_from_parameters():
    program = wf.spmd(lambda x, w: wf.sum(x) + wf.sum(w), "data=4")
    messages = [a.text for a in program.plan(wf.spec("length=64"), wf.spec("d=64", role="param")).advice]
    (x,), (w,) = ([text for text in messages if rule in text] for rule in ('"length:data"', '"d:data"'))
    assert x.startswith("input x (256 B)") and "if it is a parameter" in x
    assert w.startswith("w (256 B)") and "if" not in w


def test_a_plan_is_one_line():
    layout = wf.Layout("batch:data", params="d:data")
    plan = wf.spmd(lambda x: x * 2.0, "data=4", layout).plan(wf.spec("batch=4 d=8"))
    assert repr(plan) == (
        '<plan of <lambda> on mesh "data=4" with Layout("batch:data", params="d:data"); on each device '
        "0 FLOPs, 0 B in collectives, a peak of 64 B>"
    )


def test_waste_is_the_share_of_padding():
    program = wf.spmd(lambda x: x * 2.0, "x=8", "a:x")
    plan = program.plan(wf.spec("a=9"))
    assert plan.waste == pytest.approx(1 - 9 / 16)


def test_axes_have_one_name():
    """A sum over two axes was sent over pod+data by one report, and over data+pod by another."""
    program = wf.spmd(lambda x: wf.sum(x, "b"), "pod=2 data=2", "b:pod+data")
    plan = program.plan(wf.spec("b=8 a=4"))
    [sent] = plan.collectives
    assert sent.axes == ("pod", "data") and sent.over == "pod+data"
    assert plan.comm_bytes == {"pod+data": 16} and {*plan.time("h100").network_seconds} == {"pod+data"}
    for text in (str(sent), plan.explain(), plan.diff(wf.spmd(lambda x: x, "", "").plan(wf.spec("a=4")))):
        assert "pod+data" in text and "data+pod" not in text


def test_lines_of_what_jax_traces_apart():
    """A softmax has a custom derivative, and the ops inside it had no line."""

    def soft(x):
        y = x * 2
        return wf.softmax(y, "io")

    plan = wf.spmd(soft, "x=2 y=2", "batch:x io:y").plan(wf.spec([batch, io]))
    line = f"tests/plan/test_plan.py:{soft.__code__.co_firstlineno + 2}"
    assert [c.source for c in plan.collectives] == [line, line]
    assert {w.source for w in plan.work if w.op.startswith("softmax")} == {line}
    assert {live.source for live in plan.memory.largest} == {line}


def test_lines_of_sums_that_pend_until_the_end():
    """They had none: it is the program that resolves them."""

    def both(x, w):
        loss = lambda w: wf.mean(wf.einsum(x, w, reduce=[io]))
        return loss(w), wf.grad(loss)(w)

    plan = wf.spmd(both, "x=2", "batch:x").plan(wf.spec([batch, io]), wf.spec([io, hidden]))
    line = f"tests/plan/test_plan.py:{both.__code__.co_firstlineno + 1}"
    found = {(c.op.partition("[")[0], c.source) for c in plan.collectives}
    assert found == {("mean", line), ("gradient", line)}


def test_gradients_that_a_scan_adds_up_or_keeps_are_called_gradients():
    """Their sums, after the loop, had no op, and were reported as part of the update."""

    def added(w, x):
        gradient = wf.grad(lambda w, x: wf.mean(wf.square(wf.einsum(x, w, reduce=[io]))))
        step = lambda total, x: (total + gradient(w, x), gradient(w, x))
        return wf.scan(step, wf.zeros(w.dims), x, micro)

    plan = wf.spmd(added, "x=2", "batch:x").plan(wf.spec([io, hidden]), wf.spec([micro, batch, io]))
    line = f"tests/plan/test_plan.py:{added.__code__.co_firstlineno + 3}"
    found = [(c.op, c.phase, c.source) for c in plan.collectives]
    assert found == [("gradient[io,hidden]", "backward", line)] * 2


def test_of_a_cond_the_branch_that_takes_longer_counts():
    """A sum of four bytes does not outweigh a product, nor nothing a sort."""
    a, b = wf.dims("a=1024 b=512")
    x, w = wf.spec([a, b]), wf.spec(wf.dims("b=512 c=512"))

    def product(x, w):
        return wf.sum(wf.einsum(x, w, reduce="b"), "c")

    def little(x, w):
        return wf.zeros([a]) + wf.mean(x)

    for branches in ((product, little), (little, product)):
        program = wf.spmd(lambda p, x, w, branches=branches: wf.cond(p, *branches, x, w), "data=8", "a:data")
        assert program.plan(wf.spec((), bool), x, w).flops == 2 * 128 * 512 * 512
    for branches in ((wf.sort, lambda x, _: x), (lambda x, _: x, wf.sort)):
        program = wf.spmd(
            lambda p, x, branches=branches: wf.cond(p, *(lambda x, f=f: f(x, "b") for f in branches), x),
            "data=8",
            "a:data",
        )
        assert sum(w.bytes for w in program.plan(wf.spec((), bool), x).work) >= 2 * 4 * 128 * 512


def test_optax_is_not_planned_and_the_plan_reports_it():
    tx, d = wf.optimizer(optax.adam(1e-3)), wf.Dim("d", 64)
    w = wf.spec([d], role="param")

    def step(w, state):
        return tx.apply(w * 2.0, state, w)

    for mesh, count in (("data=4", 1), ("", 0)):
        program = wf.spmd(step, mesh, wf.Layout("", optimizer="d:data" if mesh else None))
        plan = program.plan(w, tx.init(w))
        assert sum("optax" in one.text for one in plan.advice) == count
    assert {w.phase for w in plan.work if w.op == "optimizer[optax]"} == {"update"}


def test_advice_can_be_followed():
    """`f` of another parameter is beside a dim that is stored along the axis already."""
    d, e, f = wf.dims("d=64 e=64 f=512")
    params = wf.spec([d, f], role="param"), wf.spec([e, f], role="param")
    x = wf.spec([wf.Dim("batch", 8), d, e])

    def out(params, x):
        return wf.einsum(x, *params, out=["batch"])

    def advised(stored):
        plan = wf.spmd(out, "data=4", wf.Layout("batch:data", params=stored)).plan(params, x)
        return [one.text for one in plan.advice if "would store it split" in one.text]

    assert all('params="f:data"' in text for text in advised("")) and len(advised("")) == 2
    (text,) = advised("e:data")
    assert 'params="d:data"' in text
    assert not advised("e:data d:data")


FUSED = {
    "chain": (lambda x: wf.exp(wf.cos(x + 1) * 2) + 3, 2),
    "functions with a derivative of their own": (lambda x: wf.relu(wf.relu(wf.relu(x) - 1) - 1), 2),
    "choices": (lambda x: wf.where(x > 0, wf.where(x > 1, x, 1.0), -x), 2),
    "sum of a chain": (lambda x: wf.sum(wf.square(x - 3), "b"), 1),
    "gradient": (wf.grad(lambda x: wf.mean(wf.square(wf.relu(x) - 3))), 2),
}


@pytest.mark.parametrize("rows", [8000, 7999], ids=["even", "uneven"])
@pytest.mark.parametrize("name", FUSED)
def test_traffic_is_that_of_what_xla_stores(name, rows):
    """Chains of ops fuse into their consumers, also through calls, masks and into sums, which determines the arrays that
    are read or written. XLA counts the same, except that on a CPU it fuses no mask into a sum."""
    fn, arrays = FUSED[name]
    x = wf.spec([wf.Dim("a", rows), wf.Dim("b", 1000)])
    program = wf.spmd(fn, "m=8", "a:m")
    bytes = sum(w.bytes * w.count for w in program.plan(x).work)
    np.testing.assert_allclose(bytes, arrays * 4e6, rtol=0.01)
    counted = program.compile(x).cost_analysis()
    counted = counted[0] if isinstance(counted, list) else counted
    if "sum" not in name or rows % 8 == 0:
        np.testing.assert_allclose(bytes, counted["bytes accessed"], rtol=0.05)


def test_a_scatter_is_work_and_not_its_addition():
    """How one number is added to another was walked as a body, and counted 12 bytes."""
    ids, table = wf.spec("n=64", jnp.int32), wf.spec("v=1000 d=16")
    program = wf.spmd(lambda t, ids, x: wf.scatter_add(t, ids, x, "v"))
    plan = program.plan(table, ids, wf.spec("n=64 d=16"))
    assert sum(w.bytes for w in plan.work) > 4 * 1000 * 16


# verify


def test_verify_compares_values_and_gradients():
    x = random(batch, io)
    found = wf.verify(
        wf.value_and_grad(lambda x: wf.mean(wf.tanh(x))), (x,), "x=2 y=2", ["batch:x", "io:x+y"]
    )
    assert len(found) == 4 and all(c.agrees for c in found)


def test_verify_names_what_differs_and_where():
    def wrong(x):
        y = wf.local(lambda a: jnp.cumsum(a, axis=0), x, out=x.dims, splittable=["batch", "io"])
        return {"right": x, "wrong": y}

    with pytest.raises(AssertionError, match=r"result\['wrong'\] differs") as caught:
        wf.verify(
            wrong, (wf.tensor(np.ones((4, 2), np.float32), "batch=4 io=2"),), "x=2", ["io:x", "batch:x"]
        )
    assert "batch 2" in str(caught.value)


APART = {
    "infinities of two signs": (np.inf, -np.inf),
    "nan and infinity": (np.nan, np.inf),
    "infinity and a number": (1.0, np.inf),
    "imaginary parts": (1 + 2j, 1 + 3j),
    "truths": (True, False),
    "whole numbers": (2, 3),
}


def either(replicated, piece):
    """A function that gives one value on one device, and another on each of several."""

    def fn(x):
        value = lambda a: jnp.full_like(
            a, replicated if a.shape[0] == 4 else piece, dtype=jnp.asarray(replicated).dtype
        )
        return wf.local(value, x, out=x.dims, splittable=["batch"])

    return fn


@pytest.mark.parametrize("replicated, piece", APART.values(), ids=APART)
def test_verify_detects_differences(replicated, piece):
    """Infinities counted as equal, imaginary parts were dropped, and booleans could not be subtracted."""
    x = wf.tensor(np.ones(4, np.float32), "batch=4")
    with pytest.raises(AssertionError, match=r"result differs by [\s\S]* batch 0: "):
        wf.verify(either(replicated, piece), (x,), "x=2", "batch:x")


OTHER_TYPES = {
    "dtypes": (lambda a: a.astype(jnp.bfloat16), lambda a: a, "on one device bf16, there f32"),
    "weak types": (lambda a: jnp.full(a.shape, 0.5), lambda a: a * 0.5, "on one device weak f32, there f32"),
}


@pytest.mark.parametrize("replicated, piece, message", OTHER_TYPES.values(), ids=OTHER_TYPES)
def test_verify_compares_types(replicated, piece, message):
    """A result in another type passed if its values were close."""
    x = wf.tensor(np.ones(4, np.float32), "batch=4")
    fn = lambda x: {
        "y": wf.local(
            lambda a: (replicated if a.shape[0] == 4 else piece)(a), x, out=x.dims, splittable=["batch"]
        )
    }
    with pytest.raises(AssertionError, match=r"result\['y'\] has a different type under .*batch:x") as caught:
        wf.verify(fn, (x,), "x=2", "batch:x")
    assert message in str(caught.value)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan, 1 + 2j, complex(np.inf, 1), True, 2], ids=str)
def test_verify_finds_the_same_what_is_the_same(value):
    x = wf.tensor(np.ones(4, np.float32), "batch=4")
    [compared] = wf.verify(either(value, value), (x,), "x=2", "batch:x")
    assert compared.difference == 0


def test_verify_allows_a_narrow_result_its_own_rounding():
    """One unit in the last place of a bfloat16 was reported as a difference; a wrong result still is."""
    x = wf.random.normal(jax.random.key(0), "batch=16 d=512")
    w = wf.random.normal(jax.random.key(1), "d=512 h=16")
    narrow = lambda x, w: wf.einsum(x, w, reduce=["d"]).astype(jnp.bfloat16)
    [compared] = wf.verify(narrow, (x, w), "data=4 model=2", ["d:model"])
    assert 0 < compared.difference <= compared.tolerance == 4 * float(jnp.finfo(jnp.bfloat16).eps)
    ones = wf.tensor(np.ones(4, np.float32), "batch=4")
    with pytest.raises(AssertionError, match="result differs"):
        wf.verify(either(jnp.bfloat16(1), jnp.bfloat16(1.0625)), (ones,), "x=2", "batch:x")


def test_verify_takes_a_program_and_axes_in_pairs():
    x = wf.ones("batch=4 d=6")
    program = wf.spmd(lambda x: wf.sum(x, "d"), "x=2", "d:x")
    found = wf.verify(program, (x,), [("x", 2), ("y", 2)], ["batch:x d:y", "d:x"])
    assert [one.agrees for one in found] == [True, True]
    found = wf.verify(program, (x,), ["x=2", "x=4"], ["batch:x", "d:x"])
    assert len(found) == 2


def test_verify_reports_another_structure():
    def odd(x):
        return x, (x if x.array.shape[0] == 4 else ())

    with pytest.raises(AssertionError, match="a different structure"):
        wf.verify(odd, (wf.ones("batch=4"),), "x=2", "batch:x")


def test_verify_compares_keys():
    """They could not be made arrays of."""
    keys = lambda key, x: (jax.random.fold_in(key, 1), wf.sum(x))
    found = wf.verify(keys, (jax.random.key(0), wf.ones("batch=4")), "x=2", "batch:x")
    assert [c.difference for c in found] == [0, 0]


def test_a_plan_without_work_reports_it():
    """It printed 0FLOP."""
    assert "on each device: 0 FLOP" in wf.spmd(lambda x: x).plan(wf.spec("a=3")).explain()


def test_what_is_read_under_another_name_is_written_first():
    """The operand of a product on several devices is made varying: a name, but the array has to be there."""

    def loss(w, x):
        return wf.sum(wf.square(wf.einsum(x, w, reduce="d")))

    args = wf.spec("d=8 h=4"), wf.spec("b=6 d=8")
    one, two = (
        wf.spmd(wf.grad(loss), mesh, layout).plan(*args) for mesh, layout in (("", ""), ("x=2", "d:x"))
    )
    traffic = [
        sum(w.bytes for w in plan.work if w.op == "square[b,h]" and w.phase == "backward")
        for plan in (one, two)
    ]
    assert traffic[0] == traffic[1] > 0


def test_tensors_with_values_can_be_planned_on_a_mesh_without_devices():
    x, y = wf.ones("a=5"), wf.ones("a=5")
    plan = wf.spmd(lambda x: x * y, "p=64", "a:p").plan(x)
    assert plan.mesh.size == 64


def test_a_plan_reports_that_it_does_not_fit_the_machine():
    """It gave the peak and the time, but not the memory of a device."""
    plan = wf.spmd(lambda x: x * 2.0, "data=2", "batch:data").plan(wf.spec("batch=4 d_model=1000000000"))
    assert "does not fit: a device of tpu-v2 has 8 GiB of memory" in plan.explain("tpu-v2")
    assert "does not fit" not in plan.explain("h100") and "does not fit" not in plan.explain()


def test_a_plan_that_does_not_fit_reports_what_would_help():
    """The page advised nothing beside "does not fit", and the text had no advice at all."""
    batch, d_model, layers = wf.dims("batch=1048576 d_model=1024 layers=16")

    def layer(x, w):
        return wf.relu(wf.einsum(x, w, reduce="d_model")).rename(d_out="d_model"), None

    def loss(w, x):
        return wf.mean(wf.scan(layer, x, w, "layers")[0])

    w = wf.spec([layers, d_model, d_model.rename("d_out")], role="param")
    plan = wf.spmd(wf.grad(loss), "data=2", "batch:data").plan(w, wf.spec([batch, d_model]))
    advice = "are saved for the backward pass: recompute them (wf.remat; --model.remat nothing)"
    for report in (" ".join(plan.explain("tpu-v2").split()), plan.to_html("tpu-v2")):
        assert "the peak exceeds the memory of a device by" in report and advice in report
        assert "are parameters" not in report  # they are small
    enough = dataclasses.replace(Hardware.of("tpu-v2"), memory_bytes=plan.memory.peak)
    assert not [*hardware_advice(plan, enough)]
