"""The next token against a plain NumPy implementation, on any layout."""

import numpy as np
import pytest
import scipy.stats

import weft as wf
from weft.generate import SamplingParams, sample
from weft.generate.batching import uniform_draws
from weft.generate.sampling import apply_repetition_penalty

LAYOUTS = {
    "one device": ("", ""),
    "split": ("model=8", "vocab:model"),
    "both": ("data=2 model=4", "batch:data vocab:model"),
}
LEAST = np.float32(2.0**-24)  # the least number there is
NEAR = 1e-5  # a number this near to the bound of two tokens may choose either


def truncated(logits, temperature, top_k, top_p):
    """The probabilities of one row: temperature, then top_k, then top_p, of equal ones all or none."""
    with np.errstate(over="ignore"):
        scores = (logits.astype(np.float64) - logits.max()) / temperature
    if top_k:
        scores = np.where(scores >= np.sort(scores)[::-1][min(top_k, len(scores)) - 1], scores, -np.inf)
    shares = np.exp(scores) / np.exp(scores).sum()
    if top_p < 1:
        order = np.sort(shares)[::-1]
        fewest = min(np.searchsorted(np.cumsum(order), top_p), len(order) - 1)
        shares = np.where(shares >= order[fewest], shares, 0)
    return shares / shares.sum()


def chosen(logits, settings, numbers, layout="one device"):
    """The tokens that Weft samples, and each row's settings."""
    batch, vocab = wf.Dim("batch", len(logits)), wf.Dim("vocab", logits.shape[1])
    types = np.float32, np.int32, np.float32, np.float32
    how = SamplingParams(
        *(wf.tensor(np.array(s, t), [batch]) for s, t in zip(zip(*settings, strict=True), types, strict=True))
    )
    program = wf.spmd(lambda *given: sample(*given, vocab), *LAYOUTS[layout])
    return program(
        wf.tensor(logits.astype(np.float32), [batch, vocab]),
        how,
        wf.tensor(np.array(numbers, np.float32), [batch]),
    ).numpy()


def check(tokens, logits, settings, numbers):
    for token, row, (temperature, top_k, top_p, _), number in zip(
        tokens, logits, settings, numbers, strict=True
    ):
        if temperature == 0:
            assert token == row.argmax()
            continue
        shares = truncated(row, temperature, top_k, top_p)
        passed = np.append(0, np.cumsum(shares))
        assert shares[token] > 0, (token, temperature, top_k, top_p, number)
        assert passed[token] - NEAR < number < passed[token + 1] + NEAR


def settings_of(draw, count):
    return [
        (
            draw.choice([0.0, 0.3, 1.0, 2.5]),
            draw.choice([0, 1, 2, 7, 37, 100]),
            draw.choice([1.0, 0.95, 0.6, 0.2, 1e-6]),
            1.0,
        )
        for _ in range(count)
    ]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["all different", "with ties"])
def test_choosing_is_that_of_numpy(kind, layout):
    draw = np.random.default_rng(0)
    logits = draw.normal(size=(400, 37)) * 2 if kind == "all different" else draw.integers(-2, 3, (400, 37))
    settings, numbers = settings_of(draw, 400), 1 - draw.random(400, np.float32)
    numbers[:60], numbers[60:120] = 1.0, LEAST
    tokens = chosen(logits, settings, numbers, layout)
    check(tokens, logits, settings, numbers)
    assert len(set(tokens)) > 30


def test_the_number_decides_among_what_is_left():
    """Of probabilities 1/2, 1/4, 1/8, 1/8 in this order."""
    logits = np.log([[0.5, 0.25, 0.125, 0.125]])
    for setting, ends in {
        (1.0, 0, 1.0, 1.0): [0.5, 0.75, 0.875, 1.0],
        (1.0, 2, 1.0, 1.0): [2 / 3, 1.0],
        (1.0, 3, 1.0, 1.0): [0.5, 0.75, 0.875, 1.0],  # the third and the fourth are equal
        (1.0, 0, 0.7, 1.0): [2 / 3, 1.0],
        (1.0, 3, 0.4, 1.0): [1.0],
        (0.5, 2, 1.0, 1.0): [0.8, 1.0],
    }.items():
        numbers = [n for end in ends for n in (end - 1e-3, end + 1e-3 if end < 1 else 1.0)]
        tokens = chosen(np.repeat(logits, len(numbers), 0), [setting] * len(numbers), numbers)
        expected = [min(k + over, len(ends) - 1) for k in range(len(ends)) for over in (0, 1)]
        assert list(tokens) == expected, setting


@pytest.mark.parametrize("layout", ["one device", "split"])
def test_extremes(layout):
    draw = np.random.default_rng(1)
    usual = draw.normal(size=37)
    wide = np.where(np.arange(37) % 3 == 0, usual, -1e30)  # as some mask
    out = np.where(np.arange(37) % 5 == 0, usual, -np.inf)
    rows = [
        (usual, (1e-30, 0, 1.0, 1.0)),
        (usual, (1e-38, 5, 0.9, 1.0)),
        (usual, (1e6, 4, 1.0, 1.0)),
        (usual * 1e-6, (1.0, 4, 1.0, 1.0)),
        (usual + 1000, (1.0, 4, 0.5, 1.0)),
        (wide, (1.0, 3, 1.0, 1.0)),
        (wide, (1.0, 0, 0.5, 1.0)),
        (wide, (1.0, 20, 1.0, 1.0)),  # more than are possible
        (out, (1.0, 3, 1.0, 1.0)),
        (out, (1.0, 0, 0.5, 1.0)),
        (out, (1.0, 20, 0.999999, 1.0)),
        (np.zeros(37), (1.0, 1, 1e-6, 1.0)),  # all equal
    ]
    rows = [
        (row.astype(np.float32), setting, number)
        for row, setting in rows
        for number in (LEAST, 0.3, 0.8, 1.0)
    ]
    logits, settings, numbers = (list(column) for column in zip(*rows, strict=True))
    tokens = chosen(np.stack(logits), settings, numbers, layout)
    check(tokens, logits, settings, numbers)


@pytest.mark.parametrize("layout", ["one device", "split"])
def test_what_was_left_out_is_never_drawn(layout):
    """Not even where a number lies between two sums that rounding alone makes differ."""
    draw = np.random.default_rng(2)
    row, setting = draw.normal(size=4999).astype(np.float32), (1.0, 60, 1.0, 1.0)
    shares = truncated(row, *setting[:3])
    bounds = np.cumsum(shares)[shares > 0].astype(np.float32)
    numbers = np.concatenate([[bounds * (1 + n * LEAST)] for n in range(-2, 3)]).clip(LEAST, 1.0).ravel()
    logits, settings = np.tile(row, (len(numbers), 1)), [setting] * len(numbers)
    check(chosen(logits, settings, numbers, layout), logits, settings, numbers)


@pytest.mark.parametrize("layout", ["one device", "split"])
def test_what_was_seen_is_penalised(layout):
    draw = np.random.default_rng(3)
    logits, seen = draw.normal(size=(5, 37)).astype(np.float32), draw.random((5, 37)) < 0.3
    penalty = np.array([1.0, 1.2, 2.0, 0.5, 1.0], np.float32)
    dims = [wf.Dim("batch", 5), wf.Dim("vocab", 37)]
    found = wf.spmd(apply_repetition_penalty, *LAYOUTS[layout])(
        wf.tensor(logits, dims), wf.tensor(seen, dims), wf.tensor(penalty, dims[:1])
    )
    by = penalty[:, None]
    expected = np.where(seen, np.where(logits > 0, logits / by, logits * by), logits)
    np.testing.assert_allclose(found.numpy("batch", "vocab"), expected, rtol=1e-6)
    assert (expected[1] <= logits[1]).all() and (expected[1] < logits[1]).any()


def fits(counts, shares):
    """Pearson's chi-squared test."""
    assert not counts[shares == 0].any()
    is_possible = shares > 0
    return scipy.stats.chisquare(counts[is_possible], shares[is_possible] * counts.sum()).pvalue > 1e-3


def test_draws_are_as_frequent_as_they_are_likely():
    row, setting = np.random.default_rng(4).normal(size=23).astype(np.float32), (0.8, 12, 0.9, 1.0)
    numbers = np.concatenate([uniform_draws(5, n, 1) for n in range(10_000)])  # the first of many rows
    tokens = chosen(np.tile(row, (10_000, 1)), [setting] * 10_000, numbers, "both")
    counts = np.bincount(tokens, minlength=23)
    assert fits(counts, truncated(row, *setting[:3]))
    others = truncated(row, 1.0, *setting[1:3])  # the test can tell a temperature of 0.8 from one of 1
    assert not fits(counts, others)


def test_numbers_are_spread_evenly():
    rows = {
        "of one row": uniform_draws(0, 0, 10_000),
        "the first of many rows": np.concatenate([uniform_draws(0, n, 1) for n in range(10_000)]),
        "the first of many seeds": np.concatenate([uniform_draws(seed, 0, 1) for seed in range(10_000)]),
    }
    for name, numbers in rows.items():
        assert numbers.dtype == np.float32 and numbers.min() > 0 and numbers.max() <= 1, name
        assert fits(np.histogram(numbers, 50, (0, 1))[0], np.full(50, 0.02)), name
    # Rows and seeds draw different numbers, and further draws do not change the first ones.
    assert np.abs(np.corrcoef(list(rows.values())) - np.eye(3)).max() < 0.05
    np.testing.assert_array_equal(uniform_draws(3, 4, 64)[:16], uniform_draws(3, 4, 16))
