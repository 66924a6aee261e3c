"""Decoding beside a loop written by hand, and the first tokens beside the last ones: sections of RESULTS.md.

The model is that of `handwritten.py`: 4 layers of 256 features, vocabulary 8192, on one device. In each of
16 rows 16 tokens are read, and more generated up to 128, the likeliest each time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import weft as wf
from benchmarks import handwritten, handwritten_decode, models
from benchmarks.handwritten import Size
from benchmarks.measure import Spread, compared, once
from weft import generate
from weft.models import Batch

SIZE = Size()
PROMPT, ROOM = 16, SIZE.length
STEPS = ROOM - PROMPT
TENTH = STEPS // 10


def prompts() -> np.ndarray:
    return handwritten.batch(0, SIZE)[0][:, :PROMPT]


def likeliest(rows: int, prompt: int, steps: int) -> generate.RowSettings:
    """Generate a fixed number of tokens in all rows, greedily."""
    batch, said = wf.Dim("batch", rows), wf.Dim("generated", steps)

    def each(value: Any, type: Any) -> wf.Tensor:
        return wf.full([batch], value, type)

    how = generate.SamplingParams(
        each(0, np.float32), each(0, np.int32), each(1, np.float32), each(1, np.float32)
    )
    ends = wf.full([batch, wf.Dim("ends", 4)], -1, np.int32)
    return generate.RowSettings(
        each(prompt, np.int32), each(steps, np.int32), ends, how, wf.ones([batch, said])
    )


class Weft:
    """Weft's two programs, and the state that they hand on."""

    def __init__(self) -> None:
        params = handwritten.init(0, SIZE)
        self.models = (models.filled(models.config(SIZE), params, models.LM_NAMES),)
        self.batch = Batch(wf.tensor(prompts(), [wf.Dim("batch", SIZE.batch), wf.Dim("length", PROMPT)]))
        self.begin = wf.spmd(generate.prefill, static=("max_length",))
        self.speak = wf.spmd(generate.decode, donate=("state",))
        self.state: Any = None

    def read(self) -> Any:
        self.state = self.begin(self.models, self.batch, likeliest(SIZE.batch, PROMPT, STEPS), ROOM)
        return self.state.token.storage

    def say(self, steps: int) -> Any:
        self.state = self.speak(self.models, self.state, steps)
        return self.state.generated.storage


def by_hand() -> Callable[[], Any]:
    params = jax.tree.map(jax.numpy.asarray, handwritten.init(0, SIZE))
    tokens = prompts()
    read, speak = handwritten_decode.read(ROOM), handwritten_decode.speak(STEPS)
    last, place = jax.numpy.asarray(tokens[:, -1]), jax.numpy.full(SIZE.batch, PROMPT - 1, np.int32)
    return lambda: speak(params, read(params, tokens), last, place)[1]


def against_hand(rounds: int) -> str:
    weft, hand = Weft(), by_hand()

    def run() -> Any:
        weft.read()
        return weft.say(STEPS)

    same = np.asarray(hand()) == np.asarray(run())
    assert same.mean() > 0.99, same.mean()  # two nearly equal logits may part a row
    return compared({"by hand": hand, "weft": run}, rounds)


def by_place(rounds: int) -> str:
    """The first tenth of the tokens, and the last."""
    weft = Weft()
    samples: dict[str, list[float]] = {"first": [], "last": []}
    for turn in range(rounds + 1):
        for name, skip in (("first", 0), ("last", STEPS - TENTH)):
            jax.block_until_ready(weft.read())
            if skip:
                jax.block_until_ready(weft.say(skip))
            seconds, _ = once(lambda: weft.say(TENTH))
            if turn:
                samples[name].append(seconds)
    ratio = Spread.of([b / a for a, b in zip(samples["first"], samples["last"], strict=True)])
    first = Spread.of(samples["first"])
    return (
        f"{1e3 * first.median / TENTH:.2f} ms for each of the first {TENTH} tokens of all rows; the last "
        f"{TENTH} take {ratio.median:.3f} times as long (quartiles {ratio.low:.3f}–{ratio.high:.3f}), "
        f"{rounds} rounds"
    )


def sections(rounds: int) -> str:
    return f"""## Decoding

The LM of the first section on one device: in each of 16 rows {PROMPT} tokens are read, and more generated
up to {ROOM}, the likeliest each time; Weft's two programs beside a loop in plain JAX
(`handwritten_decode.py`).

{against_hand(rounds)}

{by_place(rounds)}."""
