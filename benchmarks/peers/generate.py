"""Decoding beside Hugging Face's transformers: the same GPT-2, random weights, prompts and CPU.

.venv-peers/bin/python -m benchmarks.peers.generate [--rounds 6]

Prints a Markdown table: tokens a second of `generate` and of Weft, greedily and with four beams.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import transformers

import weft as wf
from benchmarks.decoding import likeliest
from benchmarks.measure import Spread
from weft import generate
from weft.models import Batch, huggingface

ROWS, PROMPT, SAID = 16, 16, 112
VOCAB, WIDTH, LAYERS, HEADS = 8192, 256, 4, 8


def peer() -> Any:
    torch.manual_seed(0)
    sizes = dict(vocab_size=VOCAB, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS, n_positions=PROMPT + SAID)
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=None)
    return transformers.GPT2LMHeadModel(config).eval()


def theirs(model: Any, prompts: np.ndarray, beams: int) -> np.ndarray:
    ids = torch.tensor(prompts)
    how = transformers.GenerationConfig(
        max_new_tokens=SAID, min_new_tokens=SAID, num_beams=beams, pad_token_id=0, do_sample=False
    )
    with torch.no_grad():
        said = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), generation_config=how)
    return said[:, PROMPT:].numpy()


class Ours:
    """The same model in Weft."""

    def __init__(self, model: Any, prompts: np.ndarray):
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            self.models = (huggingface.load(folder),)
        dims = wf.dims(f"batch={ROWS} length={PROMPT}")
        self.batch = Batch(wf.tensor(prompts.astype(np.int32), dims))
        self.rows = likeliest(ROWS, PROMPT, SAID)
        self.begin = wf.spmd(generate.prefill, static=("max_length",))
        self.speak = wf.spmd(generate.decode, donate=("state",))
        self.search = wf.spmd(generate.beam_search, static=("beams",))

    def say(self, beams: int) -> np.ndarray:
        state = self.begin(self.models, self.batch, self.rows, PROMPT + SAID - 1)
        if beams == 1:
            return self.speak(self.models, state, SAID).generated.numpy()
        how = generate.Beams(beams, alpha=1.0, penalty="plain", stop="likely")
        return self.search(self.models, state, how).generated.numpy("batch", "beam", "generated")[:, 0]


def seconds(run: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    run()
    return time.perf_counter() - begun


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=6)
    rounds = parser.parse_args().rounds
    model = peer()
    prompts = np.random.default_rng(0).integers(2, VOCAB, (ROWS, PROMPT))
    ours = Ours(model, prompts)
    print("| tokens chosen | transformers tokens/s | Weft tokens/s | Weft against transformers (quartiles) |")
    print("|---|---:|---:|---:|")
    for name, beams in (("greedy", 1), ("4 beams", 4)):
        same = (theirs(model, prompts, beams) == ours.say(beams)).mean()
        assert same > 0.9, same  # nearly equal logits may part a row
        found: dict[str, list[float]] = {"theirs": [], "ours": []}
        for _ in range(rounds):
            found["theirs"].append(seconds(lambda b=beams: theirs(model, prompts, b)))
            found["ours"].append(seconds(lambda b=beams: ours.say(b)))
        ratio = Spread.of([a / b for a, b in zip(found["theirs"], found["ours"], strict=True)])
        rates = [ROWS * SAID / Spread.of(found[side]).median for side in ("theirs", "ours")]
        print(
            f"| {name} | {rates[0]:,.0f} | {rates[1]:,.0f} | {ratio.median:.2f} "
            f"({ratio.low:.2f}–{ratio.high:.2f}) |",
            flush=True,
        )


if __name__ == "__main__":
    main()
