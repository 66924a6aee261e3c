"""What comes before the first step: imports, tracing, and all of it together, in Weft and by hand in JAX.

Imports and first steps are measured in processes of their own. The cases alternate, and times are those of
the processor, which feel other processes less than the clock does.
"""

from __future__ import annotations

import gc
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

from benchmarks import handwritten, lm
from benchmarks.first_step import MESHES
from benchmarks.measure import Spread

IMPORTS = {"jax": "import jax", "weft": "import weft; weft.spmd"}
DEPTHS = (0, 20, 40)  # calls between the benchmark and the trace: a training loop is rarely the outermost one


def alternate(cases: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """What the cases return, called in turn; each round begins with another."""
    names = list(cases)
    samples: dict[str, list[float]] = {name: [] for name in names}
    for index in range(rounds):
        turn = index % len(names)
        for name in names[turn:] + names[:turn]:
            samples[name].append(cases[name]())
    return samples


def table(what: str, rows: Mapping[str, tuple[list[float], list[float]]]) -> str:
    """Rows of a hand-written case's seconds and Weft's."""
    lines = [
        f"| {what} | by hand, ms | quartiles | Weft, ms | quartiles | paired ratio | quartiles |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name, (theirs, ours) in rows.items():
        cells = [name]
        for s in (Spread.of(theirs), Spread.of(ours)):
            cells += [f"{1e3 * s.median:.0f}", f"{1e3 * s.low:.0f}–{1e3 * s.high:.0f}"]
        ratio = Spread.of([mine / other for mine, other in zip(ours, theirs, strict=True)])
        lines.append(f"| {' | '.join(cells)} | {ratio.median:.2f} | {ratio.low:.2f}–{ratio.high:.2f} |")
    return "\n".join(lines)


def imports(rounds: int) -> str:
    """`import weft; weft.spmd` beside `import jax`."""

    def case(code: str) -> Callable[[], float]:
        return lambda: float(_output("-c", f"{code}\nimport time; print(time.process_time())"))

    samples = alternate({name: case(code) for name, code in IMPORTS.items()}, rounds + 1)
    jax_times, weft_times = (samples[name][1:] for name in IMPORTS)  # the first ones read the disk
    return f"{table('imports', {'`import weft; weft.spmd`': (jax_times, weft_times)})}\n\n{rounds} of each."


def tracing(rounds: int) -> str:
    """Python to jaxpr, from a fresh function each time."""
    mesh = handwritten.make_mesh()
    given = handwritten.init(0), *handwritten.batch(0)
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), given)
    specs = lm.specs()
    traces: dict[str, Callable[[], Any]] = {
        "by hand": lambda: handwritten.shard_map_step(mesh).trace(*shapes),
        "weft": lambda: lm.step().trace(*specs),
    }

    def case(trace: Callable[[], Any], depth: int) -> Callable[[], float]:
        return lambda: _processor_time(lambda: _call_deep(trace, depth))

    cases = {f"{name} {depth}": case(trace, depth) for depth in DEPTHS for name, trace in traces.items()}
    samples = {name: own[1:] for name, own in alternate(cases, rounds + 1).items()}
    rows = {str(depth): (samples[f"by hand {depth}"], samples[f"weft {depth}"]) for depth in DEPTHS}
    return f"{table('calls deep', rows)}\n\n{rounds} traces of each."


def first_steps(rounds: int) -> str:
    """A process from its start to the end of its first step, by the processor's time and by the clock."""
    clock: dict[str, list[float]] = {}

    def case(kind: str, devices: int) -> Callable[[], float]:
        def run() -> float:
            start = time.perf_counter()
            seconds, _ = _output("-m", "benchmarks.first_step", kind, str(devices)).split()
            clock.setdefault(f"{kind} {devices}", []).append(time.perf_counter() - start)
            return float(seconds)

        return run

    kinds = {f"{kind} {n}": case(kind, n) for n in MESHES for kind in ("shard_map", "weft")}
    samples = alternate(kinds | {"single 1": case("single", 1)}, rounds)
    pairs = {"1 device, `jit`": ("single 1", "weft 1")}
    for n in MESHES:
        pairs[f"{n} device{'s' * (n > 1)}, `shard_map`"] = f"shard_map {n}", f"weft {n}"
    rows = {}
    for name, (theirs, ours) in pairs.items():
        rows[name] = samples[theirs], samples[ours]
        rows[f"{name}, by the clock"] = clock[theirs], clock[ours]
    return f"{table('from process start', rows)}\n\n{rounds} processes of each."


def _output(*arguments: str) -> str:
    return subprocess.run([sys.executable, *arguments], check=True, capture_output=True, text=True).stdout


def _processor_time(run: Callable[[], Any]) -> float:
    gc.collect()  # the garbage of other cases is not this one's
    start = time.process_time()
    run()
    return time.process_time() - start


def _call_deep(run: Callable[[], Any], depth: int) -> Any:
    return _call_deep(run, depth - 1) if depth else run()


def section(rounds: int) -> str:
    """The sections of RESULTS.md."""
    return f"""## Importing

{imports(rounds)}

## Tracing the train step of `lm.py`

Against hand-written `shard_map`, on a mesh data=4 model=2, called from that many nested functions. Python is
slow where a chunk of its stack ends; Weft traces in one chunk (`weft/core/call_stack.py`), so that the depth
does not matter.

{tracing(rounds)}

## From process start to the first step

Imports, parameters and a batch from NumPy, tracing, compiling, and one train step of `lm.py`.

{first_steps(max(rounds // 2, 3))}"""
