# SPDX-License-Identifier: Apache-2.0
"""What a guard says about itself in etcd, under ``kvcr/v1/{namespace}/guards/{name}``.

A record is JSON, signed with the deployment's secret: whoever can write to etcd must not be able to make
engines read KV from a process of theirs. Without a secret (loopback only) records are taken as they are.
"""

from __future__ import annotations

import msgspec

from kvcr.config import PeerRecord
from kvcr.errors import KvcrError, ProtocolError
from kvcr.layout import Layout
from kvcr.protocol.signatures import INSTANCE_RECORD, is_signed, sign

VERSION = 1
MAX_RECORD_BYTES = 64 * 1024


class BadSignature(KvcrError):
    """A record is unsigned, or signed with another secret, or was changed or moved after signing."""


class InstanceRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One running guard. Fields that a reader does not know are kept out of its way, but are signed."""

    name: str
    namespace: str
    """Dynamo namespace it is registered in."""
    incarnation: int
    epoch: int = 0
    state: str = ""
    """As in :class:`kvcr.guard.view.GuardState`."""
    pid: int
    host: str
    """Host name, as the guard's container sees it; with ``pid`` it names the process to a launcher."""
    boot_id: str = ""
    control_endpoint: str
    unix_socket: str = ""
    metrics_endpoint: str = ""
    curve_key: str = ""
    """CURVE public key of the control socket, 64 hex digits; empty without a secret."""
    engine_namespace: str = ""
    """Namespace part of its engine's block keys; empty until an engine attached."""
    layout: Layout | None = None
    """None until an engine attached or an existing pool was found."""
    layout_digest: str = ""
    block_size: int = 0
    topology_domains: dict[str, str] = {}
    """Domain to value, e.g. ``rdma_domain`` to ``rackA``."""
    net_namespace: int = 0
    """With ``boot_id`` it says whose loopback interface a ``control_endpoint`` on 127.0.0.1 is."""
    lease_id: int = 0
    """etcd lease of the record and of the Dynamo instances; equals their instance id."""
    version: int = VERSION

    @property
    def model(self) -> str:
        """Model identity, empty until an engine attached."""
        return self.layout.model if self.layout is not None else ""

    def peer(self) -> PeerRecord:
        """The part of it that a guard needs to read from this one."""
        return PeerRecord(
            endpoint=self.control_endpoint,
            name=self.name,
            incarnation=self.incarnation,
            unix_socket=self.unix_socket,
            boot_id=self.boot_id,
            net_namespace=self.net_namespace,
            curve_key=self.curve_key,
            layout_digest=self.layout_digest,
        )


class _Signed(msgspec.Struct, frozen=True):
    """What is stored. ``record`` stays the bytes that were signed: there is no canonical JSON to agree on."""

    record: msgspec.Raw
    signature: str = ""
    """HMAC-SHA256 over domain, key and record, 64 hex digits; empty without a secret."""


_signed_decoder = msgspec.json.Decoder(_Signed)
_record_decoder = msgspec.json.Decoder(InstanceRecord)
_encoder = msgspec.json.Encoder(order="deterministic")


def guards_prefix(namespace: str) -> str:
    """etcd prefix of the records of a namespace."""
    return f"kvcr/v1/{namespace}/guards/"


def record_key(namespace: str, name: str) -> str:
    """etcd key of one guard's record."""
    return guards_prefix(namespace) + name


def encode(record: InstanceRecord, secret: bytes | None) -> bytes:
    """The value to store under :func:`record_key`; the same record and secret give the same bytes."""
    raw = _encoder.encode(record)
    key = record_key(record.namespace, record.name)
    return _encoder.encode(_Signed(msgspec.Raw(raw), sign(INSTANCE_RECORD, key, raw, secret)))


def decode(key: str, value: bytes, secret: bytes | None) -> InstanceRecord:
    """The record stored under ``key``, verified.

    With a secret, raises BadSignature unless the record was signed with it for this very key. Without
    one, signatures are not looked at. Raises ProtocolError on anything that is no record of this version,
    or is under a key that is not its own.
    """
    if len(value) > MAX_RECORD_BYTES:
        raise ProtocolError(f"record {key} has {len(value)} bytes, the limit is {MAX_RECORD_BYTES}")
    try:
        signed = _signed_decoder.decode(value)
        raw = bytes(signed.record)
        # Verified before it is decoded any further.
        if not is_signed(INSTANCE_RECORD, key, raw, signed.signature, secret):
            raise BadSignature(
                f"record {key} is {'signed with another secret' if signed.signature else 'not signed'}; "
                "give every guard and router of the deployment the same secret file"
            )
        record = _record_decoder.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"record {key} does not decode: {error}") from error
    if record.version != VERSION:
        raise ProtocolError(f"record {key} is of version {record.version}, this release reads {VERSION}")
    if record_key(record.namespace, record.name) != key:
        raise ProtocolError(f"record {key} names {record.namespace}/{record.name}")
    return record
