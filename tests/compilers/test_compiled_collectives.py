"""The collectives of a compiled program: axes, bytes, names, and when they end."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hlo_text import parse

from weft.compilers.collectives import describing_name, find_collectives, group_axes, operand_bytes
from weft.compilers.hlo import parse_hlo
from weft.compilers.op_names import REQUESTED, merged_names, parse_op_name
from weft.compilers.schedule import read_schedule
from weft.core.mesh import Mesh

pytestmark = pytest.mark.nodevice

ADD = """
%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}
"""


def collectives(*lines, others=()):
    """The collectives of an ENTRY computation with these instructions; the last one is the root."""
    body = "\n".join(f"  {'ROOT ' if line == lines[-1] else ''}{line}" for line in lines)
    module = parse(f"ENTRY %main () -> f32[] {{\n{body}\n}}", *others, ADD)
    return [*find_collectives(read_schedule(module))]


def collective(*lines, others=()):
    (found,) = collectives(*lines, others=others)
    return found


def name(text, frame=0):
    return f'metadata={{op_name="{text}" stack_frame_id={frame}}}'


# -- Axes

MESH = Mesh("pod=2 data=3 model=4")


def groups_over(mesh, axes):
    """The devices that differ in these axes only, as HLO lists them."""
    ids = np.arange(mesh.size).reshape([size for _, size in mesh.axes])
    at = [n for n, name in enumerate(mesh.names) if name in axes]
    ordered = np.moveaxis(ids, at, range(-len(at), 0)).reshape(-1, mesh.ways(axes))
    return "{" + ",".join("{" + ",".join(map(str, row)) + "}" for row in ordered) + "}"


SUBSETS = [s for n in (1, 2, 3) for s in itertools.combinations(MESH.names, n)]


@pytest.mark.parametrize("axes", SUBSETS, ids="+".join)
def test_the_axes_of_groups(axes):
    found = collective(
        "%a = f32[8] parameter(0)",
        f"%r = f32[8] all-reduce(%a), replica_groups={groups_over(MESH, axes)}, to_apply=%add",
    )
    assert group_axes(found, MESH) == (axes, MESH.ways(axes))


@pytest.mark.parametrize(
    "groups, axes, members",
    [
        ("[6,4]<=[24]", ("model",), 4),
        ("[12,2]<=[2,12]T(1,0)", ("pod",), 2),
        ("[8,3]<=[2,3,4]T(0,2,1)", ("data",), 3),
        ("[4,6]<=[6,4]T(1,0)", ("pod", "data"), 6),
        ("[1,24]<=[24]", ("pod", "data", "model"), 24),
        ("{}", ("pod", "data", "model"), 24),
        ("[24,1]<=[24]", (), 1),
        ("[12,2]<=[24]", ("model",), 2),  # pairs within an axis
        ("mesh['axis_0'=2,'axis_1'=3,'axis_2'=4] {'axis_2'}", ("model",), 4),
        ("mesh['axis_0'=6,'axis_1'=4] {'axis_0'}", ("pod", "data"), 6),
    ],
)
def test_the_axes_of_groups_in_iota_form(groups, axes, members):
    found = collective(
        "%a = f32[8] parameter(0)", f"%r = f32[8] all-reduce(%a), replica_groups={groups}, to_apply=%add"
    )
    assert group_axes(found, MESH) == (axes, members)


def test_the_axes_of_a_sum_that_xla_adds():
    """A matmul with a split contracted dim, by XLA's partitioner, which names the axes of a mesh of its own."""
    devices = np.array(jax.devices()[:8]).reshape(2, 4)
    mesh = jax.sharding.Mesh(devices, ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def split(shape, *axes):
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*axes))
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)

    function = jax.jit(lambda x, w: (x @ w).sum(0))
    compiled = function.lower(split((16, 32), "data", "model"), split((32, 8), "model")).compile()
    found = [*find_collectives(read_schedule(parse_hlo(compiled.as_text())))]
    axes = [group_axes(one, Mesh("data=2 model=4")) for one in found]
    assert axes == [(("model",), 4), (("data",), 2)]
    assert [operand_bytes(one, members)[0] for one, (_, members) in zip(found, axes, strict=True)] == [
        8 * 8 * 4,
        8 * 4,
    ]


def ring(mesh, axes):
    """Each device sends to the next one along some axes, which are flattened; the last one sends to none."""
    groups = [row.split(",") for row in groups_over(mesh, axes)[2:-2].split("},{")]
    pairs = (pair for group in groups for pair in itertools.pairwise(group))
    return "{" + ",".join(f"{{{a},{b}}}" for a, b in pairs) + "}"


@pytest.mark.parametrize("axes", SUBSETS, ids="+".join)
def test_the_axes_of_a_permute(axes):
    found = collective(
        "%a = f32[8] parameter(0)",
        f"%r = f32[8] collective-permute(%a), source_target_pairs={ring(MESH, axes)}",
    )
    assert found.kind == "permute"
    assert group_axes(found, MESH) == (axes, MESH.ways(axes))


def test_a_permute_without_pairs_and_a_mesh_without_axes():
    found = collective(
        "%a = f32[8] parameter(0)", "%r = f32[8] collective-permute(%a), source_target_pairs={}"
    )
    assert group_axes(found, MESH) == ((), 1)
    found = collective(
        "%a = f32[8] parameter(0)", "%r = f32[8] all-reduce(%a), replica_groups={{0}}, to_apply=%add"
    )
    assert group_axes(found, Mesh()) == ((), 1)


# -- Bytes

# Four devices each have 1024 bytes of the operand.
KINDS = [
    ("f32[256] all-reduce(%a), replica_groups={{0,1,2,3}}, to_apply=%add", "all-reduce", 1024),
    ("f32[1024] all-gather(%a), replica_groups={{0,1,2,3}}, dimensions={0}", "all-gather", 4096),
    (
        "f32[64] reduce-scatter(%a), replica_groups={{0,1,2,3}}, dimensions={0}, to_apply=%add",
        "reduce-scatter",
        1024,
    ),
    ("f32[256] all-to-all(%a), replica_groups={{0,1,2,3}}, dimensions={0}", "all-to-all", 1024),
    ("f32[256] collective-permute(%a), source_target_pairs={{0,1},{1,2},{2,3}}", "permute", 1024),
    ("f32[256] collective-broadcast(%a), replica_groups={{0,1,2,3}}", "permute", 1024),
    ("f32[512] ragged-all-to-all(%a, %out, %s, %s, %s, %s), replica_groups={{0,1,2,3}}", "all-to-all", 1024),
]


@pytest.mark.parametrize(
    "text, kind, size", KINDS, ids=lambda v: v.split()[1].partition("(")[0] if " " in str(v) else ""
)
def test_the_bytes_of_each_kind(text, kind, size):
    found = collective(
        "%a = f32[256] parameter(0)",
        "%out = f32[512] parameter(1)",
        "%s = s32[4] parameter(2)",
        f"%r = {text}",
    )
    _, members = group_axes(found, Mesh("model=4"))
    assert found.kind == kind
    assert operand_bytes(found, members) == (size, [size])


def test_the_bytes_of_starts():
    """Their types have the operands, too, and are not what is counted."""
    groups = "replica_groups={{0,1,2,3}}"
    for text, size in [
        (f"f32[256] all-reduce-start(%a), {groups}, to_apply=%add", 1024),
        (f"(f32[256], f32[1024]) all-gather-start(%a), {groups}, dimensions={{0}}", 4096),
        (f"((f32[256]), f32[64]) reduce-scatter-start(%a), {groups}, dimensions={{0}}, to_apply=%add", 1024),
        (
            "(f32[256], f32[256], u32[], u32[]) collective-permute-start(%a), source_target_pairs={{0,1},{1,0}}",
            1024,
        ),
    ]:
        found = collective("%a = f32[256] parameter(0)", f"%r = {text}")
        assert operand_bytes(found, 4)[0] == size


def test_the_bytes_of_merged_collectives():
    found = collective(
        "%a = f32[256]{0:T(256)} parameter(0)",
        "%b = bf16[3,100]{1,0:T(8,128)(2,1)} parameter(1)",
        "%c = f32[]{:T(128)} parameter(2)",
        "%r = (f32[1024], bf16[12,100], f32[4]) all-gather(%a, %b, %c), replica_groups={{0,1,2,3}}, dimensions={0}",
    )
    # Without the padding of tiles, as in a plan.
    assert operand_bytes(found, 4) == (4 * (1024 + 600 + 4), [4096, 2400, 16])


# -- Pairs of a start and a done

ASYNC = [
    "%a = f32[8] parameter(0)",
    "%start = f32[8] all-reduce-start(%a), replica_groups={{0,1}}, to_apply=%add",
    "%work.0 = f32[8] negate(%a)",
    "%work.1 = f32[8] exponential(%a)",
    "%done = f32[8] all-reduce-done(%start)",
    "%r = f32[8] add(%done, %work.1)",
]


def test_a_pair_ends_where_it_is_waited_for():
    found = collective(*ASYNC)
    assert (found.step.position, found.ends) == (1, 4)
    assert found.instruction.name == "start"


@pytest.mark.parametrize(
    "config, ends",
    [
        ('{"collective_backend_config":{"is_sync":true,"backend":"DEFAULT"}}', 1),
        ('{"collective_backend_config":{"is_sync":false}}', 4),
        ('{"collective_backend_config":{}}', 4),
    ],
    ids=["sync", "async", "not stated"],
)
def test_a_pair_on_the_stream_of_other_work_is_synchronous(config, ends):
    lines = [line.replace("to_apply=%add", f"to_apply=%add, backend_config={config}") for line in ASYNC]
    assert collective(*lines).ends == ends


def test_pairs_may_be_interleaved_and_have_updates():
    found = collectives(
        "%a = f32[8] parameter(0)",
        "%s.0 = ((f32[8]), f32[8], u32[]) all-to-all-start(%a), replica_groups={{0,1}}, dimensions={0}",
        "%s.1 = (f32[8], f32[8]) collective-permute-start(%a), source_target_pairs={{0,1}}",
        "%u.0 = ((f32[8]), f32[8], u32[]) all-to-all-update(%s.0)",
        "%d.1 = f32[8] collective-permute-done(%s.1)",
        "%d.0 = f32[8] all-to-all-done(%u.0)",
        "%r = f32[8] add(%d.0, %d.1)",
    )
    assert [(one.kind, one.step.position, one.ends) for one in found] == [
        ("all-to-all", 1, 5),
        ("permute", 2, 4),
    ]


def test_a_synchronous_collective_ends_where_it_starts():
    found = collective(
        "%a = f32[8] parameter(0)",
        "%r = f32[8] all-reduce(%a), replica_groups={{0,1}}, to_apply=%add",
    )
    assert found.step.position == found.ends == 1


# -- Fused collectives, and chains


def gather(n, chain="", operand="%p"):
    mark = f', frontend_attributes={{chain_id="{chain}"}}' if chain else ""
    return (
        f"%gather.{n} = f32[4,8] all-gather({operand}), replica_groups={{{{0,1,2,3}}}}, dimensions={{0}}{mark}, "
        + name("jvp(take[vocab,d_model · batch] in embedding)/all_gather", n)
    )


def fused(computation, *lines):
    body = "\n".join(f"  {'ROOT ' if line == lines[-1] else ''}{line}" for line in lines)
    return f"%{computation} (p: f32[1,8]) -> f32[4,8] {{\n  %p = f32[1,8] parameter(0)\n{body}\n}}"


def call(n, computation, operand="a"):
    return f"%fusion.{n} = f32[4,8] fusion(%{operand}), kind=kCustom, calls=%{computation}"


def test_a_fused_collective():
    found = collective(
        "%a = f32[1,8] parameter(0)",
        call(0, "outer"),
        others=[
            fused("outer", "%nested = f32[4,8] fusion(%p), kind=kCustom, calls=%inner"),
            fused("inner", gather(0), "%negate = f32[4,8] negate(%gather.0)"),
        ],
    )
    assert (found.kind, found.inside.name, found.instruction.name) == ("all-gather", "inner", "gather.0")
    assert (found.step.instruction.name, found.step.position, found.ends) == ("fusion.0", 1, 1)
    assert operand_bytes(found, 4) == (4 * 32, [4 * 32])


def test_a_sum_and_its_slice_in_one_fusion_are_a_reduce_scatter():
    """The TPU compiler's form: `calls=%all-reduce-scatter.3`."""

    def sum_of(computation):
        return collective(
            "%a = f32[1,8] parameter(0)",
            f"%fusion.0 = f32[1,2] fusion(%a), kind=kCustom, calls=%{computation}",
            others=[
                fused(
                    computation,
                    "%all = f32[1,8] all-reduce(%p), replica_groups={{0,1,2,3}}, to_apply=%add",
                    "%id = u32[] partition-id()",
                    "%slice = f32[1,2] dynamic-slice(%all, %id, %id), dynamic_slice_sizes={1,2}",
                )
            ],
        )

    found = sum_of("all-reduce-scatter.3")
    assert (found.kind, operand_bytes(found, 4)[0]) == ("reduce-scatter", 32)
    assert sum_of("fused_computation.3").kind == "all-reduce"


CHAINS = [
    fused(
        "start.0",
        gather(0, "0"),
        '%s.0 = f32[4,8] custom-call(%gather.0), custom_call_target="AsyncCollectiveStart"',
    ),
    fused("step.0", gather(1, "0"), "%work.0 = f32[4,8] negate(%gather.1)"),
    fused(
        "done.0",
        gather(2, "0"),
        '%d.0 = f32[4,8] custom-call(%gather.2), custom_call_target="AsyncCollectiveDone"',
    ),
    fused(
        "start.1",
        gather(3, "1"),
        '%s.1 = f32[4,8] custom-call(%gather.3), custom_call_target="AsyncCollectiveStart"',
    ),
    fused(
        "done.1",
        gather(4, "1"),
        '%d.1 = f32[4,8] custom-call(%gather.4), custom_call_target="AsyncCollectiveDone"',
    ),
    fused("plain", "%exp = f32[4,8] exponential(%p)"),
]
CHAINED = [
    "%a = f32[1,8] parameter(0)",
    call(0, "start.0"),
    call(1, "plain"),
    call(2, "start.1"),
    call(3, "step.0"),
    call(4, "done.1"),
    call(5, "plain"),
    call(6, "done.0"),
    "%last = f32[4,8] negate(%fusion.6)",
]


def test_a_chain_is_one_collective_from_its_first_to_its_last_fusion():
    found = collectives(*CHAINED, others=CHAINS)
    assert [(one.step.position, one.ends) for one in found] == [(1, 7), (3, 5)]
    assert [one.instruction.name for one in found] == ["gather.0", "gather.3"]
    assert [operand_bytes(one, 4)[0] for one in found] == [128, 128]


def test_chains_of_different_computations_have_the_same_numbers():
    """The numbers of chains start again in each computation, and the computation may run again."""
    body = "\n".join(f"  {'ROOT ' if line == CHAINED[-1] else ''}{line}" for line in CHAINED)
    found = collectives(
        *CHAINED[:-1],
        "%first = f32[4,8] call(%a), to_apply=%called",
        "%second = f32[4,8] call(%a), to_apply=%called",
        others=[*CHAINS, f"%called (a: f32[1,8]) -> f32[4,8] {{\n{body}\n}}"],
    )
    assert [(one.step.computation.name, one.step.position) for one in found] == [
        (where, position) for where in ("main", "called", "called") for position in (1, 3)
    ]


def test_collectives_of_a_loop_have_its_count():
    body = """
    %body (state: (s32[], f32[8])) -> (s32[], f32[8]) {
      %state = (s32[], f32[8]) parameter(0)
      %i = s32[] get-tuple-element(%state), index=0
      %one = s32[] constant(1)
      %next = s32[] add(%i, %one)
      %v = f32[8] get-tuple-element(%state), index=1
      %w = f32[8] all-reduce(%v), replica_groups={{0,1}}, to_apply=%add
      ROOT %results = (s32[], f32[8]) tuple(%next, %w)
    }
    """
    condition = """
    %test (state: (s32[], f32[8])) -> pred[] {
      %state = (s32[], f32[8]) parameter(0)
      %i = s32[] get-tuple-element(%state), index=0
      %limit = s32[] constant(12)
      ROOT %less = pred[] compare(%i, %limit), direction=LT
    }
    """
    found = collective(
        "%zero = s32[] constant(0)",
        "%a = f32[8] parameter(0)",
        "%init = (s32[], f32[8]) tuple(%zero, %a)",
        "%loop = (s32[], f32[8]) while(%init), condition=%test, body=%body",
        others=[body, condition],
    )
    assert (found.step.count, found.step.depth) == (12, 1)


# -- Names


def described(found, part=0):
    named = describing_name(found, part)
    scope = parse_op_name(named.op_name)
    return named.op_name, str(scope.op), REQUESTED.get(scope.other, ""), named.stack_frame


OWN = "jit(step)/shard_map/jvp(mean[batch])/psum_invariant"


def test_a_collective_has_its_own_name():
    found = collective(
        "%a = f32[8] parameter(0)",
        f"%r = f32[8] all-reduce(%a), replica_groups={{{{0,1}}}}, to_apply=%add, {name(OWN, 5)}",
    )
    assert describing_name(found, 0) is found.instruction
    assert described(found) == (OWN, "mean[batch]", "all-reduce", 5)


def test_the_parts_of_a_merged_collective_have_names():
    """Its own name is that of its first part."""
    lines = [
        "%a = f32[8] parameter(0)",
        "%b = f32[64] parameter(1)",
        "%all = (f32[8], f32[64]) all-reduce(%a, %b), replica_groups={{0,1}}, to_apply=%add, " + name(OWN, 5),
        "%first = f32[8] get-tuple-element(%all), index=0, " + name(OWN, 5),
        "%second = f32[64] get-tuple-element(%all), index=1, "
        + name("jit(step)/shard_map/optimizer[d_ff]/gradient[d_ff]/psum", 6),
        "%use = f32[64] negate(%second), " + name("jit(step)/shard_map/optimizer[d_ff]/neg", 7),
    ]
    found = collective(*lines)
    assert described(found, 0) == (OWN, "mean[batch]", "all-reduce", 5)
    assert described(found, 1)[1:] == ("gradient[d_ff]", "all-reduce", 6)
    # The same after a done, whose name is that of the start.
    lines[2] = lines[2].replace("%all =", "%start =").replace("all-reduce(", "all-reduce-start(")
    lines.insert(3, "%all = (f32[8], f32[64]) all-reduce-done(%start), " + name(OWN, 5))
    found = collective(*lines)
    assert described(found, 1)[1:] == ("gradient[d_ff]", "all-reduce", 6)


def test_arrays_that_are_merged_into_one_are_named_by_the_largest_slice():
    """The GPU compiler concatenates the operands of sums, and takes the result apart."""
    found = collective(
        "%a = f32[72] parameter(0)",
        "%start = f32[72] all-reduce-start(%a), replica_groups={{0,1}}, to_apply=%add",
        "%done = f32[72] all-reduce-done(%start)",
        "%wrapped_slice = f32[8] fusion(%done), kind=kLoop, calls=%slice, " + name(OWN, 5),
        "%other = f32[64] slice(%done), slice={[8:72]}",
        "%view = f32[8,8] bitcast(%other), " + name("optimizer[d_ff]/gradient[d_ff]/psum", 6),
        "%use = f32[8,8] negate(%view), " + name("optimizer[d_ff]/neg", 7),
    )
    assert described(found)[1:] == ("gradient[d_ff]", "all-reduce", 6)


@pytest.mark.parametrize(
    "kind, expected",
    [
        # What is summed. Its own primitive is no collective.
        ("all-reduce", ("transpose(jvp(einsum[a · a,b → b] in feed.wide))", "einsum[a · a,b → b]", "", 3)),
        # What uses the result.
        ("all-gather", ("optimizer[d_ff]/sub", "optimizer[d_ff]", "", 7)),
    ],
)
def test_a_collective_without_a_name(kind, expected):
    """As of a reduce-scatter that the compiler replaced by an all-reduce and a slice."""
    found = collective(
        "%p = f32[8] parameter(0), " + name("args[0]"),
        "%dot = f32[8] negate(%p), "
        + name("transpose(jvp(einsum[a · a,b → b] in feed.wide))/dot_general", 3),
        "%start = (f32[8], f32[8], u32[]) copy-start(%dot)",
        "%moved = f32[8] copy-done(%start)",
        f"%all = f32[8] {kind}(%moved), replica_groups={{{{0,1}}}}, dimensions={{0}}, to_apply=%add",
        "%back = f32[8] copy(%all)",
        "%fused = f32[8] fusion(%back), kind=kLoop, calls=%add",
        "%use = f32[8] negate(%fused), " + name("optimizer[d_ff]/sub", 7),
    )
    assert described(found) == expected


def test_a_name_that_xla_cut_off_is_kept():
    found = collective(
        "%dot = f32[8] parameter(0), " + name("optimizer[vocab]/gradient[vocab]", 3),
        "%all = f32[8] all-reduce(%dot), replica_groups={{0,1}}, to_apply=%add",
    )
    assert described(found)[:2] == ("optimizer[vocab]/gradient[vocab]", "gradient[vocab]")


def test_nothing_near_has_a_name():
    found = collective(
        "%p = f32[8] parameter(0), " + name("args[0]"),
        "%all = f32[8] all-reduce(%p), replica_groups={{0,1}}, to_apply=%add",
    )
    assert describing_name(found, 0) is found.instruction


MERGED = (
    "jit(step)/shard_map/(transpose(jvp(take[vocab · batch] in embedding))/reduce_scatter:"
    "transpose(jvp(add[batch · d_model] in decoder.norm))/reduce_scatter)"
)


def test_the_gpu_compiler_merges_names():
    def of(operands, part):
        types = ", ".join(["f32[8]"] * operands)
        found = collective(
            "%a = f32[8] parameter(0)",
            f"%all = (({types}), ({types})) reduce-scatter-start({', '.join(['%a'] * operands)}), "
            f"replica_groups={{{{0,1}}}}, to_apply=%add, {name(MERGED, 9)}",
            f"%done = ({types}) reduce-scatter-done(%all), {name(MERGED, 9)}",
        )
        return described(found, part)[1:]

    assert of(2, 0) == ("take[vocab · batch]", "reduce-scatter", 9)
    assert of(2, 1) == ("add[batch · d_model]", "reduce-scatter", 9)
    assert of(3, 2) == ("take[vocab · batch]", "reduce-scatter", 9)  # which name belongs to it is not known


@pytest.mark.parametrize(
    "merged, names",
    [
        ("jit(step)/mean[batch]/psum", ["jit(step)/mean[batch]/psum"]),
        ("jit(step)/(a/psum:jvp(b)/pmax)", ["jit(step)/a/psum", "jit(step)/jvp(b)/pmax"]),
        ("(a:b)", ["a", "b"]),
        ("x/(a/(b:c)/d:e)", ["x/a/b/d", "x/a/c/d", "x/e"]),
        ("x/(a:b", ["x/a", "x/b"]),  # cut off
        ("x/f(a:b)", ["x/f(a:b)"]),
        ("", [""]),
    ],
)
def test_merged_names_are_taken_apart(merged, names):
    assert merged_names(merged) == names


@pytest.mark.parametrize(
    "text, ops, transforms, primitive",
    [
        ("jit(f)/shard_map/jvp(mean[batch])/reduce_sum", ["mean[batch]"], {"jvp"}, "reduce_sum"),
        (
            "jit(f)/transpose(jvp(pipeline[a] in decoder))/while/body/einsum[a · a,b → b] in decoder.up/dot_general",
            ["pipeline[a]", "einsum[a · a,b → b]"], {"jvp", "transpose"}, "dot_general",
        ),
        ("jit(f)/jvp(mean[a])/mul;transpose(jvp(take[b]))/add", ["mean[a]"], {"jvp"}, "mul"),
        ("jit(f)/transpose(jvp(einsum[a · a,b", [], {"jvp", "transpose"}, ""),
        ("jit(f)/shard_map/optimizer[a]/gradient[a]", ["optimizer[a]", "gradient[a]"], set(), ""),
        ("args[3]", [], set(), ""),
        ("jit(f)/a user's scope/add", [], set(), "add"),
        ("", [], set(), ""),
        (MERGED, ["take[vocab · batch]"], {"jvp", "transpose"}, "reduce_scatter"),
    ],
)  # fmt: skip
def test_the_name_of_an_instruction_has_its_scope(text, ops, transforms, primitive):
    scope = parse_op_name(text)
    assert [str(op) for op in scope.ops] == ops
    assert (scope.transforms, scope.other) == (transforms, primitive)
