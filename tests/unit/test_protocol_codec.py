# SPDX-License-Identifier: Apache-2.0
"""The wire: what was sent arrives, and nothing else does any harm."""

from __future__ import annotations

import typing
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcr.errors import ProtocolError
from kvcr.layout import Layout
from kvcr.protocol import codec, engine, events, peer
from kvcr.protocol.codec import MAX_BLOCKS_PER_MESSAGE, Codec, Message

CONVERSATIONS: dict[str, tuple[Codec[Any], Any]] = {
    "engine to guard": (engine.to_guard, engine.ToGuard),
    "guard to engine": (engine.to_engine, engine.ToEngine),
    "peer to server": (peer.to_server, peer.ToServer),
    "server to peer": (peer.to_client, peer.ToClient),
    "events": (events.event, events.Event),
}
MESSAGES = [
    pytest.param(conversation, message, id=message.__name__)
    for conversation, (_, union) in CONVERSATIONS.items()
    for message in typing.get_args(union)
]


def values(annotation: Any) -> st.SearchStrategy[Any]:
    """Values of a field's type that every codec can carry."""
    simple = {
        int: st.integers(0, 2**63),
        str: st.text(max_size=20),
        bytes: st.binary(max_size=64),
        bool: st.booleans(),
        float: st.floats(allow_nan=False, width=32),
    }
    if annotation in simple:
        return simple[annotation]
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is tuple and arguments[-1] is not Ellipsis:
        return st.tuples(*(values(argument) for argument in arguments))
    if origin in (list, tuple):
        return st.lists(values(arguments[0]), max_size=3).map(origin)
    if arguments:
        return st.one_of(
            [st.none() if argument is type(None) else values(argument) for argument in arguments]
        )
    if issubclass(annotation, msgspec.Struct):
        return structs(annotation)
    return st.sampled_from(list(annotation))


def structs(kind: type[msgspec.Struct]) -> st.SearchStrategy[Any]:
    hints = typing.get_type_hints(kind)
    return st.builds(kind, **{name: values(hints[name]) for name in kind.__struct_fields__})


@pytest.mark.parametrize(("conversation", "message"), MESSAGES)
@settings(max_examples=8)
@given(data=st.data())
def test_a_message_arrives_as_it_was_sent(
    conversation: str, message: type[Message], data: st.DataObject
) -> None:
    wire = CONVERSATIONS[conversation][0]
    sent = data.draw(structs(message))
    assert wire.decode(wire.encode(sent)) == sent
    assert wire.decode(memoryview(wire.encode(sent))) == sent


@pytest.mark.parametrize(("conversation", "message"), MESSAGES)
@settings(max_examples=3)
@given(data=st.data())
def test_a_field_that_a_newer_sender_appended_is_skipped(
    conversation: str, message: type[Message], data: st.DataObject
) -> None:
    wire = CONVERSATIONS[conversation][0]
    sent = data.draw(structs(message))
    newer = [*msgspec.msgpack.decode(wire.encode(sent)), "a field of the future"]
    assert wire.decode(msgspec.msgpack.encode(newer)) == sent


@given(raw=st.binary(max_size=200))
@pytest.mark.parametrize("conversation", CONVERSATIONS)
def test_noise_is_a_protocol_error_and_nothing_else(conversation: str, raw: bytes) -> None:
    with pytest.raises(ProtocolError, match=f"message of {len(raw)} bytes"):
        CONVERSATIONS[conversation][0].decode(raw)


def test_a_message_of_another_conversation_is_refused() -> None:
    with pytest.raises(ProtocolError):
        engine.to_guard.decode(peer.to_server.encode(peer.Snapshot(1)))


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(ProtocolError):
        engine.to_guard.decode(b"\x91" * 100_000)


def test_a_batch_of_the_agreed_size_fits_and_a_larger_message_says_split() -> None:
    def filled(count: int) -> engine.Filled:
        return engine.Filled(
            epoch=1,
            rank=0,
            slots=bytes(4 * count),
            generations=bytes(8 * count),
            keys=bytes(16 * count),
            parents=bytes(16 * count),
            engine_hashes=bytes(8 * count),
            positions=bytes(4 * count),
        )

    assert len(engine.to_guard.encode(filled(MAX_BLOCKS_PER_MESSAGE))) < codec.MAX_MESSAGE_BYTES
    with pytest.raises(ProtocolError, match=r"Filled has \d+ bytes, the limit is 200000; split the batch"):
        engine.to_guard.encode(filled(4 * MAX_BLOCKS_PER_MESSAGE))


def test_an_oversized_message_is_refused_unread() -> None:
    with pytest.raises(ProtocolError, match="refused, the limit is 200000"):
        engine.to_guard.decode(bytes(codec.MAX_MESSAGE_BYTES + 1))


def test_blobs_are_little_endian_arrays_and_ragged_ones_are_refused() -> None:
    assert codec.i32(np.array([1, -1], "<i4").tobytes()).tolist() == [1, -1]
    assert codec.u32(np.array([2**32 - 1], "<u4").tobytes()).tolist() == [2**32 - 1]
    assert codec.u64(np.array([2**64 - 1], "<u8").tobytes()).tolist() == [2**64 - 1]
    assert codec.u8(b"\x00\xff").tolist() == [0, 255]
    for ragged in (codec.i32, codec.u32, codec.u64):
        with pytest.raises(ProtocolError, match="blob of 3 bytes"):
            ragged(b"abc")


def test_the_hint_envelope_is_plain_data_with_our_action_in_it() -> None:
    payload = events.FetchPayload(plan_id="p", sources=[events.FetchSource("tcp://a:1", 0, 4)], last_key="00")
    envelope = events.envelope("m", [events.fetch_action("a", payload)])
    sent = msgspec.json.decode(msgspec.json.encode(envelope))
    assert sent == envelope
    assert msgspec.convert(sent["actions"][0]["payload"], events.FetchPayload) == payload


def test_a_hello_carries_the_whole_layout() -> None:
    shape = Layout("m", "float32", 16, 2, 2, 16, 4096)
    hello = engine.Hello(engine.VERSION, engine.Role.WORKER, "e", 0, 1, shape, "dynamo")
    received = engine.to_guard.decode(engine.to_guard.encode(hello))
    assert isinstance(received, engine.Hello)
    assert received.layout.digest() == shape.digest()
