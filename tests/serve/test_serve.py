"""A server gives each of many clients the completion that the model generates alone, and reports errors."""

import random

import httpx
import jax
import numpy as np
import pytest
from server_process import BAD, CONFIGS, PATIENCE, TEXTS, Listener, events, generated_alone, make_generator
from tiers import slow

import weft as wf
from weft import serve
from weft.data import ByteTokenizer, SentencePiece
from weft.data.tokenizers import decode_continuation
from weft.generate import Beams, GenerationConfig
from weft.generate.attention_map import AttentionMapper
from weft.generate.batching import PromptRow
from weft.models import Batch
from weft.serve.detokenizer import Detokenizer
from weft.serve.engine import EngineRequest
from weft.serve.programs import ServingPrograms, empty_state
from weft.serve.schema import COMPLETION_FIELDS, APIError, parse_body
from weft.serve.stream import CompletionDelta

pytest_plugins = ["server_fixtures"]


@pytest.fixture(scope="module")
def client(url):
    with httpx.Client(base_url=url, timeout=PATIENCE, trust_env=False) as client:
        yield client


# -- The engine ----------------------------------------------------------------------------------------


def every(engine, cases):
    listeners = [Listener() for _ in cases]
    jobs = [
        engine.completion_request(text, config, listener, n)
        for (text, config, n), listener in zip(cases, listeners, strict=True)
    ]
    engine.submit(jobs)
    return [one.tokens() for one in listeners]


class Noted:
    """A program that records its arguments other than the models and the state."""

    def __init__(self, program):
        self.program, self.calls = program, []

    def __call__(self, models, state, *more):
        self.calls.append(more)
        return self.program(models, state, *more)


@pytest.fixture
def compiled():
    """The programs that JAX compiles from now on, in any thread."""
    found = []

    def note(name, *_, fun_name="", **__):
        if "backend_compile" in name:
            found.append(fun_name)

    jax.monitoring.register_event_duration_secs_listener(note)
    yield found
    jax.monitoring.unregister_event_duration_listener(note)


def test_completions_do_not_depend_on_other_requests(engine):
    programs = engine.compilations
    assert programs <= 11
    cases = [(text, config, n % 3) for n, text in enumerate(TEXTS) for config in CONFIGS]
    random.Random(0).shuffle(cases)
    found = every(engine, cases)
    assert found == [generated_alone(*case).tokens for case in cases]
    assert len(set(found)) > 20
    assert engine.compilations == programs  # all were compiled before it was ready
    assert engine.busy == engine.waiting == 0


@pytest.mark.slow
def test_a_language_model_on_a_mesh_goes_on_the_same():
    split = make_generator("data=2 model=2", "batch:data heads:model vocab:model", kind="decoder")
    with serve.Engine(split, stride=3) as engine:
        assert engine.compilations <= 8
        cases = [(text, config, 1) for text in TEXTS[:4] for config in CONFIGS[:4]]
        plain = make_generator(kind="decoder")
        assert every(engine, cases) == [
            next(plain.generate([text], config, first=n)).tokens for text, config, n in cases
        ]


LOADS = (1, 6, 1, 3, 2, 6)  # texts at once, one load after the other


def up_and_down(engine, monkeypatch):
    """Generate while the load changes and rows move; return the tokens, the cases, the row counts and the moves."""
    steps, moves = Noted(engine.programs.decode_rows), Noted(engine.programs.move_row)
    monkeypatch.setattr(engine.programs, "decode_rows", steps)
    monkeypatch.setattr(engine.programs, "move_row", moves)
    found, cases = [], []
    for n, load in enumerate(LOADS):
        # The last ones take longest: they are moved to the front as the others end.
        configs = [GenerationConfig(limit=4 + 8 * k) for k in range(load)]
        configs[::2] = [
            GenerationConfig(limit=config.limit, temperature=1.2, top_k=50, seed=n) for config in configs[::2]
        ]
        some = [(TEXTS[(n + k) % 4], config, k) for k, config in enumerate(configs)]
        found += every(engine, some)
        cases += some
    return found, cases, [count for count, _ in steps.calls], moves.calls


def test_rows_that_move_between_programs_generate_the_same(engine, monkeypatch, compiled):
    assert engine.row_counts == (1, 4, 6)
    found, cases, counts, moves = up_and_down(engine, monkeypatch)
    assert not compiled
    assert found == [generated_alone(*case).tokens for case in cases]
    assert set(counts) == {1, 4, 6} and len(moves) >= 2
    turns = [count for n, count in enumerate(counts) if n == 0 or counts[n - 1] != count]
    assert turns[0] == 1 and turns[1:4] == [6, 4, 1]  # one text, then six that end one after the other


def test_a_row_that_is_alone_costs_one_row(engine, monkeypatch):
    steps = Noted(engine.programs.decode_rows)
    monkeypatch.setattr(engine.programs, "decode_rows", steps)
    every(engine, [("hello", CONFIGS[0], 0)])
    assert {count for count, _ in steps.calls} == {1}


@pytest.mark.parametrize(
    "mesh, layout, row_counts",
    [
        slow("model=2", "heads:model d_ff:model vocab:model", (1, 4, 6)),
        ("model=3", "heads:model d_ff:model", (1, 4, 6)),  # uneven
        slow("data=2 model=2", "batch:data heads:model", (6,)),  # its rows are on both devices
    ],
    ids=str,
)
def test_rows_move_on_a_mesh(mesh, layout, row_counts, monkeypatch, compiled):
    split, plain = (make_generator(*where, kind="decoder") for where in ((mesh, layout), ()))
    with serve.Engine(split) as engine:
        assert engine.wait_compiled(PATIENCE) and engine.row_counts == row_counts
        compiled.clear()
        found, cases, counts, _ = up_and_down(engine, monkeypatch)
        assert not compiled and set(counts) == set(row_counts)
    assert found == [next(plain.generate([text], config, first=n)).tokens for text, config, n in cases]


def test_an_engine_that_stops_waits_for_what_is_compiled():
    engine = serve.Engine(make_generator(kind="decoder"))
    with engine:
        pass
    assert engine.wait_compiled(0) and not engine._compiler.is_alive()


def test_an_empty_state_is_split_from_the_beginning():
    few = ServingPrograms(
        make_generator("data=2 model=2", "batch:data heads:model", kind="decoder"), 2, buckets=1
    )
    assert few.buckets == (few.longest,)
    new = few.prefill_prompts([few.encode_prompt(0, "ab", 4)], [GenerationConfig()])
    state = empty_state(new, 6)
    for made, like in zip(*(jax.tree.leaves(one) for one in (state, new)), strict=True):
        assert made.sharding.is_equivalent_to(like.sharding, made.ndim) and made.dtype == like.dtype
    keys = state.caches[0].layers[0].keys
    assert {shard.data.size for shard in keys.storage.addressable_shards} == {keys.size // 4}
    assert state.done.numpy().all() and state.done.size == 6 and not keys.numpy().any()


def test_a_job_that_nobody_waits_for_frees_its_slot(engine):
    listeners = [Listener() for _ in range(engine.rows)]
    jobs = [
        engine.completion_request("ab", GenerationConfig(limit=64, temperature=1.0, seed=n), one)
        for n, one in enumerate(listeners)
    ]
    waiting = Listener()
    more = engine.completion_request("c", GenerationConfig(limit=64), waiting)
    engine.submit([*jobs, more])
    engine.cancel([*jobs, more])
    assert engine.waiting == 0
    follower = Listener()
    engine.submit([engine.completion_request("hello", CONFIGS[0], follower)])
    follower.tokens()
    assert not waiting.events
    assert sum(len(piece.tokens) for one in listeners for piece in one.events) < 64 * engine.rows
    assert engine.busy == 0


def test_too_many_texts_raise_together(engine):
    jobs = [engine.completion_request("ab", CONFIGS[0], Listener()) for _ in range(engine.most_waiting + 1)]
    with pytest.raises(serve.QueueFull):
        engine.submit(jobs)
    assert engine.waiting == 0


def test_a_failure_is_reported_and_the_next_request_succeeds(engine, monkeypatch, capfd):
    def fail(*_):
        raise RuntimeError("no memory")

    first, second = Listener(), Listener()
    with monkeypatch.context() as patch:
        patch.setattr(engine.programs, "decode_rows", fail)
        engine.submit([engine.completion_request("ab", CONFIGS[0], first)])
        assert first.over.wait(PATIENCE)
    assert isinstance(first.events[0], RuntimeError)
    assert "no memory" in capfd.readouterr().err
    engine.submit([engine.completion_request("ab", CONFIGS[0], second)])
    assert second.tokens() == generated_alone("ab", CONFIGS[0]).tokens


def test_attention_is_that_of_the_model(generator):
    seen = AttentionMapper(generator).attention_map("ab", ByteTokenizer().encode("xyz"))
    assert seen.target == ("x", "y", "z") and seen.source == ("a", "b", "■")
    weights = np.array(seen.weights)
    np.testing.assert_allclose(weights.sum(1), 1, rtol=1e-5)
    # By hand: the first position attends only to itself, so its query needs no softmax.
    model, is_tensor = generator.models[0], wf.is_tensor
    block = jax.tree.map(lambda t: t["layers", 0], model.decoder.blocks, is_leaf=is_tensor)
    one, three = wf.Dim("length", 1), wf.Dim("length", 3)
    x = model.embedding(wf.tensor(np.array([0], np.int32), [one]))
    x = x + model.decoder.positions(wf.tensor(np.array([0], np.int32), [one]))
    h = block.attention_norm(x)
    x = x + block.attention.out(block.attention.value(h))
    inputs = wf.tensor(np.array([[*ByteTokenizer().encode("ab"), 1]], np.int32), [wf.Dim("batch", 1), three])
    memory = model._encode(Batch(inputs["length", :1], inputs=inputs), None)[0].rename(length="memory_length")
    q = block.memory_attention.query(block.memory_norm(x)).numpy("heads", "length", "d_kv")[:, 0]
    k = block.memory_attention.key(memory).numpy("heads", "batch", "memory_length", "d_kv")[:, 0]
    expected = jax.nn.softmax(np.einsum("hd,hmd->hm", q, k) / 2).mean(0)  # d_kv is 4
    np.testing.assert_allclose(weights[0], expected, atol=1e-5)
    assert np.ptp(expected) > 1e-3


# -- Reading -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 5])
def test_streamed_text_grows_to_the_full_text(size):
    ids = [*ByteTokenizer().encode("naïve – 你好, ENd"), 227, 1]
    reading = Detokenizer(ByteTokenizer(), stops=["END"])
    pieces = [reading.add(ids[n : n + size], finished=n + size >= len(ids)) for n in range(0, len(ids), size)]
    assert "".join(pieces) == reading.text == ByteTokenizer().decode(ids) and reading.ended
    assert all("\ufffd" not in text for text in pieces[:-1])


@pytest.mark.parametrize("size", [1, 2, 7])
def test_text_ends_before_a_stop(size):
    ids = ByteTokenizer().encode("one two three")
    reading = Detokenizer(ByteTokenizer(), stops=["two t", "o th"])
    pieces = [reading.add(ids[n : n + size]) for n in range(0, len(ids), size)]
    assert "".join(pieces) == reading.text == "one " and reading.stopped
    assert len(reading.tokens) == len("one two t")  # not those that came after it


@pytest.mark.parametrize("size", [1, 3])
def test_text_begins_with_the_space_after_a_prompt(tmp_path, size):
    tokenizer = SentencePiece.train(
        ["the class of the words"], tmp_path / "a.model", 16, byte_fallback=False, kind="bpe"
    )
    prompt, ids = tokenizer.encode("the"), tokenizer.encode("the class of")
    completion = ids[len(prompt) :]
    reading = Detokenizer(tokenizer, after=prompt[-1:])
    pieces = [reading.add(completion[n : n + size]) for n in range(0, len(completion), size)]
    assert ids[: len(prompt)] == prompt and "".join(pieces) == reading.text == " class of"


class Counted:
    """A tokenizer that counts the tokens that it decodes."""

    def __init__(self, tokenizer):
        self.tokenizer, self.end, self.count = tokenizer, tokenizer.end, 0

    def decode(self, ids):
        self.count += len(ids)
        return self.tokenizer.decode(ids)


@pytest.mark.parametrize("kind", ["bytes", "unigram", "bpe"])
def test_a_long_answer_is_decoded_once(tmp_path, kind):
    words = "the class  of   words – naïve 你好, 😀 "
    tokenizer = ByteTokenizer()
    if kind != "bytes":
        tokenizer = SentencePiece.train([words], tmp_path / "a.model", 280, kind=kind)
    draw, after = random.Random(0), tokenizer.encode("the")[-1:]
    character = tokenizer.encode("😀")
    for ids in (
        tokenizer.encode(words * 10)[:300],
        [draw.randrange(2, tokenizer.vocab) for _ in range(300)],
        draw.choices([*character, *tokenizer.encode(" a "), tokenizer.pad], k=300),
        [*character[:-1]] * 100,  # never finished
        [tokenizer.pad] * 300,
        [*tokenizer.encode("a "), *[tokenizer.encode("a b")[-2]] * 300],
    ):
        texts = [decode_continuation(after, ids[:n], tokenizer) for n in range(len(ids) + 1)]
        counted = Counted(tokenizer)
        reading = Detokenizer(counted, after=after)
        pieces = [reading.add([token], finished=n == len(ids)) for n, token in enumerate(ids, 1)]
        assert "".join(pieces) == reading.text == texts[-1]
        offsets = CompletionDelta(0, reading, "", None).logprobs(0)["text_offset"]
        assert offsets == [len(text) for text in texts[:-1]]
        assert counted.count < 100 * len(ids)  # and not all ids for each of them
        for stop in ("ss of", "你好", "😀", "a", "\ufffd"):
            reading = Detokenizer(tokenizer, stops=["never", stop], after=after)
            reading.add(ids, finished=True)
            needed = next((n for n, text in enumerate(texts) if stop in text), None)
            assert reading.stopped == (needed is not None)
            assert reading.text == texts[needed or -1].split(stop)[0]
            assert len(reading.tokens) == (needed or len(ids))


# -- HTTP ----------------------------------------------------------------------------------------------


def test_completions_are_as_openai_has_them(client):
    body = {"prompt": ["hello", "x y z"], "max_tokens": 12, "temperature": 0, "logprobs": 1, "model": "tiny"}
    found = client.post("/v1/completions", json=body).json()
    expected = [generated_alone(text, GenerationConfig(limit=12), n) for n, text in enumerate(body["prompt"])]
    assert [one["text"] for one in found["choices"]] == [one.text for one in expected]
    assert [one["index"] for one in found["choices"]] == [0, 1]
    for one, completion in zip(found["choices"], expected, strict=True):
        np.testing.assert_allclose(one["logprobs"]["token_logprobs"], completion.logprobs, atol=1e-4)
        assert one["finish_reason"] == ("stop" if completion.ended else "length")
        offsets = [len(ByteTokenizer().decode(completion.tokens[:n])) for n in range(len(completion.tokens))]
        assert one["logprobs"]["text_offset"] == offsets
    completion = sum(len(one.tokens) for one in expected)
    assert found["usage"] == {
        "prompt_tokens": 12,
        "completion_tokens": completion,
        "total_tokens": 12 + completion,
    }
    assert found["object"] == "text_completion" and found["model"] == "tiny"


def test_the_start_is_no_token_of_a_prompt():
    after, translated = PromptRow(0, (), (0, 5, 6), 3), PromptRow(0, (5, 6, 1), (0,), 3)
    assert [EngineRequest("generate", print, prompt=item).prompt_tokens for item in (after, translated)] == [
        2,
        3,
    ]


def test_a_stream_has_the_same_text_in_pieces(client):
    body = {"prompt": "hello", "max_tokens": 20, "temperature": 0.9, "top_k": 40, "top_p": 0.95, "seed": 3}
    body |= {"repetition_penalty": 1.3, "stream": True, "stream_options": {"include_usage": True}}
    with client.stream("POST", "/v1/completions", json=body) as answer:
        found = events(answer)
    assert (
        "".join(one["choices"][0]["text"] for one in found[:-1]) == generated_alone("hello", CONFIGS[1]).text
    )
    assert len(found) > 2 and found[-2]["choices"][0]["finish_reason"] in ("stop", "length")
    assert found[-1]["usage"]["completion_tokens"] == len(generated_alone("hello", CONFIGS[1]).tokens)


def test_a_stream_has_the_logprobs_of_tokens_without_text_yet(client, engine, monkeypatch):
    """A character of three bytes is generated one byte at a time: its first two pieces have no text."""
    tokens = [*ByteTokenizer().encode("a你"), 1]
    pieces = [serve.TokenChunk((token,), (-float(n),), token == 1) for n, token in enumerate(tokens)]
    monkeypatch.setattr(engine, "submit", lambda jobs: [jobs[0].on_event(piece) for piece in pieces])
    body = {"prompt": "b", "logprobs": 1, "stream": True}
    with client.stream("POST", "/v1/completions", json=body) as answer:
        choices = [one["choices"][0] for one in events(answer)]
    assert [one["text"] for one in choices] == ["a", "你", ""]
    assert [one["logprobs"]["token_logprobs"] for one in choices] == [[0.0], [-1.0, -2.0, -3.0], [-4.0]]


def test_a_stop_cuts_the_text(client):
    full_text = generated_alone("hello", GenerationConfig(limit=12)).text
    stop = full_text[4:6]
    body = {"prompt": "hello", "max_tokens": 12, "temperature": 0, "stop": ["never", stop]}
    (found,) = client.post("/v1/completions", json=body).json()["choices"]
    assert found["text"] == full_text[: full_text.index(stop)] and found["finish_reason"] == "stop"


def test_without_a_seed_draws_differ(client):
    body = {"prompt": "hello", "max_tokens": 30}
    texts = {client.post("/v1/completions", json=body).json()["choices"][0]["text"] for _ in range(3)}
    assert len(texts) == 3


def test_a_search_gives_its_best(client):
    completion = generated_alone("hello", GenerationConfig(limit=8, beams=Beams(4)))
    best = [completion, *completion.others][:3]
    body = {"text": ["hello", " "], "beams": 4, "best": 3, "max_tokens": 8}
    found, blank = client.post("/translate", json=body).json()["translations"]
    assert [found["text"], *(one["text"] for one in found["others"])] == [one.text for one in best]
    assert found["score"] == pytest.approx(completion.score, abs=1e-4)
    assert blank["text"] == "" and blank["finish_reason"] == "stop"
    body = {"prompt": "hello", "beams": 4, "n": 3, "max_tokens": 8}
    answer = client.post("/v1/completions", json=body).json()
    choices = [(one["index"], one["text"]) for one in answer["choices"]]
    assert choices == [(n, one.text) for n, one in enumerate(best)]
    assert answer["usage"]["completion_tokens"] == sum(len(one.tokens) for one in best)


def test_translations_stream_with_their_attention(client, generator):
    completion = generated_alone("hello", GenerationConfig())
    with client.stream(
        "POST", "/translate", json={"text": "hello", "stream": True, "attention": True}
    ) as answer:
        *pieces, last = events(answer)
    assert "".join(one["text"] for one in pieces) == last["text"] == completion.text and last["done"]
    seen = AttentionMapper(generator).attention_map("hello", completion.tokens)
    np.testing.assert_allclose(last["attention"]["weights"], seen.weights, atol=1e-4)


def test_scores_are_those_of_the_model(client, generator):
    pairs = [("hello", "you"), ("ab", "")]
    body = {"text": [text for text, _ in pairs], "target": [target for _, target in pairs]}
    found = client.post("/score", json=body).json()["scores"]
    for one, logs in zip(found, generator.score(pairs), strict=True):
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


@pytest.mark.parametrize("name", BAD)
def test_a_bad_request_gets_an_error_message(client, name):
    body, code, words = BAD[name]
    answer = client.post("/v1/completions", content=body)
    error = answer.json()["error"]
    assert answer.status_code == code and words in error["message"], error
    assert error.keys() == {"message", "type", "param", "code"} and len(answer.content) < 1000
    assert error["type"] == "invalid_request_error"


CODES = {
    "wrong model": ("/v1/completions", {"prompt": "a", "model": "gpt-4"}, 404, "model", "model_not_found"),
    "too long": ("/v1/completions", {"prompt": "a" * 99}, 400, None, "context_length_exceeded"),
    "too long to score": (
        "/score",
        {"text": "a" * 99, "target": "b"},
        400,
        "target",
        "context_length_exceeded",
    ),
    "unknown field": ("/v1/completions", {"prompt": "a", "promt": 1}, 400, "promt", "unknown_parameter"),
    "missing field": ("/v1/completions", {}, 400, "prompt", "missing_required_parameter"),
    "wrong value": ("/v1/completions", {"prompt": "a", "top_p": 2}, 400, "top_p", "invalid_value"),
    "not supported": (
        "/v1/completions",
        {"prompt": "a", "best_of": 2},
        400,
        "best_of",
        "unsupported_parameter",
    ),
    "no such path": ("/v1/chat/completions", {}, 404, None, "unknown_url"),
    "wrong method": ("/healthz", {}, 405, None, "method_not_supported"),
    "no object": ("/score", [1], 400, None, None),
}


@pytest.mark.parametrize("name", CODES)
def test_errors_have_the_codes_of_openai(client, name):
    path, body, status, param, code = CODES[name]
    answer = client.post(path, json=body)
    error = answer.json()["error"]
    assert answer.status_code == status and (error["param"], error["code"]) == (param, code), error
    assert error["type"] == "invalid_request_error" and isinstance(error["message"], str)


def test_a_wrong_model_is_named_with_the_one_that_is_served(client):
    answer = client.post("/v1/completions", json={"prompt": "a", "model": "any"})
    assert answer.json()["error"]["message"] == "the model 'any' does not exist; this server has 'tiny'"
    for model in ({}, {"model": None}, {"model": "tiny"}):
        assert (
            client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1, **model}).status_code == 200
        )


def test_unknown_paths_and_methods(client):
    assert client.get("/v1/completion").status_code == client.post("/translate/", json={}).status_code == 404
    answer = client.get("/translate")
    assert answer.status_code == 405 and answer.headers["allow"] == "POST"
    assert "does not support GET" in answer.json()["error"]["message"]
    for origin in ("http://x.org", "http://["):
        assert client.post("/score", json={"text": "a"}, headers={"Origin": origin}).status_code == 403
    answer = client.post("/score", json={"text": "a", "target": ["b", "c"]})
    assert answer.status_code == 400 and "1 texts and 2 targets" in answer.json()["error"]["message"]


def test_the_text_that_is_too_long_is_named(client):
    texts = ["a", "b" * 70]
    for path, body in {
        "/v1/completions": {"prompt": texts},
        "/translate": {"text": texts, "beams": 4},
        "/score": {"text": texts, "target": texts},
    }.items():
        answer = client.post(path, json=body)
        assert answer.status_code == 400 and "text 2" in answer.json()["error"]["message"]


def test_deeply_nested_json_is_rejected():
    """At some depth it can just be read, but not be shown."""
    for depth in range(700, 1001):
        with pytest.raises(APIError):
            parse_body(b"[" * depth + b"]" * depth, COMPLETION_FIELDS)


def test_every_field_of_a_request_has_its_default():
    values = parse_body(b'{"prompt": "a", "stop": null}', COMPLETION_FIELDS)
    assert values.keys() == COMPLETION_FIELDS.keys() and values["n"] == 1 and values["temperature"] == 1.0
    with pytest.raises(APIError):
        parse_body(b'{"prompt": "a", "temperature": 1e999}', COMPLETION_FIELDS)
