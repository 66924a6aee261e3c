"""Serving: a model behind HTTP, for many at once."""

from .engine import Engine as Engine
from .engine import Full as Full
from .engine import Job as Job
from .engine import NotReady as NotReady
from .engine import Piece as Piece
from .http import app as app
from .server import Server as Server
from .server import bound as bound
from .server import serve as serve
