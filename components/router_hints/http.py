# SPDX-License-Identifier: Apache-2.0
"""Signals over HTTP: ``/v1/kv/signals`` and ``/v1/kv/sessions``. On the router's event loop."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import web

from kvcr.errors import ConfigError
from kvcr.protocol.signals import MAX_SIGNAL_BYTES, TENANT_HEADER, BadSignal, read_signal
from router_hints.intake import Intake, Unavailable
from router_hints.metrics import Metrics
from router_hints.tokens import Tokens

log = logging.getLogger(__name__)

MAX_WAIT_S = 30.0
_TENANT = web.RequestKey("tenant", str)
_encoder = msgspec.json.Encoder()

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class SignalServer:
    """The HTTP server. Bound to loopback unless told otherwise; elsewhere only with tokens."""

    def __init__(self, host: str, port: int, tokens: Tokens, intake: Intake, metrics: Metrics) -> None:
        self._host = host
        self._port = port
        self._tokens = tokens
        self._intake = intake
        self._metrics = metrics
        self._runner: web.AppRunner | None = None

    async def start(self) -> int:
        """Listen; returns the port. Raises ConfigError when it is taken."""
        app = web.Application(client_max_size=MAX_SIGNAL_BYTES, middlewares=[self._guarded])
        app.add_routes(
            [
                web.post("/v1/kv/signals", self._post),
                web.get("/v1/kv/signals/{id}", self._get),
                web.delete("/v1/kv/signals/{id}", self._delete),
                web.get("/v1/kv/sessions/{id}", self._session),
                web.get("/v1/kv/sessions/{id}/keys", self._keys),
            ]
        )
        self._runner = web.AppRunner(app, access_log=None, handle_signals=False)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, self._port)
        try:
            await site.start()
        except OSError as error:
            await self.close()
            raise ConfigError(
                f"--signals-port {self._port} on {self._host} cannot be opened: {error.strerror}; "
                "give another, or 0 for a free one"
            ) from error
        port = int(self._runner.addresses[0][1])
        log.info("signals at http://%s:%d/v1/kv/signals", self._host, port)
        return port

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    # --- routes ------------------------------------------------------------------------------------

    async def _post(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        signal = read_signal(raw)
        self._metrics.signals.labels(signal.kind.value, "http").inc()
        return _json(await self._intake.signal(signal, _tenant(request), _wait_s(request)))

    async def _get(self, request: web.Request) -> web.StreamResponse:
        found = await self._intake.find(_tenant(request), request.match_info["id"])
        return _json(found) if found is not None else _unknown("signal", request)

    async def _delete(self, request: web.Request) -> web.StreamResponse:
        found = await self._intake.withdraw(_tenant(request), request.match_info["id"], _wait_s(request))
        return _json(found) if found is not None else _unknown("signal", request)

    async def _session(self, request: web.Request) -> web.StreamResponse:
        found = await self._intake.session(_tenant(request), request.match_info["id"])
        return _json(found) if found is not None else _unknown("session", request)

    async def _keys(self, request: web.Request) -> web.StreamResponse:
        keys = self._intake.handler.keys(_tenant(request), request.match_info["id"])
        return _json({"keys": keys}) if keys is not None else _unknown("session", request)

    # --- before and around them ----------------------------------------------------------------------

    @web.middleware
    async def _guarded(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        try:
            request[_TENANT] = self._tokens.tenant(
                request.headers.get("Authorization", ""), request.headers.get(TENANT_HEADER, "")
            )
        except PermissionError:
            return _error(401, "send Authorization: Bearer <token>, one of --signals-token-file")
        except ValueError as error:
            return _error(403, str(error))
        try:
            return await handler(request)
        except BadSignal as error:
            self._metrics.refused("http", error.field)
            return _json({"error": error.as_json()}, 400)
        except Unavailable as error:
            return _error(503, str(error))
        except web.HTTPRequestEntityTooLarge:
            self._metrics.refused("http", "")
            return _error(413, f"a signal has at most {MAX_SIGNAL_BYTES} bytes")
        except web.HTTPException as error:
            return _error(error.status, error.reason)


def _tenant(request: web.Request) -> str:
    return request[_TENANT]


def _wait_s(request: web.Request) -> float:
    text = request.query.get("wait_s", "2")
    try:
        wait_s = float(text)
    except ValueError:
        wait_s = -1.0
    if not 0.0 <= wait_s <= MAX_WAIT_S:
        raise BadSignal("wait_s", text, f"seconds to wait for the guards, 0 to {MAX_WAIT_S:g}")
    return wait_s


def _json(value: object, status: int = 200) -> web.Response:
    return web.Response(body=_encoder.encode(value), status=status, content_type="application/json")


def _error(status: int, message: str) -> web.Response:
    return _json({"error": {"message": message}}, status)


def _unknown(what: str, request: web.Request) -> web.Response:
    return _error(404, f"no {what} {request.match_info['id']!r} of this tenant is known here")
