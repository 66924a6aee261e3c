"""Serving: a model behind HTTP, for many clients at once."""

from ..core.extras import from_extra as _from_extra

with _from_extra("serve"):
    from .app import build_app as build_app
    from .engine import Engine as Engine
    from .engine import EngineNotReady as EngineNotReady
    from .engine import EngineRequest as EngineRequest
    from .engine import QueueFull as QueueFull
    from .engine import TokenChunk as TokenChunk
    from .server import Server as Server
    from .server import listen_socket as listen_socket
    from .server import serve as serve
