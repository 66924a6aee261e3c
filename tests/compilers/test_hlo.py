"""The text of compiled HLO as data. The lines are excerpts of what the TPU and the GPU compiler print."""

import itertools
import re
from collections import defaultdict

import pytest
from hlo_text import entry, parse

from weft.compilers.hlo import Array, parse_arrays

pytestmark = pytest.mark.nodevice


def only(text):
    """The only instruction of a computation with this line."""
    (instruction,) = entry(text).entry.instructions
    return instruction


# -- Arrays


@pytest.mark.parametrize(
    "text, array",
    [
        ("f32[]", Array("f32", ())),
        ("f32[8,256]{1,0}", Array("f32", (8, 256), (1, 0))),
        ("bf16[4,12,64]{2,0,1:T(8,128)(2,1)S(1)}", Array("bf16", (4, 12, 64), (2, 0, 1), (8, 128), 1)),
        ("f32[768]{0:T(1024)}", Array("f32", (768,), (0,), (1024,))),
        ("u32[]{:S(2)}", Array("u32", (), space=2)),
        ("f32[]{:T(128)}", Array("f32", (), tile=(128,))),
        ("s4[16]{0:T(1024)(128)(8,1)E(4)S(5)}", Array("s4", (16,), (0,), (1024,), 5, 4)),
        ("s32[<=8,2]{1,0}", Array("s32", (8, 2), (1, 0))),
        ("f8e4m3fn[2,3]{1,0}", Array("f8e4m3fn", (2, 3), (1, 0))),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_type_is_parsed(text, array):
    assert parse_arrays(text) == (array,)


@pytest.mark.parametrize(
    "dtype, bits",
    [
        ("pred", 8), ("s4", 4), ("u8", 8), ("bf16", 16), ("f16", 16), ("f32", 32), ("s64", 64), ("c64", 64),
        ("c128", 128), ("f8e4m3fn", 8), ("f8e5m2", 8), ("f8e8m0fnu", 8), ("f4e2m1fn", 4), ("token", 0),
    ],
)  # fmt: skip
def test_elements_have_the_bits_of_their_dtype(dtype, bits):
    assert Array(dtype, ()).bits == bits


def padded_by_tiling(shape, order, tile):
    """The elements of all tiles that an array touches, counted tile by tile."""
    physical = [shape[d] for d in reversed(order)]  # the major-most dim first
    physical = [1] * (len(tile) - len(physical)) + physical
    steps = [1] * (len(physical) - len(tile)) + list(tile)
    tiles = itertools.product(*(range(0, size, step) for size, step in zip(physical, steps, strict=True)))
    count = 1
    for step in steps:
        count *= step
    return sum(count for _ in tiles)


@pytest.mark.parametrize(
    "text",
    [
        "f32[16,256]{1,0:T(8,128)}",
        "f32[17,200]{1,0:T(8,128)}",
        "f32[17,200]{0,1:T(8,128)}",
        "f32[3,5,7]{0,2,1:T(8,128)}",
        "f32[12,48]{1,0:T(8,128)}",
        "f32[1,2]{1,0:T(1,128)}",
        "f32[48]{0:T(1,128)}",
        "f32[1000]{0:T(256)}",
        "f32[]{:T(128)}",
        "f32[2,3,5]{2,1,0}",
    ],
)
def test_tiles_are_full_in_memory(text):
    (array,) = parse_arrays(text)
    order = array.order
    assert array.padded_bytes == 4 * padded_by_tiling(array.shape, order, array.tile)
    elements = 1
    for size in array.shape:
        elements *= size
    assert array.bytes == 4 * elements <= array.padded_bytes


def test_padding_worked_out_by_hand():
    # 1600 / 64 heads of 25: rows of 25 are padded to 128, so the array takes 5.12 times its elements.
    (array,) = parse_arrays("f32[48,1600,64,25]{3,2,1,0:T(8,128)}")
    assert array.padded_bytes == array.bytes * 128 // 25
    (array,) = parse_arrays("bf16[3,100]{1,0:T(4,128)(2,1)}")
    assert (array.bytes, array.padded_bytes) == (600, 4 * 128 * 2)
    (array,) = parse_arrays("s4[3,100]{1,0:T(8,128)(8,1)E(4)}")
    assert (array.bytes, array.padded_bytes) == (150, 8 * 128 // 2)
    (array,) = parse_arrays("pred[100]{0:T(128)E(32)}")
    assert (array.bytes, array.padded_bytes) == (100, 128 * 4)


@pytest.mark.parametrize(
    "space, main, chip", [(0, True, False), (1, False, True), (5, False, False), (6, False, True)]
)
def test_memory_spaces(space, main, chip):
    (array,) = parse_arrays(f"f32[8,128]{{1,0:T(8,128)S({space})}}")
    assert array.memory_bytes == (4096 if main else 0)
    assert array.is_on_chip == chip
    assert array.padded_bytes == 4096
    assert str(array) == "f32[8,128]"


# -- Instructions


def test_an_instruction_has_its_parts():
    one = only(
        "%fusion.22 = f32[16,256]{1,0:T(8,128)S(1)} fusion(%param.3, %copy-done.1), kind=kOutput, "
        'calls=%fused_computation.23, metadata={op_name="jit(step)/dot_general" stack_frame_id=7}'
    )
    assert (one.name, one.opcode, one.operands) == ("fusion.22", "fusion", ("param.3", "copy-done.1"))
    assert one.arrays == (Array("f32", (16, 256), (1, 0), (8, 128), 1),)
    assert one.bytes == 16 * 256 * 4
    assert one.is_root
    assert one.attribute("calls") == "fused_computation.23" and one.attribute("kind") == "kOutput"
    assert one.attribute("to_apply") == ""
    assert (one.op_name, one.stack_frame) == ("jit(step)/dot_general", 7)


def test_a_tuple_has_comments_and_nested_tuples():
    one = only(
        "%all-gather-start = ((bf16[48]{0}, bf16[48,12]{1,0}), (bf16[768]{0}, bf16[768,12]{1,0}), "
        "u32[], u32[], s32[2]{0:S(4)}, /*index=5*/u32[]{:S(2)}) "
        "all-gather-start(%bitcast.11.0, /*index=5*/%bitcast.12.0), channel_id=1, dimensions={0}"
    )
    assert one.opcode == "all-gather-start"
    assert [array.shape for array in one.arrays] == [(48,), (48, 12), (768,), (768, 12), (), (), (2,), ()]
    assert one.operands == ("bitcast.11.0", "bitcast.12.0")
    assert one.listed("dimensions") == ["0"]


def test_operands_with_types_are_parsed():
    one = only("%add.1 = f32[4]{0} add(f32[4]{0} %a, f32[4]{0} %b.2)")
    assert one.operands == ("a", "b.2")


@pytest.mark.parametrize(
    "text, argument",
    [
        ("%p = f32[2]{0} parameter(12)", "12"),
        ("%c = s32[] constant(-3)", "-3"),
        ("%c = f32[2,2]{1,0} constant({ { 0, 1 }, { 2, 3 } })", "{ { 0, 1 }, { 2, 3 } }"),
        ("%c = f32[4096]{0} constant({...})", "{...}"),
    ],
)
def test_the_argument_of_a_constant_and_of_a_parameter(text, argument):
    assert only(text).argument == argument


def test_attributes_in_braces():
    one = only(
        "%conditional.3 = f32[] conditional(%index, %a, %b), branch_computations={%zero.1, %one.2}, "
        "control-predecessors={}"
    )
    assert one.listed("branch_computations") == ["zero.1", "one.2"]
    assert one.listed("control-predecessors") == [] == one.listed("dimensions")


@pytest.mark.parametrize(
    "escaped, name",
    [
        (r"einsum[a,b \302\267 b,c \342\206\222 a,c]/dot_general", "einsum[a,b · b,c → a,c]/dot_general"),
        (r"args[\'x\']", "args['x']"),
        (r"scope \"quoted\"/add", 'scope "quoted"/add'),
        (r"back\\302slash", r"back\302slash"),
        (r"two\nlines\tand a tab", "two\nlines\tand a tab"),
        ('already · decoded → text, \\"quoted\\"', 'already · decoded → text, "quoted"'),
        (r"no UTF-8: \377", "no UTF-8: \N{REPLACEMENT CHARACTER}"),
        ("plain", "plain"),
    ],
)
def test_names_are_unescaped(escaped, name):
    one = only(f'%add.1 = f32[] add(%a, %b), metadata={{op_name="{escaped}" stack_frame_id=3}}')
    assert one.op_name == name
    assert one.stack_frame == 3


def test_an_instruction_without_metadata():
    one = only("%add.1 = f32[] add(%a, %b)")
    assert (one.op_name, one.stack_frame, one.config) == ("", 0, {})


@pytest.mark.parametrize(
    "text, config",
    [
        ('backend_config={"a":{"b":["}{",1]}}', {"a": {"b": ["}{", 1]}}),
        ('backend_config={"n":"6"}, control-predecessors={%x}', {"n": "6"}),
        ('backend_config="opaque text"', {}),
        ("backend_config={broken", {}),
    ],
)
def test_the_configuration_is_json(text, config):
    assert only(f"%c = f32[] custom-call(%a), {text}").config == config


# -- Groups


def collective(attributes, opcode="all-reduce"):
    return only(f"%c = f32[4]{{0}} {opcode}(%a), channel_id=1, {attributes}, use_global_device_ids=true")


@pytest.mark.parametrize(
    "text, groups",
    [
        ("replica_groups={{0,1},{2,3}}", [(0, 1), (2, 3)]),
        ("replica_groups={{0,2,4,6}}", [(0, 2, 4, 6)]),
        ("replica_groups={{5}}", [(5,)]),
        ("replica_groups={}", [tuple(range(8))]),
        ("replica_groups={}, to_apply=%add, frontend_attributes={x={{1,2}}}", [tuple(range(8))]),
        ("dimensions={0}", [tuple(range(8))]),
        ("replica_groups=[2,4]<=[8]", [(0, 1, 2, 3), (4, 5, 6, 7)]),
        ("replica_groups=[1,8]<=[8]", [tuple(range(8))]),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", [(0, 4), (1, 5), (2, 6), (3, 7)]),
        # Ids 0 to 7 in 2 x 2 x 2, the middle axis last: 0 1 4 5 with 2 3 6 7 next to them.
        ("replica_groups=[4,2]<=[2,2,2]T(0,2,1)", [(0, 2), (1, 3), (4, 6), (5, 7)]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_groups(text, groups):
    assert collective(text).groups(8) == groups


MESHES = {
    "mesh['axis_0'=2,'axis_1'=4]": (range(8), (2, 4)),
    "mesh['a'=2,'b'=2,'c'=2]": (range(8), (2, 2, 2)),
    "mesh['a'=2,'b'=1,'c'=4]": (range(8), (2, 1, 4)),
    "mesh['x'=2,'y'=4], device_ids=(0,2,4,6,1,3,5,7)": ((0, 2, 4, 6, 1, 3, 5, 7), (2, 4)),
    # 0 to 7 in 4 x 2, transposed.
    "mesh['x'=2,'y'=4], device_ids=([4,2]T(1,0))": ((0, 2, 4, 6, 1, 3, 5, 7), (2, 4)),
}


@pytest.mark.parametrize("mesh", MESHES)
def test_groups_over_axes_of_a_mesh(mesh):
    """Two devices are in one group if they are at the same positions of all other axes."""
    devices, sizes = MESHES[mesh]
    positions = dict(zip(devices, itertools.product(*map(range, sizes)), strict=True))
    names = re.findall(r"'(\w+)'=", mesh)
    for count in range(1, len(names) + 1):
        for grouped in itertools.permutations(range(len(names)), count):
            axes = ",".join(f"'{names[n]}'" for n in grouped)
            expected = defaultdict(set)
            for device, position in positions.items():
                expected[tuple(p for n, p in enumerate(position) if n not in grouped)].add(device)
            found = collective(f"replica_groups={mesh} {{{axes}}}").groups(8)
            assert {frozenset(group) for group in found} == {frozenset(group) for group in expected.values()}
            assert sorted(itertools.chain(*found)) == [*range(8)]


@pytest.mark.parametrize(
    "axes, groups",
    [
        # Of 8 positions (i, j, k) of 2 each: the first, the middle and the last.
        ("'x':(1)2", [(0, 4), (1, 5), (2, 6), (3, 7)]),
        ("'x':(2)2", [(0, 2), (1, 3), (4, 6), (5, 7)]),
        ("'x':(4)2", [(0, 1), (2, 3), (4, 5), (6, 7)]),
        ("'x':(2)4", [(0, 1, 2, 3), (4, 5, 6, 7)]),
        ("'x':(1)2,'x':(4)2", [(0, 1, 4, 5), (2, 3, 6, 7)]),
        ("'x'", [(0, 1, 2, 3, 4, 5, 6, 7)]),
    ],
)
def test_groups_over_a_part_of_an_axis(axes, groups):
    assert sorted(collective(f"replica_groups=mesh['x'=8] {{{axes}}}").groups(8)) == groups


def test_the_pairs_of_a_permute():
    ring = collective("source_target_pairs={{0,1},{1,2},{2,3},{3,0}}", "collective-permute")
    assert ring.groups(4) == [(0, 1), (1, 2), (2, 3), (3, 0)]
    assert collective("source_target_pairs={}", "collective-permute").groups(4) == []


# -- Modules

MODULE = """
ENTRY %main.9 (x.1: f32[4]) -> (f32[4], f32[]) {
  %x.1 = f32[4]{0} parameter(0), metadata={op_name="args[0]"}
  %fusion = f32[4]{0} fusion(%x.1, %x.1), kind=kLoop, calls=%fused
  %reduce.2 = f32[] reduce(%fusion, %zero), dimensions={0}, to_apply=%add
  ROOT %tuple.3 = (f32[4]{0}, f32[]) tuple(%fusion, %reduce.2)
}
"""
FUSED = """
%fused (p.0: f32[4], p.1: f32[4]) -> f32[4] {
  %p.1 = f32[4]{0} parameter(1)
  %p.0 = f32[4]{0} parameter(0)
  ROOT %inner = f32[4]{0} fusion(%p.0, %p.1), kind=kLoop, calls=%nested
}
"""
NESTED = """
%nested (q.0: f32[4], q.1: f32[4]) -> f32[4] {
  %q.0 = f32[4]{0} parameter(0)
  %q.1 = f32[4]{0} parameter(1)
  ROOT %multiply.7 = f32[4]{0} multiply(%q.0, %q.1)
}, execution_thread="sparsecore"
"""
ADD = """
%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %add.0 = f32[] add(%a, %b)
}
"""


def test_a_module_has_its_computations_in_order():
    module = parse(MODULE, ADD, NESTED, FUSED, header=", num_partitions=16")
    assert [*module.computations] == ["add", "nested", "fused", "main.9"]
    assert (module.entry.name, module.devices) == ("main.9", 16)
    assert [one.name for one in module.entry.instructions] == ["x.1", "fusion", "reduce.2", "tuple.3"]
    assert module.entry.root.name == "tuple.3"
    assert {n: one.name for n, one in module.computations["fused"].parameters.items()} == {0: "p.0", 1: "p.1"}
    users = module.entry.users
    assert [one.name for one in users["fusion"]] == ["reduce.2", "tuple.3"]
    assert [one.name for one in users["x.1"]] == ["fusion"]  # once, although it is two operands
    fusion = module.entry.by_name["fusion"]
    assert module.entry.operand_arrays(fusion, 1) == (Array("f32", (4,), (0,)),)
    assert module.entry.operand_arrays(fusion, 2) == ()
    assert module.entry.operand_arrays(module.entry.by_name["reduce.2"], 1) == ()  # not in this computation


def test_fusions_are_looked_into():
    module = parse(MODULE, ADD, NESTED, FUSED)
    inside = [(where.name, one.opcode) for where, one in module.fused(module.entry.by_name["fusion"])]
    assert inside == [
        ("fused", "parameter"),
        ("fused", "parameter"),
        ("fused", "fusion"),
        ("nested", "parameter"),
        ("nested", "parameter"),
        ("nested", "multiply"),
    ]


def test_what_a_reduction_applies_is_not_fused():
    module = parse(MODULE, ADD, NESTED, FUSED)
    reduce = module.entry.by_name["reduce.2"]
    assert module.called(reduce) is None and [*module.fused(reduce)] == []


def test_one_partition_by_default():
    module = parse(MODULE, ADD, NESTED, FUSED)
    assert (module.devices, module.aliases) == (1, "")


def test_a_long_header():
    """Large programs have thousands of arguments, whose types come before the number of partitions."""
    types = ", ".join(["f32[1024,4096]{1,0:T(8,128)}"] * 10_000)
    header = (
        ", input_output_alias={ {}: (1, {}, may-alias), {1, 0}: (0, {2}, must-alias) }, "
        f"entry_computation_layout={{({types})->f32[]}}, num_partitions=512"
    )
    module = parse(MODULE, ADD, NESTED, FUSED, header=header)
    assert module.devices == 512
    assert module.aliases == "{}: (1, {}, may-alias), {1, 0}: (0, {2}, must-alias)"


def test_a_text_without_entry_is_an_error():
    with pytest.raises(ValueError, match="no ENTRY computation"):
        parse(ADD)


def test_loops_are_found_by_their_computations():
    module = parse(
        """
        ENTRY %main (x: (s32[])) -> (s32[]) {
          %x = (s32[]) parameter(0)
          ROOT %while.1 = (s32[]) while(%x), condition=%test.1, body=%step.2
        }
        """
    )
    loop = module.entry.root
    assert module.loops == {"test.1": (module.entry, loop), "step.2": (module.entry, loop)}


# -- Source lines

TABLES = """
FileNames
1 "/venv/lib/python3.11/site-packages/jax/_src/api.py"
2 "{package}core/op.py"
3 "/home/j\\303\\266rg/train.py"

FunctionNames
1 "<module>"
2 "call"

FileLocations
1 {{file_name_id=3 function_name_id=1 line=12 end_line=12 column=4 end_column=9}}
2 {{file_name_id=3 function_name_id=2 line=34 end_line=35 column=4 end_column=9}}
3 {{file_name_id=2 function_name_id=2 line=56 end_line=56 column=4 end_column=9}}
4 {{file_name_id=1 function_name_id=2 line=78 end_line=78 column=4 end_column=9}}

StackFrames
1 {{file_location_id=1 parent_frame_id=1}}
2 {{file_location_id=2 parent_frame_id=2}}
3 {{file_location_id=3 parent_frame_id=3}}
4 {{file_location_id=4 parent_frame_id=4}}
5 {{file_location_id=4 parent_frame_id=1}}
"""


def test_an_instruction_comes_from_the_users_innermost_line():
    """Frame 4 is in JAX, called by 3 in Weft, called by 2 in the user's function, called by 1. The text refers
    to the calling frame by its number plus one."""
    from weft.core.errors import PACKAGE

    lines = "\n".join(
        f"  {'ROOT ' if n == 9 else ''}%add.{n} = f32[] add(%a, %b), metadata={{stack_frame_id={n}}}"
        for n in range(1, 10)
    )
    module = parse(f"ENTRY %main () -> f32[] {{\n{lines}\n}}", tables=TABLES.format(package=PACKAGE))
    sources = [module.source(one).replace("\\", "/") for one in module.entry.instructions]
    assert [source.rpartition("/")[2] for source in sources] == [
        "train.py:12",
        "train.py:34",
        "train.py:34",
        "train.py:34",
        "",  # JAX's own, without a caller
        "",  # frames that are not in the table
        "",
        "",
        "",
    ]
    assert "jörg" in sources[0]
