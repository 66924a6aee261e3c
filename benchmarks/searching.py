"""The search against the clock: what it finds best for the CPU, beside what it ranks next and some others.

A small train step on 8 virtual devices, with the CPU's profile measured in the same run. The 40 best layouts
by plan, and 20 drawn at random from all legal ones, are compiled and timed, alternating.
"""

from __future__ import annotations

import random
import statistics
import time
from typing import Any

import weft as wf
from benchmarks import lm
from benchmarks.handwritten import Size
from benchmarks.measure import alternate
from weft.autolayout.candidates import CandidateSpace
from weft.autolayout.results import RankedLayout
from weft.core.errors import WeftError
from weft.hardware.measure import measure_cpu
from weft.hardware.profile import Hardware

SIZE = Size(batch=16, length=64, d_model=128, d_ff=512, heads=4, d_kv=32, layers=2, vocab=2048)
TOP, OTHERS, DEVICES = 40, 20, 8


def at_random(space: CandidateSpace, hardware: Hardware, known: set[Any]) -> list[RankedLayout]:
    """Legal candidates that are not among the best."""
    draw, found = random.Random(0), list[RankedLayout]()
    while len(found) < OTHERS:
        sizes = draw.choice(space.meshes)
        place = tuple(draw.randrange(len(space.groups)) for _ in sizes)
        levels = ("",) * len(sizes)
        candidate = next(space.candidates(sizes, levels, place))
        if not space.is_distinct(sizes, levels)[place] or candidate in known:
            continue
        known.add(candidate)
        plan = space.planned(candidate)
        if not isinstance(plan, WeftError):
            found.append(RankedLayout(candidate, plan, plan.time(hardware), 0.0))
    return found


def section(rounds: int) -> str:
    """The text of the section."""
    from scipy.stats import spearmanr

    hardware = measure_cpu(DEVICES)
    start = time.process_time()
    program, args = lm.step(SIZE, "", ""), lm.specs(SIZE)
    found = wf.search(program, args, devices=DEVICES, hardware=hardware, top=TOP)
    took = time.process_time() - start
    ranked = list(found.ranked[:TOP])
    space = CandidateSpace("", program, args, DEVICES, 2, hardware)
    others = at_random(space, hardware, {one.candidate for one in ranked})
    every = [*ranked, *others]
    cases = {str(n): lm.case(lm.step(SIZE, one.mesh, one.layout), SIZE) for n, one in enumerate(every)}
    timings = alternate(cases, rounds=rounds, warmup=1)
    measured = [timings[str(n)].seconds.median for n in range(len(every))]
    best = min(range(len(every)), key=measured.__getitem__)
    rank = spearmanr([one.seconds for one in every], measured).statistic
    shown = sorted({0, 1, 2, 3, 4, best, TOP - 1})
    lines = ["| rank by plan | mesh | layout | planned ms | measured ms |", "|---:|---|---|---:|---:|"]
    for n in shown:
        one = every[n]
        place = n + 1 if n < TOP else "drawn"
        lines.append(
            f"| {place} | {one.mesh or 'one device'} | {one.layout} | {1e3 * one.seconds:.1f} "
            f"| {1e3 * measured[n]:.1f} |"
        )
    drawn = statistics.median(measured[TOP:])
    return f"""## The search, measured

A train step of 2 layers (d_model 128, d_ff 512, vocabulary 2048, 16 rows of 64) on {DEVICES} virtual devices.
Of {found.legal:,} legal candidates {len(found.ranked)} were planned to rank the best {TOP} for certain, in
{took:.0f} s of processor time. These and {OTHERS} drawn at random were run, alternating, {rounds} rounds.

{chr(10).join(lines)}

The chosen layout takes {measured[0] / measured[best]:.2f} of the time of the fastest of {len(every)}; those
drawn at random take {drawn / measured[best]:.2f} (median). Rank correlation (Spearman) of planned and
measured: {rank:.2f}."""
