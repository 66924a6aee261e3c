"""Decoding: from a trained model to texts."""

from .ask import Ask as Ask
from .ask import Said as Said
from .beam import Beams as Beams
from .beam import Found as Found
from .beam import search as search
from .cache import Kept as Kept
from .cache import apart as apart
from .cache import read as read
from .cache import step as step
from .choose import Choice as Choice
from .choose import choose as choose
from .quality import Quality as Quality
from .quality import quality as quality
from .score import score as score
from .speak import Rows as Rows
from .speak import State as State
from .speak import admit as admit
from .speak import begin as begin
from .speak import speak as speak
from .texts import Speaker as Speaker
