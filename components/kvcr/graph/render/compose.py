# SPDX-License-Identifier: Apache-2.0
"""A graph, or several as profiles, as one file for docker compose."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import PurePosixPath
from typing import Any

from kvcr.errors import ConfigError
from kvcr.graph.config import Graph, Kind
from kvcr.graph.plan import Plan, ProcessPlan
from kvcr.graph.planning import make_plan
from kvcr.graph.render.site import CACHE, ContainerSite, pool_bytes, tmpfs_mib
from kvcr.graph.site import ETCD_PORT

Service = dict[str, Any]

IMAGE = "${KVCR_IMAGE:-dynamo-kvcr:dev}"
ETCD_IMAGE = "quay.io/coreos/etcd:v3.5.21"
NATS_IMAGE = "nats:2.11.4-alpine"
NATS_EXPORTER_IMAGE = "natsio/prometheus-nats-exporter:0.17.3"
PROMETHEUS_IMAGE = "prom/prometheus:v2.55.1"
GRAFANA_IMAGE = "grafana/grafana:11.6.0"

POOLS = "/pools"
RUN = "/run/kvcr"
"""Volume with what ``init`` makes once: the deployment's secret, users of NATS, Grafana's password."""
USER = 10001
"""of the image; pools belong to its group"""
NETWORK = "kvcr"
_HEALTH_SECONDS = {Kind.GUARD: 60, Kind.WORKER: 900, Kind.ROUTER: 900, Kind.FRONTEND: 120}
"""A worker loads weights first, and the router is ready with the first worker."""

_CONFINED: Service = {
    "cap_drop": ["ALL"],
    "security_opt": ["no-new-privileges:true"],
    "read_only": True,
    "pids_limit": 4096,
    "logging": {"driver": "json-file", "options": {"max-size": "10m", "max-file": "3"}},
}
"""What every service is, unless it says otherwise."""
_SCRATCH = "/tmp:exec,mode=1777,size=1g"
"""The home too, see the Dockerfile. ``exec`` for what Triton compiles."""
_MEMORY = {Kind.ROUTER: "4g", Kind.FRONTEND: "4g"}
"""Workers need what their model needs, and pages of a pool count for whoever touches them first."""


def render_compose(graphs: Mapping[str, Graph]) -> dict[str, Any]:
    """The document. ``graphs`` maps profile names to graphs; the first profile's services keep their names.

    A service that is the same in every graph is in no profile. Raises ConfigError for a graph whose etcd
    and NATS are not its own: there is nothing to bring up then that ``kvcr serve`` would not.
    """
    plans = {profile: _plan(graph) for profile, graph in graphs.items()}
    rendered = {profile: _services(plan) for profile, plan in plans.items()}
    first = next(iter(rendered))
    services: dict[str, Service] = {"init": _init(plans[first]), "etcd": _etcd(), "nats": _nats()}
    for name in dict.fromkeys(name for found in rendered.values() for name in found):
        variants = {profile: found[name] for profile, found in rendered.items() if name in found}
        if len(variants) == len(rendered) and all(v == variants[first] for v in variants.values()):
            services[name] = variants[first]
            continue
        for profile, service in variants.items():
            services[_variant(name, profile, first)] = _in_profile(service, name, profile, first)
    services |= _monitoring()
    return {
        "name": "kvcr",
        "services": {name: {**service, **_CONFINED, **service} for name, service in services.items()},
        "networks": {NETWORK: {}},
        **({"configs": configs} if (configs := _configs(plans.values())) else {}),
        "volumes": {
            "pools": {
                "driver_opts": _tmpfs(
                    max(graph.count(Kind.GUARD) * pool_bytes(graph) for graph in graphs.values())
                )
            },
            **{name: {} for name in ("run", "cache", "etcd", "nats", "prometheus", "grafana")},
        },
    }


def render_prometheus(graphs: Mapping[str, Graph]) -> dict[str, Any]:
    """What Prometheus scrapes in that deployment; profiles answer under the same names."""
    jobs: dict[str, list[str]] = {}
    for graph in graphs.values():
        for process in _plan(graph).processes:
            assert process.metrics is not None
            target = process.metrics.removeprefix("http://").removesuffix("/metrics")
            targets = jobs.setdefault(process.kind.role, [])
            if target not in targets:
                targets.append(target)
    jobs |= {"etcd": [f"etcd:{ETCD_PORT}"], "nats": ["nats-exporter:7777"]}
    return {
        "global": {"scrape_interval": "5s", "evaluation_interval": "5s"},
        "rule_files": ["/etc/prometheus/rules/*.yml"],
        "scrape_configs": [
            {"job_name": job, "static_configs": [{"targets": sorted(targets)}]}
            for job, targets in jobs.items()
        ],
    }


def _plan(graph: Graph) -> Plan:
    for kind in (Kind.ETCD, Kind.NATS):
        component = graph.get(kind)
        if component is None or component.params.get("address"):
            raise ConfigError(
                f"{graph.source}: a compose file brings its own {kind.value}; add {kind.value}: {{}}"
            )
    return make_plan(graph, ContainerSite(POOLS, f"{RUN}/secret"), {})


def _services(plan: Plan) -> dict[str, Service]:
    return {process.name: _service(process) for process in plan.processes}


def _service(process: ProcessPlan) -> Service:
    service: Service = {
        "image": IMAGE,
        "command": list(process.argv),
        "environment": _environment(process),
        "restart": "unless-stopped",
        "init": True,
        "networks": [NETWORK],
        "volumes": [f"run:{RUN}:ro"],
        "tmpfs": [_SCRATCH],
        "depends_on": {
            "init": {"condition": "service_completed_successfully"},
            "etcd": {"condition": "service_healthy"},
            "nats": {"condition": "service_healthy"},
        },
        "healthcheck": {
            "test": ["CMD", "python", "-m", "kvcr.graph.healthy", _local(process)],
            "interval": "10s",
            "timeout": "5s",
            "retries": 3,
            "start_period": f"{_HEALTH_SECONDS[process.kind]}s",
        },
    }
    if process.kind in (Kind.GUARD, Kind.WORKER):
        service["volumes"].append(f"pools:{POOLS}")
    if process.kind in (Kind.WORKER, Kind.ROUTER):
        service["volumes"] += [f"cache:{CACHE}", "${KVCR_MODELS:-./models}:/models:ro"]
    if process.kind is Kind.WORKER:
        guard = process.name.replace("worker", "guard")
        service["depends_on"][guard] = {"condition": "service_healthy"}
        service["shm_size"] = "1gb"
        if "CUDA_VISIBLE_DEVICES" in process.env:
            count = len(process.env["CUDA_VISIBLE_DEVICES"].split(","))
            device = {"driver": "nvidia", "count": count, "capabilities": ["gpu"]}
            service["deploy"] = {"resources": {"reservations": {"devices": [device]}}}
            # The pool is pinned for copies to and from the GPU.
            service["ulimits"] = {"memlock": -1}
    if process.kind in _MEMORY:
        service["mem_limit"] = _MEMORY[process.kind]
    if process.files:
        service["configs"] = [
            {"source": _config_name(process.name, path), "target": path} for path in process.files
        ]
    if process.kind is Kind.FRONTEND:
        service["ports"] = [f"127.0.0.1:${{KVCR_HTTP_PORT:-8000}}:{process.ports['http']}"]
    return service


def _configs(plans: Iterable[Plan]) -> dict[str, Any]:
    return {
        _config_name(process.name, path): {"content": text}
        for plan in plans
        for process in plan.processes
        for path, text in process.files.items()
    }


def _config_name(process: str, path: str) -> str:
    return f"{process}-{PurePosixPath(path).name}"


def _environment(process: ProcessPlan) -> dict[str, str]:
    # GPUs are counted by the reservation.
    env = {name: value for name, value in process.env.items() if name != "CUDA_VISIBLE_DEVICES"}
    return {**env, "KVCR_ROLE": process.kind.role}


def _local(process: ProcessPlan) -> str:
    """The address a health check inside the container asks."""
    assert process.metrics is not None
    url = process.health_url or process.metrics
    return url.replace(f"//{process.name}:", "//127.0.0.1:")


def _variant(name: str, profile: str, first: str) -> str:
    return name if profile == first else f"{name}-{profile}"


def _in_profile(service: Service, name: str, profile: str, first: str) -> Service:
    depends = {
        (_variant(other, profile, first) if other.startswith("guard") else other): condition
        for other, condition in service["depends_on"].items()
    }
    networks: Any = [NETWORK] if profile == first else {NETWORK: {"aliases": [name]}}
    return {"profiles": [profile], **service, "depends_on": depends, "networks": networks}


def _init(plan: Plan) -> Service:
    """Runs once: makes secrets that do not exist yet, and prepares the model.

    New volumes belong to root; this hands them to the one user that everything else runs as.
    """
    volumes = ("etcd", "nats")
    command = ["python", "-m", "kvcr.graph.bootstrap", "--run-dir", RUN, "--namespace", plan.namespace]
    for volume in volumes:
        command += ["--hand-over", f"/volumes/{volume}"]
    if plan.model:
        command += ["--model", str(plan.model)]
    return {
        "image": IMAGE,
        "build": {"context": "../..", "dockerfile": "deploy/compose/Dockerfile"},
        "command": command,
        "user": "0:0",
        "cap_add": ["CHOWN", "DAC_OVERRIDE"],
        "environment": {"KVCR_OWNER": str(USER)},
        "volumes": [
            f"run:{RUN}",
            f"cache:{CACHE}",
            *(f"{volume}:/volumes/{volume}" for volume in volumes),
            "${KVCR_MODELS:-./models}:/models:ro",
        ],
        "tmpfs": [_SCRATCH],
        "networks": [NETWORK],
    }


def _etcd() -> Service:
    url = f"http://0.0.0.0:{ETCD_PORT}"
    return {
        "image": ETCD_IMAGE,
        "command": [
            "/usr/local/bin/etcd",
            "--name=kvcr",
            "--data-dir=/etcd-data",
            f"--listen-client-urls={url}",
            f"--advertise-client-urls=http://etcd:{ETCD_PORT}",
            "--auto-compaction-retention=1h",
        ],
        "user": f"{USER}:{USER}",
        "mem_limit": "1g",
        "restart": "unless-stopped",
        "networks": [NETWORK],
        "volumes": ["etcd:/etcd-data"],
        "depends_on": {"init": {"condition": "service_completed_successfully"}},
        "healthcheck": _probe(["etcdctl", f"--endpoints=http://127.0.0.1:{ETCD_PORT}", "endpoint", "health"]),
    }


def _nats() -> Service:
    return {
        "image": NATS_IMAGE,
        "command": ["--config", "/etc/nats/nats.conf"],
        "user": f"{USER}:{USER}",
        "mem_limit": "1g",
        "restart": "unless-stopped",
        "networks": [NETWORK],
        "volumes": ["nats:/data", f"run:{RUN}:ro", "./nats.conf:/etc/nats/nats.conf:ro"],
        "depends_on": {"init": {"condition": "service_completed_successfully"}},
        "healthcheck": _probe(
            ["wget", "-q", "-O", "-", "http://127.0.0.1:8222/healthz?js-enabled-only=true"]
        ),
    }


def _monitoring() -> dict[str, Service]:
    common = {"profiles": ["metrics"], "restart": "unless-stopped", "networks": [NETWORK]}
    return {
        "nats-exporter": {
            "image": NATS_EXPORTER_IMAGE,
            "command": ["-varz", "-connz", "-subz", "-jsz=all", "http://nats:8222"],
            "user": f"{USER}:{USER}",
            "mem_limit": "256m",
            **common,
        },
        "prometheus": {
            "image": PROMETHEUS_IMAGE,
            "command": [
                "--config.file=/etc/prometheus/prometheus.yml",
                "--storage.tsdb.path=/prometheus",
                "--storage.tsdb.retention.time=15d",
            ],
            "volumes": [
                "./prometheus/prometheus.yml:/etc/prometheus/prometheus.yml:ro",
                "../grafana/alerts.yml:/etc/prometheus/rules/kvcr.yml:ro",
                "prometheus:/prometheus",
            ],
            "mem_limit": "2g",
            "ports": ["127.0.0.1:${KVCR_PROMETHEUS_PORT:-9090}:9090"],
            "healthcheck": _probe(["wget", "-q", "-O", "-", "http://127.0.0.1:9090/-/ready"]),
            **common,
        },
        "grafana": {
            "image": GRAFANA_IMAGE,
            "environment": {
                "GF_SECURITY_ADMIN_PASSWORD__FILE": f"{RUN}/grafana-password",
                "GF_USERS_ALLOW_SIGN_UP": "false",
                "GF_ANALYTICS_REPORTING_ENABLED": "false",
            },
            "user": f"{USER}:{USER}",
            "mem_limit": "1g",
            # Untried: where the real one writes besides its volume.
            "read_only": False,
            "volumes": [
                f"run:{RUN}:ro",
                "grafana:/var/lib/grafana",
                "../grafana/provisioning:/etc/grafana/provisioning:ro",
                "../grafana/dashboards:/etc/grafana/kvcr:ro",
            ],
            "ports": ["127.0.0.1:${KVCR_GRAFANA_PORT:-3001}:3000"],
            "depends_on": {
                "init": {"condition": "service_completed_successfully"},
                "prometheus": {"condition": "service_healthy"},
            },
            "healthcheck": _probe(["wget", "-q", "-O", "-", "http://127.0.0.1:3000/api/health"]),
            **common,
        },
    }


def _probe(command: list[str]) -> dict[str, Any]:
    return {
        "test": ["CMD", *command],
        "interval": "3s",
        "timeout": "3s",
        "retries": 20,
        "start_period": "5s",
    }


def _tmpfs(size: int) -> dict[str, str]:
    return {
        "type": "tmpfs",
        "device": "tmpfs",
        "o": f"size={tmpfs_mib(size)}m,mode=0770,uid={USER},gid={USER}",
    }
