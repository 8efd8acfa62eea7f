# SPDX-License-Identifier: Apache-2.0
"""What a graph file says, checked: components, their flags, how many processes of each.

The shape is the one of ``dynamo serve``: component names at the top, each with its command line flags
in kebab case, shared ones in ``Common`` and taken over by name with ``common-configs``, and how to run
it in ``ServiceArgs``. Everything unknown is an error that names the nearest known word; nothing is
looked up on the network.
"""

from __future__ import annotations

import enum
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any

from kvcr.config import cache_size
from kvcr.errors import ConfigError
from kvcr.sources import meant, nearest

Value = Any
"""A YAML value: scalar, list or mapping."""

SERVICE_ARGS = "ServiceArgs"
COMMON = "Common"
COMMON_CONFIGS = "common-configs"
SWITCH = "kvcr"
"""``kvcr: off`` at the top of a graph: the same deployment without guards and connector."""


class Kind(enum.StrEnum):
    """The components a graph may have, by their name in the file."""

    ETCD = "Etcd"
    NATS = "Nats"
    GUARD = "Guard"
    WORKER = "VllmWorker"
    ROUTER = "Router"
    FRONTEND = "Frontend"

    @property
    def role(self) -> str:
        """What it is to others: its user of NATS, its job in Prometheus."""
        return "worker" if self is Kind.WORKER else self.value.lower()


class Restart(enum.StrEnum):
    """What happens when a process of a component ends on its own."""

    NO = "no"
    ON_FAILURE = "on-failure"
    ALWAYS = "always"


@dataclass(frozen=True)
class Schema:
    """The keys one component understands beside ``ServiceArgs`` and ``common-configs``."""

    table: str | None
    """Name of the table in ``flags/`` with the component's own command line flags."""
    extra: frozenset[str] = frozenset()
    """Keys that are the launcher's: it turns them into flags, environment or ports."""
    reserved: Mapping[str, str] = field(default_factory=dict)
    """Flags a graph may not set, each with the reason."""


_OURS = "the launcher chooses it"
SCHEMAS: dict[Kind, Schema] = {
    Kind.ETCD: Schema(None, frozenset({"address", "port"})),
    Kind.NATS: Schema(None, frozenset({"address", "port", "config"})),
    Kind.GUARD: Schema(
        "guard",
        frozenset({"control-port", "metrics-port"}),
        {
            "name": _OURS,
            "pool-dir": _OURS,
            "socket": _OURS,
            "secret-file": _OURS,
            "control": "use control-port: the port of the first guard, the others follow",
        },
    ),
    Kind.WORKER: Schema("vllm_worker", frozenset({"system-port", "topology"})),
    Kind.ROUTER: Schema(
        "router",
        frozenset({"model", "served-model-name", "system-port"}),
        {"model-path": "use model", "model-name": "use served-model-name", "secret-file": _OURS},
    ),
    Kind.FRONTEND: Schema("frontend"),
}


@dataclass(frozen=True)
class ServiceArgs:
    """How a component is run, as opposed to what it is told."""

    workers: int | None = None
    """Number of processes; None: one, and for Guard as many as there are workers."""
    resources: Mapping[str, int] = field(default_factory=dict)
    """Per process: ``gpu`` devices of its own, ``cpu`` threads for the engine."""
    restart: Restart = Restart.NO
    env: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)
    """Environment; a list gives each process its own value, in order."""
    args: tuple[str, ...] = ()
    """Appended to the command line unchecked, for flags newer than our tables."""
    start_timeout_s: float | None = None


@dataclass(frozen=True)
class Component:
    """One top-level entry of the graph file, with what it takes from ``Common`` merged in."""

    kind: Kind
    params: Mapping[str, Value]
    service: ServiceArgs


@dataclass(frozen=True)
class Graph:
    """A checked graph file."""

    name: str
    source: str
    components: Mapping[Kind, Component]

    def get(self, kind: Kind) -> Component | None:
        """The component of that kind, or None when the graph does not have one."""
        return self.components.get(kind)

    def count(self, kind: Kind) -> int:
        """Number of processes of that kind."""
        component = self.components.get(kind)
        if component is None:
            return 0
        if component.service.workers is not None:
            return component.service.workers
        return max(1, self.count(Kind.WORKER) * self.ranks) if kind is Kind.GUARD else 1

    @property
    def ranks(self) -> int:
        """Data-parallel ranks of each worker: engines of one server, with a guard each."""
        worker = self.components.get(Kind.WORKER)
        size = worker.params.get("data-parallel-size", 1) if worker is not None else 1
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ConfigError(
                f"{self.source}: data-parallel-size is {size!r}; expected a whole number from 1"
            )
        return size


def load_graph(path: Path, overrides: Iterable[tuple[str, str]] = ()) -> tuple[Graph, list[str]]:
    """Read and check a graph file; returns it and a line for everything a legacy file had in vain.

    ``overrides`` are pairs of a dotted name and YAML text, ``("VllmWorker.ServiceArgs.workers", "1")``;
    they win over the file. Raises ConfigError.
    """
    from kvcr.graph import legacy

    document = _read_yaml(path)
    size_notes = _take_cache_size(document, os.environ)
    for dotted, text in overrides:
        _override(document, dotted, text)
    notes: list[str] = []
    if legacy.is_legacy(document):
        document, notes = legacy.translate(document, count_gpus())
    notes = [*size_notes, *notes]
    return parse_graph(document, name=path.stem, source=str(path)), notes


def _take_cache_size(document: dict[str, Value], environment: Mapping[str, str]) -> list[str]:
    """The environment's size of a pool over the file's; the command line goes over both."""
    given = cache_size(environment)
    guard = document.get(Kind.GUARD.value)
    if given is None or not isinstance(guard, dict):
        return []
    name, size = given
    guard["pool-bytes"] = size
    return [f"{name}: each worker's pool has {size / 10**9:g} GB"]


def count_gpus() -> int:
    """NVIDIA GPUs that a process on this machine can open."""
    return len([path for path in Path("/dev").glob("nvidia*") if path.name[6:].isdigit()])


def parse_graph(document: Mapping[str, Value], *, name: str, source: str) -> Graph:
    """Check a graph that is already in memory. Raises ConfigError, naming key, place and nearest name."""
    known = [kind.value for kind in Kind] + [COMMON, SWITCH]
    for key in document:
        if key not in known:
            raise ConfigError(f"{source}: unknown component {key!r}{nearest(str(key), known)}")
    common = _mapping(document.get(COMMON), COMMON, source)
    taken: set[str] = set()
    components: dict[Kind, Component] = {}
    for kind in Kind:
        if kind.value in document:
            body = _mapping(document[kind.value], kind.value, source)
            components[kind] = _component(kind, body, common, taken, source)
    unused = sorted(set(common) - taken)
    if unused:
        raise ConfigError(
            f"{source}: {COMMON}.{unused[0]} is taken by no component; "
            f"name it in the {COMMON_CONFIGS} of those that should have it, or remove it"
        )
    graph = Graph(name, source, components)
    _check_counts(graph)
    return graph if _switched_on(document, source) else _without_kvcr(graph)


def known_flags(table: str) -> frozenset[str]:
    """The option strings of a component, with their leading dashes."""
    text = resources.files("kvcr.graph").joinpath("flags", f"{table}.txt").read_text()
    return frozenset(text.split())


def render_flags(params: Mapping[str, Value], table: str) -> list[str]:
    """Command line for checked parameters: mappings become JSON, lists several values, booleans switches."""
    flags = known_flags(table)
    rendered: list[str] = []
    for key, value in params.items():
        flag = f"--{key}"
        if value is None:
            continue
        if isinstance(value, bool):
            off = f"--no-{key}"
            if value or off in flags:
                rendered.append(flag if value else off)
        elif isinstance(value, Mapping):
            rendered += [flag, json.dumps(value)]
        elif isinstance(value, list):
            rendered += [flag, *(str(item) for item in value)]
        else:
            rendered += [flag, str(value)]
    return rendered


def _switched_on(document: Mapping[str, Value], source: str) -> bool:
    # YAML reads a bare `off` as false, and `on` as true.
    wanted = document.get(SWITCH, True)
    if not isinstance(wanted, bool):
        raise ConfigError(f"{source}: {SWITCH} is {wanted!r}; expected on or off")
    return wanted


def _without_kvcr(graph: Graph) -> Graph:
    """The same graph as a baseline: no guards, no KV connector, everything else as it is."""
    components = dict(graph.components)
    components.pop(Kind.GUARD, None)
    worker = components.get(Kind.WORKER)
    if worker is not None:
        params = {**worker.params, "kv-transfer-config": False}
        components[Kind.WORKER] = replace(worker, params=params)
    return replace(graph, components=components)


def _component(
    kind: Kind, body: Mapping[str, Value], common: Mapping[str, Value], taken: set[str], source: str
) -> Component:
    place = kind.value
    params: dict[str, Value] = {}
    for key in _list(body.get(COMMON_CONFIGS), f"{place}.{COMMON_CONFIGS}", source):
        if key not in common:
            raise ConfigError(
                f"{source}: {place}.{COMMON_CONFIGS} names {key!r}, which {COMMON} does not have"
                f"{nearest(str(key), common)}"
            )
        taken.add(key)
        params[key] = common[key]
    params.update({key: value for key, value in body.items() if key not in (SERVICE_ARGS, COMMON_CONFIGS)})
    _check_keys(kind, params, source)
    service = _service_args(
        _mapping(body.get(SERVICE_ARGS), f"{place}.{SERVICE_ARGS}", source), place, source
    )
    return Component(kind, params, service)


def _check_keys(kind: Kind, params: Mapping[str, Value], source: str) -> None:
    schema = SCHEMAS[kind]
    flags = {flag.removeprefix("--") for flag in known_flags(schema.table)} if schema.table else set()
    known = sorted((flags | schema.extra) - set(schema.reserved))
    for key in params:
        if key in schema.reserved and key not in schema.extra:
            raise ConfigError(f"{source}: {kind.value}.{key} cannot be set here: {schema.reserved[key]}")
        if key not in known:
            hint = meant(str(key), [*known, SERVICE_ARGS, COMMON_CONFIGS])
            raise ConfigError(
                f"{source}: unknown key {kind.value}.{key}{hint} (flags newer than this release "
                f"go to {kind.value}.{SERVICE_ARGS}.args)"
            )


def _service_args(body: Mapping[str, Value], component: str, source: str) -> ServiceArgs:
    place = f"{component}.{SERVICE_ARGS}"
    known = ["workers", "resources", "restart", "env", "args", "start-timeout-s"]
    for key in body:
        if key not in known:
            raise ConfigError(f"{source}: unknown key {place}.{key}{nearest(str(key), known)}")
    service = ServiceArgs(
        resources=_mapping(body.get("resources"), f"{place}.resources", source),
        env=_environment(_mapping(body.get("env"), f"{place}.env", source)),
        args=tuple(str(item) for item in _list(body.get("args"), f"{place}.args", source)),
    )
    for key in service.resources:
        if key not in ("gpu", "cpu"):
            raise ConfigError(f"{source}: unknown key {place}.resources.{key}; known: gpu, cpu")
        amount = service.resources[key]
        if isinstance(amount, bool) or not isinstance(amount, int) or amount < 0:
            raise ConfigError(f"{source}: {place}.resources.{key} is {amount!r}; expected a whole number")
    workers = body.get("workers")
    if workers is not None:
        if isinstance(workers, bool) or not isinstance(workers, int) or not 1 <= workers <= 64:
            raise ConfigError(f"{source}: {place}.workers is {workers!r}; expected 1 to 64")
        service = replace(service, workers=workers)
    timeout_s = body.get("start-timeout-s")
    if timeout_s is not None:
        if not isinstance(timeout_s, int | float) or not 0 < timeout_s <= 86_400:
            raise ConfigError(
                f"{source}: {place}.start-timeout-s is {timeout_s!r}; expected seconds up to a day"
            )
        service = replace(service, start_timeout_s=float(timeout_s))
    # YAML reads a bare `no` as false.
    restart = "no" if body.get("restart") in (None, False) else str(body["restart"])
    try:
        return replace(service, restart=Restart(restart))
    except ValueError:
        choices = [choice.value for choice in Restart]
        raise ConfigError(f"{source}: {place}.restart is {restart!r}; expected one of {choices}") from None


def _environment(body: Mapping[str, Value]) -> dict[str, str | tuple[str, ...]]:
    return {
        str(name): tuple(str(item) for item in value) if isinstance(value, list) else str(value)
        for name, value in body.items()
    }


def _check_counts(graph: Graph) -> None:
    engines, guards = graph.count(Kind.WORKER) * graph.ranks, graph.count(Kind.GUARD)
    if engines and guards and engines != guards:
        raise ConfigError(
            f"{graph.source}: Guard.{SERVICE_ARGS}.workers is {guards} and VllmWorker has {engines}; each "
            f"worker has exactly one guard a data-parallel rank, so leave the number of guards out"
        )
    for kind in (Kind.ETCD, Kind.NATS, Kind.ROUTER, Kind.FRONTEND):
        if graph.count(kind) > 1:
            raise ConfigError(f"{graph.source}: {kind.value}.{SERVICE_ARGS}.workers must be 1 on one machine")
    for kind, component in graph.components.items():
        for name, value in component.service.env.items():
            if isinstance(value, tuple) and len(value) != graph.count(kind):
                raise ConfigError(
                    f"{graph.source}: {kind.value}.{SERVICE_ARGS}.env.{name} has {len(value)} values for "
                    f"{graph.count(kind)} processes"
                )


def _mapping(value: Value, place: str, source: str) -> Mapping[str, Value]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{source}: {place} is {value!r}; expected a mapping of names to values")
    return value


def _list(value: Value, place: str, source: str) -> list[Value]:
    if value is None:
        return []
    if not isinstance(value, list):
        raise ConfigError(f"{source}: {place} is {value!r}; expected a list, e.g. [first, second]")
    return value


def _read_yaml(path: Path) -> dict[str, Value]:
    try:
        import yaml
    except ImportError as error:
        raise ConfigError("reading a graph needs PyYAML: pip install 'dynamo-kvcr[serve]'") from error
    try:
        document = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"graph file {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"graph file {path} is not YAML: {error}") from error
    if not isinstance(document, dict) or not document:
        raise ConfigError(f"graph file {path}: expected component names at the top level")
    return document


def _override(document: dict[str, Value], dotted: str, text: str) -> None:
    import yaml

    *parents, last = dotted.split(".")
    if not parents and last != SWITCH:
        raise ConfigError(f"--{dotted}: expected Component.key, e.g. Frontend.http-port=8000")
    place = document
    for part in parents:
        if place.get(part) is None:
            place[part] = {}
        place = place[part]
        if not isinstance(place, dict):
            raise ConfigError(f"--{dotted}: {part} is not a mapping in this graph")
    try:
        place[last] = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"--{dotted}: {text!r} is not YAML: {error}") from error
