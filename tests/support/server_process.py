"""A server of a small model, and what its tests share: what it is asked, and clients of all kinds."""

import asyncio
import contextlib
import json
import socket
import threading
import time
from functools import cache

from untrained_models import untrained

from weft import serve
from weft.data import ByteTokenizer
from weft.generate import Beams, GenerationConfig, TextGenerator
from weft.models import Config

CONFIG = Config(vocab=259, d_model=16, d_ff=24, heads=4, d_kv=4, layers=1, longest=64, kind="encoder_decoder")
PATIENCE = 120  # seconds for anything: the machine may be busy
TEXTS = [
    "ab",
    "hello",
    "x y z",
    "some longer words",
    "naïve – 你好",
    "c",
    "one two three four five six seven",
]
ASKS = [
    GenerationConfig(limit=12),
    GenerationConfig(limit=20, temperature=0.9, top_k=40, top_p=0.95, penalty=1.3, seed=3),
    GenerationConfig(limit=3, temperature=1.5, seed=2**62),
    GenerationConfig(limit=8, beams=Beams(4)),
    GenerationConfig(limit=30, ends=(40, 50, 60)),
    GenerationConfig(),
]

BAD = {
    "no JSON": (b'{"prompt": ', 400, "not JSON"),
    "no UTF-8": (b'{"prompt": "\xff"}', 400, "not UTF-8"),
    "a lone surrogate": (b'{"prompt": "\\ud800"}', 400, "prompt"),
    "no object": (b"[1]", 400, "JSON object"),
    "nested": (b"[" * 4000, 400, "not JSON"),
    "nothing": (b"", 400, "not JSON"),
    "NaN": (b'{"prompt": "a", "top_p": NaN}', 400, "NaN"),
    "nothing asked": (b"{}", 400, "prompt is missing"),
    "misspelt": (b'{"prompt": "a", "max_token": 3}', 400, "did you mean max_tokens?"),
    "a field that is no text": (b'{"\\ud800": 1}', 400, 'no field "\\ud800"'),
    "a long field": (b'{"' + b"a" * 4000 + b'": 1}', 400, "aaa..."),
    "wrong type": (b'{"prompt": "a", "max_tokens": "3"}', 400, 'max_tokens is "3"'),
    "truth is no number": (b'{"prompt": "a", "max_tokens": true}', 400, "an integer"),
    "too many tokens": (b'{"prompt": "a", "max_tokens": 65}', 400, "too many"),
    "too long": (json.dumps({"prompt": "a" * 100}).encode(), 400, "100 tokens"),
    "an empty list": (b'{"prompt": []}', 400, "a list of 1 to 64"),
    "not supported": (b'{"prompt": "a", "echo": true}', 400, "not supported"),
    "other beams": (b'{"prompt": "a", "beams": 3}', 400, "1 or 4"),
    "too many choices": (b'{"prompt": "a", "n": 2}', 400, "at most"),
    "too large a number": (
        b'{"prompt": "a", "temperature": 1' + b"0" * 400 + b"}",
        400,
        "temperature is 100",
    ),
    "too large a count": (b'{"prompt": "a", "max_tokens": 1' + b"0" * 400 + b"}", 400, "an integer"),
    "a penalty beyond float32": (b'{"prompt": "a", "repetition_penalty": 1e9}', 400, "from 0.001 to 1000"),
    "a search that draws": (b'{"prompt": "a", "beams": 4, "top_k": 3}', 400, "beams is 4 with top_k"),
    "too large": (b'{"prompt": "' + b"a" * 6000 + b'"}', 413, "5000 bytes"),
}


def speaker_of(mesh="", layout="", **more):
    return TextGenerator(untrained(CONFIG.replace(**more), 4), ByteTokenizer(), mesh, layout, rows=6)


@cache
def speaker():
    """One whose programs are compiled once."""
    return speaker_of()


@cache
def alone(text, ask, number=0):
    """What the model says to a text by itself."""
    (said,) = speaker().generate([text], ask, first=number)
    return said


class Heard:
    """What an engine tells of one job."""

    def __init__(self):
        self.events, self.over = [], threading.Event()

    def __call__(self, event):
        self.events.append(event)
        if not isinstance(event, serve.TokenChunk) or event.finished:
            self.over.set()

    def tokens(self):
        assert self.over.wait(PATIENCE)
        if isinstance(self.events[-1], serve.TokenChunk):
            return tuple(token for piece in self.events for token in piece.tokens)
        return self.events[-1].tokens


@contextlib.contextmanager
def listening(engine, timeout=PATIENCE, **how):
    """The address of a server of its own, in a thread."""
    made = serve.build_app(engine, timeout=timeout, **how)
    server, port = serve.Server(made, timeout), serve.listen_socket("127.0.0.1", 0)
    port.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # a client that does not read is soon noticed
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([port])), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{port.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(PATIENCE)
        assert not thread.is_alive()


def events(answer):
    """The data of server-sent events; the last is [DONE]."""
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in answer.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    data = [line.removeprefix("data: ") for line in lines]
    assert data[-1] == "[DONE]"
    return [json.loads(one) for one in data[:-1]]


class Slow:
    """A decode step that takes at least this long."""

    def __init__(self, engine, seconds):
        self.decode, self.seconds = engine.programs.decode_rows, seconds

    def __call__(self, *args):
        time.sleep(self.seconds)
        return self.decode(*args)

    def __getattr__(self, name):  # the engine's compiler thread may still need the program
        return getattr(self.decode, name)


def posted(path, body):
    """A request as it is on the wire."""
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def until(check):
    end = time.monotonic() + PATIENCE
    while not check():
        assert time.monotonic() < end
        time.sleep(0.02)
