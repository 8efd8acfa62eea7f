# SPDX-License-Identifier: Apache-2.0
"""etcd's messages and stubs, as etcd3aio generated them.

One copy for both backends: protobuf refuses a second one in a process (aetcd beside etcd3aio, say).
"""

from __future__ import annotations

import importlib
from typing import Any

# It puts the folder of its generated modules on sys.path.
importlib.import_module("etcd3aio")

rpc: Any = importlib.import_module("etcd.api.etcdserverpb.rpc_pb2")
stubs: Any = importlib.import_module("etcd.api.etcdserverpb.rpc_pb2_grpc")

DELETE_EVENT = 1
"""``mvccpb.Event.DELETE``"""


def watch_request(prefix: bytes, range_end: bytes, start_revision: int) -> Any:
    """The request that opens a watch of a range."""
    return rpc.WatchRequest(
        create_request=rpc.WatchCreateRequest(key=prefix, range_end=range_end, start_revision=start_revision)
    )
