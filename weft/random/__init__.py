"""Random numbers that depend on the key and on the global index of an element, not on the layout."""

from .draws import bernoulli as bernoulli
from .draws import bits as bits
from .draws import categorical as categorical
from .draws import dropout as dropout
from .draws import gumbel as gumbel
from .draws import normal as normal
from .draws import randint as randint
from .draws import truncated_normal as truncated_normal
from .draws import uniform as uniform
