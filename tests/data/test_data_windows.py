"""Windows of one long text: every token once per epoch, in an order that depends only on the seed."""

import itertools

import numpy as np
import pytest
from compare import assert_same

import weft as wf
from weft.core.errors import DataError, ModelError
from weft.data import (
    ByteTokenizer,
    Documents,
    Jsonl,
    PythonDocs,
    SentencePiece,
    TokenWindows,
    check_vocab,
    tokenize,
)
from weft.data.python_docs import paragraphs

pytestmark = pytest.mark.nodevice

TEXTS = ["one two three", "né", "", "a longer text, which no window has room for", "end"]
SEQUENCE = [id for text in TEXTS for id in [*ByteTokenizer().encode(text), 1]]
FIELDS = ("tokens", "targets", "weights")
ORDERS = pytest.mark.parametrize("shuffle", [True, False], ids=["shuffled", "in order"])


def windows(**settings):
    return TokenWindows(TEXTS, ByteTokenizer(), **(dict(rows=3, length=7, seed=5) | settings))


def numbers(batch):
    return {name: np.asarray(getattr(batch, name).numpy()) for name in FIELDS}


def first(count, of, position=0):
    return list(itertools.islice(of.batches(position), count))


# -- the corpus ----------------------------------------------------------------------------------------


class Words:
    """A tokenizer of the user's own, which encodes one text at a time."""

    pad, end, vocab = 0, 1, 70_000

    def encode(self, text):
        return [69_000 + len(word) for word in text.split()]


def test_a_corpus_is_all_texts_with_their_ends(monkeypatch):
    monkeypatch.setattr("weft.data.corpus.TEXTS_PER_CALL", 2)
    made = tokenize(iter(TEXTS), ByteTokenizer())
    assert made.tolist() == SEQUENCE and made.dtype == np.uint16
    made = tokenize(["a bcd", "", "ef"], Words())
    assert made.tolist() == [69_001, 69_003, 1, 1, 69_002, 1] and made.dtype == np.int32


def test_a_corpus_by_sentencepiece(tmp_path):
    tokenizer = SentencePiece.train(PythonDocs()[:8], tmp_path / "a.model", vocab=400)
    some = PythonDocs("valid")[:3]
    assert tokenize(some, tokenizer).tolist() == [
        i for t in some for i in [*tokenizer.encode(t), tokenizer.end]
    ]


def test_each_file_is_a_document(tmp_path):
    for name, text in {"a.txt": "one\n\ntwo\n", "b.txt": " \n", "c.txt": "three"}.items():
        (tmp_path / name).write_text(text)
    assert list(Documents(tmp_path / "*.txt").open()) == ["one\n\ntwo\n", "three"]
    (tmp_path / "d.txt").write_bytes(b"\xff")
    with pytest.raises(DataError, match=r"d\.txt:1: not UTF-8"):
        Documents(str(tmp_path / "*.txt")).open()


def test_half_a_character_is_malformed(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "good"}\n{"text": "bad \\ud83d"}\n')
    with pytest.raises(DataError, match=r"a.jsonl:2: 'text' contains a lone surrogate, '\\ud83d'"):
        Jsonl(tmp_path / "a.jsonl").open()


# -- windows -------------------------------------------------------------------------------------------


@ORDERS
@pytest.mark.parametrize("length", [1, 7, 32, 64, 100])
def test_every_token_is_a_target_once_an_epoch(shuffle, length):
    """All tokens differ: each row is a piece of the ring, and the pieces cover the ring once."""
    ring = np.arange(3, 67)
    of = TokenWindows(ring, Words(), rows=3, length=length, seed=5, shuffle=shuffle, epochs=2)
    steps = list(of.batches())
    assert steps[-1].position == of.total == 2 * of.size == 2 * -(-64 // length)
    made = [numbers(step.batch) for step in steps]
    tokens, targets, weights = (np.concatenate([rows[name] for rows in made]) for name in FIELDS)
    assert set(weights.flat) <= {0, 1} and not weights[of.total :].any()
    assert not tokens[weights == 0].any() and not targets[weights == 0].any()
    assert ((targets - tokens)[weights == 1] % 64 == 1).all()
    for row, use in zip(targets, weights == 1, strict=True):
        assert (np.diff(row[use]) % 64 == 1).all() and use[: use.sum()].all()
    for epoch in np.split(targets[: of.total], 2):
        assert sorted(epoch[epoch > 0]) == ring.tolist()
        assert shuffle or epoch[epoch > 0].tolist() == ring.tolist()


@ORDERS
def test_what_is_read_is_the_predecessor(shuffle):
    """And 0 at the beginning of each text, also of one that begins a window or the corpus."""
    pairs = {(a, b) for a, b in zip([1, *SEQUENCE], SEQUENCE, strict=False)}
    for step in windows(shuffle=shuffle, epochs=1).batches():
        made = numbers(step.batch)
        for row in range(3):
            use = made["weights"][row] == 1
            tokens, targets = made["tokens"][row][use].tolist(), made["targets"][row][use].tolist()
            assert {(token or 1, target) for token, target in zip(tokens, targets, strict=True)} <= pairs
            assert tokens[1:] == [0 if id == 1 else id for id in targets[:-1]]
    assert numbers(windows(shuffle=False).step(0).batch)["tokens"][0, 0] == 0


@ORDERS
def test_resumed_anywhere_it_goes_on_the_same(shuffle):
    steps = first(12, windows(shuffle=shuffle))
    assert steps[-1].position == 36 > 2 * windows().size
    for at, step in enumerate(steps[:-1]):
        on = windows(shuffle=shuffle).step(step.position)  # a new stream, without state
        assert on.position == steps[at + 1].position
        assert_same(on.batch, steps[at + 1].batch, rtol=0, atol=0)


@pytest.mark.parametrize("count", [2, 3])
def test_the_order_does_not_depend_on_processes(count):
    global_steps = list(windows(epochs=1).batches())
    parts = [list(windows(epochs=1, process_index=n, process_count=count).batches()) for n in range(count)]
    for number, step in enumerate(global_steps):
        assert {part[number].position for part in parts} == {step.position}
        pieces = [numbers(part[number].batch) for part in parts]
        for name, array in numbers(step.batch).items():
            np.testing.assert_array_equal(array, np.concatenate([piece[name] for piece in pieces]))


@pytest.mark.parametrize("rules", ["batch:data", "batch:data length:model"])
def test_the_order_does_not_depend_on_the_mesh(rules):
    """3 rows of 7 positions on a mesh that divides neither: one device has only padding."""
    mesh, layout = wf.Mesh("data=4 model=2"), wf.Layout(rules)
    placed = list(windows(epochs=1, mesh=mesh, layout=layout).batches())
    for step, other in zip(windows(epochs=1).batches(), placed, strict=True):
        assert other.batch.tokens.mesh == mesh
        assert step.position == other.position
        assert_same(step.batch, other.batch, rtol=0, atol=0)


def test_epochs_and_seeds_have_tilings_of_their_own():
    def targets(**settings):
        return np.concatenate([numbers(s.batch)["targets"] for s in windows(rows=1, **settings).batches()])

    size = windows().size
    both = targets(epochs=2)
    epochs = [sorted(map(tuple, both[:size])), sorted(map(tuple, both[size:]))]
    assert epochs[0] != epochs[1] != sorted(map(tuple, targets(epochs=1, seed=6)))  # other windows, not order
    assert sorted(map(tuple, targets(epochs=1))) == epochs[0]
    # Epoch 1 of a seed is not epoch 0 of the next.
    assert not np.array_equal(both[size:], targets(epochs=1, seed=6))


def test_the_order_is_stored():
    """A resumed run may have newer libraries: the windows of a seed must not change with them."""
    made = [numbers(windows().step(position).batch)["targets"][0, :3].tolist() for position in (0, 1, 50)]
    assert made == ORDER


ORDER = [[117, 35, 119], [122, 114, 35], [172, 1, 1]]


def test_tokens_from_a_file(tmp_path):
    np.save(tmp_path / "a.npy", tokenize(TEXTS, ByteTokenizer()))
    stored = np.load(tmp_path / "a.npy", mmap_mode="r")
    for step, other in zip(
        first(4, windows()), first(4, TokenWindows(stored, ByteTokenizer(), 3, 7, seed=5)), strict=True
    ):
        assert_same(step.batch, other.batch, rtol=0, atol=0)


def test_no_id_is_beyond_the_vocabulary():
    check_vocab(ByteTokenizer(), 259)
    with pytest.raises(ModelError):
        check_vocab(ByteTokenizer(), 258)
    for wrong in (259, -1):
        with pytest.raises(DataError, match=f"^token ids outside the tokenizer's vocabulary: {wrong}"):
            TokenWindows(np.array([4, wrong, 5]), ByteTokenizer(), rows=1, length=2).step(0)


# -- Python's documentation -----------------------------------------------------------------------------


def test_python_docs():
    train, valid = PythonDocs(), PythonDocs(split="valid")
    assert len(train) > 40 and len(valid) > 4 and not set(train) & set(valid)
    size = sum(map(len, valid)) / sum(map(len, [*train, *valid]))
    assert 0.02 < size < 0.2
    assert list(train) == list(PythonDocs()) and train[1:3] == [train[1], train[2]]
    # No paragraph that is evaluated was trained on.
    assert not set.union(*map(paragraphs, train)) & set.union(*map(paragraphs, valid))
