"""Layout search: the best mesh and layout for a program and a machine."""

from .ranking import search as search
from .results import RankedLayout as RankedLayout
from .results import SearchResult as SearchResult
from .space import Candidate as Candidate
