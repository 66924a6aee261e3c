"""Against Hugging Face's transformers: models with the same weights say the same tokens, with the same scores.

Ours says rows of different lengths in one batch; theirs those of one length, without any filling. Needs
PyTorch; `make test-peers` runs it in an environment of its own.
"""

import functools

import numpy as np
import pytest
import scipy.stats
import torch
import transformers

import weft as wf
from weft import generate
from weft.generate.batching import uniform_draws
from weft.models import Batch, huggingface

TOKENS, ENDS = 53, (1, 9, 30)  # 53 splits unevenly over 4 devices
INPUTS, ROWS, LONGEST, SAID = 100, 25, 8, 10
PLACES = {
    "one device": ("", ""),
    "mesh": ("data=2 model=4", "batch:data heads:model d_ff:model vocab:model"),
}
STOPS = {"likely": False, "first": True, "certain": "never"}  # their early_stopping
TIE = 1e-4

torch.set_num_threads(1)  # such small models are slower with more


def t5():
    sizes = dict(vocab_size=TOKENS, d_model=32, d_kv=8, d_ff=40, num_layers=2, num_heads=4)
    model = transformers.T5ForConditionalGeneration(
        transformers.T5Config(**sizes, feed_forward_proj="gated-gelu", tie_word_embeddings=False)
    )
    # transformers 5 ties T5 when it makes one; a checkpoint of v1.1 has two tables.
    model.lm_head.weight = torch.nn.Parameter(torch.randn(TOKENS, 32))
    return model


def gpt2():
    sizes = dict(vocab_size=TOKENS, n_embd=32, n_layer=2, n_head=4, n_positions=24, n_inner=40)
    tokens = dict(bos_token_id=0, eos_token_id=1, tie_word_embeddings=False)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **tokens))


def llama():
    sizes = dict(vocab_size=TOKENS, hidden_size=32, intermediate_size=40, num_hidden_layers=2)
    sizes |= dict(num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=64)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))


# How they are made, and how far they are moved from there: far from even, so that tokens differ and all kinds
# of lengths occur. T5's scores have no scale: further away, float32 itself is wrong by more than a tie.
MODELS = {"t5": (t5, 0.15), "gpt2": (gpt2, 0.3), "llama": (llama, 0.3)}


class Peer:
    """A PyTorch model, its checkpoint, and inputs of all lengths."""

    def __init__(self, name, folder):
        torch.manual_seed(7)
        make, far = MODELS[name]
        self.model, self.folder, self.reads = make().eval(), folder / name, name == "t5"
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.add_(far * torch.randn_like(parameter))
            head = self.model.lm_head.weight
            head.copy_(0.4 * torch.randn_like(head))
        self.model.save_pretrained(self.folder)
        draw = np.random.default_rng(3)
        self.inputs = [
            tuple(map(int, draw.integers(2, TOKENS, draw.integers(1, LONGEST + 1)))) for _ in range(INPUTS)
        ]

    @functools.cached_property
    def alike(self):
        """The numbers of the inputs, by their length."""
        return [[n for n, i in enumerate(self.inputs) if len(i) == k] for k in range(1, LONGEST + 1)]

    def prompt(self, n):
        return (0,) if self.reads else self.inputs[n]

    def generate(self, **how):
        """What theirs says to each input: the tokens of all results, and of a search their scores."""
        found = {}
        for numbers in filter(None, self.alike):
            ids = torch.tensor([self.inputs[n] for n in numbers])
            out = self.model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                generation_config=transformers.GenerationConfig(
                    max_new_tokens=SAID,
                    eos_token_id=list(ENDS),
                    pad_token_id=0,
                    decoder_start_token_id=0,
                    output_scores=True,
                    return_dict_in_generate=True,
                    **how,
                ),
            )
            several = how.get("num_return_sequences", 1)
            said = out.sequences[:, 1 if self.reads else ids.shape[1] :].numpy()
            said = said.reshape(len(numbers), several, -1)
            scores = getattr(out, "sequences_scores", None)
            scores = scores.numpy().reshape(len(numbers), several) if scores is not None else [()] * len(said)
            for n, rows, score in zip(numbers, said, scores, strict=True):
                found[n] = [ended(row) for row in rows], score
        return [found[n] for n in range(INPUTS)]

    def logits(self, n, said):
        """Those of all tokens before each one that is said, by theirs."""
        whole = torch.tensor([[*self.prompt(n), *said]])
        given = {"input_ids": whole}
        if self.reads:
            given = {"input_ids": torch.tensor([self.inputs[n]]), "decoder_input_ids": whole}
        with torch.no_grad():
            return self.model(**given).logits[0, len(self.prompt(n)) - 1 : -1]

    def logs(self, n, said):
        """The logarithm of the probability of each token that is said, by theirs."""
        return torch.log_softmax(self.logits(n, said), -1).numpy()[np.arange(len(said)), list(said)]

    def is_tie(self, n, said, want, penalty):
        """Whether the first tokens that differ are as good as each other to theirs."""
        at = next(k for k, (a, b) in enumerate(zip(said, want, strict=False)) if a != b)
        logits = self.logits(n, said)[at].numpy().copy()
        seen = [*{*self.prompt(n), *said[:at]}]
        logits[seen] = np.where(logits[seen] > 0, logits[seen] / penalty, logits[seen] * penalty)
        return abs(logits[said[at]] - logits[want[at]]) < TIE

    def batches(self, **how):
        """The same for ours."""
        for at in range(0, INPUTS, ROWS):
            yield asked(self, range(at, at + ROWS), **how)


def ended(tokens):
    """Tokens up to the one that ends them."""
    tokens = [int(t) for t in tokens]
    first = next((n for n, t in enumerate(tokens) if t in ENDS), len(tokens) - 1)
    return tuple(tokens[: first + 1])


def asked(peer, numbers, limit=SAID, temperature=0.0, top_k=0, top_p=1.0, penalty=1.0, drawn_by=None):
    """Rows for our side, filled up with tokens that must not matter."""
    batch = wf.Dim("batch", len(numbers))

    def filled(rows, name):
        array = np.full((len(rows), max(map(len, rows))), 17, np.int32)
        for n, row in enumerate(rows):
            array[n, : len(row)] = row
        return wf.tensor(array, [batch, wf.Dim(name, array.shape[1])])

    def each(value, type):
        return wf.tensor(np.full(len(numbers), value, type), [batch])

    prompts, inputs = [peer.prompt(n) for n in numbers], [peer.inputs[n] for n in numbers]
    fields = {"tokens": filled(prompts, "length")}
    if peer.reads:
        fields["inputs"] = filled(inputs, "length")
        held = np.arange(LONGEST) < np.array([[len(i)] for i in inputs])
        fields["input_segments"] = wf.tensor(
            held[:, : fields["inputs"].dims[1].size].astype(np.int32), fields["inputs"].dims
        )
    by = np.ones((len(numbers), limit), np.float32) if drawn_by is None else drawn_by
    rows = generate.RowSettings(
        wf.tensor(np.array([len(p) for p in prompts], np.int32), [batch]),
        each(limit, np.int32),
        wf.tensor(np.tile(np.array(ENDS, np.int32), (len(numbers), 1)), [batch, wf.Dim("ends", len(ENDS))]),
        generate.SamplingParams(
            each(temperature, np.float32),
            each(top_k, np.int32),
            each(top_p, np.float32),
            each(penalty, np.float32),
        ),
        wf.tensor(by, [batch, wf.Dim("generated", limit)]),
    )
    return Batch(**fields), rows


@pytest.fixture(scope="module", params=MODELS)
def peer(request, tmp_path_factory):
    return Peer(request.param, tmp_path_factory.mktemp("peers"))


ROOM = LONGEST + SAID


class Ours:
    """The same model by Weft."""

    def __init__(self, peer, place="one device"):
        mesh, layout = PLACES[place]
        self.models = (huggingface.load(peer.folder, mesh, layout),)
        self.begin = wf.spmd(generate.prefill, mesh, layout, static=("max_length",))
        self.speak = wf.spmd(generate.decode, mesh, layout)
        self.search = wf.spmd(generate.beam_search, mesh, layout, static=("beams",))

    def say(self, peer, **how):
        """All inputs' tokens, and the logarithm of each one's probability."""
        found = []
        for batch, rows in peer.batches(**how):
            state = self.speak(self.models, self.begin(self.models, batch, rows, ROOM), SAID)
            tokens, counts, logs = state.generated.numpy(), state.count.numpy(), state.logprobs.numpy()
            found += [
                (tuple(map(int, t[:count])), s[:count])
                for t, count, s in zip(tokens, counts, logs, strict=True)
            ]
        return found

    def find(self, peer, how):
        """All inputs' sequences, best first, and their scores."""
        found = []
        for batch, rows in peer.batches():
            some = self.search(self.models, self.begin(self.models, batch, rows, ROOM), how)
            tokens, counts = (
                some.generated.numpy("batch", "beam", "generated"),
                some.count.numpy("batch", "beam"),
            )
            scores = some.score.numpy("batch", "beam")
            for t, count, s in zip(tokens, counts, scores, strict=True):
                found.append(([tuple(map(int, one[:c])) for one, c in zip(t, count, strict=True)], s))
        return found


@pytest.fixture(scope="module")
def ours(peer):
    return Ours(peer)


def check_greedy(peer, found, penalty):
    """All inputs' tokens are theirs, but for ties; each one's probability too."""
    ties = []
    for n, ((said, logs), ((want,), _)) in enumerate(
        zip(found, peer.generate(repetition_penalty=penalty), strict=True)
    ):
        np.testing.assert_allclose(logs, peer.logs(n, said), rtol=0, atol=TIE)
        if said != want:
            assert peer.is_tie(n, said, want, penalty), (n, said, want)
            ties.append(n)
    assert len(ties) <= 2, ties
    assert len({len(said) for said, _ in found}) > 5 and len({said for said, _ in found}) > 50


def check_beams(peer, found, how):
    """All inputs' sequences are theirs, from the best to the last, but for ties; their scores too."""
    expected = peer.generate(
        num_beams=how.size,
        num_return_sequences=how.size,
        length_penalty=how.alpha,
        early_stopping=STOPS[how.stop],
    )
    ties = []
    for n, ((said, scores), (want, want_scores)) in enumerate(zip(found, expected, strict=True)):
        np.testing.assert_allclose(scores, want_scores, rtol=0, atol=TIE, err_msg=f"{n}: {said} {want}")
        for one, other in zip(said, want, strict=True):
            if one != other:
                a, b = (peer.logs(n, of).sum() / len(of) ** how.alpha for of in (one, other))
                assert abs(a - b) < TIE, (n, one, other)
                ties.append(n)
    assert len(ties) <= 4, ties
    assert len({len(best) for (best, *_), _ in found}) > 5


@pytest.mark.parametrize("penalty", [1.0, 1.5])
def test_greedy(peer, ours, penalty):
    check_greedy(peer, ours.say(peer, penalty=penalty), penalty)


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_beams(peer, ours, alpha):
    how = generate.Beams(4, alpha, "plain", "likely", window=1)
    check_beams(peer, ours.find(peer, how), how)


@pytest.mark.parametrize(
    "peer, stop, alpha", [("gpt2", "first", 1.0), ("llama", "certain", 0.5)], indirect=["peer"]
)
def test_when_a_search_ends(peer, ours, stop, alpha):
    how = generate.Beams(4, alpha, "plain", stop, window=1)
    check_beams(peer, ours.find(peer, how), how)


@pytest.mark.parametrize("peer", ["llama"], indirect=True)
def test_on_a_mesh(peer):
    ours, how = Ours(peer, "mesh"), generate.Beams(4, 1.0, "plain", "likely", window=1)
    check_greedy(peer, ours.say(peer, penalty=1.5), 1.5)
    check_beams(peer, ours.find(peer, how), how)


DRAWS = 10_000


@pytest.mark.parametrize("peer", ["gpt2"], indirect=True)
def test_draws_are_as_frequent(peer, ours):
    number = next(n for n, i in enumerate(peer.inputs) if len(i) == 4)
    found = {}
    for temperature, top_k, top_p in [(0.7, 0, 1.0), (1.5, 12, 1.0), (1.2, 0, 0.8), (1.4, 20, 0.9)]:
        ids = torch.tensor([peer.inputs[number]])
        config = transformers.GenerationConfig(
            max_new_tokens=1,
            do_sample=True,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            pad_token_id=0,
            output_scores=True,
            return_dict_in_generate=True,
        )
        out = peer.model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        wanted = torch.softmax(out.scores[0][0].double(), -1).numpy()
        by = np.stack([uniform_draws(11, n, 1) for n in range(DRAWS)])
        how = dict(temperature=temperature, top_k=top_k, top_p=top_p, drawn_by=by, limit=1)
        state = ours.begin(ours.models, *asked(peer, [number] * DRAWS, **how), 4)
        said = ours.speak(ours.models, state, 1).generated.numpy()[:, 0]
        counts = np.bincount(said, minlength=TOKENS)
        assert not counts[wanted == 0].any() and (wanted > 0).sum() > 3
        assert fits(counts, wanted)
        found[temperature, top_k, top_p] = counts, wanted
    # The test can tell the settings from each other.
    for a, (counts, _) in found.items():
        for b, (_, wanted) in found.items():
            assert a == b or not fits(counts, wanted)


def fits(counts, wanted):
    """Pearson's chi-squared test; rare tokens count as one."""
    expected = wanted * counts.sum()
    rare = expected < 5
    observed = np.append(counts[~rare], counts[rare].sum())
    expected = np.append(expected[~rare], expected[rare].sum())
    if expected[-1] < 1e-9:
        if observed[-1]:
            return False
        observed, expected = observed[:-1], expected[:-1]
    return scipy.stats.chisquare(observed, expected).pvalue > 1e-3
