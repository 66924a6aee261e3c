"""A server outlives clients that are bad, slow or many; and `weft serve`, from its start to a signal."""

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
import pytest
from server_process import (
    BAD,
    CONFIGS,
    PATIENCE,
    TEXTS,
    Slow,
    events,
    generated_alone,
    listening,
    posted,
    until,
)
from untrained_models import untrained

from weft import checkpoint, serve
from weft.cli.main import main
from weft.generate import Beams, GenerationConfig
from weft.train import config_io
from weft.train.config import recipe

pytest_plugins = ["server_fixtures"]


def test_a_token_is_required(engine):
    with listening(engine, token="s3cret") as url, httpx.Client(base_url=url, trust_env=False) as client:
        body = {"text": "a", "target": "b"}
        assert client.get("/healthz").status_code == client.get("/").status_code == 200
        for headers in ({}, {"Authorization": "Bearer s3cre"}, {"Authorization": "Basic s3cret"}):
            for answer in (
                client.post("/score", json=body, headers=headers),
                client.get("/metrics", headers=headers),
            ):
                assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
                assert answer.json()["error"]["code"] == "invalid_api_key"
        right = {"Authorization": "Bearer s3cret"}
        assert client.post("/score", json=body, headers=right, timeout=PATIENCE).status_code == 200


def test_another_host_name_is_rejected(engine, url):
    """A site can let its name lead to 127.0.0.1: its pages are then of the same origin as the server's."""
    paths = ("/", "/healthz", "/metrics", "/v1/models")
    with httpx.Client(base_url=url, trust_env=False) as client:
        for host in ("evil.example:8765", "evil.example", "localhost.evil.example", "[::1", "192.0.2.1:8000"):
            headers = {"Host": host, "Origin": f"http://{host}"}
            for answer in (
                *(client.get(path, headers=headers) for path in paths),
                client.post("/score", json={"text": "a", "target": "b"}, headers=headers),
            ):
                error = answer.json()["error"]
                assert answer.status_code == 403 and error["type"] == "permission_error"
                assert host in error["message"]
        for host in ("localhost", "LocalHost:1", "127.0.0.1:8765", "127.0.0.2", "[::1]:8765"):
            assert all(client.get(path, headers={"Host": host}).status_code == 200 for path in paths)
    with listening(engine, token="s3cret") as url, httpx.Client(base_url=url, trust_env=False) as client:
        headers = {"Host": "weft.example", "Authorization": "Bearer s3cret"}  # as a proxy passes them on
        assert client.get("/v1/models", headers=headers).status_code == 200


def test_what_takes_too_long_is_ended(engine, monkeypatch):
    monkeypatch.setattr(engine.programs, "decode_rows", Slow(engine, 0.3))
    with (
        listening(engine, timeout=1) as url,
        httpx.Client(base_url=url, timeout=PATIENCE, trust_env=False) as client,
    ):
        body = {"prompt": "ab", "max_tokens": 64, "seed": 1, "repetition_penalty": 4.0}
        answer = client.post("/v1/completions", json=body)
        assert answer.status_code == 504 and answer.json()["error"]["code"] == "timeout"
        lines = client.post("/v1/completions", json={**body, "stream": True}).text.split("\n\n")
        assert json.loads(lines[-2].removeprefix("data: "))["error"]["code"] == "timeout"
        until(lambda: engine.busy == 0)


def test_a_full_queue_responds_with_retry_after(engine, url, monkeypatch):
    monkeypatch.setattr(engine, "most_waiting", 3)
    monkeypatch.setattr(engine.programs, "decode_rows", Slow(engine, 0.2))
    with httpx.Client(base_url=url, timeout=PATIENCE, trust_env=False) as client:
        answer = client.post("/translate", json={"text": ["a"] * 4, "stream": True})  # can never be its turn
        assert answer.status_code == 400 and "4 texts; at most 3" in answer.json()["error"]["message"]
        jobs = [
            engine.completion_request("ab", GenerationConfig(limit=64, temperature=1.0, seed=n), repr)
            for n in range(engine.rows + 2)
        ]
        for job in jobs:
            until(lambda: engine.waiting < 2)
            engine.submit([job])
        until(lambda: engine.busy == engine.rows)
        answer = client.post("/translate", json={"text": ["a"] * 3, "stream": True})
        engine.cancel(jobs)
        assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
        assert answer.json()["error"]["code"] == "server_is_overloaded"
    until(lambda: engine.busy == engine.waiting == 0)


# -- On the wire ---------------------------------------------------------------------------------------


def connected(url):
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), PATIENCE)


def answered(connection):
    """All that a server sends until it closes the connection: the status, and the body's JSON."""
    found = b""
    while part := connection.recv(1 << 16):
        found += part
    head, _, body = found.partition(b"\r\n\r\n")
    assert b"connection: close" in head.lower() and found.count(b"HTTP/1.1") == 1, found
    return int(head.split()[1]), json.loads(body)["error"]


def test_keep_alive_requests_are_answered_at_once(url):
    """With Nagle's algorithm each one but the first waits 40 ms for the client's delayed acknowledgement."""
    with httpx.Client(base_url=url, timeout=PATIENCE, trust_env=False) as client:
        seconds = []
        for _ in range(21):
            began = time.perf_counter()
            assert client.get("/v1/models").status_code == 200
            seconds.append(time.perf_counter() - began)
    assert sorted(seconds[1:])[10] < 0.02, seconds


SMUGGLED = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"


@pytest.mark.parametrize("method", ["POST /v1/completions", "POST /nowhere", "GET /healthz"])
@pytest.mark.parametrize("order", [1, -1])
def test_a_body_with_two_ends_is_rejected(url, method, order):
    """The one that a proxy believes may not be the one that this server does."""
    ends = ["Content-Length: 5", "Transfer-Encoding: chunked"][::order]
    head = "\r\n".join([f"{method} HTTP/1.1", "Host: localhost", *ends, "", ""]).encode()
    with connected(url) as connection:
        connection.sendall(head + b"0\r\n\r\n" + SMUGGLED)
        status, error = answered(connection)
    assert status == 400 and error["type"] == "invalid_request_error"
    assert "Content-Length and Transfer-Encoding" in error["message"]


def test_a_body_with_two_ends_is_rejected_before_it_arrives(url):
    head = (
        b"POST /score HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n"
    )
    with connected(url) as connection:
        began = time.monotonic()
        connection.sendall(head)
        assert answered(connection)[0] == 400 and time.monotonic() - began < 1


@pytest.mark.parametrize(
    "length, expect", [("5001", ""), ("99999999999", "Expect: 100-continue\r\n"), ("9" * 20, "")]
)
def test_too_long_a_body_is_rejected_before_it_arrives(url, length, expect):
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n{expect}Content-Length: {length}\r\n\r\n"
    with connected(url) as connection:
        began = time.monotonic()
        connection.sendall(head.encode())
        found = b""
        while not found.endswith(b"}}"):
            found += connection.recv(1 << 16)
        assert time.monotonic() - began < 0.5 and found.startswith(b"HTTP/1.1 413 ")
        error = json.loads(found.partition(b"\r\n\r\n")[2])["error"]
        assert length in error["message"] and "5000 bytes" in error["message"] and error["code"] is None
        assert connection.recv(1) == b"" and time.monotonic() - began < 10  # it is closed


def test_a_client_that_sends_too_much_still_reads_why(url):
    body = b"a" * 60_000
    with connected(url) as connection:
        connection.sendall(posted("/score", body))
        assert answered(connection)[0] == 413


def test_a_length_that_is_no_number_is_rejected(url):
    for length in (b"9" * 5000, b"-1", b"1e3", b"5, 6"):
        with connected(url) as connection:
            connection.sendall(
                b"POST /score HTTP/1.1\r\nHost: localhost\r\nContent-Length: " + length + b"\r\n\r\n"
            )
            assert connection.recv(1 << 16).split()[1] in (b"400", b"413")


def test_a_client_that_leaves_frees_its_slot(engine, url, monkeypatch):
    monkeypatch.setattr(engine.programs, "decode_rows", Slow(engine, 0.2))
    host, port = url.removeprefix("http://").split(":")
    for stream in (True, False):
        body = {"prompt": "ab", "max_tokens": 64, "seed": 1, "repetition_penalty": 4.0, "stream": stream}
        with socket.create_connection((host, int(port)), PATIENCE) as connection:
            connection.sendall(posted("/v1/completions", json.dumps(body).encode()))
            until(lambda: engine.busy == 1)
            began = time.monotonic()
            assert not stream or b"200" in connection.recv(20)
        until(lambda: engine.busy == 0)
        assert time.monotonic() - began < 2  # all of it would take 16 steps of 0.2 seconds


def test_a_client_that_does_not_read_is_dropped(engine):
    """The client never reads: the timeout ends its request, and the slot becomes free."""
    app, body = (
        serve.build_app(engine, timeout=0.3),
        json.dumps({"prompt": "ab", "stream": True, "max_tokens": 64}).encode(),
    )
    dropped = []

    async def run():
        messages = asyncio.Queue()
        messages.put_nowait({"type": "http.request", "body": body, "more_body": False})
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

        await app(scope, messages.get, send)

    asyncio.run(asyncio.wait_for(run(), PATIENCE))
    assert dropped
    until(lambda: engine.busy == 0)


def test_the_connection_of_a_client_that_does_not_read_is_cut(engine):
    body = {"prompt": ["ab"] * 64, "stream": True, "max_tokens": 64, "seed": 1, "logprobs": 0}
    with listening(engine, timeout=8) as url, socket.socket() as connection:
        host, port = url.removeprefix("http://").split(":")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(PATIENCE)
        connection.connect((host, int(port)))
        connection.sendall(posted("/v1/completions", json.dumps(body).encode()))
        with httpx.Client(base_url=url, timeout=PATIENCE, trust_env=False) as client:
            given = {"prompt": "hello", "max_tokens": 12, "temperature": 0}
            (found,) = client.post("/v1/completions", json=given).json()["choices"]
            assert found["text"] == generated_alone("hello", CONFIGS[0]).text  # the others are not held up
            until(lambda: 'weft_requests_total{code="499"' in client.get("/metrics").text)
        with contextlib.suppress(ConnectionError):
            while connection.recv(1 << 16):
                pass
        assert engine.busy == engine.waiting == 0


# -- Many at once --------------------------------------------------------------------------------------

MIXED = [CONFIGS[0], CONFIGS[1], CONFIGS[2], GenerationConfig(limit=8, beams=Beams(4))]


def wanted(config, **more):
    """An `Ask` in the words of a request."""
    given = {
        "max_tokens": config.limit,
        "temperature": config.temperature,
        "top_k": config.top_k,
        "top_p": config.top_p,
    }
    given |= {"repetition_penalty": config.penalty, "seed": config.seed} | (
        {"beams": 4} if config.beams else {}
    )
    return {**given, **more}


def test_many_clients_good_and_bad(engine, url):
    """16 at once, 100 requests: every answer is the one that the text has alone."""
    programs = engine.compilations
    host, port = url.removeprefix("http://").split(":")
    for text in TEXTS:
        for config in MIXED:
            generated_alone(text, config)

    def good(client, text, config, stream):
        given = wanted(config, prompt=text, stream=stream)
        if not stream:
            answer = client.post("/v1/completions", json=given)
            assert answer.status_code == 200, answer.text
            return answer.json()["choices"][0]["text"]
        with client.stream("POST", "/v1/completions", json=given) as answer:
            return "".join(one["choices"][0]["text"] for one in events(answer))

    def slow(client, text, config):
        """Reads a little at a time."""
        given = json.dumps(wanted(config, prompt=text, stream=True)).encode()
        with socket.create_connection((host, int(port)), PATIENCE) as connection:
            connection.sendall(posted("/v1/completions", given))
            found = b""
            while b"[DONE]" not in found:
                time.sleep(0.02)
                found += connection.recv(200)
        lines = [line[6:] for line in found.replace(b"\r", b"").split(b"\n") if line.startswith(b"data: {")]
        return (
            "".join(json.loads(line)["choices"][0]["text"] for line in lines)
            == generated_alone(text, config).text
        )

    def leaves(client, text, config):
        given = json.dumps(wanted(config, prompt=text, stream=True)).encode()
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
        text, config = draw.choice(TEXTS), draw.choice(MIXED)
        with httpx.Client(base_url=url, timeout=PATIENCE, trust_env=False) as client:
            kind = n % 10
            if kind == 7:
                return slow(client, text, config)
            if kind == 8:
                return leaves(client, text, config)
            if kind == 9:
                return bad(client, draw.choice(["no JSON", "no UTF-8", "too large", "misspelt"]))
            return good(client, text, config, n % 2 == 1) == generated_alone(text, config).text

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
    config = config_io.apply_flags(recipe("lm"), line.split()).replace(folder=folder)
    (folder / "config.toml").write_text(config_io.config_to_toml(config))
    with checkpoint.CheckpointManager(folder / "checkpoints") as checkpoints:
        checkpoints.save(1, untrained(config.model), {})
    return folder


def test_a_signal_ends_the_server_when_it_has_finished(folder, tmp_path):
    (tmp_path / "token").write_text("word\n")
    command = [sys.executable, "-m", "weft.cli.main", "serve", str(folder), "--port", "0", "--longest", "48"]
    command += ["--rows", "2", "--timeout", "60", "--token-file", str(tmp_path / "token"), "--mesh", ""]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        watchdog = threading.Timer(PATIENCE, process.kill)
        watchdog.start()
        try:
            output = []
            for line in process.stderr:
                output.append(line)
                if line.startswith("serving"):
                    break
            assert output and line.startswith(f"serving {folder} on http://127.0.0.1:"), output
            url = line.split()[-1]
            headers = {"Authorization": "Bearer word"}
            with httpx.Client(base_url=url, timeout=PATIENCE, trust_env=False, headers=headers) as client:
                assert client.get("/healthz").json() == {"status": "ready"}
                assert client.post("/translate", json={"text": "a"}).status_code == 400
                body = {
                    "prompt": "ab",
                    "max_tokens": 40,
                    "seed": 1,
                    "stream": True,
                    "repetition_penalty": 4.0,
                }
                with client.stream("POST", "/v1/completions", json=body) as answer:
                    process.send_signal(signal.SIGTERM)
                    assert events(answer)[-1]["choices"][0]["finish_reason"]
            assert process.wait(PATIENCE) == 0, process.stderr.read()
            assert process.stdout.read() == ""
        finally:
            watchdog.cancel()
            process.kill()


MISTAKES = {
    "numbers_out_of_range": "--rows 0 --stride -3 --longest 1 --port 99999 --timeout inf",
    "no_token_file": "--token-file none",
    "folder_as_token_file": "--token-file .",
    "empty_token_file": "--token-file empty",
    "token_file_not_utf8": "--token-file latin",
}


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.setattr("warnings.showwarning", print)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").write_text(" \n")
    (tmp_path / "latin").write_bytes(b"d\xe9j\xe0\n")
    return tmp_path


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_reported_and_exits_with_2(name, folder, here, capsys, golden):
    assert main(["serve", str(folder), *MISTAKES[name].split()]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    golden(name, err, "messages/serve")


def test_mistakes_beside_the_flags(folder, here, monkeypatch, capsys):
    monkeypatch.setenv("WEFT_SERVE_TOKEN", "two words")
    assert main(["serve", str(folder)]) == 2
    assert "no valid token in WEFT_SERVE_TOKEN" in capsys.readouterr().err
    monkeypatch.delenv("WEFT_SERVE_TOKEN")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        assert main(["serve", str(folder), "--port", str(taken.getsockname()[1])]) == 1
    err = capsys.readouterr().err
    assert "can't listen" in err and "Address already in use" in err and "hint: --port 0" in err
    assert main(["serve", str(here / "nowhere")]) == 2
    assert "no run in" in capsys.readouterr().err
    monkeypatch.setenv("WEFT_PROCESSES", "2")
    assert main(["serve", str(folder)]) == 2
    assert "one of 2 processes" in capsys.readouterr().err
