"""Data: from text files to batches of named tensors."""

from .batches import Step as Step
from .batches import Stream as Stream
from .packing import Encoded as Encoded
from .packing import arrays as arrays
from .packing import pack as pack
from .phrases import Phrases as Phrases
from .sources import Examples as Examples
from .sources import Jsonl as Jsonl
from .sources import Malformed as Malformed
from .sources import Pair as Pair
from .sources import Parallel as Parallel
from .sources import PlainText as PlainText
from .sources import Tsv as Tsv
from .sources import find_files as find_files
from .sources import texts as texts
from .tokenizers import Bytes as Bytes
from .tokenizers import SentencePiece as SentencePiece
from .tokenizers import Tokenizer as Tokenizer
from .tokenizers import check_vocab as check_vocab
