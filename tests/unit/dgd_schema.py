# SPDX-License-Identifier: Apache-2.0
"""What a DynamoGraphDeployment ``nvidia.com/v1beta1`` may contain, for checking manifests offline.

Distilled from the operator's Go types (deploy/operator/api/v1beta1 of ai-dynamo/dynamo); pod templates are
checked against Kubernetes' own schemas, strictly. No API server and no webhook is involved.
"""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import jsonschema

_QUANTITY = r"^(\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))(([KMGTPE]i)|[numkMGTPE]|([eE](\+|-)?[0-9]+))?$"
_NAME = {
    "type": "string",
    "minLength": 1,
    "maxLength": 63,
    "pattern": "^[A-Za-z0-9]([-A-Za-z0-9]*[A-Za-z0-9])?$",
}
MAX_COMPONENTS = 25


def findings(manifest: dict[str, Any]) -> list[str]:
    """What is wrong with it, a line each; empty when nothing is."""
    validator = jsonschema.Draft202012Validator(_schema())
    found = [
        f"{'/'.join(map(str, e.absolute_path))}: {e.message[:160]}" for e in validator.iter_errors(manifest)
    ]
    components = manifest.get("spec", {}).get("components", [])
    names = [str(component.get("name", "")).lower() for component in components]
    if len(set(names)) != len(names):
        found.append("component names must be unique, whatever their case")
    for component in components:
        pod = (component.get("podTemplate") or {}).get("spec") or {}
        main = [c for c in pod.get("containers", []) if c.get("name") == "main"]
        if not main or not main[0].get("image"):
            found.append(f"{component.get('name')}: needs a container `main` with an image")
        elif not re.search(r":v?\d+\.\d+\.\d+", main[0]["image"]) and not component.get(
            "runtimeVersionOverride"
        ):
            found.append(f"{component['name']}: the image's tag is no version; set runtimeVersionOverride")
        mounted = {
            m["name"] for container in pod.get("containers", []) for m in container.get("volumeMounts", [])
        }
        missing = mounted - {volume["name"] for volume in pod.get("volumes", [])}
        if missing:
            found.append(f"{component['name']}: mounts volumes that are not there: {sorted(missing)}")
    return found


def _schema() -> dict[str, Any]:
    definitions = _kubernetes_definitions()
    core = {"$ref": "#/$defs/io.k8s.api.core.v1.PodTemplateSpec"}
    component = {
        "type": "object",
        "additionalProperties": False,
        "required": ["name"],
        "properties": {
            "name": _NAME,
            "type": {"enum": ["frontend", "worker", "prefill", "decode", "planner", "epp"]},
            "replicas": {"type": "integer", "minimum": 0},
            "minAvailable": {"type": "integer", "minimum": 1},
            "runtimeVersionOverride": {
                "type": "string",
                "pattern": r"^(0|[1-9][0-9]{0,3})(\.(0|[1-9][0-9]{0,3})){2}$",
            },
            "globalDynamoNamespace": {"type": "boolean"},
            "podTemplate": core,
            "multinode": {"type": "object"},
            "sharedMemorySize": {"anyOf": [{"type": "integer"}, {"type": "string", "pattern": _QUANTITY}]},
            "modelRef": {"type": "object", "required": ["name"]},
            "topologyConstraint": {"type": "object"},
            "experimental": {"type": "object"},
        },
    }
    return {
        "$defs": definitions,
        "type": "object",
        "required": ["apiVersion", "kind", "metadata", "spec"],
        "additionalProperties": False,
        "properties": {
            "apiVersion": {"const": "nvidia.com/v1beta1"},
            "kind": {"const": "DynamoGraphDeployment"},
            "metadata": {"$ref": "#/$defs/io.k8s.apimachinery.pkg.apis.meta.v1.ObjectMeta"},
            "spec": {
                "type": "object",
                "additionalProperties": False,
                "properties": {
                    "annotations": {"type": "object"},
                    "labels": {"type": "object"},
                    "priorityClassName": {"type": "string"},
                    "backendFramework": {"enum": ["sglang", "vllm", "trtllm"]},
                    "env": {"type": "array"},
                    "topologyConstraint": {"type": "object"},
                    "experimental": {"type": "object"},
                    "components": {"type": "array", "maxItems": MAX_COMPONENTS, "items": component},
                },
            },
        },
    }


def _kubernetes_definitions() -> dict[str, Any]:
    # Only its data is used: importing it needs a package for Pythons before 3.9.
    spec = importlib.util.find_spec("kubernetes_validate")
    assert spec is not None
    assert spec.origin is not None
    root = Path(spec.origin).parent
    newest = sorted(root.glob("**/*local*/_definitions.json"))[-1]
    definitions: dict[str, Any] = json.loads(newest.read_text())["$defs"]
    _forbid_unknown(definitions)
    return definitions


def _forbid_unknown(schema: Any) -> None:
    """As the API server does with strict field validation."""
    if isinstance(schema, dict):
        if "properties" in schema and "additionalProperties" not in schema:
            schema["additionalProperties"] = False
        for value in schema.values():
            _forbid_unknown(value)
    elif isinstance(schema, list):
        for value in schema:
            _forbid_unknown(value)
