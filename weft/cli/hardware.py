"""`weft hardware`: the hardware profiles for predicted times."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from tyro.conf import Positional, arg

from .output_files import check_output_path, print_table, report_write_errors, write_output
from .targets import UsageError

if TYPE_CHECKING:
    from ..hardware.profile import Hardware


@dataclass
class HardwareListCommand:
    """List the known hardware profiles: FLOP/s, memory and network of one device."""

    json: bool = False
    """Print JSON instead of text."""

    def run(self) -> None:
        from ..hardware.profile import known_profiles, load_profile

        profiles = [load_profile(path) for path in known_profiles().values()]
        if self.json:
            import json

            from ..plan.facts import to_jsonable

            print(json.dumps([to_jsonable(profile) for profile in profiles], indent=1))
            return
        header = ("name", ">bf16 FLOP/s", ">memory", ">bytes/s", "network, bytes/s in one direction")
        print_table([header, *map(_row, profiles)])


def _row(profile: Hardware) -> tuple[str, str, str, str, str]:
    from ..plan.units import human_bytes, human_count

    levels = ", ".join(
        f"{level.name} {human_count(level.bandwidth)}"
        + (f" ({level.devices})" if level.devices is not None else "")
        for level in profile.network
    )
    speeds = (profile.peak("bf16"), profile.memory_bandwidth)
    flops, bandwidth = (human_count(speed) for speed in speeds)
    return profile.name, flops, human_bytes(profile.memory_bytes), bandwidth, levels


@dataclass
class HardwareShowCommand:
    """Print a hardware profile, with its sources, as a TOML file.

    Use it as a template: save your own profile as ~/.config/weft/NAME.toml, or pass its path to
    --hardware."""

    name: Annotated[Positional[str], arg(metavar="NAME")]
    """A name from `weft hardware list`, or a TOML file."""

    def run(self) -> None:
        from ..hardware.profile import find_profile, load_profile

        path = find_profile(self.name)
        load_profile(path)  # raises if the profile is invalid
        print(path, file=sys.stderr)
        print(path.read_text(encoding="utf-8"), end="")


@dataclass
class HardwareMeasureCommand:
    """Measure this CPU as virtual devices and write the profile `cpu`. It takes a few seconds; leave the
    machine idle meanwhile."""

    output: Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="")] = None
    """The file to write (default: ~/.config/weft/cpu.toml, which `--hardware cpu` reads)."""
    devices: int = 8
    """The number of virtual devices that share the cores."""

    def run(self) -> None:
        from ..hardware.measure import measure_cpu
        from ..hardware.profile import to_toml, user_folder

        if self.devices < 2:
            raise UsageError(
                f"--devices {self.devices}",
                rule="the network is measured too, so at least 2 devices are needed",
                hint="omit --devices; the default is 8",
            )
        path = self.output or user_folder() / "cpu.toml"
        if self.output is None:
            with report_write_errors(path):
                path.parent.mkdir(parents=True, exist_ok=True)
        check_output_path(path)
        print("measuring", file=sys.stderr)
        write_output(path, to_toml(measure_cpu(self.devices)))
        print(path)


@dataclass
class HardwareCommand:
    """List, show and measure the hardware profiles that predicted times are based on."""

    do: (
        Annotated[HardwareListCommand, tyro.conf.subcommand("list")]
        | Annotated[HardwareShowCommand, tyro.conf.subcommand("show")]
        | Annotated[HardwareMeasureCommand, tyro.conf.subcommand("measure")]
    )

    def run(self) -> None:
        self.do.run()
