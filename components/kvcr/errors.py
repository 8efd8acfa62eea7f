# SPDX-License-Identifier: Apache-2.0
"""The errors KVCR raises, as one tree.

::

    KvcrError
    ├── ConfigError          a setting is unknown, missing or out of range
    ├── PoolError            the pool's files cannot be created, mapped or trusted
    │   ├── PoolTooSmall     the mount or the configured size cannot hold what was asked
    │   ├── PoolBusy         another live guard (or engine) owns it
    │   └── PoolCorrupt      magic, version or digest do not match what the files claim
    ├── LayoutMismatch       two parties disagree on the shape of a block
    │   └── MustFail         and on_mismatch says that this is fatal for the engine
    ├── ProtocolError        a message does not decode, is too large, or is of another version
    ├── GuardUnavailable     no guard answers on its socket
    └── Refused              the guard answered, and said no

A miss, a full pool or a slow peer is a result, not an error: see :class:`kvcr.api.BlockStatus`.
"""

from __future__ import annotations


class KvcrError(Exception):
    """Base of every error KVCR raises on purpose."""


class ConfigError(KvcrError):
    """A setting is unknown, missing or out of range; the message names it, its limit and the fix."""


class PoolError(KvcrError):
    """The pool's files cannot be created, mapped or trusted."""


class PoolTooSmall(PoolError):
    """The mount or the configured size cannot hold what was asked for."""


class PoolBusy(PoolError):
    """Another live process owns the pool."""


class PoolCorrupt(PoolError):
    """The files are not a pool of this version, or their superblock contradicts their size."""


class LayoutMismatch(KvcrError):
    """Two parties disagree on the shape of a block; the message names both values."""


class MustFail(LayoutMismatch):
    """The guard's ``on_mismatch`` says that an engine of another layout must not start."""


class ProtocolError(KvcrError):
    """A message does not decode, exceeds its limit, or is of another version."""


class GuardUnavailable(KvcrError):
    """No guard answers on its socket."""


class Refused(KvcrError):
    """The guard answered, and said no."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(f"{code}: {reason}")
        self.code = code
        self.reason = reason
