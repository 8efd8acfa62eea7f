# SPDX-License-Identifier: Apache-2.0
"""Fixtures of all tests: servers, ports, places in shared memory, and the check that nothing is left."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import time
import uuid
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest

from kvcr.graph import infra

SHM = Path("/dev/shm")
RUN_VARIABLE = "KVCR_TEST_RUN"
"""Every process that a test starts inherits it; its value is of this run alone."""
ENDING_S = 15.0
LOG_LINES = 12
"""Shown of each log that grew during a test that failed."""
_setup_began = pytest.StashKey[float]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--share",
        metavar="DIR",
        type=Path,
        help="run only modules that no other call with this DIR has begun: calls at one time divide the work",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--share") is not None:
        # The large ones first, so that no call is left with one of them at the end.
        items.sort(key=lambda item: (-item.path.stat().st_size, item.path))


def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """pytest's own loop, over the modules that are this call's. None: leave it to pytest."""
    share: Path | None = session.config.getoption("--share")
    if share is None or session.testsfailed or session.config.option.collectonly:
        return None
    # A module is claimed while the last test of the one before is still to run: what lives longer than a
    # module, such as etcd, is kept for it.
    for item, following in itertools.pairwise(itertools.chain(_claimed(session.items, share), [None])):
        assert item is not None
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)
    return True


def _claimed(items: list[pytest.Item], share: Path) -> Iterator[pytest.Item]:
    for path, tests in itertools.groupby(items, key=lambda item: item.path):
        try:
            (share / path.name).touch(exist_ok=False)
        except FileExistsError:
            continue
        yield from tests


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """What the processes of a test that failed wrote meanwhile is part of its report."""
    report = yield
    if call.when == "setup":
        item.stash[_setup_began] = call.start
    if report.failed:
        report.sections += _log_tails(item.config, item.stash[_setup_began])
    return report


def _log_tails(config: pytest.Config, since_unix_s: float) -> Iterator[tuple[str, str]]:
    places = [config._tmp_path_factory.getbasetemp()]  # type: ignore[attr-defined]
    places += SHM.glob(f"{os.environ.get(RUN_VARIABLE)}-*")
    # What is looked at may go meanwhile.
    with contextlib.suppress(OSError):
        for log in sorted(path for place in places for path in place.rglob("*.log")):
            if log.stat().st_mtime >= since_unix_s:
                lines = log.read_text(errors="replace").splitlines()[-LOG_LINES:]
                # Indented, as a line that begins with ERROR is a test's in the summary of scripts/test.sh.
                yield f"end of {log}", "\n".join(f"  {line[:400]}" for line in lines)


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
