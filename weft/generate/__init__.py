"""Generation: from a trained model to texts."""

from .beam import BeamResult as BeamResult
from .beam import beam_search as beam_search
from .bleu import CorpusScores as CorpusScores
from .bleu import corpus_scores as corpus_scores
from .cache import KVCache as KVCache
from .cache import decode_step as decode_step
from .cache import prefill_cache as prefill_cache
from .cache import unstack_layers as unstack_layers
from .config import Beams as Beams
from .config import Completion as Completion
from .config import GenerationConfig as GenerationConfig
from .decode_loop import DecodeState as DecodeState
from .decode_loop import RowSettings as RowSettings
from .decode_loop import decode as decode
from .decode_loop import insert as insert
from .decode_loop import prefill as prefill
from .generator import TextGenerator as TextGenerator
from .sampling import SamplingParams as SamplingParams
from .sampling import sample as sample
from .score import score as score
