"""Data: from text files to batches of named tensors."""

from .batches import BatchStream as BatchStream
from .batches import PositionedBatch as PositionedBatch
from .corpus import tokenize as tokenize
from .packing import EncodedExample as EncodedExample
from .packing import pack as pack
from .packing import packed_arrays as packed_arrays
from .phrases import Phrases as Phrases
from .prefetch import prefetch as prefetch
from .python_docs import PythonDocs as PythonDocs
from .sources import Documents as Documents
from .sources import Examples as Examples
from .sources import Jsonl as Jsonl
from .sources import MalformedLine as MalformedLine
from .sources import Pair as Pair
from .sources import ParallelText as ParallelText
from .sources import PlainText as PlainText
from .sources import Tsv as Tsv
from .sources import find_files as find_files
from .sources import iter_texts as iter_texts
from .stream import ExampleStream as ExampleStream
from .tokenizers import ByteTokenizer as ByteTokenizer
from .tokenizers import SentencePiece as SentencePiece
from .tokenizers import Tokenizer as Tokenizer
from .tokenizers import check_vocab as check_vocab
from .windows import TokenWindows as TokenWindows
