# SPDX-License-Identifier: Apache-2.0
"""The flags of routing reach the cost model and the topology."""

from __future__ import annotations

import pytest

from kvcr.errors import ConfigError
from router_hints.guards import Guard, GuardDirectory
from router_hints.settings import parse
from router_hints.topology import Link

NEEDED = ["--model-path", "m", "--model-name", "m", "--block-size", "16"]


def test_prices_and_budgets_are_read() -> None:
    settings = parse(
        [*NEEDED, "--zone-bytes-per-s", "7e8", "--max-replicas", "3", "--copy-budget-bytes-per-s", "1e9"], {}
    )
    assert settings.costs.zone_bytes_per_s == 7e8
    assert settings.costs.max_replicas == 3
    assert settings.costs.copy_budget_bytes_per_s == 1e9
    for flag, value in (("--zone-bytes-per-s", "0"), ("--copy-budget-bytes-per-s", "-1")):
        with pytest.raises(ConfigError, match=flag):
            parse([*NEEDED, flag, value], {})


def test_required_topology_reaches_the_planner_and_domains_make_classes() -> None:
    required = parse([*NEEDED, "--topology", "required"], {}).domain_required
    assert required
    assert not parse(NEEDED, {}).domain_required
    guards = GuardDirectory(domain_required=required)
    for name, domain, zone, host in (
        ("a", "A", "z", ""),
        ("b", "B", "z", ""),
        ("c", "A", "z", "h"),
        ("d", "B", "y", "h"),
    ):
        guards.put(Guard(name, 1, f"tcp://{name}", "n", rdma_domain=domain, zone=zone, host=host))
    topology = guards.topology
    assert topology.required
    assert [topology.link("a", other) for other in "bcd"] == [Link.ZONE, Link.DOMAIN, Link.FAR]
    assert topology.link("c", "d") is Link.HOST
