# SPDX-License-Identifier: Apache-2.0
"""Where a setting comes from, and which origin wins."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvcr.cli.main import main
from kvcr.cli.settings import explain
from kvcr.config import GuardConfig, cache_size, from_environment, load
from kvcr.errors import ConfigError
from kvcr.graph.config import Kind, load_graph

AGG = Path(__file__).parents[2] / "deploy/graphs/agg.yaml"
NEEDED = {"name": "g0", "pool_dir": "/dev/shm/g0"}


def origins(flags: dict[str, object], environment: dict[str, str]) -> dict[str, tuple[object, str]]:
    return {name: (value, origin) for name, value, origin in explain(flags, environment)}


def test_a_flag_goes_over_the_environment_and_that_over_the_default() -> None:
    environment = {"KVCR_GUARD_LEASE_MS": "700", "KVCR_GUARD_NICE": "3", "KVCR_GUARD_POOL_BYTES": "1GiB"}
    found = origins({**NEEDED, "lease_ms": "900"}, environment)
    assert found["lease_ms"] == (900, "flag --lease-ms")
    assert found["nice"] == (3, "KVCR_GUARD_NICE")
    assert found["pool_bytes"] == (1 << 30, "KVCR_GUARD_POOL_BYTES")
    assert found["namespace"] == ("dynamo", "default")


def test_what_is_required_and_missing_is_shown_as_such() -> None:
    found = origins({}, {})
    assert {name for name, (_, origin) in found.items() if origin.startswith("missing")} == {
        "name",
        "pool_dir",
        "pool_bytes",
    }


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"KVCR_CPU_CACHE_GB": "2"}, 2 * 10**9),
        ({"DYN_KVBM_CPU_CACHE_GB": "0.5"}, 5 * 10**8),
        ({"KVCR_CPU_CACHE_GB": "2", "DYN_KVBM_CPU_CACHE_GB": "7"}, 2 * 10**9),
        ({"KVCR_CPU_CACHE_GB": "2", "KVCR_GUARD_POOL_BYTES": "1GiB"}, 1 << 30),
    ],
)
def test_the_size_of_a_pool_may_be_given_in_gb(environment: dict[str, str], expected: int) -> None:
    config = load(GuardConfig, {**NEEDED, **from_environment(environment)}, "test")
    assert config.pool_bytes == expected


@pytest.mark.parametrize("text", ["-1", "0", "much", "inf", "nan"])
def test_a_size_that_is_none_is_refused_by_name(text: str) -> None:
    with pytest.raises(ConfigError, match="KVCR_CPU_CACHE_GB"):
        cache_size({"KVCR_CPU_CACHE_GB": text})


def test_a_graph_takes_the_size_from_the_environment_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_KVBM_CPU_CACHE_GB", "3")
    graph, notes = load_graph(AGG)
    guard = graph.get(Kind.GUARD)
    assert guard is not None
    assert guard.params["pool-bytes"] == 3 * 10**9
    assert any("DYN_KVBM_CPU_CACHE_GB" in note for note in notes)
    graph, _ = load_graph(AGG, [("Guard.pool-bytes", "1GiB")])
    guard = graph.get(Kind.GUARD)
    assert guard is not None
    assert guard.params["pool-bytes"] == "1GiB", "the command line goes over the environment"


def test_the_command_prints_a_table_and_json(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVCR_GUARD_NAME", "from-environment")
    assert main(["config", "show", "--", "--pool-bytes", "2GiB"]) == 0
    assert "KVCR_GUARD_NAME" in capsys.readouterr().out
    assert main(["config", "show", "--json", "--", "--lease-ms", "400"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {"setting": "lease_ms", "value": 400, "from": "flag --lease-ms"} in rows
    assert main(["config", "show", "--", "--lease-sm", "400"]) == 2
