# SPDX-License-Identifier: Apache-2.0
"""Graph files of ``dynamo serve`` (Dynamo 0.3), accepted as they are.

Pure: a document in, a document of today and one line for each thing that has no meaning any more out.
Recognised by what only those files have: a ``Processor``, or the underscore in ``served_model_name``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvcr.errors import ConfigError
from kvcr.graph.config import COMMON, COMMON_CONFIGS, SCHEMAS, SERVICE_ARGS, Kind, known_flags

_DISAGGREGATED = "PrefillWorker"
_GONE_COMPONENTS = {
    "Processor": "the frontend tokenises now",
    "Planner": "the number of workers is fixed on one machine",
}
_GONE_KEYS = {
    "endpoint": "the frontend finds models by discovery",
    "router": "the graph has a Router, so KV routing is on",
    "router-num-threads": "there is no Processor",
    "min-workers": "the router waits for none",
    "remote-prefill": "prefill and decode run in one worker",
    "conditional-disagg": "prefill and decode run in one worker",
    "max-local-prefill-length": "prefill and decode run in one worker",
    "max-prefill-queue-size": "prefill and decode run in one worker",
    "kv-transfer-config": "workers use KvcrConnector",
}
_WORKER_DEFAULTS = ("model", "block-size", "max-model-len")


def is_legacy(document: Mapping[str, Any]) -> bool:
    """Whether this is a file of ``dynamo serve``."""
    frontend = document.get(Kind.FRONTEND.value)
    return "Processor" in document or (
        isinstance(frontend, Mapping) and bool({"served_model_name", "endpoint"} & set(frontend))
    )


def translate(document: Mapping[str, Any], gpus: int) -> tuple[dict[str, Any], list[str]]:
    """The same deployment in today's form, and a line for each thing ignored or added.

    ``gpus`` is how many this machine has; with none, a request for them is dropped, since the CPU build of
    vLLM runs the same graph. Raises ConfigError for a component that is no mapping, and for a graph with
    separate prefill workers: dropping those would change what runs. Other values are checked where those of
    today's files are.
    """
    if _DISAGGREGATED in document:
        raise ConfigError(
            f"this graph has a {_DISAGGREGATED}: separate prefill and decode are not supported; "
            f"use an aggregated graph (agg.yaml or agg_router.yaml)"
        )
    notes = [
        f"ignored {name}: {reason}"
        for name, reason in _GONE_COMPONENTS.items()
        if document.get(name, ()) != ()
    ]
    common = _body(document, COMMON)
    frontend = _resolved(document, Kind.FRONTEND, common)
    worker = _resolved(document, Kind.WORKER, common)
    if not worker:
        raise ConfigError("this graph has no VllmWorker")
    processor = _resolved(document, "Processor", common)
    for key in _WORKER_DEFAULTS:
        if key in processor:
            worker.setdefault(key, processor[key])
    router = _resolved(document, Kind.ROUTER, common)

    served = frontend.pop("served_model_name", None)
    if "port" in frontend:
        frontend["http-port"] = frontend.pop("port")
    new_frontend = {"router-mode": "round-robin", **_kept(Kind.FRONTEND, frontend, gpus, notes)}
    new_worker = _kept(Kind.WORKER, worker, gpus, notes)
    router.pop("model", None)
    new_router = _kept(Kind.ROUTER, router, gpus, notes)
    new_router |= {key: new_worker[key] for key in ("model", "block-size") if key in new_worker}
    if served is not None:
        new_worker["served-model-name"] = new_router["served-model-name"] = served

    notes.append("added Etcd, Nats and one Guard per worker, started by the launcher")
    if Kind.ROUTER.value not in document:
        notes.append("added Router: workers are reached through it")
    return {
        Kind.ETCD.value: {},
        Kind.NATS.value: {},
        Kind.GUARD.value: {},
        Kind.WORKER.value: new_worker,
        Kind.ROUTER.value: new_router,
        Kind.FRONTEND.value: new_frontend,
    }, notes


def _body(document: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A component's own keys, of which there may be none."""
    body = document.get(name) or {}
    if not isinstance(body, Mapping):
        raise ConfigError(f"{name} is {body!r}; expected a mapping of names to values")
    return dict(body)


def _resolved(document: Mapping[str, Any], name: str, common: Mapping[str, Any]) -> dict[str, Any]:
    """A component's keys with the ones from ``Common`` it asked for; a missing one was a no-op then."""
    body = _body(document, name)
    wanted = body.pop(COMMON_CONFIGS, None) or []
    if not isinstance(wanted, list):
        raise ConfigError(f"{name}.{COMMON_CONFIGS} is {wanted!r}; expected a list, e.g. [model, block-size]")
    return {key: common[key] for key in wanted if key in common} | body


def _kept(kind: Kind, body: Mapping[str, Any], gpus: int, notes: list[str]) -> dict[str, Any]:
    """The keys that still mean something, with a note for each of the others."""
    schema = SCHEMAS[kind]
    flags = {flag.removeprefix("--") for flag in known_flags(schema.table)} if schema.table else set()
    kept: dict[str, Any] = {}
    for key, value in body.items():
        if key == SERVICE_ARGS:
            kept[key] = _service_args(kind, value, gpus, notes) if isinstance(value, Mapping) else value
        elif key in _GONE_KEYS:
            notes.append(f"ignored {kind.value}.{key}: {_GONE_KEYS[key]}")
        elif key in flags or key in schema.extra:
            kept[key] = value
        else:
            notes.append(f"ignored {kind.value}.{key}: {kind.value} has no such setting any more")
    return kept


def _service_args(kind: Kind, body: Mapping[str, Any], gpus: int, notes: list[str]) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for key, value in body.items():
        if key == "workers":
            kept[key] = _number(value)
        elif key == "resources" and isinstance(value, Mapping):
            kept[key] = {name: _number(amount) for name, amount in value.items() if name in ("gpu", "cpu")}
            if not gpus and kept[key].pop("gpu", 0):
                notes.append(
                    f"ignored {kind.value}.{SERVICE_ARGS}.resources.gpu: this machine has no NVIDIA GPU"
                )
        elif key == "resources":
            kept[key] = value
        else:
            notes.append(f"ignored {kind.value}.{SERVICE_ARGS}.{key}: not a setting of this launcher")
    return kept


def _number(value: Any) -> Any:
    """Numbers were often quoted."""
    return int(value) if isinstance(value, str) and value.isdecimal() else value
