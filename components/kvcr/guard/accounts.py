# SPDX-License-Identifier: Apache-2.0
"""What pulls did at their sources: counted here as it happens, and told to each source when the pull ends."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvcr.guard.active import Account, Active
from kvcr.guard.inventory import TIER
from kvcr.guard.link import PeerLink
from kvcr.guard.meters import Meters
from kvcr.protocol.peer import Release
from kvcr.transfer.base import Step
from kvcr.transfer.shm import ShmTransport


class Accounts:
    """Belongs to the authority thread."""

    def __init__(self, meters: Meters) -> None:
        self._meters = meters

    def pulled(self, active: Active, source: int, count: int, transport: str) -> None:
        """Blocks that arrived from a source."""
        self._meters.count_pulled(active.links[source].label, transport, count, count * active.block_bytes)
        account = active.account(source)
        account.blocks += count
        account.transport = transport

    def read_in_place(self, active: Active, indices: npt.NDArray[np.intp]) -> None:
        """What every rank has read in a source's pool counts as pulled from it, on both sides."""
        for source in np.unique(active.pull.source[indices]).tolist():
            count = int((active.pull.source[indices] == source).sum())
            self.pulled(active, source, count, ShmTransport.name)

    def corrupt(self, active: Active, step: Step, corrupt: npt.NDArray[np.bool_]) -> None:
        """Blocks of a step, in our pool, that do not verify."""
        if corrupt.any():
            account = active.account(step.source)
            account.corrupt_slots += step.remote_slots[corrupt].tolist()
            account.corrupt_generations += step.remote_generations[corrupt].tolist()
            self._meters.corrupt_blocks.inc(int(corrupt.sum()), where="pull")

    def corrupt_in_place(self, active: Active, indices: npt.NDArray[np.int32]) -> None:
        """Bytes that a rank read in a source's pool do not verify: its guard is told with the release."""
        inside = indices[(indices >= 0) & (indices < active.pull.count)]
        self._meters.corrupt_blocks.inc(len(inside), where="pull")
        for source in np.unique(active.pull.source[inside]).tolist():
            mine = inside[active.pull.source[inside] == source]
            account = active.account(source)
            account.corrupt_slots += active.pull.remote_slots[mine].tolist()
            account.corrupt_generations += active.pull.remote_generations[mine].tolist()

    def measured(self, active: Active, link: PeerLink, transport: str, blocks: int, seconds: float) -> None:
        """How long the good blocks of a step took."""
        rate = link.measured(transport, blocks * active.block_bytes, seconds)
        self._meters.peer_rate.set(rate, peer=link.label, transport=transport, tier=str(TIER))

    def settle(self, active: Active) -> None:
        """The pull is over: end its leases, and tell each source what was read from it."""
        for source, account in active.accounts.items():
            self._settle(active, active.links[source], account)

    def _settle(self, active: Active, link: PeerLink, account: Account) -> None:
        if not account.leases and not account.blocks and not account.corrupt_slots:
            return
        # After an optimistic read there is no lease; the message then only keeps both sides' counters equal.
        first, *others = account.leases or [0]
        link.release(
            Release(
                lease_id=first,
                block_count=account.blocks,
                byte_count=account.blocks * active.block_bytes,
                transport=account.transport,
                corrupt_slots=np.array(account.corrupt_slots, "<i4").tobytes(),
                corrupt_generations=np.array(account.corrupt_generations, "<u8").tobytes(),
            )
        )
        for lease_id in others:
            link.release(Release(lease_id))
