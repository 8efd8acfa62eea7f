# SPDX-License-Identifier: Apache-2.0
"""From a checked graph to command lines, environments and ports. Starts nothing.

Everything a process needs to know about another one (sockets, control ports, addresses) is decided here,
before the first of them runs; a process that is restarted gets exactly the same again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from kvcr.config import parse_size
from kvcr.dynamo.environment import LEASE_TTL_S
from kvcr.errors import ConfigError
from kvcr.graph import models
from kvcr.graph.config import Component, Graph, Kind, render_flags
from kvcr.graph.external import checked_address
from kvcr.graph.plan import Plan, ProcessPlan, ServerPlan
from kvcr.graph.site import (
    CONTROL_PORT,
    ETCD_PORT,
    HTTP_PORT,
    METRICS_PORT,
    NATS_PORT,
    SIGNALS_PORT,
    SYSTEM_PORT,
    Site,
)

DEFAULT_NAMESPACE = "dynamo"
DEFAULT_POOL_BYTES = "1GiB"
DEFAULT_BLOCK_SIZE = 32

START_TIMEOUT_S = {Kind.GUARD: 60.0, Kind.WORKER: 600.0, Kind.ROUTER: 120.0, Kind.FRONTEND: 120.0}
"""A worker compiles and loads weights; two of them on two loaded cores take minutes."""

_RANKED = "inproc-events"
"""vLLM gives each rank an address of its own for ``tcp`` and for whatever has ``inproc`` in it, and refuses
others."""


def make_plan(graph: Graph, site: Site, environ: Mapping[str, str]) -> Plan:
    """Decide everything for processes at ``site``. ``environ`` is looked at for ``ETCD_ENDPOINTS`` and
    ``NATS_SERVER`` only.

    Raises ConfigError for a missing model, a taken port, or components that contradict each other.
    """
    return _Planner(graph, site, environ).plan()


class _Planner:
    def __init__(self, graph: Graph, site: Site, environ: Mapping[str, str]) -> None:
        self._graph = graph
        self._site = site
        self._environ = environ
        self._namespace = str(
            self._agreed("namespace", (Kind.GUARD, Kind.WORKER, Kind.ROUTER)) or DEFAULT_NAMESPACE
        )
        self._model = self._agreed("model", (Kind.WORKER, Kind.ROUTER))
        self._controls: list[str] = []

    def plan(self) -> Plan:
        """Guards first: workers are told their sockets and ports."""
        graph = self._graph
        served = self._check_model()
        self._check_pools()
        self._site.check_ranks(f"{graph.source}: {Kind.WORKER.value}.data-parallel-size", graph.ranks)
        servers = tuple(
            server for kind in (Kind.ETCD, Kind.NATS) if (server := self._server(kind)) is not None
        )
        self._env = self._shared_environment({server.kind: server.url for server in servers})
        processes: list[ProcessPlan] = []
        for kind, build in (
            (Kind.GUARD, self._guard),
            (Kind.WORKER, self._worker),
            (Kind.ROUTER, self._router),
            (Kind.FRONTEND, self._frontend),
        ):
            component = graph.get(kind)
            if component is not None:
                processes += [build(component, index, served) for index in range(graph.count(kind))]
        return Plan(graph, self._namespace, self._model, served, servers, tuple(processes))

    def _agreed(self, key: str, kinds: tuple[Kind, ...]) -> Any:
        """The one value several components give for a key, None when none does."""
        values = {
            f"{kind.value}.{key}": component.params[key]
            for kind in kinds
            if (component := self._graph.get(kind)) is not None and key in component.params
        }
        if len({str(value) for value in values.values()}) > 1:
            raise ConfigError(
                f"{self._graph.source}: {' and '.join(f'{k}={v!r}' for k, v in values.items())} differ; "
                f"put {key} into Common and name it in common-configs"
            )
        return next(iter(values.values()), None)

    def _check_model(self) -> str | None:
        needed = [kind for kind in (Kind.WORKER, Kind.ROUTER) if self._graph.get(kind)]
        if not needed:
            return None
        if self._model is None:
            raise ConfigError(
                f"{self._graph.source}: {needed[0].value}.model is missing; name a model or path"
            )
        self._site.check_model(self._model)
        named = self._agreed("served-model-name", (Kind.WORKER, Kind.ROUTER))
        return str(named) if named is not None else models.served_name(self._model)

    def _server(self, kind: Kind) -> ServerPlan | None:
        component = self._graph.get(kind)
        if component is None:
            variable = "ETCD_ENDPOINTS" if kind is Kind.ETCD else "NATS_SERVER"
            address = self._environ.get(variable)
            if address:
                return ServerPlan(kind, address, 0)
            for needing in (Kind.FRONTEND, Kind.ROUTER, Kind.WORKER):
                if self._graph.get(needing):
                    raise ConfigError(
                        f"{self._graph.source}: {needing.value} needs {kind.value}; add `{kind.value}: {{}}` "
                        f"for a local one, `{kind.value}: {{address: ...}}`, or set {variable}"
                    )
            return None
        address = component.params.get("address")
        if address:
            return ServerPlan(kind, checked_address(str(address), kind), 0)
        scheme, usual = ("http", ETCD_PORT) if kind is Kind.ETCD else ("nats", NATS_PORT)
        port = self._port(component, "port", 0, usual)
        config = component.params.get("config")
        url = f"{scheme}://{self._site.host(kind.value.lower())}:{port}"
        return ServerPlan(kind, url, port, str(config) if config else None)

    def _shared_environment(self, servers: Mapping[Kind, str]) -> dict[str, str]:
        env = {
            "KVCR_RUN_DIR": str(self._site.run_dir),
            "KVCR_SECRET_FILE": str(self._site.secret),
            "DYN_NAMESPACE": self._namespace,
            "PYTHONUNBUFFERED": "1",
        }
        if Kind.ETCD in servers:
            env |= {
                "ETCD_ENDPOINTS": servers[Kind.ETCD],
                "ETCD_LEASE_TTL": str(LEASE_TTL_S),
                "DYN_DISCOVERY_BACKEND": "etcd",
                "DYN_REQUEST_PLANE": "tcp",
                "DYN_SYSTEM_HOST": self._site.bind,
            }
            if self._site.request_host:
                # Requests go to the one, answers come back to the other.
                for variable in ("DYN_TCP_RPC_HOST", "DYN_TCP_RESPONSE_STREAM_HOST"):
                    env[variable] = self._site.request_host
        if Kind.NATS in servers:
            env |= {"NATS_SERVER": servers[Kind.NATS], "DYN_EVENT_PLANE": "nats"}
        return env

    def _check_pools(self) -> None:
        """Guards make their pools when engines attach, minutes later: too late to hear of a small mount."""
        guard = self._graph.get(Kind.GUARD)
        if guard is None:
            return
        what = f"{self._graph.source}: {guard.kind.value}.pool-bytes"
        pool_bytes = parse_size(guard.params.get("pool-bytes", DEFAULT_POOL_BYTES), what)
        self._site.check_pools(what, self._graph.count(Kind.GUARD), pool_bytes)

    def _guard(self, component: Component, index: int, _served: str | None) -> ProcessPlan:
        name = self._name(Kind.GUARD, index)
        host = self._site.host(name)
        control_port = self._port(component, "control-port", index, CONTROL_PORT)
        metrics_port = self._port(component, "metrics-port", index, METRICS_PORT)
        pool_dir = self._site.pools / name
        params: dict[str, Any] = {
            "pool-bytes": DEFAULT_POOL_BYTES,
            "cluster": "ETCD_ENDPOINTS" in self._env,
            **_without(component.params, "control-port", "metrics-port", "namespace"),
            "name": name,
            "pool-dir": pool_dir,
            "socket": pool_dir / "guard.sock",
            "control": f"tcp://{self._site.bind}:{control_port}",
            "metrics-port": metrics_port,
            "namespace": self._namespace,
            "secret-file": self._site.secret,
        }
        if host != self._site.bind:
            params |= {"advertise": f"{host}:{control_port}", "metrics-host": self._site.bind}
        control = f"tcp://{host}:{control_port}"
        self._controls.append(control)
        metrics = f"http://{host}:{metrics_port}/metrics"
        return self._process(
            component,
            index,
            "kvcr.guard",
            render_flags(params, "guard"),
            ports={"control": control_port, "metrics": metrics_port},
            urls={"socket": str(pool_dir / "guard.sock"), "pool_dir": str(pool_dir)},
            metrics=metrics,
            control=control,
        )

    def _worker(self, component: Component, index: int, served: str | None) -> ProcessPlan:
        assert self._model is not None
        name = self._name(Kind.WORKER, index)
        host = self._site.host(name)
        system_port = self._port(component, "system-port", index, SYSTEM_PORT)
        ranks = self._graph.ranks
        controls = self._controls[index * ranks : (index + 1) * ranks]
        params: dict[str, Any] = {
            "block-size": DEFAULT_BLOCK_SIZE,
            **_without(component.params, "system-port", "topology", "kv-transfer-config", "kv-events-config"),
            "model": self._site.model_path(self._model),
            "served-model-name": served,
            "kv-transfer-config": self._transfer_config(component, index, controls),
            "kv-events-config": _merged(
                component.params.get("kv-events-config"),
                {
                    "enable_kv_cache_events": True,
                    "publisher": "zmq",
                    "topic": "",
                    # vLLM binds TCP on all interfaces or not at all, and these events carry token ids.
                    "endpoint": f"ipc://{self._site.pools}/{name}.{'events' if ranks == 1 else _RANKED}",
                },
            ),
        }
        if self._graph.get(Kind.ROUTER):
            # The router is the model's public face; a worker listed beside it would get its requests past it.
            params.setdefault("endpoint-types", "none")
        return self._process(
            component,
            index,
            "kvcr.vllm.worker_main",
            render_flags(params, "vllm_worker"),
            env={
                "PYTHONHASHSEED": "0",
                "DYN_SYSTEM_PORT": str(system_port),
                **self._devices(component, index),
            },
            ports={"system": system_port},
            urls={"health": f"http://{host}:{system_port}/health"},
            metrics=f"http://{host}:{system_port}/metrics",
            control=controls[0] if controls else None,
        )

    def _transfer_config(self, component: Component, index: int, controls: Sequence[str]) -> Any:
        given = component.params.get("kv-transfer-config")
        engine: dict[str, Any] = {"namespace": self._namespace}
        if controls:
            name = self._guard_stem(index)
            rank = "" if len(controls) == 1 else "-dp{dp_rank}"
            engine |= {
                "name": name,
                "socket": str(self._site.pools / f"{name}{rank}" / "guard.sock"),
                "pool_dir": str(self._site.pools / name),
                # Stock dynamo.vllm reads this list, and publishes that this worker takes hints and where
                # other guards reach its own.
                "secondary_tiers": [
                    {
                        "type": "kvcr",
                        "router_capabilities": ["router_hint"],
                        "control_ports": [int(control.rsplit(":", 1)[1]) for control in controls],
                        "control_advertise_host": self._site.host(name),
                    }
                ],
            }
        return _merged(
            given,
            {
                "kv_connector": "KvcrConnector",
                "kv_connector_module_path": "kvcr.vllm.connector",
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": engine,
            },
        )

    def _router(self, component: Component, index: int, served: str | None) -> ProcessPlan:
        assert self._model is not None
        host = self._site.host(self._name(Kind.ROUTER, index))
        system_port = self._port(component, "system-port", index, SYSTEM_PORT)
        signals_port = self._port(component, "signals-port", index, SIGNALS_PORT)
        worker = self._graph.get(Kind.WORKER)
        block_size = worker.params.get("block-size", DEFAULT_BLOCK_SIZE) if worker else DEFAULT_BLOCK_SIZE
        params: dict[str, Any] = {
            "block-size": block_size,
            **_without(component.params, "model", "served-model-name", "system-port", "namespace"),
            "namespace": self._namespace,
            "model-path": self._site.model_path(self._model),
            "model-name": served,
            "secret-file": self._site.secret,
            "signals-port": signals_port,
        }
        return self._process(
            component,
            index,
            "router_hints",
            render_flags(params, "router"),
            env={"DYN_SYSTEM_PORT": str(system_port)},
            ports={"system": system_port, "signals": signals_port},
            urls={
                "health": f"http://{host}:{system_port}/health",
                "signals": f"http://{host}:{signals_port}/v1/kv/signals",
            },
            metrics=f"http://{host}:{system_port}/metrics",
        )

    def _frontend(self, component: Component, index: int, _served: str | None) -> ProcessPlan:
        bind = str(component.params.get("http-host") or self._site.bind)
        port = self._port(component, "http-port", index, HTTP_PORT, bind)
        host = self._site.host(self._name(Kind.FRONTEND, index)) if bind == "0.0.0.0" else bind
        params = {"router-mode": "round-robin", **component.params, "http-host": bind, "http-port": port}
        base = f"http://{host}:{port}"
        return self._process(
            component,
            index,
            "dynamo.frontend",
            render_flags(params, "frontend"),
            ports={"http": port},
            urls={"openai": f"{base}/v1", "health": f"{base}/health"},
            metrics=f"{base}/metrics",
        )

    def _process(
        self,
        component: Component,
        index: int,
        module: str,
        flags: list[str],
        *,
        ports: Mapping[str, int],
        urls: Mapping[str, str],
        metrics: str,
        env: Mapping[str, str] | None = None,
        control: str | None = None,
    ) -> ProcessPlan:
        kind, service = component.kind, component.service
        own = {
            name: value[index] if isinstance(value, tuple) else value for name, value in service.env.items()
        }
        files = self._topology(kind, index)
        where = {}
        if files:
            folder = str(self._site.topology(self._name(kind, index)))
            where = {"DYN_TOPOLOGY_ENABLED": "true", "DYN_TOPOLOGY_MOUNT_PATH": folder}
            # Without it dynamo.vllm 1.6.1 ends as soon as its engine is up.
            names = [path.rpartition("/")[2] for path in files]
            where["DYN_KV_TRANSFER_DOMAIN"] = "rdma_domain" if "rdma_domain" in names else names[0]
        return ProcessPlan(
            name=self._name(kind, index),
            kind=kind,
            argv=(self._site.python, "-m", module, *flags, *service.args),
            env={**self._env, **where, **(env or {}), **own},
            restart=service.restart,
            start_timeout_s=service.start_timeout_s or START_TIMEOUT_S[kind],
            health_url=urls.get("health"),
            ports=ports,
            urls=urls,
            metrics=metrics,
            control=control,
            files=files,
        )

    def _topology(self, kind: Kind, index: int) -> dict[str, str]:
        """Domains of a worker and its guard, one file each, as Dynamo reads them."""
        worker = self._graph.get(Kind.WORKER)
        if worker is None or kind not in (Kind.GUARD, Kind.WORKER):
            return {}
        given = worker.params.get("topology") or []
        place = f"{self._graph.source}: {Kind.WORKER.value}.topology"
        count = self._graph.count(Kind.WORKER)
        if not isinstance(given, list) or (given and len(given) != count):
            raise ConfigError(
                f"{place} is {given!r}; expected a list with one mapping for each of {count} workers"
            )
        if not given:
            return {}
        domains = given[index // self._graph.ranks if kind is Kind.GUARD else index]
        if not isinstance(domains, Mapping) or not all(
            re.fullmatch(r"[A-Za-z0-9_.-]+", str(name)) for name in domains
        ):
            raise ConfigError(f"{place}[{index}] is {domains!r}; expected e.g. {{rdma_domain: rack-1}}")
        folder = self._site.topology(self._name(kind, index))
        return {str(folder / str(name)): f"{value}\n" for name, value in domains.items()}

    def _devices(self, component: Component, index: int) -> dict[str, str]:
        """What ``ServiceArgs.resources`` means for one engine."""
        env: dict[str, str] = {}
        resources = component.service.resources
        if cpus := resources.get("cpu"):
            env["OMP_NUM_THREADS"] = str(cpus)
        if each := resources.get("gpu"):
            env["CUDA_VISIBLE_DEVICES"] = self._site.devices(
                f"{self._graph.source}: {component.kind.value}",
                each,
                index,
                self._graph.count(component.kind),
            )
        return env

    def _port(self, component: Component, key: str, index: int, usual: int, host: str | None = None) -> int:
        given = component.params.get(key) or 0
        if isinstance(given, bool) or not isinstance(given, int):
            raise ConfigError(
                f"{self._graph.source}: {component.kind.value}.{key} is {given!r}; expected a port"
            )
        return self._site.port(usual, given, index, f"{component.kind.value}.{key}", host)

    def _name(self, kind: Kind, index: int) -> str:
        if kind is Kind.GUARD:
            worker, rank = divmod(index, self._graph.ranks)
            return self._guard_stem(worker) + (f"-dp{rank}" if self._graph.ranks > 1 else "")
        if kind is Kind.WORKER:
            return f"worker-{index}"
        stem = kind.value.lower()
        return stem if self._graph.count(kind) <= 1 else f"{stem}-{index}"

    def _guard_stem(self, worker: int) -> str:
        """Name of the guard of a worker, or what the names of the guards of its ranks begin with."""
        etcd = self._graph.get(Kind.ETCD)
        if etcd is None or etcd.params.get("address"):
            # Names of guards are unique in a namespace, and an etcd of somebody else may know other hosts.
            return f"{self._site.run_id}-guard-{worker}"
        return f"guard-{worker}"


def _merged(given: Any, defaults: Mapping[str, Any]) -> Any:
    """A JSON setting over its defaults, level by level. False switches it off; another connector is kept."""
    if given is False:
        return None
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except ValueError as error:
            raise ConfigError(f"{given!r} is not JSON: {error}") from error
    given = {} if given is None else given
    if not isinstance(given, Mapping):
        raise ConfigError(f"{given!r} is no mapping of names to values; write one, or its JSON, or false")
    connector = given.get("kv_connector")
    if connector is not None and connector != defaults.get("kv_connector"):
        return given
    merged = dict(defaults)
    for key, value in given.items():
        both_maps = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = _merged(value, merged[key]) if both_maps else value
    return merged


def _without(params: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in params.items() if key not in keys}
