# SPDX-License-Identifier: Apache-2.0
"""Counters, gauges and histograms, rendered as Prometheus text and served over HTTP.

The core depends on no metrics library; this is the small part of one that it needs.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

from kvcr.errors import ConfigError

log = logging.getLogger(__name__)

MAX_SCRAPES = 16
"""Connections served at once; each may take its thread 10 s of silence."""

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

DEFAULT_BUCKETS_S = (
    0.0001,
    0.00025,
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
)

Labels = tuple[str, ...]


class Metric(ABC):
    """A family: one name, one set of label names, one value per combination of label values.

    May be used from any thread.
    """

    kind = ""

    def __init__(self, name: str, text: str, labels: Sequence[str] = ()) -> None:
        self.name = name
        self.text = text
        self.label_names = tuple(labels)
        self._lock = threading.Lock()
        self._values: dict[Labels, Any] = {}

    def retain(self, label: str, known: Container[str]) -> None:
        """Forget the values whose ``label`` is none of ``known``: of peers that are gone for good. Otherwise
        each that ever was would be told at each scrape."""
        place = self.label_names.index(label)
        with self._lock:
            for key in [key for key in self._values if key[place] not in known]:
                del self._values[key]

    def _key(self, labels: dict[str, str]) -> Labels:
        if len(labels) != len(self.label_names) or any(name not in labels for name in self.label_names):
            raise ValueError(f"{self.name} has labels {self.label_names}, got {tuple(labels)}")
        return tuple(labels[name] for name in self.label_names)

    @abstractmethod
    def render(self) -> Iterable[str]:
        """Sample lines, without the header."""


class _Single(Metric):
    """One number per combination of label values."""

    def value(self, **labels: str) -> float:
        """As it is now; 0 for labels never seen."""
        with self._lock:
            return float(self._values.get(self._key(labels), 0))

    def render(self) -> Iterable[str]:
        with self._lock:
            values = sorted(self._values.items())
        return [f"{self.name}{_braces(self.label_names, key)} {_number(value)}" for key, value in values]


class Counter(_Single):
    """A sum that only grows; its name ends in ``_total``."""

    kind = "counter"

    def __init__(self, name: str, text: str, labels: Sequence[str] = ()) -> None:
        super().__init__(name, text, labels)
        if not labels:
            # There from the first scrape on: an increase is only seen from a zero.
            self._values[()] = 0

    def inc(self, amount: float = 1, **labels: str) -> None:
        """Add ``amount``, 0 or more."""
        if amount < 0:
            raise ValueError(f"{self.name} only grows, got {amount}")
        key = self._key(labels)
        with self._lock:
            self._values[key] = self._values.get(key, 0) + amount


class Gauge(_Single):
    """A value that goes up and down."""

    kind = "gauge"

    def set(self, value: float, **labels: str) -> None:
        key = self._key(labels)
        with self._lock:
            self._values[key] = value

    def clear(self) -> None:
        """Forget all values: before setting those of things that come and go."""
        with self._lock:
            self._values.clear()


class Histogram(Metric):
    """Observations in cumulative buckets, with their sum and count."""

    kind = "histogram"

    def __init__(
        self,
        name: str,
        text: str,
        labels: Sequence[str] = (),
        buckets: Sequence[float] = DEFAULT_BUCKETS_S,
    ) -> None:
        super().__init__(name, text, labels)
        if not buckets or list(buckets) != sorted(set(buckets)):
            raise ValueError(f"{name}: buckets must be ascending upper bounds, got {tuple(buckets)}")
        self._bounds = tuple(buckets)
        # Observations in each bucket, and their sum.
        self._values: dict[Labels, tuple[list[int], float]] = {}
        if not labels:
            self.expect()

    def expect(self, **labels: str) -> None:
        """Show these labels from now on, with no observation yet: as for counters."""
        key = self._key(labels)
        with self._lock:
            self._values.setdefault(key, self._none())

    def observe(self, value: float, **labels: str) -> None:
        key = self._key(labels)
        with self._lock:
            counts, total = self._values.get(key) or self._none()
            counts[bisect_left(self._bounds, value)] += 1
            self._values[key] = counts, total + value

    def count(self, **labels: str) -> int:
        """Observations so far."""
        with self._lock:
            return sum((self._values.get(self._key(labels)) or self._none())[0])

    def _none(self) -> tuple[list[int], float]:
        return [0] * (len(self._bounds) + 1), 0.0

    def render(self) -> Iterable[str]:
        lines = []
        with self._lock:
            families = [(key, list(counts), total) for key, (counts, total) in sorted(self._values.items())]
        names = (*self.label_names, "le")
        for key, counts, total in families:
            seen = 0
            for bound, count in zip((*map(_number, self._bounds), "+Inf"), counts, strict=True):
                seen += count
                lines.append(f"{self.name}_bucket{_braces(names, (*key, bound))} {seen}")
            lines.append(f"{self.name}_sum{_braces(self.label_names, key)} {_number(total)}")
            lines.append(f"{self.name}_count{_braces(self.label_names, key)} {seen}")
        return lines


class Registry:
    """The metrics of one process. May be used from any thread."""

    def __init__(self) -> None:
        self._metrics: dict[str, Metric] = {}
        self._before: list[Callable[[], None]] = []
        self._lock = threading.Lock()

    def counter(self, name: str, text: str, labels: Sequence[str] = ()) -> Counter:
        metric = Counter(name, text, labels)
        self._add(metric)
        return metric

    def gauge(self, name: str, text: str, labels: Sequence[str] = ()) -> Gauge:
        metric = Gauge(name, text, labels)
        self._add(metric)
        return metric

    def histogram(
        self, name: str, text: str, labels: Sequence[str] = (), buckets: Sequence[float] = DEFAULT_BUCKETS_S
    ) -> Histogram:
        metric = Histogram(name, text, labels, buckets)
        self._add(metric)
        return metric

    def before_render(self, refresh: Callable[[], None]) -> None:
        """Call ``refresh`` before each rendering, on the rendering thread: for gauges that are looked up."""
        with self._lock:
            self._before.append(refresh)

    def render(self) -> str:
        """Prometheus text exposition format 0.0.4."""
        with self._lock:
            metrics = list(self._metrics.values())
            before = list(self._before)
        for refresh in before:
            refresh()
        lines: list[str] = []
        for metric in metrics:
            lines.append(f"# HELP {metric.name} {metric.text}")
            lines.append(f"# TYPE {metric.name} {metric.kind}")
            lines.extend(metric.render())
        return "\n".join(lines) + "\n"

    def _add(self, metric: Metric) -> None:
        with self._lock:
            if metric.name in self._metrics:
                raise ValueError(f"metric {metric.name} is registered twice")
            self._metrics[metric.name] = metric


def serve_metrics(registry: Registry, host: str, port: int) -> int:
    """Serve ``/metrics`` (and ``/healthz``) on a daemon thread; return the port, picked when ``port`` is 0.

    Raises ConfigError when the address cannot be bound.
    """

    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family)
    except OSError as error:
        raise ConfigError(
            f"metrics cannot be served on {host}:{port} ({error.strerror}); choose another port, 0 for any"
        ) from error
    thread = threading.Thread(target=_serve, args=(registry, listener), name="kvcr-metrics", daemon=True)
    thread.start()
    return int(listener.getsockname()[1])


def _serve(registry: Registry, listener: socket.socket) -> None:
    # Here, as it takes longer to import than all of this package's metrics: the first scrape waits for it,
    # and the start of the process does not.
    import http.server

    free = threading.Semaphore(MAX_SCRAPES)

    class Handler(http.server.BaseHTTPRequestHandler):
        timeout = 10

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            if path not in ("/metrics", "/healthz"):
                self.send_error(404)
                return
            try:
                body = registry.render().encode() if path == "/metrics" else b"ok\n"
            except Exception:
                # Whoever scrapes sees no reason, and nobody else would.
                log.exception("the metrics cannot be rendered")
                self.send_error(500)
                return
            self.send_response(200)
            self.send_header("Content-Type", CONTENT_TYPE if path == "/metrics" else "text/plain")
            self.send_header("Content-Length", str(len(body)))
            # Who asked may have given up meanwhile.
            with contextlib.suppress(ConnectionError):
                self.end_headers()
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Scrapes are not worth a log line."""

    class Server(http.server.ThreadingHTTPServer):
        daemon_threads = True

        def process_request(self, request: Any, client_address: Any) -> None:
            # A thread each, as many as scrapers may need; others are hung up on.
            if free.acquire(blocking=False):
                super().process_request(request, client_address)
            else:
                self.shutdown_request(request)

        def process_request_thread(self, request: Any, client_address: Any) -> None:
            try:
                super().process_request_thread(request, client_address)
            finally:
                free.release()

        def handle_error(self, request: Any, client_address: Any) -> None:
            """Of a client that went away in the middle, which is nobody's error."""

    server = Server(listener.getsockname()[:2], Handler, bind_and_activate=False)
    server.socket.close()
    server.socket = listener
    # Nobody calls shutdown(), so the loop need not wake up to look for it: an idle guard uses no CPU.
    server.serve_forever(poll_interval=3600.0)


def _braces(names: Sequence[str], values: Sequence[str]) -> str:
    if not names:
        return ""
    return (
        "{" + ",".join(f'{name}="{_escape(value)}"' for name, value in zip(names, values, strict=True)) + "}"
    )


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() and abs(value) < 1e15 else repr(float(value))
