# SPDX-License-Identifier: Apache-2.0
"""For authors of agent harnesses: tell the router what a session will do next.

::

    from kvcr.harness import Harness, headers

    kv = Harness("http://127.0.0.1:8490")
    kv.fork("agent-7", parent="main", isl=48_000, osl=2_000, starts_in_s=2.0, runs_s=350.0)
    client.chat.completions.create(..., extra_headers=headers("agent-7", parent="main"))
    kv.sub_agent_done("agent-7")

A signal is advice. When the router is away or refuses one, requests work as before; catch
:class:`HarnessError` and go on.
"""

from kvcr.harness.client import (
    Harness,
    HarnessError,
    NotAllowed,
    RouterAway,
    SignalRefused,
    headers,
)
from kvcr.protocol.signals import ActionReport, Kind, SessionInfo, Signal, SignalReply

__all__ = [
    "ActionReport",
    "Harness",
    "HarnessError",
    "Kind",
    "NotAllowed",
    "RouterAway",
    "SessionInfo",
    "Signal",
    "SignalRefused",
    "SignalReply",
    "headers",
]
