# SPDX-License-Identifier: Apache-2.0
"""Settings are checked where they enter, and say what is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvcr.config import EngineConfig, GuardConfig, PeerRecord, guard_settings, load, parse_size
from kvcr.errors import ConfigError

GUARD = {"name": "g", "pool_dir": "/dev/shm/x", "pool_bytes": 4096}


def test_an_unknown_setting_names_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match="vllm: unknown setting 'pool_byte'; did you mean 'pool_bytes'"):
        load(EngineConfig, {"pool_byte": 1}, "vllm")


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        (4096, 4096),
        ("4096", 4096),
        ("512MB", 512 * 10**6),
        ("2GiB", 2 << 30),
        ("2G", 2 << 30),
        ("1.5 GiB", 3 << 29),
        ("64k", 65536),
    ],
)
def test_sizes_have_units(text: str | int, nbytes: int) -> None:
    assert parse_size(text) == nbytes
    assert load(EngineConfig, {"pool_bytes": text}, "test").pool_bytes == nbytes


@pytest.mark.parametrize("text", ["2 gigs", "GiB", "-1", True, None, 1.5])
def test_a_size_that_is_none_is_refused(text: object) -> None:
    with pytest.raises(ConfigError, match="pool_bytes"):
        load(EngineConfig, {"pool_bytes": text}, "test")


def test_values_may_be_text_as_flags_and_environment_have_them() -> None:
    config = load(GuardConfig, {**GUARD, "metrics_port": "-1", "linger_s": "2.5", "cluster": "true"}, "flags")
    assert (config.metrics_port, config.linger_s, config.cluster) == (-1, 2.5, True)


def test_environment_twins() -> None:
    found = guard_settings({"KVCR_GUARD_POOL_DIR": "/x", "KVCR_GUARD_NAME": "g", "HOME": "/"}, {})
    assert {name: setting.value for name, setting in found.items()} == {"pool_dir": "/x", "name": "g"}


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("name", "a b"),
        ("name", ""),
        ("pool_dir", ""),
        ("pool_bytes", 0),
        ("metrics_port", 70000),
        ("lease_ms", 1),
        ("fence_after_s", 0.5),
        ("scrub_bytes_per_s", -1),
        ("on_mismatch", "explode"),
    ],
)
def test_values_out_of_range_are_refused(setting: str, value: object) -> None:
    with pytest.raises(ConfigError, match=setting):
        load(GuardConfig, {**GUARD, setting: value}, "test")


def test_missing_settings_are_named() -> None:
    with pytest.raises(ConfigError, match=r"missing pool_dir \(--pool-dir or KVCR_GUARD_POOL_DIR\)$"):
        load(GuardConfig, {"name": "a", "pool_bytes": 1}, "test")


def test_peers_are_endpoints_or_a_file(tmp_path: Path) -> None:
    assert load(EngineConfig, {"peers": "tcp://a:1, tcp://b:2"}, "t").peers == ["tcp://a:1", "tcp://b:2"]
    assert load(GuardConfig, {**GUARD, "peers": "tcp://a:1"}, "t").peers == [PeerRecord("tcp://a:1")]
    file = tmp_path / "peers.json"
    file.write_text('[{"endpoint": "tcp://a:1", "curve_key": "00ff"}]')
    assert load(GuardConfig, {**GUARD, "peers": str(file)}, "t").peers[0].curve_key == "00ff"
    with pytest.raises(ConfigError, match="cannot be read"):
        load(GuardConfig, {**GUARD, "peers": str(tmp_path / "none.json")}, "t")
    with pytest.raises(ConfigError, match="not tcp://host:port"):
        load(EngineConfig, {"peers": ["a:1"]}, "t")


def test_a_secret_is_read_and_must_not_be_short(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_bytes(b"0123456789abcdef\n")
    assert load(GuardConfig, {**GUARD, "secret_file": str(file)}, "t").secret() == b"0123456789abcdef"
    assert load(GuardConfig, GUARD, "t").secret() is None
    file.write_bytes(b"short")
    with pytest.raises(ConfigError, match="holds 5 bytes"):
        load(GuardConfig, {**GUARD, "secret_file": str(file)}, "t").secret()


def test_the_socket_is_in_the_pools_directory_unless_set() -> None:
    assert load(GuardConfig, GUARD, "t").socket_path == "/dev/shm/x/guard.sock"
    assert load(GuardConfig, {**GUARD, "socket": "/run/k.sock"}, "t").socket_path == "/run/k.sock"
