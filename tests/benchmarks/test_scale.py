"""Size and depth cost nothing, and nothing hangs."""

import functools
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hlo import instructions

ROOT = Path(__file__).parents[2]
SMALL = """
import sys
import jax
import weft as wf
wf.cpu_devices(int(sys.argv[1]))
from benchmarks.handwritten import Size
from benchmarks import lm
from tests.support.hlo import instructions
data, model, layers = map(int, sys.argv[2:5])
size = Size(layers=layers, d_model=32, d_ff=16 * model, heads=model, d_kv=8,
            vocab=32 * model, length=8, batch=2 * data)
program = lm.step(size, f"data={data} model={model}")
print(instructions(program.compile(*lm.specs(size)).as_text()))
"""

MANY_CALLS = """
import sys
import numpy as np
import jax
import weft as wf
count = int(sys.argv[1])
wf.cpu_devices(count)
rows, columns = wf.dims(f"rows={count} columns=6")

def step(w, x):
    y = wf.einsum(wf.tanh(wf.einsum(x, w, out=[columns])), x, out=[rows])
    return w + wf.mean(y) * 0.01, wf.sum(y)

program = wf.spmd(step, f"a=2 b={count // 2}", "rows:a+b")
w = wf.tensor(np.ones(count, np.float32), [rows])
x = wf.tensor(np.ones((count, 6), np.float32) / count, [rows, columns])
for _ in range(200):
    w, total = program(w, x)
print(float(total))
"""


def run(code, *args, seconds):
    """Run a new Python process, and kill it at the timeout."""
    process = subprocess.Popen(
        [sys.executable, "-c", code, *map(str, args)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        pytest.fail(f"no answer within {seconds} s")
    assert process.returncode == 0, err
    return out


@functools.cache
def compiled_size(devices, data, model, layers):
    return int(run(SMALL, devices, data, model, layers, seconds=240))


def test_devices_do_not_make_the_program_larger():
    assert compiled_size(8, 4, 2, 4) == compiled_size(512, 128, 4, 4)


def test_depth_does_not_make_the_program_larger():
    assert compiled_size(8, 4, 2, 4) == compiled_size(8, 4, 2, 48)


@pytest.mark.parametrize("devices", [16, 64])
def test_two_hundred_calls_finish(devices):
    run(MANY_CALLS, devices, seconds=240)


@pytest.mark.slow
@pytest.mark.parametrize("turn", range(20))
@pytest.mark.parametrize("devices", [16, 64])
def test_two_hundred_calls_finish_every_time(devices, turn):
    run(MANY_CALLS, devices, seconds=240)


def test_the_counter_of_instructions_counts():
    text = "ENTRY main {\n  a = f32[] parameter(0)\n  ROOT b = f32[] negate(a)\n}\n"
    assert instructions(text) == 2
