"""Decoding with a cache equals running the full prefix, and generated texts equal their tokens."""

import dataclasses
from functools import cache
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from untrained_models import untrained

import weft as wf
from weft import generate, nn, serve
from weft.core.errors import ModelError
from weft.data import ByteTokenizer, SentencePiece
from weft.generate.batching import PaddedSizes, PromptRow, pad_batch
from weft.generate.cache import all_logits, decode_step, prefill_cache
from weft.models import Batch, Config, Transformer

BASE = Config(vocab=37, d_model=16, d_ff=24, heads=4, d_kv=4, layers=2, longest=16)
TWO = {"kind": "encoder_decoder"}
MODELS = {
    "learned": {},
    "sinusoid": {"positions": "sinusoid", "norm": "layer", "bias": True},
    "relative": {"positions": "relative", "scaled": False, **TWO},
    "relative, parallel": {"positions": "relative", "kv_heads": 2, "block": "parallel", **TWO},
    "rotary": {"positions": "rotary", "kv_heads": 2, "activation": "swiglu"},
    "none, parallel": {"positions": "none", "block": "parallel"},
    "local": {"attention": "local", "window": 3},
    "translation": {"decoder_layers": 3, **TWO},
    "multi-query": {"kv_heads": 1, "tied": True},
    "experts": {"experts": 4, "expert_top": 2, "capacity": 0.5},
    "reversible": {"residual": "reversible"},
    "hashed": {"attention": "lsh", "lsh_chunk": 2, "lsh_rounds": 1},
}
LAYOUTS = {
    "one device": ("", ""),
    "both": ("data=2 model=4", "batch:data heads:model d_ff:model vocab:model"),
    "long": ("data=2 model=3", "batch:data memory_length:model"),
}
ROWS, PLACES, INPUTS = wf.Dim("batch", 3), wf.Dim("length", 7), wf.Dim("length", 5)
BEGUN = [3, 1, 2]  # how many tokens of each row are read at once


def batch_of(config):
    draw = np.random.default_rng(0)
    tokens = wf.tensor(draw.integers(0, config.vocab, (3, 7)).astype(np.int32), [ROWS, PLACES])
    if config.kind == "decoder":
        return Batch(tokens)
    inputs = wf.tensor(draw.integers(0, config.vocab, (3, 5)).astype(np.int32), [ROWS, INPUTS])
    is_used = np.arange(5) < np.array([[5], [3], [4]])  # rows of different lengths
    return Batch(
        tokens,
        segments=wf.ones([ROWS, PLACES], jnp.int32),
        inputs=inputs,
        input_segments=wf.tensor(is_used.astype(np.int32), [ROWS, INPUTS]),
    )


def one_by_one(model, batch):
    """Each row's logits from its last prompt token on, computed with the cache of earlier positions."""
    begun = wf.tensor(np.array(BEGUN, np.int32), [ROWS])
    beginning = Batch(batch.tokens["length", :3], inputs=batch.inputs, input_segments=batch.input_segments)

    def step(carry, n):
        cache = carry
        position = begun - 1 + n
        logits, cache = decode_step(model, cache, wf.take(batch.tokens, position, PLACES, fill=0), position)
        return cache, logits

    steps = wf.Dim("steps", 5)
    return wf.scan(step, prefill_cache(model, beginning, 9), wf.arange(steps), steps)[1]


# Every other model on a mesh, and one on one device.
QUICK = {(name, "both") for name in list(MODELS)[::2]} | {("rotary", "one device")}
EVERY = [
    pytest.param(name, layout, marks=[] if (name, layout) in QUICK else pytest.mark.slow)
    for name in MODELS
    for layout in LAYOUTS
]


@pytest.mark.parametrize("name, layout", EVERY)
def test_a_cache_changes_nothing(name, layout):
    config = BASE.replace(**MODELS[name])
    model, batch = untrained(config), batch_of(config)
    all_at_once = all_logits if name in ("experts", "hashed") else type(model).logits
    expected = wf.spmd(all_at_once)(model, batch).numpy("batch", "length", "vocab")
    mesh, rules = LAYOUTS[layout]
    if name == "experts":
        rules = rules.replace("d_ff:model", "experts:model")
    found = wf.spmd(one_by_one, mesh, rules)(model, batch).numpy("batch", "steps", "vocab")
    for row, begun in enumerate(BEGUN):
        np.testing.assert_allclose(
            found[row, : 8 - begun],
            expected[row, begun - 1 : begun + 4],
            atol=1e-5 * np.abs(expected).max(),
        )


def with_config(model, config):
    """The same parameters under other settings."""
    leaves = jax.tree.leaves(model, is_leaf=wf.is_tensor)
    return jax.tree.unflatten(jax.tree.structure(Transformer(config), is_leaf=wf.is_tensor), leaves)


def test_experts_turn_no_token_away_when_decoding():
    config = BASE.replace(**MODELS["experts"])
    model, batch = untrained(config), batch_of(config)
    roomy = with_config(model, config.replace(capacity=4.0))
    logits = model.logits(batch).numpy()
    assert np.abs(logits - roomy.logits(batch).numpy()).max() > 1e-3  # with little room some are
    np.testing.assert_allclose(all_logits(model, batch).numpy(), roomy.logits(batch).numpy(), atol=1e-5)


def test_hashed_models_decode_with_exact_attention():
    """One chunk that contains the full sequence, and one bucket: the hash excludes nothing."""
    config = BASE.replace(**MODELS["hashed"])
    model, batch = untrained(config), batch_of(config)
    exact = with_config(model, config.replace(lsh_chunk=16))
    np.testing.assert_allclose(all_logits(model, batch).numpy(), exact.logits(batch).numpy(), atol=1e-5)
    assert np.abs(model.logits(batch).numpy() - exact.logits(batch).numpy()).max() > 1e-3


class PaddedOtherwise(ByteTokenizer):
    """Like a tokenizer that was trained elsewhere."""

    pad = 2


@cache  # programs are compiled once
def make_generator(layout="one device", rows=4, key=4, tokenizer=ByteTokenizer, **more):
    config = BASE.replace(**{**TWO, "vocab": 259, **more})
    return generate.TextGenerator(untrained(config, key), tokenizer(), *LAYOUTS[layout], rows=rows)


WORDS = ["ab", "c", "hello", "x y z", "b", "some longer words"]
CONFIGS = {
    "likeliest": generate.GenerationConfig(limit=8),
    "drawn": generate.GenerationConfig(limit=8, temperature=0.8, top_k=50, top_p=0.95, penalty=1.2, seed=3),
    "beams": generate.GenerationConfig(limit=8, beams=generate.Beams(3)),
}


@pytest.mark.parametrize("config_name", CONFIGS)
@pytest.mark.parametrize("layout", ["both", "long"])
def test_texts_do_not_depend_on_their_batch_or_layout(layout, config_name):
    together = list(make_generator().generate(WORDS, CONFIGS[config_name]))
    alone = make_generator(layout)
    for n, word in enumerate(WORDS):
        (one,) = alone.generate([word], CONFIGS[config_name], first=n)
        assert one.tokens == together[n].tokens
        assert one.score == pytest.approx(together[n].score, rel=1e-4)
    assert len({completion.tokens for completion in together}) > 2


def test_settings_beyond_float32_are_what_they_come_to():
    """A tiny top_p selects the likeliest token; a huge temperature makes all tokens equally likely; k covers all."""
    generator = make_generator()
    likeliest, *many = (
        [
            completion.tokens
            for completion in generator.generate(WORDS, generate.GenerationConfig(limit=8, seed=3, **how))
        ]
        for how in (
            {},
            {"temperature": 1.0, "top_p": 1e-300},
            {"temperature": 1e-300},
            {"temperature": 1e30, "top_k": 10**30},
            {"temperature": 1e300},
        )
    )
    assert many[0] == many[1] == likeliest
    assert many[2] == many[3] and len(set(many[2])) == len(WORDS)


def test_a_prompt_is_encoded_without_a_limit():
    """The model has 16 positions, and reserves half of them for the completion."""
    generator = make_generator(kind="decoder")
    short, long = (
        generator.encode_prompt(0, "hello", None),
        generator.encode_prompt(0, "some longer words", None),
    )
    assert (len(short.prompt), short.limit, short.cut) == (6, 8, False)
    assert long.cut and ByteTokenizer().decode(long.prompt[1:]) == "er words" and long.limit == 8
    assert generator.encode_prompt(0, "hello", 15).cut  # the caller set the limit


@pytest.mark.parametrize("tokenizer", [ByteTokenizer, PaddedOtherwise])
@pytest.mark.parametrize("more", [{}, {"kind": "decoder"}])
def test_completions_are_scored_consistently(more, tokenizer):
    generator = make_generator(**more, **({} if tokenizer is ByteTokenizer else {"tokenizer": tokenizer}))
    for text, completion in zip(WORDS[:5], generator.generate(WORDS[:5], CONFIGS["drawn"]), strict=True):
        # The text may be tokenized differently than it was generated: score the tokens themselves.
        tokens = np.zeros((1, 8), np.int32)
        tokens[0, : len(completion.tokens)] = completion.tokens
        ids, dims = generator.tokenizer.encode(text), [wf.Dim("batch", 1), wf.Dim("length", 8)]
        if more:
            tokens = np.concatenate([[ids], tokens], 1).astype(np.int32)
            dims[1] = wf.Dim("length", tokens.shape[1])
        targets = wf.tensor(tokens, dims)
        batch = Batch(wf.shift(targets, "length", 1), targets)
        if not more:
            inputs = wf.tensor(np.array([[*ids, 1]], np.int32), [dims[0], wf.Dim("length", len(ids) + 1)])
            batch = dataclasses.replace(batch, inputs=inputs)
        logs = generate.score(generator.models, batch).numpy()[0, len(ids) if more else 0 :]
        np.testing.assert_allclose(completion.logprobs, logs[: len(completion.tokens)], atol=1e-4)
        assert completion.score == pytest.approx(sum(completion.logprobs), abs=1e-4)


def test_a_completion_begins_with_the_space_after_its_prompt(tmp_path):
    words = "the class of the words"
    tokenizer = SentencePiece.train([words], tmp_path / "a.model", 16, byte_fallback=False, kind="bpe")
    generator = generate.TextGenerator(untrained(BASE.replace(vocab=16)), tokenizer, rows=4)
    prompts = words.split()
    found = list(generator.generate(prompts, generate.GenerationConfig(limit=6, temperature=2.0, seed=1)))
    texts = [tokenizer.decode([*tokenizer.encode(p), *s.tokens]) for p, s in zip(prompts, found, strict=True)]
    assert [p + s.text for p, s in zip(prompts, found, strict=True)] == texts
    assert any(one.text.startswith(" ") for one in found)


def test_given_texts_are_scored():
    generator = make_generator(kind="decoder")
    pairs = [("ab", "cd"), ("", "x"), ("hello", "")]
    found = list(generator.score(pairs))
    assert [len(logs) for logs in found] == [3, 2, 1]
    for (text, target), logs in zip(pairs, found, strict=True):
        ids = [*generator.tokenizer.encode(text + target), 1]
        targets = wf.tensor(np.array([ids], np.int32), [wf.Dim("batch", 1), wf.Dim("length", len(ids))])
        logits = generator.models[0].logits(Batch(wf.shift(targets, "length", 1))).numpy()[0]
        expected = jax.nn.log_softmax(logits)[np.arange(len(ids)), ids]
        np.testing.assert_allclose(logs, expected[len(text) :], atol=1e-4)


def test_two_models_generate_by_the_mean_of_their_probabilities():
    one, other = make_generator(key=4), make_generator(key=5)
    both = generate.TextGenerator([one.models[0], other.models[0]], ByteTokenizer(), rows=4)
    pairs = [("ab", "c"), ("x", "yz")]
    logs = [list(generator.score(pairs)) for generator in (one, other, both)]
    for a, b, mean in zip(*logs, strict=True):
        np.testing.assert_allclose(np.exp(mean), (np.exp(a) + np.exp(b)) / 2, rtol=1e-4)
    completion = next(both.generate(["ab"], CONFIGS["likeliest"]))
    assert completion.tokens != next(one.generate(["ab"], CONFIGS["likeliest"])).tokens


def test_a_thousand_texts_of_all_lengths_need_few_programs():
    generator = make_generator(rows=8, positions="sinusoid", layers=1)
    texts = ["a" * n for n in (1, 5, 20, 60, 100, 200, 250)]
    for _ in generator.generate(texts, generate.GenerationConfig(limit=2)):
        pass
    programs = generator.prefill, generator.decode
    assert sum(len(program.traces) for program in programs) <= 8


def test_quality_counts_several_references():
    found = generate.corpus_scores(["a b c d e", "x"], [["a b c d e", "other words"], ["y"]])
    assert found.exact == 0.5
    assert found.bleu > 50 and found.signatures[0].startswith("nrefs:var")


@pytest.mark.slow
def test_unrolled_layers_are_the_same():
    config = BASE.replace(**TWO)
    model, batch = untrained(config), batch_of(config)
    batch = dataclasses.replace(batch, targets=batch.tokens)
    loss = wf.value_and_grad(lambda model: model.loss(batch))
    value, grads = loss(model)
    again, others = loss(with_config(model, config.replace(unroll=2)))
    np.testing.assert_allclose(again.numpy(), value.numpy(), rtol=1e-6)
    pairs = zip(nn.parameters(grads).values(), nn.parameters(others).values(), strict=True)
    for one, other in pairs:
        np.testing.assert_allclose(other.numpy(), one.numpy(), atol=1e-6)
    steps = wf.spmd(one_by_one)
    unrolled = steps(with_config(model, config.replace(unroll=2)), batch).numpy()
    np.testing.assert_allclose(unrolled, steps(model, batch).numpy(), atol=1e-5)


def test_layers_that_are_stored_in_pieces_are_taken_apart():
    config = BASE.replace(layers=3)
    model, batch = untrained(config), batch_of(config)
    expected = wf.spmd(one_by_one)(model, batch).numpy()
    layout = wf.Layout("batch:data", params="d_model:data layers:model")
    found = wf.spmd(one_by_one, "data=2 model=2", layout)(model, batch).numpy()
    np.testing.assert_allclose(found, expected, atol=1e-5 * np.abs(expected).max())


def test_keys_stay_where_they_are_whichever_beams_go_on():
    model, batch = untrained(BASE), batch_of(BASE)
    beam = wf.Dim("beam", 2)
    cache = prefill_cache(model, batch, 9).expand_to_beams(beam)
    _, cache = decode_step(model, cache, wf.zeros([ROWS, beam], jnp.int32), wf.full([ROWS], 7, jnp.int32))
    np.testing.assert_array_equal(cache.lineage.numpy()[0, :, 6:8], [[0, 0], [0, 1]])
    followed = cache.select_beams(wf.ones([ROWS, wf.Dim("next", 2)], jnp.int32))
    assert followed.layers is cache.layers
    np.testing.assert_array_equal(followed.lineage.numpy()[0, :, 6:8], [[0, 1], [0, 1]])


# -- mistakes ----------------------------------------------------------------------------------------


class Bigram(nn.Module):
    """A user's own language model: the next token by the last one alone."""

    table: nn.Embedding
    config: dict = eqx.field(static=True)

    def __init__(self):
        self.table, self.config = nn.Embedding(wf.Dim("vocab", 259), wf.Dim("next", 259)), {"vocab": 259}

    def compute_logits(self, x):
        return x


@cache
def bigram():
    return nn.init(Bigram(), jax.random.key(0))


def state_of():
    """One row that a Transformer has read."""
    batch, row = pad_batch(
        [PromptRow(0, (), (0,), 2)], [generate.GenerationConfig()], 1, SIZES, ByteTokenizer()
    )
    return generate.prefill((untrained(BASE),), batch, row, 3)


SIZES = PaddedSizes(0, 1, 2)
BEGIN = wf.spmd(generate.prefill, static=("max_length",))
TOKENS = Batch(wf.zeros([ROWS, PLACES], jnp.int32), targets=wf.zeros([ROWS, PLACES], jnp.int32))
PAIR = [["a"], ["b"]]
INVALID = {"limit": 0, "temperature": -1.0, "top_p": 0.0, "top_k": -2}
LIMIT_16, LIMIT_17 = (generate.GenerationConfig(limit=n) for n in (16, 17))
MISTAKES = {
    "settings_that_are_none": lambda: generate.GenerationConfig(**INVALID),  # wrong
    "penalty_and_seed_too_large": lambda: generate.GenerationConfig(penalty=1e300, seed=2**63),  # wrong
    "beams_that_are_a_number": lambda: generate.GenerationConfig(beams=4),  # wrong
    "one_text": lambda: list(make_generator().generate("hello")),  # wrong
    "limit_of_a_translation": lambda: list(make_generator().generate(WORDS, LIMIT_17)),  # wrong
    "limit_after_a_prompt": lambda: list(make_generator(kind="decoder").generate([], LIMIT_16)),  # wrong
    "own_model": lambda: generate.TextGenerator(bigram(), ByteTokenizer()),  # wrong
    "own_model_in_a_program": lambda: BEGIN([bigram()], TOKENS, state_of().settings, 9),  # wrong
    "function_as_a_model": lambda: generate.TextGenerator(len, ByteTokenizer()),  # wrong
    "nobody_to_speak": lambda: generate.TextGenerator([], ByteTokenizer(), rows=0, longest=1),  # wrong
    "nothing_to_compare": lambda: generate.corpus_scores([], []),  # wrong
    "references_that_are_texts": lambda: generate.corpus_scores(["a", "b"], ["a", "b"]),  # wrong
    "too_few_references": lambda: generate.corpus_scores(["a", "b", "c"], PAIR),  # wrong
}


@pytest.mark.parametrize("name", MISTAKES)
def test_messages(name, mistake):
    mistake(name, MISTAKES[name], "messages/decode")


@pytest.mark.parametrize(
    "use",
    [
        lambda model: generate.prefill_cache(model, TOKENS, 9),
        lambda model: generate.score([untrained(BASE), model], TOKENS),
        lambda model: generate.decode([model], state_of(), 2),
        lambda model: generate.beam_search([model], state_of(), generate.Beams(2)),
        lambda model: serve.build_app(generate.TextGenerator(model, ByteTokenizer())),
    ],
    ids=["read", "score", "speak", "search", "serve"],
)
def test_what_a_model_must_provide_is_listed(use):
    with pytest.raises(
        ModelError, match="Bigram does not provide config, embedding, decoder, run_with"
    ) as caught:
        use(bigram())
    assert [detail.split()[0] for detail in caught.value.details] == [
        "config",
        "embedding",
        "decoder",
        "run_with",
    ]


def test_every_text_is_of_a_mistake():
    here = {path.stem for path in (Path(__file__).parents[1] / "messages" / "decode").glob("*.txt")}
    assert here == set(MISTAKES)
