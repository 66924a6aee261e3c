"""The HTTP server: listens on a port, reports when it is ready, and shuts down gracefully on a signal."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import signal
import socket
import threading
from collections.abc import Callable, Iterator

import uvicorn
from starlette.applications import Starlette
from uvicorn.protocols.http.h11_impl import H11Protocol

from .engine import Engine

IDLE_SECONDS = 30  # after which a new connection without a request is closed


class _Connection(H11Protocol):
    """A connection that can be aborted: closing it would wait for a client that does not read."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # A response is two writes, its head and its body. With Nagle's algorithm the second waits until the
        # client has acknowledged the first, which it delays by 40 ms. asyncio disables the algorithm only for
        # sockets that name their protocol, which those of socket.create_server don't.
        accepted = transport.get_extra_info("socket")
        if accepted is not None and accepted.family in (socket.AF_INET, socket.AF_INET6):
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.app_state = {**self.app_state, "drop": transport.abort}
        self.loop.call_later(IDLE_SECONDS, lambda: self.scope is None and transport.abort())


class Server(uvicorn.Server):
    """Serves an application until SIGTERM or SIGINT, and then exits normally.

    Args:
      app: from `build_app`.
      timeout: the maximum seconds to finish accepted requests.
    """

    def __init__(self, app: Starlette, timeout: float):
        config = uvicorn.Config(
            app,
            http=_Connection,
            ws="none",
            lifespan="on",
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=max(1, round(timeout)),
        )
        super().__init__(config)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and record for the handlers whether only this machine can connect."""
        addresses = [ipaddress.ip_address(each.getsockname()[0]) for each in sockets or ()]
        self.lifespan.state["local"] = all(address.is_loopback for address in addresses)
        await super().startup(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Shut down on a signal. Unlike uvicorn, don't raise it again afterwards: the exit code is 0."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        signals = (signal.SIGINT, signal.SIGTERM)
        before = {number: signal.signal(number, self.handle_exit) for number in signals}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def listen_socket(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 is any free port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=2048)


def serve(app: Starlette, listening: socket.socket, timeout: float, ready: Callable[[], None]) -> bool:
    """Serve until a signal; return False if the engine failed.

    Args:
      app: from `build_app`.
      listening: from `listen_socket`.
      timeout: the maximum seconds for the shutdown.
      ready: called when the engine is ready.
    """
    engine: Engine = app.state.engine
    server = Server(app, timeout)

    async def run() -> None:
        serving = asyncio.ensure_future(server.serve(sockets=[listening]))
        waiting = asyncio.ensure_future(asyncio.to_thread(engine.wait))
        await asyncio.wait([serving, waiting], return_when=asyncio.FIRST_COMPLETED)
        if engine.status == "ready":
            ready()
        elif engine.status == "failed":
            server.should_exit = True
        await serving

    asyncio.run(run())
    return engine.status != "failed"
