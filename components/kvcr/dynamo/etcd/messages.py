# SPDX-License-Identifier: Apache-2.0
"""etcd's messages and stubs, as etcd3aio generated them, and what both backends make of them.

One copy for both backends: protobuf refuses a second one in a process (aetcd beside etcd3aio, say).
"""

from __future__ import annotations

import importlib
from typing import Any

from kvcr.dynamo.etcd.base import KeyChanges, KeyValue, changes_of

# It puts the folder of its generated modules on sys.path.
importlib.import_module("etcd3aio")

rpc: Any = importlib.import_module("etcd.api.etcdserverpb.rpc_pb2")
stubs: Any = importlib.import_module("etcd.api.etcdserverpb.rpc_pb2_grpc")

_DELETE_EVENT = 1
"""``mvccpb.Event.DELETE``"""


def watch_request(prefix: bytes, range_end: bytes, start_revision: int) -> Any:
    """The request that opens a watch of a range."""
    return rpc.WatchRequest(
        create_request=rpc.WatchCreateRequest(key=prefix, range_end=range_end, start_revision=start_revision)
    )


def entry_of(kv: Any) -> KeyValue:
    """An entry of an answer. A key that is no text, which anybody may have written, is given with its bytes
    spelled out: it is none of ours, and must not end a watch of ours."""
    return KeyValue(kv.key.decode(errors="backslashreplace"), kv.value, kv.lease, kv.mod_revision)


def changes_in(answer: Any) -> KeyChanges:
    """The events of one answer to a watch."""
    return changes_of([(entry_of(event.kv), event.type == _DELETE_EVENT) for event in answer.events])
