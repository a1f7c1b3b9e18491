"""The router's books, for Prometheus. At any moment: started = ok + failed + cut + cancelled + running."""

from enum import Enum

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

TTFT_BUCKETS = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0, 120.0)


class Outcome(Enum):
    OK = "ok"
    FAILED = "failed"
    """An error instead of a result."""
    CUT = "cut"
    """An error after part of the result was shown."""
    CANCELLED = "cancelled"
    """The client left."""


class Metrics:
    """One router's counters, in a registry of their own."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        self.started = Counter("kvferry_router_requests_started", "Requests admitted to the line", registry=registry)
        self._ended = Counter("kvferry_router_requests_ended", "By outcome", ["outcome"], registry=registry)
        self.running = Gauge("kvferry_router_requests_running", "Started and not ended", registry=registry)
        self._refused = Counter("kvferry_router_requests_refused", "By HTTP status", ["status"], registry=registry)
        self.waiting = Gauge("kvferry_router_requests_waiting", "In line for a node", registry=registry)
        self.retries = Counter("kvferry_router_retries", "Second attempts on another node", registry=registry)
        self.aborts = Counter("kvferry_router_aborts", "Requests or choices given up on a node", registry=registry)
        self.tokens = Counter("kvferry_router_tokens", "Tokens received for live requests", registry=registry)
        self._dropped = Counter("kvferry_router_frames_dropped", "From nodes, by reason", ["reason"], registry=registry)
        self.unsent = Counter("kvferry_router_messages_unsent", "To nodes that do not read", registry=registry)
        self.lost = Counter(
            "kvferry_router_nodes_lost", "Nodes that fell silent or restarted undrained", registry=registry
        )
        self.nodes = Gauge("kvferry_router_nodes", "Usable nodes", ["role"], registry=registry)
        self.ttft = Histogram(
            "kvferry_router_ttft_seconds", "Receipt to first token", buckets=TTFT_BUCKETS, registry=registry
        )

    def start(self) -> None:
        self.started.inc()
        self.running.inc()

    def end(self, outcome: Outcome) -> None:
        self.running.dec()
        self._ended.labels(outcome.value).inc()

    def refused(self, status: int) -> None:
        self._refused.labels(str(status)).inc()

    def dropped(self, reason: str) -> None:
        self._dropped.labels(reason).inc()

    def page(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self._registry)
