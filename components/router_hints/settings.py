# SPDX-License-Identifier: Apache-2.0
"""Settings of one router process, see :mod:`kvcr.sources` for where they come from."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from kvcr.config import MIN_SECRET_BYTES
from kvcr.errors import ConfigError
from kvcr.sources import Parser, Setting, gather
from router_hints import costs
from router_hints.tenants import metadata_key
from router_hints.tokens import Tokens, is_loopback

MAX_SYSTEM_PORT = 32767


class RouterSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What ``python -m router_hints`` was told."""

    namespace: str
    component: str
    worker_component: str
    worker_endpoint: str
    model_path: str
    model_name: str
    block_size: int
    secret: bytes | None
    etcd_endpoints: str
    nats_url: str
    discovery_backend: str
    request_plane: str
    event_plane: str
    index_blocks: int
    deadline_ms: float
    kept_plans: int
    domain_required: bool
    signals_host: str
    signals_port: int
    signals_tokens: Tokens
    tenant_key: str
    """of the metadata of requests; empty without tenants"""
    session_ttl_s: float
    session_blocks: int
    costs: costs.Settings


_OWN_NAMESPACE = "KVCR_ROUTER_NAMESPACE"
REQUIRED = ("model_path", "model_name", "block_size")


def parse(arguments: Sequence[str], environment: Mapping[str, str]) -> RouterSettings:
    """Read file, environment and command line. Raises ConfigError naming the value, its limit and the fix."""
    found = sources(arguments, environment)
    missing = [name for name in REQUIRED if found[name].value is None]
    if missing:
        listed = ", ".join(f"--{name.replace('_', '-')} or KVCR_ROUTER_{name.upper()}" for name in missing)
        raise ConfigError(f"missing: {listed}")
    return _settings({name: setting.value for name, setting in found.items()}, environment)


def sources(arguments: Sequence[str], environment: Mapping[str, str]) -> dict[str, Setting]:
    """Every setting with its value and where that comes from. Raises ConfigError."""
    parser = _parser()
    flags = {action.dest: action for action in parser._actions if action.dest not in ("help", "config")}
    # What is set already, argparse leaves alone unless a flag is given.
    unset = object()
    parsed = vars(parser.parse_args(arguments, argparse.Namespace(**dict.fromkeys(flags, unset))))
    path = parsed.pop("config")
    given = {name: value for name, value in parsed.items() if value is not unset}
    found = gather("router", flags.keys(), environment, given, path=path)
    if "DYN_NAMESPACE" in environment and "namespace" not in given and _OWN_NAMESPACE not in environment:
        found["namespace"] = Setting(environment["DYN_NAMESPACE"], "DYN_NAMESPACE")
    settings = {}
    for name, action in flags.items():
        if name not in found:
            settings[name] = Setting(action.default, "default")
        elif name in given:
            settings[name] = found[name]
        else:
            settings[name] = Setting(_typed(action, found[name]), found[name].origin)
    return settings


def _typed(action: argparse.Action, setting: Setting) -> Any:
    """A value of the file or the environment as its flag would have it."""
    try:
        value = action.type(str(setting.value)) if callable(action.type) else str(setting.value)
    except ValueError as error:
        raise ConfigError(f"{setting.origin}: {action.dest} is {setting.value!r}: {error}") from error
    if action.choices is not None and value not in action.choices:
        listed = ", ".join(action.choices)
        raise ConfigError(f"{setting.origin}: {action.dest} is {value!r}; it must be one of {listed}")
    return value


def _parser() -> Parser:
    defaults = costs.Settings()
    parser = Parser(
        prog="python -m router_hints",
        description="Dynamo component between a stock frontend and stock workers: chooses the worker of each "
        "request and says in a hint which KV blocks to copy there.",
    )
    parser.add_argument("--namespace", default="dynamo", help="Dynamo namespace (or DYN_NAMESPACE)")
    parser.add_argument("--component", default="router", help="our own component name")
    parser.add_argument("--worker-component", default="backend", help="component the workers register as")
    parser.add_argument("--worker-endpoint", default="generate", help="endpoint the workers serve")
    parser.add_argument("--model-path", help="model directory, for tokenizer and chat template")
    parser.add_argument("--model-name", help="name clients ask for")
    parser.add_argument("--block-size", type=int, help="tokens per KV block, as on the workers")
    parser.add_argument(
        "--secret-file", help="deployment secret; without it guards' records are not verified"
    )
    parser.add_argument("--index-blocks", type=int, default=2_000_000, help="most blocks the index holds")
    parser.add_argument(
        "--deadline-ms",
        type=float,
        default=2000.0,
        help="longest a hinted copy may take, or half the time to recompute if that is more",
    )
    parser.add_argument("--explain-plans", type=int, default=1000, help="plans kept for the explain endpoint")
    signals = parser.add_argument_group("signals", "from agent harnesses, over HTTP; see docs/signals.md")
    signals.add_argument("--signals-host", default="127.0.0.1", help="address to listen on (%(default)s)")
    signals.add_argument("--signals-port", type=int, default=0, help="port; 0 for a free one (%(default)s)")
    signals.add_argument(
        "--signals-token-file",
        default="",
        help="lines `token [tenant]`; who sends signals needs one. Required unless the host is loopback",
    )
    signals.add_argument(
        "--tenant-header",
        default="",
        help="header that a gateway in front sets to the tenant it authenticated, and takes from nobody, "
        "e.g. x-dynamo-meta-kvcr-tenant; without one all requests are one tenant",
    )
    signals.add_argument(
        "--session-ttl-s", type=float, default=7200.0, help="idle sessions are forgotten then (%(default)s)"
    )
    signals.add_argument(
        "--session-blocks",
        type=int,
        default=4_000_000,
        help="most blocks in the chains of all sessions, 16 bytes each (%(default)s)",
    )
    costing = parser.add_argument_group("cost model", "defaults until measured")
    for name, text in (
        ("prefill_tokens_per_s", "prefill speed of a worker"),
        ("host_bytes_per_s", "copy between guards on one host"),
        ("domain_bytes_per_s", "copy inside an RDMA domain, or where nobody names domains"),
        ("zone_bytes_per_s", "copy between RDMA domains of one zone"),
        ("far_bytes_per_s", "copy between zones"),
        ("load_bytes_per_s", "pool to engine memory"),
        ("copy_budget_bytes_per_s", "bytes that all copies together may take in a second, 0 for any"),
        ("copy_latency_s", "fixed cost of a copy"),
        ("decode_s", "slow-down of a prefill by each running request"),
    ):
        costing.add_argument(
            "--" + name.replace("_", "-"),
            type=float,
            default=getattr(defaults, name),
            help=text + " (%(default)s)",
        )
    costing.add_argument(
        "--max-replicas",
        type=int,
        default=defaults.max_replicas,
        help="guards that keep copies of one prefix; more fetch it for one request (%(default)s), 0 for any",
    )
    costing.add_argument(
        "--topology",
        choices=("preferred", "required"),
        default="preferred",
        help="required: no copy between RDMA domains, whatever it would gain (%(default)s)",
    )
    return parser


def _settings(options: Mapping[str, Any], environment: Mapping[str, str]) -> RouterSettings:
    env = environment.get
    _check(options)
    _check_system_port(env("DYN_SYSTEM_PORT", ""))
    cost_names = set(costs.Settings.__struct_fields__) & set(options)
    return RouterSettings(
        namespace=options["namespace"],
        component=options["component"],
        worker_component=options["worker_component"],
        worker_endpoint=options["worker_endpoint"],
        model_path=options["model_path"],
        model_name=options["model_name"],
        block_size=options["block_size"],
        secret=_secret(options["secret_file"]),
        etcd_endpoints=env("ETCD_ENDPOINTS", "http://127.0.0.1:2379"),
        nats_url=env("NATS_SERVER", "nats://127.0.0.1:4222"),
        discovery_backend=env("DYN_DISCOVERY_BACKEND", "etcd"),
        request_plane=env("DYN_REQUEST_PLANE", "tcp"),
        event_plane=env("DYN_EVENT_PLANE", "nats"),
        index_blocks=options["index_blocks"],
        deadline_ms=options["deadline_ms"],
        kept_plans=options["explain_plans"],
        domain_required=options["topology"] == "required",
        signals_host=options["signals_host"],
        signals_port=options["signals_port"],
        signals_tokens=_tokens(options["signals_host"], options["signals_token_file"]),
        tenant_key=metadata_key(options["tenant_header"]),
        session_ttl_s=options["session_ttl_s"],
        session_blocks=options["session_blocks"],
        costs=costs.Settings(**{name: options[name] for name in cost_names}),
    )


def _check(options: Mapping[str, float]) -> None:
    for name in (
        "block_size",
        "index_blocks",
        "deadline_ms",
        "explain_plans",
        "session_ttl_s",
        "session_blocks",
    ):
        if options[name] <= 0:
            raise ConfigError(f"--{name.replace('_', '-')} must be above 0, got {options[name]}")
    for name in (
        "prefill_tokens_per_s",
        "host_bytes_per_s",
        "domain_bytes_per_s",
        "zone_bytes_per_s",
        "far_bytes_per_s",
        "load_bytes_per_s",
    ):
        if options[name] <= 0:
            raise ConfigError(f"--{name.replace('_', '-')} must be above 0, got {options[name]:g}")
    for name in ("copy_latency_s", "decode_s", "copy_budget_bytes_per_s", "max_replicas"):
        if options[name] < 0:
            raise ConfigError(f"--{name.replace('_', '-')} must not be negative, got {options[name]:g}")


def _check_system_port(text: str) -> None:
    # Dynamo 1.6.1 reads it as a signed 16-bit number and then refuses to start at all (observed).
    if text.isdigit() and int(text) > MAX_SYSTEM_PORT:
        raise ConfigError(
            f"DYN_SYSTEM_PORT={text} is above {MAX_SYSTEM_PORT}, the highest that Dynamo accepts"
        )


def _tokens(host: str, path: str) -> Tokens:
    tokens = Tokens.read(path)
    if not tokens.needed and not is_loopback(host):
        raise ConfigError(
            f"--signals-host {host} is not loopback: signals move and drop KV, so give --signals-token-file, "
            "or listen on 127.0.0.1"
        )
    return tokens


def _secret(path: str | None) -> bytes | None:
    if not path:
        return None
    try:
        secret = Path(path).read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"--secret-file {path!r} cannot be read: {error.strerror}") from error
    if len(secret) < MIN_SECRET_BYTES:
        raise ConfigError(
            f"--secret-file {path!r} holds {len(secret)} bytes, at least {MIN_SECRET_BYTES} are needed; "
            "use the file the guards were given"
        )
    return secret
