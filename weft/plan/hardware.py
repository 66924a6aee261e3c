"""Hardware: from a small TOML file to the numbers that a plan's time is worked out from.

Profiles are data, each with its source; `weft hardware list` shows them. A file of your own is as good:

    name = "my-box"
    source = "measured by me"           # where the numbers come from
    devices_per_node = 8
    matmul_efficiency = 0.75            # the share of the peak that large matmuls reach

    [peak_flops]                        # FLOP/s of one device, by dtype
    f32 = 156e12
    bf16 = 312e12

    [memory]                            # of one device
    bytes = 80e9
    bandwidth = 2.0e12                  # bytes/s

    [[network]]                         # from the innermost level outwards
    name = "NVLink"
    bandwidth = 300e9                   # bytes/s of one device, in one direction
    latency = 2e-6                      # seconds for each step of a ring
    devices = 8                         # how many devices it joins; the last level joins any number

    [[network]]
    name = "InfiniBand"
    bandwidth = 25e9
    latency = 4e-6

A torus says so (`torus = 2` or 3, its number of directions; `wrap = 4`: lengths that are multiples of it
close to rings). `shared_cores` is for virtual devices that share a CPU's cores: then all numbers are those of
one core.

A name is looked for in `~/.config/weft/` first, then among the profiles that come with Weft; a path is read
as it is.
"""

from __future__ import annotations

import math
import os
import re
import statistics
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import HardwareError, caret, nearest

PROFILES = Path(__file__).parent / "profiles"


@dataclass(frozen=True)
class Level:
    """One level of a machine's network.

    Attributes:
      name: `ICI`, `NVLink`.
      bandwidth: bytes/s of one device (for a torus: of one of its links), in one direction.
      latency: seconds for one step from device to device.
      devices: how many devices it joins, those of the levels inside it included; None: any number.
      torus: the number of its directions; 0 is a switch.
      wrap: in a torus, a length that is a multiple of this closes to a ring, which both directions
        serve at once; another one is a line.
    """

    name: str
    bandwidth: float
    latency: float
    devices: int | None = None
    torus: int = 0
    wrap: int = 1

    def length(self, ways: int, inside: int) -> tuple[int, float]:
        """Over how many directions of a torus these many ways are laid, and the length along each.

        Args:
          ways: the number of places to join at this level.
          inside: how many devices one place holds.
        """
        if not self.torus or self.devices is None:
            return 1, ways
        side = (self.devices / inside) ** (1 / self.torus)
        count = next((k for k in range(1, self.torus) if ways <= side**k * 1.001), self.torus)
        return count, ways ** (1 / count)

    def links(self, ways: int, directions: int) -> int:
        """How many links of a device work at once along each direction: two in a ring, one in a line."""
        return 2 if self.torus and ways > 2 and ways % self.wrap**directions == 0 else 1


@dataclass(frozen=True)
class Hardware:
    """A machine, by the numbers of one device.

    Attributes:
      name: what `--hardware` calls it.
      source: where the numbers come from.
      devices_per_node: devices that one host holds.
      peak_flops: FLOP/s by dtype.
      matmul_efficiency: the share of it that large matrix products reach.
      memory_bytes, memory_bandwidth: its memory, and bytes/s.
      network: the levels, from the innermost outwards.
      shared_cores: virtual devices that share this many cores; all numbers are then those of one
        core. 0: real devices.

    >>> Hardware.of("tpu-v4").peak("bf16")
    275000000000000.0
    """

    name: str
    source: str
    devices_per_node: int
    peak_flops: Mapping[str, float]
    matmul_efficiency: float
    memory_bytes: int
    memory_bandwidth: float
    network: tuple[Level, ...]
    shared_cores: int = 0

    @classmethod
    def of(cls, given: Any) -> Hardware:
        """Hardware as it is, or what a name or a TOML file says."""
        return given if isinstance(given, Hardware) else load(find(given))

    def peak(self, dtype: str) -> float:
        """FLOP/s of matrix products of this dtype; that of f32 where the profile has no such entry."""
        return self.peak_flops.get(_PEAK_OF.get(dtype, dtype), self.peak_flops["f32"])


_PEAK_OF = {"f16": "bf16"}


# Finding


def user_folder() -> Path:
    """Where a user's own profiles are."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "weft"


def known() -> dict[str, Path]:
    """All profiles by name; a user's own come before those of Weft."""
    found: dict[str, Path] = {}
    for folder in (PROFILES, user_folder()):
        found |= {path.stem: path for path in sorted(folder.glob("*.toml"))}
    return dict(sorted(found.items()))


def find(name: Any) -> Path:
    """The file of a profile: a known name, or a path."""
    if isinstance(name, os.PathLike) or (
        isinstance(name, str) and (name.endswith(".toml") or os.sep in name)
    ):
        path = Path(name).expanduser()
        if path.is_file():
            return path
        raise HardwareError(
            f"there is no file {path}",
            rule="hardware is a known name or a TOML file",
            hint="weft hardware list shows the names; weft hardware show tpu-v4 shows how a file looks",
        )
    names = known()
    if isinstance(name, str) and name in names:
        return names[name]
    raise HardwareError(
        f"unknown hardware {name!r}{nearest(str(name).lower(), names)}",
        f"known: {', '.join(names)}",
        rule=f"a profile is a name above, a TOML file's path, or NAME.toml in {user_folder()}",
        hint="weft hardware show tpu-v4 prints a profile to start from; weft hardware measure makes one "
        "of this CPU",
    )


# Reading


def load(path: Path) -> Hardware:
    """The hardware that a TOML file describes."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise HardwareError(
            f"{path} can't be read: {error}", hint="hardware is described in TOML, in UTF-8"
        ) from None
    return parse(text, str(path))


def parse(text: str, where: str = "hardware") -> Hardware:
    """The hardware that TOML text describes; `where` names it in messages."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise _broken(text, where, str(error)) from None
    top = _Table(data, text, where, "")
    peaks, memory = top.table("peak_flops"), top.table("memory")
    hardware = Hardware(
        name=top.text("name"),
        source=top.text("source"),
        devices_per_node=top.whole("devices_per_node"),
        peak_flops={dtype: peaks.number(dtype) for dtype in ("f32", *(set(peaks.data) - {"f32"}))},
        matmul_efficiency=top.number("matmul_efficiency", most=1),
        memory_bytes=int(memory.number("bytes")),
        memory_bandwidth=memory.number("bandwidth"),
        network=tuple(_level(table) for table in top.tables("network")),
        shared_cores=top.whole("shared_cores", 0),
    )
    top.done()
    memory.done()
    _check_levels(hardware, where)
    return hardware


def _level(table: _Table) -> Level:
    level = Level(
        table.text("name"),
        table.number("bandwidth"),
        table.number("latency", least=0),
        table.whole("devices", None),
        table.whole("torus", 0),
        table.whole("wrap", 1),
    )
    table.done()
    return level


def _check_levels(hardware: Hardware, where: str) -> None:
    spans = [level.devices for level in hardware.network[:-1]]
    if any(n is None for n in spans) or sorted(set(spans), key=lambda n: n or 0) != spans:
        shown = ", ".join(f"{v.name} ({v.devices or 'any'})" for v in hardware.network)
        raise HardwareError(
            f"network levels {shown} of {where} do not go outwards",
            rule="each level joins more devices than the one before; only the last may leave `devices` out",
            hint="order [[network]] from the fastest to the slowest, and say how many devices each joins",
        )


class _Table:
    """A TOML table that is asked for its fields, and complains in the file's own words."""

    def __init__(self, data: dict[str, Any], text: str, where: str, name: str, number: int = 0):
        self.data, self._text, self._where, self._name, self._number = data, text, where, name, number
        self._asked: set[str] = set()

    def text(self, key: str) -> str:
        return self._get(key, "text in quotes", lambda v: isinstance(v, str) and v != "")

    def whole(self, key: str, *default: Any) -> Any:
        ok = lambda v: _is_number(v) and v == int(v) and v >= (0 if default == (0,) else 1)  # noqa: E731
        value = self._get(key, "a whole number", ok, *default)
        return int(value) if value is not None else None

    def number(self, key: str, *, least: float | None = None, most: float = math.inf) -> float:
        what = "a number" if least is not None else "a number above 0"
        what += f", at most {most:g}" if most < math.inf else ""
        in_range = lambda v: (v >= least if least is not None else v > 0) and v <= most  # noqa: E731
        return float(self._get(key, what, lambda v: _is_number(v) and in_range(v)))

    def table(self, key: str) -> _Table:
        found = self._get(key, f"a table: [{key}]", lambda v: isinstance(v, dict))
        return _Table(found, self._text, self._where, self._inner(key))

    def tables(self, key: str) -> list[_Table]:
        def ok(v: Any) -> bool:
            return isinstance(v, list) and bool(v) and all(isinstance(x, dict) for x in v)

        found = self._get(key, f"a list of tables: [[{key}]]", ok)
        return [_Table(t, self._text, self._where, self._inner(key), n) for n, t in enumerate(found)]

    def done(self) -> None:
        """An error if there are fields that nobody asked for: a misspelt one would have no effect."""
        for key in set(self.data) - self._asked:
            raise HardwareError(
                f"unknown field {self._inner(key)}{nearest(key, self._asked)}",
                *self._shown(key, value=False),
                rule=f"fields here: {', '.join(sorted(self._asked))}",
                hint="mend the name, or leave the line out",
            )

    def _called(self) -> list[str]:
        """Which one of several tables this is."""
        name = self.data.get("name") if self._name else None
        return [f"in the [[{self._name}]] named {name}"] if name else []

    def _inner(self, key: str) -> str:
        return f"{self._name}.{key}" if self._name else key

    def _get(self, key: str, what: str, ok: Callable[[Any], bool], *default: Any) -> Any:
        self._asked.add(key)
        if key not in self.data:
            if default:
                return default[0]
            close = nearest(key, set(self.data) - self._asked).replace("did you mean", "misspelt as")
            raise HardwareError(
                f"{self._inner(key)} is missing from {self._where}{close}",
                *self._called(),
                rule=f"{self._inner(key)} is {what}",
                hint="weft hardware show tpu-v4 prints a whole profile",
            )
        value = self.data[key]
        if not ok(value):
            raise HardwareError(
                f"{self._inner(key)} = {value!r} is not {what}",
                *self._shown(key),
                hint="weft hardware show tpu-v4 prints a whole profile",
            )
        return value

    def _shown(self, key: str, *, value: bool = True) -> list[str]:
        """The field's line in the file, with a caret under its value or name."""
        table, number = "", -1
        for n, line in enumerate(self._text.splitlines(), 1):
            if header := re.match(r"\s*(\[\[?)\s*([\w.]+)", line):
                number = number + 1 if header[2] == table else 0
                table = header[2]
                if table == self._inner(key):
                    return _pointed(self._where, n, line, header.start(2))
                continue
            here = table == self._name and (number == self._number or not table)
            if here and (field := re.match(rf"(\s*)\"?{re.escape(key)}\"?\s*=\s*", line)):
                return _pointed(self._where, n, line, field.end() if value else field.end(1))
        return [f"in {self._where}"]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _pointed(where: str, line: int, text: str, column: int) -> list[str]:
    return [f"{where}, line {line}:", caret(text, column)]


def _broken(text: str, where: str, message: str) -> HardwareError:
    fact, _, place = message.partition(" (at ")
    found = re.match(r"line (\d+), column (\d+)", place)
    lines = text.splitlines() or [""]
    line, column = (int(found[1]), int(found[2])) if found else (len(lines), len(lines[-1]) + 1)
    return HardwareError(
        f"{where} is not TOML: {fact[:1].lower()}{fact[1:]}",
        *_pointed(where, line, lines[min(line, len(lines)) - 1], column - 1),
        hint="weft hardware show tpu-v4 prints a profile that is",
    )


# Writing


def to_toml(hardware: Hardware) -> str:
    """The file that `parse` reads as this hardware."""
    lines = [
        f'name = "{hardware.name}"',
        f'source = "{hardware.source}"',
        f"devices_per_node = {hardware.devices_per_node}",
        f"matmul_efficiency = {hardware.matmul_efficiency:.4g}",
    ]
    lines += [f"shared_cores = {hardware.shared_cores}"] if hardware.shared_cores else []
    lines += ["", "[peak_flops]", *(f"{d} = {v:.4g}" for d, v in hardware.peak_flops.items())]
    lines += ["", "[memory]", f"bytes = {hardware.memory_bytes}"]
    lines += [f"bandwidth = {hardware.memory_bandwidth:.4g}"]
    for level in hardware.network:
        lines += ["", "[[network]]", f'name = "{level.name}"', f"bandwidth = {level.bandwidth:.4g}"]
        lines += [f"latency = {level.latency:.4g}"]
        lines += [f"devices = {level.devices}"] if level.devices is not None else []
        lines += [f"torus = {level.torus}", f"wrap = {level.wrap}"] if level.torus else []
    return "\n".join(lines) + "\n"


# Measuring


def measure_cpu(devices: int = 8) -> Hardware:
    """This CPU as that many virtual devices, measured with programs of Weft's own.

    Run it on a quiet machine, and in a process that has not used JAX yet. All devices work at once, as
    in a real program, and so the times are those of shared cores; the numbers are then those of one core.
    """
    import jax.numpy as jnp

    import weft as wf

    wf.cpu_devices(devices)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    mesh, layout = wf.Mesh(f"d={devices}"), wf.Layout("slice:d")
    slices, times = wf.Dim("slice", devices), wf.Dim("times", 8)

    def seconds(body: Callable[..., Any], *args: Any) -> float:
        """Of one call of `body` on all devices; its results are new memory, as in a real program."""
        return _typical(wf.spmd(body, mesh, layout), *(wf.place(a, mesh, layout) for a in args))

    def looped(body: Callable[[Any], Any], carry: Any) -> float:
        """Of one run of `body` on all devices inside a program, without what a call costs."""

        def loop(carry: Any) -> Any:
            return wf.scan(lambda c, _: (body(c), None), carry, wf.zeros([times]), times)[0]

        return seconds(loop, carry) / times.size

    def memory(size: int) -> float:
        """Bytes/s of one core, reading and writing that many floats on each device."""
        x = wf.ones([slices, wf.Dim("n", size)])
        return 2 * 4 * size * devices / seconds(lambda x: x * 0.5 + 1.0, x) / cores

    def matmul(rows: int, inner: int, columns: int, dtype: Any) -> float:
        """FLOP/s of one core in products of these sizes on each device, without their memory traffic."""
        row, i, o = wf.dims(f"row={rows} i={inner} o={columns}")
        x, w = wf.ones([slices, row, i], dtype), wf.full([slices, i, o], 1 / inner, dtype)
        taken = seconds(lambda x, w: wf.einsum(x, w, out=[slices, row, o]), x, w) * cores / devices
        moved = (rows * inner + inner * columns + rows * columns) * jnp.dtype(dtype).itemsize
        return 2 * rows * inner * columns / max(taken - moved / bandwidth, taken / 2)

    def all_reduce(size: int) -> float:
        """Seconds of the sum over all devices of that many floats."""
        n = wf.Dim("n", size)
        x = wf.ones([slices, n])

        def body(x: Any) -> Any:
            return wf.sum(x, "slice") * 0.5 + wf.zeros([slices, n])

        return max(looped(body, x) - looped(lambda x: x * 0.5 + 1.0, x), 1e-9)

    bandwidth = statistics.median(memory(1 << bits) for bits in (21, 20, 19, 18, 20, 21))
    rates = sorted(matmul(*sizes, jnp.float32) for sizes in _PRODUCTS)
    half = max(matmul(*sizes, jnp.bfloat16) for sizes in _PRODUCTS)
    sharing = devices / cores
    latency = all_reduce(16) / sharing  # of one collective: threads meet once
    wire = 2 * 4 * (1 << 19) * (devices - 1) / devices
    moving = max(all_reduce(1 << 19) - latency * sharing, 1e-9)
    return Hardware(
        name="cpu",
        source=f"measured by weft hardware measure, {devices} virtual devices on {cores} cores",
        devices_per_node=cores,
        peak_flops={"f32": rates[-1], "bf16": half},
        matmul_efficiency=rates[len(rates) // 2] / rates[-1],
        memory_bytes=_ram() // devices,
        memory_bandwidth=bandwidth,
        network=(Level("memory copies", wire * sharing / moving, latency),),
        shared_cores=cores,
    )


# Rows, inner and columns of the products that a Transformer's slices make.
_PRODUCTS = ((2048, 256, 256), (256, 2048, 256), (256, 256, 2048), (512, 512, 512), (256, 1024, 256))


def _typical(program: Any, *args: Any, tries: int = 9) -> float:
    """The median of the seconds of a call, after a first one that compiles."""
    import time

    import jax

    def once() -> float:
        start = time.perf_counter()
        jax.block_until_ready(jax.tree.leaves(program(*args)))
        return time.perf_counter() - start

    once()
    return statistics.median(once() for _ in range(tries))


def _ram() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not on this system
        return 8 << 30
