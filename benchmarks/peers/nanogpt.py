"""nanoGPT's recipe for a CPU in plain PyTorch, to compare with: the same model, data and optimizer as
`runs/tinyshakespeare.sh`.

.venv-peers/bin/python benchmarks/peers/nanogpt.py DATA [STEPS]    trains, and prints one JSON object
.venv-peers/bin/python benchmarks/peers/nanogpt.py --steps VOCAB   does as many steps on one batch as each
                                                                   line it reads says, and prints the seconds
"""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

LAYERS, HEADS, WIDTH, CONTEXT, ROWS = 4, 4, 128, 64, 12
RATE, WARMUP, LAST = 1e-3, 100, 0.1


class Block(nn.Module):
    """Causal attention and a feed-forward block, each of x normed, added to x."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH, bias=False), nn.LayerNorm(WIDTH, bias=False)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.wide, self.narrow = (
            nn.Linear(WIDTH, 4 * WIDTH, bias=False),
            nn.Linear(4 * WIDTH, WIDTH, bias=False),
        )

    def forward(self, x):
        rows, length, _ = x.shape
        q, k, v = self.qkv(self.first(x)).view(rows, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, length, WIDTH))
        return x + self.narrow(F.gelu(self.wide(self.second(x)), approximate="tanh"))


class Model(nn.Module):
    """A decoder whose embedding is its last layer too."""

    def __init__(self, vocab):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocab, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks, self.norm = (
            nn.ModuleList(Block() for _ in range(LAYERS)),
            nn.LayerNorm(WIDTH, bias=False),
        )
        for p in self.parameters():
            if p.ndim > 1:
                nn.init.normal_(p, std=0.02)

    def forward(self, tokens, targets):
        x = self.tokens(tokens) + self.places.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = self.norm(x) @ self.tokens.weight.T
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def rate(step, steps):
    """Linear warm-up, then a cosine down to a tenth."""
    if step < WARMUP:
        return RATE * step / WARMUP
    part = (step - WARMUP) / max(steps - WARMUP, 1)
    return RATE * (LAST + (1 - LAST) * 0.5 * (1 + math.cos(math.pi * part)))


class Trainer:
    """A model and its optimizer."""

    def __init__(self, vocab):
        torch.manual_seed(0)
        self.model = Model(vocab)
        decayed = [p for p in self.model.parameters() if p.ndim > 1]
        others = [p for p in self.model.parameters() if p.ndim == 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.99))

    def step(self, rows, rate):
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        loss = self.model(rows[:, :-1], rows[:, 1:])
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return loss


def count_steps(vocab):
    """Steps on one batch, as many as each line asks for."""
    trainer, rows = Trainer(vocab), torch.randint(vocab, (ROWS, CONTEXT + 1))
    for line in sys.stdin:
        begun = time.perf_counter()
        for _ in range(int(line)):
            trainer.step(rows, RATE).item()
        print(time.perf_counter() - begun, flush=True)


def main():
    if sys.argv[1] == "--steps":
        return count_steps(int(sys.argv[2]))
    text = (Path(sys.argv[1]) / "input.txt").read_text()
    steps = int(sys.argv[2]) if len(sys.argv) > 2 else 2000
    letters = {c: n for n, c in enumerate(sorted(set(text)))}
    ids = torch.tensor([letters[c] for c in text])
    cut = len(ids) * 9 // 10
    train, valid = ids[:cut], ids[cut:]
    trainer = Trainer(len(letters))
    begun = time.perf_counter()
    for step in range(steps):
        at = torch.randint(len(train) - CONTEXT - 1, (ROWS,))
        trainer.step(torch.stack([train[n : n + CONTEXT + 1] for n in at]), rate(step, steps))
    seconds = time.perf_counter() - begun
    with torch.no_grad():
        windows = valid[: len(valid) // CONTEXT * CONTEXT].view(-1, CONTEXT)
        losses = [trainer.model(w[:, :-1], w[:, 1:]).item() * len(w) for w in windows.split(64)]
    print(json.dumps({"steps": steps, "seconds": seconds, "valid_loss": sum(losses) / len(windows)}))


if __name__ == "__main__":
    main()
