# SPDX-License-Identifier: Apache-2.0
"""What an OpenTelemetry collector is to those who send spans: an HTTP endpoint that takes OTLP protobuf."""

from __future__ import annotations

import http.server
import threading
from dataclasses import dataclass
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


@dataclass(frozen=True)
class Received:
    """One span, as it came."""

    service: str
    instance: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]


class Collector:
    """``with Collector() as collector``; spans are in :attr:`spans` as they come."""

    def __init__(self) -> None:
        self.spans: list[Received] = []
        collector = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                raw = self.rfile.read(int(self.headers["content-length"]))
                collector.spans += decoded(raw) if self.path == "/v1/traces" else []
                answer = ExportTraceServiceResponse().SerializeToString()
                self.send_response(200)
                self.send_header("content-type", "application/x-protobuf")
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: Any) -> None: ...

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def environment(self) -> dict[str, str]:
        """Of a process that should send its spans here, soon after they end."""
        return {
            "OTEL_EXPORT_ENABLED": "true",
            "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{self._server.server_port}",
            "OTEL_BSP_SCHEDULE_DELAY": "100",
        }

    def of(self, service: str, name: str) -> list[Received]:
        return [span for span in self.spans if (span.service, span.name) == (service, name)]

    def __enter__(self) -> Collector:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def decoded(raw: bytes) -> list[Received]:
    found = []
    for resource in ExportTraceServiceRequest.FromString(raw).resource_spans:
        about = values(resource.resource.attributes)
        for scope in resource.scope_spans:
            for span in scope.spans:
                found.append(
                    Received(
                        service=about.get("service.name", ""),
                        instance=about.get("service.instance.id", ""),
                        name=span.name,
                        trace_id=span.trace_id.hex(),
                        span_id=span.span_id.hex(),
                        parent_id=span.parent_span_id.hex(),
                        start_ns=span.start_time_unix_nano,
                        end_ns=span.end_time_unix_nano,
                        attributes=values(span.attributes),
                    )
                )
    return found


def values(attributes: Any) -> dict[str, Any]:
    return {entry.key: getattr(entry.value, entry.value.WhichOneof("value")) for entry in attributes}
