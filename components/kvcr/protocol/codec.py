# SPDX-License-Identifier: Apache-2.0
"""Typed msgpack for every conversation: sizes are checked before decoding, types while decoding.

Batches travel as blobs (16 bytes a key, little-endian integers), never as a map per block.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from kvcr.errors import ProtocolError

T = TypeVar("T")

MAX_BLOCKS_PER_MESSAGE = 2048
"""Senders split longer batches. 2,048 blocks are about 110 kB at 52 bytes a block; a Unix seqpacket
message fails with EMSGSIZE between 212 and 262 kB (measured, Linux 6.18)."""

MAX_MESSAGE_BYTES = 200_000


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Base of every message: an array on the wire, tagged with its class name.

    New fields go at the end with a default, so that an older reader skips them.
    """


class Codec(Generic[T]):
    """Encodes and decodes one union of messages.

    Raises :class:`ProtocolError` on anything that is not such a message, or is over ``max_bytes``.
    """

    def __init__(self, union: Any, *, max_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(union)
        self._encoder = msgspec.msgpack.Encoder()
        self._max_bytes = max_bytes

    def encode(self, message: T) -> bytes:
        raw = self._encoder.encode(message)
        if len(raw) > self._max_bytes:
            raise ProtocolError(
                f"{type(message).__name__} has {len(raw)} bytes, the limit is {self._max_bytes}; "
                "split the batch"
            )
        return raw

    def decode(self, raw: bytes | memoryview) -> T:
        if len(raw) > self._max_bytes:
            raise ProtocolError(f"message of {len(raw)} bytes refused, the limit is {self._max_bytes}")
        try:
            return self._decoder.decode(raw)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ProtocolError(f"message of {len(raw)} bytes does not decode: {error}") from error


def i32(blob: bytes) -> npt.NDArray[np.int32]:
    """A blob of little-endian int32 as a read-only array; raises ProtocolError on a ragged length."""
    return _array(blob, "<i4")


def u32(blob: bytes) -> npt.NDArray[np.uint32]:
    """A blob of little-endian uint32 as a read-only array; raises ProtocolError on a ragged length."""
    return _array(blob, "<u4")


def u64(blob: bytes) -> npt.NDArray[np.uint64]:
    """A blob of little-endian uint64 as a read-only array; raises ProtocolError on a ragged length."""
    return _array(blob, "<u8")


def u8(blob: bytes) -> npt.NDArray[np.uint8]:
    """A blob of bytes as a read-only array."""
    return _array(blob, "u1")


def _array(blob: bytes, dtype: str) -> npt.NDArray[Any]:
    try:
        return np.frombuffer(blob, dtype=dtype)
    except ValueError as error:
        raise ProtocolError(f"blob of {len(blob)} bytes is not an array of {dtype}") from error
