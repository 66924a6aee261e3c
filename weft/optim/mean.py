"""The mean of several models' parameters: one model, often better than the last of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from weft.core.errors import ProgramError

from .ema import init_ema, update_ema, with_ema_params


def average_models(models: Iterable[Any]) -> Any:
    """A model whose parameters are the means of those of others, worked out in float32 (or wider).

    They are taken one after the other, so that of an iterator no more than two are held at a time.

    Args:
      models: at least one; all of one kind, in one layout.

    >>> import weft as wf
    >>> mean({"w": wf.parameter(wf.full("a=2", x))} for x in (1.0, 2.0, 6.0))
    {'w': f32[a=2] [3., 3.]}
    """
    average = last = None
    for count, model in enumerate(models, 1):
        # The mean of n is that of n - 1, and an nth of the difference to it.
        average = init_ema(model) if average is None else update_ema(average, model, (count - 1) / count)
        last = model
    if average is None:
        raise ProgramError(
            "the mean of no models is asked for",
            rule="a mean is that of at least one",
            hint="an iterator that was gone through before has nothing left: make it anew",
        ).located("mean(models)")
    return with_ema_params(last, average)
