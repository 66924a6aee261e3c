"""Numbers with units, formatted for people."""

from __future__ import annotations


def human_bytes(count: float) -> str:
    """`1.5 MiB`."""
    # 999.5 and more would print as 1e+03.
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(count) < 999.5 or unit == "TiB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1024
    raise AssertionError


def human_count(count: float, unit: str = "") -> str:
    """`1.5 G`, or `1.5 GFLOP`."""
    for prefix in ("", "K", "M", "G", "T", "P", "E"):
        if abs(count) < 999.5 or prefix == "E":
            return f"{count:.3g} {prefix}{unit}".rstrip()
        count /= 1000
    raise AssertionError


def human_seconds(seconds: float) -> str:
    """`1.5 ms`."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= scale or unit == "µs":
            return f"{seconds / scale:.3g} {unit}"
    raise AssertionError
