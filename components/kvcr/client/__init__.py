# SPDX-License-Identifier: Apache-2.0
"""The part of KVCR inside an engine: one scheduler handle, and one worker handle a rank.

Reads the pool's directory in shared memory, sends messages on a Unix socket without waiting, copies
blocks between engine memory and the pool. Knows no engine: see :mod:`kvcr.vllm` for the vLLM adapter.
"""

from kvcr.client.fetch import FetchState
from kvcr.client.jobs import Grants, LoadResult, LoadSpec, SaveSpec
from kvcr.client.memory import BlockMemory, HostBlockMemory
from kvcr.client.scheduler import SchedulerHandle
from kvcr.client.tally import WorkerCounters
from kvcr.client.worker import WorkerHandle

__all__ = [
    "BlockMemory",
    "FetchState",
    "Grants",
    "HostBlockMemory",
    "LoadResult",
    "LoadSpec",
    "SaveSpec",
    "SchedulerHandle",
    "WorkerCounters",
    "WorkerHandle",
]
