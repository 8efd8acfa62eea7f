# SPDX-License-Identifier: Apache-2.0
"""All a plan was made from, as a value that can be logged: the plan made again from it is the same."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from router_hints.costs import CostModel, CostSnapshot
from router_hints.index import IndexView
from router_hints.ledger import Loads
from router_hints.planner import Holder, Plan, RequestView, Worker, plan
from router_hints.topology import Topology


class PlanInputs(msgspec.Struct, frozen=True, kw_only=True):
    """The arguments of :func:`router_hints.planner.plan`."""

    request: RequestView
    workers: list[Worker]
    guards: tuple[str, ...]
    """rows of the index view"""
    blocks: int
    held: bytes
    """the view itself, one bit a block, each row filled up to a byte"""
    holders: Mapping[str, Holder]
    loads: Loads
    costs: CostSnapshot
    topology: Topology
    now_s: float

    @classmethod
    def taken(
        cls,
        request: RequestView,
        workers: Sequence[Worker],
        index: IndexView,
        holders: Mapping[str, Holder],
        loads: Loads,
        costs: CostModel,
        topology: Topology,
        now_s: float,
    ) -> PlanInputs:
        """Keep what the planner is about to be given. Costs are copied; everything else never changes."""
        return cls(
            request=request,
            workers=list(workers),
            guards=index.guards,
            blocks=index.blocks,
            held=np.packbits(index.held, axis=1).tobytes(),
            holders=holders,
            loads=loads,
            costs=costs.snapshot(),
            topology=topology,
            now_s=now_s,
        )

    def plan(self) -> Plan:
        """Plan again."""
        rows = np.frombuffer(self.held, dtype=np.uint8).reshape(len(self.guards), -(-self.blocks // 8))
        held = np.unpackbits(rows, axis=1, count=self.blocks).astype(np.bool_)
        return plan(
            self.request,
            self.workers,
            IndexView(self.guards, held),
            self.holders,
            self.loads,
            CostModel.restore(self.costs),
            self.topology,
            self.now_s,
        )

    def to_text(self) -> str:
        """For a log: base64 of MessagePack."""
        return base64.b64encode(msgspec.msgpack.encode(self)).decode()

    @classmethod
    def from_text(cls, text: str) -> PlanInputs:
        """Raises msgspec.MsgspecError or ValueError on anything that :meth:`to_text` did not write."""
        return _decoder.decode(base64.b64decode(text, validate=True))


_decoder = msgspec.msgpack.Decoder(PlanInputs)
