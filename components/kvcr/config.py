# SPDX-License-Identifier: Apache-2.0
"""Settings of the guard and of an engine, checked once, where they enter."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from kvcr.errors import ConfigError
from kvcr.sources import PREFIXES, Setting, gather, nearest

MismatchChoice = Literal["cold", "discard", "fail"]

GUARD_ENV_PREFIX = PREFIXES["guard"]
"""Every flag of ``python -m kvcr.guard`` has a twin: ``--pool-dir`` is ``KVCR_GUARD_POOL_DIR``."""

LOOPBACK = "127.0.0.1"
DEFAULT_CONTROL = f"tcp://{LOOPBACK}:0"
CACHE_SIZE_ENV = "KVCR_CPU_CACHE_GB"
"""Size of each worker's pool in GB (10**9 bytes), for a guard and for a graph."""
KVBM_CACHE_SIZE_ENV = "DYN_KVBM_CPU_CACHE_GB"
"""The same of Dynamo's KVBM, read when ours is not set."""

MIN_SECRET_BYTES = 16
MIN_FENCE_S = 2.0

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "k": 1 << 10,
    "m": 1 << 20,
    "g": 1 << 30,
    "t": 1 << 40,
    "kib": 1 << 10,
    "mib": 1 << 20,
    "gib": 1 << 30,
    "tib": 1 << 40,
}


class PeerRecord(msgspec.Struct, frozen=True):
    """Where another guard is, as discovery or a peers file tells it."""

    endpoint: str
    """Control endpoint, e.g. ``tcp://10.0.0.6:7100``."""
    name: str = ""
    incarnation: int = 0
    unix_socket: str = ""
    """Used instead of ``endpoint`` when ``boot_id`` is ours and somebody answers there."""
    boot_id: str = ""
    net_namespace: int = 0
    """With ``boot_id`` it says whose loopback interface an ``endpoint`` on 127.0.0.1 is."""
    curve_key: str = ""
    """CURVE public key of its control socket, 64 hex digits. Needed when the deployment has a secret."""
    layout_digest: str = ""


class GuardConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one guard process."""

    name: str
    """Unique in the namespace and stable over restarts: holders of blocks are known by it."""
    pool_dir: str
    """Directory of the pool, on tmpfs."""
    pool_bytes: int
    """Size of a new pool, all ranks together. An existing pool keeps its size."""
    socket: str = ""
    """Unix socket for engines and peers; empty: ``<pool_dir>/guard.sock``."""
    control: str = DEFAULT_CONTROL
    """ZMQ bind for peers and routers; port 0 picks a free one."""
    advertise: str = ""
    """Host (or host:port) that peers should connect to, when it differs from ``control``."""
    interface: str = ""
    """Network interface, by name or address, for control and KV bytes; empty: the one ``control`` binds."""
    metrics_host: str = "127.0.0.1"
    """Address the metrics are served on."""
    metrics_port: int = 0
    """0 picks a free port, -1 serves no metrics."""
    namespace: str = "dynamo"
    """Dynamo namespace it registers in."""
    peers: list[PeerRecord] = []
    """Guards known without discovery: endpoints separated by commas, or a JSON file of peer records."""
    transport: str = "auto"
    """How it reads from peers: auto (the first way that works), shm, nixl, or an installed plugin's name."""
    nixl_backend: str = "UCX"
    """NIXL back-end for transfers between hosts."""
    nixl_params: dict[str, str] = {}
    """Parameters of that back-end, as ``name=value`` separated by commas."""
    linger_s: float = 0.0
    """Leave, removing the files, after this long without an engine. 0: stay."""
    secret_file: str = ""
    """File with the deployment's secret. Without one, only loopback binds are accepted."""
    policy: str = ""
    """Dotted path ``package.module:Class`` of a :class:`kvcr.policy.Policy`; empty: the default one."""
    cluster: bool = False
    """Join Dynamo: registration, events, discovery of peers."""
    on_mismatch: MismatchChoice = "cold"
    """When an engine has another layout than the pool: refuse it (cold, fail), or discard the pool."""
    remove_pool_on_exit: bool = False
    """Remove the pool's files at the end; otherwise they wait for the next guard."""
    nice: int = -10
    """Niceness, -20 to 19, where the process may set it: engines spin, and pulls then wait for a core."""
    lease_ms: int = 5000
    """Longest lease asked from a source for one pull, and longest granted to a peer."""
    transit_slots: int = 1024
    """Most slots with blocks for one request alone (no-retain), at a time."""
    transit_share: float = 0.125
    """And the most of the pool that those may take, 0 to 1."""

    fence_after_s: float = 0.0
    """SIGKILL an engine that was silent for this long, where that is in this process's power. 0: never."""
    scrub_bytes_per_s: int = 8 << 20
    """How fast payloads are verified in the background: 8 MiB/s see 512 GiB in 18 hours. 0: not at all."""

    def __post_init__(self) -> None:
        _require(
            bool(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}", self.name)),
            "name",
            self.name,
            "1 to 128 letters, digits, '_', '-' or '.', as it is part of NATS subjects and file names",
        )
        _require(
            bool(self.pool_dir), "pool_dir", self.pool_dir, "a directory on tmpfs, e.g. /dev/shm/kvcr/worker0"
        )
        _require(self.pool_bytes > 0, "pool_bytes", self.pool_bytes, "more than 0, e.g. 2GiB")
        _require(
            -1 <= self.metrics_port < 65536, "metrics_port", self.metrics_port, "-1 (off), 0 (any) or a port"
        )
        _require(self.linger_s >= 0, "linger_s", self.linger_s, "0 (stay) or seconds")
        _require(-20 <= self.nice <= 19, "nice", self.nice, "-20 to 19")
        _require(self.transit_slots >= 1, "transit_slots", self.transit_slots, "1 or more")
        _require(
            0 < self.transit_share <= 1, "transit_share", self.transit_share, "more than 0, and 1 at the most"
        )
        _require(100 <= self.lease_ms <= 60_000, "lease_ms", self.lease_ms, "100 to 60000")
        _require(
            self.fence_after_s == 0 or self.fence_after_s >= MIN_FENCE_S,
            "fence_after_s",
            self.fence_after_s,
            f"0 (never) or at least {MIN_FENCE_S:g}, as a busy engine may be silent for a second",
        )
        _require(self.scrub_bytes_per_s >= 0, "scrub_bytes_per_s", self.scrub_bytes_per_s, "0 (off) or more")

    @property
    def socket_path(self) -> str:
        return self.socket or str(Path(self.pool_dir) / "guard.sock")

    def secret(self) -> bytes | None:
        """The deployment's secret, or None. Raises ConfigError when the file is unreadable or too short."""
        if not self.secret_file:
            return None
        try:
            secret = Path(self.secret_file).read_bytes().strip()
        except OSError as error:
            raise ConfigError(f"secret_file {self.secret_file!r} cannot be read: {error.strerror}") from error
        if len(secret) < MIN_SECRET_BYTES:
            raise ConfigError(
                f"secret_file {self.secret_file!r} holds {len(secret)} bytes, at least {MIN_SECRET_BYTES} "
                "are needed; make one with: head -c 32 /dev/urandom | base64"
            )
        return secret


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one engine, e.g. vLLM's ``kv_connector_extra_config``."""

    socket: str = ""
    """Unix socket of the guard; empty: start a guard of our own (see :mod:`kvcr.guard.spawn`)."""
    pool_dir: str = ""
    """For a guard of our own; empty: ``/dev/shm/kvcr-<uid>/<name>``."""
    pool_bytes: int = 1 << 30
    """For a guard of our own: size of its pool, all ranks together."""
    name: str = ""
    """For a guard of our own. Two engines on one host need two names."""
    namespace: str = "dynamo"
    """Part of every block key: engines of two namespaces share nothing."""
    peers: list[str] = []
    """Control endpoints asked when a request carries no hint."""
    transport: str = "auto"
    """For a guard of our own: how it reads from peers."""
    verify_loads: bool = True
    """Check every block's checksum before it enters engine memory."""
    lease_wait_ms: float = 50.0
    """How long a request waits to learn what a source has; longer if its hint says recomputing is slow."""
    load_deadline_ms: float = 2000.0
    """After this a load ends with what has arrived. A hint with an estimate brings its own deadline."""
    local_estimate: bool = True
    """Stop a pull whose hint has no estimate when this engine would have computed its blocks by then."""
    deposit_decode: bool = True
    """Also keep blocks filled while decoding, not only the prompt's."""
    secondary_tiers: Any = None
    """Not used by KVCR: stock ``dynamo.vllm`` reads here that the worker takes hints, and on which port."""
    on_mismatch: MismatchChoice = "cold"
    """When the guard's pool has another layout: serve cold, have the pool discarded, or fail to start."""

    def __post_init__(self) -> None:
        _require(self.pool_bytes > 0, "pool_bytes", self.pool_bytes, "more than 0, e.g. 2GiB")
        _require(self.lease_wait_ms >= 0, "lease_wait_ms", self.lease_wait_ms, "0 or more milliseconds")
        _require(
            self.load_deadline_ms > 0, "load_deadline_ms", self.load_deadline_ms, "more than 0 milliseconds"
        )


C = TypeVar("C", GuardConfig, EngineConfig)


def load(cls: type[C], mapping: Mapping[str, Any], source: str) -> C:
    """``mapping`` as a checked ``cls``.

    Sizes may be text with a unit (``512MB``, ``2GiB``), numbers and booleans may be text, ``peers`` may be
    text separated by commas (for a guard also the path of a JSON file of :class:`PeerRecord`).
    ``source`` names where the settings come from, for the messages. Raises ConfigError.
    """
    known = cls.__struct_fields__
    values = dict(mapping)
    for key in values:
        if key not in known:
            raise ConfigError(f"{source}: unknown setting {key!r}{nearest(key, known)}")
    missing = [
        field.name for field in msgspec.structs.fields(cls) if field.required and field.name not in values
    ]
    if missing:
        raise ConfigError(
            f"{source}: missing "
            + ", ".join(
                f"{name} (--{name.replace('_', '-')} or {GUARD_ENV_PREFIX}{name.upper()})" for name in missing
            )
        )
    for size in ("pool_bytes", "scrub_bytes_per_s"):
        if size in values:
            values[size] = parse_size(values[size], f"{source}: {size}")
    if isinstance(values.get("nixl_params"), str):
        values["nixl_params"] = _pairs(values["nixl_params"], f"{source}: nixl_params")
    if "peers" in values:
        values["peers"] = _peers(cls, values["peers"], source)
    try:
        return msgspec.convert(values, cls, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{source}: {error}") from error


def guard_settings(
    environment: Mapping[str, str], flags: Mapping[str, Any], path: str | None = None
) -> dict[str, Setting]:
    """What a guard with these flags is told, and by what; see :func:`kvcr.sources.gather`.

    A size in GB is of the environment: it goes over the file, and ``KVCR_GUARD_POOL_BYTES`` over it.
    """
    found = gather("guard", GuardConfig.__struct_fields__, environment, flags, path=path)
    given = cache_size(environment)
    if given is not None and f"{GUARD_ENV_PREFIX}POOL_BYTES" not in environment and "pool_bytes" not in flags:
        found["pool_bytes"] = Setting(str(given[1]), given[0])
    return found


def engine_settings(environment: Mapping[str, str], given: Mapping[str, Any]) -> dict[str, Setting]:
    """What an engine is told; ``given``: the ``kv_connector_extra_config``, which is its command line."""
    return gather(
        "engine", EngineConfig.__struct_fields__, environment, given, flag="kv_connector_extra_config"
    )


def cache_size(environment: Mapping[str, str]) -> tuple[str, int] | None:
    """Name of the variable that says how large a worker's pool is, and the bytes. Raises ConfigError."""
    for name in (CACHE_SIZE_ENV, KVBM_CACHE_SIZE_ENV):
        text = environment.get(name, "").strip()
        if not text:
            continue
        try:
            size = int(float(text) * 10**9)
        except (ValueError, OverflowError):
            size = 0
        if size <= 0:
            raise ConfigError(f"{name}={text!r} must be a number of GB above 0, e.g. 64 or 0.5")
        return name, size
    return None


def parse_size(value: Any, what: str = "size") -> int:
    """Bytes from ``1073741824``, ``"512MB"`` (decimal) or ``"2GiB"``, ``"2G"`` (binary).

    Raises ConfigError, which names ``what``.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", value) if isinstance(value, str) else None
    unit = _UNITS.get(match.group(2).lower()) if match else None
    if match is None or unit is None:
        raise ConfigError(f"{what} is {value!r}; write bytes or a number with a unit, e.g. 512MB or 2GiB")
    return int(float(match.group(1)) * unit)


def read_peers(path: str | Path) -> list[PeerRecord]:
    """The records in a JSON file: a list of them. Raises ConfigError."""
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=list[PeerRecord])
    except OSError as error:
        raise ConfigError(f"peers file {str(path)!r} cannot be read: {error.strerror}") from error
    except (msgspec.MsgspecError, json.JSONDecodeError) as error:
        raise ConfigError(f"peers file {str(path)!r} is not a JSON list of peer records: {error}") from error


def _pairs(text: str, what: str) -> dict[str, str]:
    pairs = [part.strip() for part in text.split(",") if part.strip()]
    for pair in pairs:
        if "=" not in pair:
            raise ConfigError(f"{what}: {pair!r} is not name=value")
    return {name.strip(): value.strip() for name, _, value in (pair.partition("=") for pair in pairs)}


def _peers(cls: type[GuardConfig] | type[EngineConfig], value: Any, source: str) -> Any:
    if isinstance(value, str):
        if cls is GuardConfig and value and "://" not in value:
            return read_peers(os.path.expanduser(value))
        value = [part.strip() for part in value.split(",") if part.strip()]
    if not isinstance(value, list):
        raise ConfigError(
            f"{source}: peers is {value!r}; write a list of endpoints such as tcp://10.0.0.6:7100"
        )
    for endpoint in value:
        if isinstance(endpoint, str) and not endpoint.startswith(("tcp://", "unix://")):
            raise ConfigError(f"{source}: peer {endpoint!r} is not tcp://host:port or unix:///path")
    if cls is GuardConfig:
        return [PeerRecord(peer) if isinstance(peer, str) else peer for peer in value]
    return value


def _require(ok: bool, name: str, value: object, wanted: str) -> None:
    if not ok:
        raise ConfigError(f"{name} is {value!r}; it must be {wanted}")
