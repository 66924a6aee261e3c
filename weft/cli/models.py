"""`weft models`: the known models and their parameters."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any

import tyro
from tyro.conf import Positional, arg

from .output_files import print_table


@dataclass
class ModelsListCommand:
    """List the known models."""

    json: bool = False
    """Print JSON instead of text."""

    def run(self) -> None:
        from ..models import preset, presets
        from ..plan.units import human_count

        known = [preset(name) for name in presets()]
        if self.json:
            import json

            print(json.dumps([{"name": p.name, "parameters": p.parameter_count} for p in known], indent=1))
            return
        rows: list[Any] = [("name", ">parameters", ">layers", ">d_model", ">d_ff", ">heads", "")]
        for p in known:
            c = p.config
            sizes = [str(n) for n in (c.layers, c.d_model, c.d_ff, c.heads)]
            rows.append((p.name, human_count(p.parameter_count), *sizes, p.about))
        print_table(rows)


@dataclass
class ModelsShowCommand:
    """Show the parameters of a model, their dims and sizes, and its configuration."""

    name: Annotated[Positional[str], arg(metavar="NAME")]
    """A name from `weft models list`."""
    json: bool = False
    """Print JSON instead of text."""

    def run(self) -> None:
        from .. import nn
        from ..core.dims import format_dims
        from ..models import preset
        from ..models.presets import count_by_kind

        chosen = preset(self.name)
        parameters = nn.parameters(chosen.model())
        counts = count_by_kind(chosen.config)
        if self.json:
            import json

            print(
                json.dumps(
                    {
                        "name": chosen.name,
                        "config": {f.name: getattr(chosen.config, f.name) for f in fields(chosen.config)},
                        "parameters": {n: {d.name: d.size for d in p.dims} for n, p in parameters.items()},
                        "count": {"all": chosen.parameter_count, **counts},
                    },
                    indent=1,
                )
            )
            return
        print(f"{chosen.name}: {chosen.about}; {chosen.batch} rows of {chosen.length} positions per step\n")
        rows: list[Any] = [("parameter", ">count", "dims")]
        rows += [(name, f"{p.size:,}", format_dims(p.dims)) for name, p in parameters.items()]
        print_table(rows)
        print(f"\n{chosen.parameter_count:,} in total:")
        print_table([(f"  {kind}", f"{count:,}") for kind, count in counts.items()], header=False)
        changed = [f for f in fields(chosen.config) if getattr(chosen.config, f.name) != f.default]
        print("\n" + ", ".join(f"{f.name} {getattr(chosen.config, f.name)}" for f in changed))
        print(
            f"precision: {chosen.config.compute} for matrix products and activations; "
            "float32 for parameters, norms, softmax, the loss, and gradient sums"
        )


@dataclass
class ModelsCommand:
    """List the known models, or show the parameters of one."""

    do: (
        Annotated[ModelsListCommand, tyro.conf.subcommand("list")]
        | Annotated[ModelsShowCommand, tyro.conf.subcommand("show")]
    ) = field(default_factory=ModelsListCommand)
    json: bool = False
    """Print JSON instead of text."""

    def run(self) -> None:
        replace(self.do, json=self.json or self.do.json).run()
