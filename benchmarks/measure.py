"""Turns callables into comparable times: alternating rounds, medians, quartiles, paired ratios.

The machine's speed drifts by more than the differences we look for. So all cases run in one
process, one call each per round, and a case is compared with the baseline's call of the *same*
round; the order rotates, so that no case always runs first.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax


@dataclass(frozen=True)
class Spread:
    """A median with its lower and upper quartile."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(samples: list[float]) -> "Spread":
        if len(samples) == 1:
            return Spread(samples[0], samples[0], samples[0])
        low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
        return Spread(median, low, high)


@dataclass(frozen=True)
class Timing:
    """One case's times.

    `seconds` is the spread of one call, `ratio` the median over the baseline's median, `paired` the
    spread of the per-round ratios (the number to trust on a noisy machine). `processor` is the time
    of all cores together, which feels other processes less than the clock does.
    """

    seconds: Spread
    ratio: float
    paired: Spread
    processor: Spread
    samples: tuple[float, ...]


def once(case: Callable[[], Any]) -> tuple[float, float]:
    """Wall-clock and processor seconds of one awaited call."""
    start, used = time.perf_counter(), time.process_time()
    # Awaited always: virtual CPU devices can deadlock when calls pile up.
    jax.block_until_ready(case())
    return time.perf_counter() - start, time.process_time() - used


def alternate(
    cases: Mapping[str, Callable[[], Any]],
    rounds: int = 20,
    warmup: int = 2,
    baseline: str | None = None,
) -> dict[str, Timing]:
    """Times the cases alternately, after `warmup` untimed calls of each.

    `baseline` names the case that the ratios are against; the first one if not given.
    """
    names = list(cases)
    if not names or rounds < 1:
        raise ValueError(f"nothing to measure: {len(names)} cases, {rounds} rounds")
    baseline = names[0] if baseline is None else baseline
    if baseline not in cases:
        raise ValueError(f"baseline {baseline!r} is not among the cases {names}")

    for _ in range(warmup):
        for name in names:
            once(cases[name])
    samples: dict[str, list[float]] = {name: [] for name in names}
    processor: dict[str, list[float]] = {name: [] for name in names}
    for index in range(rounds):
        turn = index % len(names)
        for name in names[turn:] + names[:turn]:
            wall, used = once(cases[name])
            samples[name].append(wall)
            processor[name].append(used)

    base = samples[baseline]
    return {
        name: Timing(
            seconds=Spread.of(own),
            ratio=statistics.median(own) / statistics.median(base),
            paired=Spread.of([mine / theirs for mine, theirs in zip(own, base, strict=True)]),
            processor=Spread.of(processor[name]),
            samples=tuple(own),
        )
        for name, own in samples.items()
    }


def markdown(timings: Mapping[str, Timing]) -> str:
    """A Markdown table of the timings, in milliseconds."""
    lines = [
        "| case | median ms | quartiles | ratio of medians | paired ratio | quartiles | processor ms |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name, timing in timings.items():
        seconds, paired = timing.seconds, timing.paired
        lines.append(
            f"| {name} | {1e3 * seconds.median:.1f} "
            f"| {1e3 * seconds.low:.1f}–{1e3 * seconds.high:.1f} "
            f"| {timing.ratio:.3f} | {paired.median:.3f} | {paired.low:.3f}–{paired.high:.3f} "
            f"| {1e3 * timing.processor.median:.0f} |"
        )
    return "\n".join(lines)


def compared(
    cases: Mapping[str, Callable[[], Any]],
    rounds: int,
    said: str = "Weft against the faster hand-written one",
) -> str:
    """A table of the cases' times, and the paired ratio of the last one to the fastest of the others."""
    timings = alternate(cases, rounds=rounds, warmup=1)
    last = list(cases)[-1]
    fastest = min((n for n in cases if n != last), key=lambda n: timings[n].seconds.median)
    pairs = zip(timings[last].samples, timings[fastest].samples, strict=True)
    ratio = Spread.of([mine / theirs for mine, theirs in pairs])
    return (
        f"{markdown(timings)}\n\n{said} ({fastest}): "
        f"{ratio.median:.3f} (quartiles {ratio.low:.3f}–{ratio.high:.3f}), {rounds} rounds"
    )
