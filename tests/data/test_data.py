"""Data: files, tokenizers, packing, and a stream whose order depends only on its seed."""

import bz2
import gzip
import json
import lzma
import os

import jax
import numpy as np
import pytest
import zstandard
from compare import assert_same

import weft as wf
from weft import nn
from weft.core.errors import DataError, DataWarning, ModelError
from weft.data import (
    ByteTokenizer,
    Documents,
    EncodedExample,
    ExampleStream,
    Jsonl,
    Pair,
    ParallelText,
    Phrases,
    PlainText,
    SentencePiece,
    Tsv,
    check_vocab,
    iter_texts,
    pack,
    packed_arrays,
)
from weft.data.phrases import PHRASE_KINDS, Phrase
from weft.models import Batch, Config, Transformer, shift_right

pytestmark = pytest.mark.nodevice

FIELDS = ("tokens", "targets", "weights", "places", "segments")
INPUTS = ("inputs", "input_places", "input_segments")


# -- files ------------------------------------------------------------------------------------------


def written(path, text):
    data = text if isinstance(text, bytes) else text.encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return str(path)


def test_parallel_files_plain_packed_and_by_pattern(tmp_path):
    written(tmp_path / "a.en", "one\ntwo\r\n")
    written(tmp_path / "a.fr", "un\ndeux")  # no end of line at the end
    written(tmp_path / "b.en.gz", "three\n\nfour\n")
    written(tmp_path / "b.fr.gz", "trois\n\nquatre\n")
    examples = ParallelText(str(tmp_path / "*.en*"), [tmp_path / "a.fr", tmp_path / "b.fr.gz"]).open()
    expected = [("one", "un"), ("two", "deux"), ("three", "trois"), ("four", "quatre")]
    assert list(examples) == expected
    assert [examples[n] for n in (3, 0, -2)] == [expected[n] for n in (3, 0, -2)]
    assert examples[1:3] == expected[1:3]
    assert examples.malformed == []
    assert list(iter_texts(examples)) == [text for pair in expected for text in pair]
    with pytest.raises(IndexError):
        examples[4]


def test_lines_longer_than_a_chunk(tmp_path, monkeypatch):
    monkeypatch.setattr("weft.data.sources.CHUNK_BYTES", 5)
    lines = ["abcdefghijkl", "é" * 9, "x", "last"]
    assert list(PlainText(written(tmp_path / "a", "\n".join(lines) + "\n")).open()) == lines


def test_tsv_plain_text_and_jsonl(tmp_path):
    table = written(tmp_path / "a.tsv", "1\tun\tone\n2\tdeux\ttwo\n")
    assert list(Tsv(table, source=2, target=1).open()) == [Pair("one", "un"), Pair("two", "deux")]
    story = written(tmp_path / "a.txt", b"\xef\xbb\xbfOnce\n\n  upon a time \n")
    assert list(PlainText(story).open()) == ["Once", "upon a time"]
    rows = [{"text": "né\n", "en": "born", "fr": "né"}, {"text": "b", "en": "x", "fr": "y"}]
    lines = written(tmp_path / "a.jsonl.gz", "\n".join(map(json.dumps, rows)))
    assert list(Jsonl(lines).open()) == ["né\n", "b"]
    assert list(Jsonl(lines, source="en", target="fr").open()) == [("born", "né"), ("x", "y")]


def test_files_are_closed_after_reading(tmp_path):
    names = [written(tmp_path / f"{n}.txt", f"\ufefftext {n}\n") for n in range(40)]
    before = len(os.listdir("/proc/self/fd"))
    opened = Documents(names).open()
    assert list(opened) == [f"text {n}\n" for n in range(40)]
    assert len(os.listdir("/proc/self/fd")) < before + 10


def test_malformed_lines_are_left_out_and_reported(tmp_path):
    good = ["a\tb"] * 200
    good[6], good[120] = "lonely", "a\t "
    path = written(tmp_path / "a.tsv", "\n".join(good).encode() + b"\n")
    with pytest.warns(DataWarning) as caught:
        examples = Tsv(path).open()
    assert len(examples) == 198
    assert [(bad.file, bad.line) for bad in examples.malformed] == [(path, 7), (path, 121)]
    assert str(caught[0].message) == (
        "2 of 200 lines are malformed and were skipped\n"
        f"  {path}:7: expected at least 2 columns, found 1\n  {path}:121: the target is blank"
    )
    assert caught[0].filename == __file__
    with pytest.raises(DataError, match="2 of 200 lines are malformed") as error:
        Tsv(path, malformed=0.009).open()
    assert f"{path}:7: expected at least 2 columns" in str(error.value)
    assert "hint: fix the lines" in str(error.value) and "test_data.py:" in error.value.where


@pytest.mark.parametrize(
    "line, reason",
    [
        (b"\xff\xfe", "not UTF-8: byte 0 is 0xff"),
        (b"{", "not JSON"),
        (b"[1]", "not a JSON object but a list"),
        (b'{"txt": "a"}', "no field 'text' (did you mean txt?)"),
        (b'{"text": 3}', "'text' is not a string but a int"),
        (b'{"text": " "}', "'text' is blank"),
    ],
    ids=["utf8", "json", "list", "field", "number", "blank"],
)
def test_what_is_malformed(tmp_path, line, reason):
    path = written(tmp_path / "a.jsonl", b'{"text": "good"}\n' + line + b"\n")
    with pytest.raises(DataError) as error:
        Jsonl(path).open()
    assert f"{path}:2: {reason}" in str(error.value)


def test_unequal_numbers_of_lines(tmp_path):
    source = written(tmp_path / "a.en", "one\ntwo\nthree\nfour\n")
    target = written(tmp_path / "a.fr", "un\ndeux\n")
    with pytest.raises(DataError) as error:
        ParallelText(source, target).open()
    text = str(error.value)
    assert f"{source} has 4, {target} has 2" in text
    assert f"the first line without a counterpart is {source}:3: 'three'" in text


def test_files_that_are_not_there(tmp_path):
    written(tmp_path / "train.en", "one\n")
    with pytest.raises(DataError, match=r"no such file: .*trian\.en") as error:
        PlainText(tmp_path / "trian.en").open()
    assert "did you mean train.en?" in str(error.value)
    with pytest.raises(DataError, match="no such file"):
        PlainText([tmp_path / "train.en", tmp_path / "*.fr"]).open()
    with pytest.raises(DataError, match="1 source files, but 2 target files"):
        ParallelText(tmp_path / "train.en", [tmp_path / "train.en"] * 2).open()


PACKERS = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress, "zst": zstandard.compress}


@pytest.mark.parametrize("suffix", PACKERS)
def test_compressed_files(suffix, tmp_path, monkeypatch):
    """By their names or by their first bytes; several parts in a row are one file, and a cut is an error."""
    monkeypatch.setattr("weft.data.compression.CHUNK_BYTES", 1000)
    pack = PACKERS[suffix]
    lines = [f"line {n} of some text" for n in range(10_000)]
    first, second = ("\n".join(part).encode() + b"\n" for part in (lines[:6_000], lines[6_000:]))
    packed = pack(first) + pack(second)
    for name in (f"a.txt.{suffix}", "a.txt"):
        (tmp_path / name).write_bytes(packed)
        found = PlainText(tmp_path / name).open()
        assert len(found) == 10_000 and [found[0], found[-1]] == [lines[0], lines[-1]]
        assert Documents(tmp_path / name).open()[0].encode() == first + second
    for broken in (packed[:-9], packed[:-9] + bytes(9), pack(first)[:-30] + b"!" * 30):
        (tmp_path / "broken.txt").write_bytes(broken)
        with pytest.raises(DataError, match="can't decompress"):
            PlainText(tmp_path / "broken.txt").open()


def test_nothing_to_read(tmp_path):
    for content in ("", "\n\n"):
        with pytest.raises(DataError, match="no examples"):
            PlainText(written(tmp_path / "empty", content)).open()
    with pytest.raises(DataError, match="can't decompress"):
        (tmp_path / "a.gz").write_bytes(gzip.compress(b"text" * 99)[:20])
        PlainText(tmp_path / "a.gz").open()
    with pytest.raises(DataError, match="no examples"):
        ExampleStream([], ByteTokenizer(), rows=2, length=8)


# -- tokenizers -------------------------------------------------------------------------------------


def test_bytes():
    tokens = ByteTokenizer()
    text = "né à 15 h — 日本\n\0"
    ids = tokens.encode(text)
    assert min(ids) >= 3 and max(ids) < tokens.vocab == 259
    assert tokens.decode(ids) == text
    assert tokens.decode([*ids, tokens.end, tokens.pad, 99]) == text
    assert tokens.decode(np.array([tokens.unknown])) == "\ufffd"


@pytest.fixture(scope="module")
def phrase_texts():
    return list(iter_texts(Phrases(400)))


@pytest.mark.parametrize("kind", ["unigram", "bpe"])
def test_sentencepiece(kind, tmp_path, phrase_texts):
    path = tmp_path / "phrases.model"
    made = SentencePiece.train(phrase_texts, path, vocab=420, kind=kind)
    assert (made.vocab, made.pad, made.end, made.unknown) == (420, 0, 1, 2)
    ids = made.encode(phrase_texts[0])
    assert len(ids) < len(phrase_texts[0]) and made.decode([*ids, 1, 7]) == phrase_texts[0]
    assert made.decode(made.encode("日本 ok")) == "日本 ok"  # by its bytes
    first = path.read_bytes()
    SentencePiece.train(phrase_texts, path, vocab=420, kind=kind)
    assert path.read_bytes() == first
    assert SentencePiece(str(path)).encode(phrase_texts[1]) == made.encode(phrase_texts[1])


def test_sentencepiece_learns_from_long_texts(tmp_path):
    """SentencePiece's trainer silently skips sentences longer than 4,192 bytes."""
    text = " ".join(iter_texts(Phrases(400)))
    assert len(text.encode()) > 3 * 4192
    made = SentencePiece.train([text], tmp_path / "a.model", vocab=600, kind="bpe")
    assert len(made.encode(text)) < len(text) / 2


def test_sentencepiece_without_bytes(tmp_path, phrase_texts):
    made = SentencePiece.train(phrase_texts, tmp_path / "a.model", vocab=150, byte_fallback=False)
    assert made.vocab == 150
    assert made.unknown in made.encode("日")


def test_tokenizers_that_can_not_be(tmp_path, phrase_texts):
    with pytest.raises(DataError, match="SentencePiece training failed") as error:
        SentencePiece.train(phrase_texts, tmp_path / "a.model", vocab=100_000)
    assert "is the maximum for this text" in str(error.value)
    with pytest.raises(DataError, match="SentencePiece training failed") as error:
        SentencePiece.train(phrase_texts, tmp_path / "a.model", vocab=100)
    assert "byte_fallback takes 256 of it" in str(error.value)
    with pytest.raises(DataError, match="unknown kind of SentencePiece model: 'bpee'"):
        SentencePiece.train(phrase_texts, tmp_path / "a.model", vocab=300, kind="bpee")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(DataError, match="no such file"):
        SentencePiece(str(tmp_path / "a.model")).encode("a")
    with pytest.raises(DataError, match="is not a SentencePiece model"):
        SentencePiece(written(tmp_path / "b.model", "text")).encode("a")
    with pytest.raises(ModelError, match="the tokenizer has 259 ids, but the model has 200"):
        check_vocab(ByteTokenizer(), 200)


# -- packing ----------------------------------------------------------------------------------------


def drawn(count, most, pairs=False, seed=0):
    """Examples of random sizes whose tokens are all different."""
    draw = np.random.default_rng(seed)
    numbers = iter(range(3, 10**6))

    def ids():
        return [next(numbers) for _ in range(draw.integers(1, most + 1))]

    return [EncodedExample(ids(), ids() if pairs else None) for _ in range(count)]


@pytest.mark.parametrize("pairs", [False, True], ids=["one stack", "pairs"])
def test_every_token_is_packed_once(pairs):
    """Batch after batch, examples read back from the arrays alone are those that went in."""
    examples, room = drawn(200, 9, pairs), (16, 12 if pairs else 0)
    found, used, rows = [], 0, 0
    while used < len(examples):
        plan = pack((e.sizes for e in examples[used:]), 5, room)
        assert sorted(n for row in plan for n in row) == list(range(sum(map(len, plan)))) and all(
            p == sorted(p) for p in plan
        )
        made = packed_arrays([[examples[used + n] for n in row] for row in plan], room[0], room[1] or None)
        for row, numbers in enumerate(plan):
            assert set(made["segments"][row]) - {0} == set(range(1, len(numbers) + 1))
            for segment, number in enumerate(numbers, start=1):
                here = made["segments"][row] == segment
                targets = list(made["targets"][row][here])
                assert list(made["tokens"][row][here]) == [0, *targets[:-1]]
                assert list(made["places"][row][here]) == list(range(len(targets)))
                inputs = None
                if pairs:
                    here = made["input_segments"][row] == segment
                    inputs = list(made["inputs"][row][here])
                    assert list(made["input_places"][row][here]) == list(range(len(inputs)))
                found.append((used + number, EncodedExample(targets, inputs)))
        padding = made["segments"] == 0
        assert (made["weights"] == ~padding).all()
        assert not any(made[name][padding].any() for name in FIELDS)
        used, rows = used + sum(map(len, plan)), rows + 5
    assert [example for _, example in sorted(found, key=lambda one: one[0])] == examples
    filled = sum(len(e.inputs or e.targets) for e in examples) / ((12 if pairs else 16) * rows)
    assert filled > (0.7 if pairs else 0.85)


def test_a_batch_ends_at_the_first_that_does_not_fit():
    assert pack([(4, 1), (4, 1), (1, 9), (1, 1)], 2, (8, 4)) == [[0, 1], []]
    assert pack([(4, 1)] * 9, 2, (8, 4)) == [[0, 1], [2, 3]]
    assert pack([(1, 3)] * 9, 2, (8, 4)) == [[0], [1]]


def test_decoder_reads_what_the_model_would_shift():
    examples = drawn(20, 5)
    made = packed_arrays([examples[:3], examples[3:5], []], 18)
    dims = wf.dims("batch=3 length=18")
    targets, segments = (wf.tensor(made[name], dims) for name in ("targets", "segments"))
    np.testing.assert_array_equal(made["tokens"], shift_right(targets, segments).numpy())


def test_packed_examples_do_not_see_each_other():
    """In both stacks: a row of three examples has the logits of three rows of one."""
    config = Config(
        kind="encoder_decoder", vocab=64, d_model=8, d_ff=8, heads=2, d_kv=4, layers=1, longest=16, tied=True
    )
    examples = [EncodedExample([e + n for n in range(3 + e)], [7 * e + 1, 5, 9 - e]) for e in (3, 4, 5)]
    model = nn.init(Transformer(config), jax.random.key(0))
    program = wf.spmd(lambda model, batch: model.logits(batch), wf.Mesh(), wf.Layout())

    def logits(rows):
        made = packed_arrays(rows, 24, 10)
        batch = Batch(**{k: wf.tensor(a, f"batch={a.shape[0]} length={a.shape[1]}") for k, a in made.items()})
        return program(model, batch).numpy("batch", "length", "vocab"), made["segments"]

    together, segments = logits([examples, [], []])
    alone, own = logits([[example] for example in examples])
    for row in range(3):
        np.testing.assert_allclose(together[0][segments[0] == row + 1], alone[row][own[row] == 1], atol=1e-5)
    assert np.isfinite(together).all()


# -- the stream -------------------------------------------------------------------------------------

STREAMS = {
    "packed": dict(length=96, input_length=80),
    "unpacked": dict(length=64, packed=False),
    "bucketed": dict(length=96, packed=False, buckets=(24, 32, 48), window=3),
    "in order": dict(length=96, shuffle=False),
}
EXAMPLES = Phrases(37)
streams = pytest.mark.parametrize("settings", STREAMS.values(), ids=STREAMS)


def stream(settings, **more):
    return ExampleStream(EXAMPLES, ByteTokenizer(), **(dict(rows=6, seed=5) | settings | more))


def numbers(batch):
    return {name: np.asarray(getattr(batch, name).numpy()) for name in FIELDS + INPUTS}


def first(count, of, position=0):
    return [step for step, _ in zip(of.batches(position), range(count), strict=False)]


@streams
def test_resumed_anywhere_it_goes_on_the_same(settings):
    steps = first(15, stream(settings))
    assert steps[-1].position > len(EXAMPLES)  # into the second epoch
    for at, step in enumerate(steps[:-1]):
        on = stream(settings).step(step.position)  # a new stream, without state
        assert on.position == steps[at + 1].position
        assert_same(on.batch, steps[at + 1].batch, rtol=0, atol=0)


@streams
@pytest.mark.parametrize("count", [4])  # 6 rows: 1, 2, 1 and 2
def test_the_order_does_not_depend_on_processes(settings, count):
    global_steps = first(3, stream(settings))
    parts = [first(3, stream(settings, process_index=n, process_count=count)) for n in range(count)]
    for number, step in enumerate(global_steps):
        assert {part[number].position for part in parts} == {step.position}
        pieces = [numbers(part[number].batch) for part in parts]
        for name, array in numbers(step.batch).items():
            np.testing.assert_array_equal(array, np.concatenate([piece[name] for piece in pieces]))


def test_unpacked_processes_encode_only_their_rows():
    encoded = []

    class Recorded(ByteTokenizer):
        def encode(self, text):
            encoded.append(text)
            return super().encode(text)

    ExampleStream(
        EXAMPLES, Recorded(), rows=6, length=64, packed=False, process_index=1, process_count=3
    ).step(0)
    assert len(encoded) == 2 * 2


@pytest.mark.parametrize("rules", ["batch:data", "batch:data length:model"])
def test_the_order_does_not_depend_on_the_mesh(rules):
    settings = STREAMS["packed"]
    placed = first(2, stream(settings, mesh=wf.Mesh("data=4 model=2"), layout=wf.Layout(rules)))
    for step, other in zip(first(2, stream(settings)), placed, strict=True):
        assert other.batch.tokens.mesh == wf.Mesh("data=4 model=2")
        assert step.position == other.position
        assert_same(step.batch, other.batch, rtol=0, atol=0)


@streams
def test_an_epoch_has_every_example_once(settings):
    """Read back from the batches; the next epoch and another seed have another order."""

    def targets(steps):
        for batch in (step.batch for step in steps):
            ids, segments = batch.targets.numpy(), batch.segments.numpy()
            for row, own in zip(ids, segments, strict=True):
                yield from (ByteTokenizer().decode(row[own == n]) for n in range(1, own.max() + 1))

    steps = list(stream(settings, epochs=1).batches())
    assert steps[-1].position == len(EXAMPLES)
    assert all(step.batch.tokens.dims[0] == wf.Dim("batch", 6) for step in steps)
    once = list(targets(steps))
    assert sorted(once) == sorted(pair.target[: settings["length"]] for pair in EXAMPLES)
    assert sorted(targets(stream(settings, epochs=2).batches())) == sorted(once * 2)
    order = [stream(settings).index(n) for n in range(2 * len(EXAMPLES))]
    epochs = order[: len(EXAMPLES)], order[len(EXAMPLES) :]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(len(EXAMPLES)))
    shuffled = settings.get("shuffle", True)
    assert (epochs[0] != epochs[1]) == shuffled
    assert (order != [stream(settings, seed=6).index(n) for n in range(len(order))]) == shuffled
    with pytest.raises(DataError, match="no batch starts at position 37"):
        stream(settings, epochs=1).step(37)


def test_the_order_is_stored():
    """A resumed run may have a newer library: the order of a seed must not change with it."""
    assert [stream({}, length=8).index(n) for n in (0, 1, 36, 37, 1000)] == ORDER


ORDER = [7, 14, 23, 12, 34]


def test_buckets_save_padding():
    steps = list(stream(STREAMS["bucketed"], epochs=1).batches())
    widths = [step.batch.tokens.dims[1].size for step in steps]
    assert set(widths) <= {24, 32, 48, 96} and len(set(widths)) > 1
    for step, width in zip(steps, widths, strict=True):
        needed = int(step.batch.weights.numpy().sum(1).max())
        assert width == min(b for b in (24, 32, 48, 96) if b >= needed)


def test_plain_text_has_no_inputs():
    batch, position = ExampleStream(
        ["abc", "de", "f"], ByteTokenizer(), rows=1, length=9, shuffle=False, epochs=1
    ).step(0)
    assert batch.inputs is None and position == 3
    np.testing.assert_array_equal(batch.segments.numpy(), [[1, 1, 1, 1, 2, 2, 2, 3, 3]])
    batch, _ = ExampleStream(["abcdef"], ByteTokenizer(), rows=1, length=4, packed=False).step(0)
    np.testing.assert_array_equal(batch.targets.numpy(), [[100, 101, 102, 103]])  # cut


@pytest.mark.parametrize(
    "wrong",
    [
        dict(rows=0),
        dict(length=0),
        dict(epochs=0),
        dict(seed=-1),
        dict(buckets=(8,)),
        dict(packed=False, buckets=(16, 8)),
        dict(packed=False, buckets=(8, 64)),
        dict(process_index=2, process_count=2),
        dict(process_count=7),
        dict(mesh="data=2"),
        dict(mesh="data=2", layout="batch:data", process_count=2),
    ],
    ids=str,
)
def test_settings_that_can_not_be(wrong):
    with pytest.raises(DataError) as error:
        stream(dict(length=64), **wrong)
    assert "hint: " in str(error.value) and "in ExampleStream(" in str(error.value)


# -- phrases ----------------------------------------------------------------------------------------


def test_phrases_are_a_function_of_the_seed():
    assert list(Phrases(50, seed=1)) == list(Phrases(60, seed=1))[:50]
    assert list(Phrases(50, seed=1)) != list(Phrases(50, seed=2))
    assert Phrases(50)[-1] == Phrases(50)[49] and Phrases(50)[2:4] == [Phrases(50)[2], Phrases(50)[3]]
    assert {phrase.kind for phrase in map(Phrases(50).phrase, range(50))} == set(PHRASE_KINDS)


def test_held_out_values_are_never_in_training():
    def values(phrases):
        return {(p.kind, p.value) for p in map(phrases.phrase, range(len(phrases)))}

    train = values(Phrases(3000, seed=1)) | values(Phrases(3000, seed=2))
    test = values(Phrases(600, seed=1, held_out=True))
    assert len(test) > 300 and not train & test
    held_out_count = sum(Phrase("number", n, 0).held_out for n in range(10_000))
    assert 850 < held_out_count < 1150  # of 10 % of 10,000: five standard deviations


def test_phrases_in_both_languages():
    from datetime import date, time

    assert Phrase("number", 1234, 0).pair() == (
        "one thousand, two hundred and thirty-four",
        "mille deux cent trente-quatre",
    )
    assert Phrase("date", date(2024, 3, 1), 1).pair() == (
        "We met on Friday, March 1, 2024.",
        "Nous nous sommes rencontrés le vendredi 1er mars 2024.",
    )
    assert Phrase("time", time(15, 5), 1).pair() == (
        "The train leaves at 3:05 PM.",
        "Le train part à 15 h 05.",
    )
    assert Phrase("price", ("EUR", 123450), 0).pair() == ("It costs €1,234.50.", "Cela coûte 1 234,50 €.")
    with pytest.raises(DataError, match="the kinds"):
        Phrases(5, kinds=("prise",))
