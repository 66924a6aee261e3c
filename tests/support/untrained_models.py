"""Untrained models with parameters from NumPy: `nn.init` would compile a program for each model."""

import numpy as np

import weft as wf
from weft.models import Transformer
from weft.nn.module import map_parameters


def untrained(config, seed=0):
    """A model with random parameters: scales and biases around 1, the others around 0."""
    draw = np.random.default_rng(seed)

    def drawn(p):
        shape, features = [d.size for d in p.dims], [d for d in p.dims if d.name != "layers"]
        values = draw.uniform(0.5, 1.5, shape) if len(features) == 1 else draw.normal(0, 0.25, shape)
        return wf.parameter(wf.tensor(values.astype(p.dtype), p.dims))

    return map_parameters(drawn, Transformer(config))
