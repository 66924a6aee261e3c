"""Run `weft` commands on a small program, in this process or in a new one."""

import functools
import subprocess
import sys
from pathlib import Path

from weft.cli.main import main

PROGRAM = """
import weft as wf

batch, d_model, d_ff = wf.dims("batch=64 d_model=32 d_ff=128")


def loss(w, v, x):
    h = wf.relu(wf.einsum(x, w, out=[batch, d_ff]))
    return wf.mean(wf.square(wf.einsum(h, v, out=[batch, d_model]) - x))


step = wf.value_and_grad(loss, argnums=(0, 1))


def example():
    w, v = wf.spec([d_model, d_ff]), wf.spec([d_ff, d_model])
    return step, (w, v, wf.spec([batch, d_model]))


def staged():
    return wf.spmd(step, "data=4", "batch:data"), example()[1]


def stored():
    layout = wf.Layout("batch:data", params="d_model:data", optimizer="d_ff:data")
    return wf.spmd(step, "data=4", layout), example()[1]


def fails_in_its_own_line():
    def broken(x):
        return inner(x)

    def inner(x):
        return wf.sum(x, "batch") + undefined_name  # here

    return broken, (wf.spec([batch, d_model]),)


def fails_in_jax():
    def broken(x):
        return x.array @ x.array  # and here

    return broken, (wf.spec([batch, d_model]),)


def fails_before_tracing():
    raise KeyError("no such thing")


def leaves():
    raise SystemExit(3)


def returns_nothing():
    pass


def returns_too_much():
    return step, example()[1], {}
"""
MESH = ["--mesh", "data=4 model=2", "--layout", "batch:data d_ff:model"]


@functools.cache
def command():
    script = Path(sys.executable).with_name("weft")
    return [str(script)] if script.exists() else [sys.executable, "-m", "weft.cli.main"]


def weft(*arguments, **more):
    """Run the command in a new process, as a shell would."""
    return subprocess.run([*command(), *arguments], capture_output=True, text=True, timeout=120, **more)


def run(capsys, *arguments):
    """Run the command in this process; return the exit code, stdout and stderr."""
    try:
        code = main(arguments)
    except SystemExit as exit:  # raised by the parser
        code = exit.code
    out, err = capsys.readouterr()
    return code, out, err
