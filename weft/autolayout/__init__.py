"""Layout search: the best mesh and layout for a program and a machine."""

from .ranking import Found as Found
from .ranking import Ranked as Ranked
from .ranking import search as search
from .space import Candidate as Candidate
