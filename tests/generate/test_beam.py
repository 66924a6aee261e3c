"""Beam search agrees with an exhaustive search, and with a plain beam search on NumPy arrays and lists."""

import functools
import math
from pathlib import Path

import equinox as eqx
import jax
import numpy as np
import pytest
from tiers import slow

import weft as wf
from weft import nn
from weft.generate import Beams, RowSettings, SamplingParams, beam_search, decode, prefill
from weft.models import Batch, Config, Transformer

LAYOUTS = {
    "one device": ("", ""),
    "data": ("data=8", "batch:data"),
    "model": ("model=8", "vocab:model heads:model d_ff:model"),
    "both": ("data=4 model=2", "batch:data vocab:model heads:model"),
}
SIZES = dict(d_model=8, d_ff=12, heads=2, d_kv=4, layers=1, positions="rotary", norm="rms")
TOY, USUAL = 5, 11  # sizes of a vocabulary; 11 splits unevenly
SURE = {TOY: 1.0, USUAL: 1.6}
ENDS = 4  # how many there may be; -1 is none


@functools.cache
def model_of(vocab):
    """One that is rather sure of itself: sequences of all lengths are found. The toy is less so."""
    model = nn.init(Transformer(Config(vocab=vocab, **SIZES)), jax.random.key(3))
    return jax.tree.map(lambda t: t * SURE[vocab], model, is_leaf=wf.is_tensor)


@functools.cache
def programs(layout):
    mesh, rules = LAYOUTS[layout]
    return (
        wf.spmd(prefill, mesh, rules, static=("max_length",)),
        wf.spmd(beam_search, mesh, rules, static=("beams",)),
        wf.spmd(decode, mesh, rules),
    )


def chain(logits):
    """A Transformer whose logits are a table's: over the position, the last token, and the next one.

    The table is a sum of one for each position and one for each token. Features are one-hot vectors of both,
    since the layers add zero; the last layer is the table.
    """
    longest, size, _ = logits.shape
    sizes = SIZES | dict(d_model=size + longest, positions="learned", longest=longest, epsilon=1e-12)
    model = nn.init(Transformer(Config(vocab=size, **sizes)), jax.random.key(0))

    def parts(m):
        return m.decoder.blocks, m.embedding.weight, m.decoder.positions.weight, m.last.weight

    blocks, *rest = parts(model)
    zero = jax.tree.map(lambda t: wf.parameter(t * 0), blocks, is_leaf=wf.is_tensor)
    one_hot = np.eye(size + longest)
    last = np.concatenate([logits[0], (logits - logits[0])[:, 0]])
    # The last norm multiplies the sum of two one-hot vectors by this.
    last = last / np.sqrt((size + longest) / 2)
    arrays = zip((one_hot[:size], one_hot[size:], last), rest, strict=True)
    new = [wf.parameter(wf.tensor(np.float32(a), t.dims)) for a, t in arrays]
    return eqx.tree_at(parts, model, (zero, *new))


def started(model, prompts, limits, ends, layout, penalty=1.0, models=1):
    batch, most = wf.Dim("batch", len(prompts)), max(map(len, prompts))
    tokens = np.array([[*p, *[2] * (most - len(p))] for p in prompts], np.int32)  # filled with anything
    every = np.array([[*ends, *[-1] * (ENDS - len(ends))]] * len(prompts), np.int32)
    zeros, ones, by = (wf.tensor(np.full(len(prompts), n, np.float32), [batch]) for n in (0, 1, penalty))
    rows = RowSettings(
        wf.tensor(np.array([len(p) for p in prompts], np.int32), [batch]),
        wf.tensor(np.array(limits, np.int32), [batch]),
        wf.tensor(every, [batch, wf.Dim("ends", ENDS)]),
        SamplingParams(zeros, zeros.astype(np.int32), ones, by),
        wf.ones([batch, wf.Dim("generated", 8)]),
    )
    prompts = Batch(wf.tensor(tokens, [batch, wf.Dim("length", most)]))
    return programs(layout)[0]((model,) * models, prompts, rows, 11)


def find(vocab, how, prompts, limits, ends, layout="one device"):
    """Each row's sequences: tokens, score and logarithm, best first."""
    return find_with(model_of(vocab), how, prompts, limits, ends, layout)


def find_with(model, how, prompts, limits, ends, layout="one device"):
    state = started(model, prompts, limits, ends, layout)
    found = programs(layout)[1]((model,), state, how)
    generated, *rest = (
        found.generated.numpy("batch", "beam", "generated"),
        found.count,
        found.score,
        found.logprob,
    )
    columns = zip(generated, *(t.numpy("batch", "beam") for t in rest), strict=True)
    return [
        [(tuple(map(int, one[:n])), s, log) for one, n, s, log in zip(*row, strict=True) if n]
        for row in columns
    ]


find_once = functools.cache(find)

_logits = wf.spmd(Transformer.logits)


def logits_after(vocab, sequences, rows=200, length=11):
    """The logits of what may follow each sequence.

    Always of one shape, so that there is one program; the model does not look ahead.
    """
    array = np.zeros((rows, length), np.int32)
    for n, sequence in enumerate(sequences):
        array[n, : len(sequence)] = sequence
    batch = Batch(wf.tensor(array, [wf.Dim("batch", rows), wf.Dim("length", length)]))
    logits = _logits(model_of(vocab), batch).numpy("batch", "length", "vocab").astype(np.float64)
    return [logits[n, len(sequence) - 1] for n, sequence in enumerate(sequences)]


def logs_after(vocab, sequences):
    """The logarithms of their probabilities."""
    return [logits - np.log(np.exp(logits).sum()) for logits in logits_after(vocab, sequences)]


def divided(how, log, count):
    return log / {"transformer": ((5 + count) / 6) ** how.alpha, "plain": count**how.alpha}[how.penalty]


def every_sequence(vocab, prompt, limit, ends):
    """All possible sequences and their log-probabilities."""
    logs, open_ones = {}, {(): 0.0}
    for count in range(1, limit + 1):
        follow = logs_after(vocab, [prompt + s for s in open_ones])
        longer = {
            (*s, token): log + more[token]
            for (s, log), more in zip(open_ones.items(), follow, strict=True)
            for token in range(vocab)
        }
        logs |= {s: log for s, log in longer.items() if s[-1] in ends or count == limit}
        open_ones = {s: log for s, log in longer.items() if s not in logs}
    assert math.isclose(sum(map(math.exp, logs.values())), 1, rel_tol=1e-5)
    return logs


def plainly(vocab, how, prompt, limit, ends):
    """A search with lists: all continuations are sorted."""
    beams, found = [((), 0.0)], []
    for count in range(1, limit + 1):
        follow = logs_after(vocab, [prompt + s for s, _ in beams])
        longer = [
            ((*s, token), log + more[token])
            for (s, log), more in zip(beams, follow, strict=True)
            for token in range(vocab)
        ]
        longer.sort(key=lambda one: -one[1])
        over = {s for s, _ in longer if s[-1] in ends or count == limit}
        found += [(s, divided(how, log, count), log) for s, log in longer[: 2 * how.size] if s in over]
        found = sorted(found, key=lambda one: -one[1])[: how.size]
        beams = [one for one in longer if one[0] not in over][: how.size]
        if len(found) == how.size and beams:
            longest = limit if how.stop == "certain" and how.alpha > 0 else count
            if how.stop == "first" or divided(how, beams[0][1], longest) <= found[-1][1]:
                break
        if not beams:
            break
    return found


def assert_same_beams(found, expected):
    """Equal tokens, and scores that agree up to rounding, in every row."""
    for row, want in zip(found, expected, strict=True):
        assert [s for s, *_ in row] == [s for s, *_ in want]
        np.testing.assert_allclose([r[1:] for r in row], [w[1:] for w in want], atol=2e-5)


# -- against all sequences -------------------------------------------------------------------------

PROMPTS = ((0,), (3, 2), (4, 0, 2))
WHOLE = [Beams(TOY**2, 0.0), Beams(TOY**2, 0.6), Beams(TOY**2, 6.0), Beams(TOY**2, 1.0, "plain", "likely")]


@pytest.mark.parametrize("how", WHOLE, ids=lambda how: f"{how.penalty} {how.alpha}")
@pytest.mark.parametrize("ends", [(1,), (1, 3), (0, 1, 2, 4)])
def test_with_beams_for_all_the_best_are_found(how, ends):
    found = find_once(TOY, how, PROMPTS, (3, 3, 3), ends)
    for row, prompt in zip(found, PROMPTS, strict=True):
        expected_beams = every_sequence(TOY, prompt, 3, ends)
        want = [(s, divided(how, log, len(s)), log) for s, log in expected_beams.items()]
        want = sorted(want, key=lambda one: -one[1])[: how.size]
        assert_same_beams([row], [want])
        scores = [score for _, score, _ in row]
        assert scores == sorted(scores, reverse=True) and len(row) == min(25, len(expected_beams))


def test_a_greater_alpha_makes_nothing_shorter():
    hows, changes = [how for how in WHOLE if how.penalty == "transformer"], 0
    for end in range(TOY):
        counts = np.array(
            [
                [len(row[0][0]) for row in find_once(TOY, how, PROMPTS, (3, 3, 3), (end,))]
                for how in sorted(hows, key=lambda how: how.alpha)
            ]
        )
        assert (np.diff(counts, axis=0) >= 0).all(), counts
        changes += (counts[0] < counts[-1]).sum()
    assert changes > 2


# -- against a plain search ------------------------------------------------------------------------

MORE = tuple(tuple(map(int, np.random.default_rng(n).integers(0, USUAL, 1 + n % 3))) for n in range(12))
LIKELY = (1, 3, 4, 5)  # the likeliest tokens
LIMITS = (8, 8, 1, 5, 8, 3, 8, 2, 8, 8, 6, 8)


@pytest.mark.parametrize("stop", ["first", "likely", "certain"])
@pytest.mark.parametrize("ends", [(1,), (1, 3, 8)])
def test_a_search_is_that_of_lists(stop, ends):
    how = Beams(3, 1.0, "transformer", stop)
    found = find_once(USUAL, how, MORE, LIMITS, ends)
    assert_same_beams(found, [plainly(USUAL, how, p, n, ends) for p, n in zip(MORE, LIMITS, strict=True)])
    assert len({len(one[0]) for row in found for one in row}) > 2


def test_as_many_beams_go_on_whatever_ends():
    """With an alpha that prefers the longest, those that go on beside four likely ends are what is found."""
    how = Beams(3, 6.0)
    found = find_once(USUAL, how, MORE, LIMITS, LIKELY)
    assert_same_beams(found, [plainly(USUAL, how, p, n, LIKELY) for p, n in zip(MORE, LIMITS, strict=True)])


def test_stopping_later_is_never_worse():
    by_stop = [
        find_once(USUAL, Beams(3, 1.0, "transformer", stop), MORE, LIMITS, (1,))
        for stop in ("first", "likely", "certain")
    ]
    scores = np.array([[[score for _, score, _ in row] for row in found] for found in by_stop])
    assert (np.diff(scores, axis=0) >= 0).all()
    assert (np.diff(scores, axis=0) > 1e-3).any((1, 2)).all()  # each rule makes a difference


def test_rows_find_what_they_find_alone():
    how = Beams(3, 1.0)
    together = find_once(USUAL, how, MORE, LIMITS, (1,))
    for n in (2, 5, 8, 11):  # prompts of one length, for one program
        alone = find(USUAL, how, [MORE[n]], [LIMITS[n]], (1,))
        assert_same_beams(alone, [together[n]])


def test_a_row_with_limit_zero_finds_nothing():
    found = find(USUAL, Beams(3, 1.0), MORE, (0, *LIMITS[1:]), (1,))
    assert found[0] == []
    assert_same_beams(found[1:], find_once(USUAL, Beams(3, 1.0), MORE, LIMITS, (1,))[1:])


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "one device"])
def test_a_layout_changes_nothing(layout):
    how = Beams(3, 1.0)
    assert_same_beams(
        find(USUAL, how, MORE, LIMITS, (1, 4), layout),
        find_once(USUAL, how, MORE, LIMITS, (1, 4)),
    )


def test_one_beam_follows_the_likeliest_token():
    """Its text ends at the likeliest token too, or at an end that is the second likeliest."""
    ends = (1, 3, 8)
    found = find(USUAL, Beams(1, 1.0, stop="first"), MORE, LIMITS, ends)
    state = started(model_of(USUAL), MORE, LIMITS, (), "one device")
    state = programs("one device")[2]((model_of(USUAL),), state, 8)
    seconds = 0
    for ((generated, _, log),), tokens, limit, scores in zip(
        found, state.generated.numpy(), LIMITS, state.logprobs.numpy(), strict=True
    ):
        count = len(generated)
        assert generated[:-1] == tuple(tokens[: count - 1])
        assert generated[-1] in ends or count == limit
        if generated[-1] == tokens[count - 1]:
            assert log == pytest.approx(scores[:count].sum(), abs=1e-4)
        else:
            seconds += 1
    assert 0 < seconds < len(found)


@pytest.mark.parametrize("models", [1, 2])  # two equal models generate the same as one
def test_a_penalty_is_of_the_logits(models):
    state = started(model_of(USUAL), MORE, LIMITS, (7,), "one device", 2.5, models)
    state = programs("one device")[2]((model_of(USUAL),) * models, state, 8)
    rows = list(MORE)
    for _ in range(max(LIMITS)):
        for n, logits in enumerate(logits_after(USUAL, rows)):
            generated = rows[n][len(MORE[n]) :]
            if len(generated) == LIMITS[n] or generated[-1:] == (7,):
                continue
            seen = list(set(rows[n]))
            logits[seen] = np.where(logits[seen] > 0, logits[seen] / 2.5, logits[seen] * 2.5)
            rows[n] += (int(logits.argmax()),)
    counts, tokens = state.count.numpy(), state.generated.numpy()
    for row, prompt, count, generated in zip(rows, MORE, counts, tokens, strict=True):
        assert row[len(prompt) :] == tuple(generated[:count])


# -- against Mesh-TensorFlow ------------------------------------------------------------------------

END = 1
ROWS = (3, 4, 5, 6, 7, 8)  # limits, which differ by row
PLACES = 11


def mesh_tensorflow(logs, first, how, limit):
    """Mesh-TensorFlow's search in plain Python: finished sequences, the final beams, and the number of tokens.

    Of the 2K best candidates, the K best unfinished ones are the next beams, and those that end join the
    finished ones; the K best of these stay. It stops once no beam can beat the worst finished one.
    """
    beams, finished = [((), 0.0)], []
    for count in range(1, limit + 1):
        grown = [
            ((*s, token), log + logs[len(s), s[-1] if s else first, token])
            for s, log in beams
            for token in range(logs.shape[-1])
        ]
        grown = sorted(grown, key=lambda one: -one[1])[: 2 * how.size]
        beams = [one for one in grown if one[0][-1] != END][: how.size]
        finished += [(s, divided(how, log, count), log) for s, log in grown if s[-1] == END]
        finished = sorted(finished, key=lambda one: -one[1])[: how.size]
        if finished and finished[-1][1] > divided(how, beams[0][1], limit):
            break
    return finished, beams, count


# A chain that gives the scores recorded with Mesh-TensorFlow: after 0 comes 2 or 4, after 2 comes 3 or the end.
# With two beams, [2, 3] and [4, 5] are likelier than the end after 2, which is the third of four candidates.
RECORDED = np.array(
    [
        [0.05, 0.01, 0.50, 0.10, 0.30, 0.02, 0.02],
        [0.10, 0.10, 0.10, 0.10, 0.20, 0.20, 0.20],
        [0.10, 0.30, 0.05, 0.41, 0.05, 0.05, 0.04],
        [0.10, 0.585, 0.05, 0.065, 0.05, 0.05, 0.10],
        [0.10, 0.05, 0.05, 0.10, 0.05, 0.60, 0.05],
        [0.10, 0.20, 0.10, 0.10, 0.20, 0.20, 0.10],
        [0.10, 0.20, 0.10, 0.10, 0.20, 0.10, 0.20],
    ]
)


@pytest.mark.parametrize("beams", [2, 3])
@pytest.mark.parametrize(
    "alpha, best, score", [(0.0, (2, 1), -1.897), (0.6, (2, 1), -1.730), (1.0, (2, 3, 1), -1.591)]
)
def test_the_recorded_chain(beams, alpha, best, score):
    how = Beams(beams, alpha)
    logs = np.broadcast_to(np.log(RECORDED), (PLACES, 7, 7))
    found = find_with(chain(logs), how, [(0,)] * len(ROWS), ROWS, (END,))
    assert [row[0][0] for row in found] == [best] * len(ROWS)
    np.testing.assert_allclose([row[0][1] for row in found], score, atol=5e-4)
    for row, limit in zip(found, ROWS, strict=True):
        assert mesh_tensorflow(logs, 0, how, limit)[0][0][0] == row[0][0]


@pytest.mark.parametrize(
    "size, alpha, layout",
    [
        slow(1, 0.6, "one device"),
        slow(2, 0.0, "one device"),
        slow(2, 0.6, "one device"),
        (3, 1.0, "both"),
        slow(5, 0.6, "model"),
    ],
)
def test_a_search_is_that_of_mesh_tensorflow(size, alpha, layout):
    """Of random tables. A text cut off at the limit counts here, and there only if none has finished."""
    how, cut, ended = Beams(size, alpha), 0, 0
    for seed in range(8):
        draw = np.random.default_rng(seed)
        logits = draw.normal(0, 1.5, (7, 7)) + draw.normal(0, 0.5, (PLACES, 1, 7))
        logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        firsts = [(0,), (2,), (3,), (4,), (5,), (6,)]
        found = find_with(chain(logits), how, firsts, ROWS, (END,), layout)
        for row, (first,), limit in zip(found, firsts, ROWS, strict=True):
            want, beams, count = mesh_tensorflow(logs, first, how, limit)
            if count == limit:
                want = want + [(s, divided(how, log, limit), log) for s, log in beams]
                want = sorted(want, key=lambda one: -one[1])[:size]
            # It may stop with fewer than K finished; what is found after that is no better than these.
            assert_same_beams([row[: len(want)]], [want])
            assert [s for _, s, _ in row] == sorted((s for _, s, _ in row), reverse=True)
            cut, ended = cut + (count == limit), ended + (count < limit)
    assert cut > 2 and ended > 2


# -- mistakes --------------------------------------------------------------------------------------

MISTAKES = {
    "no_beams": lambda: Beams(0),  # wrong
    "misspelt_penalty": lambda: Beams(penalty="transfomer"),  # wrong
    "misspelt_stop": lambda: Beams(stop="likly"),  # wrong
    "alpha_that_is_no_number": lambda: Beams(alpha=math.nan),  # wrong
}


@pytest.mark.parametrize("name", MISTAKES)
def test_messages(name, mistake):
    mistake(name, MISTAKES[name], "messages/beam")


def test_every_text_is_of_a_mistake():
    here = {path.stem for path in (Path(__file__).parents[1] / "messages" / "beam").glob("*.txt")}
    assert here == set(MISTAKES)
