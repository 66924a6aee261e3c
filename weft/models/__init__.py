"""Models written with `weft.nn`."""

from .presets import Preset as Preset
from .presets import preset as preset
from .presets import presets as presets
from .transformer import Batch as Batch
from .transformer import Config as Config
from .transformer import Transformer as Transformer
from .transformer import shifted as shifted
