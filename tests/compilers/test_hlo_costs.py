"""The FLOPs, the memory traffic and the kinds of compiled instructions."""

import itertools
import json

import jax
import jax.numpy as jnp
import pytest
from hlo_text import entry, parse
from jax import lax

from weft.compilers import costs
from weft.compilers.hlo import parse_hlo

pytestmark = pytest.mark.nodevice


def last(module):
    """The root of the ENTRY computation, as arguments of the functions of `costs`."""
    return module, module.entry, module.entry.root


def config(**values):
    return f"backend_config={json.dumps(values)}"


# -- FLOPs of matmuls


@pytest.mark.parametrize(
    "left, right, out, contracted, flops",
    [
        ("f32[8,16]", "f32[16,4]", "f32[8,4]", "lhs_contracting_dims={1}, rhs_contracting_dims={0}", 2 * 8 * 16 * 4),
        ("f32[16,8]", "f32[16,4]", "f32[8,4]", "lhs_contracting_dims={0}, rhs_contracting_dims={0}", 2 * 8 * 16 * 4),
        (
            "bf16[3,8,5,7]", "bf16[3,5,7,4]", "bf16[3,8,4]",
            "lhs_batch_dims={0}, lhs_contracting_dims={2,3}, rhs_batch_dims={0}, rhs_contracting_dims={1,2}",
            2 * 3 * 8 * 4 * 5 * 7,
        ),
        ("f32[8]", "f32[8]", "f32[]", "lhs_contracting_dims={0}, rhs_contracting_dims={0}", 2 * 8),
        ("f32[8]", "f32[4]", "f32[8,4]", "lhs_contracting_dims={}, rhs_contracting_dims={}", 2 * 8 * 4),
    ],
    ids=["matrices", "transposed", "batch", "vectors", "outer"],
)  # fmt: skip
def test_flops_of_a_dot(left, right, out, contracted, flops):
    module = entry(
        f"%a = {left} parameter(0)", f"%b = {right} parameter(1)", f"%d = {out} dot(%a, %b), {contracted}"
    )
    assert costs.flops(*last(module)) == flops
    assert costs.kind_of(module, module.entry.root) == "matmul"


def einsum_module(*shapes, formula):
    text = jax.jit(lambda *arrays: jnp.einsum(formula, *arrays)).lower(
        *(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    )
    return parse_hlo(text.compiler_ir("hlo").as_hlo_module().to_string())


@pytest.mark.parametrize("formula", ["bij,bjk->bik", "ij,kj->ik", "abc,bcd->ad"])
def test_flops_of_an_einsum_by_trying_all_indices(formula):
    sizes = dict(a=2, b=3, c=4, d=5, i=6, j=7, k=8)
    operands = formula.partition("->")[0].split(",")
    module = einsum_module(*(tuple(sizes[i] for i in one) for one in operands), formula=formula)
    schedule = [one for c in module.computations.values() for one in c.instructions if one.opcode == "dot"]
    where = next(c for c in module.computations.values() if schedule[0] in c.instructions)
    indices = sorted(set("".join(operands)))
    products = sum(1 for _ in itertools.product(*(range(sizes[i]) for i in indices)))
    assert costs.flops(module, where, schedule[0]) == 2 * products


# -- FLOPs of convolutions


def products_of(length, size, out, stride, padding, of_input, of_window):
    """The pairs of an output position and a window element on an element of the input, tried one by one."""
    count = 0
    for position, element in itertools.product(range(out), range(size)):
        place = position * stride + element * of_window - padding[0]
        count += place % of_input == 0 and 0 <= place // of_input < length
    return count


@pytest.mark.parametrize("length", [1, 4, 9])
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("padding", [(0, 0), (1, 1), (2, 5), (-1, 2), (3, -2)], ids=str)
def test_flops_of_a_window_by_trying_all_positions(length, size, padding):
    for stride, of_input, of_window in itertools.product((1, 2, 3, 4, 6), (1, 2, 3, 4), (1, 2)):
        dilated, window = (length - 1) * of_input + 1, (size - 1) * of_window + 1
        out = max(0, (dilated + sum(padding) - window) // stride + 1)
        settings = f"size={size} stride={stride} pad={padding[0]}_{padding[1]} lhs_dilate={of_input} rhs_dilate={of_window}"
        module = entry(
            f"%x = f32[5,{length},2] parameter(0)",
            f"%w = f32[{size},2,3] parameter(1)",
            f"%y = f32[5,{out},3] convolution(%x, %w), window={{{settings}}}, dim_labels=b0f_0io->b0f",
        )
        products = products_of(length, size, out, stride, padding, of_input, of_window)
        assert costs.flops(*last(module)) == 2 * 5 * 2 * 3 * products, settings


CONVOLUTIONS = {
    "same": dict(padding="SAME"),
    "valid": dict(padding="VALID"),
    "strides": dict(window_strides=(2, 3), padding=((1, 2), (0, 1))),
    "negative padding": dict(padding=((-1, 2), (0, -2))),
    "dilated window": dict(padding="SAME", rhs_dilation=(2, 1)),
    "dilated input": dict(padding=((1, 2), (0, 1)), lhs_dilation=(2, 3)),
    "all": dict(window_strides=(2, 3), padding=((-1, 2), (0, -3)), lhs_dilation=(3, 2), rhs_dilation=(3, 1)),
    "feature groups": dict(padding="SAME", kernel=(4, 3, 3, 2), feature_group_count=2),
    "depthwise": dict(padding="SAME", kernel=(12, 1, 3, 2), feature_group_count=6, window_strides=(2, 1)),
    "batch groups": dict(padding=((1, 2), (0, 1)), batch_group_count=2),
    "batch groups of one": dict(padding="SAME", batch_group_count=4),
    "nothing but padding": dict(
        window_strides=(2, 2), padding=((1, 0), (1, 0)), lhs_dilation=(2, 2), kernel=(4, 6, 1, 1)
    ),
}


@pytest.mark.parametrize("labels", [("NCHW", "OIHW", "NCHW"), ("NHWC", "HWIO", "NHWC")], ids=["NCHW", "NHWC"])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_flops_of_a_convolution_as_jax_counts_them(name, labels):
    settings = {"window_strides": (1, 1), "kernel": (4, 6, 3, 2)} | CONVOLUTIONS[name]
    kernel = settings.pop("kernel")

    def shaped(sizes, names, order):
        by_name = dict(zip(names, sizes, strict=True))
        return jax.ShapeDtypeStruct(tuple(by_name[letter] for letter in order), jnp.float32)

    inputs = shaped((4, 6, 9, 8), "NCHW", labels[0]), shaped(kernel, "OIHW", labels[1])
    lowered = jax.jit(
        lambda x, w: lax.conv_general_dilated(x, w, dimension_numbers=labels, **settings)
    ).lower(*inputs)
    module = parse_hlo(lowered.compiler_ir("hlo").as_hlo_module().to_string())
    assert module.entry.root.opcode == "convolution"
    # Without products JAX lists no FLOPs.
    expected = int((lowered.cost_analysis() or {}).get("flops", 0))
    assert costs.flops(*last(module)) == expected
    assert (expected == 0) == (name == "nothing but padding")


@pytest.mark.parametrize(
    "lines, flops",
    [
        # A batch of 64 matmuls of 1024 x 256 with 256 x 1024, as the TPU compiler writes it.
        (
            [
                "%a = bf16[64,1024,256] parameter(0)",
                "%b = bf16[64,256,1024] parameter(1)",
                "%y = bf16[64,1024,1024] convolution(%a, %b), window={size=64 stride=63 lhs_dilate=64}, "
                "dim_labels=0bf_0io->0bf",
            ],
            2 * 64 * 1024 * 256 * 1024,
        ),
        (
            [
                "%a = bf16[64,1024,256] parameter(0)",
                "%b = bf16[64,256,1024] parameter(1)",
                "%y = bf16[64,1024,1024] convolution(%a, %b), window={size=64 stride=64 pad=63_63 lhs_dilate=63 "
                "rhs_reversal=1}, dim_labels=0bf_0io->0bf",
            ],
            2 * 64 * 1024 * 256 * 1024,
        ),
        # Two batch dims, 16 x 3.
        (
            [
                "%a = bf16[16,3,1024,64] parameter(0)",
                "%b = bf16[16,3,1024,64] parameter(1)",
                "%y = f32[16,3,1024,1024] convolution(%a, %b), window={size=16x3 stride=15x2 lhs_dilate=16x3}, "
                "dim_labels=01bf_01oi->01bf",
            ],
            2 * 16 * 3 * 1024 * 1024 * 64,
        ),
        # A second contracted dim: 1024 x (3, 64) with (3, 64) x 768.
        (
            [
                "%a = bf16[1024,3,64] parameter(0)",
                "%b = bf16[3,64,768] parameter(1)",
                "%y = bf16[1024,1,768] convolution(%a, %b), window={size=3}, dim_labels=b0f_0io->b0f",
            ],
            2 * 1024 * 768 * 3 * 64,
        ),
        # A dim of the right operand alone: 1024 x 768 with 768 x (3, 64).
        (
            [
                "%a = bf16[1024,768,1] parameter(0)",
                "%b = bf16[768,3,64] parameter(1)",
                "%y = bf16[1024,3,64] convolution(%a, %b), window={size=3 pad=2_2 rhs_reversal=1}, "
                "dim_labels=bf0_i0o->b0f",
            ],
            2 * 1024 * 768 * 3 * 64,
        ),
        ([
            "%a = bf16[1024,768] parameter(0)", "%b = bf16[768,64] parameter(1)",
            "%y = bf16[1024,64] convolution(%a, %b), dim_labels=bf_io->bf",
        ], 2 * 1024 * 768 * 64),
    ],
    ids=["batch", "batch reversed", "two batch dims", "two contracted", "free dim", "no window"],
)  # fmt: skip
def test_flops_of_matmuls_that_the_tpu_compiler_writes_as_convolutions(lines, flops):
    assert costs.flops(*last(entry(*lines))) == flops


@pytest.mark.timeout(5)
def test_a_batch_dim_of_many_positions_is_counted_fast():
    module = entry(
        "%a = bf16[65536,8,16] parameter(0)",
        "%b = bf16[65536,16,32] parameter(1)",
        "%y = bf16[65536,8,32] convolution(%a, %b), window={size=65536 stride=65535 lhs_dilate=65536}, "
        "dim_labels=0bf_0io->0bf",
    )
    assert costs.flops(*last(module)) == 2 * 65536 * 8 * 16 * 32


# -- FLOPs of library calls and kernels


def gemm(left, right, out, contracted=("1",), more=""):
    numbers = {"lhs_contracting_dimensions": [*contracted], "rhs_contracting_dimensions": ["0"]}
    if not contracted:
        numbers = {}  # JSON of protocol buffers may leave empty lists out
    return entry(
        f"%a = {left}{{1,0}} parameter(0)",
        f"%b = {right}{{1,0}} parameter(1)",
        f'%c = ({out}{{1,0}}, s8[4194304]{{0}}) custom-call(%a, %b{more}), custom_call_target="__cublas$lt$matmul", '
        + config(gemm_backend_config={"alpha_real": 1, "dot_dimension_numbers": numbers}),
    )


def test_flops_of_a_library_matmul():
    module = gemm("bf16[128,64]", "bf16[64,32]", "bf16[128,32]")
    assert costs.flops(*last(module)) == 2 * 128 * 64 * 32
    assert costs.kind_of(module, module.entry.root) == "matmul"
    assert costs.product_dtype(*last(module)) == "bf16"
    module = gemm("bf16[64,128]", "bf16[64,32]", "bf16[128,32]", contracted=("0",))
    assert costs.flops(*last(module)) == 2 * 128 * 64 * 32
    assert (
        costs.flops(*last(gemm("bf16[128,1]", "bf16[1,32]", "bf16[128,32]", contracted=()))) == 2 * 128 * 32
    )


@pytest.mark.parametrize(
    "target, first, second, result",
    [
        ("__cudnn$convForward", "x", "w", "y"),
        ("__cudnn$convBackwardInput", "y", "w", "x"),
        ("__cudnn$convBackwardFilter", "x", "y", "w"),
    ],
)
def test_a_library_convolution_and_its_gradients_have_the_same_products(target, first, second, result):
    types = {"x": "bf16[2,9,8,6]", "w": "bf16[4,3,2,3]", "y": "bf16[2,5,4,4]"}
    module = entry(
        f"%a = {types[first]} parameter(0)",
        f"%b = {types[second]} parameter(1)",
        f"%c = ({types[result]}, u8[1024]) custom-call(%a, %b), window={{size=3x2 stride=2x2 pad=1_1x0_1}}, "
        f'dim_labels=b01f_o01i->b01f, feature_group_count=2, custom_call_target="{target}"',
    )
    rows, columns = products_of(9, 3, 5, 2, (1, 1), 1, 1), products_of(8, 2, 4, 2, (0, 1), 1, 1)
    # Two examples, four features, each of three input features of its group.
    assert costs.flops(*last(module)) == 2 * 2 * 4 * 3 * rows * columns
    assert costs.kind_of(module, module.entry.root) == "matmul"
    # The workspace is not counted.
    elements = 2 * 9 * 8 * 6 + 4 * 3 * 2 * 3 + 2 * 5 * 4 * 4
    assert costs.traffic(*last(module)) == 2 * elements


MOSAIC = {
    "body": "TUzvUgFNTElS",
    "cost_estimate": {"flops": "4096", "transcendentals": "0", "bytes_accessed": "777"},
}


@pytest.mark.parametrize(
    "settings, flops, traffic",
    [
        ({"custom_call_config": MOSAIC, "used_scoped_memory_configs": []}, 4096, 777),
        (MOSAIC, 4096, 777),
        (
            {"custom_call_config": {"body": "TUzvUg"}},
            0,
            3 * 4096,
        ),  # all that it has: operand and both results
        ({"custom_call_config": {"body": "TUzvUg", "cost_estimate": {"flops": "12"}}}, 12, 3 * 4096),
        ({}, 0, 3 * 4096),
    ],
    ids=["nested", "flat", "none", "no bytes", "no config"],
)
def test_the_declared_cost_of_a_kernel(settings, flops, traffic):
    module = entry(
        "%x = f32[8,128]{1,0:T(8,128)} parameter(0)",
        "%k = (f32[8,128]{1,0:T(8,128)}, s8[4096]{0:T(1024)}) custom-call(%x), "
        f'custom_call_target="tpu_custom_call", {config(**settings)}',
    )
    assert costs.flops(*last(module)) == flops
    assert costs.traffic(*last(module)) == traffic
    assert costs.kind_of(module, module.entry.root) == "custom call tpu_custom_call"


# -- Fusions


def fusion(results, *lines, operands=(), attributes="kind=kLoop", others=()):
    """A fusion with these operands and results, whose computation has these instructions after the parameters.

    The parameters are p0, p1, …; the last line is the root.
    """
    given = "\n".join(f"  %x{n} = {type_} parameter({n})" for n, type_ in enumerate(operands))
    names = ", ".join(f"%x{n}" for n in range(len(operands)))
    parameters = [f"%p{n} = {type_} parameter({n})" for n, type_ in enumerate(operands)]
    body = [*parameters, *lines]
    inside = "\n".join(f"  {'ROOT ' if line is body[-1] else ''}{line}" for line in body)
    return parse(
        f"ENTRY %main () -> f32[] {{\n{given}\n  ROOT %fusion = {results} fusion({names}), {attributes}, calls=%fused\n}}",
        f"%fused () -> f32[] {{\n{inside}\n}}",
        *others,
    )


def test_the_flops_and_the_dtype_of_a_fusion_are_those_inside():
    module = fusion(
        "f32[8,4]",
        "%c = bf16[16,4] convert(%p1)",
        "%d = f32[8,4] dot(%p0, %c), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
        "%r = f32[8,4] negate(%d)",
        operands=["bf16[8,16]", "f32[16,4]"],
    )
    assert costs.flops(*last(module)) == 2 * 8 * 16 * 4
    assert costs.product_dtype(*last(module)) == "bf16"
    assert costs.kind_of(module, module.entry.root) == "matmul"


def test_the_flops_of_a_reduction_are_none():
    module = entry(
        "%a = f32[8] parameter(0)",
        "%z = f32[] constant(0)",
        "%s = f32[] reduce(%a, %z), dimensions={0}, to_apply=%add",
    )
    assert costs.flops(*last(module)) == 0 and costs.product_dtype(*last(module)) == ""


MB = 1 << 20
STACK, ROW = "f32[6,256,1024]", "f32[1,256,1024]"  # 6 MiB, 1 MiB


@pytest.mark.parametrize(
    "operands, results, lines, megabytes",
    [
        pytest.param([ROW, ROW], ROW, [f"%r = {ROW} add(%p0, %p1)"], 3, id="elementwise"),
        pytest.param([ROW], ROW, [f"%r = {ROW} multiply(%p0, %p0)"], 2, id="used twice"),
        pytest.param(
            [ROW, ROW], f"({ROW}, {ROW})",
            [f"%a = {ROW} add(%p0, %p1)", f"%b = {ROW} negate(%a)", f"%r = ({ROW}, {ROW}) tuple(%a, %b)"],
            4, id="two results",
        ),
        pytest.param(
            [STACK, "s32[]"], ROW, [f"%r = {ROW} dynamic-slice(%p0, %p1, %p1, %p1)"], 2, id="a slice",
        ),
        pytest.param(
            [STACK], ROW,
            [f"%c = bf16{STACK[3:]} convert(%p0)", f"%s = bf16{ROW[3:]} slice(%c), slice={{[0:1], [0:256], [0:1024]}}",
             f"%r = {ROW} convert(%s)"],
            2, id="a slice of a conversion",  # f32 is read
        ),
        pytest.param(
            [STACK, "s32[]"], ROW,
            [f"%a = {ROW} dynamic-slice(%p0, %p1, %p1, %p1)", f"%n = {STACK} negate(%p0)",
             f"%b = {ROW} slice(%n), slice={{[0:1]}}", f"%r = {ROW} add(%a, %b)"],
            7, id="a slice and all",
        ),
        pytest.param(
            [STACK, "s32[]"], ROW,
            [f"%s{n} = {ROW} dynamic-slice(%p0, %p1, %p1, %p1)" for n in range(7)]
            + [f"%r = {ROW} custom(%s0, %s1, %s2, %s3, %s4, %s5, %s6)"],
            7, id="slices of more than all",
        ),
        pytest.param(
            [STACK, ROW, "s32[]"], STACK,
            [f"%r = {STACK} dynamic-update-slice(%p0, %p1, %p2, %p2, %p2)"], 2, id="an update in place",
        ),
        pytest.param(
            [f"f32[6,{256 * 1024}]", ROW, "s32[]"], STACK,
            [f"%b = {STACK} bitcast(%p0)", f"%u = {STACK} dynamic-update-slice(%b, %p1, %p2, %p2, %p2)",
             f"%r = {STACK} bitcast(%u)"],
            2, id="an update in place of a view",
        ),
        pytest.param(
            [STACK, ROW, "s32[]"], f"({ROW}, {STACK})",
            [f"%n = {ROW} negate(%p1)", f"%u = {STACK} dynamic-update-slice(%p0, %n, %p2, %p2, %p2)",
             f"%r = ({ROW}, {STACK}) tuple(%n, %u)"],
            3, id="an update in place and another result",
        ),
        pytest.param(
            [STACK, ROW, "s32[]"], STACK,
            [f"%o = {ROW} dynamic-slice(%p0, %p2, %p2, %p2)", f"%s = {ROW} add(%o, %p1)",
             f"%r = {STACK} dynamic-update-slice(%p0, %s, %p2, %p2, %p2)"],
            3, id="a sum in place",
        ),
        pytest.param(
            [STACK, ROW, "s32[]"], STACK,
            [f"%u = {STACK} dynamic-update-slice(%p0, %p1, %p2, %p2, %p2)", f"%r = {STACK} negate(%u)"],
            13, id="an update that is used further",
        ),
        pytest.param(
            [STACK, ROW, "s32[]"], f"bf16{STACK[3:]}",
            [f"%u = {STACK} dynamic-update-slice(%p0, %p1, %p2, %p2, %p2)", f"%r = bf16{STACK[3:]} convert(%u)"],
            10, id="an update that is converted",
        ),
        pytest.param(
            [f"bf16{STACK[3:]}", ROW, "s32[]"], STACK,
            [f"%c = {STACK} convert(%p0)", f"%r = {STACK} dynamic-update-slice(%c, %p1, %p2, %p2, %p2)"],
            10, id="an update of a conversion",
        ),
        pytest.param(
            [ROW, "s32[]"], STACK,
            ["%z = f32[] constant(0)", f"%b = {STACK} broadcast(%z), dimensions={{}}",
             f"%r = {STACK} dynamic-update-slice(%b, %p0, %p1, %p1, %p1)"],
            7, id="an update of zeros",
        ),
        pytest.param(
            [STACK, "s32[2,1]", "f32[2,128,1024]"], STACK,
            [f"%r = {STACK} scatter(%p0, %p1, %p2), to_apply=%add"], 1 + 2, id="a scatter in place",
        ),
        pytest.param(
            [ROW, "s32[4096,1]", "f32[4096,1024]"], ROW,
            [f"%r = {ROW} scatter(%p0, %p1, %p2), to_apply=%add"], 16 + 2, id="a scatter of more than all",
        ),
        pytest.param(
            ["f32[4096,1024]", "s32[256,1]"], "f32[256,1024]",
            ["%r = f32[256,1024] gather(%p0, %p1), slice_sizes={1,1024}"], 2, id="a gather",
        ),
        pytest.param([ROW, STACK], ROW, [f"%r = {ROW} negate(%p0)"], 2, id="an operand that is not used"),
    ],
)  # fmt: skip
def test_traffic_of_a_fusion(operands, results, lines, megabytes):
    module = fusion(results, *lines, operands=operands)
    # Indices take a few bytes.
    assert abs(costs.traffic(*last(module)) - megabytes * MB) <= 32 * 1024
    assert round(costs.traffic(*last(module)) / MB) == megabytes


NESTED_SLICE = f"""
%nested (q0: {STACK}, q1: s32[]) -> {ROW} {{
  %q0 = {STACK} parameter(0)
  %q1 = s32[] parameter(1)
  ROOT %slice = {ROW} dynamic-slice(%q0, %q1, %q1, %q1)
}}
"""
NESTED_COPY = f"""
%nested (q0: {STACK}) -> {STACK} {{
  %q0 = {STACK}{{2,1,0:T(32,128)}} parameter(0)
  ROOT %copy = {STACK}{{2,1,0:T(8,128)}} copy(%q0)
}}
"""
NESTED_UPDATE = f"""
%nested (q0: {ROW}, q1: {STACK}, q2: s32[]) -> {STACK} {{
  %q0 = {ROW} parameter(0)
  %q1 = {STACK} parameter(1)
  %q2 = s32[] parameter(2)
  ROOT %update = {STACK} dynamic-update-slice(%q1, %q0, %q2, %q2, %q2)
}}
"""


@pytest.mark.parametrize(
    "operands, results, lines, other, megabytes",
    [
        pytest.param(
            [STACK, "s32[]"], ROW,
            [f"%i = {ROW} fusion(%p0, %p1), kind=kLoop, calls=%nested", f"%r = {ROW} negate(%i)"],
            NESTED_SLICE, 2, id="a slice",
        ),
        # The TPU compiler writes another tiling as a fusion of a copy.
        pytest.param(
            [STACK, "s32[]"], ROW,
            [f"%i = {STACK} fusion(%p0), kind=kLoop, calls=%nested", f"%r = {ROW} dynamic-slice(%i, %p1, %p1, %p1)"],
            NESTED_COPY, 2, id="a slice of a copy",
        ),
        pytest.param(
            [STACK, ROW, "s32[]"], STACK,
            [f"%i = {STACK} fusion(%p0), kind=kLoop, calls=%nested",
             f"%r = {STACK} dynamic-update-slice(%i, %p1, %p2, %p2, %p2)"],
            NESTED_COPY, 2, id="an update of a copy",
        ),
        pytest.param(
            [STACK, ROW, "s32[]"], STACK,
            [f"%n = {ROW} negate(%p1)", f"%r = {STACK} fusion(%n, %p0, %p2), kind=kLoop, calls=%nested"],
            NESTED_UPDATE, 2, id="an update",
        ),
        pytest.param(
            [STACK, ROW, "s32[]"], STACK,
            [f"%i = {STACK} fusion(%p1, %p0, %p2), kind=kLoop, calls=%nested", f"%r = {STACK} negate(%i)"],
            NESTED_UPDATE, 13, id="an update that is used further",
        ),
    ],
)  # fmt: skip
def test_traffic_of_nested_fusions(operands, results, lines, other, megabytes):
    module = fusion(results, *lines, operands=operands, others=[other])
    assert abs(costs.traffic(*last(module)) - megabytes * MB) < 100


def test_operands_and_results_on_the_chip_are_free():
    on_chip = f"{ROW}{{2,1,0:T(8,128)S(1)}}"
    main = f"{ROW}{{2,1,0:T(8,128)}}"
    for operands, results, megabytes in [
        ([main, main], main, 3), ([on_chip, main], main, 2), ([on_chip, on_chip], main, 1),
        ([on_chip, on_chip], on_chip, 0), ([main, main], on_chip, 2),
    ]:  # fmt: skip
        module = fusion(results, f"%r = {results} add(%p0, %p1)", operands=operands)
        assert costs.traffic(*last(module)) == megabytes * MB
        lines = [f"%x{n} = {type_} parameter({n})" for n, type_ in enumerate(operands)]
        assert costs.traffic(*last(entry(*lines, f"%r = {results} add(%x0, %x1)"))) == megabytes * MB


def test_padding_is_read_and_written():
    # 25 of 128 columns: tiles of 8 x 128 are full.
    narrow = "f32[64,25]{1,0:T(8,128)}"
    module = fusion(narrow, f"%r = {narrow} negate(%p0)", operands=[narrow])
    assert costs.traffic(*last(module)) == 2 * 64 * 128 * 4
    stack, row = "f32[4,64,25]{2,1,0:T(8,128)}", "f32[1,64,25]{2,1,0:T(8,128)}"
    module = fusion(
        row, f"%r = {row} dynamic-slice(%p0, %p1, %p1, %p1)", operands=[stack, "s32[]{:T(128)S(6)}"]
    )
    assert costs.traffic(*last(module)) == 2 * 64 * 128 * 4


def test_a_fusion_of_a_library_matmul_with_a_slice():
    """Its workspace is not counted, and of the stack of weights one layer is read."""
    settings = config(gemm_backend_config={"dot_dimension_numbers": {"lhs_contracting_dimensions": ["1"]}})
    module = fusion(
        "(f32[256,1024], s8[4194304])",
        f"%s = {ROW} slice(%p1), slice={{[2:3], [0:256], [0:1024]}}",
        "%w = f32[256,1024] bitcast(%s)",
        f'%r = (f32[256,1024], s8[4194304]) custom-call(%p0, %w), custom_call_target="__cublas$lt$matmul", {settings}',
        operands=["f32[256,256]", STACK],
        attributes="kind=kCustom",
    )
    assert costs.traffic(*last(module)) == (256 * 256 + 256 * 1024 + 256 * 1024) * 4
    assert costs.flops(*last(module)) == 2 * 256 * 256 * 1024
    assert costs.kind_of(module, module.entry.root) == "matmul"


# -- Traffic of other instructions

MAIN, CHIP, HOST = "{2,1,0:T(8,128)}", "{2,1,0:T(8,128)S(1)}", "{2,1,0:T(8,128)S(5)}"


@pytest.mark.parametrize(
    "lines, megabytes",
    [
        pytest.param([f"%a = {STACK}{MAIN} parameter(0)", f"%r = {ROW}{MAIN} slice(%a), slice={{[0:1]}}"], 2, id="slice"),
        pytest.param(
            [f"%a = {STACK}{MAIN} parameter(0)", "%i = s32[]{:T(128)S(6)} parameter(1)",
             f"%r = {ROW}{CHIP} dynamic-slice(%a, %i, %i, %i)"], 1, id="slice onto the chip",
        ),
        pytest.param(
            [f"%a = {STACK}{CHIP} parameter(0)", f"%r = {ROW}{MAIN} slice(%a), slice={{[0:1]}}"], 1,
            id="slice off the chip",
        ),
        pytest.param(
            [f"%a = {STACK}{MAIN} parameter(0)", f"%u = {ROW}{MAIN} parameter(1)", "%i = s32[]{:S(6)} parameter(2)",
             f"%r = {STACK}{MAIN} dynamic-update-slice(%a, %u, %i, %i, %i)"], 2, id="update",
        ),
        pytest.param(
            [f"%a = {STACK}{MAIN} parameter(0)", f"%u = {ROW}{CHIP} parameter(1)", "%i = s32[]{:S(6)} parameter(2)",
             f"%r = {STACK}{MAIN} dynamic-update-slice(%a, %u, %i, %i, %i)"], 1, id="update from the chip",
        ),
        pytest.param(
            [f"%a = {STACK}{CHIP} parameter(0)", f"%u = {ROW}{MAIN} parameter(1)", "%i = s32[]{:S(6)} parameter(2)",
             f"%r = {STACK}{CHIP} dynamic-update-slice(%a, %u, %i, %i, %i)"], 1, id="update on the chip",
        ),
        pytest.param(
            ["%a = f32[4096,1024]{1,0:T(8,128)} parameter(0)", "%i = s32[256]{0:T(256)S(1)} parameter(1)",
             "%r = f32[256,1024]{1,0:T(8,128)} gather(%a, %i), slice_sizes={1,1024}"], 2, id="gather",
        ),
        pytest.param(
            ["%a = f32[4096,1024]{1,0:T(8,128)} parameter(0)", "%i = s32[256]{0:T(256)S(1)} parameter(1)",
             "%u = f32[256,1024]{1,0:T(8,128)} parameter(2)",
             "%r = f32[4096,1024]{1,0:T(8,128)} scatter(%a, %i, %u), to_apply=%add"], 3, id="scatter",
        ),
        pytest.param(
            ["%a = f32[4096,1024]{1,0:T(8,128)} parameter(0)", "%b = f32[4096,1024]{1,0:T(8,128)} parameter(1)",
             "%i = s32[256]{0:T(256)S(1)} parameter(2)",
             "%u = f32[256,1024]{1,0:T(8,128)} parameter(3)", "%v = f32[256,1024]{1,0:T(8,128)S(1)} parameter(4)",
             "%r = (f32[4096,1024]{1,0:T(8,128)}, f32[4096,1024]{1,0:T(8,128)}) scatter(%a, %b, %i, %u, %v)"],
            1 + 2 + 2, id="scatter of two arrays",
        ),
        pytest.param([f"%a = {ROW}{MAIN} parameter(0)", f"%r = {ROW}{MAIN} multiply(%a, %a)"], 2, id="square"),
        pytest.param([f"%r = {ROW}{MAIN} iota(), iota_dimension=0"], 1, id="iota"),
        pytest.param(
            [f"%a = {ROW}{MAIN} parameter(0)", f"%r = ({ROW}{CHIP}, {ROW}{MAIN}, u32[]{{:S(2)}}) copy-start(%a)"], 1,
            id="copy onto the chip",
        ),
        pytest.param(
            [f"%a = {ROW}{CHIP} parameter(0)", f"%r = ({ROW}{MAIN}, {ROW}{CHIP}, u32[]{{:S(2)}}) copy-start(%a)"], 1,
            id="copy off the chip",
        ),
        pytest.param(
            [f"%a = {ROW}{MAIN} parameter(0)", f"%r = ({ROW}{MAIN}, {ROW}{MAIN}, u32[]{{:S(2)}}) copy-start(%a)"], 2,
            id="copy in the main memory",
        ),
        pytest.param(
            [f"%a = {ROW}{MAIN} parameter(0)", f"%r = ({ROW}{HOST}, {ROW}{MAIN}, u32[]{{:S(2)}}) copy-start(%a)"], 1,
            id="copy to the host",
        ),
        pytest.param(
            [f"%a = {STACK}{MAIN} parameter(0)",
             f"%r = (({STACK}{MAIN}), {ROW}{CHIP}, s32[]{{:S(2)}}) slice-start(%a), slice={{[0:1]}}"], 1,
            id="asynchronous slice onto the chip",
        ),
        pytest.param(
            [f"%a = {STACK}{MAIN} parameter(0)",
             f"%r = (({STACK}{MAIN}), {ROW}{MAIN}, s32[]{{:S(2)}}) slice-start(%a), slice={{[0:1]}}"], 2,
            id="asynchronous slice in the main memory",
        ),
        pytest.param(
            [f"%a = {ROW}{MAIN} parameter(0)", f"%r = {ROW}{MAIN} custom-call(%a), custom_call_target=\"ConcatBitcast\""],
            0, id="a call that renames",
        ),
    ],
)  # fmt: skip
def test_traffic(lines, megabytes):
    assert costs.traffic(*last(entry(*lines))) == megabytes * MB


def test_an_asynchronous_start_does_not_write_its_operands():
    module = entry(
        f"%a = {ROW} parameter(0)",
        f'%r = (({ROW}), bf16{ROW[3:]}, u32[]) custom-call-start(%a), custom_call_target="cast"',
    )
    assert costs.traffic(*last(module)) == MB + MB // 2


# -- Kinds


@pytest.mark.parametrize(
    "opcode, kind",
    [
        ("sort(%a), dimensions={0}, to_apply=%compare", "sort"),
        ("reduce(%a, %a), dimensions={0}, to_apply=%add", "reduce"),
        ("reduce-window(%a, %a), window={size=3}, to_apply=%add", "reduce"),
        ("scatter(%a, %a, %a), to_apply=%add", "scatter"),
        ("gather(%a, %a), slice_sizes={1}", "gather"),
        ("cholesky(%a), lower=true", "factorization"),
        ("fft(%a), fft_type=FFT, fft_length={8}", "fft"),
        ("copy(%a)", "copy"),
        ("transpose(%a), dimensions={0}", "copy"),
        ("reshape(%a)", "copy"),
        ("dynamic-update-slice(%a, %a, %a)", "update"),
        ("rng-bit-generator(%a), algorithm=rng_default", "random"),
        ("add(%a, %a)", "elementwise"),
        ('custom-call(%a), custom_call_target="TopK"', "custom call TopK"),
    ],
    ids=lambda text: text.partition("(")[0],
)
def test_kinds_of_instructions(opcode, kind):
    module = parse(
        f"ENTRY %main () -> f32[8] {{\n  %a = f32[8] parameter(0)\n  ROOT %r = f32[8] {opcode}\n}}",
        """
        %add (x: f32[], y: f32[]) -> f32[] {
          %x = f32[] parameter(0)
          %y = f32[] parameter(1)
          ROOT %sum = f32[] add(%x, %y)
        }
        """,
        """
        %compare (v: f32[], w: f32[]) -> pred[] {
          %v = f32[] parameter(0)
          %w = f32[] parameter(1)
          ROOT %less = pred[] compare(%v, %w), direction=LT
        }
        """,
    )
    assert costs.kind_of(module, module.entry.root) == kind


@pytest.mark.parametrize(
    "opcodes, kind",
    [
        ("copy transpose bitcast", "copy"),
        ("add xor shift-right-logical shift-left or", "random"),
        ("add xor", "elementwise"),
        ("negate dynamic-update-slice", "update"),
        ("negate reduce", "reduce"),
        ("reduce dynamic-update-slice", "reduce"),
        ("gather add", "gather"),
        ("dot reduce add xor shift-right-logical", "matmul"),
        ("negate copy", "elementwise"),
    ],
)
def test_kinds_of_fusions(opcodes, kind):
    lines = [f"%i{n} = f32[8] {opcode}(%p0, %p0)" for n, opcode in enumerate(opcodes.split())]
    module = fusion("f32[8]", *lines, operands=["f32[8]"])
    assert costs.kind_of(module, module.entry.root) == kind


@pytest.mark.parametrize(
    "target, source, kind",
    [
        (CHIP, MAIN, "prefetch"),
        (MAIN, CHIP, "prefetch"),
        (MAIN, MAIN, "copy"),
        (CHIP, CHIP, "copy"),
        (HOST, MAIN, "copy"),
        (MAIN, HOST, "copy"),
    ],
)
def test_kinds_of_asynchronous_copies(target, source, kind):
    module = entry(
        f"%a = {ROW}{source} parameter(0)",
        f"%r = ({ROW}{target}, {ROW}{source}, u32[]{{:S(2)}}) copy-start(%a)",
    )
    assert costs.kind_of(module, module.entry.root) == kind
    module = entry(
        f"%a = {STACK}{source} parameter(0)",
        f"%r = (({STACK}{source}), {ROW}{target}, u32[]{{:S(2)}}) slice-start(%a), slice={{[0:1]}}",
    )
    assert costs.kind_of(module, module.entry.root) == kind


def test_a_copy_between_memories_of_the_chip_moves_nothing_in_the_main_memory():
    smem = CHIP.replace("S(1)", "S(6)")
    module = entry(
        f"%a = {ROW}{CHIP} parameter(0)", f"%r = ({ROW}{smem}, {ROW}{CHIP}, u32[]{{:S(2)}}) copy-start(%a)"
    )
    assert costs.traffic(*last(module)) == 0
