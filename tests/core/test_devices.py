"""Virtual CPU devices, configured before JAX is used."""

import platform
import resource
import subprocess
import sys
from types import SimpleNamespace

import pytest

from weft.core import devices

# A program whose result is larger than what malloc keeps by itself, and how many pages its calls fault in.
FAULTS = """
import jax, jax.numpy as jnp, resource, weft as wf
{prepared}
f = jax.jit(lambda x: x * 2 + jnp.arange(2**24, dtype=jnp.float32))  # 64 MiB
for _ in range(10):
    f(1.0).block_until_ready()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(4):
    f(1.0).block_until_ready()
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) // 4)
"""


def faults(prepared):
    command = [sys.executable, "-c", FAULTS.format(prepared=prepared)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True, timeout=120).stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc is told to keep memory")
def test_memory_is_preserved():
    before = faults("")
    assert before >= 2**26 // resource.getpagesize()
    # The best of three: a busy machine may take pages away in between.
    assert min(faults("wf.cpu_devices(1)") for _ in range(3)) < before / 2


def test_devices_may_be_configured_after_a_function_is_decorated():
    script = """
import weft as wf
double = wf.spmd(lambda x: x + x)
wf.cpu_devices(2)
print(wf.spmd(lambda x: wf.sum(double(x)), "x=2", "a:x").mesh.size)
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "2\n"), done.stderr


@pytest.mark.parametrize("platforms, there", [(None, True), ("cpu", True), ("cuda,cpu", False)])
def test_whether_it_is_all_there_is(monkeypatch, platforms, there):
    monkeypatch.setattr(devices.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(devices, "jax", SimpleNamespace(config=SimpleNamespace(jax_platforms=platforms)))
    assert devices.is_cpu_only() == there
    monkeypatch.setattr(devices.importlib.util, "find_spec", lambda name: name == "jax_plugins")
    assert not devices.is_cpu_only()
