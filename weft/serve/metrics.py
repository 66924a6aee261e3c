"""Prometheus metrics of the server."""

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
WORK = ("prefill", "step", "search", "score", "attention")

# Read from the engine at each scrape.
GAUGES: dict[str, tuple[str, Callable[[Engine], float]]] = {
    "weft_waiting": ("Texts in the queue.", lambda engine: engine.waiting),
    "weft_slots": ("Texts that can be generated at once.", lambda engine: engine.rows),
    "weft_slots_busy": ("Texts that are being generated.", lambda engine: engine.busy),
    "weft_compilations": ("Compiled programs.", lambda engine: engine.compilations),
    "weft_ready": ("1 if requests are accepted.", lambda engine: engine.status == "ready"),
}


class ServerMetrics:
    """The metrics of one server, in their own registry.

    Args:
      engine: the engine to observe.
    """

    type = CONTENT_TYPE_LATEST

    def __init__(self, engine: Engine):
        registry = self.registry = CollectorRegistry()
        self.requests = Counter("weft_requests", "Responses sent.", ["path", "code"], registry=registry)
        self.seconds = Histogram(
            "weft_request_seconds",
            "From a request to the end of its response.",
            ["path"],
            buckets=SECONDS,
            registry=registry,
        )
        self.first = Histogram(
            "weft_first_token_seconds",
            "From a request to its first token.",
            buckets=SECONDS,
            registry=registry,
        )
        self.tokens = Counter("weft_tokens", "Prompt and generated tokens.", ["kind"], registry=registry)
        self.work = Histogram(
            "weft_work_seconds", "One call of the devices.", ["kind"], buckets=SECONDS, registry=registry
        )
        for name, (description, value) in GAUGES.items():
            gauge = Gauge(name, description, registry=registry)
            gauge.set_function(lambda value=value: float(value(engine)))  # type: ignore[misc]
        engine.observe = self.observe

    def observe(self, kind: str, amount: float) -> None:
        """Record seconds of one kind of work, or a number of tokens."""
        if kind in WORK:
            self.work.labels(kind).observe(amount)
        else:
            self.tokens.labels(kind).inc(amount)

    def text(self) -> bytes:
        """The metrics in Prometheus' text format."""
        return generate_latest(self.registry)
