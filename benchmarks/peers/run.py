"""`make bench-peers`: Weft beside its peers, each in an environment and process of its own; to RESULTS.md.

python -m benchmarks.peers.run [--rounds 10] [--only GROUP ...]

All do the train step of `handwritten.py` from the same numbers. The workers of a group are started one after
the other, then asked for one step each in turn (see worker.py), each round beginning with another; while one
works, the others wait. A ratio is of two steps of the same round.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import handwritten, lm
from benchmarks.measure import Spread
from benchmarks.peers.in_jax import MATMUL_FLOPS
from benchmarks.run import RESULTS, with_sections

ROOT = Path(__file__).parents[2]
COMPARED = 3  # losses of the first steps; at this learning rate rounding soon parts them
DRAWN = Path(__file__).parent / "measured.json"  # what the docs' picture is drawn from


@dataclass(frozen=True)
class Peer:
    """Who takes part: its name in the table, its environment, its module and its case there."""

    name: str
    environment: str
    module: str
    case: str


def ours(name: str, case: str) -> Peer:
    return Peer(name, ".venv", "in_jax", case)


def torch(name: str, case: str) -> Peer:
    return Peer(name, ".venv-peers", "in_torch", case)


# The first of a group is who the others are compared with.
GROUPS: dict[str, tuple[str, Sequence[Peer]]] = {
    "eight": (
        "8 devices, batch over 4, d_ff, heads and vocabulary over 2",
        (
            ours("Weft", "weft-4x2"),
            ours("JAX, jit with shardings", "jit-4x2"),
            ours("JAX, shard_map", "shard_map-4x2"),
            Peer("Mesh-TensorFlow", ".venv-mesh-tensorflow", "in_mesh_tensorflow", "mesh-tensorflow-8"),
        ),
    ),
    "rows": (
        "2 devices, batch over both",
        (
            ours("Weft", "weft-2x1"),
            ours("JAX, shard_map", "shard_map-2x1"),
            torch("PyTorch DDP", "ddp-2"),
            torch("PyTorch FSDP2", "fsdp-2"),
        ),
    ),
    "model": (
        "2 devices, d_ff, heads and vocabulary over both",
        (
            ours("Weft", "weft-1x2"),
            ours("JAX, shard_map", "shard_map-1x2"),
            torch("PyTorch DTensor", "dtensor-2"),
        ),
    ),
    "one": (
        "1 device, with both cores",
        (
            ours("Weft", "weft-1x1"),
            ours("JAX, jit", "single-1x1"),
            torch("PyTorch", "torch-1"),
        ),
    ),
}


PEAK = ours("matmul", "matmul-1x1")  # what the CPU can do, in the same rounds


class Worker:
    """A peer's process, that answers when it is asked."""

    def __init__(self, peer: Peer, work: Path):
        python = ROOT / peer.environment / "bin" / "python"
        command = [python, "-m", f"benchmarks.peers.{peer.module}", work, peer.case]
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.peer, started = peer, time.perf_counter()
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self.log}
        self.process = subprocess.Popen([*map(str, command)], cwd=ROOT, text=True, **pipes)
        self.losses = [self._answer()["loss"]]
        self.start_up = time.perf_counter() - started

    def step(self) -> float:
        """The seconds of one more step."""
        answer = self.ask("1")
        self.losses.append(answer["loss"])
        return answer["seconds"][0]

    def ask(self, line: str) -> dict[str, Any]:
        assert self.process.stdin is not None
        print(line, file=self.process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.log.seek(0)
            raise SystemExit(f"{self.peer.name} ended:\n{self.log.read()[-2000:]}")
        return json.loads(line)

    def end(self) -> None:
        """Lets the process end by itself, or ends it."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


@contextlib.contextmanager
def started(peers: Sequence[Peer], work: Path) -> Iterator[list[Worker]]:
    """A worker for each peer, of which each has done its first step before the next is started."""
    workers: list[Worker] = []
    try:
        for peer in peers:
            workers.append(Worker(peer, work))
            print(f"{peer.name}: first step after {workers[-1].start_up:.1f} s", flush=True)
        yield workers
    finally:
        for worker in workers:
            worker.end()


def measured(peers: Sequence[Peer], work: Path, rounds: int) -> list[dict[str, Any]]:
    """A row for each peer."""
    flops = flops_of_a_step()
    with started([*peers, PEAK], work) as workers:
        for worker in workers:  # one more to warm up
            worker.step()
        seconds: list[list[float]] = [[] for _ in workers]
        for turn in range(rounds):
            order = [(turn + n) % len(workers) for n in range(len(workers))]
            for n in order:
                seconds[n].append(workers[n].step())
        *workers, _ = workers
        check_losses(workers)
        programs = [worker.ask("program")["program"] for worker in workers]
    rows = []
    *seconds, multiplying = seconds
    for worker, own, program in zip(workers, seconds, programs, strict=True):
        speeds = [flops / mine * most / MATMUL_FLOPS for mine, most in zip(own, multiplying, strict=True)]
        ratio = Spread.of([theirs / mine for theirs, mine in zip(own, seconds[0], strict=True)])
        rows.append(
            {
                "name": worker.peer.name,
                "step": vars(Spread.of(own)),
                "ratio": vars(ratio),
                "of_peak": vars(Spread.of(speeds)),
                "start_up": worker.start_up,
                "program": program,
                "loss": worker.losses[COMPARED - 1],
                "rounds": rounds,
            }
        )
    return rows


def flops_of_a_step() -> int:
    return lm.step(mesh="", layout="").plan(*lm.specs()).flops


def check_losses(workers: Sequence[Worker]) -> None:
    """All had the same first losses: they did the same work."""
    ours = np.array(workers[0].losses[:COMPARED])
    for worker in workers:
        apart = np.max(np.abs(np.array(worker.losses[:COMPARED]) - ours))
        if not apart < 1e-3:
            raise SystemExit(
                f"{worker.peer.name}'s losses are not Weft's: {worker.losses}, {workers[0].losses}"
            )


def table(rows: Sequence[dict[str, Any]]) -> str:
    lines = [
        "| system | step, ms | quartiles | against Weft | quartiles | of peak "
        "| first step, s | operations | loss |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in rows:
        step, ratio = {name: 1e3 * x for name, x in row["step"].items()}, row["ratio"]
        lines.append(
            f"| {row['name']} | {step['median']:.0f} | {step['low']:.0f}–{step['high']:.0f} "
            f"| {ratio['median']:.2f} | {ratio['low']:.2f}–{ratio['high']:.2f} "
            f"| {row['of_peak']['median']:.2f} | {row['start_up']:.1f} "
            f"| {row['program']:,} | {row['loss']:.4f} |"
        )
    counted = {row["rounds"] for row in rows if "rounds" in row}  # rows of earlier runs may not say
    return "\n".join(lines) + "".join(f"\n\n{rounds} rounds, alternating." for rounds in counted)


def section(rows: dict[str, list[dict[str, Any]]]) -> str:
    tables = "\n\n".join(f"### {GROUPS[name][0]}\n\n{table(own)}" for name, own in rows.items())
    return f"""## Beside the peers

The train step of `handwritten.py` (4 layers, d_model 256, d_ff 1024, 8 heads of 32, vocabulary 8192, 16 rows
of 128 tokens, float32, SGD), from the same numbers, by each in an environment and a process of its own
(`peers/`). Devices of JAX and TensorFlow are virtual ones of one process, those of PyTorch are processes with
one thread each, over gloo. Weft tells the C library to keep freed memory, which the others don't
(docs/measured.md says what
that is worth). The first step is counted from the start of the process. Operations are counted as
each counts its own: instructions of XLA, nodes of a TensorFlow graph, calls of ATen. The peak is the speed of
matrix products of 2048 × 2048 by JAX on one device with both cores, in the same rounds; of it are the step's
{flops_of_a_step() / 1e9:.1f} GFLOP of products.

{tables}"""


def generating(rounds: int) -> str:
    """Decoding beside transformers, measured in one process of their common environment."""
    python, module = ROOT / ".venv-peers" / "bin" / "python", "benchmarks.peers.generate"
    run = subprocess.run(
        [python, "-m", module, "--rounds", str(rounds)],
        cwd=ROOT,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return f"""## Generating, beside transformers

The same GPT-2 with random weights: in each of 16 rows 16 tokens are read, and more generated up to 128
(`peers/generate.py`), {rounds} rounds.

{run.stdout.strip()}"""


def serving(rounds: int) -> str:
    """A server beside transformers behind HTTP, measured from their common environment."""
    python, module = ROOT / ".venv-peers" / "bin" / "python", "benchmarks.peers.serving"
    run = subprocess.run(
        [python, "-m", module, "--rounds", str(rounds)],
        cwd=ROOT,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    return f"""## Serving, beside transformers

The same Llama of 3.9 million random weights: each request asks for 64 tokens, the likeliest each time. The
peer is `transformers.generate` behind HTTP, one request at a time, with one thread (`peers/serving.py`),
{rounds} rounds.

{run.stdout.strip()}"""


def write(text: str) -> None:
    print(text + "\n", flush=True)
    RESULTS.write_text(with_sections(RESULTS.read_text(), text))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    every = [*GROUPS, "generate", "serve"]
    parser.add_argument("--only", nargs="+", choices=every, default=every)
    asked = parser.parse_args()
    rows = json.loads(DRAWN.read_text()) if DRAWN.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder) / "work.npz"
        tokens, targets = handwritten.batch(0)
        rate = np.float32(handwritten.LEARNING_RATE)
        np.savez(work, **handwritten.init(0), tokens=tokens, targets=targets, learning_rate=rate)
        for name in [name for name in asked.only if name in GROUPS]:
            rows[name] = measured(GROUPS[name][1], work, asked.rounds)
            print(table(rows[name]), flush=True)
    rows = {name: rows[name] for name in GROUPS if name in rows}
    DRAWN.write_text(json.dumps(rows, indent=1) + "\n")
    write(section(rows))
    if "generate" in asked.only:
        write(generating(max(asked.rounds // 2, 3)))
    if "serve" in asked.only:
        write(serving(max(asked.rounds // 2, 3)))


if __name__ == "__main__":
    main()
