# SPDX-License-Identifier: Apache-2.0
"""Instance records: what is stored, and what is believed."""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcr.dynamo.records import (
    MAX_RECORD_BYTES,
    BadSignature,
    InstanceRecord,
    decode,
    encode,
    guards_prefix,
    record_key,
)
from kvcr.errors import ProtocolError
from kvcr.layout import Layout

SECRET = b"0123456789abcdef0123456789abcdef"
LAYOUT = Layout("m@f+0", "bfloat16", 32, 16, 8, 128, 1 << 20)
RECORD = InstanceRecord(
    name="worker0",
    namespace="prod",
    incarnation=2**63 + 5,
    epoch=7,
    state="STANDBY",
    pid=4711,
    host="node-a",
    boot_id="b",
    control_endpoint="tcp://10.0.0.5:7100",
    unix_socket="/run/kvcr/guard.sock",
    curve_key="ab" * 32,
    engine_namespace="prod",
    layout=LAYOUT,
    layout_digest=LAYOUT.digest(),
    block_size=32,
    topology_domains={"rdma_domain": "rackA", "zone": "z1"},
    lease_id=0x7D7BA228356CE706,
)
KEY = record_key("prod", "worker0")


@pytest.mark.parametrize("secret", [None, SECRET])
def test_a_record_comes_back_as_it_was(secret: bytes | None) -> None:
    assert decode(KEY, encode(RECORD, secret), secret) == RECORD


def test_a_record_without_an_engine_comes_back_as_it_was() -> None:
    bare = InstanceRecord(
        name="worker0", namespace="prod", incarnation=1, pid=1, host="h", control_endpoint="tcp://127.0.0.1:1"
    )
    assert decode(KEY, encode(bare, SECRET), SECRET) == bare
    assert bare.model == ""


def test_the_key_is_below_the_prefix_that_is_watched() -> None:
    assert KEY == "kvcr/v1/prod/guards/worker0"
    assert KEY.startswith(guards_prefix("prod"))


def test_the_encoding_does_not_depend_on_the_order_of_a_dictionary() -> None:
    swapped = msgspec.structs.replace(RECORD, topology_domains={"zone": "z1", "rdma_domain": "rackA"})
    assert encode(swapped, SECRET) == encode(RECORD, SECRET)


def test_an_unsigned_record_is_refused_where_there_is_a_secret() -> None:
    with pytest.raises(BadSignature, match="not signed"):
        decode(KEY, encode(RECORD, None), SECRET)


def test_a_record_signed_with_another_secret_is_refused() -> None:
    with pytest.raises(BadSignature, match="another secret"):
        decode(KEY, encode(RECORD, b"another secret, 16+ bytes"), SECRET)


def test_a_signed_record_is_read_without_a_secret() -> None:
    assert decode(KEY, encode(RECORD, SECRET), None) == RECORD


def test_a_record_moved_to_another_key_is_refused() -> None:
    other = record_key("prod", "worker1")
    with pytest.raises(BadSignature):
        decode(other, encode(RECORD, SECRET), SECRET)
    with pytest.raises(ProtocolError, match="names prod/worker0"):
        decode(other, encode(RECORD, None), None)


@given(st.data())
def test_no_changed_byte_goes_unnoticed(data: st.DataObject) -> None:
    value = bytearray(encode(RECORD, SECRET))
    index = data.draw(st.integers(0, len(value) - 1))
    value[index] ^= data.draw(st.integers(1, 255))
    try:
        found = decode(KEY, bytes(value), SECRET)
    except (BadSignature, ProtocolError):
        return
    # Only what lies outside the signed bytes and means nothing may differ.
    assert found == RECORD


@given(st.binary(max_size=200))
def test_no_value_does_worse_than_a_protocol_error(value: bytes) -> None:
    with pytest.raises((ProtocolError, BadSignature)):
        decode(KEY, value, SECRET)
    with pytest.raises(ProtocolError):
        decode(KEY, value, None)


def test_oversized_and_foreign_versions_are_refused() -> None:
    with pytest.raises(ProtocolError, match="limit"):
        decode(KEY, b" " * (MAX_RECORD_BYTES + 1), None)
    with pytest.raises(ProtocolError, match="version 2"):
        decode(KEY, encode(msgspec.structs.replace(RECORD, version=2), SECRET), SECRET)


def test_a_field_of_a_later_release_is_signed_and_skipped() -> None:
    stored = json.loads(encode(RECORD, None))
    stored["record"]["nixl_port"] = 5
    assert decode(KEY, json.dumps(stored).encode(), None) == RECORD


def test_a_peer_takes_what_it_needs_to_connect() -> None:
    peer = RECORD.peer()
    assert (peer.endpoint, peer.name, peer.incarnation) == ("tcp://10.0.0.5:7100", "worker0", 2**63 + 5)
    assert (peer.unix_socket, peer.boot_id, peer.curve_key) == ("/run/kvcr/guard.sock", "b", "ab" * 32)
    assert peer.layout_digest == LAYOUT.digest()
