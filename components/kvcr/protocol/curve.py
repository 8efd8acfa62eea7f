# SPDX-License-Identifier: Apache-2.0
"""Keys of the control sockets of a deployment that has a secret.

Every guard makes a key pair of its own at each start and publishes the public half in its signed record.
Clients (guards and routers) all use one pair, derived from the secret: whoever has the secret may connect,
and servers admit nobody else. Keys are 32 raw bytes; ZMQ wants them as Z85 text.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import NamedTuple

import zmq
from zmq.utils import z85

from kvcr.errors import ConfigError

KEY_BYTES = 32


class KeyPair(NamedTuple):
    public: bytes
    """32 raw bytes"""
    secret: bytes
    """32 raw bytes"""


def new_pair() -> KeyPair:
    """A fresh pair, for a server."""
    public, secret = zmq.curve_keypair()
    return KeyPair(z85.decode(public), z85.decode(secret))


def client_pair(deployment_secret: bytes) -> KeyPair:
    """The pair that all clients of the deployment use."""
    secret = hmac.new(deployment_secret, b"kvcr control client v1", hashlib.sha256).digest()
    return KeyPair(z85.decode(zmq.curve_public(z85.encode(secret))), secret)


def read_key(text: str, whose: str) -> bytes:
    """A public key as records have it, 64 hex digits. Raises ConfigError, which says ``whose`` it is not."""
    try:
        return bytes.fromhex(text)
    except ValueError:
        raise ConfigError(f"the CURVE key of {whose} is {text[:70]!r}, and not 64 hex digits") from None


def secure_client(sock: zmq.Socket[bytes], deployment_secret: bytes, server_key: bytes) -> None:
    """Make ``sock``, not yet connected, speak CURVE to the server with this public key (32 bytes).

    Raises ConfigError on a key of another length.
    """
    if len(server_key) != KEY_BYTES:
        raise ConfigError(
            f"a CURVE public key has {KEY_BYTES} bytes, got {len(server_key)}; "
            "take it from the peer's record (curve_key, 64 hex digits)"
        )
    pair = client_pair(deployment_secret)
    sock.curve_publickey = z85.encode(pair.public)
    sock.curve_secretkey = z85.encode(pair.secret)
    sock.curve_serverkey = z85.encode(server_key)


def secure_server(sock: zmq.Socket[bytes], pair: KeyPair, domain: str) -> None:
    """Make ``sock``, not yet bound, speak CURVE as ``pair``; ZAP requests for it carry ``domain``."""
    sock.curve_server = True
    sock.curve_publickey = z85.encode(pair.public)
    sock.curve_secretkey = z85.encode(pair.secret)
    sock.zap_domain = domain.encode()
