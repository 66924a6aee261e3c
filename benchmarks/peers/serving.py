"""A Weft server beside transformers behind HTTP: the same tiny Llama, texts and clients, on one CPU.

.venv-peers/bin/python -m benchmarks.peers.serving [--rounds 5] [--clients 1 64] [--rows 16]

Each server is a process of its own, and idle while the other one is measured. The peer is
`transformers.generate` behind the standard library's HTTP server, one request at a time, with one thread of
PyTorch (which is faster here than two). Each request asks for 64 tokens, the likeliest each time. Prints a
Markdown table: tokens a second of both, and the ratio within each round.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import http.server
import json
import random
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.measure import Spread

VOCAB, WIDTH, INNER, LAYERS, HEADS = 1024, 256, 768, 4, 4  # 3.9 million parameters
TOKENS, LONGEST = 64, 256
FEW = 8  # requests of a single client in a round
SETTLING = 20  # seconds
PATIENCE = 600  # seconds for one answer, or a start
SPECIALS = ("<pad>", "<s>", "</s>")
SAME = 0.9  # of the texts: nearly equal logits may part two of them


def written(folder: Path) -> None:
    """Write a Llama with random weights and its tokenizer, as transformers does."""
    import tokenizers
    import torch
    import transformers

    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=list(SPECIALS),
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(texts(20_000), trainer)
    begin = [("<s>", made.token_to_id("<s>"))]
    made.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=begin)
    names = dict(zip(("pad_token", "bos_token", "eos_token"), SPECIALS, strict=True))
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, **names).save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=made.get_vocab_size(),
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        max_position_embeddings=LONGEST,
        initializer_range=0.2,  # so that no two tokens are nearly equally likely
        tie_word_embeddings=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


def texts(count: int) -> list[str]:
    """Texts of 3 to 8 words of random letters."""
    draw = random.Random(0)

    def word() -> str:
        return "".join(draw.choices("aabcdeeefghiiklmnooprsttuvw", k=draw.randint(2, 7)))

    return [" ".join(word() for _ in range(draw.randint(3, 8))) for _ in range(count)]


def peer(folder: Path) -> None:
    """The peer's process: prints its address, then answers until it is ended."""
    import torch
    import transformers

    torch.set_num_threads(1)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    how = transformers.GenerationConfig(
        max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False, pad_token_id=0
    )
    lock = threading.Lock()

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version, disable_nagle_algorithm = "HTTP/1.1", True

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            given = tokenizer(asked["prompt"], return_tensors="pt")
            with lock, torch.no_grad():
                said = model.generate(**given, generation_config=how)[0, given.input_ids.shape[1] :]
            answer = {
                "choices": [{"text": tokenizer.decode(said)}],
                "usage": {"completion_tokens": len(said)},
            }
            body = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    class Server(http.server.ThreadingHTTPServer):
        request_queue_size = 128

    server = Server(("127.0.0.1", 0), Handler)
    print(f"http://127.0.0.1:{server.server_address[1]}", flush=True)
    server.serve_forever()


@contextlib.contextmanager
def started(command: Sequence[str]) -> Iterator[tuple[int, float]]:
    """The port of a server's process, and the seconds until it answered."""
    began = time.monotonic()
    with subprocess.Popen(
        [sys.executable, "-m", *command], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        watchdog = threading.Timer(PATIENCE, process.kill)
        watchdog.start()
        try:
            assert process.stdout is not None
            port, log = None, ""
            for line in process.stdout:
                log += line
                found = re.search(r"http://127\.0\.0\.1:(\d+)", line)
                if found and "will listen" not in line:
                    port = int(found[1])
                    break
            watchdog.cancel()
            if port is None:
                raise SystemExit(f"{command} did not start:\n{log[-2000:]}")
            yield port, time.monotonic() - began
        finally:
            watchdog.cancel()
            process.kill()


def answered(port: int, prompts: Sequence[str], clients: int) -> tuple[float, list[str]]:
    """Tokens a second with this many clients, and the texts; each client has one connection."""
    tokens = 0

    def client(mine: Sequence[str]) -> list[str]:
        nonlocal tokens
        found = []
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE)
        with contextlib.closing(connection):
            for prompt in mine:
                body = {"prompt": prompt, "max_tokens": TOKENS, "temperature": 0}
                connection.request("POST", "/v1/completions", json.dumps(body))
                answer = json.loads(connection.getresponse().read())
                found.append(answer["choices"][0]["text"])
                assert answer["usage"]["completion_tokens"] == TOKENS, answer
        return found

    began = time.monotonic()
    with ThreadPoolExecutor(clients) as pool:
        every = list(pool.map(client, [prompts[n::clients] for n in range(clients)], timeout=PATIENCE))
    seconds = time.monotonic() - began
    return len(prompts) * TOKENS / seconds, [text for own in every for text in own]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--rows", type=int, default=16, help="of the Weft server")
    parser.add_argument("--peer", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.peer:
        peer(given.peer)
        return
    with tempfile.TemporaryDirectory() as work:
        folder = Path(work) / "tiny-llama"
        written(folder)
        ours = ["weft.cli.main", "serve", str(folder), "--port", "0"]
        ours += ["--rows", str(given.rows), "--longest", str(LONGEST)]
        theirs = ["benchmarks.peers.serving", "--peer", str(folder)]
        with started(theirs) as (their_port, their_start), started(ours) as (our_port, our_start):
            print(f"ready after {our_start:.1f} s (Weft), {their_start:.1f} s (transformers)\n")
            time.sleep(SETTLING)  # Weft still compiles for fewer rows
            names = ("transformers tokens/s", "Weft tokens/s", "Weft against transformers")
            print("| clients |" + "".join(f" {name} (quartiles) |" for name in names))
            print("|---:|---:|---:|---:|")
            for clients in given.clients:
                print(row(their_port, our_port, clients, given.rounds), flush=True)


def row(their_port: int, our_port: int, clients: int, rounds: int) -> str:
    """Both servers in turn, and a row of the table."""
    prompts = texts(max(clients, FEW))
    found: dict[int, list[float]] = {their_port: [], our_port: []}
    said: dict[int, list[str]] = {}
    for port in found:  # not counted
        answered(port, prompts[: min(clients, FEW)], min(clients, FEW))
    for turn in range(rounds):
        for port in [their_port, our_port][:: 1 if turn % 2 else -1]:
            rate, said[port] = answered(port, prompts, clients)
            found[port].append(rate)
    pairs = list(zip(said[their_port], said[our_port], strict=True))
    same = sum(a == b for a, b in pairs) / len(pairs)
    assert same >= SAME, [pair for pair in pairs if pair[0] != pair[1]]
    ratio = Spread.of([b / a for a, b in zip(*found.values(), strict=True)])
    rates = [Spread.of(own) for own in found.values()]
    shown = [f"{one.median:,.0f} ({one.low:,.0f}–{one.high:,.0f})" for one in rates]
    return f"| {clients} | {shown[0]} | {shown[1]} | {ratio.median:.2f} ({ratio.low:.2f}–{ratio.high:.2f}) |"


if __name__ == "__main__":
    main()
