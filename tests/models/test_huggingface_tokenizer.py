"""The tokenizers of Hugging Face folders, and the commands that use such a folder as it is."""

import json
import os
import sys

import numpy as np
import pytest
from tiers import slow
from untrained_models import untrained

import weft as wf
from weft.cli.main import main
from weft.core.errors import ModelError
from weft.data import ByteTokenizer, ExampleStream, TokenWindows, check_vocab, tokenize
from weft.data.tokenizers import decode_continuation
from weft.generate import GenerationConfig, TextGenerator
from weft.models import Batch, Config, huggingface
from weft.serve.detokenizer import Detokenizer
from weft.train import load

tokenizers = pytest.importorskip("tokenizers", reason="the package tokenizers is not installed")

TEXTS = ["the cat sat on the mat", "a dog and a cat, a mat and a log", "été où çà", "日本 ok"]
MESH = ("data=2 model=2", "batch:data kv_heads:model d_ff:model vocab:model")


def trained(specials):
    """A byte-level BPE tokenizer, in which any text comes back as it was."""
    made = tokenizers.Tokenizer(tokenizers.models.BPE())
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=290,
        special_tokens=specials,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(TEXTS, trainer)
    return made


def llama_like(folder):
    """One whose own rule puts a token before each text."""
    made = trained(["<unk>", "<s>", "</s>", "<pad>"])
    made.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": {"content": "</s>"}, "bos_token": "<s>", "pad_token": "<pad>"})
    )


def gpt2_like(folder):
    """One with a single special token, which stands between texts."""
    trained(["<|endoftext|>"]).save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": [0, 7]}))


@pytest.fixture
def folder(tmp_path):
    """A Llama that has learned nothing, with its tokenizer."""
    sizes = dict(d_model=16, d_ff=24, heads=4, kv_heads=2, d_kv=4, layers=1, vocab=300)
    config = Config(positions="rotary", norm="rms", activation="swiglu", bias=False, tied=False, **sizes)
    huggingface.save(untrained(config), tmp_path / "llama")
    llama_like(tmp_path / "llama")
    return tmp_path / "llama"


@pytest.mark.parametrize("make, start, end, pad", [(llama_like, 1, 2, 3), (gpt2_like, 0, 0, 0)])
def test_a_folder_defines_its_special_tokens(make, start, end, pad, tmp_path):
    make(tmp_path)
    words = huggingface.tokenizer(tmp_path)
    assert (words.start, words.end, words.pad) == (start, end, pad)
    inner = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert words.vocab == inner.get_vocab_size()
    for text in TEXTS:
        ids = words.encode(text)
        assert ids == inner.encode(text, add_special_tokens=False).ids
        assert words.decode([*ids, end, *ids]) == text
    assert words.encode("") == [] and words.decode([]) == ""
    assert words.decode([words.vocab + 5, *words.encode("ok")]) == "ok"  # a model may have more rows
    every = [id for text in TEXTS for id in (*words.encode(text), end)]
    assert tokenize(TEXTS, words).tolist() == every
    assert words == huggingface.tokenizer(tmp_path)
    with pytest.raises(ModelError, match="no row in the embedding"):
        check_vocab(words, words.vocab - 1)


def test_ids_may_have_gaps(tmp_path):
    llama_like(tmp_path)
    path = tmp_path / "tokenizer.json"
    found = json.loads(path.read_text())
    found["added_tokens"].append({**found["added_tokens"][0], "id": 400, "content": "<far>"})
    path.write_text(json.dumps(found))
    words = huggingface.tokenizer(tmp_path)
    assert words.vocab == words.encode("<far>")[0] + 1


def test_texts_begin_with_the_start(tmp_path):
    llama_like(tmp_path)
    words = huggingface.tokenizer(tmp_path)
    ids = words.encode(TEXTS[0])
    batch, _ = ExampleStream(TEXTS[:1], words, rows=1, length=32, shuffle=False, epochs=1).step(0)
    tokens = batch.tokens.numpy()[0]
    assert tokens[: len(ids) + 1].tolist() == [1, *ids] and set(tokens[len(ids) + 1 :]) == {3}
    batch, _ = TokenWindows(TEXTS[:2], words, rows=1, length=64, shuffle=False, epochs=1).step(0)
    tokens = batch.tokens.numpy()[0, : len(ids) + 2]
    assert tokens.tolist() == [1, *ids, 1]  # not 2, the end of the text before


def test_what_follows_an_end_is_read(tmp_path):
    """A prompt may end with the token that stands between texts."""
    gpt2_like(tmp_path)
    words = huggingface.tokenizer(tmp_path)
    last, ids = words.encode("the cat<|endoftext|>")[-1:], words.encode("a dog, a cat")
    assert last == [words.end] and decode_continuation(last, ids, words) == "a dog, a cat"
    reading = Detokenizer(words, stops=[","], after=last)
    assert reading.add(ids) == "a dog" and reading.stopped


def test_pairs_begin_with_0(tmp_path):
    """An encoder-decoder's, as T5's decoder does."""
    llama_like(tmp_path)
    words = huggingface.tokenizer(tmp_path)
    batch, _ = ExampleStream([("a cat", "a dog")], words, rows=1, length=16, shuffle=False, epochs=1).step(0)
    assert batch.tokens.numpy()[0, 0] == 0


@pytest.mark.parametrize("mesh, layout", [slow("", ""), MESH], ids=["one device", "mesh"])
def test_a_model_reads_the_start_and_the_prompt(folder, mesh, layout):
    """The likeliest tokens one by one, without a cache."""
    words, model = huggingface.tokenizer(folder), huggingface.load(folder, mesh, layout)
    alone = huggingface.load(folder)
    generator = TextGenerator(model, words, mesh, layout, rows=2)
    prompts = [TEXTS[0], ""]
    logs = list(generator.score([("", text) for text in prompts]))
    for text, completion, log in zip(
        prompts, generator.generate(prompts, GenerationConfig(limit=5)), logs, strict=True
    ):
        row = [words.start, *words.encode(text)]

        def logits(row):
            ids = wf.tensor(np.array([row], np.int32), wf.dims(f"batch=1 length={len(row)}"))
            return alone.logits(Batch(ids)).numpy("batch", "length", "vocab")[0].astype(np.float64)

        tokens = []
        while len(tokens) < 5 and tokens[-1:] != [words.end]:
            tokens.append(int(logits([*row, *tokens])[-1].argmax()))
        assert list(completion.tokens) == tokens
        levels = logits(row) - np.logaddexp.reduce(logits(row), axis=-1, keepdims=True)
        expected = levels[range(len(row)), [*row[1:], words.end]]
        np.testing.assert_allclose(log, expected, rtol=1e-4, atol=1e-5)


# -- the commands ------------------------------------------------------------------------------------


@pytest.fixture
def weft(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder.parent)

    def run(*arguments):
        code = main([str(one) for one in arguments])
        return code, *capsys.readouterr()

    return run


def test_weft_generate_and_score_take_a_folder(weft, tmp_path):
    (tmp_path / "in.txt").write_text("the cat\n\na dog\n", encoding="utf-8")
    code, alone, err = weft("generate", "llama", "in.txt", "--limit", "4", "--json")
    assert code == 0, err
    assert len(alone.splitlines()) == 3 and json.loads(alone.splitlines()[0])["tokens"]
    code, split, err = weft(
        "generate", "llama", "in.txt", "--limit", "4", "--json", "--mesh", MESH[0], "--layout", MESH[1]
    )
    tokens = [[json.loads(line)["tokens"] for line in text.splitlines()] for text in (alone, split)]
    assert code == 0 and tokens[0] == tokens[1]
    code, out, err = weft("score", "llama", "in.txt", "--ensemble", "llama")
    assert code == 0 and len(out.splitlines()) == 3, err


def test_other_files_are_another_model(folder):
    """Lines of an answer that was begun with one are not gone on with by the other."""
    first, again = (load.load_run(folder).checksums for _ in range(2))
    os.utime(folder / "model.safetensors", (1, 1))
    assert first == again != load.load_run(folder).checksums


MISTAKES = {
    "step": ["generate", "llama", "in.txt", "--step", "3"],
    "average": ["generate", "llama", "in.txt", "--average", "2"],
    "translates": ["translate", "llama", "in.txt"],
    "evaluated": ["eval", "llama"],
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_with_a_folder(name, weft, tmp_path, golden):
    (tmp_path / "in.txt").write_text("the cat\n")
    code, out, err = weft(*MISTAKES[name])
    assert code == 2 and not out
    golden(name, err, "messages/huggingface_words")


def damaged(folder):
    (folder / "tokenizer.json").write_text("{")


def without_end(folder):
    (folder / "tokenizer_config.json").unlink()


def without_file(folder):
    (folder / "tokenizer.json").unlink()


def another_library(folder):
    without_file(folder)
    (folder / "tokenizer.model").touch()


@pytest.mark.parametrize("change", [damaged, without_end, without_file, another_library])
def test_folders_without_a_tokenizer(change, tmp_path, mistake, monkeypatch):
    llama_like(tmp_path)
    change(tmp_path)
    monkeypatch.chdir(tmp_path)
    mistake(
        change.__name__,
        lambda: huggingface.tokenizer("."),  # wrong
        "messages/huggingface_words",
    )


def test_without_the_package(tmp_path, mistake, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    mistake(
        "without_package",
        lambda: huggingface.tokenizer("."),  # wrong
        "messages/huggingface_words",
    )


def test_bytes_that_make_sense_together_only():
    """Llama's decoder decodes no byte of a run while its last character is incomplete."""

    class Fallback(ByteTokenizer):
        def decode(self, ids):
            return tokenizers.decoders.ByteFallback().decode([f"<0x{id - 3:02X}>" for id in ids])

    words = Fallback()
    for text in ("你好吗", "好", "你好吗" * 5, "❤️‍🔥 fire", "né 你好吗你好吗 né" * 9):
        reading = Detokenizer(words)
        assert "".join(reading.add([token]) for token in words.encode(text)) == reading.text == text
