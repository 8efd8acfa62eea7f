# SPDX-License-Identifier: Apache-2.0
"""What is read where a file was cut under its mapping. In processes of their own: it may be their end."""

from __future__ import annotations

import importlib.util
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("kvcr._shield") is None, reason="the extension kvcr._shield is not built"
)

PAGE = 4096
SCRIPT = """
import mmap, os, sys
from kvcr.pool.mapping import Mapping

path, what = sys.argv[1:]
with open(path, "r+b") as file:
    mapping = Mapping.of(file, 8 * 4096, writable=True)
    other = mmap.mmap(file.fileno(), 8 * 4096)
"""


def run(tmp_path: Path, what: str, body: str) -> subprocess.CompletedProcess[str]:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 8 * PAGE)
    command = [sys.executable, "-c", SCRIPT + body, str(path), what]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_what_was_cut_off_reads_as_zeros_and_what_is_written_there_goes_nowhere(tmp_path: Path) -> None:
    ended = run(
        tmp_path,
        "",
        """
os.truncate(path, 2 * 4096)
assert mapping[5 * 4096 : 6 * 4096] == bytes(4096)
assert mapping[2 * 4096 : 8 * 4096] == bytes(6 * 4096)
assert mapping[: 2 * 4096] == b"x" * 2 * 4096
mapping[7 * 4096] = 1
assert os.stat(path).st_size == 2 * 4096
assert mapping[7 * 4096] == 1
print("alive")
""",
    )
    assert (ended.returncode, ended.stdout) == (0, "alive\n"), ended.stderr


def test_so_does_what_was_cut_off_in_the_middle_of_a_huge_page(tmp_path: Path) -> None:
    ended = run(
        tmp_path,
        "",
        """
import tempfile
from kvcr.pool.files import allocate
size = 8 << 20
with tempfile.NamedTemporaryFile(prefix="kvcr-mapping-", dir="/dev/shm") as file:
    allocate(file.fileno(), size)
    mapping = Mapping.of(file, size, writable=True)
    part = memoryview(mapping)[mapping.start : mapping.start + size]
    part[:] = b"x" * size
    os.truncate(file.name, 4096 * 700)
    assert part[4096 * 700 :] == bytes(size - 4096 * 700)
    assert part[: 4096 * 700] == b"x" * 4096 * 700
    part.release()
    mapping.close()
print("alive")
""",
    )
    assert (ended.returncode, ended.stdout) == (0, "alive\n"), ended.stderr


@pytest.mark.parametrize("what", ["another mapping", "one that was closed", "a signal"])
def test_what_is_not_ours_ends_the_process_as_before(tmp_path: Path, what: str) -> None:
    ended = run(
        tmp_path,
        what,
        """
if what == "a signal":
    os.kill(os.getpid(), 7)
elif what == "one that was closed":
    mapping.close()
    with open(path, "r+b") as file:
        others = [mmap.mmap(file.fileno(), 8 * 4096) for _ in range(8)]
    os.truncate(path, 0)
    [one[0] for one in others]
else:
    os.truncate(path, 0)
    other[0]
print("alive")
""",
    )
    assert (ended.returncode, ended.stdout) == (-signal.SIGBUS, "")
