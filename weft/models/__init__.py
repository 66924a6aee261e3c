"""Transformers built with `weft.nn`, and their presets."""

from .batch import Batch as Batch
from .batch import shift_right as shift_right
from .config import Config as Config
from .presets import Preset as Preset
from .presets import preset as preset
from .presets import presets as presets
from .transformer import Transformer as Transformer
