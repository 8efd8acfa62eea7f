# SPDX-License-Identifier: Apache-2.0
"""Fixtures of all tests: servers, ports, places in shared memory, and the check that nothing is left."""

from __future__ import annotations

import itertools
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvcr.graph import infra

SHM = Path("/dev/shm")
RUN_VARIABLE = "KVCR_TEST_RUN"
"""Every process that a test starts inherits it; its value is of this run alone."""
ENDING_S = 3.0


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--half",
        choices=("1", "2"),
        help="run every second test module only: two calls at the same time do all, as most of it is waiting",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    half = config.getoption("--half")
    if half is None:
        return
    modules = sorted({item.path for item in items})
    others = set(modules[2 - int(half) :: 2])
    config.hook.pytest_deselected(items=[item for item in items if item.path in others])
    items[:] = [item for item in items if item.path not in others]


@pytest.fixture(scope="session", autouse=True)
def run_id() -> Iterator[str]:
    """Names this run of pytest. When it is over, no process and no file in /dev/shm may carry the name."""
    run = f"kvcr-test-{uuid.uuid4().hex[:12]}"
    os.environ[RUN_VARIABLE] = run
    yield run
    deadline = time.monotonic() + ENDING_S
    while (left := leftovers(run)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left, "left behind by this run: " + "; ".join(left)


def leftovers(run: str) -> list[str]:
    """Processes (other than this one) and files in shared memory that carry the name of a run."""
    found = [str(path) for path in SHM.glob(f"{run}*")]
    mark = f"{RUN_VARIABLE}={run}".encode()
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and int(process.name) != os.getpid():
            try:
                if mark in (process / "environ").read_bytes().split(b"\0"):
                    command = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    found.append(f"process {process.name}: {command}")
            except OSError:
                # It ended, or it is somebody else's.
                continue
    return found


@pytest.fixture(autouse=True, scope="module")
def environment_ends(run_id: str) -> Iterator[None]:
    """What a module sets is not inherited by the processes of the next: a guard that was told of one network
    card by the tests of another file fails for reasons that nobody finds."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture
def shm_dir(run_id: str) -> Iterator[Path]:
    """A directory on tmpfs, for pools. It goes with the test, with what guards leave in it."""
    path = SHM / f"{run_id}-{next(_numbers)}"
    path.mkdir()
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="session")
def etcd(run_id: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[infra.Server]:
    """One etcd for all tests; use a namespace of your own. Tests that stop it start one themselves."""
    directory = tmp_path_factory.mktemp("etcd")
    server = infra.start_etcd(directory / "data", directory / "etcd.log")
    yield server
    server.stop()


@pytest.fixture(scope="session")
def nats_server(run_id: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[infra.Server]:
    """One NATS, with JetStream, for all tests; as for :func:`etcd`."""
    directory = tmp_path_factory.mktemp("nats")
    server = infra.start_nats(directory / "data", directory / "nats.log")
    yield server
    server.stop()


@pytest.fixture
def free_port() -> Callable[[], int]:
    """Gives a TCP port that nobody listens on, each time it is called."""
    return infra.free_port


@pytest.fixture
def namespace() -> str:
    """A Dynamo namespace that no other test uses."""
    return f"t{uuid.uuid4().hex[:10]}"


_numbers = itertools.count()
