"""How a peer takes part in `make bench-peers`: a process of its own, asked for steps over its standard input.

    python -m benchmarks.peers.NAME WORK CASE

WORK is a file that `numpy.load` reads: the parameters of `handwritten.init` by their names, `tokens` and
`targets` of one batch, and the float `learning_rate`. After its first step the worker prints a line of JSON,

    {"loss": 9.21}

Then it reads numbers of steps, one to a line, and answers each with the wall-clock seconds of every step and
the last loss. To `program` it says how many operations its program has, as its own compiler counts them.

    {"seconds": [0.91, 0.92], "loss": 8.97}
    {"program": 2345}

It ends when its input does. Only NumPy is needed here, as peers have environments of their own.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, TextIO

import numpy as np

Step = Callable[[], float]  # one train step, awaited; its loss


def work(path: str) -> dict[str, np.ndarray]:
    """The parameters, the batch and the learning rate, by name."""
    with np.load(path) as arrays:
        return dict(arrays)


def answers(step: Step, size: Callable[[], int], lines: Iterator[str]) -> Iterator[dict[str, Any]]:
    """What a worker says: its first loss, then to each line that it reads what was asked."""
    yield {"loss": step()}
    for line in lines:
        if line.strip() == "program":
            yield {"program": size()}
            continue
        seconds, loss = [], 0.0
        for _ in range(int(line)):
            start = time.perf_counter()
            loss = step()
            seconds.append(time.perf_counter() - start)
        yield {"seconds": seconds, "loss": loss}


def own_output() -> TextIO:
    """Standard output for the answers alone: what libraries print goes to standard error from here on."""
    mine = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return mine


def serve(start: Callable[[dict[str, np.ndarray], str], tuple[Step, Callable[[], int]]]) -> None:
    """Runs a worker: `start(work, case)` gives its step, and what counts the operations of its program."""
    out = own_output()
    path, case = sys.argv[1:]
    for answer in answers(*start(work(path), case), sys.stdin):
        print(json.dumps(answer), file=out, flush=True)
