"""Programs: eager equals staged for every op; when and why they are traced; their inputs and outputs."""

import inspect
import itertools
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compare import assert_same, real
from every_op import EVERY_OP
from op_examples import OPERANDS
from tiers import slow

import weft as wf
from weft.core.errors import LayoutError, MeshError, ProgramError, TensorTypeError, WeftError
from weft.ops.elementwise import ALIASES

# Public functions and classes of the language that are no ops, or that cannot run inside a program.
NOT_OPS = {"custom_vjp", "from_callback", "optimizer"}
SECOND_NAMES = {*ALIASES, "flatten", "unflatten"}


@wf.custom_vjp
def _custom(x):
    return wf.sin(x)


_custom.defvjp(lambda x: (wf.sin(x), x), lambda x, g: (g * x,))


def leaves(tree):
    return jax.tree.leaves(tree, is_leaf=wf.is_tensor)


def test_every_op_has_a_row():
    """Every public function of the language has a row, with the module that the public table lists it under."""
    language = ("ops.", "random.", "autodiff.", "pipelines.")
    public = {n: module for module, names in wf.NAMES.items() for n in names.split()}
    public = {n: f"weft.{module}" for n, module in public.items() if module.startswith(language)}
    for module in (wf.random, wf.linalg, wf.fft):
        public |= {f.__name__: f.__module__ for f in vars(module).values() if inspect.isfunction(f)}
    rows = {name: info.module for name, info in EVERY_OP.items()}
    assert rows == {n: module for n, module in public.items() if n not in NOT_OPS | SECOND_NAMES}
    assert all(info.public.__name__ == name for name, info in EVERY_OP.items())


def test_names_of_the_language():
    assert {"Dim", "random", "spmd"} <= set(dir(wf))
    assert not {"autodiff", "ops", "contract", "Any"} & set(dir(wf))


def run_examples(tensors):
    """The results of every op's example, and of a custom_vjp and a constant."""
    calls = {name: info.run_example(tensors) for name, info in EVERY_OP.items()}
    constant = wf.tensor(np.arange(6.0, dtype=np.float32), "a=6") * tensors["x"]
    calls |= {"custom_vjp": _custom(tensors["x"]), "tensor": constant}
    return {name: leaves(result) for name, result in calls.items()}


@pytest.fixture(scope="module")
def staged():
    """Every op, in one program on four devices."""
    return wf.spmd(run_examples, "x=2 y=2", "a:x b:y")(OPERANDS)


@pytest.mark.parametrize("placed", [slow(False), True], ids=["one device", "placed"])
def test_eager_equals_staged(staged, placed):
    operands = OPERANDS
    if placed:
        operands = {
            n: wf.place(t, "x=2 y=2", "a:x b:y") if wf.is_tensor(t) else t for n, t in operands.items()
        }
    for name, results in run_examples(operands).items():
        for got, want in zip(results, staged[name], strict=True):
            assert got.dims == want.dims, name
            assert got.dtype == want.dtype, name
            if name in EVERY_OP and EVERY_OP[name].family == "draws":
                np.testing.assert_array_equal(got.numpy(), want.numpy(), err_msg=name)
            else:
                assert_same(got, want.array, name=name)


def test_eager_results_stay_placed():
    mesh, layout = wf.Mesh("x=2"), wf.Layout("a:x")
    x = wf.place(OPERANDS["x"], mesh, layout)
    assert x.storage.addressable_shards[0].data.shape == (3, 3)
    y = wf.exp(x) + OPERANDS["y"]  # an unplaced operand adopts the placed one's mesh
    assert (y.mesh, y.layout) == (mesh, layout)
    assert y.storage.addressable_shards[0].data.shape == (3, 3)
    back = wf.place(y, None, None)
    assert back.mesh is None and len(back.array.devices()) == 1
    assert_same(back, np.exp(OPERANDS["x"].numpy()) + OPERANDS["y"].numpy().T)


def test_a_tree_is_placed_and_taken_off():
    given = {"x": OPERANDS["x"], "rest": (OPERANDS["j"], wf.zeros(""))}
    placed = wf.place(given, "x=2 y=2", "a:x b:y")
    leaves = jax.tree.leaves(placed, is_leaf=wf.is_tensor)
    assert {str(t.mesh) for t in leaves} == {"x=2 y=2"}
    assert placed["x"].storage.addressable_shards[0].data.shape == (3, 2)
    for one, other in zip(
        jax.tree.leaves(wf.place(placed, None, None), is_leaf=wf.is_tensor),
        jax.tree.leaves(given, is_leaf=wf.is_tensor),
        strict=True,
    ):
        assert one.mesh is None
        np.testing.assert_array_equal(one.numpy(), other.numpy())
    with pytest.raises(TensorTypeError, match="a value of type float is not a tensor"):
        wf.place({"x": OPERANDS["x"], "rate": 0.1}, "x=2", "a:x")


# Traces


def test_a_signature_is_traced_once():
    count = []

    def fn(x, scale=1.0, *, flag=False, more=None):
        count.append(1)
        return x * scale + (1.0 if flag else 0.0)

    program = wf.spmd(fn, "x=2", "a:x", static="scale")
    x = OPERANDS["x"]
    calls = [
        (lambda: program(x), "first call: f32[a=6, b=3]"),
        (lambda: program(x * 2.0), None),
        (lambda: program(wf.place(x, "x=2", "a:x")), None),
        (lambda: program(x["a", 0:5]), "changed f32[a=6, b=3] → f32[a=5, b=3]: f32[a=5, b=3]"),
        (lambda: program(x.astype(jnp.bfloat16)), "changed f32[a=6, b=3] → bf16[a=6, b=3]: bf16[a=6, b=3]"),
        (lambda: program(wf.parameter(x)), "changed f32[a=6, b=3] → f32[a=6, b=3] (param): f32[a=6, b=3] (param)"),
        (lambda: program(x, 2), "the arguments have a different structure: f32[a=6, b=3], static 2"),
        (lambda: program(x, 3), "changed static 2 → static 3: f32[a=6, b=3], static 3"),
        (lambda: program(x, 3.0), "changed static 2 → static 3.0: f32[a=6, b=3], static 3.0"),
        (lambda: program(x, 2), None),
        (lambda: program(x, scale=2), "the arguments have a different structure: f32[a=6, b=3], static 2"),
        (lambda: program(x, flag=True), "the arguments have a different structure: static True, f32[a=6, b=3]"),
        (lambda: program(x, flag=False), "changed static True → static False: static False, f32[a=6, b=3]"),
        (lambda: program(x, more=[x, None]), "the arguments have a different structure: f32[a=6, b=3], f32[a=6, b=3]"),
        (lambda: program(x, more=[x, None]), None),
    ]  # fmt: skip
    for n, (call, logged) in enumerate(calls):
        before = len(program.traces)
        call()
        call()
        new = program.traces[before:]
        assert len(new) == (logged is not None), n
        if logged is not None:
            reason, signature = logged.split(": ", 1)
            assert new[0].reason == reason, n
            assert sorted(new[0].signature.split(", ")) == sorted(signature.split(", ")), n
    assert len(count) == len(program.traces)


def test_numbers_and_arrays_are_inputs():
    program = wf.spmd(lambda x, n, a, key: (x * n + wf.random.uniform(key, x.dims), a + n), "x=2", "a:x")
    x = OPERANDS["x"]
    for n in (1.0, 2.5):
        for seed in (0, 1):
            got, raw = program(x, n, np.arange(3.0), jax.random.key(seed))
            assert_same(got, x.array * n + jax.random.uniform(jax.random.key(seed), (6, 3)))
            np.testing.assert_array_equal(raw, np.arange(3.0) + n)
    assert len(program.traces) == 1
    program(x, 2, np.arange(3.0), jax.random.key(0))  # an integer has another type
    assert program.traces[1].reason == "changed float → int"


def test_what_a_program_returns_can_be_handed_in_again():
    count = []

    def step(x, n, key):
        count.append(1)
        return x + 1.0, n + 1, jax.random.split(key)[0]

    program = wf.spmd(step, "x=2", "a:x")
    state = (OPERANDS["x"], jnp.int32(0), jax.random.key(0))
    for _ in range(3):
        state = program(*state)
    assert state[1] == 3 and len(count) == len(program.traces) == 1


# In and out


def test_trees_none_and_other_results():
    def fn(tree, *, name):
        x, nothing = tree["pair"]
        assert nothing is None
        return {"x": x * 2.0, "none": None, "number": 3, "float": 0.5, "text": name, "raw": jnp.ones(2)}, (
            True,
        )

    got, (is_on,) = wf.spmd(fn, "x=2", "a:x")({"pair": (OPERANDS["x"], None)}, name="n")
    assert_same(got["x"], OPERANDS["x"].array * 2)
    assert got["none"] is None and got["text"] == "n" and is_on is True
    assert got["number"] == 3 and got["float"] == 0.5
    np.testing.assert_array_equal(got["raw"], np.ones(2))


def test_raw_results_that_differ_between_devices_are_errors():
    with pytest.raises(ProgramError, match="differs between devices along x"):
        wf.spmd(lambda x: x.array, "x=2", "a:x")(OPERANDS["x"])


def test_captured_tensors_become_inputs():
    x, w = OPERANDS["x"], OPERANDS["p"]
    placed = wf.place(OPERANDS["u"], "x=2", "a:x")
    program = wf.spmd(lambda x: x * w + placed + w, "x=2", "a:x")
    want = x.array * w.array + OPERANDS["u"].array + w.array
    assert_same(program(x), want)
    assert_same(program(x), want)
    assert len(program.jaxpr(x).in_avals) == 3
    assert len(program.traces) == 1


USES = {
    "call": lambda program, x: program(x),
    "call with another setting": lambda program, x: _precisely(program, x),
    "jaxpr": lambda program, x: program.jaxpr(x),
    "plan": lambda program, x: program.plan(x),
    "export": lambda program, x: program.export(x),
}


def _precisely(program, x):
    with jax.default_matmul_precision("highest"):
        program(x)


@pytest.mark.parametrize("mesh, layout", [("x=2", "a:x"), (None, None)], ids=["two", "one"])
@pytest.mark.parametrize("use", USES)
def test_captured_tensors_that_were_not_met_before(mesh, layout, use):
    """When jit retraced, newly captured tensors were zeros."""
    now, x = [wf.full("b=3", 1.0)], OPERANDS["x"]
    program = wf.spmd(lambda x: x + now[0], mesh, layout)
    assert_same(program(x), x.array + 1.0)
    now[0] = wf.full("b=3", 5.0)
    assert_same(program(x), x.array + 1.0)  # as with jit
    jax.clear_caches()
    USES[use](program, x)
    assert_same(program(x), x.array + 5.0)
    assert [trace.reason for trace in program.traces] == ["first call", "it captures different tensors"]


def test_tensors_captured_in_turn_stop_retracing():
    turns = itertools.cycle([wf.full("b=3", 2.0), wf.full("b=3", 4.0)])
    program = wf.spmd(lambda x: wf.zeros_like(x) + next(turns), "x=2", "a:x")
    assert_same(program(OPERANDS["x"]), np.full((6, 3), 2.0, np.float32))


def test_captured_tensors_that_hold_one_array():
    """They are distinguished by their names and roles."""
    array = jnp.arange(1.0, 4.0)
    q, k = wf.tensor(array, "query=3"), wf.tensor(array, "key=3")
    both = lambda x: wf.sum(q * k) * x
    assert wf.spmd(both)(wf.ones("")).item() == both(wf.ones("")).item() == 36.0
    assert wf.scan(lambda c, _: (c + wf.sum(q * k), None), 0.0, wf.zeros("t=1"), "t")[0].item() == 36.0

    p = wf.parameter(q)
    stored = wf.spmd(lambda x: (x * q, p * x), "data=3", wf.Layout("", params="query:data"))
    captured_bytes = [s.bytes for s in stored.plan(wf.ones("")).stored if s.name.startswith("captured")]
    assert captured_bytes == [12, 4]


def test_a_method_has_all_that_a_program_has():
    class Model(eqx.Module):
        @wf.spmd
        def double(self, x):
            return 2.0 * x

    model, x = Model(), wf.ones("a=2")
    assert model.double(x).numpy().tolist() == [2.0, 2.0]
    assert model.double.plan(x).flops == 0
    assert "mul" in str(model.double.jaxpr(x)) and len(model.double.traces) == 1


def test_placed_specs_change_roles_and_placements():
    placed = wf.place(wf.spec("a=3"), "x=2", "a:x")
    assert wf.parameter(placed).role == "param" and wf.parameter(placed).mesh == placed.mesh
    off = wf.place(placed, None, None)
    assert off.mesh is None and off.array.shape == (3,)


def test_ops_are_named_after_operands_by_keyword_too():
    named = wf.spmd(lambda x: wf.relu(wf.sum(x=x, dims="b")), "d=2", "b:d")
    (only,) = named.collectives(wf.spec("b=8 c=4"))
    assert only.op == "sum[b,c]"


def test_a_scalar_is_formatted_as_a_number():
    loss = wf.mean(wf.tensor([1.0, 2.0], "a=2"))
    assert f"{loss:.2f}" == "1.50" and f"{loss}" == str(loss)


def test_decorator_and_bare_forms():
    @wf.spmd(mesh="x=2", layout="a:x")
    def double(x):
        """Twice."""
        return x * 2.0

    assert double.__name__ == "double" and double.__doc__ == "Twice."
    assert repr(double) == '<program double on mesh "x=2" with layout "a:x">'
    assert_same(double(OPERANDS["x"]), OPERANDS["x"].array * 2)
    assert_same(wf.spmd(lambda x: x * 2.0)(OPERANDS["x"]), OPERANDS["x"].array * 2)


SHOWN = {
    "a:x": wf.Layout("a:x"),
    "a:x (params b:y)": wf.Layout("a:x", params="b:y"),
    "a:x (optimizer b:y)": wf.Layout("a:x", optimizer="b:y"),
    "a:x (params b:y; optimizer as values)": wf.Layout("a:x", params="b:y", optimizer=""),
    "a:x+y (params a:y; optimizer c:x)": wf.Layout("a:x+y", params="a:y", optimizer="c:x"),
}


@pytest.mark.parametrize("text", SHOWN)
def test_layouts_print_all_their_rules(text):
    layout = SHOWN[text]
    assert str(layout) == text
    assert eval(repr(layout), {"Layout": wf.Layout}) == layout
    assert (
        repr(wf.spmd(wf.relu, "x=2 y=2", layout)) == f'<program relu on mesh "x=2 y=2" with layout "{text}">'
    )


def test_programs_nest_and_compose_with_eager_code():
    inner = wf.spmd(lambda x: wf.sum(x * x, "b"), "x=2", "a:x")
    outer = wf.spmd(lambda x: wf.exp(inner(x)) + inner(x * 2.0), "x=2", "a:x")
    free = wf.spmd(lambda x: wf.max(x, "b"))
    x = OPERANDS["x"]
    squares = np.sum(x.numpy() ** 2, 1)
    assert_same(outer(x), np.exp(squares) + 4 * squares)
    assert_same(
        wf.sqrt(inner(wf.exp(x))) + inner(x), np.sqrt(np.sum(np.exp(x.numpy()) ** 2, 1)) + squares, rtol=2e-5
    )
    assert_same(wf.spmd(lambda x: free(x) + inner(x), "x=2", "a:x")(x), x.numpy().max(1) + squares)
    assert_same(wf.grad(lambda x: wf.sum(inner(x)))(x), 2 * x.array)  # eager code differentiates a program
    assert_same(wf.spmd(wf.grad(lambda x: wf.sum(inner(x))), "x=2", "a:x")(x), 2 * x.array)


def test_another_layout_of_the_same_mesh_is_laid_out_again():
    x = wf.place(OPERANDS["x"], "x=2", "b:x")
    assert_same(wf.spmd(lambda x: x * 2.0, "x=2", "a:x")(x), OPERANDS["x"].array * 2)


def test_two_meshes_are_an_error_that_names_both():
    x, y = wf.place(OPERANDS["x"], "x=2", "a:x"), wf.place(OPERANDS["x"], "z=4", "a:z")
    both = ("x=2", "z=4")
    for call in (
        lambda: x + y,
        lambda: wf.spmd(lambda y: y * 2.0, "x=2", "a:x")(y),
        lambda: wf.spmd(lambda x: x * y, "x=2", "a:x")(x),
        lambda: wf.spmd(wf.spmd(lambda x: x, "z=4", "a:z"), "x=2", "a:x")(x),
    ):
        with pytest.raises(LayoutError) as error:
            call()
        assert all(mesh in str(error.value) for mesh in both)
    with pytest.raises(LayoutError, match="b:x"):
        x + wf.place(OPERANDS["x"], "x=2", "b:x")  # two layouts on one mesh


def test_slices_do_not_leave_their_program():
    slices = []
    wf.spmd(lambda x: slices.append(x) or x, "x=2", "a:x")(OPERANDS["x"])
    for use in (
        lambda: slices[0] + 1.0,
        lambda: wf.spmd(lambda x: x + slices[0], "x=2", "a:x")(OPERANDS["x"]),
    ):
        with pytest.raises(WeftError):
            use()


# Options


@pytest.mark.parametrize("static", [(1,), ("n",), 1, "n"], ids=repr)
def test_static_by_position_and_by_name(static):
    program = wf.spmd(lambda x, n: [x] * n, "x=2", "a:x", static=static)
    assert len(program(OPERANDS["x"], 2)) == 2
    assert len(program(OPERANDS["x"], n=3)) == 3


def test_static_arguments_have_to_be_hashable():
    with pytest.raises(TensorTypeError, match="can't be hashed"):
        wf.spmd(lambda x, n: x, "x=2", "a:x", static="n")(OPERANDS["x"], [1])
    with pytest.raises(ProgramError, match="static= names argument m"):
        wf.spmd(lambda x, n: x, "x=2", "a:x", static="m")


def test_a_copy_of_what_is_donated_can_be_given_too():
    x = wf.place(wf.ones("a=6"), "x=2", "a:x")
    program = wf.spmd(lambda x, y: (x + y, y + y), "x=2", "a:x", donate=(0,))
    with pytest.raises(ProgramError, match="passed more than once"):  # a call would end the process
        program._check_donated_once(*program._prepare((x, x), {}, {}), (x, x), {})
    both = program(jax.tree.map(jnp.copy, x), x)
    assert [t.numpy().tolist() for t in both] == [[2.0] * 6, [2.0] * 6]
    assert jax.jit(lambda x: program(x, x))(x)[0].numpy().tolist() == [2.0] * 6  # nothing is donated here


@pytest.mark.parametrize("donate", [(0,), "x"], ids=repr)
def test_donated_memory_is_used_again(donate):
    program = wf.spmd(lambda x, y: (x + y, wf.sum(y)), "x=2", "a:x", donate=donate)
    x, y = (wf.place(OPERANDS[n], "x=2", "a:x") * 1.0 for n in ("x", "p"))
    storage = x.storage
    x, _ = program(x, y)
    assert storage.is_deleted()
    x, _ = program(x, y)
    storage = x.storage
    x, _ = program(y=y, x=x)
    assert storage.is_deleted() and not y.storage.is_deleted()
    assert_same(x, OPERANDS["x"].array + 3 * OPERANDS["p"].array)


# Looking at programs


def loss(params, x):
    h = wf.tanh(wf.einsum(x, params["w"], out=["batch", "h"]))
    return wf.mean(wf.square(wf.einsum(h, params["v"], out=["batch", "d"]) - x))


def specs(batch, h):
    params = {"w": wf.spec(f"d=64 h={h}", role="param"), "v": wf.spec(f"h={h} d=64", role="param")}
    return params, wf.spec(f"batch={batch} d=64", jnp.float32)


def test_a_program_for_512_devices_without_any():
    layout = wf.Layout("batch:data h:model", params="d:data")
    program = wf.spmd(wf.value_and_grad(loss), "data=64 model=8", layout)
    args = specs(640, 100)  # 100 over 8: uneven
    assert "all_gather" in str(program.jaxpr(*args))
    assert {c.axes for c in program.collectives(*args)} >= {("model",), ("data",)}
    with pytest.raises(MeshError, match="needs 512 devices"):
        program({"w": wf.zeros("d=64 h=100"), "v": wf.zeros("h=100 d=64")}, wf.zeros("batch=640 d=64"))


def test_lower_and_compile():
    program = wf.spmd(wf.value_and_grad(loss), "data=2 model=2", "batch:data h:model")
    args = specs(8, 6)
    assert "stablehlo" in program.lower(*args).as_text()
    compiled = program.compile(*args)
    assert "all-reduce" in compiled.as_text()
    assert compiled.memory_analysis().temp_size_in_bytes >= 0
    assert len(program.traces) == 1


def test_export_round_trip():
    program = wf.spmd(lambda x, y: (wf.einsum(x, y, out=["b"]), x * 2.0), "x=2", "a:x")
    x, y = (wf.place(OPERANDS[n], "x=2", "a:x") for n in ("x", "y"))
    exported = program.export(x, y)
    assert exported.nr_devices == 2
    pytest.importorskip("flatbuffers")
    again = jax.export.deserialize(exported.serialize())
    got = again.call(x.storage, y.storage)
    for array, want in zip(got, program(x, y), strict=True):
        np.testing.assert_array_equal(array, want.storage)


def test_inside_jit_and_without_leaks():
    program = wf.spmd(wf.value_and_grad(loss), "data=2 model=2", "batch:data h:model")
    params = {"w": real(0, "d=4 h=3"), "v": real(1, "h=3 d=4")}
    x = real(2, "batch=5 d=4")
    want = program(params, x)
    jitted = jax.jit(lambda params, x: program(params, x * 1.0))
    for got, expect in zip(leaves(jitted(params, x)), leaves(want), strict=True):
        assert_same(got, expect.array)
    with jax.checking_leaks():

        def fn(params, x):
            body = wf.remat(
                lambda c, _: (wf.tanh(wf.einsum(c, params["w"], params["v"], out=["batch", "d"])), None),
                "sums",
            )
            return wf.sum(wf.scan(body, x, None, wf.Dim("t", 3))[0])

        leaves(wf.spmd(wf.value_and_grad(fn), "data=2 model=2", "batch:data h:model")(params, x))
        leaves(wf.spmd(wf.value_and_grad(loss), "data=2", "batch:data")(params, x))


def test_names_of_the_package():
    import weft

    assert re.fullmatch(r"\d+\.\d+\.\d+", weft.__version__)

    names = {}
    exec("from weft import *", names)
    assert names["einsum"] is wf.einsum and "collectives" not in names
    with pytest.raises(AttributeError, match=r"'eisnum'.*did you mean einsum"):
        weft.eisnum


def test_a_staged_method_is_bound_to_its_instance():
    class Scaled(eqx.Module):
        factor: float

        @wf.spmd(mesh="p=2", layout="a:p")
        def call(self, x):
            return x * self.factor

    assert Scaled(3.0).call(wf.ones("a=3")).numpy().tolist() == [3, 3, 3]
