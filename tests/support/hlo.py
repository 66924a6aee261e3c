"""Read compiled HLO text: the bytes of collectives by kind and mesh axes, and FLOPs, multiplied by trip counts.

An oracle for plans: this is the program that XLA runs.
"""

import itertools
import math
import re
from collections import Counter

import numpy as np

KINDS = {
    "all-reduce": "all-reduce",
    "all-gather": "all-gather",
    "reduce-scatter": "reduce-scatter",
    "all-to-all": "all-to-all",
    "collective-permute": "permute",
}
SIZES = {
    **dict.fromkeys(["pred", "s8", "u8"], 1),
    **dict.fromkeys(["bf16", "f16", "s16", "u16"], 2),
    **dict.fromkeys(["f32", "s32", "u32"], 4),
    **dict.fromkeys(["c64", "f64", "s64", "u64"], 8),
    "c128": 16,
    "token": 0,
}
SHAPE = re.compile(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,]*)\]")
OPCODE = re.compile(r"= (\([^=]*?\)|\S+) ([a-z\-]+)\(")


def collective_bytes(text, mesh, unbounded=False):
    """The bytes of collectives on one device, counted like those of a plan: `{(kind, axes): bytes}`.

    Args:
      unbounded: whether loops may have an unknown trip count; one iteration counts, as in a plan.
    """
    computations, entry = _computations(text)
    if unbounded:
        once = re.compile(r"( while\((?!.*known_trip_count).*)")
        computations = {
            name: [once.sub(r"\1, known_trip_count=1", line) for line in lines]
            for name, lines in computations.items()
        }
    total = Counter()
    _count(computations, entry, 1, mesh, total)
    return dict(total)


def bytes_by_axes(text, mesh, **options):
    """The same summed over kinds: `{axes: bytes}`."""
    total = Counter()
    for (_, axes), size in collective_bytes(text, mesh, **options).items():
        total[axes] += size
    return dict(total)


def multiplications(text):
    """FLOPs of all matrix products and convolutions, with trip counts."""
    computations, entry = _computations(text)
    return _flops(computations, entry)


def _flops(computations, name):
    shapes, total = {}, 0
    for line in computations[name]:
        head = re.match(r"\s+(?:ROOT )?%?([\w.\-]+) = (\([^=]*?\)|\S+) ([a-z\-]+)\(([^)]*)\)", line)
        if not head:
            continue
        target, shape, opcode, operands = head.groups()
        shapes[target] = shape
        if opcode == "dot":
            left = shapes[operands.split(",")[0].strip().split(" ")[-1].lstrip("%")]
            sizes = _sizes(left)
            contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", line)[1]
            total += (
                2 * math.prod(_sizes(shape)) * math.prod(sizes[int(n)] for n in contracted.split(",") if n)
            )
        if opcode == "convolution":
            sides = [shapes[o.strip().split(" ")[-1].lstrip("%")] for o in operands.split(",")]
            total += _convolution(line, *(_sizes(one) for one in (*sides, shape)))
        trips = re.search(r"known_trip_count[^\d]*(\d+)", line)
        times = int(trips[1]) if opcode == "while" and trips else 1
        if opcode == "conditional":
            total += max(_flops(computations, branch) for branch in _branches(line))
        if opcode not in ("reduce", "all-reduce", "sort", "scatter", "reduce-scatter"):
            for called in re.findall(r"(?:body|to_apply|calls)=%?([\w.\-]+)", line):
                total += times * _flops(computations, called)
    return total


def _sizes(shape):
    return [int(n) for n in SHAPE.search(shape)[2].split(",") if n]


def _convolution(line, given, kernel, out):
    """FLOPs: along each spatial dim, every tap applies once to the shorter of input and output.

    For the gradient of a strided convolution XLA swaps input and kernel, which this count does not detect.
    """
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", line).groups()
    given, kernel, out = (
        dict(zip(*pair, strict=True)) for pair in zip(labels, (given, kernel, out), strict=True)
    )
    met = math.prod(min(given[d], out[d]) * kernel[d] for d in given if d.isdigit())
    return 2 * out["b"] * out["f"] * kernel["i"] * met


def instructions(text):
    """The number of HLO instructions."""
    return sum(bool(re.match(r"\s+(ROOT )?%?\S+ = ", line)) for line in text.splitlines())


def _computations(text):
    found, name, entry = {}, None, None
    for line in re.sub(r"/\*.*?\*/", "", text).splitlines():
        head = re.match(r"(ENTRY )?%?([\w.\-]+) .*\{$", line)
        if head and not line.startswith(" "):
            name = head[2]
            found[name] = []
            entry = name if head[1] else entry
        elif name is not None and line.startswith(" "):
            found[name].append(line)
    return found, entry


def _count(computations, name, times, mesh, total):
    for line in computations[name]:
        match = OPCODE.search(line)
        if not match:
            continue
        result, opcode = match[1], match[2].removesuffix("-start")
        if opcode in KINDS:
            size, ways = _bytes(result), 1
            if opcode == "collective-permute":
                axes = _permuted_axes(line, mesh)
            else:
                groups = _groups(line)
                axes, ways = _axes_of(groups, mesh), len(groups[0])
            if ways == 1 and opcode != "collective-permute":
                continue
            size *= ways if opcode == "reduce-scatter" else 1
            total[KINDS[opcode], axes] += size * times
            continue
        trips = re.search(r"known_trip_count[^\d]*(\d+)", line)
        inner = times * int(trips[1]) if opcode == "while" and trips else times
        assert opcode != "while" or trips, f"a loop without a trip count: {line}"
        if opcode == "conditional":
            total.update(_largest_branch(computations, line, times, mesh))
        for called in re.findall(r"(?:body|condition|to_apply|calls)=%?([\w.\-]+)", line):
            if opcode not in ("reduce", "all-reduce", "sort", "scatter"):
                _count(computations, called, inner, mesh, total)


def _largest_branch(computations, line, times, mesh):
    """The bytes of the branch that sends most; a plan counts the most expensive branch."""
    counts = []
    for branch in _branches(line):
        counts.append(Counter())
        _count(computations, branch, times, mesh, counts[-1])
    return max(counts, key=Counter.total)


def _branches(line):
    listed = re.search(r"branch_computations=\{(.*?)\}", line)
    named = re.findall(r"(?:true|false)_computation=%?([\w.\-]+)", line)
    found = [name.strip().lstrip("%") for name in listed[1].split(",")] if listed else named
    assert found, f"a conditional without branches: {line}"
    return found


def _bytes(shapes):
    return sum(
        _item_bytes(kind) * math.prod(int(n) for n in sizes.split(",") if n)
        for kind, sizes in SHAPE.findall(shapes)
    )


def _item_bytes(kind):
    assert kind in SIZES or kind.startswith("f8"), f"unknown type in HLO: {kind}"
    return SIZES.get(kind, 1)


def _groups(line):
    listed = re.search(r"replica_groups=\{(\{.*?\})\}", line)
    if listed:
        return [[int(n) for n in g.split(",")] for g in re.findall(r"\{([\d,]+)\}", listed[1])]
    named = re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", line)  # since JAX 0.11
    if named:
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", named[1])}
        axes = [[*sizes].index(name) for name in re.findall(r"'(\w+)'", named[2])]
        ids = np.moveaxis(
            np.arange(math.prod(sizes.values())).reshape([*sizes.values()]), axes, range(-len(axes), 0)
        )
        return ids.reshape(-1, math.prod(ids.shape[-len(axes) :])).tolist()
    iota = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", line)
    assert iota, line
    shape, dims = ([int(n) for n in iota[k].split(",")] for k in (1, 2))
    ids = np.arange(math.prod(dims)).reshape(dims)
    if iota[3]:
        ids = ids.transpose([int(n) for n in iota[3].split(",")])
    return ids.reshape(shape).tolist()


def _axes_of(groups, mesh):
    ids = np.arange(mesh.size).reshape([size for _, size in mesh.axes])
    wanted = {frozenset(g) for g in groups}
    for count in range(len(mesh.axes) + 1):
        for some in itertools.combinations(range(len(mesh.axes)), count):
            rest = [k for k in range(len(mesh.axes)) if k not in some]
            made = ids.transpose([*rest, *some]).reshape(-1, math.prod(ids.shape[k] for k in some))
            if {frozenset(g) for g in made.tolist()} == wanted:
                return tuple(mesh.names[k] for k in some if ids.shape[k] > 1)
    raise AssertionError(f"groups {groups} are not those of any axes of {mesh}")


def _permuted_axes(line, mesh):
    pairs = re.search(r"source_target_pairs=\{(.*?)\}\}", line + "}")[1]
    shape = [size for _, size in mesh.axes]
    changed = set()
    for pair in re.findall(r"\{(\d+),(\d+)", pairs + "}"):
        a, b = (np.unravel_index(int(n), shape) for n in pair)
        changed |= {name for name, i, j in zip(mesh.names, a, b, strict=True) if i != j}
    return tuple(n for n in mesh.names if n in changed)
