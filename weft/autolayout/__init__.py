"""Layout search: the best mesh and layout for a program and a machine."""

from .ranking import RankedLayout as RankedLayout
from .ranking import SearchResult as SearchResult
from .ranking import search as search
from .space import Candidate as Candidate
