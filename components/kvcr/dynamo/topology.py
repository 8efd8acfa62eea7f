# SPDX-License-Identifier: Apache-2.0
"""Where this host stands in the network, as the deployment tells it to Dynamo workers too."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

from kvcr.sources import is_true

DEFAULT_MOUNT = "/etc/dynamo/topology"


def read_topology(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Domain to value, e.g. ``rdma_domain`` to ``rackA``: one file a domain, its text the value.

    Read from ``DYN_TOPOLOGY_MOUNT_PATH`` when ``DYN_TOPOLOGY_ENABLED`` is true, as ``dynamo.vllm`` does
    (1.6.1), so that a worker and the guard beside it say the same. Files that cannot be read are left out.
    """
    if not is_true(environment, "DYN_TOPOLOGY_ENABLED"):
        return {}
    mount = Path(environment.get("DYN_TOPOLOGY_MOUNT_PATH") or DEFAULT_MOUNT)
    domains: dict[str, str] = {}
    with contextlib.suppress(OSError):
        for path in sorted(mount.iterdir()):
            # Kubernetes keeps the versions of a mounted volume in hidden entries.
            if path.name.startswith(".") or not path.is_file():
                continue
            with contextlib.suppress(OSError, UnicodeDecodeError):
                if value := path.read_text().strip():
                    domains[path.name] = value
    return domains
