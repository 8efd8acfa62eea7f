# SPDX-License-Identifier: Apache-2.0
"""``kvcr explain``: why a request went where it went, asked of the routers of a running deployment."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from typing import Any

from kvcr.cli import deployment
from kvcr.cli.values import whole


def add_parser(commands: Any) -> None:
    """Declare the command."""
    explain = commands.add_parser(
        "explain",
        help="why a request went to its worker",
        description="The candidates of a plan, their cost terms in seconds, and the winner. Exit code 1: no "
        "such plan is kept, or planning again from the logged inputs differs.",
    )
    deployment.add_options(explain)
    explain.add_argument(
        "request", nargs="?", default="", help="request id or plan id; without it the last plans"
    )
    explain.add_argument(
        "--last", type=whole(1), default=1, metavar="N", help="without a request: that many (%(default)s)"
    )
    explain.add_argument("--replay", action="store_true", help="plan again from the inputs and compare")


def run(arguments: argparse.Namespace) -> int:
    """Raises ConfigError when no deployment is found."""
    # The router's own program: KVCR works with other routers, and knows none of them.
    command = [sys.executable, "-m", "router_hints", "explain", "--last", str(arguments.last)]
    command += ["--replay"] if arguments.replay else []
    command += ["--json"] if arguments.json else []
    command += [arguments.request] if arguments.request else []
    found = deployment.find(arguments)
    environment = {
        **os.environ,
        "ETCD_ENDPOINTS": found.etcd,
        "DYN_NAMESPACE": found.namespace,
    }
    # A session of its own: Ctrl-C is for us, who end it.
    with deployment.waiting_for(arguments, "routers"):
        code = subprocess.run(command, env=environment, check=False, start_new_session=True).returncode
    # Below zero: a signal, as when whoever reads has seen enough.
    return code if code >= 0 else 1
