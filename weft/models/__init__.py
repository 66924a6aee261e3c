"""Models written with `weft.nn`."""

from .transformer import Batch as Batch
from .transformer import Config as Config
from .transformer import Transformer as Transformer
from .transformer import shifted as shifted
