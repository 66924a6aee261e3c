"""A server on a port: it says when it is ready, and on a signal finishes what it has accepted."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from .engine import Engine

IDLE_SECONDS = 30  # seconds that a new connection may say nothing


class _Connection(H11Protocol):
    """A connection that can be cut: closing it would wait until a client has read what it does not read."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        # A response is two writes, its head and its body. With Nagle's algorithm the second waits until the
        # client has acknowledged the first, which it delays by 40 ms. asyncio turns it off itself only where
        # a socket names its protocol, which those of socket.create_server don't.
        accepted = transport.get_extra_info("socket")
        if accepted is not None and accepted.family in (socket.AF_INET, socket.AF_INET6):
            accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.app_state = {**self.app_state, "drop": transport.abort}
        self.loop.call_later(IDLE_SECONDS, lambda: self.scope is None and transport.abort())


class Server(uvicorn.Server):
    """Serves an application until SIGTERM or SIGINT, and then ends as if nothing had happened.

    Args:
      app: from `app`.
      timeout: how many seconds what was accepted may still take.
    """

    def __init__(self, app: Any, timeout: float):
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
        """Listen; requests are told whether only this machine can send them."""
        addresses = [ipaddress.ip_address(one.getsockname()[0]) for one in sockets or ()]
        self.lifespan.state["local"] = all(address.is_loopback for address in addresses)
        await super().startup(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Ends on a signal; it is not raised again: who asked it to end got what it wanted."""
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
    """A socket that listens; port 0 is any that is free."""
    kind = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=kind, backlog=2048)


def serve(app: Any, listening: socket.socket, timeout: float, ready: Callable[[], None]) -> bool:
    """Serve until a signal; whether it could.

    Args:
      app: from `app`.
      listening: from `bound`.
      timeout: how long it may take to end.
      ready: called when requests are answered.
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
