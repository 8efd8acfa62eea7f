# SPDX-License-Identifier: Apache-2.0
"""Spans of a request, for OpenTelemetry. Off unless ``OTEL_EXPORT_ENABLED`` says otherwise, as in Dynamo.

A span's place in its trace travels as a W3C ``traceparent`` in a field of our messages. A process that
records nothing passes on what it got, so that a trace is whole but for its own part.

Environment, read by the OpenTelemetry SDK and by Dynamo alike: ``OTEL_EXPORTER_OTLP_TRACES_ENDPOINT`` or
``OTEL_EXPORTER_OTLP_ENDPOINT``, ``OTEL_EXPORTER_OTLP_PROTOCOL`` (``grpc``, the default, or
``http/protobuf``), ``OTEL_SERVICE_NAME``, ``OTEL_TRACES_SAMPLER``, and the others that the SDK documents.
"""

from __future__ import annotations

import logging
import os
import re
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from kvcr.sources import is_true

log = logging.getLogger(__name__)

ENABLED_ENV = "OTEL_EXPORT_ENABLED"
_TRACEPARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
_PROTOCOLS = ("grpc", "http/protobuf")
_FLUSH_S = 1.0
"""How long the end of a process may wait for a collector."""

Value = str | int | float | bool
Attributes = Mapping[str, Value]
_NONE: Attributes = {}


class TraceSpan:
    """Some work for a request. This one is not recorded; it only knows its place in the trace."""

    __slots__ = ("traceparent",)

    def __init__(self, traceparent: str = "") -> None:
        self.traceparent = traceparent
        """For what is done on behalf of it, here or elsewhere; empty outside of a trace."""

    def end(self, attributes: Attributes = _NONE) -> None:
        """The work is done. May be called again, to no effect."""


class Tracer:
    """Makes spans, from any thread. This one records nothing."""

    def start(
        self,
        name: str,
        parent: str,
        attributes: Attributes = _NONE,
        *,
        started_s: float | None = None,
        root: bool = False,
    ) -> TraceSpan:
        """A span below ``parent``, a traceparent. Without one there is no trace to record in, unless ``root``
        begins one.

        ``started_s``: on the monotonic clock, when the work began before this call. Attributes say how much,
        by what and for which request; they never hold tokens or keys.
        """
        return TraceSpan(parent)

    def close(self) -> None:
        """Send what is left, for a second at most."""


NO_SPAN = TraceSpan()
NOT_TRACING = Tracer()


def open_tracer(service: str, instance: str, environment: Mapping[str, str] = os.environ) -> Tracer:
    """The tracer of this process: one that records if the environment asks and packages allow.

    ``service`` is its name unless ``OTEL_SERVICE_NAME`` gives another. OpenTelemetry is imported only here.
    """
    if not is_true(environment, ENABLED_ENV):
        return NOT_TRACING
    try:
        return _recording(service, instance, environment)
    except ImportError as error:
        # The variable is Dynamo's, too: a deployment that sets it for Dynamo must not lose its guards.
        log.warning(
            "%s is set and spans are not recorded: %s; pip install 'dynamo-kvcr[tracing]'", ENABLED_ENV, error
        )
        return NOT_TRACING


def _recording(service: str, instance: str, environment: Mapping[str, str]) -> Tracer:
    from opentelemetry import trace
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES go over these.
    given = Resource.create({"service.instance.id": instance})
    named = {} if environment.get("OTEL_SERVICE_NAME") else {"service.name": service}
    provider = TracerProvider(resource=given.merge(Resource(named)), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(_exporter(environment)))

    def place(parent: str) -> Any:
        match = _TRACEPARENT.fullmatch(parent)
        if match is None:
            return None
        trace_id, span_id, flags = (int(part, 16) for part in match.groups())
        context = trace.SpanContext(trace_id, span_id, is_remote=True, trace_flags=trace.TraceFlags(flags))
        return trace.set_span_in_context(trace.NonRecordingSpan(context)) if context.is_valid else None

    return _Recording(provider, provider.get_tracer("kvcr"), place)


def _exporter(environment: Mapping[str, str]) -> Any:
    protocol = next(
        (
            given
            for name in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
            if (given := environment.get(name, "").strip())
        ),
        _PROTOCOLS[0],
    )
    if protocol not in _PROTOCOLS:
        log.warning("OTLP protocol %r is not one of %s; using grpc", protocol, ", ".join(_PROTOCOLS))
    if protocol == "http/protobuf":
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as OverHttp

        return OverHttp()
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as OverGrpc

    return OverGrpc()


class _RecordedSpan(TraceSpan):
    __slots__ = ("_span",)

    def __init__(self, span: Any) -> None:
        context = span.get_span_context()
        super().__init__(f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}")
        self._span = span

    def end(self, attributes: Attributes = _NONE) -> None:
        if self._span.is_recording():
            self._span.set_attributes(attributes)
            self._span.end()


class _Recording(Tracer):
    def __init__(self, provider: Any, tracer: Any, place: Callable[[str], Any]) -> None:
        self._provider = provider
        self._tracer = tracer
        self._place = place

    def start(
        self,
        name: str,
        parent: str,
        attributes: Attributes = _NONE,
        *,
        started_s: float | None = None,
        root: bool = False,
    ) -> TraceSpan:
        below = self._place(parent)
        if below is None and not root:
            return TraceSpan()
        now_ns = time.time_ns()
        if started_s is not None:
            now_ns -= int(1e9 * max(0.0, time.monotonic() - started_s))
        return _RecordedSpan(
            self._tracer.start_span(name, context=below, start_time=now_ns, attributes=attributes)
        )

    def close(self) -> None:
        # Not in this thread: an exporter that finds no collector tries for longer than we may wait.
        flushing = threading.Thread(target=self._provider.shutdown, name="kvcr-spans", daemon=True)
        flushing.start()
        flushing.join(_FLUSH_S)
