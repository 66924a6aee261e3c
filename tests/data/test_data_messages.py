"""Messages of bad data: each has four parts and points to the line of the call."""

import gzip
import sys
from pathlib import Path

import numpy as np
import pytest

from weft.data import (
    ByteTokenizer,
    Documents,
    ExampleStream,
    Jsonl,
    ParallelText,
    Phrases,
    PlainText,
    PythonDocs,
    SentencePiece,
    TokenWindows,
    Tsv,
    check_vocab,
    prefetch,
)

pytestmark = pytest.mark.nodevice

FILES = {
    "train.en": b"one\ntwo\nthree\nfour\n",
    "train.fr": b"un\ndeux\n",
    "train.de": b"eins\nzwei\n\nvier\n",
    "empty.txt": b"",
    "latin.txt": "caf\u00e9\n".encode("latin1"),
    "table.tsv": b"a\tb\nlonely\nc\t \n",
    "rows.jsonl": b'{"text": "a"}\n{"txet": "b"}\n{"text": 3}\n{"text": ""}\n[1]\n{"text": "\\ud83d"}\n{\n',
    "cut.gz": gzip.compress(b"text" * 99, mtime=0)[:20],
    "text.zip": b"PK\x03\x04 and so on",
    "text.jsonl.zst": b"\x28\xb5\x2f\xfd and so on",
    "no.model": b"text",
}


class Beyond(ByteTokenizer):
    """A tokenizer that produces ids beyond its vocabulary."""

    def encode(self, text):
        return [259, 300]


class Endless(ByteTokenizer):
    """A tokenizer whose end is none of its ids."""

    end = -1


TEXT = ["some text"]
IDS = ByteTokenizer()

MISTAKES = {
    "no_such_file": lambda: PlainText("trian.en").open(),  # wrong
    "no_such_folder": lambda: PlainText(["train.en", "books/*.txt"]).open(),  # wrong
    "no_files_named": lambda: PlainText([]).open(),  # wrong
    "more_sources_than_targets": lambda: ParallelText(["train.en", "train.de"], "train.fr").open(),  # wrong
    "unequal_numbers_of_lines": lambda: ParallelText("train.en", "train.fr").open(),  # wrong
    "lines_without_partner": lambda: ParallelText("train.en", "train.de").open(),  # wrong
    "nothing_to_read": lambda: PlainText("empty.txt").open(),  # wrong
    "blank_documents": lambda: Documents("empty.txt").open(),  # wrong
    "not_utf8": lambda: Documents("latin.txt").open(),  # wrong
    "columns_missing": lambda: Tsv("table.tsv").open(),  # wrong
    "faults_of_json_lines": lambda: Jsonl("rows.jsonl").open(),  # wrong
    "half_a_pair": lambda: Jsonl("rows.jsonl", source="text").open(),  # wrong
    "cut_short": lambda: PlainText("cut.gz").open(),  # wrong
    "an_archive": lambda: PlainText("text.zip").open(),  # wrong
    "no_zstandard": lambda: Jsonl("text.jsonl.zst").open(),  # wrong
    "no_examples": lambda: ExampleStream([], IDS, rows=2, length=8),  # wrong
    "rows_that_are_none": lambda: TokenWindows(TEXT, IDS, rows=0, length=8),  # wrong
    "buckets_of_packed_rows": lambda: ExampleStream(TEXT, IDS, rows=2, length=8, buckets=(4,)),  # wrong
    "more_processes_than_rows": lambda: ExampleStream(TEXT, IDS, rows=2, length=8, process_count=3),  # wrong
    "mesh_without_layout": lambda: TokenWindows(TEXT, IDS, rows=2, length=8, mesh="data=2"),  # wrong
    "position_behind_the_end": lambda: ExampleStream(TEXT, IDS, rows=2, length=8, epochs=1).step(1),  # wrong
    "windows_of_pairs": lambda: TokenWindows(Phrases(3), IDS, rows=2, length=8).step(0),  # wrong
    "tokens_that_are_no_row": lambda: TokenWindows(np.ones((2, 3)), IDS, rows=2, length=8),  # wrong
    "tokens_beyond_the_vocabulary": lambda: TokenWindows(np.array([5, 259]), IDS, 2, 8).step(0),  # wrong
    "tokenizer_with_more_ids": lambda: ExampleStream(TEXT, Beyond(), rows=2, length=8).step(0),  # wrong
    "model_with_fewer_ids": lambda: check_vocab(ByteTokenizer(), 200),  # wrong
    "end_that_is_no_id": lambda: check_vocab(Endless(), 300),  # wrong
    "no_tokenizer_there": lambda: SentencePiece("a.model").encode("a"),  # wrong
    "no_tokenizer_in_it": lambda: SentencePiece("no.model").encode("a"),  # wrong
    "nothing_ahead": lambda: prefetch([], ahead=0),  # wrong
    "no_such_split": lambda: PythonDocs(split="vaild"),  # wrong
    "no_such_phrases": lambda: Phrases(10, kinds=("number", "prise")),  # wrong
}


@pytest.mark.parametrize("name", MISTAKES)
def test_messages(name, mistake, monkeypatch, tmp_path):
    for file, content in FILES.items():
        (tmp_path / file).write_bytes(content)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "zstandard", None)  # as if it were not installed
    mistake(name, MISTAKES[name], "messages/data")


def test_every_text_is_of_a_mistake():
    here = {path.stem for path in (Path(__file__).parents[1] / "messages" / "data").glob("*.txt")}
    assert here == set(MISTAKES)
