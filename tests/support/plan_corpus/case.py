"""A case of the corpus: a program, its abstract arguments, and where it runs."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

import weft as wf

spec = wf.spec
param = partial(wf.spec, role="param")
ids = partial(wf.spec, dtype=jnp.int32)
KEY = jax.eval_shape(lambda: jax.random.key(0))


@dataclass(frozen=True)
class Case:
    """A program of the corpus.

    Attributes:
      name: unique in the corpus.
      fn: the function.
      mesh, layout: where it runs; the mesh "" is one device.
      args: specs of its arguments.
      donate: the positions of donated arguments.
    """

    name: str
    fn: object
    mesh: str
    layout: str
    args: tuple
    donate: tuple[int, ...] = ()

    def program(self):
        return wf.spmd(self.fn, self.mesh, self.layout, donate=self.donate)


def case(name, mesh, layout, *args, donate=()):
    """Decorate a function to be a case of the corpus."""
    return lambda fn: Case(name, fn, mesh, layout, args, donate)


def grads(*argnums):
    """Decorate a loss: its value, and its gradients with respect to several arguments."""
    return partial(wf.value_and_grad, argnums=argnums)
