"""A server under load: 64 clients, 2,000 requests of mixed size, over loopback.

    python -m benchmarks.serving                      # both sides start here; some minutes
    python -m benchmarks.serving --requests 500 --clients 16

The server is a process of its own, with a model of random parameters on one device. Of every ten requests
eight are read as a whole or as a stream, one is left in the middle, one is malformed. The first fifth of the
requests is not counted. Memory is the server's resident set, which goes up and down by some MiB as buffers
come and go: the median of the first quarter of the rest, and that of the last.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field

import httpx
import numpy as np

ROWS, LONGEST = 16, 128
MOST_SECONDS = 1200  # for all of it
WORDS = "the a small old cat dog house river sees near far and with two three".split()


def served() -> None:
    """The server's process: prints its address, then answers until it is ended."""
    import jax

    jax.config.update("jax_platforms", "cpu")
    from weft import nn, serve
    from weft.data import ByteTokenizer
    from weft.generate import TextGenerator
    from weft.models import Config, Transformer

    config = Config(
        vocab=259, d_model=128, d_ff=512, heads=4, d_kv=32, layers=2, longest=LONGEST, kind="encoder_decoder"
    )
    speaker = TextGenerator(nn.init(Transformer(config), jax.random.key(0)), ByteTokenizer(), rows=ROWS)
    app, listening = (
        serve.build_app(speaker, timeout=120, most_waiting=256),
        serve.listen_socket("127.0.0.1", 0),
    )
    address = f"http://127.0.0.1:{listening.getsockname()[1]}"
    serve.serve(app, listening, 10, lambda: print(address, flush=True))


@dataclass
class Found:
    """What was measured."""

    seconds: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    tokens: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    memory: list[float] = field(default_factory=list)


def asked(n: int) -> dict[str, object]:
    """The nth request."""
    draw = random.Random(n)
    text = " ".join(draw.choices(WORDS, k=draw.randint(1, 18)))[: LONGEST - 1]
    ask = {"prompt": text, "max_tokens": draw.choice([4, 16, 32, 64]), "seed": n, "stream": n % 2 == 0}
    return ask | ({"temperature": 0.8, "top_p": 0.9} if n % 3 else {"temperature": 0})


async def request(client: httpx.AsyncClient, n: int, found: Found) -> None:
    """Send the nth request, and check that its answer is one."""
    if n % 10 == 9:
        answer = await client.post("/v1/completions", content=b'{"prompt": \xff')
        assert answer.status_code == 400, answer.text
        found.kinds["malformed"] += 1
        return
    ask, began = asked(n), time.monotonic()
    if n % 10 == 8:
        async with client.stream("POST", "/v1/completions", json={**ask, "stream": True}) as answer:
            async for _ in answer.aiter_lines():
                break
        found.kinds["disconnected"] += 1
        return
    if not ask["stream"]:
        answer = await client.post("/v1/completions", json=ask)
        assert answer.status_code == 200, answer.text
        found.tokens += answer.json()["usage"]["completion_tokens"]
    else:
        ask["stream_options"] = {"include_usage": True}
        lines: list[str] = []
        async with client.stream("POST", "/v1/completions", json=ask) as answer:
            assert answer.status_code == 200, await answer.aread()
            async for line in answer.aiter_lines():
                if line and not lines:
                    found.first.append(time.monotonic() - began)
                lines += [line.removeprefix("data: ")] if line else []
        assert lines[-1] == "[DONE]", lines[-1]
        found.tokens += json.loads(lines[-2])["usage"]["completion_tokens"]
    found.seconds.append(time.monotonic() - began)
    found.kinds["stream" if ask["stream"] else "whole"] += 1


async def load(url: str, process: int, numbers: range, clients: int, found: Found) -> float:
    """Seconds for a number of clients, each sending its requests one after the other."""
    left, limits = iter(numbers), httpx.Limits(max_connections=clients)

    async def one(client: httpx.AsyncClient) -> None:
        for n in left:
            await request(client, n, found)

    async def watch() -> None:
        while True:
            found.memory.append(resident(process))
            await asyncio.sleep(0.1)

    began = time.monotonic()
    async with (
        httpx.AsyncClient(base_url=url, timeout=MOST_SECONDS, trust_env=False, limits=limits) as client,
        asyncio.timeout(MOST_SECONDS),
    ):
        watching = asyncio.ensure_future(watch())
        await asyncio.gather(*(one(client) for _ in range(clients)))
        watching.cancel()
    return time.monotonic() - began


def resident(process: int) -> float:
    """The memory of a process, in MiB."""
    with open(f"/proc/{process}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def measured(requests: int, clients: int) -> str:
    """Measure, and give a table in Markdown."""
    command = [sys.executable, "-m", "benchmarks.serving", "--serve"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            began = time.monotonic()
            url = process.stdout.readline().strip()
            assert url, "the server did not start"
            ready, fifth, found = time.monotonic() - began, requests // 5, Found()
            asyncio.run(load(url, process.pid, range(fifth), clients, Found()))
            seconds = asyncio.run(load(url, process.pid, range(fifth, requests), clients, found))
            process.terminate()
            code = process.wait(30)
        finally:
            process.kill()
    whole = [f"{1000 * q:,.0f} ms" for q in np.quantile(found.seconds, [0.5, 0.95])]
    first = [f"{1000 * q:,.0f} ms" for q in np.quantile(found.first, [0.5, 0.95])]
    count, kinds = (
        sum(found.kinds.values()),
        ", ".join(f"{n} {kind}" for kind, n in sorted(found.kinds.items())),
    )
    quarter = -(-len(found.memory) // 4)
    before, after = (float(np.median(part)) for part in (found.memory[:quarter], found.memory[-quarter:]))
    change = after / before - 1
    rows = {
        "clients, slots": f"{clients}, {ROWS}",
        "requests": f"{count:,} ({kinds})",
        "start, with all compilations": f"{ready:.1f} s",
        "requests/s": f"{count / seconds:.1f}",
        "tokens/s": f"{found.tokens / seconds:,.0f}",
        "whole answer, p50 and p95": " and ".join(whole),
        "first tokens of a stream, p50 and p95": " and ".join(first),
        "memory at the start and at the end": f"{before:,.0f} MiB, {after:,.0f} MiB ({change:+.1%})",
        "exit code after SIGTERM": str(code),
    }
    lines = ["| measured | value |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())]
    assert abs(change) < 0.05, "\n".join([*lines, "memory is not flat"])
    return "\n".join(lines)


def main() -> None:
    """Read the flags."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--requests", type=int, default=2000)
    flags.add_argument("--clients", type=int, default=64)
    flags.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = flags.parse_args()
    if given.serve:
        served()
    else:
        print(measured(given.requests, given.clients))


if __name__ == "__main__":
    main()
