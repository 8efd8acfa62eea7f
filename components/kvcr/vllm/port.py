# SPDX-License-Identifier: Apache-2.0
"""What the connector in the scheduler needs of its guard."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvcr.client import FetchState, Grants
from kvcr.protocol.engine import DropG1, Source


class SchedulerPort(Protocol):
    """What the connector needs of :class:`kvcr.client.SchedulerHandle`."""

    @property
    def connected(self) -> bool: ...
    @property
    def grants_available(self) -> int: ...
    @property
    def own_endpoint(self) -> str: ...
    def poll(self) -> None: ...
    def lookup(self, keys: bytes) -> npt.NDArray[np.bool_]: ...
    def use(self, keys: bytes) -> None: ...
    def take_grants(self, count: int) -> Grants: ...
    def give_back(self, grants: Grants) -> None: ...
    def fetch(
        self,
        request_id: str,
        *,
        first: int,
        parent: bytes,
        keys: bytes,
        engine_hashes: npt.NDArray[np.uint64],
        sources: list[Source],
        deadline_ms: float,
        give_up_ms: float = ...,
        plan_id: str = ...,
        no_retain: bool = ...,
        move: bool = ...,
        action_id: str = ...,
        local_estimate: bool = ...,
        traceparent: str = ...,
    ) -> FetchState: ...
    def act(self, request_id: str, envelope: bytes) -> None: ...
    def take_drops(self) -> list[DropG1]: ...
    def dropped(self, drop: DropG1, count: int) -> None: ...
    def fetch_state(self, request_id: str) -> FetchState | None: ...
    def finish(self, request_id: str) -> None: ...
    def close(self) -> None: ...
