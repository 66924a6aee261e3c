"""benchmarks/peers/in_torch.py does the steps of benchmarks/handwritten.py, and leaves no process behind."""

import json
import subprocess
import sys
import threading

import jax
import numpy as np
import pytest

from benchmarks import handwritten

TINY = handwritten.Size(layers=2, d_model=16, d_ff=24, heads=4, d_kv=8, vocab=40, length=6, batch=4)
LIMIT = 120  # seconds; then SIGKILL


@pytest.fixture
def work(tmp_path):
    tokens, targets = handwritten.batch(1, TINY)
    rest = {"tokens": tokens, "targets": targets, "learning_rate": np.float32(handwritten.LEARNING_RATE)}
    np.savez(tmp_path / "work.npz", **handwritten.init(0, TINY), **rest)
    return str(tmp_path / "work.npz")


def command(work, case):
    return [sys.executable, "-m", "benchmarks.peers.in_torch", work, case]


def expected():
    step = handwritten.single_step()
    params, rows = jax.device_put(handwritten.init(0, TINY)), jax.device_put(handwritten.batch(1, TINY))
    losses = []
    for _ in range(3):
        loss, params = step(params, *rows)
        losses.append(float(loss))
    return losses


@pytest.mark.parametrize("case", ["torch-1", "fsdp-2", "dtensor-2"])
def test_three_losses(case, work):
    # Rank 1 has the same standard error, so this also waits for its end. Counting operations changes nothing.
    said = subprocess.run(
        command(work, case), input="1\nprogram\n1\n", capture_output=True, text=True, timeout=LIMIT
    )
    assert said.returncode == 0, said.stderr
    first, second, program, third = map(json.loads, said.stdout.splitlines())
    np.testing.assert_allclose([first["loss"], second["loss"], third["loss"]], expected(), atol=1e-5)
    assert len(second["seconds"]) == 1
    assert program["program"] > 100


def test_rank_1_ends_with_rank_0(work):
    pipe = subprocess.PIPE
    worker = subprocess.Popen(command(work, "ddp-2"), stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    limit = threading.Timer(LIMIT, worker.kill)
    limit.start()
    try:
        worker.stdin.write("2\n")
        worker.stdin.flush()
        losses = [json.loads(worker.stdout.readline())["loss"] for _ in range(2)]
    finally:
        limit.cancel()
        worker.kill()
    np.testing.assert_allclose(losses, expected()[::2], atol=1e-5)
    # Its end is that of standard error, which rank 1 holds too.
    worker.communicate(timeout=LIMIT)
