"""Decoding: from a trained model to texts."""

from .greedy import greedy as greedy
from .greedy import translate as translate
from .quality import Quality as Quality
from .quality import quality as quality
