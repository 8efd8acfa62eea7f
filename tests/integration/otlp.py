# SPDX-License-Identifier: Apache-2.0
"""What an OpenTelemetry collector is to those who send spans: OTLP over HTTP, or over gRPC."""

from __future__ import annotations

import http.server
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2_grpc import (
    TraceServiceServicer,
    add_TraceServiceServicer_to_server,
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
    """``with HttpCollector() as collector``; spans are in :attr:`spans` as they come."""

    protocol = ""

    def __init__(self) -> None:
        self.spans: list[Received] = []
        self.port = 0

    @property
    def environment(self) -> dict[str, str]:
        """Of a process that should send its spans here, soon after they end."""
        return {
            "OTEL_EXPORT_ENABLED": "true",
            "OTEL_EXPORTER_OTLP_PROTOCOL": self.protocol,
            "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{self.port}",
            "OTEL_BSP_SCHEDULE_DELAY": "100",
        }

    def of(self, service: str, name: str) -> list[Received]:
        return [span for span in self.spans if (span.service, span.name) == (service, name)]


class HttpCollector(Collector):
    """Takes protobuf at ``/v1/traces``."""

    protocol = "http/protobuf"

    def __init__(self) -> None:
        super().__init__()
        collector = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                raw = self.rfile.read(int(self.headers["content-length"]))
                if self.path == "/v1/traces":
                    collector.spans += decoded(ExportTraceServiceRequest.FromString(raw))
                answer = ExportTraceServiceResponse().SerializeToString()
                self.send_response(200)
                self.send_header("content-type", "application/x-protobuf")
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: Any) -> None: ...

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> HttpCollector:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class GrpcCollector(Collector, TraceServiceServicer):  # type: ignore[misc]
    """The trace service of OTLP, served by grpcio."""

    protocol = "grpc"

    def __init__(self) -> None:
        super().__init__()
        self._server = grpc.server(ThreadPoolExecutor(2))
        add_TraceServiceServicer_to_server(self, self._server)
        self.port = self._server.add_insecure_port("127.0.0.1:0")

    def Export(self, request: ExportTraceServiceRequest, _: Any) -> ExportTraceServiceResponse:
        """A method of the service, by its name there."""
        self.spans += decoded(request)
        return ExportTraceServiceResponse()

    def __enter__(self) -> GrpcCollector:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.stop(None).wait()


def decoded(request: ExportTraceServiceRequest) -> list[Received]:
    found = []
    for resource in request.resource_spans:
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
