"""The attributes that decoding needs from a model, checked before anything is traced."""

from __future__ import annotations

from collections.abc import Callable

from weft.core.errors import ModelError
from weft.models import Config
from weft.models.transformer import Stack

# Each attribute: a description, and a check of its value.
REQUIRED_ATTRIBUTES: dict[str, tuple[str, Callable[[object], bool]]] = {
    "config": ("a weft.models.Config", lambda x: isinstance(x, Config)),
    "embedding": (
        "maps tokens to vectors; embedding.vocab is the dim of the vocabulary",
        lambda x: callable(x) and hasattr(x, "vocab"),
    ),
    "decoder": (
        "a weft.models.transformer.Stack, or None in a model that only encodes",
        lambda x: x is None or isinstance(x, Stack),
    ),
    "read": ("read(batch, layers) returns the hidden states and the values that each layer caches", callable),
    "project": ("project(x) returns the logits of hidden states", callable),
}
MISSING = object()


def check_decodable(model: object, call: str = "decode") -> None:
    """Raise an error that lists everything a model lacks.

    Args:
      model: the model that should generate or score.
      call: the public name that was called.
    """
    found = {name: getattr(model, name, MISSING) for name in REQUIRED_ATTRIBUTES}
    wrong = [
        name
        for name, (_, fits) in REQUIRED_ATTRIBUTES.items()
        if found[name] is MISSING or not fits(found[name])
    ]
    if not wrong:
        return

    def detail(name: str) -> str:
        value = found[name]
        state = "missing" if value is MISSING else f"found {type(value).__name__}"
        return f"{name} ({state}): {REQUIRED_ATTRIBUTES[name][0]}"

    raise ModelError(
        f"a model of type {type(model).__name__} does not provide {', '.join(wrong)}",
        *map(detail, wrong),
        rule="decoding runs a decoder's layers one position at a time and caches their keys and values",
        hint="use or subclass weft.models.Transformer; for another architecture, write the loop over its "
        "logits with wf.while_loop",
    ).located(call)
