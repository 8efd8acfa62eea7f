# SPDX-License-Identifier: Apache-2.0
"""``python -m kvcr.graph.bootstrap``: what a compose deployment needs once, before anything else runs.

Makes the deployment's secret, a NATS user for each role with the subjects it needs and no others, and a
password for Grafana, unless they exist; prepares the model. Run again, it changes nothing. Secrets are
written to files, never printed. Where it runs as root and ``KVCR_OWNER`` has a user's number, everything
then belongs to that user.
"""

from __future__ import annotations

import argparse
import os
import secrets
from pathlib import Path

from kvcr.errors import KvcrError
from kvcr.graph import models
from kvcr.protocol.events import stream_name

ROLES = ("guard", "worker", "router", "frontend")
_SECRET_BYTES = 32


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="kvcr.graph.bootstrap", description=__doc__)
    parser.add_argument("--run-dir", type=Path, required=True, help="where secrets are kept")
    parser.add_argument("--namespace", default="dynamo", help="Dynamo namespace, part of NATS subjects")
    parser.add_argument("--model", help="a model to prepare: a known name, or a mounted directory")
    parser.add_argument(
        "--hand-over", type=Path, action="append", default=[], help="a new volume of the owner"
    )
    options = parser.parse_args(arguments)
    for volume in options.hand_over:
        _hand_over(volume, files=False)
    make_secrets(options.run_dir, options.namespace)
    # Before the model, which may fail for want of a network: what runs already may go on.
    _hand_over(options.run_dir)
    if options.model:
        try:
            path = models.ensure_model(options.model)
        except KvcrError as error:
            print(
                f"{error}\nIs there a way to PyPI from containers? A graph may name a model of yours.",
                flush=True,
            )
            return 1
        _hand_over(models.cache_dir())
        print(f"model {options.model}: {path}", flush=True)
    return 0


def make_secrets(run_dir: Path, namespace: str) -> None:
    """Write what is missing in ``run_dir``. The files of the users follow from their passwords."""
    run_dir.mkdir(parents=True, exist_ok=True)
    _once(run_dir / "secret")
    _once(run_dir / "grafana-password", length=18)
    users = []
    for role in ROLES:
        password = _once(run_dir / f"nats-password-{role}", length=24)
        _write(
            run_dir / f"{role}.env",
            f"NATS_AUTH_USERNAME={role}\nNATS_AUTH_PASSWORD={password}\n",
        )
        users.append(_user(role, password, namespace))
    _write(run_dir / "nats-users.conf", "authorization {\n  users = [\n" + "".join(users) + "  ]\n}\n")


def permissions(role: str, namespace: str) -> tuple[list[str], list[str]]:
    """Subjects a role may publish to and subscribe to.

    A guard tells what it has and how it fares, and obeys; it cannot give orders to other guards. Only routers
    can. Workers and frontends speak Dynamo's own subjects and none of ours.
    """
    ours = f"kvcr.v1.{namespace}"
    dynamo = [f"namespace.{namespace}.>", f"{namespace}.>", "dynamo.>"]
    inbox = ["_INBOX.>"]
    if role == "guard":
        publish = [f"{ours}.inventory.*", f"{ours}.state.*", f"{ours}.results"]
        return [*publish, *_jetstream(namespace, "actions", "state"), *inbox], [*inbox]
    if role == "router":
        streams = _jetstream(namespace, "actions", "state", "locations")
        return [f"{ours}.>", *streams, *dynamo, *inbox], [f"{ours}.>", *dynamo, *inbox]
    return [*dynamo, *inbox], [*dynamo, *inbox]


def _jetstream(namespace: str, *streams: str) -> list[str]:
    """JetStream's own interface for some of our streams: make, look at, read, acknowledge; not delete."""
    allowed = ["$JS.API.INFO"]
    for stream in streams:
        name = stream_name(namespace, stream)
        allowed += [
            f"$JS.API.STREAM.INFO.{name}",
            f"$JS.API.STREAM.CREATE.{name}",
            f"$JS.API.STREAM.UPDATE.{name}",
            f"$JS.API.STREAM.MSG.GET.{name}",
            f"$JS.API.DIRECT.GET.{name}.>",
            f"$JS.API.CONSUMER.CREATE.{name}",
            f"$JS.API.CONSUMER.CREATE.{name}.>",
            f"$JS.API.CONSUMER.DURABLE.CREATE.{name}.*",
            f"$JS.API.CONSUMER.INFO.{name}.*",
            f"$JS.API.CONSUMER.DELETE.{name}.*",
            f"$JS.API.CONSUMER.MSG.NEXT.{name}.*",
            f"$JS.ACK.{name}.>",
        ]
    return allowed


def _user(role: str, password: str, namespace: str) -> str:
    publish, subscribe = permissions(role, namespace)
    return (
        f'    {{ user: "{role}", password: "{password}", permissions: {{\n'
        f"      publish: {_list(publish)}\n      subscribe: {_list(subscribe)} }} }}\n"
    )


def _list(subjects: list[str]) -> str:
    return "[" + ", ".join(f'"{subject}"' for subject in subjects) + "]"


def _once(path: Path, length: int = _SECRET_BYTES) -> str:
    if not path.exists():
        _write(path, secrets.token_urlsafe(length) + "\n")
    return path.read_text().strip()


def _write(path: Path, text: str) -> None:
    part = path.with_name(path.name + ".part")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as stream:
        stream.write(text)
    part.replace(path)


def _hand_over(folder: Path, files: bool = True) -> None:
    """Give a folder to the user the services run as. ``files`` of servers are their own."""
    owner = os.environ.get("KVCR_OWNER")
    if owner is None or os.geteuid() != 0:
        return
    for path in [folder, *(folder.rglob("*") if files else ())]:
        os.chown(path, int(owner), int(owner), follow_symlinks=False)


if __name__ == "__main__":
    raise SystemExit(main())
