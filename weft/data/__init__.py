"""Data: from text files to batches of named tensors."""

from .batches import Batches as Batches
from .batches import Step as Step
from .corpus import tokenize as tokenize
from .packing import Encoded as Encoded
from .packing import arrays as arrays
from .packing import pack as pack
from .phrases import Phrases as Phrases
from .prefetch import prefetch as prefetch
from .python_docs import PythonDocs as PythonDocs
from .sources import Documents as Documents
from .sources import Examples as Examples
from .sources import Jsonl as Jsonl
from .sources import Malformed as Malformed
from .sources import Pair as Pair
from .sources import Parallel as Parallel
from .sources import PlainText as PlainText
from .sources import Tsv as Tsv
from .sources import find_files as find_files
from .sources import texts as texts
from .stream import Stream as Stream
from .tokenizers import Bytes as Bytes
from .tokenizers import SentencePiece as SentencePiece
from .tokenizers import Tokenizer as Tokenizer
from .tokenizers import check_vocab as check_vocab
from .windows import Windows as Windows
