"""A server gives each of many clients what the model says to that text alone, and outlives bad ones."""

import asyncio
import contextlib
import json
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import jax
import numpy as np
import pytest

import weft as wf
from weft import nn, serve, train
from weft.cli.main import main
from weft.data import Bytes
from weft.decode import Ask, Beams, Speaker
from weft.decode.attention_view import Viewer
from weft.models import Batch, Config, Transformer
from weft.serve.asked import COMPLETIONS, Refused, read
from weft.serve.reading import Reading
from weft.train import config_file, config_flags
from weft.train.config import recipe

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
    Ask(limit=12),
    Ask(limit=20, temperature=0.9, top_k=40, top_p=0.95, penalty=1.3, seed=3),
    Ask(limit=3, temperature=1.5, seed=2**62),
    Ask(limit=8, beams=Beams(4)),
    Ask(limit=30, ends=(40, 50, 60)),
    Ask(),
]


def speaker_of(mesh="", layout="", **more):
    model = nn.init(Transformer(CONFIG.replace(**more)), jax.random.key(4))
    return Speaker(model, Bytes(), mesh, layout, rows=6)


class Heard:
    """What an engine tells of one job."""

    def __init__(self):
        self.events, self.over = [], threading.Event()

    def __call__(self, event):
        self.events.append(event)
        if not isinstance(event, serve.Piece) or event.over:
            self.over.set()

    def tokens(self):
        assert self.over.wait(PATIENCE)
        if isinstance(self.events[-1], serve.Piece):
            return tuple(token for piece in self.events for token in piece.tokens)
        return self.events[-1].tokens


@pytest.fixture(scope="module")
def speaker():
    return speaker_of()


@pytest.fixture(scope="module")
def engine(speaker):
    with serve.Engine(speaker_of(), most_waiting=400) as engine:
        yield engine


@pytest.fixture(scope="module")
def alone(speaker):
    """What the model says to a text by itself."""
    known = {}

    def said(text, ask, number=0):
        key = text, ask, number
        if key not in known:
            (known[key],) = speaker.say([text], ask, first=number)
        return known[key]

    return said


# -- The engine ----------------------------------------------------------------------------------------


def every(engine, cases):
    heard = [Heard() for _ in cases]
    jobs = [engine.say(text, ask, tell, n) for (text, ask, n), tell in zip(cases, heard, strict=True)]
    engine.ask(jobs)
    return [one.tokens() for one in heard]


def test_answers_do_not_depend_on_what_else_is_said(engine, alone):
    programs = engine.compilations
    assert programs <= 8
    cases = [(text, ask, n % 3) for n, text in enumerate(TEXTS) for ask in ASKS]
    random.Random(0).shuffle(cases)
    found = every(engine, cases)
    assert found == [alone(*case).tokens for case in cases]
    assert len(set(found)) > 20
    assert engine.compilations == programs  # all were compiled before it was ready
    assert engine.busy == engine.waiting == 0


def test_a_language_model_on_a_mesh_goes_on_the_same():
    split = speaker_of("data=2 model=2", "batch:data heads:model vocab:model", kind="decoder")
    with serve.Engine(split, stride=3) as engine:
        assert engine.compilations <= 8
        cases = [(text, ask, 1) for text in TEXTS[:4] for ask in ASKS[:4]]
        plain = speaker_of(kind="decoder")
        assert every(engine, cases) == [
            next(plain.say([text], ask, first=n)).tokens for text, ask, n in cases
        ]


def test_a_job_that_nobody_waits_for_frees_its_slot(engine):
    heard = [Heard() for _ in range(engine.rows)]
    jobs = [engine.say("ab", Ask(limit=64, temperature=1.0, seed=n), one) for n, one in enumerate(heard)]
    waiting = Heard()
    more = engine.say("c", Ask(limit=64), waiting)
    engine.ask([*jobs, more])
    engine.leave([*jobs, more])
    assert engine.waiting == 0
    follower = Heard()
    engine.ask([engine.say("hello", ASKS[0], follower)])
    follower.tokens()
    assert not waiting.events
    assert sum(len(piece.tokens) for one in heard for piece in one.events) < 64 * engine.rows
    assert engine.busy == 0


def test_too_many_texts_are_refused_together(engine):
    jobs = [engine.say("ab", ASKS[0], Heard()) for _ in range(engine.most_waiting + 1)]
    with pytest.raises(serve.Full):
        engine.ask(jobs)
    assert engine.waiting == 0


def test_a_failure_is_told_and_the_next_request_is_answered(engine, alone, monkeypatch, capfd):
    def fail(*_):
        raise RuntimeError("no memory")

    first, second = Heard(), Heard()
    with monkeypatch.context() as patch:
        patch.setattr(engine.speaker, "speak", fail)
        engine.ask([engine.say("ab", ASKS[0], first)])
        assert first.over.wait(PATIENCE)
    assert isinstance(first.events[0], RuntimeError)
    assert "no memory" in capfd.readouterr().err
    engine.ask([engine.say("ab", ASKS[0], second)])
    assert second.tokens() == alone("ab", ASKS[0]).tokens


def test_attention_is_that_of_the_model(speaker):
    seen = Viewer(speaker).view("ab", Bytes().encode("xyz"))
    assert seen.said == ("x", "y", "z") and seen.text == ("a", "b", "■")
    weights = np.array(seen.weights)
    np.testing.assert_allclose(weights.sum(1), 1, rtol=1e-5)
    # By hand: the first place sees itself alone, so what it looks with needs no softmax.
    model, is_tensor = speaker.models[0], wf.is_tensor
    block = jax.tree.map(lambda t: t["layers", 0], model.decoder.blocks, is_leaf=is_tensor)
    one, places = wf.Dim("length", 1), wf.Dim("length", 3)
    x = model.embedding(wf.tensor(np.array([0], np.int32), [one]))
    x = x + model.decoder.positions(wf.tensor(np.array([0], np.int32), [one]))
    h = block.attention_norm(x)
    x = x + block.attention.out(block.attention.value(h))
    inputs = wf.tensor(np.array([[*Bytes().encode("ab"), 1]], np.int32), [wf.Dim("batch", 1), places])
    memory = model._encode(Batch(inputs["length", :1], inputs=inputs), None)[0].rename(length="memory_length")
    q = block.memory_attention.query(block.memory_norm(x)).numpy("heads", "length", "d_kv")[:, 0]
    k = block.memory_attention.key(memory).numpy("heads", "batch", "memory_length", "d_kv")[:, 0]
    expected = jax.nn.softmax(np.einsum("hd,hmd->hm", q, k) / 2).mean(0)  # d_kv is 4
    np.testing.assert_allclose(weights[0], expected, atol=1e-5)
    assert np.ptp(expected) > 1e-3


# -- Reading -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 5])
def test_text_grows_to_what_it_is_as_a_whole(size):
    ids = [*Bytes().encode("naïve – 你好, ENd"), 227, 1]
    reading = Reading(Bytes(), stops=["END"])
    shown = [reading.more(ids[n : n + size], over=n + size >= len(ids)) for n in range(0, len(ids), size)]
    assert "".join(shown) == reading.text == Bytes().decode(ids) and reading.ended
    assert all("\ufffd" not in text for text in shown[:-1])


@pytest.mark.parametrize("size", [1, 2, 7])
def test_text_ends_before_a_stop(size):
    ids = Bytes().encode("one two three")
    reading = Reading(Bytes(), stops=["two t", "o th"])
    shown = [reading.more(ids[n : n + size]) for n in range(0, len(ids), size)]
    assert "".join(shown) == reading.text == "one " and reading.stopped
    assert len(reading.tokens) == len("one two t")  # not those that came after it


# -- HTTP ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def listening(engine, timeout=PATIENCE, **how):
    """The address of a server of its own, in a thread."""
    made = serve.app(engine, timeout=timeout, **how)
    server, port = serve.Server(made, timeout), serve.bound("127.0.0.1", 0)
    port.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # a client that does not read is soon noticed
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([port])), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{port.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(PATIENCE)
        assert not thread.is_alive()


@pytest.fixture(scope="module")
def url(engine):
    with listening(engine, body_limit=5000, name="tiny") as url:
        yield url


@pytest.fixture(scope="module")
def client(url):
    with httpx.Client(base_url=url, timeout=PATIENCE, trust_env=False) as client:
        yield client


def events(answer):
    """The data of server-sent events; the last is [DONE]."""
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in answer.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    data = [line.removeprefix("data: ") for line in lines]
    assert data[-1] == "[DONE]"
    return [json.loads(one) for one in data[:-1]]


def test_completions_are_as_openai_has_them(client, alone):
    ask = {"prompt": ["hello", "x y z"], "max_tokens": 12, "temperature": 0, "logprobs": 1, "model": "any"}
    found = client.post("/v1/completions", json=ask).json()
    expected = [alone(text, Ask(limit=12), n) for n, text in enumerate(ask["prompt"])]
    assert [one["text"] for one in found["choices"]] == [one.text for one in expected]
    assert [one["index"] for one in found["choices"]] == [0, 1]
    for one, said in zip(found["choices"], expected, strict=True):
        np.testing.assert_allclose(one["logprobs"]["token_logprobs"], said.logs, atol=1e-4)
        assert one["finish_reason"] == ("stop" if said.ended else "length")
    said = sum(len(one.tokens) for one in expected)
    assert found["usage"] == {"prompt_tokens": 12, "completion_tokens": said, "total_tokens": 12 + said}
    assert found["object"] == "text_completion" and found["model"] == "tiny"


def test_a_stream_says_the_same_piece_by_piece(client, alone):
    ask = {"prompt": "hello", "max_tokens": 20, "temperature": 0.9, "top_k": 40, "top_p": 0.95, "seed": 3}
    ask |= {"repetition_penalty": 1.3, "stream": True, "stream_options": {"include_usage": True}}
    with client.stream("POST", "/v1/completions", json=ask) as answer:
        found = events(answer)
    assert "".join(one["choices"][0]["text"] for one in found[:-1]) == alone("hello", ASKS[1]).text
    assert len(found) > 2 and found[-2]["choices"][0]["finish_reason"] in ("stop", "length")
    assert found[-1]["usage"]["completion_tokens"] == len(alone("hello", ASKS[1]).tokens)


def test_a_stop_cuts_the_text(client, alone):
    whole = alone("hello", Ask(limit=12)).text
    stop = whole[4:6]
    ask = {"prompt": "hello", "max_tokens": 12, "temperature": 0, "stop": ["never", stop]}
    (found,) = client.post("/v1/completions", json=ask).json()["choices"]
    assert found["text"] == whole[: whole.index(stop)] and found["finish_reason"] == "stop"


def test_without_a_seed_draws_differ(client):
    ask = {"prompt": "hello", "max_tokens": 30}
    texts = {client.post("/v1/completions", json=ask).json()["choices"][0]["text"] for _ in range(3)}
    assert len(texts) == 3


def test_a_search_gives_its_best(client, alone):
    said = alone("hello", Ask(limit=8, beams=Beams(4)))
    best = [said, *said.others][:3]
    ask = {"text": ["hello", " "], "beams": 4, "best": 3, "max_tokens": 8}
    found, blank = client.post("/translate", json=ask).json()["translations"]
    assert [found["text"], *(one["text"] for one in found["others"])] == [one.text for one in best]
    assert found["score"] == pytest.approx(said.score, abs=1e-4)
    assert blank["text"] == "" and blank["finish_reason"] == "stop"
    ask = {"prompt": "hello", "beams": 4, "n": 3, "max_tokens": 8}
    choices = client.post("/v1/completions", json=ask).json()["choices"]
    assert [(one["index"], one["text"]) for one in choices] == [(n, one.text) for n, one in enumerate(best)]


def test_translations_stream_and_show_what_they_look_at(client, alone, speaker):
    said = alone("hello", Ask())
    with client.stream(
        "POST", "/translate", json={"text": "hello", "stream": True, "attention": True}
    ) as answer:
        *pieces, last = events(answer)
    assert "".join(one["text"] for one in pieces) == last["text"] == said.text and last["done"]
    seen = Viewer(speaker).view("hello", said.tokens)
    np.testing.assert_allclose(last["attention"]["weights"], seen.weights, atol=1e-4)


def test_scores_are_those_of_the_model(client, speaker):
    pairs = [("hello", "you"), ("ab", "")]
    ask = {"text": [text for text, _ in pairs], "target": [target for _, target in pairs]}
    found = client.post("/score", json=ask).json()["scores"]
    for one, logs in zip(found, speaker.score(pairs), strict=True):
        np.testing.assert_allclose(one["logs"], logs, atol=1e-4)
        assert one["score"] == pytest.approx(sum(logs), abs=1e-3)


def test_health_and_metrics(client, engine):
    assert client.get("/healthz").json() == {"status": "ready"}
    client.get("/nowhere")
    text = client.get("/metrics").text
    assert 'weft_requests_total{code="404",path="other"}' in text
    assert f"weft_compilations {float(engine.compilations)}" in text
    for name in ("waiting", "slots_busy", "tokens_total", "request_seconds_bucket", "work_seconds_count"):
        assert f"weft_{name}" in text


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
    "wrong type": (b'{"prompt": "a", "max_tokens": "3"}', 400, 'max_tokens is "3"'),
    "truth is no number": (b'{"prompt": "a", "max_tokens": true}', 400, "a whole number"),
    "too many tokens": (b'{"prompt": "a", "max_tokens": 65}', 400, "too many"),
    "too long": (json.dumps({"prompt": "a" * 100}).encode(), 400, "100 tokens"),
    "an empty list": (b'{"prompt": []}', 400, "a list of 1 to 64"),
    "not supported": (b'{"prompt": "a", "echo": true}', 400, "not supported"),
    "other beams": (b'{"prompt": "a", "beams": 3}', 400, "1 or 4"),
    "too many choices": (b'{"prompt": "a", "n": 2}', 400, "at most"),
    "too large": (b'{"prompt": "' + b"a" * 6000 + b'"}', 413, "5000 bytes"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_request_is_told_what_is_wrong(client, name):
    body, code, words = BAD[name]
    answer = client.post("/v1/completions", content=body)
    error = answer.json()["error"]
    assert answer.status_code == code and words in error["message"], error
    assert error.keys() >= {"message", "type", "param"}


def test_unknown_paths_and_methods(client):
    assert client.get("/v1/completion").status_code == 404
    answer = client.get("/translate")
    assert answer.status_code == 405 and answer.headers["allow"] == "POST"
    assert "does not answer GET" in answer.json()["error"]["message"]
    assert client.post("/score", json={"text": "a"}, headers={"Origin": "http://x.org"}).status_code == 403


def test_every_field_of_a_request_has_its_default():
    values = read(b'{"prompt": "a", "stop": null}', COMPLETIONS)
    assert values.keys() == COMPLETIONS.keys() and values["n"] == 1 and values["temperature"] == 1.0
    with pytest.raises(Refused):
        read(b'{"prompt": "a", "temperature": 1e999}', COMPLETIONS)


def test_a_token_is_asked_for(engine):
    with listening(engine, token="s3cret") as url, httpx.Client(base_url=url, trust_env=False) as client:
        ask = {"text": "a", "target": "b"}
        assert client.get("/healthz").status_code == client.get("/").status_code == 200
        for headers in ({}, {"Authorization": "Bearer s3cre"}, {"Authorization": "Basic s3cret"}):
            for answer in (
                client.post("/score", json=ask, headers=headers),
                client.get("/metrics", headers=headers),
            ):
                assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
        right = {"Authorization": "Bearer s3cret"}
        assert client.post("/score", json=ask, headers=right, timeout=PATIENCE).status_code == 200


class Slow:
    """A speak that takes as long as it is told to."""

    def __init__(self, engine, seconds):
        self.engine, self.seconds, self.speak = engine, seconds, engine.speaker.speak

    def __call__(self, *args):
        time.sleep(self.seconds)
        return self.speak(*args)


def posted(path, body):
    """A request as it is on the wire."""
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


def until(check):
    end = time.monotonic() + PATIENCE
    while not check():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_what_takes_too_long_is_ended(engine, monkeypatch):
    monkeypatch.setattr(engine.speaker, "speak", Slow(engine, 0.3))
    with (
        listening(engine, timeout=1) as url,
        httpx.Client(base_url=url, timeout=PATIENCE, trust_env=False) as client,
    ):
        ask = {"prompt": "ab", "max_tokens": 64, "seed": 1, "repetition_penalty": 4.0}
        answer = client.post("/v1/completions", json=ask)
        assert answer.status_code == 504 and answer.json()["error"]["type"] == "timeout"
        lines = client.post("/v1/completions", json={**ask, "stream": True}).text.split("\n\n")
        assert json.loads(lines[-2].removeprefix("data: "))["error"]["type"] == "timeout"
        until(lambda: engine.busy == 0)


def test_a_full_queue_asks_to_come_again(engine, monkeypatch):
    monkeypatch.setattr(engine, "most_waiting", 3)
    with listening(engine) as url, httpx.Client(base_url=url, timeout=PATIENCE, trust_env=False) as client:
        answer = client.post("/translate", json={"text": ["a"] * 4, "stream": True})
        assert answer.status_code == 503 and answer.headers["retry-after"] == "1"


def test_a_client_that_leaves_frees_its_slot(engine, url, monkeypatch):
    monkeypatch.setattr(engine.speaker, "speak", Slow(engine, 0.2))
    host, port = url.removeprefix("http://").split(":")
    for stream in (True, False):
        ask = {"prompt": "ab", "max_tokens": 64, "seed": 1, "repetition_penalty": 4.0, "stream": stream}
        with socket.create_connection((host, int(port)), PATIENCE) as connection:
            connection.sendall(posted("/v1/completions", json.dumps(ask).encode()))
            until(lambda: engine.busy == 1)
            began = time.monotonic()
            assert not stream or b"200" in connection.recv(20)
        until(lambda: engine.busy == 0)
        assert time.monotonic() - began < 2  # all of it would take 16 steps of 0.2 seconds


def test_a_client_that_does_not_read_is_dropped(engine):
    """What it is sent is never taken: the time-out ends it, and its slot is free."""
    app, body = (
        serve.app(engine, timeout=0.3),
        json.dumps({"prompt": "ab", "stream": True, "max_tokens": 64}).encode(),
    )
    dropped = []

    async def run():
        asked = asyncio.Queue()
        asked.put_nowait({"type": "http.request", "body": body, "more_body": False})
        scope = {
            "type": "http",
            "method": "POST",
            "path": "/v1/completions",
            "headers": [],
            "query_string": b"",
        }
        scope |= {
            "http_version": "1.1",
            "scheme": "http",
            "state": {"drop": lambda: dropped.append(1)},
            "client": None,
        }

        async def send(message):
            if message["type"] == "http.response.body":
                await asyncio.Event().wait()

        await app(scope, asked.get, send)

    asyncio.run(asyncio.wait_for(run(), PATIENCE))
    assert dropped
    until(lambda: engine.busy == 0)


def test_the_connection_of_a_client_that_does_not_read_is_cut(engine, alone):
    ask = {"prompt": ["ab"] * 64, "stream": True, "max_tokens": 64, "seed": 1, "logprobs": 0}
    with listening(engine, timeout=8) as url, socket.socket() as connection:
        host, port = url.removeprefix("http://").split(":")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(PATIENCE)
        connection.connect((host, int(port)))
        connection.sendall(posted("/v1/completions", json.dumps(ask).encode()))
        with httpx.Client(base_url=url, timeout=PATIENCE, trust_env=False) as client:
            given = {"prompt": "hello", "max_tokens": 12, "temperature": 0}
            (found,) = client.post("/v1/completions", json=given).json()["choices"]
            assert found["text"] == alone("hello", ASKS[0]).text  # the others are not held up
            until(lambda: 'weft_requests_total{code="499"' in client.get("/metrics").text)
        with contextlib.suppress(ConnectionError):
            while connection.recv(1 << 16):
                pass
        assert engine.busy == engine.waiting == 0


# -- Many at once --------------------------------------------------------------------------------------

MIXED = [ASKS[0], ASKS[1], ASKS[2], Ask(limit=8, beams=Beams(4))]


def wanted(ask, **more):
    """An `Ask` in the words of a request."""
    given = {"max_tokens": ask.limit, "temperature": ask.temperature, "top_k": ask.top_k, "top_p": ask.top_p}
    given |= {"repetition_penalty": ask.penalty, "seed": ask.seed} | ({"beams": 4} if ask.beams else {})
    return {**given, **more}


def test_many_clients_good_and_bad(engine, url, alone):
    """16 at once, 100 requests: every answer is the one that the text has alone."""
    programs = engine.compilations
    host, port = url.removeprefix("http://").split(":")
    for text in TEXTS:
        for ask in MIXED:
            alone(text, ask)

    def good(client, text, ask, stream):
        given = wanted(ask, prompt=text, stream=stream)
        if not stream:
            answer = client.post("/v1/completions", json=given)
            assert answer.status_code == 200, answer.text
            return answer.json()["choices"][0]["text"]
        with client.stream("POST", "/v1/completions", json=given) as answer:
            return "".join(one["choices"][0]["text"] for one in events(answer))

    def slow(client, text, ask):
        """Reads a little at a time."""
        given = json.dumps(wanted(ask, prompt=text, stream=True)).encode()
        with socket.create_connection((host, int(port)), PATIENCE) as connection:
            connection.sendall(posted("/v1/completions", given))
            found = b""
            while b"[DONE]" not in found:
                time.sleep(0.02)
                found += connection.recv(200)
        lines = [line[6:] for line in found.replace(b"\r", b"").split(b"\n") if line.startswith(b"data: {")]
        return "".join(json.loads(line)["choices"][0]["text"] for line in lines) == alone(text, ask).text

    def leaves(client, text, ask):
        given = json.dumps(wanted(ask, prompt=text, stream=True)).encode()
        with socket.create_connection((host, int(port)), PATIENCE) as connection:
            connection.sendall(posted("/v1/completions", given))
            connection.recv(30)
        return True

    def bad(client, name):
        body, code, _ = BAD[name]
        assert client.post("/v1/completions", content=body).status_code == code
        return True

    def one(n):
        draw = random.Random(n)
        text, ask = draw.choice(TEXTS), draw.choice(MIXED)
        with httpx.Client(base_url=url, timeout=PATIENCE, trust_env=False) as client:
            kind = n % 10
            if kind == 7:
                return slow(client, text, ask)
            if kind == 8:
                return leaves(client, text, ask)
            if kind == 9:
                return bad(client, draw.choice(["no JSON", "no UTF-8", "too large", "misspelt"]))
            return good(client, text, ask, n % 2 == 1) == alone(text, ask).text

    with ThreadPoolExecutor(16) as pool:
        assert all(list(pool.map(one, range(100), timeout=PATIENCE)))
    until(lambda: engine.busy == engine.waiting == 0)
    assert engine.compilations == programs


# -- The command ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run as weft train leaves it, of a model that has learned nothing."""
    folder = tmp_path_factory.mktemp("served") / "lm"
    folder.mkdir()
    line = (
        "--model.d-model 16 --model.d-ff 32 --model.heads 2 --model.d-kv 8 --model.layers 1 --model.vocab 259"
    )
    config = config_flags.changed(recipe("lm"), line.split()).replace(folder=folder)
    (folder / "config.toml").write_text(config_file.write(config))
    with train.Checkpoints(folder / "checkpoints") as checkpoints:
        checkpoints.save(1, nn.init(Transformer(config.model), jax.random.key(0)), {})
    return folder


def test_a_signal_ends_the_server_when_it_has_finished(folder, tmp_path):
    (tmp_path / "token").write_text("word\n")
    command = [sys.executable, "-m", "weft.cli.main", "serve", str(folder), "--port", "0", "--longest", "48"]
    command += ["--rows", "2", "--timeout", "60", "--token-file", str(tmp_path / "token"), "--mesh", ""]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        watchdog = threading.Timer(PATIENCE, process.kill)
        watchdog.start()
        try:
            said = []
            for line in process.stderr:
                said.append(line)
                if line.startswith("serving"):
                    break
            assert said and line.startswith(f"serving {folder} on http://127.0.0.1:"), said
            url = line.split()[-1]
            headers = {"Authorization": "Bearer word"}
            with httpx.Client(base_url=url, timeout=PATIENCE, trust_env=False, headers=headers) as client:
                assert client.get("/healthz").json() == {"status": "ready"}
                assert client.post("/translate", json={"text": "a"}).status_code == 400
                ask = {"prompt": "ab", "max_tokens": 40, "seed": 1, "stream": True, "repetition_penalty": 4.0}
                with client.stream("POST", "/v1/completions", json=ask) as answer:
                    process.send_signal(signal.SIGTERM)
                    assert events(answer)[-1]["choices"][0]["finish_reason"]
            assert process.wait(PATIENCE) == 0, process.stderr.read()
            assert process.stdout.read() == ""
        finally:
            watchdog.cancel()
            process.kill()


def test_mistakes_of_the_command(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("warnings.showwarning", print)
    empty = tmp_path / "empty"
    empty.write_text(" \n")
    for flags, words in {
        ("--rows", "0"): "--rows 0",
        ("--timeout", "nan"): "--timeout nan",
        ("--token-file", str(tmp_path / "none")): "No such file",
        ("--token-file", str(empty)): "no token",
    }.items():
        assert main(["serve", str(folder), *flags]) == 2
        assert words in capsys.readouterr().err
    monkeypatch.setenv("WEFT_SERVE_TOKEN", "two words")
    assert main(["serve", str(folder)]) == 2
    assert "WEFT_SERVE_TOKEN" in capsys.readouterr().err
    monkeypatch.delenv("WEFT_SERVE_TOKEN")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["serve", str(folder), "--port", str(taken.getsockname()[1])]) == 1
    assert "can't listen" in capsys.readouterr().err
    assert main(["serve", str(tmp_path / "nowhere")]) == 2
