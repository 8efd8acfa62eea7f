# SPDX-License-Identifier: Apache-2.0
"""Types of the C extension; :mod:`kvcr.keys` says what it computes."""

def extend(parent: bytes, tokens: bytes, block_bytes: int, person: bytes, /) -> bytes: ...
