# SPDX-License-Identifier: Apache-2.0
"""What an operator tells the routers of a namespace, in etcd: a mode, and workers to drain.

Orders are not signed. Who can write to etcd can take workers out of service anyway, by deleting their
cards; orders cannot make anybody read KV from a stranger.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from kvcr.dynamo.etcd import KeyChanges


class RouterMode(enum.StrEnum):
    """How much the routers do."""

    ON = "on"
    SHADOW = "shadow"
    """Plan, log and count as ever, and move nothing: no hint leaves, no action either."""
    OFF = "off"
    """Plan as if there were no pools."""


def orders_prefix(namespace: str) -> str:
    return f"kvcr/v1/{namespace}/orders/"


def mode_key(namespace: str) -> str:
    return orders_prefix(namespace) + "mode"


def drain_key(namespace: str, worker_id: int) -> str:
    return f"{orders_prefix(namespace)}drain/{worker_id:x}"


@dataclass
class Orders:
    """The orders in force, as a router knows them. It keeps them while etcd is away. One thread."""

    mode: RouterMode = RouterMode.ON
    draining: set[int] = field(default_factory=set)
    """Instance ids of workers that get no new request."""

    def apply(self, prefix: str, changes: KeyChanges) -> list[str]:
        """Take a batch of changes below ``prefix``; returns a line for each that means nothing."""
        ignored = []
        for key in changes.deletes:
            ignored += self._one(key.removeprefix(prefix), None)
        for entry in changes.puts:
            ignored += self._one(entry.key.removeprefix(prefix), entry.value)
        return ignored

    def _one(self, name: str, value: bytes | None) -> list[str]:
        if name == "mode":
            text = RouterMode.ON.value if value is None else value.decode(errors="replace")
            try:
                self.mode = RouterMode(text)
            except ValueError:
                return [f"mode {text!r} is unknown; known: {', '.join(RouterMode)}"]
            return []
        kind, _, identifier = name.partition("/")
        try:
            worker_id = int(identifier, 16)
        except ValueError:
            worker_id = 0
        if kind != "drain" or not worker_id:
            return [f"order {name!r} is unknown"]
        if value is None:
            self.draining.discard(worker_id)
        else:
            self.draining.add(worker_id)
        return []
