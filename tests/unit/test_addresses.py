# SPDX-License-Identifier: Apache-2.0
"""Where a guard binds, what it advertises, and which interface it uses. On the interfaces of this machine."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Any

import pytest

from kvcr.config import GuardConfig
from kvcr.errors import ConfigError
from kvcr.guard import addresses
from kvcr.guard.addresses import (
    Addresses,
    Place,
    bracketed,
    interface_addresses,
    interface_of,
    is_loopback,
    rdma_devices,
    route_to,
    set_ucx_devices,
    split_host,
)


def plan(**settings: Any) -> Addresses:
    return addresses.plan(GuardConfig(name="a", pool_dir="/nowhere", pool_bytes=1, **settings))


@pytest.fixture
def two_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with a management and a data network, and no default route."""
    monkeypatch.setattr(
        addresses,
        "_all_addresses",
        lambda: [
            ("lo", "127.0.0.1"), ("mgmt0", "192.0.2.7"), ("data0", "198.51.100.7"), ("data0", "198.51.100.8"),
            ("lo", "::1"), ("data0", "2001:db8::7"),
        ],
    )  # fmt: skip
    monkeypatch.setattr(
        addresses.socket, "if_nameindex", lambda: [(1, "lo"), (2, "mgmt0"), (3, "data0"), (4, "idle0")]
    )
    monkeypatch.setattr(addresses, "route_to", lambda host: ("", ""))


def test_the_kernel_tells_the_addresses_of_this_machine() -> None:
    assert "127.0.0.1" in interface_addresses("lo")
    assert interface_of("127.0.0.1") == interface_of("localhost") == interface_of("127.0.0.3") == "lo"
    assert interface_of("192.0.2.250") == ""
    assert route_to("127.0.0.1") == ("lo", "127.0.0.1")
    for address in interface_addresses("lo"):
        assert ipaddress.ip_address(address).is_loopback


def test_by_default_it_stays_on_loopback_with_control_and_bytes() -> None:
    assert plan() == Addresses("tcp://127.0.0.1:0", "", "lo")
    assert plan(control="tcp://[::1]:7100") == Addresses("tcp://[::1]:7100", "", "lo")
    assert plan(advertise="proxy.example").interface == ""


def test_an_interface_gives_the_address_to_bind(two_cards: None) -> None:
    assert plan(interface="data0") == Addresses("tcp://198.51.100.7:0", "", "data0")
    assert plan(interface="198.51.100.8") == Addresses("tcp://198.51.100.8:0", "", "data0")
    assert plan(interface="2001:db8::7") == Addresses("tcp://[2001:db8::7]:0", "", "data0")
    assert plan(interface="127.0.0.3").bind == "tcp://127.0.0.3:0"


def test_binding_everything_advertises_the_configured_interface(two_cards: None) -> None:
    everything = "tcp://0.0.0.0:7100"
    assert plan(control=everything, interface="data0") == Addresses(everything, "198.51.100.7", "data0")
    assert plan(control="tcp://[::]:7100", interface="2001:db8::7").advertise == "[2001:db8::7]"


def test_with_two_cards_and_no_route_nothing_is_guessed(two_cards: None) -> None:
    with pytest.raises(ConfigError, match=r"192\.0\.2\.7.*198\.51\.100\.7.*set --advertise or --interface"):
        plan(control="tcp://0.0.0.0:7100")
    assert plan(control="tcp://0.0.0.0:7100", advertise="node7").advertise == "node7"


def test_an_address_to_bind_names_its_interface_for_the_bytes(two_cards: None) -> None:
    assert plan(control="tcp://198.51.100.8:7100").interface == "data0"


def test_bind_and_advertise_may_differ(two_cards: None) -> None:
    nat = plan(control="tcp://192.0.2.7:7100", advertise="gateway.example:17100")
    assert nat == Addresses("tcp://192.0.2.7:7100", "gateway.example:17100", "mgmt0")


@pytest.mark.parametrize("loopback", ["127.0.0.1", "localhost", "127.0.0.1:7100", "::1", "[::1]:7100"])
def test_loopback_is_not_advertised_by_who_can_be_reached(two_cards: None, loopback: str) -> None:
    with pytest.raises(ConfigError, match="peers on other hosts would connect to themselves"):
        plan(control="tcp://198.51.100.7:7100", advertise=loopback)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"interface": "eth9"}, "'eth9' does not exist; there are: lo, mgmt0, data0, idle0"),
        ({"interface": "idle0"}, "'idle0' has no address"),
        ({"interface": "203.0.113.1"}, "no interface has the address"),
        ({"interface": "data0", "control": "tcp://192.0.2.7:7100"}, "not an address of interface 'data0'"),
        ({"control": "198.51.100.7:7100"}, "not tcp://host:port"),
        ({"control": "tcp://198.51.100.7"}, "not tcp://host:port"),
        ({"control": "tcp://198.51.100.7:http"}, "write tcp://host:port"),
    ],
)
def test_what_cannot_be_is_refused_by_name(two_cards: None, settings: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan(**settings)


@pytest.mark.parametrize("host", ["x" * 64, "a..b", "a\0b", "no.such.host.invalid"])
def test_to_what_is_no_host_there_is_no_route(host: str) -> None:
    assert route_to(host) == ("", "")


def test_endpoints_and_loopback() -> None:
    assert split_host("tcp://[2001:db8::7]:7100") == ("2001:db8::7", 7100)
    assert bracketed("2001:db8::7") == bracketed("[2001:db8::7]") == "[2001:db8::7]"
    assert bracketed("10.0.0.1") == "10.0.0.1"
    assert is_loopback("[::1]")
    assert is_loopback("127.8.9.1")
    assert not is_loopback("2001:db8::1")
    assert not is_loopback("worker7")


def test_loopback_is_shared_within_a_network_namespace_only() -> None:
    here = Place("boot", 5, 6)
    assert here.same_loopback("boot", 5)
    assert here.same_loopback("", 0)
    assert not here.same_loopback("boot", 7)
    assert not here.same_loopback("other", 5)


def test_ucx_is_given_the_interface_and_its_rdma_ports_unless_told_otherwise(
    two_cards: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment: dict[str, str] = {}
    set_ucx_devices("", environment)
    assert environment == {}
    set_ucx_devices("data0", environment)
    assert environment == {"UCX_NET_DEVICES": "data0"}
    told = {"UCX_NET_DEVICES": "mlx5_3:1"}
    set_ucx_devices("data0", told)
    assert told == {"UCX_NET_DEVICES": "mlx5_3:1"}
    monkeypatch.setattr(addresses, "_all_addresses", lambda: [("v6", "2001:db8::7")])
    environment = {}
    set_ucx_devices("v6", environment)
    assert environment == {"UCX_NET_DEVICES": "v6", "UCX_TCP_AF_PRIO": "inet6,inet"}


def test_only_rdma_ports_that_are_up_count(tmp_path: Path) -> None:
    for name, port, state in (
        ("mlx5_0", 1, "4: ACTIVE"),
        ("mlx5_1", 1, "1: DOWN"),
        ("mlx5_0", 2, "4: ACTIVE"),
    ):
        (tmp_path / name / "ports" / str(port)).mkdir(parents=True)
        (tmp_path / name / "ports" / str(port) / "state").write_text(state + "\n")
    assert rdma_devices(tmp_path) == ["mlx5_0:1", "mlx5_0:2"]
    assert rdma_devices(tmp_path / "none") == []


def test_a_card_that_goes_while_it_is_looked_at_is_no_error(tmp_path: Path) -> None:
    # As sysfs does then, reading fails after the name was there.
    (tmp_path / "mlx5_1/ports/1/state").mkdir(parents=True)
    assert rdma_devices(tmp_path) == []
