"""`weft hardware`: the machines that a plan's time can be predicted for."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from tyro.conf import Positional, arg

from .output_files import check_output_path, print_table, report_write_errors, write_output
from .targets import UsageError


@dataclass
class HardwareListCommand:
    """The known machines, one to a line: FLOP/s, memory and network of one device."""

    json: bool = False
    """Print JSON instead of text."""

    def run(self) -> None:
        from ..hardware.profile import known_profiles, load_profile

        machines = [load_profile(path) for path in known_profiles().values()]
        if self.json:
            import json

            from ..plan.facts import to_jsonable

            print(json.dumps([to_jsonable(m) for m in machines], indent=1))
            return
        header = ("name", ">bf16 FLOP/s", ">memory", ">bytes/s", "network, bytes/s in one direction")
        print_table([header, *map(_row, machines)])


def _row(machine: Any) -> tuple[str, str, str, str, str]:
    from ..plan.units import human_bytes, human_count

    levels = ", ".join(
        f"{level.name} {human_count(level.bandwidth)}"
        + (f" ({level.devices})" if level.devices is not None else "")
        for level in machine.network
    )
    speeds = (machine.peak("bf16"), machine.memory_bandwidth)
    flops, bandwidth = (human_count(speed) for speed in speeds)
    return machine.name, flops, human_bytes(machine.memory_bytes), bandwidth, levels


@dataclass
class HardwareShowCommand:
    """A machine's whole profile, with its sources, as the TOML file that it is.

    It is a pattern for one of your own: put that into ~/.config/weft/NAME.toml, or give its path to
    --hardware."""

    name: Annotated[Positional[str], arg(metavar="NAME")]
    """A name of `weft hardware list`, or a TOML file."""

    def run(self) -> None:
        from ..hardware.profile import find_profile, load_profile

        path = find_profile(self.name)
        load_profile(path)
        print(path, file=sys.stderr)
        print(path.read_text(encoding="utf-8"), end="")


@dataclass
class HardwareMeasureCommand:
    """Measure this CPU as virtual devices, and write the profile `cpu`. It takes some seconds; leave the
    machine alone meanwhile."""

    output: Annotated[Path | None, arg(metavar="FILE", help_behavior_hint="")] = None
    """Where to write it; by default ~/.config/weft/cpu.toml, from where `--hardware cpu` takes it."""
    devices: int = 8
    """How many virtual devices share the cores while it is measured."""

    def run(self) -> None:
        from ..hardware.measure import measure_cpu
        from ..hardware.profile import to_toml, user_folder

        if self.devices < 2:
            raise UsageError(
                f"--devices {self.devices}",
                rule="their network is measured too: it has at least 2 devices",
                hint="leave --devices out: it is 8 by default",
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
    """The machines that a plan's time can be predicted for."""

    do: (
        Annotated[HardwareListCommand, tyro.conf.subcommand("list")]
        | Annotated[HardwareShowCommand, tyro.conf.subcommand("show")]
        | Annotated[HardwareMeasureCommand, tyro.conf.subcommand("measure")]
    )

    def run(self) -> None:
        self.do.run()
