"""Decoding: from a trained model to texts."""

from .beam import Beams as Beams
from .beam import Found as Found
from .beam import search as search
from .bleu import Quality as Quality
from .bleu import quality as quality
from .cache import Kept as Kept
from .cache import apart as apart
from .cache import read as read
from .cache import step as step
from .config import Ask as Ask
from .config import Said as Said
from .decode_loop import Rows as Rows
from .decode_loop import State as State
from .decode_loop import admit as admit
from .decode_loop import begin as begin
from .decode_loop import speak as speak
from .generator import Speaker as Speaker
from .sampling import Choice as Choice
from .sampling import choose as choose
from .score import score as score
