"""Layout search: the best mesh and layout for a program and a machine."""

from .best import Found as Found
from .best import Ranked as Ranked
from .best import search as search
from .space import Candidate as Candidate
