"""What `/metrics` counts, one registry per app, and the clocks that feed it."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass

import trio
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest

# From a warm small model (20 ms) to a first placing over a slow disk (minutes), each bound 2 to 2.5 times the last.
_FIRST_TOKEN_SECONDS = (0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 120, 300)
# From one fast machine (5 ms) to a chain of slow ones on Wi-Fi.
_BETWEEN_TOKENS_SECONDS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2, 5)


@dataclass
class SessionClock:
    """Times one session's tokens."""

    first_token: Callable[[float], None]
    next_token: Callable[[float], None]
    count: Callable[[], None]
    _last: float
    _begun: bool = False

    def token(self) -> None:
        now = trio.current_time()
        (self.next_token if self._begun else self.first_token)(now - self._last)
        self.count()
        self._last, self._begun = now, True


class Metrics:
    """The counters of one app."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, topology_nodes: Callable[[], int]) -> None:
        """`topology_nodes`: asked at each scrape."""
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "meshinfer_http_requests", "HTTP requests by route and status", ["route", "status"], registry=self._registry
        )
        self._tokens = Counter("meshinfer_tokens", "Tokens by kind", ["kind"], registry=self._registry)
        self._first_token = Histogram(
            "meshinfer_time_to_first_token_seconds",
            "From the session's start to its first token",
            buckets=_FIRST_TOKEN_SECONDS,
            registry=self._registry,
        )
        self._between_tokens = Histogram(
            "meshinfer_inter_token_latency_seconds",
            "Between two tokens of a session",
            buckets=_BETWEEN_TOKENS_SECONDS,
            registry=self._registry,
        )
        self._sessions = Gauge(
            "meshinfer_sessions", "Sessions that run with this node as their origin", registry=self._registry
        )
        nodes = Gauge("meshinfer_topology_nodes", "Live nodes, as this node sees them", registry=self._registry)
        nodes.set_function(topology_nodes)

    def request(self, route: str, status: int) -> None:
        """One HTTP request was answered. `route`: its pattern, so that ids do not become series."""
        self._requests.labels(route, str(status)).inc()

    def prompt_tokens(self, count: int) -> None:
        self._tokens.labels("prompt").inc(count)

    @contextmanager
    def session(self) -> Generator[SessionClock]:
        """While one session runs."""
        with self._sessions.track_inprogress():
            yield SessionClock(
                self._first_token.observe,
                self._between_tokens.observe,
                self._tokens.labels("generated").inc,
                trio.current_time(),
            )

    def text(self) -> bytes:
        """In the Prometheus text format."""
        return generate_latest(self._registry)
