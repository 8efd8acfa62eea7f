# SPDX-License-Identifier: Apache-2.0
"""A graph as a DynamoGraphDeployment (``nvidia.com/v1beta1``) for Dynamo's operator.

The guard is a container beside the engine in each worker's pod; both mount one memory-backed volume, so
the pool outlives the engine's container and ends with the pod. etcd and NATS are the platform's.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kvcr.graph.config import Component, Graph, Kind, ServiceArgs
from kvcr.graph.plan import ProcessPlan
from kvcr.graph.planning import make_plan
from kvcr.graph.render.compose import POOLS, RUN, USER
from kvcr.graph.render.site import CACHE, ContainerSite, pool_bytes, tmpfs_mib

API_VERSION = "nvidia.com/v1beta1"
RUNTIME_VERSION = "1.6.1"
SECRET = "kvcr"
"""Kubernetes Secret with the deployment's secret under the key ``secret``."""
MODELS_CLAIM = "kvcr-models"
"""PersistentVolumeClaim mounted at ``/models``."""
_PLATFORM = {Kind.ETCD: "http://dynamo-platform-etcd:2379", Kind.NATS: "nats://dynamo-platform-nats:4222"}
"""Services of Dynamo's Helm chart under its usual release name."""


class _PodSite(ContainerSite):
    """Every process is reached at the address of its own pod."""

    def __init__(self) -> None:
        super().__init__(POOLS, f"{RUN}/secret")
        self.run_id = "$(POD_NAME)"

    def host(self, name: str) -> str:
        return "$(POD_IP)"


def render_dgd(graph: Graph, image: str) -> dict[str, Any]:
    """The manifest. Raises ConfigError as planning does."""
    replicas = graph.count(Kind.WORKER)
    plan = make_plan(_one_worker(graph), _PodSite(), {})
    by_kind = {process.kind: process for process in plan.processes}
    components = []
    if Kind.FRONTEND in by_kind:
        components.append(_component("Frontend", 1, [_main(by_kind[Kind.FRONTEND], image)], "frontend"))
    if Kind.ROUTER in by_kind:
        components.append(_component("Router", 1, [_main(by_kind[Kind.ROUTER], image)]))
    if Kind.WORKER in by_kind:
        containers = [_main(by_kind[Kind.WORKER], image, _gpus(graph))]
        volumes = []
        if Kind.GUARD in by_kind:
            containers.append(_container("guard", by_kind[Kind.GUARD], image))
            size = tmpfs_mib(pool_bytes(graph))
            volumes = [{"name": "pools", "emptyDir": {"medium": "Memory", "sizeLimit": f"{size}Mi"}}]
            containers[1]["resources"] = {"requests": {"memory": f"{size + 512}Mi"}}
        components.append(_component("VllmWorker", replicas, containers, "worker", volumes))
    return {
        "apiVersion": API_VERSION,
        "kind": "DynamoGraphDeployment",
        "metadata": {"name": f"kvcr-{graph.name.replace('_', '-')}"},
        "spec": {"backendFramework": "vllm", "components": components},
    }


def _one_worker(graph: Graph) -> Graph:
    """One pod's worth of the graph, with the platform's etcd and NATS where it has its own."""
    components = dict(graph.components)
    for kind, address in _PLATFORM.items():
        given = graph.get(kind)
        if given is None or not given.params.get("address"):
            components[kind] = Component(kind, {"address": address}, ServiceArgs())
    for kind in (Kind.WORKER, Kind.GUARD):
        if (component := graph.get(kind)) is not None:
            # Domains of a pod come from the labels of its node, through the operator.
            params = {key: value for key, value in component.params.items() if key != "topology"}
            components[kind] = Component(kind, params, replace(component.service, workers=1))
    return Graph(graph.name, graph.source, components)


def _component(
    name: str,
    replicas: int,
    containers: list[dict[str, Any]],
    kind: str | None = None,
    volumes: list[dict[str, Any]] | None = None,
) -> dict[str, Any]:
    return {
        "name": name,
        **({"type": kind} if kind else {}),
        "replicas": replicas,
        "runtimeVersionOverride": RUNTIME_VERSION,
        "podTemplate": {
            "spec": {
                "securityContext": {"runAsNonRoot": True, "runAsUser": USER, "fsGroup": USER},
                "containers": containers,
                "volumes": [
                    {"name": "secret", "secret": {"secretName": SECRET, "defaultMode": 0o440}},
                    {
                        "name": "models",
                        "persistentVolumeClaim": {"claimName": MODELS_CLAIM, "readOnly": True},
                    },
                    {"name": "cache", "emptyDir": {}},
                    *(volumes or []),
                ],
            }
        },
    }


def _main(process: ProcessPlan, image: str, gpus: int = 0) -> dict[str, Any]:
    container = _container("main", process, image)
    if gpus:
        container["resources"] = {"limits": {"nvidia.com/gpu": str(gpus)}}
    return container


def _container(name: str, process: ProcessPlan, image: str) -> dict[str, Any]:
    mounts = [{"name": "secret", "mountPath": RUN, "readOnly": True}]
    if process.kind in (Kind.GUARD, Kind.WORKER):
        mounts.append({"name": "pools", "mountPath": POOLS})
    if process.kind in (Kind.WORKER, Kind.ROUTER):
        mounts += [
            {"name": "models", "mountPath": "/models", "readOnly": True},
            {"name": "cache", "mountPath": str(CACHE)},
        ]
    return {
        "name": name,
        "image": image,
        "command": list(process.argv[:1]),
        "args": list(process.argv[1:]),
        "env": [
            _field("POD_NAME", "metadata.name"),
            _field("POD_IP", "status.podIP"),
            # Chosen by the device plug-in.
            *({"name": k, "value": v} for k, v in process.env.items() if k != "CUDA_VISIBLE_DEVICES"),
        ],
        "ports": [{"name": port, "containerPort": number} for port, number in process.ports.items()],
        "readinessProbe": _probe(process),
        "volumeMounts": mounts,
    }


def _probe(process: ProcessPlan) -> dict[str, Any]:
    kind = "system" if "system" in process.ports else "http" if "http" in process.ports else "metrics"
    path = "/metrics" if kind == "metrics" else "/health"
    return {"httpGet": {"path": path, "port": kind}, "periodSeconds": 10, "failureThreshold": 90}


def _field(name: str, path: str) -> dict[str, Any]:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def _gpus(graph: Graph) -> int:
    worker = graph.get(Kind.WORKER)
    return worker.service.resources.get("gpu", 0) if worker else 0
