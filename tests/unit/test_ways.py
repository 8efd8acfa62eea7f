# SPDX-License-Identifier: Apache-2.0
"""Which ways to a peer are tried, in which order, and what is said of the others."""

from __future__ import annotations

import ctypes
import os
from typing import Any

import pytest

from kvcr.guard.addresses import Place
from kvcr.guard.ways import Setting, Ways, cma_error, ways
from kvcr.protocol.peer import PeerWelcome

HERE = Place("boot", 1, 2)


def welcome(**fields: Any) -> PeerWelcome:
    defaults: dict[str, Any] = {
        "op": 1, "name": "b", "incarnation": 1, "epoch": 1, "layout": None, "boot_id": "boot",
        "pool_dir": "/p", "unix_socket": "", "slots": 8, "pid_namespace": 2, "net_namespace": 1,
    }  # fmt: skip
    return PeerWelcome(**{**defaults, **fields})


def setting(**fields: Any) -> Setting:
    defaults: dict[str, Any] = {
        "choice": "auto", "place": HERE, "rdma_ports": [], "ucx_tls": "", "nixl_backend": "UCX",
        "nixl_error": "",
    }  # fmt: skip
    return Setting(**{**defaults, **fields})


def order(found: Ways) -> list[str]:
    return [str(way) for way in (*found.built_in, *found.plugins)]


def test_on_one_host_shared_memory_comes_first() -> None:
    found = ways(setting(), welcome(), {})
    assert order(found) == ["shm", "nixl over cma", "nixl over tcp"]
    assert found.rejected == {"nixl over rdma": "no RDMA port is up here"}


def test_another_host_is_reached_over_rdma_if_both_have_it_and_else_over_tcp() -> None:
    far = welcome(boot_id="other")
    assert order(ways(setting(), far, {})) == ["nixl over tcp"]
    assert ways(setting(), far, {}).rejected["shm"] == "it is on another host"
    found = ways(setting(rdma_ports=["mlx5_0:1"]), far, {})
    assert found.rejected["nixl over rdma"] == "no RDMA port is up there"
    far = welcome(boot_id="other", rdma_ports=("mlx5_0:1",))
    assert order(ways(setting(rdma_ports=["mlx5_0:1"]), far, {})) == ["nixl over rdma", "nixl over tcp"]


def test_a_container_beside_us_is_not_read_through_its_processes() -> None:
    found = ways(setting(), welcome(pid_namespace=3, net_namespace=4), {})
    # Its pool may still be mounted here as well; trying tells.
    assert order(found) == ["shm", "nixl over tcp"]
    assert found.rejected["nixl over cma"] == "it is in another PID namespace"


@pytest.mark.parametrize(
    ("tls", "left"),
    [
        ("tcp,self", ["nixl over tcp"]),
        ("cma,self", ["nixl over cma"]),
        ("all", ["nixl over cma", "nixl over tcp"]),
    ],
)
def test_what_ucx_may_not_use_is_not_tried(tls: str, left: list[str]) -> None:
    found = ways(setting(choice="nixl", ucx_tls=tls), welcome(), {})
    assert order(found) == left
    assert all("leaves it out" in why for way, why in found.rejected.items() if way != "nixl over rdma")


def test_the_setting_may_allow_one_alone() -> None:
    assert order(ways(setting(choice="shm"), welcome(boot_id="other"), {})) == []
    assert order(ways(setting(choice="nixl"), welcome(), {})) == ["nixl over cma", "nixl over tcp"]
    assert order(ways(setting(choice="fabric"), welcome(plugins=("fabric",)), {"fabric": lambda _: ""})) == [
        "fabric"
    ]


def test_without_nixl_its_error_is_the_reason() -> None:
    found = ways(setting(nixl_error="nixl cannot be imported"), welcome(boot_id="other"), {})
    assert order(found) == []
    assert found.rejected["nixl"] == "nixl cannot be imported"


def test_another_back_end_of_nixl_is_taken_as_configured() -> None:
    assert order(ways(setting(nixl_backend="LIBFABRIC"), welcome(boot_id="other"), {})) == [
        "nixl over libfabric"
    ]


def test_plugins_need_both_sides_and_say_themselves_whom_they_reach() -> None:
    plugins = {"fabric": lambda _: "", "other": lambda peer: f"{peer.name} is not in my rack"}
    found = ways(setting(), welcome(plugins=("fabric", "other")), plugins)
    assert [way.transport for way in found.plugins] == ["fabric"]
    assert found.rejected["other"] == "b is not in my rack"
    assert ways(setting(), welcome(), plugins).rejected["fabric"] == "b does not have this plugin"


def test_whether_memory_can_be_read_is_tried() -> None:
    buffer = ctypes.create_string_buffer(64)
    mine = welcome(pid=os.getpid(), region_addresses=(ctypes.addressof(buffer),))
    assert cma_error(mine) == ""
    assert "cannot be read" in cma_error(welcome(pid=os.getpid(), region_addresses=(8,)))
    assert "has not said" in cma_error(welcome())
