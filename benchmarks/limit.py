"""Where the time of a train step goes: JAX's profile of it on one device, by kinds of work.

Products of matrices are what a CPU does at its peak; all else keeps it from there.
"""

from __future__ import annotations

import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

import weft as wf
from benchmarks import lm

# By the operations of XLA that a piece of work is made of, the first that fits.
KINDS = {
    "products of matrices": {"dot"},
    "storing and fetching what the backward pass needs": {"dynamic-update-slice", "dynamic-slice"},
    "looking up, and scatter-adding gradients": {"gather", "scatter"},
    "copies": {"copy"},
    "zeros, for loops to write to": {"broadcast"},
    "element by element, and sums": set(),
}
NAME = re.compile(r"^\s*(?:ROOT )?%?([\w.-]+) = \S+ ([\w-]+)\(")
CALLS = re.compile(r"calls=%?([\w.-]+)")
BODY = re.compile(r"^%?([\w.-]+) .*\{$")
LOOPS = {"while", "call", "conditional"}
PLAIN = {"parameter", "constant", "bitcast", "tuple", "get-tuple-element", "reshape"}


def kinds(hlo: str) -> dict[str, str]:
    """The kind of work of each instruction of a compiled program, by its name."""
    found: dict[str, set[str]] = {}
    inside: dict[str, set[str]] = {}
    calls: dict[str, str] = {}
    body = ""
    for line in hlo.splitlines():
        if begins := BODY.match(line):
            body = begins[1]
        elif named := NAME.match(line):
            name, what = named.groups()
            if what not in LOOPS:
                found[name] = {what}
            inside.setdefault(body, set()).add(what)
            if what == "fusion" and (called := CALLS.search(line)):
                calls[name] = called[1]
    for name, called in calls.items():
        found[name] = inside.get(called, set()) - PLAIN
    return {name: kind_of(what) for name, what in found.items()}


def kind_of(what: set[str]) -> str:
    *specific, zeros, rest = KINDS.items()
    for kind, wanted in specific:
        if what & wanted:
            return kind
    return zeros[0] if what == zeros[1] else rest[0]


def pieces(folder: Path) -> Iterator[tuple[str, int]]:
    """The names and nanoseconds of what ran, from a profile that JAX wrote."""
    (file,) = folder.glob("**/*.xplane.pb")
    for plane in jax.profiler.ProfileData.from_file(str(file)).planes:
        if plane.name == "/host:CPU":
            for line in plane.lines:
                yield from ((event.name, event.duration_ns) for event in line.events)


def shares(run: Callable[[], Any], hlo: str, steps: int) -> Counter[str]:
    """The share of each kind of work in the time of all."""
    for _ in range(2):
        run()
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            for _ in range(steps):
                run()
        spent: Counter[str] = Counter()
        known = kinds(hlo)
        for name, nanoseconds in pieces(Path(folder)):
            if name in known:
                spent[known[name]] += nanoseconds
    whole = spent.total()
    return Counter({kind: spent[kind] / whole for kind in KINDS})


def section(rounds: int) -> str:
    program = lm.step(mesh="", layout="")
    found = shares(lm.case(program), program.lower(*lm.specs()).compile().as_text(), rounds)
    rows = "\n".join(f"| {kind} | {100 * share:.0f} % |" for kind, share in found.most_common())
    return f"""## Where the time of a step goes

The train step of `lm.py` on one device, {rounds} times, as JAX's profiler sees it (`limit.py`); of loops,
what is in them.

| work | share of the time |
|---|---:|
{rows}"""


if __name__ == "__main__":
    wf.cpu_devices(1)
    print(section(5))
