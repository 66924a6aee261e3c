"""A language model trained on 8 devices: the model knows nothing of them, one line says what is split.

Every row of tokens follows one rule, t → 5·t + 3 modulo the vocabulary, from a random start. Change `MESH`
and `LAYOUT` as you like: the losses stay the same, up to rounding.

Run it: `python examples/transformer.py`
"""

import jax
import numpy as np

import weft as wf
from weft import nn, optim, train
from weft.models import Batch, Config, Transformer, shift_right

wf.cpu_devices(8)  # this computer as 8 devices

MESH, LAYOUT = "data=4 model=2", "batch:data d_ff:model heads:model vocab:model"
CONFIG = Config(vocab=64, d_model=32, d_ff=64, heads=4, d_kv=8, layers=2, longest=16)
STEPS = 20


def rows(draw):
    """A batch: 32 rows of 16 tokens, and what a decoder reads to say them."""
    tokens = [draw.integers(1, CONFIG.vocab, 32)]
    for _ in range(15):
        tokens.append((5 * tokens[-1] + 3) % CONFIG.vocab)
    targets = wf.tensor(np.stack(tokens, 1).astype(np.int32), "batch=32 length=16")
    return Batch(shift_right(targets), targets)


def main():
    optimizer = optim.AdamW(0.01 * optim.LinearWarmup(5))
    model = nn.init(Transformer(CONFIG), jax.random.key(0), MESH, LAYOUT)  # each device draws its slices
    state = optimizer.init(model)
    step = wf.spmd(train.train_step(optimizer), MESH, LAYOUT, donate=(0, 1))

    draw = np.random.default_rng(0)
    plan = step.plan(model, state, rows(draw), None)
    sent = ", ".join(f"{count:,} over {axis}" for axis, count in plan.comm_bytes.items())
    print(f'{nn.count(model):,} parameters, mesh "{MESH}", layout "{LAYOUT}"')
    print(f"each device, each step: {plan.flops:,} FLOPs, {plan.memory.peak:,} bytes at most, ", end="")
    print(f"bytes sent: {sent}\n")

    for number in range(STEPS):
        metrics, model, state = step(model, state, rows(draw), None)  # None: no key, for there is no dropout
        print(f"step {number:2}  loss {metrics['loss'].item():.3f}")


if __name__ == "__main__":
    main()
