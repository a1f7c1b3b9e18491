"""The four pages that every node shows, from plain functions of its state."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from typing import Any

import prometheus_client
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from protocol.metric_texts import COUNTERS, GAUGES
from protocol.status_http import Page, json_page


@dataclass(frozen=True, slots=True)
class NodeView:
    """What a node lets be seen. `unhealthy` / `unready`: the reason, or None. `counters`: group name -> dataclass of
    monotone counts. Every number has a text in `metric_texts`. `pages`: the page ledger, one dict per block."""

    unhealthy: Callable[[], str | None]
    unready: Callable[[], str | None]
    gauges: Callable[[], Mapping[str, float]]
    counters: Callable[[], Mapping[str, Any]]
    pages: Callable[[], Sequence[Mapping[str, Any]]]


def node_pages(view: NodeView) -> dict[str, Callable[[], Page]]:
    return {
        "/health": lambda: _verdict(view.unhealthy()),
        "/ready": lambda: _verdict(view.unhealthy() or view.unready()),
        "/metrics": lambda: _metrics(view),
        "/debug/pages": lambda: json_page(list(view.pages())),
    }


def _verdict(reason: str | None) -> Page:
    return json_page({"status": "ok"}) if reason is None else json_page({"status": "failing", "reason": reason}, 503)


def _metrics(view: NodeView) -> Page:
    registry = prometheus_client.CollectorRegistry()
    registry.register(_Snapshot(view))
    return Page(200, prometheus_client.CONTENT_TYPE_LATEST, prometheus_client.generate_latest(registry))


class _Snapshot(prometheus_client.registry.Collector):
    """The node's own numbers, read when scraped: there is no second set of books."""

    def __init__(self, view: NodeView) -> None:
        self._view = view

    def collect(self) -> list[Metric]:
        metrics: list[Metric] = []
        for name, value in self._view.gauges().items():
            metrics.append(GaugeMetricFamily(f"kvferry_{name}", GAUGES[name], value))
        for group, counts in self._view.counters().items():
            assert is_dataclass(counts) and not isinstance(counts, type)
            for name, value in asdict(counts).items():
                full = f"{group}_{name}"
                metrics.append(CounterMetricFamily(f"kvferry_{full}", COUNTERS[full], value))
        return metrics
