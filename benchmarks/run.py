"""`make bench`: Weft beside hand-written JAX, in one process, alternating; writes RESULTS.md.

python -m benchmarks.run [--rounds 20] [--only SECTION ...]
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

import weft as wf
from benchmarks import (
    decoding,
    handwritten,
    limit,
    lm,
    models,
    pipelines,
    searching,
    serving,
    startup,
    training,
)
from benchmarks.measure import alternate
from weft.hardware.measure import measure_cpu

RESULTS = Path(__file__).parent / "RESULTS.md"


def lm_case(mesh: str, layout: str) -> Callable[[], Any]:
    return lm.case(lm.step(mesh=mesh, layout=layout))


def eager_ops(rounds: int) -> str:
    """An eager op on placed tensors against the same op as a cached `jit(shard_map(op))`."""
    mesh, layout = wf.Mesh("data=4 model=2"), wf.Layout("batch:data d_ff:model")
    x = wf.place(wf.tensor(np.ones((64, 64), np.float32), "batch=64 d_ff=64"), mesh, layout)
    spec, array = P("data", "model"), x.storage

    def raw(fn: Any, count: int) -> Callable[[], Any]:
        mapped = jax.shard_map(fn, mesh=mesh.jax_mesh, in_specs=(spec,) * count, out_specs=spec)
        jitted = jax.jit(mapped)
        return lambda: jitted(*[array] * count)

    cases = {
        "raw tanh": raw(jnp.tanh, 1),
        "weft tanh": lambda: wf.tanh(x).storage,
        "raw add": raw(jnp.add, 2),
        "weft add": lambda: (x + x).storage,
    }
    timings = alternate(cases, rounds=rounds, warmup=3)
    lines = ["| op | raw µs | Weft µs | ratio |", "|---|---:|---:|---:|"]
    for name in ("tanh", "add"):
        mine, theirs = timings[f"weft {name}"].seconds, timings[f"raw {name}"].seconds
        ratio = mine.median / theirs.median
        lines.append(f"| {name} | {1e6 * theirs.median:.0f} | {1e6 * mine.median:.0f} | {ratio:.2f} |")
    return "\n".join(lines) + f"\n\n{rounds} rounds, alternating."


# All of 8 devices, which share the cores: on one device XLA's CPU client gives arrays of 32 MB and more back
# to the system and pays for their pages again at each step, which no profile knows.
LAYOUTS = [
    ("data=8", "batch:data"),
    ("data=4 model=2", lm.LAYOUT),
    ("data=2 model=4", lm.LAYOUT),
    ("model=8", "d_ff:model heads:model vocab:model"),
    ("data=4 model=2", "batch:data heads:model vocab:model"),
    ("data=2 model=4", "batch:data d_ff:model"),
    ("data=4 model=2", "batch:data"),
    ("data=2 model=4", "batch:data"),
]


def predicted_order(rounds: int) -> str:
    """Eight layouts of the train step: the planned time on the CPU, as measured now, and the real one."""
    from scipy.stats import spearmanr

    hardware = measure_cpu()
    programs = [lm.step(mesh=mesh, layout=layout) for mesh, layout in LAYOUTS]
    planned = [p.plan(*lm.specs()).time(hardware).overlapped_seconds for p in programs]
    cases = {str(n): lm.case(p) for n, p in enumerate(programs)}
    timings = alternate(cases, rounds=rounds, warmup=1)
    measured = [timings[str(n)].seconds.median for n in range(len(programs))]
    lines = ["| mesh | layout | planned ms | measured ms | measured/planned |", "|---|---|---:|---:|---:|"]
    for (mesh, layout), guess, real in zip(LAYOUTS, planned, measured, strict=True):
        times = f"{1e3 * guess:.0f} | {1e3 * real:.0f} | {real / guess:.2f}"
        lines.append(f"| {mesh or 'one device'} | {layout} | {times} |")
    rank = spearmanr(planned, measured).statistic
    return (
        "\n".join(lines)
        + f"\n\nRank correlation (Spearman) of planned and measured: {rank:.2f}, {rounds} rounds"
    )


def machine() -> str:
    model = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    return (
        f"{model}, {os.cpu_count()} cores; Python {platform.python_version()}, jax {jax.__version__}; "
        f"{time.strftime('%Y-%m-%d')}"
    )


# The parts of the page, by the names that --only knows: each makes its text from the number of rounds.
SECTIONS: dict[str, Callable[[int], str]] = {
    "lm": lambda rounds: (
        f"""## A Transformer LM train step

4 layers, d_model 256, d_ff 1024, 8 heads of 32, vocabulary 8192, length 128, batch 16, float32, SGD.
`shard_map` and `jit` are written by hand in plain JAX (`handwritten.py`); Weft's is `lm.py`.

{models.train_steps(handwritten.cases(), lm_case, rounds)}"""
    ),
    "limit": limit.section,
    "models": models.sections,
    "startup": startup.section,
    "eager": lambda rounds: f"## An eager op on a placed tensor\n\n{eager_ops(rounds * 20)}",
    "plans": lambda rounds: (
        f"""## Planned against measured

The train step of `lm.py` in eight layouts; the profile of the CPU was measured in the same run.

{predicted_order(max(rounds // 4, 3))}"""
    ),
    "search": lambda rounds: searching.section(max(rounds // 4, 3)),
    "pipelines": pipelines.section,
    "training": lambda rounds: (
        f"""## Training

nanoGPT's model for a CPU (4 layers of 128 features, 12 rows of 64), {training.STEPS} steps each, one device.

{training.table(max(rounds // 4, 3))}

{training.against_pytorch(rounds)}"""
    ),
    "decoding": decoding.sections,
    "serving": lambda rounds: (
        f"""## A server under load

64 clients over loopback; of every ten requests eight are read to their end, one disconnects in the middle of
its stream, one is malformed (`serving.py`).

{serving.measured(2000, 64)}"""
    ),
}


ALL = 8
# In a process of their own: beside more devices, those that are used have fewer threads.
DEVICES = {"limit": 1, "pipelines": 2, "training": 1, "decoding": 1, "serving": 1}


def section(name: str, rounds: int, devices: int) -> str:
    """The text of a section, made in a process with as many devices as it is to have."""
    own = DEVICES.get(name, devices)
    if own == devices:
        return SECTIONS[name](rounds)
    asked = ["--only", name, "--rounds", str(rounds), "--devices", str(own)]
    run = subprocess.run([sys.executable, "-m", "benchmarks.run", *asked], check=True, stdout=subprocess.PIPE)
    return run.stdout.decode().strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=20, help="alternating rounds of train steps")
    parser.add_argument(
        "--only", nargs="+", choices=SECTIONS, help="some sections; the others stay as they are"
    )
    parser.add_argument("--devices", type=int, default=ALL, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    wf.cpu_devices(asked.devices)
    for name in asked.only or SECTIONS:
        text = section(name, asked.rounds, asked.devices)
        print(text + "\n", flush=True)
        if asked.devices == ALL:  # else it goes to who asked for it
            RESULTS.write_text(with_sections(RESULTS.read_text(), text))


def with_sections(page: str, text: str) -> str:
    """The page with the sections of a text in place of those with the same headings, or at its end.

    Each gets the machine and the day; how often it measured a section says itself.
    """
    head, *old = page.rstrip().split("\n\n## ")
    sections = {one.split("\n")[0]: one for one in old}
    for one in f"\n\n{text}".split("\n\n## ")[1:]:
        title, _, rest = one.partition("\n")
        sections[title] = f"{title}\n\n*{machine()}*\n{rest}"
    return "\n\n## ".join([head, *(one.rstrip() for one in sections.values())]) + "\n"


if __name__ == "__main__":
    main()
