"""The program of one of several processes that tests start: `python process_cases.py TASK ARGUMENT`."""

import hashlib
import os
import signal
import sys
import time

import jax
import numpy as np

import weft as wf
from weft import checkpoint, models, nn, optim, train
from weft.checkpoint import manager
from weft.distributed import processes, rendezvous
from weft.models import huggingface

OPTIMIZER = optim.AdamW(0.01)
LAYOUT = wf.Layout("batch:data", params="d_ff:data", optimizer="d_ff:data")


def small():
    """A small language model whose sizes do not divide evenly."""
    return models.Transformer(
        models.Config(d_model=10, d_ff=27, heads=2, d_kv=5, layers=1, vocab=31, longest=6)
    )


def rows():
    draw = np.random.default_rng(0)
    tokens = draw.integers(1, 31, (6, 7)).astype(np.int32)
    dims = wf.dims("batch=6 length=6")
    return models.Batch(wf.tensor(tokens[:, :-1], dims), wf.tensor(tokens[:, 1:], dims))


def everywhere():
    return wf.Mesh(f"data={len(jax.devices())}")


def stepped(mesh):
    """Take one step; return the loss, the new model and the new state."""
    model = nn.init(small(), jax.random.key(0), mesh, LAYOUT)
    step = train.train_step(OPTIMIZER)
    state = OPTIMIZER.init(model)
    program = wf.spmd(step, mesh, LAYOUT, donate=(0, 1))
    metrics, model, state = program(model, state, rows(), jax.random.key(1))
    return float(metrics["loss"]), model, state


def digest(tree):
    """A hash of all elements without padding; all processes must call it."""
    from jax.experimental import multihost_utils

    found = hashlib.sha256()
    for name, t in nn.parameters(tree).items():
        storage = t.storage
        if not storage.is_fully_addressable:
            storage = multihost_utils.process_allgather(storage, tiled=True)
        elements = np.asarray(storage)[tuple(slice(d.size) for d in t.dims)]
        found.update(f"{name} {elements.dtype} {t.dims}".encode() + elements.tobytes())
    return found.hexdigest()


def save(folder):
    loss, model, state = stepped(everywhere())
    checkpoint.CheckpointManager(folder).save(1, model, state, {"example": 6}, wait=True)
    assert checkpoint.CheckpointManager(folder).steps() == [
        1
    ]  # on every process, after the save has finished
    print(loss.hex())
    print(digest((model, state)))


def restore(folder):
    like = nn.specs(small())
    step, model, state, extra = checkpoint.CheckpointManager(folder).restore(
        like, OPTIMIZER.init(like), everywhere(), LAYOUT
    )
    assert (step, extra) == (1, {"example": 6})
    print(digest((model, state)))


def stop(name):
    """Processes run at different speeds between collectives, and one of them receives a signal."""
    total = wf.spmd(lambda x: wf.sum(x, "a"), everywhere(), wf.Layout("a:data"))
    with rendezvous.Stop() as other:
        assert not other.requested
    with rendezvous.Stop() as stop:
        for step in range(2000):
            if step % 50 == 0:
                total(wf.ones("a=4"))
            if step == 70 and jax.process_index() == 1:
                os.kill(os.getpid(), getattr(signal, name))
            time.sleep(0.001 * (1 + jax.process_index()))
            if stop.requested:
                break
    print(step, stop.reason)


def die(victim):
    """One process is killed while the others wait for it in a collective."""
    total = wf.spmd(lambda x: wf.sum(x, "a"), everywhere(), wf.Layout("a:data"))
    for step in range(100):
        total(wf.ones("a=4"))
        if step == 1:
            print("running", flush=True)
        if step == 1 and jax.process_index() == int(victim):
            os.kill(os.getpid(), signal.SIGKILL)


def fail(victim):
    """One process raises an error while the others wait for it in a collective."""
    total = wf.spmd(lambda x: wf.sum(x, "a"), everywhere(), wf.Layout("a:data"))
    print("running", flush=True)
    for _ in range(100):
        total(wf.ones("a=4"))
        if jax.process_index() == int(victim):
            raise ValueError("an error of its own")


def export(folder):
    """All processes write a Hugging Face folder and load it again."""
    config = models.preset("gpt2").config.replace(
        d_model=12, d_ff=24, heads=2, d_kv=6, layers=1, vocab=31, longest=6
    )
    model = nn.init(models.Transformer(config), jax.random.key(0), everywhere(), LAYOUT)
    huggingface.save(model, folder)
    print(digest(model))
    print(digest(huggingface.load(folder)))


def stuck(how):
    """One process hangs before a step or while it writes a checkpoint, and the other waits for it."""
    where, _, folder = how.partition("@")
    hangs = jax.process_index() == (0 if where == "seal" else 1)
    total = wf.spmd(lambda x: wf.sum(x, "a"), everywhere(), wf.Layout("a:data"))
    with rendezvous.Stop(grace=4), checkpoint.CheckpointManager(folder) as checkpoints:
        for step in (1, 2):
            if hangs and step == 2:
                setattr(manager, {"write": "make_writer", "seal": "seal"}.get(where, "-"), hang)
                if where == "step":
                    hang()
            with processes.watchdog(f"step {step}"):
                total(wf.ones("a=4"))
            print("step", step, flush=True)
            checkpoints.save(step, {"w": wf.ones("a=4")}, None)


def hang(*_):
    time.sleep(600)


def arguments():
    """Programs accept arguments that are local to each process: arrays, keys and numbers."""

    def program(x, raw, key, weak, number):
        drawn = wf.random.normal(key, x.dims)
        return x + drawn * number + raw, wf.astype(x, "bfloat16") * weak

    x = wf.tensor(np.arange(5.0, dtype=np.float32), "a=5")
    on_device = jax.device_put(np.float32(3), jax.local_devices()[0])
    given = (x, on_device, jax.random.key(2), jax.numpy.asarray(0.5), 2.0)
    one = jax.tree.map(np.asarray, program(*given))
    split = wf.spmd(program, everywhere(), wf.Layout("a:data"))(*given)
    moved = [wf.place(t, everywhere(), wf.Layout("")) for t in split]
    for ours, theirs in zip(one, moved, strict=True):
        assert ours.dtype == theirs.dtype and np.array_equal(ours, np.asarray(theirs))
    (raw,) = wf.spmd(lambda a: (a + 1,), everywhere(), wf.Layout(""))(np.arange(3))
    assert np.array_equal(raw, [1, 2, 3])


def all(folder):
    """Several tasks in one process, because starting one is slow."""
    arguments()
    save(folder)
    stop("SIGTERM")


if __name__ == "__main__":
    rendezvous.join(timeout=60, wait=float(os.environ.get("WAIT", "1800")))
    globals()[sys.argv[1]](sys.argv[2])
