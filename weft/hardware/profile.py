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

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..core.errors import HardwareError, nearest
from .toml import TomlTable

PROFILES = Path(__file__).parent / "profiles"


@dataclass(frozen=True)
class NetworkLevel:
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
    network: tuple[NetworkLevel, ...]
    shared_cores: int = 0

    @classmethod
    def of(cls, given: Any) -> Hardware:
        """Hardware as it is, or what a name or a TOML file says."""
        return given if isinstance(given, Hardware) else load_profile(find_profile(given))

    def peak(self, dtype: str) -> float:
        """FLOP/s of matrix products of this dtype; that of f32 where the profile has no such entry."""
        return self.peak_flops.get(_PEAK_OF.get(dtype, dtype), self.peak_flops["f32"])


_PEAK_OF = {"f16": "bf16"}


# Finding


def user_folder() -> Path:
    """Where a user's own profiles are."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "weft"


def known_profiles() -> dict[str, Path]:
    """All profiles by name; a user's own come before those of Weft."""
    found: dict[str, Path] = {}
    for folder in (PROFILES, user_folder()):
        found |= {path.stem: path for path in sorted(folder.glob("*.toml"))}
    return dict(sorted(found.items()))


def find_profile(name: Any) -> Path:
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
    names = known_profiles()
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


def load_profile(path: Path) -> Hardware:
    """The hardware that a TOML file describes."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise HardwareError(
            f"{path} can't be read: {error}", hint="hardware is described in TOML, in UTF-8"
        ) from None
    return parse_profile(text, str(path))


def parse_profile(text: str, where: str = "hardware") -> Hardware:
    """The hardware that TOML text describes; `where` names it in messages."""
    top = TomlTable.read(text, where)
    peaks, memory = top.table("peak_flops"), top.table("memory")
    hardware = Hardware(
        name=top.text("name"),
        source=top.text("source"),
        devices_per_node=top.whole("devices_per_node"),
        peak_flops={dtype: peaks.number(dtype) for dtype in dict.fromkeys(["f32", *peaks.data])},
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


def _level(table: TomlTable) -> NetworkLevel:
    level = NetworkLevel(
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
    *inner, last = (level.devices for level in hardware.network)
    spans = inner if last is None else [*inner, last]
    if any(n is None for n in spans) or sorted(set(spans), key=lambda n: n or 0) != spans:
        shown = ", ".join(f"{v.name} ({v.devices or 'any'})" for v in hardware.network)
        raise HardwareError(
            f"network levels {shown} of {where} do not go outwards",
            rule="each level joins more devices than the one before; only the last may leave `devices` out",
            hint="order [[network]] from the fastest to the slowest, and say how many devices each joins",
        )


# Writing


def to_toml(hardware: Hardware) -> str:
    """The file that `parse` reads as this hardware; numbers have four digits."""
    lines = [
        f"name = {_quoted(hardware.name)}",
        f"source = {_quoted(hardware.source)}",
        f"devices_per_node = {hardware.devices_per_node}",
        f"matmul_efficiency = {hardware.matmul_efficiency:.4g}",
    ]
    lines += [f"shared_cores = {hardware.shared_cores}"] if hardware.shared_cores else []
    lines += ["", "[peak_flops]", *(f"{d} = {v:.4g}" for d, v in hardware.peak_flops.items())]
    lines += ["", "[memory]", f"bytes = {hardware.memory_bytes}"]
    lines += [f"bandwidth = {hardware.memory_bandwidth:.4g}"]
    for level in hardware.network:
        lines += ["", "[[network]]", f"name = {_quoted(level.name)}", f"bandwidth = {level.bandwidth:.4g}"]
        lines += [f"latency = {level.latency:.4g}"]
        lines += [f"devices = {level.devices}"] if level.devices is not None else []
        lines += [f"torus = {level.torus}", f"wrap = {level.wrap}"] if level.torus else []
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    """Text as TOML has it: as JSON, which leaves one control character more as it is."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
