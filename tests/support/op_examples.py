"""Operands for the examples of ops, by name (`weft/core/registry.py`)."""

import jax
import numpy as np
from compare import booleans, integers, real

import weft as wf


def _positive_definite(seed, batch, size):
    values = np.random.default_rng(seed).uniform(-0.1, 0.1, (batch, size, size))
    return (values + values.swapaxes(1, 2) + np.diag(np.arange(2.0, size + 2))).astype(np.float32)


OPERANDS = {
    "x": real(0, "a=6 b=3"),
    "y": real(1, "b=3 a=6"),
    "p": real(2, "a=6 b=3", 0.2, 2.0),
    "u": real(3, "a=6 b=3", -0.9, 0.9),
    "g": real(4, "a=6 b=3", 1.1, 3.0),
    "i": integers(5, "a=6 b=3", 0, 5),
    "j": integers(6, "a=6", 0, 5),
    "c": booleans(7, "a=6 b=3"),
    "d": booleans(8, "b=3"),
    "ids": integers(9, "m=2", 0, 5),
    "start": wf.tensor(2, ""),
    "kernel": real(10, "w=3 b=3 f=2"),
    "m": wf.tensor(_positive_definite(11, 3, 6), "b=3 a=6 e=6"),
    "key": jax.random.key(7),
}
