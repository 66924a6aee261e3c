"""PyTorch, as a worker of `make bench-peers` (see worker.py).

A case is a way to run the step, and a number of processes:

    torch-1    plain PyTorch, as many threads as it takes by itself
    ddp-2      DistributedDataParallel: rows split, parameters whole
    fsdp-2     FSDP2: rows split, parameters too, and gathered a layer at a time
    dtensor-2  tensor parallelism with DTensor: heads, d_ff and vocabulary split

Two processes have one thread each and speak over gloo. The worker is rank 0 and starts rank 1, which sleeps
on a pipe until rank 0 writes it a line, and ends when the pipe does, whatever becomes of rank 0.

PyTorch has no program of a whole step. What counts here as one is the ATen operations (views too) and the
collectives that one step dispatches in rank 0: a TorchDispatchMode counts them.

Not here: torch.compile. A compiled step of torch-1 used as much CPU time as an eager one, to a few percent.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

# Before torch is loaded. Threads that wait for each other sleep: on cores that others use as well, those that
# spin made a step three times as slow.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.peers.worker import Step, serve, work

EPSILON = 1e-6
PATIENCE = 120  # seconds that a rank waits for the other one
LIMIT = 1800  # seconds after which rank 1 ends itself if nobody asks it for anything
HOST = "127.0.0.1"


# The model of handwritten.py.


def linear(weight: np.ndarray, inputs: int) -> nn.Linear:
    """The layer that multiplies by a weight whose first dims, `inputs` in all, are summed over."""
    matrix = torch.from_numpy(weight).reshape(inputs, -1).T.contiguous()
    layer = nn.Linear(*reversed(matrix.shape), bias=False, device="meta")
    layer.weight = nn.Parameter(matrix)
    return layer


def norm(scale: np.ndarray) -> nn.RMSNorm:
    layer = nn.RMSNorm(len(scale), eps=EPSILON)
    layer.weight = nn.Parameter(torch.tensor(scale))
    return layer


class Attention(nn.Module):
    def __init__(self, wq: np.ndarray, wk: np.ndarray, wv: np.ndarray, wo: np.ndarray):
        super().__init__()
        width, heads, self.d_kv = wq.shape
        self.q, self.k, self.v = (linear(w, width) for w in (wq, wk, wv))
        self.out = linear(wo, heads * self.d_kv)

    def forward(self, x):
        # As many heads as there are: with tensor parallelism a rank has some of them.
        q, k, v = (f(x).unflatten(-1, (-1, self.d_kv)).transpose(1, 2) for f in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, layer: dict[str, np.ndarray]):
        super().__init__()
        self.attention_norm, self.feed_norm = norm(layer["attention_scale"]), norm(layer["feed_scale"])
        self.attention = Attention(*(layer[name] for name in ("wq", "wk", "wv", "wo")))
        self.wide, self.narrow = (linear(layer[name], len(layer[name])) for name in ("w1", "w2"))

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.narrow(F.relu(self.wide(self.feed_norm(x))))


class Model(nn.Module):
    """Logits of tokens; the parameters are those of `handwritten.init`."""

    def __init__(self, params: dict[str, np.ndarray]):
        super().__init__()
        once = {"embedding", "positions", "final_scale", "projection"}
        stacked = {name: a for name, a in params.items() if name not in once}
        self.embedding = nn.Embedding.from_pretrained(torch.tensor(params["embedding"]), freeze=False)
        self.positions = nn.Parameter(torch.tensor(params["positions"]))
        self.blocks = nn.ModuleList(
            Block({name: a[i] for name, a in stacked.items()}) for i in range(len(params["wq"]))
        )
        self.final_norm = norm(params["final_scale"])
        self.projection = linear(params["projection"], len(params["projection"]))

    def forward(self, tokens):
        x = self.embedding(tokens) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.projection(self.final_norm(x))


# A case: what becomes of the model, how the loss is taken, and whether the rows are split.


def replicated(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=True)


def sharded(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (2,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def tensor_parallel(model: nn.Module) -> nn.Module:
    """Megatron's split. The input of q, k and v becomes a DTensor once, so its gradient is summed once."""
    plan = {
        "embedding": RowwiseParallel(input_layouts=Replicate()),
        "blocks.*.attention": PrepareModuleInput(
            input_layouts=Replicate(), desired_input_layouts=Replicate()
        ),
        **{f"blocks.*.attention.{name}": ColwiseParallel() for name in "qkv"},
        "blocks.*.attention.out": RowwiseParallel(),
        "blocks.*.wide": ColwiseParallel(),
        "blocks.*.narrow": RowwiseParallel(),
        "projection": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    return parallelize_module(model, init_device_mesh("cpu", (2,)), plan)


CASES: dict[str, tuple[Callable[[nn.Module], nn.Module], Callable[[], Any], bool]] = {
    "torch-1": (lambda model: model, contextlib.nullcontext, False),
    "ddp-2": (replicated, contextlib.nullcontext, True),
    "fsdp-2": (sharded, contextlib.nullcontext, True),
    "dtensor-2": (tensor_parallel, loss_parallel, False),
}


class Operations(TorchDispatchMode):
    """Counts what is dispatched. Operations of a DTensor are counted as those of its local tensors."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented
        self.count += 1
        return func(*args, **(kwargs or {}))


def steps(params: dict[str, np.ndarray], case: str, rank: int) -> tuple[Step, Callable[[], int]]:
    """One rank's step, and its count of operations."""
    transform, around, split = CASES[case]
    # Embeddings take int32, the cross-entropy only int64.
    tokens, targets = torch.from_numpy(params.pop("tokens")), torch.from_numpy(params.pop("targets")).long()
    if split:
        tokens, targets = tokens.chunk(2)[rank], targets.chunk(2)[rank]
    rate = float(params.pop("learning_rate"))
    model = transform(Model(params))
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)

    def step() -> float:
        optimizer.zero_grad()
        with around():
            loss = F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
            loss.backward()
        optimizer.step()
        loss = loss.detach()
        if dist.is_initialized():
            # The mean over all rows. Last, so that it also awaits the other rank's update.
            loss = loss.full_tensor() if isinstance(loss, DTensor) else loss
            dist.all_reduce(loss)
            loss = loss / 2
        return loss.item()

    def count() -> int:
        """A step with learning rate 0, which changes nothing."""
        optimizer.param_groups[0]["lr"] = 0.0
        with Operations() as operations:
            step()
        optimizer.param_groups[0]["lr"] = rate
        return operations.count

    return step, count


# Two processes.


def join(store: dist.Store, rank: int) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = next(
        name for _, name in socket.if_nameindex() if name.startswith("lo")
    )
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=PATIENCE))


def start(params: dict[str, np.ndarray], case: str) -> tuple[Step, Callable[[], int]]:
    """The worker, rank 0. Each thing that it does, it tells rank 1 to do as well."""
    if case.endswith("-1"):
        return steps(params, case, rank=0)
    store = dist.TCPStore(HOST, 0, 2, is_master=True, wait_for_workers=False)
    command = [sys.executable, "-m", "benchmarks.peers.in_torch", *sys.argv[1:], str(store.port)]
    other = subprocess.Popen(command, stdin=subprocess.PIPE, text=True)
    atexit.register(end, other)
    join(store, rank=0)

    def both(order: str, do: Callable[[], Any]) -> Callable[[], Any]:
        def run():
            print(order, file=other.stdin, flush=True)
            return do()

        return run

    step, count = steps(params, case, rank=0)
    return both("step", step), both("count", count)


def end(other: subprocess.Popen) -> None:
    """Closes rank 1's input, and kills it if that does not end it."""
    with contextlib.suppress(BrokenPipeError):
        other.stdin.close()
    try:
        other.wait(10)
    except subprocess.TimeoutExpired:
        other.kill()
        other.wait()
    if dist.is_initialized():
        dist.destroy_process_group()


def follow(path: str, case: str, port: str) -> None:
    """Rank 1: does what it is told, until its input ends, even if that is in the middle of a step."""
    orders: queue.SimpleQueue[str] = queue.SimpleQueue()

    def listen() -> None:
        for line in sys.stdin:
            orders.put(line.strip())
        os._exit(0)

    threading.Thread(target=listen, daemon=True).start()
    signal.alarm(LIMIT)  # not handled, so it ends the process wherever that is
    join(dist.TCPStore(HOST, int(port), 2), rank=1)
    step, count = steps(work(path), case, rank=1)
    does = {"step": step, "count": count}
    while True:
        order = orders.get()
        signal.alarm(LIMIT)
        does[order]()


if __name__ == "__main__":
    if len(sys.argv) == 4:
        follow(*sys.argv[1:])
    else:
        serve(start)
