# SPDX-License-Identifier: Apache-2.0
"""Which deployment a command speaks to: flags, then the environment, then the newest ``kvcr serve``."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
import threading
from collections.abc import Awaitable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from kvcr.errors import ConfigError

if TYPE_CHECKING:
    from kvcr.dynamo.fleet import Deployment, Fleet


T = TypeVar("T")
_SAY_S = 1.0


def add_options(parser: argparse.ArgumentParser) -> None:
    """Flags that every command about a deployment has."""
    where = parser.add_argument_group("which deployment (default: the newest `kvcr serve` of this user)")
    where.add_argument("--run-dir", metavar="DIR", help="run directory of a `kvcr serve`")
    where.add_argument("--namespace", help="Dynamo namespace; or DYN_NAMESPACE")
    where.add_argument("--etcd", metavar="URL", help="or ETCD_ENDPOINTS")
    where.add_argument("--nats", metavar="URL", help="or NATS_SERVER")
    where.add_argument("--secret-file", metavar="FILE", help="the deployment's secret; or KVCR_SECRET_FILE")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")


def open_fleet(arguments: argparse.Namespace) -> Fleet:
    """The deployment's guards and routers, an async context manager. Raises ConfigError."""
    try:
        from kvcr.dynamo.environment import silence_runtime
        from kvcr.dynamo.fleet import Fleet
    except ImportError as error:
        raise ConfigError(
            f"this needs the clients of Dynamo, etcd and NATS: pip install 'dynamo-kvcr[dynamo]' ({error})"
        ) from error
    silence_runtime()
    return Fleet(find(arguments))


def find(arguments: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> Deployment:
    """Raises ConfigError when nothing says where etcd is, or the secret cannot be read."""
    from kvcr.dynamo.fleet import Deployment

    graph = running_graph(arguments.run_dir)
    given = arguments.etcd or environ.get("ETCD_ENDPOINTS")
    etcd = given or (graph or {}).get("etcd")
    if not etcd:
        raise ConfigError(
            "no deployment found: no `kvcr serve` of this user runs; name one with --run-dir, or with "
            "--etcd http://host:2379 and --namespace, or set ETCD_ENDPOINTS and DYN_NAMESPACE"
        )
    # Flags and environment name a deployment as a whole: parts of another one's graph must not be mixed in.
    graph = graph if graph is not None and etcd == graph["etcd"] else None
    known: Mapping[str, Any] = graph or {}
    secret_file = arguments.secret_file or environ.get("KVCR_SECRET_FILE") or known.get("secret_file")
    return Deployment(
        namespace=arguments.namespace or environ.get("DYN_NAMESPACE") or known.get("namespace") or "dynamo",
        etcd=etcd,
        nats=arguments.nats or environ.get("NATS_SERVER") or known.get("nats") or "nats://127.0.0.1:4222",
        secret=_secret(secret_file),
        source=f"graph {known['id']}" if known else f"etcd at {etcd}",
        model=_model_dir(known),
    )


def no_guards(fleet: Fleet) -> str:
    """For who expected some."""
    place = fleet.deployment
    if fleet.ignored:
        return (
            f"{fleet.ignored.total()} guard(s) registered in namespace {place.namespace}, none is believed: "
            f"{next(iter(fleet.ignored))} (--secret-file)"
        )
    return (
        f"no guard is registered in namespace {place.namespace} of etcd at {place.etcd}; "
        "is it another namespace (--namespace), or do guards run without --cluster"
    )


def complain(arguments: argparse.Namespace, troubles: Iterable[str]) -> None:
    """What went wrong, on stderr, so that stdout is the answer alone."""
    for trouble in troubles:
        print(f"kvcr {arguments.command}: {trouble}", file=sys.stderr, flush=True)


async def patiently(arguments: argparse.Namespace, work: Awaitable[T], what: str) -> T:
    """The result of ``work``; who waits for it is told so after a second."""
    task = asyncio.ensure_future(work)
    done, _ = await asyncio.wait([task], timeout=_SAY_S)
    if not done:
        complain(arguments, [f"waiting for {what}"])
    return await task


@contextlib.contextmanager
def waiting_for(arguments: argparse.Namespace, what: str) -> Iterator[None]:
    """As :func:`patiently`, for work that no event loop waits for."""
    timer = threading.Timer(_SAY_S, complain, (arguments, [f"waiting for {what}"]))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def router_url(arguments: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> str:
    """Base URL of the router's signals API. Raises ConfigError when nothing says it."""
    given = arguments.router or environ.get("KVCR_ROUTER_URL")
    if given:
        return str(given).rstrip("/")
    graph = running_graph(arguments.run_dir) or {"components": []}
    for component in graph["components"]:
        url = component["urls"].get("signals")
        if url:
            return str(url).removesuffix("/v1/kv/signals")
    raise ConfigError("a session is known to the router: say where with --router http://host:8490")


def running_graph(run_dir: str | None) -> dict[str, Any] | None:
    """``graph.json`` of a run, by default the newest of this user's if it is running. Raises ConfigError."""
    from kvcr.graph.models import cache_dir

    path = Path(run_dir) / "graph.json" if run_dir else cache_dir() / "run" / "latest" / "graph.json"
    try:
        state: dict[str, Any] = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        if run_dir:
            raise ConfigError(f"--run-dir {run_dir}: no graph.json of a `kvcr serve` there") from error
        return None
    if state.get("state") in ("starting", "ready") and Path(f"/proc/{state.get('pid')}").exists():
        return state
    if run_dir:
        raise ConfigError(f"--run-dir {run_dir}: its graph, {state.get('id')}, has ended; start it again")
    return None


def _model_dir(graph: Mapping[str, Any]) -> str | None:
    from kvcr.graph.models import model_path

    return str(model_path(graph["model"])) if graph.get("model") else None


def _secret(path: str | None) -> bytes | None:
    if not path:
        return None
    try:
        return Path(path).read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"--secret-file {path!r} cannot be read: {error.strerror}") from error
