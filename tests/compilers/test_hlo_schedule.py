"""The order in which a compiled module runs, and how often."""

import jax
import jax.numpy as jnp
import pytest
from hlo_text import parse
from jax import lax

from weft.compilers.hlo import parse_hlo
from weft.compilers.loops import trip_count
from weft.compilers.schedule import read_schedule

pytestmark = pytest.mark.nodevice


# -- Trip counts


def counter(start="0", test="LT(i, 6)", step="add(i, 1)", known=""):
    """A loop over (i, x) from (start, x), while `test`, with `step` as the next i; x does not change.

    An integer in `test` and `step` stands for a constant, and "x" for the other element of the state.
    """

    def formula(text, opcode):
        name, _, operands = text.removesuffix(")").partition("(")
        operands = operands.split(", ")
        lines = [f"%{o} = s32[]{{:T(128)}} constant({o})" for o in operands if o not in ("i", "x")]
        direction = f", direction={name}" if opcode == "compare" else ""
        made = "pred[]" if opcode == "compare" else "s32[]"
        return lines, f"{made} {opcode or name}({', '.join(f'%{o}' for o in operands)}){direction}"

    def computation(name, made, lines, results):
        state = [f"%{e} = s32[] get-tuple-element(%state), index={n}" for n, e in enumerate("ix")]
        body = ["%state = (s32[], s32[]) parameter(0)", *state, *lines, *results]
        return f"%{name} (state: (s32[], s32[])) -> {made} {{\n  " + "\n  ".join(body) + "\n}"

    tested, compare = formula(test, "compare")
    stepped, following = formula(step, "")
    condition = computation("test", "pred[]", tested, [f"ROOT %compare = {compare}"])
    body = computation(
        "body",
        "(s32[], s32[])",
        stepped,
        [f"%next = {following}", "ROOT %results = (s32[], s32[]) tuple(%next, %x)"],
    )
    first = "s32[] parameter(0)" if start == "data" else f"s32[] constant({start})"
    return parse(
        f"""
        ENTRY %main (p: s32[], x: s32[]) -> (s32[], s32[]) {{
          %first = {first}
          %other = s32[] parameter(1)
          %init = (s32[], s32[]) tuple(%first, %other)
          ROOT %loop = (s32[], s32[]) while(%init), condition=%test, body=%body{known}
        }}
        """,
        condition,
        body,
    )


def trips(module):
    (loop,) = (one for one in module.entry.instructions if one.opcode == "while")
    return trip_count(module, module.entry, loop)


TESTS = {
    "LT": lambda a, b: a < b,
    "LE": lambda a, b: a <= b,
    "GT": lambda a, b: a > b,
    "GE": lambda a, b: a >= b,
    "NE": lambda a, b: a != b,
    "EQ": lambda a, b: a == b,
}


@pytest.mark.parametrize("flipped", [False, True], ids=["counter first", "constant first"])
@pytest.mark.parametrize("direction", TESTS)
@pytest.mark.parametrize("start, limit, step", [
    (0, 6, 1), (3, 11, 1), (0, 7, 2), (1, 8, 3), (0, 8, 2), (6, 6, 1), (7, 6, 1), (6, 0, -1), (9, 0, -4),
    (5, 2, -2), (-4, 4, 2), (2, 9, -1), (0, 5, 0), (3, 3, 0),
])  # fmt: skip
def test_a_counter_runs_as_often_as_it_does_step_by_step(start, limit, step, direction, flipped):
    value, count = start, 0
    while TESTS[direction](*((limit, value) if flipped else (value, limit))) and count < 100:
        value, count = value + step, count + 1
    operands = f"({limit}, i)" if flipped else f"(i, {limit})"
    module = counter(start=str(start), test=direction + operands, step=f"add(i, {step})")
    assert trips(module) == (None if count == 100 else count)


@pytest.mark.parametrize(
    "step, count",
    [
        ("add(1, i)", 6),
        ("add(i, 2)", 3),
        ("add(x, i)", None),
        ("add(x, 1)", None),  # not from the counter
        ("subtract(i, -2)", 3),
        ("subtract(6, i)", None),
        ("multiply(i, 2)", None),
    ],
)
def test_the_step_of_a_counter(step, count):
    assert trips(counter(step=step)) == count


@pytest.mark.parametrize("test", ["LT(i, x)", "LT(x, 6)", "LT(i, i)", "LT(0, 6)"])
def test_a_condition_on_data(test):
    # x stays the same, and is an argument of the program.
    assert trips(counter(test=test)) is None


def test_a_counter_that_starts_at_data():
    assert trips(counter(start="data")) is None


def test_the_stated_number_of_iterations():
    known = ', backend_config={"known_trip_count":{"n":"11"},"known_init_step":{"init":"1","step":"1"}}'
    assert trips(counter(start="data", known=known)) == 11


STATE = "(s32[]{:T(128)}, f32[8]{0:T(128)})"
BODY = f"""
%body.1 (state: {STATE}) -> {STATE} {{
  %state = {STATE} parameter(0)
  %i = s32[]{{:T(128)}} get-tuple-element(%state), index=0
  %x = f32[8]{{0:T(128)}} get-tuple-element(%state), index=1
  %one = s32[]{{:T(128)}} constant(1)
  %next = s32[]{{:T(128)}} add(%i, %one)
  %work = f32[8]{{0:T(128)}} negate(%x)
  ROOT %results = {STATE} tuple(%next, %work)
}}
"""
CONDITION = f"""
%test.1 (state: {STATE}) -> pred[] {{
  %state = {STATE} parameter(0)
  %i = s32[]{{:T(128)}} get-tuple-element(%state), index=0
  %limit = s32[]{{:T(128)}} constant(6)
  ROOT %compare = pred[]{{:T(512)}} compare(%i, %limit), direction=LT
}}
"""
MAIN = f"""
ENTRY %main (x: f32[8]) -> f32[8] {{
  %x = f32[8]{{0:T(128)}} parameter(0)
  %zero = s32[]{{:T(128)}} constant(0)
  %copy.1 = s32[]{{:T(128)S(6)}} copy(%zero)
  %init = {STATE} tuple(%copy.1, %x)
  %loop = {STATE} while(%init), condition=%test.1, body=%body.1
  ROOT %y = f32[8]{{0:T(128)}} get-tuple-element(%loop), index=1
}}
"""
ADD_ONE = """
%fused_add (p.0: s32[], p.1: s32[]) -> s32[] {
  %p.0 = s32[] parameter(0)
  %p.1 = s32[] parameter(1)
  ROOT %add.9 = s32[] add(%p.0, %p.1)
}
"""


def test_a_loop_behind_copies():
    assert trips(parse(MAIN, BODY, CONDITION)) == 6


def test_copies_of_the_counter_in_the_body():
    body = BODY.replace("add(%i, %one)", "add(%moved, %one)").replace(
        "  %one =",
        "  %start = (s32[], s32[], u32[]) copy-start(%i)\n  %moved = s32[] copy-done(%start)\n  %one =",
    )
    body = body.replace("  %work", "  %back = s32[] copy(%next)\n  %work").replace(
        "tuple(%next,", "tuple(%back,"
    )
    assert "%back, %work" in body and "copy-done" in body
    assert trips(parse(MAIN, body, CONDITION)) == 6


def test_a_fused_condition_with_its_constant_inside():
    condition = """
    %test.1 (state: (s32[], f32[8])) -> pred[] {
      %state = (s32[], f32[8]) parameter(0)
      %i = s32[] get-tuple-element(%state), index=0
      ROOT %loop_compare_fusion = pred[] fusion(%i), kind=kLoop, calls=%fused_compare
    }
    """
    fused = """
    %fused_compare (p: s32[]) -> pred[] {
      %p = s32[] parameter(0)
      %limit = s32[] constant(12)
      ROOT %compare = pred[] compare(%p, %limit), direction=LE
    }
    """
    assert trips(parse(MAIN, BODY, condition, fused)) == 13


def test_a_fused_condition_and_step_with_constants_as_operands():
    condition = """
    %test.1 (state: (s32[], f32[8])) -> pred[] {
      %state = (s32[], f32[8]) parameter(0)
      %limit = s32[] constant(2)
      %i = s32[] get-tuple-element(%state), index=0
      ROOT %fusion.1 = pred[] fusion(%limit, %i), kind=kLoop, calls=%fused_compare
    }
    """
    fused = """
    %fused_compare (p.0: s32[], p.1: s32[]) -> pred[] {
      %p.0 = s32[] parameter(0)
      %p.1 = s32[] parameter(1)
      ROOT %compare = pred[] compare(%p.0, %p.1), direction=GT
    }
    """
    body = BODY.replace("add(%i, %one)", "fusion(%i, %one), kind=kLoop, calls=%fused_add")
    assert trips(parse(MAIN, body, condition, fused, ADD_ONE)) == 2


def test_a_step_that_is_one_of_the_results_of_a_fusion():
    fused = """
    %fused_both (p: s32[]) -> (s32[], s32[]) {
      %p = s32[] parameter(0)
      %two = s32[] constant(2)
      %doubled = s32[] multiply(%p, %two)
      %next = s32[] add(%p, %two)
      ROOT %both = (s32[], s32[]) tuple(%doubled, %next)
    }
    """
    body = BODY.replace(
        "%next = s32[]{:T(128)} add(%i, %one)",
        "%both = (s32[], s32[]) fusion(%i), kind=kLoop, calls=%fused_both\n"
        "  %next = s32[] get-tuple-element(%both), index=1",
    )
    assert trips(parse(MAIN, body, CONDITION, fused)) == 3


def test_a_loop_that_also_ends_on_data():
    condition = CONDITION.replace("ROOT %compare", "%compare").replace(
        "direction=LT\n",
        "direction=LT\n  %found = pred[] custom-call(%state)\n  ROOT %both = pred[] and(%compare, %found)\n",
    )
    assert "and(%compare, %found)" in condition
    assert trips(parse(MAIN, BODY, condition)) is None


def test_the_constants_of_inner_loops_may_be_in_the_state_of_outer_loops():
    """The outer loop runs 4 times, and passes 3, the limit of the inner one, and 1, its start, on."""
    outer_state = "(s32[], s32[], s32[])"
    outer_body = f"""
    %outer (state: {outer_state}) -> {outer_state} {{
      %state = {outer_state} parameter(0)
      %i = s32[] get-tuple-element(%state), index=0
      %three = s32[] get-tuple-element(%state), index=1
      %start = s32[] get-tuple-element(%state), index=2
      %init = (s32[], s32[]) tuple(%start, %three)
      %inner_loop = (s32[], s32[]) while(%init), condition=%inner_test, body=%inner
      %one = s32[] constant(1)
      %next = s32[] add(%i, %one)
      %copied = s32[] copy(%three)
      ROOT %results = {outer_state} tuple(%next, %copied, RETURNED)
    }}
    """
    outer_test = f"""
    %outer_test (state: {outer_state}) -> pred[] {{
      %state = {outer_state} parameter(0)
      %i = s32[] get-tuple-element(%state), index=0
      %four = s32[] constant(4)
      ROOT %compare = pred[] compare(%i, %four), direction=LT
    }}
    """
    inner = """
    %inner (state: (s32[], s32[])) -> (s32[], s32[]) {
      %state = (s32[], s32[]) parameter(0)
      %i = s32[] get-tuple-element(%state), index=0
      %limit = s32[] get-tuple-element(%state), index=1
      %one = s32[] constant(1)
      %next = s32[] add(%i, %one)
      %work = f32[2] rng-bit-generator(%i)
      ROOT %results = (s32[], s32[]) tuple(%next, %limit)
    }
    """
    inner_test = """
    %inner_test (state: (s32[], s32[])) -> pred[] {
      %state = (s32[], s32[]) parameter(0)
      %i = s32[] get-tuple-element(%state), index=0
      %limit = s32[] get-tuple-element(%state), index=1
      ROOT %compare = pred[] compare(%i, %limit), direction=NE
    }
    """
    main = f"""
    ENTRY %main () -> {outer_state} {{
      %zero = s32[] constant(0)
      %one = s32[] constant(1)
      %three = s32[] constant(3)
      %init = {outer_state} tuple(%zero, %three, %one)
      ROOT %outer_loop = {outer_state} while(%init), condition=%outer_test, body=%outer
    }}
    """

    def schedule(returned):
        body = outer_body.replace("RETURNED", returned)
        return read_schedule(parse(main, body, outer_test, inner, inner_test))

    (work,) = (step for step in schedule("%start").steps if step.instruction.name == "work")
    assert (work.count, work.depth) == (4 * 2, 2)
    # Now the inner loop starts at 1, 2, 3 and 4.
    changing = schedule("%next")
    assert [loop.name for loop in changing.unbounded] == ["inner_loop"]
    (work,) = (step for step in changing.steps if step.instruction.name == "work")
    assert work.count == 4


def nested(x):
    return lax.fori_loop(0, 3, lambda i, x: lax.scan(lambda c, _: (jnp.sin(c), None), x, length=5)[0], x)


@pytest.mark.parametrize(
    "function, counts",
    [
        (lambda x: lax.scan(lambda c, _: (jnp.sin(c), None), x, length=7)[0], [7]),
        (lambda x: lax.scan(lambda c, y: (jnp.sin(c) + y, c), x, jnp.arange(4.0), reverse=True)[0], [4]),
        (lambda x: lax.fori_loop(2, 11, lambda i, x: jnp.sin(x), x), [9]),
        (nested, [15]),
        (lambda x: lax.while_loop(lambda c: c[0] > 1, lambda c: (c[0] - 3, jnp.sin(c[1])), (10, x)), [3]),
        (lambda x: lax.while_loop(lambda c: c < 10, jnp.sin, x), [1]),
        (lambda x: lax.fori_loop(0, x.astype(int), lambda i, y: jnp.sin(y), x), [1]),
    ],
    ids=["scan", "reverse scan", "fori_loop", "nested", "backwards by 3", "on data", "until data"],
)
def test_loops_of_jax(function, counts):
    """The module is as JAX lowers it, before the compiler: sine marks the body."""
    text = jax.jit(function).lower(1.0).compiler_ir("hlo").as_hlo_module().to_string()
    schedule = read_schedule(parse_hlo(text))
    assert [step.count for step in schedule.steps if step.instruction.opcode == "sine"] == counts
    assert len(schedule.unbounded) == (counts == [1])


# -- Steps


def names(schedule):
    return [step.instruction.name for step in schedule.steps]


def test_instructions_without_work_are_no_steps():
    module = parse(
        """
        ENTRY %main (p: f32[8]) -> (f32[8], f32[8]) {
          %p = f32[8]{0} parameter(0)
          %zero = f32[] constant(0)
          %id = u32[] partition-id()
          %view = f32[2,4]{1,0} bitcast(%p)
          %start = (f32[8]{0}, f32[8]{0:S(1)}, u32[]) copy-start(%p)
          %negate = f32[8]{0} negate(%p)
          %done = f32[8]{0} copy-done(%start)
          %async = ((f32[8]{0}), f32[8]{0}, s32[]) call-start(%p), to_apply=%called
          %update = ((f32[8]{0}), f32[8]{0}, s32[]) call-update(%async)
          %end = f32[8]{0} call-done(%update)
          %sum = f32[8]{0} dynamic-update-slice(%done, %end, %id)
          ROOT %both = (f32[8]{0}, f32[8]{0}) tuple(%sum, %negate)
        }
        """,
        """
        %called (q: f32[8]) -> f32[8] {
          %q = f32[8]{0} parameter(0)
          ROOT %exp = f32[8]{0} exponential(%q)
        }
        """,
    )
    schedule = read_schedule(module)
    assert names(schedule) == ["start", "negate", "exp", "sum"]
    assert [(step.computation.name, step.position) for step in schedule.steps] == [
        ("main", 4), ("main", 5), ("called", 1), ("main", 10),
    ]  # fmt: skip
    assert {(step.count, step.depth) for step in schedule.steps} == {(1, 0)}


def test_the_condition_and_the_body_of_a_loop_count_once_per_iteration():
    schedule = read_schedule(parse(MAIN, BODY, CONDITION))
    assert [(s.instruction.name, s.count, s.depth) for s in schedule.steps if s.depth == 1] == [
        ("compare", 6, 1),
        ("next", 6, 1),
        ("work", 6, 1),
    ]
    assert names(schedule)[0] == "copy.1"
    assert schedule.unbounded == []


def test_a_loop_on_data_counts_one_and_is_listed():
    module = parse(
        MAIN.replace("%zero = s32[]{:T(128)} constant(0)", "%zero = s32[] custom-call()"), BODY, CONDITION
    )
    schedule = read_schedule(module)
    assert [one.name for one in schedule.unbounded] == ["loop"]
    assert [step.count for step in schedule.steps if step.instruction.name == "work"] == [1]


def test_a_computation_that_is_called_twice_runs_twice():
    module = parse(
        """
        ENTRY %main (p: f32[8]) -> f32[8] {
          %p = f32[8]{0} parameter(0)
          %first = f32[8]{0} call(%p), to_apply=%called
          ROOT %second = f32[8]{0} call(%first), to_apply=%called
        }
        """,
        """
        %called (q: f32[8]) -> f32[8] {
          %q = f32[8]{0} parameter(0)
          ROOT %exp = f32[8]{0} exponential(%q)
        }
        """,
    )
    assert names(read_schedule(module)) == ["exp", "exp"]


BRANCHES = {
    # Reads and writes 8 MiB.
    "large": """
        %large (a: f32[1024,1024]) -> f32[] {
          %a = f32[1024,1024]{1,0} parameter(0)
          %negate = f32[1024,1024]{1,0} negate(%a)
          ROOT %zero.1 = f32[] constant(0)
        }
    """,
    # Four results of a kilobyte.
    "small": """
        %small (b: f32[1024,1024]) -> f32[] {
          %b = f32[1024,1024]{1,0} parameter(0)
          %s.0 = f32[256]{0} custom-call(), custom_call_target="a"
          %s.1 = f32[256]{0} custom-call(), custom_call_target="a"
          %s.2 = f32[256]{0} custom-call(), custom_call_target="a"
          %s.3 = f32[256]{0} custom-call(), custom_call_target="a"
          ROOT %zero.2 = f32[] constant(0)
        }
    """,
    # Reads 4 MiB, with a small result.
    "reads": """
        %reads (c: f32[1024,1024]) -> f32[] {
          %c = f32[1024,1024]{1,0} parameter(0)
          %n = f32[] constant(0)
          ROOT %sum = f32[] reduce(%c, %n), dimensions={0,1}, to_apply=%add
        }
    """,
    "loops": """
        %loops (d: f32[1024,1024]) -> f32[] {
          %d = f32[1024,1024]{1,0} parameter(0)
          %forever = f32[1024,1024]{1,0} while(%d), condition=%ever, body=%body.2
          ROOT %zero.3 = f32[] constant(0)
        }
    """,
}
EVER = """
%ever (e: f32[1024,1024]) -> pred[] {
  %e = f32[1024,1024]{1,0} parameter(0)
  ROOT %more = pred[] custom-call(), custom_call_target="more"
}
"""
ONCE = """
%body.2 (f: f32[1024,1024]) -> f32[1024,1024] {
  %f = f32[1024,1024]{1,0} parameter(0)
  ROOT %same = f32[1024,1024]{1,0} custom-call(), custom_call_target="same"
}
"""


@pytest.mark.parametrize("order", [1, -1], ids=["", "reversed"])
@pytest.mark.parametrize(
    "branches, steps, unbounded",
    [
        (["large", "small"], ["negate"], 0),
        (["small", "reads"], ["sum"], 0),  # what it reads counts, too
        (["large", "loops"], ["negate"], 0),
        (["small", "loops"], ["more", "same"], 1),
        (["large", "small", "loops"], ["negate"], 0),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, list) else "",
)
def test_a_conditional_counts_the_branch_with_the_most_traffic(branches, steps, unbounded, order):
    called = branches[::order]
    listed = f"branch_computations={{{', '.join('%' + name for name in called)}}}"
    if len(branches) == 2:
        listed = f"true_computation=%{called[0]}, false_computation=%{called[1]}"
    module = parse(
        f"""
        ENTRY %main (p: s32[], x: f32[1024,1024]) -> f32[] {{
          %p = s32[] parameter(0)
          %x = f32[1024,1024]{{1,0}} parameter(1)
          ROOT %result = f32[] conditional(%p, {", ".join("%x" for _ in called)}), {listed}
        }}
        """,
        *(BRANCHES[name] for name in branches),
        EVER,
        ONCE,
    )
    schedule = read_schedule(module)
    assert names(schedule) == steps
    assert len(schedule.unbounded) == unbounded
