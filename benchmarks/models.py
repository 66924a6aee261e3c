"""The library's own models beside hand-written JAX: sections of RESULTS.md.

Both sides compute the same thing from the same numbers, and that is asserted before anything is timed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import weft as wf
from benchmarks import handwritten, handwritten_tr, lm
from benchmarks.handwritten import EPSILON, LEARNING_RATE, Size
from benchmarks.measure import compared
from weft import nn, optim, train
from weft.models import Batch, Config, Transformer

MESH, LAYOUT = "data=4 model=2", lm.LAYOUT

# The names of hand-written parameters in the module, the longer ones of a translation model with dots.
ATTENTION = {"wq": "query.weight", "wk": "key.weight", "wv": "value.weight", "wo": "out.weight"}
FEED = {"w1": "wide.weight", "w2": "narrow.weight"}
LM_NAMES = {
    "embedding": "embedding.weight",
    "positions": "decoder.positions.weight",
    "attention_scale": "decoder.blocks.attention_norm.scale",
    **{own: f"decoder.blocks.attention.{name}" for own, name in ATTENTION.items()},
    "feed_scale": "decoder.blocks.feed_norm.scale",
    **{own: f"decoder.blocks.feed.{name}" for own, name in FEED.items()},
    "final_scale": "decoder.norm.scale",
    "projection": "last.weight",
}
TRANSLATION_NAMES = {
    "embedding": "embedding.weight",
    **{f"{stack}_positions": f"{stack}.positions.weight" for stack in ("encoder", "decoder")},
    **{f"{stack}_scale": f"{stack}.norm.scale" for stack in ("encoder", "decoder")},
    **{
        f"{stack}.{part}_scale": f"{stack}.blocks.{part}_norm.scale"
        for stack in ("encoder", "decoder")
        for part in ("attention", "memory", "feed")
    },
    **{
        f"{stack}.{part}.{own}": f"{stack}.blocks.{module}.{name}"
        for stack in ("encoder", "decoder")
        for part, module, maps in (
            ("attention", "attention", ATTENTION),
            ("memory", "memory_attention", ATTENTION),
            ("feed", "feed", FEED),
        )
        for own, name in maps.items()
    },
    "projection": "last.weight",
}


def config(size: Size, kind: str = "decoder") -> Config:
    """The hand-written models as a `Config`."""
    return Config(
        kind=kind,
        vocab=size.vocab,
        d_model=size.d_model,
        d_ff=size.d_ff,
        heads=size.heads,
        d_kv=size.d_kv,
        layers=size.layers,
        longest=size.length,
        epsilon=EPSILON,
    )


def filled(config: Config, params: dict[str, Any], names: dict[str, str]) -> Transformer:
    """The model with the numbers of hand-written parameters."""
    flat = jax.tree_util.tree_leaves_with_path(params)
    arrays = {names[".".join(key.key for key in path)]: array for path, array in flat}
    model = Transformer(config)
    declared = nn.parameters(model)
    assert arrays.keys() == declared.keys(), arrays.keys() ^ declared.keys()
    tensors = {name: wf.parameter(wf.tensor(arrays[name], p.dims)) for name, p in declared.items()}
    return jax.tree_util.tree_map_with_path(
        lambda path, _: tensors[nn.module.path_name(path)], model, is_leaf=nn.module.is_parameter
    )


def step(mesh: str = MESH, layout: str = LAYOUT) -> wf.Program:
    """`(model, state, batch, key) -> (metrics, model, state)` of plain gradient descent."""
    return wf.spmd(train.train_step(optim.Momentum(LEARNING_RATE)), mesh, layout, donate=(0, 1))


def case(program: wf.Program, model: Transformer, batch: Batch) -> Callable[[], Any]:
    """Each call is the next train step and returns its loss."""
    model, batch = wf.place((model, batch), program.mesh, program.layout)
    state = optim.Momentum(LEARNING_RATE).init(model)

    def run() -> Any:
        nonlocal model, state
        metrics, model, state = program(model, state, batch, None)
        jax.block_until_ready([p.storage for p in nn.parameters(model).values()])
        return metrics["loss"].storage

    return run


def language_model(size: Size = handwritten.STANDARD) -> tuple[Transformer, Batch]:
    """The model and the batch of `handwritten.cases`."""
    tokens, targets = lm.rows(*handwritten.batch(0, size), size)
    return filled(config(size), handwritten.init(0, size), LM_NAMES), Batch(tokens, targets)


def translation_model(size: Size = handwritten_tr.STANDARD) -> tuple[Transformer, Batch]:
    """The model and the batch of `handwritten_tr.cases`."""
    dims = [wf.Dim("batch", size.batch), wf.Dim("length", size.length)]
    sources, tokens, targets = (wf.tensor(a, dims) for a in handwritten_tr.batch(0, size))
    model = filled(config(size, "encoder_decoder"), handwritten_tr.init(0, size), TRANSLATION_NAMES)
    return model, Batch(tokens, targets, inputs=sources)


def train_steps(
    by_hand: dict[str, Callable[[], Any]], own: Callable[[str, str], Callable[[], Any]], rounds: int
) -> str:
    """A model's train step on eight devices and on one, against the hand-written ones of the same numbers.

    Args:
      by_hand: the hand-written ones, by name.
      own: Weft's, for a mesh and a layout.
      rounds: how often each is timed.
    """
    eight = {n: by_hand[n] for n in ("shard_map", "jit")} | {"weft": own(MESH, LAYOUT)}
    one = {"single": by_hand["single"], "weft, 1 device": own("", "")}
    for _ in range(2):  # the second loss tells of the gradients
        losses = {name: float(run()) for name, run in (eight | one).items()}
        assert max(losses.values()) - min(losses.values()) < 1e-4, losses
    return f"""### 8 virtual devices, mesh data=4 model=2

{compared(eight, rounds)}

### 1 device

{compared(one, rounds)}"""


# A mixture of experts


def layer_case(layer: Any, mesh: str, layout: str) -> Callable[[], Any]:
    """Each call is a layer's forward and backward pass."""

    def loss(layer: Any, x: wf.Tensor) -> wf.Tensor:
        if isinstance(layer, nn.MixtureOfExperts):
            y, losses = layer(x)
            return wf.mean(wf.square(y)) + 0.01 * losses.balance + 0.001 * losses.z
        return wf.mean(wf.square(layer(x)))

    program = wf.spmd(wf.value_and_grad(loss, argnums=(0, 1)), mesh, layout)
    x = np.random.default_rng(0).standard_normal((16, 128, 256)).astype(np.float32)
    layer = nn.init(layer, jax.random.key(0))
    given = layer, wf.tensor(x, "batch=16 length=128 d_model=256")
    layer, x = wf.place(given, program.mesh, program.layout)

    def run() -> Any:
        value, grads = program(layer, x)
        jax.block_until_ready([t.storage for t in nn.parameters(grads).values()])
        return value.storage

    return run


def mixtures(rounds: int) -> str:
    """A mixture's layer against a dense one with as many operations for a token."""
    d_model, d_ff, experts = wf.dims("d_model=256 d_ff=512 experts=8")
    dense = nn.FeedForward(d_model, d_ff)
    mixture = nn.MixtureOfExperts(d_model, d_ff, experts, top=1, capacity=1.25)
    eight = {
        "dense": layer_case(dense, "data=8", "batch:data"),
        "8 experts": layer_case(mixture, "data=8", "batch:data experts:data"),
    }
    one = {"dense": layer_case(dense, "", ""), "8 experts": layer_case(mixture, "", "")}
    said = "The mixture against the dense layer"
    return f"""### 8 virtual devices, mesh data=8, layout "batch:data experts:data"

{compared(eight, rounds, said)}

### 1 device

{compared(one, rounds, said)}"""


def sections(rounds: int) -> str:
    """The sections of RESULTS.md on models."""
    return f"""## The library's language model

`weft.models.Transformer` of the same size as above with `train.train_step` and `optim.Momentum`, against the
same hand-written steps (`handwritten.py`), from the same numbers.

{train_steps(handwritten.cases(), lambda *place: case(step(*place), *language_model()), rounds)}

## The library's translation model

An encoder-decoder of 2 and 2 layers, d_model 256, d_ff 1024, 8 heads of 32, vocabulary 8192, length 64, batch
16, float32, SGD. Written by hand in plain JAX in `handwritten_tr.py`; Weft's is `weft.models.Transformer`.

{train_steps(handwritten_tr.cases(), lambda *place: case(step(*place), *translation_model()), rounds)}

## A mixture of experts

`nn.MixtureOfExperts`, 8 experts of d_ff 512, of which a token sees one, capacity 1.25, against
`nn.FeedForward` of d_ff 512, forward and backward; d_model 256, length 128, batch 16, float32. Ideal is
1.25, the slots that the experts have for each token.

{mixtures(rounds)}"""
