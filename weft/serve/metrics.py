"""What Prometheus is told."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import (
    CONTENT_TYPE_LATEST,
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    generate_latest,
)

from .engine import Engine

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
WORK = ("prefill", "step", "search", "score", "view")

# Read when asked for.
GAUGES: dict[str, tuple[str, Callable[[Engine], float]]] = {
    "weft_waiting": ("Texts that wait.", lambda engine: engine.waiting),
    "weft_slots": ("Texts that can be said at once.", lambda engine: engine.rows),
    "weft_slots_busy": ("Texts that are being said.", lambda engine: engine.busy),
    "weft_compilations": ("Programs that were compiled.", lambda engine: engine.compilations),
    "weft_ready": ("1 if requests are answered.", lambda engine: engine.status == "ready"),
}


class ServerMetrics:
    """The numbers of one server, in a registry of their own.

    Args:
      engine: whose they are.
    """

    type = CONTENT_TYPE_LATEST

    def __init__(self, engine: Engine):
        own = self.registry = CollectorRegistry()
        self.requests = Counter("weft_requests", "Requests answered.", ["path", "code"], registry=own)
        self.seconds = Histogram(
            "weft_request_seconds",
            "From a request to the end of its answer.",
            ["path"],
            buckets=SECONDS,
            registry=own,
        )
        self.first = Histogram(
            "weft_first_token_seconds", "From a request to its first token.", buckets=SECONDS, registry=own
        )
        self.tokens = Counter("weft_tokens", "Tokens read and said.", ["kind"], registry=own)
        self.work = Histogram(
            "weft_work_seconds", "One call of the devices.", ["kind"], buckets=SECONDS, registry=own
        )
        for name, (about, value) in GAUGES.items():
            gauge = Gauge(name, about, registry=own)
            gauge.set_function(lambda value=value: float(value(engine)))  # type: ignore[misc]
        engine.observe = self.observe

    def observe(self, what: str, amount: float) -> None:
        """Note what the engine did: tokens that it said, or seconds of some work."""
        if what in WORK:
            self.work.labels(what).observe(amount)
        else:
            self.tokens.labels(what).inc(amount)

    def text(self) -> bytes:
        """As Prometheus reads it."""
        return generate_latest(self.registry)
