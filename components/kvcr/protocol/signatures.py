# SPDX-License-Identifier: Apache-2.0
"""What guards write where others can write too, signed with the deployment's secret (HMAC-SHA256).

A signature is of some bytes at one place (an etcd key, a NATS subject) and of one kind (the domain), so that
it is of use nowhere else. It is made of the bytes as they are sent: readers of another release may write them
differently.
"""

from __future__ import annotations

import hashlib
import hmac

HEADER = "Kvcr-Signature"
"""NATS header that carries the signature of a message's payload."""

INSTANCE_RECORD = b"kvcr instance record v1\n"
EPOCH_RECORD = b"kvcr epoch record v1\n"
STATE_CHANGE = b"kvcr state change v1\n"


def sign(domain: bytes, place: str, raw: bytes, secret: bytes | None) -> str:
    """64 hex digits; empty without a secret."""
    if secret is None:
        return ""
    return hmac.new(secret, domain + place.encode() + b"\n" + raw, hashlib.sha256).hexdigest()


def is_signed(domain: bytes, place: str, raw: bytes, signature: str, secret: bytes | None) -> bool:
    """Whether ``signature`` is ours. Without a secret nothing is asked for, and everything is."""
    return secret is None or hmac.compare_digest(
        signature.encode(errors="replace"), sign(domain, place, raw, secret).encode()
    )
