# SPDX-License-Identifier: Apache-2.0
"""Transports of other makers: the one of docs/plugins.md, in a package that KVCR knows nothing of."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from engine_client import COMPONENTS, EngineClient, GuardProcess, chain, guards, statuses

from kvcr.protocol.engine import BlockStatus, Source
from kvcr.transfer import nixl

ROOT = Path(__file__).resolve().parents[2]


def install(
    site: Path, code: str, name: str = "vmread", value: str = "acme_transport:VmRead"
) -> dict[str, str]:
    """What pip would make of such a package; returns the environment that finds it."""
    metadata = site / f"acme_{name}-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: acme-{name}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[kvcr.transports]\n{name} = {value}\n")
    (site / f"{value.partition(':')[0]}.py").write_text(code)
    return {"PYTHONPATH": os.pathsep.join([str(COMPONENTS), str(site)])}


def example() -> str:
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "plugins.md").read_text(), re.DOTALL)
    return str(code)


def test_the_example_of_the_docs_pulls_and_is_counted_under_its_name(directory: Path, tmp_path: Path) -> None:
    env = install(tmp_path / "site", example())
    root, keys = chain(40, "tenant")
    with (
        guards(directory, "a", "b", arguments=["--transport", "vmread"], env=env) as (a, b),
        EngineClient(a, "engine-a") as source,
        EngineClient(b, "engine-b") as target,
    ):
        source.deposit(keys, root)
        _, progress = target.fetch("r", keys, root, [Source(a.endpoint, 0, 40)])
        assert (statuses(progress), progress.transport) == ([BlockStatus.OK] * 40, "vmread")
        assert all(target.right(keys))
        assert b.wait_metric('kvcr_pulled_blocks_total{transport="vmread"}', 40) == 40
        assert b.wait_metric('kvcr_pull_seconds_count{transport="vmread"}', 1) == 1
        assert a.wait_metric('kvcr_served_blocks_total{transport="vmread"}', 40) == 40


def test_by_itself_it_is_measured_against_ours_and_must_be_faster(directory: Path, tmp_path: Path) -> None:
    slow = example().replace(
        "        if time.monotonic() >= step.deadline_s:", "        time.sleep(0.2)\n        if False:"
    )
    assert slow != example()
    env = install(tmp_path / "site", slow)
    root, keys = chain(20, "tenant")
    with (
        guards(directory, "a", "b", env=env) as (a, b),
        EngineClient(a, "engine-a") as source,
        EngineClient(b, "engine-b") as target,
    ):
        source.deposit(keys, root)
        _, progress = target.fetch("r", keys, root, [Source(a.endpoint, 0, 20)])
        assert (statuses(progress), progress.transport) == ([BlockStatus.OK] * 20, "shm")
        for transport in ("shm", "vmread"):
            verified = f'kvcr_canaries_total{{transport="{transport}",result="ok"}}'
            assert b.wait_metric(verified, 1) == 1


def test_one_that_brings_wrong_bytes_or_does_not_load_is_left_out(directory: Path, tmp_path: Path) -> None:
    wrong = example().replace("of = _Part(theirs + source * stride, nbytes)", "of = _Part(theirs, nbytes)")
    assert wrong != example()
    site = tmp_path / "site"
    env = install(site, wrong)
    install(site, "raise OSError('no such card')", "broken", "acme_broken:Nothing")
    root, keys = chain(20, "tenant")
    with (
        guards(directory, "a", "b", env=env) as (a, b),
        EngineClient(a, "engine-a") as source,
        EngineClient(b, "engine-b") as target,
    ):
        source.deposit(keys, root)
        _, progress = target.fetch("r", keys, root, [Source(a.endpoint, 0, 20)])
        assert (statuses(progress), progress.transport) == ([BlockStatus.OK] * 20, "shm")
        assert b.wait_metric('kvcr_canaries_total{transport="vmread",result="failed"}', 1) == 1
        assert "transport plugin broken (acme_broken:Nothing) cannot be used" in b.log_path.read_text()


def test_a_transport_that_nobody_installed_is_refused_at_the_start(directory: Path) -> None:
    with pytest.raises(
        RuntimeError, match=r"'carrierpigeon' is not known; there are auto, shm, nixl.*kvcr\.transports"
    ):
        GuardProcess(directory, "a", "--transport", "carrierpigeon")


@pytest.mark.skipif(bool(nixl.import_error()), reason=nixl.import_error())
def test_back_end_and_parameters_of_nixl_are_settings(directory: Path) -> None:
    root, keys = chain(20, "tenant")
    flags = ["--transport", "nixl", "--nixl-backend", "UCX", "--nixl-params", "num_workers=2"]
    with (
        guards(directory, "a", "b", arguments=flags) as (a, b),
        EngineClient(a, "engine-a") as source,
        EngineClient(b, "engine-b") as target,
    ):
        source.deposit(keys, root)
        _, progress = target.fetch("r", keys, root, [Source(a.endpoint, 0, 20)])
        assert (statuses(progress), progress.transport) == ([BlockStatus.OK] * 20, "nixl")


@pytest.mark.skipif(bool(nixl.import_error()), reason=nixl.import_error())
def test_a_back_end_that_is_not_there_leaves_no_way_and_says_so(directory: Path) -> None:
    root, keys = chain(4, "tenant")
    flags = ["--transport", "nixl", "--nixl-backend", "NOSUCH"]
    with (
        guards(directory, "a", "b", arguments=flags) as (a, b),
        EngineClient(a, "engine-a") as source,
        EngineClient(b, "engine-b") as target,
    ):
        source.deposit(keys, root)
        _, progress = target.fetch("r", keys, root, [Source(a.endpoint, 0, 4)])
        assert set(statuses(progress)) == {BlockStatus.GONE}
        assert "nixl over nosuch" in b.log_path.read_text()
