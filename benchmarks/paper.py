"""The paper's runs against their plans: rewrites the tables of docs/paper.md.

python -m benchmarks.paper

The table of compiled programs needs the extra tpu-compiler, and a minute for each run the first time; without
it the table stays as it is.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax

import weft as wf
from weft import nn, optim, train
from weft.hardware.profile import Hardware
from weft.models import preset
from weft.plan.plan import Plan
from weft.plan.units import human_bytes

PAGE = Path(__file__).parent.parent / "docs" / "paper.md"
LAYOUT = "batch:batch vocab:model d_ff:model heads:model"


@dataclass(frozen=True)
class Run:
    """A training run of the Mesh-TensorFlow paper, on a number of TPU v2 cores."""

    name: str
    mesh: str
    hours: float
    steps: int
    target: str

    @property
    def seconds(self) -> float:
        return self.hours * 3600 / self.steps


RUNS = (
    Run("lm-4.9b", "batch=16 model=32", 13, 136_000, "tpu-v2:16x16"),
    Run("tr-2.89b", "batch=16 model=8", 22, 154_000, "tpu-v2:8x8"),
)


def plan_of(run: Run) -> Plan:
    """The plan of one train step with Adafactor and dropout, as in the paper."""
    return traced(run).plan()


def traced(run: Run) -> Any:
    """One train step, traced."""
    step, args = train_step_of(run.name)
    return wf.spmd(step, run.mesh, LAYOUT, donate=(0, 1)).trace(*args)


def train_step_of(name: str) -> tuple[Any, tuple[Any, ...]]:
    """A model's train step, and what it is given."""
    chosen, optimizer = preset(name), optim.Adafactor(0.01)
    model, key = nn.specs(chosen.model()), jax.eval_shape(lambda: jax.random.key(0))
    return train.train_step(optimizer), (model, optimizer.init(model), chosen.batch_specs(), key)


def table() -> str:
    """The runs, and how much each assumption weighs."""
    machine = Hardware.of("tpu-v2")
    others = {
        "products at 67 % of the peak": replace(machine, matmul_efficiency=0.67),
        "products at 87 %": replace(machine, matmul_efficiency=0.87),
        "half the memory bandwidth": replace(machine, memory_bandwidth=machine.memory_bandwidth / 2),
        "half the network": replace(
            machine, network=tuple(replace(n, bandwidth=n.bandwidth / 2) for n in machine.network)
        ),
    }
    lines = ["| run | paper | planned | planned / paper |", "|---|---:|---:|---:|"]
    cores = [
        "| run | memory | FLOPs | work done twice | products | memory traffic | network |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    weights = ["| assumption | " + " | ".join(run.name for run in RUNS) + " |", "|---|" + "---:|" * len(RUNS)]
    plans = [plan_of(run) for run in RUNS]
    for run, plan in zip(RUNS, plans, strict=True):
        time = plan.time(machine)
        low, high = (s / run.seconds for s in (time.overlapped_seconds, time.total_seconds))
        lines.append(
            f"| {run.name} on `{run.mesh}` | {1e3 * run.seconds:.0f} ms "
            f"| {1e3 * time.overlapped_seconds:.0f}–{1e3 * time.total_seconds:.0f} ms "
            f"| {low:.2f}–{high:.2f} |"
        )
        parts = (time.compute_seconds, time.memory_seconds, sum(time.network_seconds.values()))
        cores.append(
            f"| {run.name} | {human_bytes(plan.memory.peak)} | {plan.flops / 1e12:.2f} T "
            f"| {plan.duplication - 1:.1%} | " + " | ".join(f"{1e3 * part:.0f} ms" for part in parts) + " |"
        )
    for name, other in {"as above": machine, **others}.items():
        ratios = [p.time(other).overlapped_seconds / r.seconds for p, r in zip(plans, RUNS, strict=True)]
        weights.append(f"| {name} | " + " | ".join(f"{ratio:.2f}" for ratio in ratios) + " |")
    caption = "Planned / paper, with overlap, under other assumptions:"
    return "\n".join([*lines, "", "On each core:", "", *cores, "", caption, "", *weights])


def compiled() -> str:
    """The paper's times beside those of the plan for the compiler, and of the compiled program."""
    lines = [
        "| run | paper | plan for libtpu | compiled: roofline | compiled: libtpu's cycles | cycles / paper |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    parts = [
        "| run | memory: plan for libtpu | compiled | matmuls by cycles | other work by cycles "
        "| all work by roofline | network |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for run in RUNS:
        program = traced(run)
        found, plan = program.compile_for(run.target), program.plan().on(run.target)
        planned = plan.time(run.target).total_seconds
        roofline, cycles = (n + found.network_seconds for n in (found.local_seconds, found.estimated_seconds))
        lines.append(
            f"| {run.name} on {run.target} | {1e3 * run.seconds:.0f} ms | {1e3 * planned:.0f} ms "
            f"| {1e3 * roofline:.0f} ms | {1e3 * cycles:.0f} ms | {cycles / run.seconds:.2f} |"
        )
        matmuls = sum(w.likely_seconds * w.count for w in found.work if w.flops)
        seconds = matmuls, found.estimated_seconds - matmuls, found.local_seconds, found.network_seconds
        parts.append(
            f"| {run.name} | {human_bytes(plan.memory.peak)} | {human_bytes(found.memory.peak)} | "
            + " | ".join(f"{1e3 * n:.0f} ms" for n in seconds)
            + " |"
        )
    return "\n".join([*lines, "", "On each core:", "", *parts])


ANY = 2**40  # the authors' state was half as large: bfloat16
# The meshes of all 13 models, from the authors' published configurations.
MESHES = {
    "lm-0.14b": "batch=32",
    "lm-0.22b": "batch=32",
    "lm-0.37b": "batch=8 model=4",
    "lm-0.67b": "batch=8 model=4",
    "lm-1.28b": "batch=16 model=8",
    "lm-2.48b": "batch=16 model=32",
    "lm-4.9b": "batch=16 model=32",
    "tr-0.15b": "batch=32",
    "tr-0.24b": "batch=32",
    "tr-0.42b": "batch=8 model=4",
    "tr-0.77b": "batch=8 model=4",
    "tr-1.48b": "batch=16 model=8",
    "tr-2.89b": "batch=16 model=8",
}


def searches() -> str:
    """The authors' meshes against what the search finds on as many cores."""
    times = [
        "| model | authors' mesh | planned | found, state stored as it is used | found, state in pieces "
        "| faster | plans |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    used = ["| model | mesh | layout |", "|---|---|---|"]
    pieces = ["| model | mesh | layout | `params=` |", "|---|---|---|---|"]
    for name, axes in MESHES.items():
        step, args = train_step_of(name)
        mesh = wf.Mesh(axes)
        rules = " ".join(rule for rule in LAYOUT.split() if rule.split(":")[1] in mesh.shape)
        theirs = wf.spmd(step, mesh, rules, donate=(0, 1)).plan(*args).time("tpu-v2").overlapped_seconds
        program = wf.spmd(step, donate=(0, 1))
        asked = {"devices": mesh.size, "hardware": "tpu-v2"}
        plain = wf.search(program, args, stored=False, memory=ANY, **asked)
        found = wf.search(program, args, **asked)
        plans = len(found.ranked) + len(found.too_large)
        times.append(
            f"| {name} | `{axes}` | {1e3 * theirs:.0f} ms | {1e3 * plain.best.seconds:.0f} ms "
            f"| {1e3 * found.best.seconds:.0f} ms | {theirs / found.best.seconds:.2f}× "
            f"| {plans} of {found.legal:,} |"
        )
        used.append(f"| {name} | {_shown(plain.best)} |")
        pieces.append(f"| {name} | {_shown(found.best)} | {_stored(found.best)} |")
        print(times[-1], flush=True)
    return "\n".join(
        [
            "Planned times of a step, how much faster the last is than the authors' layout, and how many "
            "candidates were planned:",
            "",
            *times,
            "",
            "Found, with state stored as it is used:",
            "",
            *used,
            "",
            "Found, with state in pieces:",
            "",
            *pieces,
        ]
    )


def _shown(one: Any) -> str:
    return f"`{one.candidate.mesh}` | `{one.candidate.rules}`"


def _stored(one: Any) -> str:
    """The rules of `params=`; those of `optimizer=` by its name."""
    rules = one.candidate.storage_rules
    shown = [f"`{text}`" if name == "params" else f"{name}=`{text}`" for name, text in rules.items()]
    return ", ".join(shown) or "none"


def main() -> None:
    page = PAGE.read_text(encoding="utf-8")
    sections = {"table": table(), "searches": searches()}
    if find_spec("libtpu"):
        sections["compiled"] = compiled()
    for name, made in sections.items():
        page = re.sub(
            rf"(<!-- {name} -->\n).*?(<!-- end -->)",
            lambda m, made=made: f"{m[1]}\n{made}\n\n{m[2]}",
            page,
            flags=re.S,
        )
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
