# SPDX-License-Identifier: Apache-2.0
"""Readers beside a busy writer, and a writer killed at any moment: never a wrong byte."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from kvcr.pool import DataRegion, Pool, PoolReader
from tests.unit.pools import content, key, keys

pytestmark = pytest.mark.usefixtures("backend_name")

SLOTS = 16
BLOCKS = 48
PART_BYTES = 4096

# Commits and evicts as fast as it can. Time is counted in operations, so that slots are reused at once:
# readers get no two seconds of grace here, and every race there is.
WRITER = f"""
import sys
from pathlib import Path
import numpy as np
from tests.unit.pools import commit, create
pool = create(Path(sys.argv[1]), {SLOTS}, part_bytes={PART_BYTES})
print("ready", flush=True)
random = np.random.default_rng(1)
now_s = 0.0
while True:
    now_s += 10.0
    granted = pool.allocate(int(random.integers(1, 6)), now_s)
    blocks = random.choice({BLOCKS}, len(granted.slots), replace=False).tolist()
    commit(pool, granted, blocks, now_s)
    pool.evict(random.integers(0, {SLOTS}, 3).astype(np.int32), now_s, "test")
"""


class Writer:
    """The writer's process."""

    def __init__(self, dir: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(dir)],
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join([*sys.path, str(Path(__file__).parents[2])])},
        )
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"ready\n"

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate(timeout=10)


def test_a_reader_beside_a_busy_writer_never_takes_a_wrong_byte(tmp_path: Path) -> None:
    wanted = keys(*range(BLOCKS))
    expected = [content(key(block), PART_BYTES) for block in range(BLOCKS)]
    writer = Writer(tmp_path)
    good = overtaken = 0
    try:
        reader = PoolReader.open(tmp_path)
        region = DataRegion.open(tmp_path, reader, 0, writable=False)
        until = time.monotonic() + 1.5
        while time.monotonic() < until:
            hits = reader.lookup(wanted)
            blocks = np.flatnonzero(hits.slots >= 0)
            sums = reader.checksums(hits.slots[blocks])
            copies = region.array[hits.slots[blocks]]
            still = reader.still(hits.slots[blocks], hits.generations[blocks])
            for block, copy, ok in zip(blocks.tolist(), copies, still.tolist(), strict=True):
                if not ok:
                    overtaken += 1
                elif copy.tobytes() == expected[block]:
                    good += 1
                else:
                    pytest.fail(f"block {block} was read with other bytes than its own")
            assert len(sums) == len(blocks)
    finally:
        writer.kill()
    assert good > 100, f"only {good} reads completed, {overtaken} were overtaken"


def test_a_writer_killed_at_any_moment_leaves_only_whole_blocks(tmp_path: Path) -> None:
    for round_number in range(4):
        writer = Writer(tmp_path / str(round_number))
        time.sleep(0.05 + 0.037 * round_number)
        writer.kill()
        pool = Pool.attach(tmp_path / str(round_number), guard_incarnation=2)
        pool.check_invariants()
        assert (pool.recovery.damaged, pool.recovery.duplicates) == (0, 0)
        hits = pool.lookup(keys(*range(BLOCKS)))
        assert np.count_nonzero(hits.slots >= 0) == pool.recovery.ready
        for block in np.flatnonzero(hits.slots >= 0).tolist():
            assert bytes(pool.part(0, int(hits.slots[block]))) == content(key(block), PART_BYTES)
        pool.close()
