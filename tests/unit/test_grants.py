# SPDX-License-Identifier: Apache-2.0
"""What an engine process knows of its grants, compared with the directory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pools

from kvcr.client.fills import Fills
from kvcr.client.grants import SlotSet, send_holding
from kvcr.client.jobs import SaveSpec
from kvcr.pool import PoolReader
from kvcr.protocol.codec import MAX_BLOCKS_PER_MESSAGE
from kvcr.protocol.engine import Holding, ToGuard


def test_only_what_is_still_granted_stays_in_the_set(tmp_path: Path) -> None:
    pool = pools.create(tmp_path, 8)
    granted = pool.allocate(4, 0.0, engine_id="e")
    held = SlotSet()
    held.add(granted.slots, granted.generations)
    held.add(np.array([99, -1], np.int32), np.array([0, 0], np.uint64))
    pools.commit(pool, pools.Granted(granted.slots[:1], granted.generations[:1]), [0])
    pool.give_back(granted.slots[1:2], granted.generations[1:2])
    held.drop_settled(PoolReader.open(tmp_path))
    assert held.slots.tolist() == granted.slots[2:].tolist()
    held.discard(granted.slots[2:3])
    assert held.slots.tolist() == granted.slots[3:].tolist()
    pool.close()


def test_a_long_list_goes_in_parts_and_says_which_is_the_last() -> None:
    sent: list[ToGuard] = []

    def send(message: ToGuard) -> bool:
        sent.append(message)
        return True

    count = MAX_BLOCKS_PER_MESSAGE + 1
    assert send_holding(send, 3, np.arange(count, dtype=np.int32), np.zeros(count, np.uint64))
    assert send_holding(send, 3, np.empty(0, np.int32), np.empty(0, np.uint64))
    assert all(isinstance(message, Holding) for message in sent)
    assert [(len(m.slots) // 4, m.final) for m in sent if isinstance(m, Holding)] == [
        (MAX_BLOCKS_PER_MESSAGE, False),
        (1, True),
        (0, True),
    ]


def test_fills_that_the_directory_shows_as_settled_are_not_sent_again(tmp_path: Path) -> None:
    pool = pools.create(tmp_path, 8)
    granted = pool.allocate(3, 0.0, engine_id="e")
    fills = Fills()
    fills.add(
        SaveSpec(
            job_id=1,
            request_id="r",
            pool_token=7,
            epoch=1,
            slots=granted.slots.tobytes(),
            generations=granted.generations.tobytes(),
            block_ids=bytes(12),
            keys=pools.keys(0, 1, 2),
            parents=pools.keys(0, 1, 2),
            engine_hashes=bytes(24),
            positions=bytes(12),
        ),
        rank=0,
        checksums=b"",
        send=lambda message: False,
    )
    pools.commit(pool, granted, [0, 1, 2])
    fills.settle(PoolReader.open(tmp_path).still_granted)
    fills.resend(7, 1)
    assert (fills.blocks, fills.unsent) == (0, False)
    pool.close()
