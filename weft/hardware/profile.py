"""Hardware profiles: small TOML files with the numbers from which a plan's time is computed.

Each profile names the source of its numbers; `weft hardware list` shows them. You can write your own:

    name = "my-box"
    source = "measured by me"           # where the numbers come from
    devices_per_node = 8
    matmul_efficiency = 0.75            # the share of the peak that large matmuls achieve

    [peak_flops]                        # FLOP/s of one device, by dtype
    f32 = 156e12
    bf16 = 312e12

    [memory]                            # of one device
    bytes = 80e9
    bandwidth = 2.0e12                  # bytes/s

    [[network]]                         # innermost level first
    name = "NVLink"
    bandwidth = 300e9                   # bytes/s of one device, in one direction
    latency = 2e-6                      # seconds for each step of a ring
    devices = 8                         # how many devices it connects; the last level connects any number

    [[network]]
    name = "InfiniBand"
    bandwidth = 25e9
    latency = 4e-6

A torus has `torus = 2` or 3, its number of directions, and `wrap = 4`: lengths that are multiples of 4 close
to rings. `overlapped = ["all-gather"]` lists the kinds of collectives that the compiler overlaps with other
work; without it, sums of gradients and gathers of parameters overlap. `platform` is "gpu" unless it says
"tpu" or "cpu": plans follow the compiler of the platform. `on_chip_bytes` is the memory in which a TPU's
compiler keeps arrays between kernels. `shared_cores` is for virtual devices that share the cores of a CPU:
then all numbers are those of one core.

A name may have a shape, `tpu-v5e:16x16` or `h100:16x8`: the sides of a torus, or the sizes of the levels of
the network, the outermost first. Plans then lay the axes of a mesh over its links (`hardware/topology.py`).

A name is looked up in `~/.config/weft/` first, then among the profiles that come with Weft.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from ..core.errors import HardwareError, nearest
from ..core.field_types import FieldType, NonNegative, NonNegativeInt, Positive, PositiveInt, Range, Text
from ..core.fields import Offender, documented, field_types, validate
from .toml import TomlTable

CollectiveKind = Literal["all-reduce", "all-gather", "reduce-scatter"]
PROFILES = Path(__file__).parent / "profiles"  # those that come with Weft


@documented
@dataclass(frozen=True)
class NetworkLevel:
    """One level of a machine's network. A new field is read from TOML files, too."""

    name: Text
    """`ICI`, `NVLink`."""
    bandwidth: Positive
    """Bytes/s of one device (for a torus: of one of its links), in one direction."""
    latency: NonNegative
    """Seconds for one step from device to device."""
    devices: PositiveInt | None = None
    """The number of devices it connects, inner levels included; None: any number."""
    torus: NonNegativeInt = 0
    """The number of torus directions; 0 is a switch."""
    wrap: PositiveInt = 1
    """In a torus, a length that is a multiple of this closes to a ring, which sends in both directions at
    once; any other length is a line."""

    def __post_init__(self) -> None:
        validate(self, HardwareError)

    def length(self, ways: int, inside: int) -> tuple[int, float]:
        """The number of torus directions that a group uses, and its length along each.

        Args:
          ways: the number of units to connect at this level.
          inside: the number of devices in one unit.
        """
        if not self.torus or self.devices is None:
            return 1, ways
        side = (self.devices / inside) ** (1 / self.torus)
        # The tolerance absorbs rounding: 64 ** (1 / 3) is 3.9999999999999996.
        count = next((k for k in range(1, self.torus) if ways <= side**k * 1.001), self.torus)
        return count, ways ** (1 / count)

    def links(self, ways: int, directions: int) -> int:
        """The number of links that a device uses at once per direction: two in a ring, one in a line."""
        return 2 if self.torus and ways > 2 and ways % self.wrap**directions == 0 else 1


@documented
@dataclass(frozen=True)
class Hardware:
    """A machine, by the numbers of one device.

    >>> Hardware.of("tpu-v4").peak("bf16")
    275000000000000.0
    """

    name: Text
    """The name of the profile."""
    source: Text
    """The source of the numbers."""
    devices_per_node: PositiveInt
    """The number of devices of one host."""
    peak_flops: Mapping[str, Positive]
    """FLOP/s by dtype."""
    matmul_efficiency: Annotated[float, Range(above=0, at_most=1)]
    """The share of the peak that large matmuls achieve."""
    memory_bytes: PositiveInt
    """Bytes of memory."""
    memory_bandwidth: Positive
    """Bytes/s of the memory."""
    network: tuple[NetworkLevel, ...]
    """The levels, innermost first."""
    shared_cores: NonNegativeInt = 0
    """The number of cores that virtual devices share; all numbers are then those of one core. 0: real
    devices."""
    overlapped: tuple[CollectiveKind, ...] = ("all-reduce", "all-gather", "reduce-scatter")
    """The kinds of collectives that the machine's compiler overlaps with other work, with its default
    options."""
    platform: Literal["cpu", "gpu", "tpu"] = "gpu"
    """Which of XLA's compilers compiles for it: they fuse and schedule differently."""
    on_chip_bytes: NonNegativeInt = 0
    """Bytes of the memory on the chip in which the compiler keeps arrays between kernels."""
    shape: tuple[PositiveInt, ...] = ()
    """The shape of a slice or a cluster, if it is known: the sides of a torus, or the sizes of the levels of
    the network, the outermost first."""

    def __post_init__(self) -> None:
        validate(self, HardwareError, more=self._missing())

    def _missing(self) -> Iterator[Offender]:
        if "f32" not in self.peak_flops:
            rule = "a mapping that has f32, which is the peak of every dtype that it does not have"
            yield Offender(("peak_flops",), self.peak_flops, rule)

    @classmethod
    def of(cls, given: HardwareLike) -> Hardware:
        """The hardware itself, or the profile with this name or path; `tpu-v5e:4x4` has a shape."""
        if isinstance(given, Hardware):
            return given
        name, shape = _split_shape(given)
        hardware = load_profile(find_profile(name))
        if not shape:
            return hardware
        _check_shape(hardware, shape)
        return dataclasses.replace(hardware, shape=shape)

    @property
    def label(self) -> str:
        """The name with the shape, `tpu-v5e:4x4`."""
        return f"{self.name}:{'x'.join(map(str, self.shape))}" if self.shape else self.name

    def peak(self, dtype: str) -> float:
        """Peak FLOP/s of matmuls of this dtype; that of f32 if the profile does not list it."""
        return self.peak_flops.get(_PEAK_OF.get(dtype, dtype), self.peak_flops["f32"])


_PEAK_OF = {"f16": "bf16"}  # profiles list one of two types that run at the same rate
HardwareLike = Hardware | str | os.PathLike[str]  # a machine, the name of a profile, or the path of one


# Finding


def user_folder() -> Path:
    """The folder of the user's own profiles."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "weft"


def known_profiles() -> dict[str, Path]:
    """All profiles by name; the user's own override those of Weft."""
    profiles: dict[str, Path] = {}
    for folder in (PROFILES, user_folder()):
        profiles |= {path.stem: path for path in sorted(folder.glob("*.toml"))}
    return dict(sorted(profiles.items()))


def find_profile(name: str | os.PathLike[str]) -> Path:
    """The file of a profile, by its name or path."""
    if isinstance(name, os.PathLike) or (
        isinstance(name, str) and (name.endswith(".toml") or os.sep in name)
    ):
        path = Path(name).expanduser()
        if path.is_file():
            return path
        raise HardwareError(
            f"there is no file {path}",
            rule="hardware is the name of a profile or the path of a TOML file",
            hint="weft hardware list shows the names; weft hardware show tpu-v4 prints an example file",
        )
    names = known_profiles()
    if isinstance(name, str) and name in names:
        return names[name]
    raise HardwareError(
        f"unknown hardware {name!r}{nearest(str(name).lower(), names)}",
        f"known: {', '.join(names)}",
        rule=f"a profile is one of these names, the path of a TOML file, or NAME.toml in {user_folder()}",
        hint="weft hardware show tpu-v4 prints a profile to start from; weft hardware measure measures "
        "this CPU",
    )


_SHAPED = re.compile(r"(.+):(\d+(?:x\d+)*)")


def _split_shape(given: str | os.PathLike[str]) -> tuple[str | os.PathLike[str], tuple[int, ...]]:
    """A name without its shape, and the shape."""
    match = _SHAPED.fullmatch(given) if isinstance(given, str) else None
    return (match[1], tuple(map(int, match[2].split("x")))) if match else (given, ())


def _check_shape(hardware: Hardware, shape: tuple[int, ...]) -> None:
    """Raise an error if a machine can't have a shape."""
    torus = next((level for level in hardware.network if level.torus), None)
    wanted = f"{torus.torus} sides" if torus is not None else f"up to {len(hardware.network)} levels"
    fits = len(shape) == torus.torus if torus is not None else len(shape) <= len(hardware.network)
    limits = [level.devices for level in hardware.network]
    if torus is None and fits:
        fits = shape[-1] <= (limits[0] or shape[-1])
    if not fits or 0 in shape:
        raise HardwareError(
            f"{hardware.name} has no shape {'x'.join(map(str, shape))}: its network has {wanted}",
            rule="a shape has the sides of a torus, such as tpu-v5e:4x4, or the sizes of the levels of the "
            "network, the outermost first, such as h100:16x8 (16 hosts of 8)",
            hint=f"leave it out if it is not known: {hardware.name}",
        )


# Reading

PEAK = FieldType.of(Positive)
# Tables in a file have these fields. The others are at its top, with the same names.
TABLE_FIELDS = ("peak_flops", "memory_bytes", "memory_bandwidth", "network")
SCALAR_FIELDS = [name for name in field_types(Hardware) if name not in (*TABLE_FIELDS, "shape")]


def load_profile(path: Path) -> Hardware:
    """Read a TOML file."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise HardwareError(
            f"{path} can't be read: {error}", hint="a hardware profile is a TOML file in UTF-8"
        ) from None
    return parse_profile(text, str(path))


def parse_profile(text: str, where: str = "hardware") -> Hardware:
    """Parse TOML text; `where` names it in messages."""
    top = TomlTable.read(text, where)
    kinds, peaks, memory = field_types(Hardware), top.table("peak_flops"), top.table("memory")
    levels = top.tables("network")
    hardware = Hardware(
        **top.fields(Hardware, *SCALAR_FIELDS),
        peak_flops={dtype: peaks.value(dtype, PEAK) for dtype in dict.fromkeys(["f32", *peaks.data])},
        memory_bytes=memory.value("bytes", kinds["memory_bytes"]),
        memory_bandwidth=memory.value("bandwidth", kinds["memory_bandwidth"]),
        network=tuple(NetworkLevel(**level.fields(NetworkLevel)) for level in levels),
    )
    for table in (top, memory, *levels):
        table.done()
    _check_levels(hardware, where)
    return hardware


def _check_levels(hardware: Hardware, where: str) -> None:
    *inner, last = (level.devices for level in hardware.network)
    spans = inner if last is None else [*inner, last]
    if any(n is None for n in spans) or sorted(set(spans), key=lambda n: n or 0) != spans:
        levels = ", ".join(f"{v.name} ({v.devices or 'any'})" for v in hardware.network)
        raise HardwareError(
            f"network levels {levels} of {where} are not ordered from the innermost to the outermost",
            rule="each level connects more devices than the one before; only the last may omit `devices`",
            hint="order [[network]] from the fastest to the slowest, and set `devices` of each",
        )


# Writing


def to_toml(hardware: Hardware) -> str:
    """The profile as TOML; numbers have four significant digits."""
    lines = _rows(hardware, *SCALAR_FIELDS)
    lines += ["", "[peak_flops]", *(f"{d} = {v:.4g}" for d, v in hardware.peak_flops.items())]
    lines += ["", "[memory]", f"bytes = {hardware.memory_bytes}"]
    lines += [f"bandwidth = {hardware.memory_bandwidth:.4g}"]
    for level in hardware.network:
        lines += ["", "[[network]]", *_rows(level)]
    return "\n".join(lines) + "\n"


def _rows(owner: Hardware | NetworkLevel, *names: str) -> list[str]:
    """The fields of a dataclass that differ from their defaults."""
    fields = [field for field in dataclasses.fields(owner) if field.name in names or not names]
    values = {field.name: (getattr(owner, field.name), field.default) for field in fields}
    return [f"{name} = {_toml_value(value)}" for name, (value, default) in values.items() if value != default]


def _toml_value(value: str | float | tuple[str, ...]) -> str:
    return (
        f"[{', '.join(map(_quoted, value))}]"
        if isinstance(value, tuple)
        else _quoted(value)
        if isinstance(value, str)
        else f"{value:.4g}"
        if isinstance(value, float)
        else str(value)
    )


def _quoted(text: str) -> str:
    """A TOML string. It is a JSON string, except that TOML also requires an escape for DEL."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
