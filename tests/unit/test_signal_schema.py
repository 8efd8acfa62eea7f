# SPDX-License-Identifier: Apache-2.0
"""The schema of signals: what is accepted, what is refused, and how it is said."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import UNSET

from kvcr.protocol.signals import MAX_SIGNAL_BYTES, BadSignal, Kind, Signal, read_signal, schema

PUBLISHED = Path(__file__).resolve().parents[2] / "docs/signals.schema.json"

FULL = {
    "version": 1,
    "kind": "fork",
    "session": "child",
    "parent": "root",
    "signal_id": "s-1",
    "isl": 48000,
    "osl": 2000,
    "starts_in_s": 2.5,
    "runs_s": 350,
    "next_in_s": 30,
    "keeps": 8000,
    "idle_s": 0,
    "isl_before": 96000,
    "isl_after": 8000,
    "deadline_s": 10,
    "ttl_s": 60,
}


def test_every_field_is_read() -> None:
    signal = read_signal(json.dumps(FULL))
    assert {name: getattr(signal, name) for name in FULL} == FULL | {"kind": Kind.FORK}
    assert set(Signal.__struct_fields__) == set(FULL) | {"keeps_messages"}


def test_no_next_turn_is_not_the_same_as_not_knowing() -> None:
    assert read_signal('{"kind": "one_off", "session": "a"}').next_in_s is UNSET
    assert read_signal('{"kind": "one_off", "session": "a", "next_in_s": null}').next_in_s is None


def test_a_signal_without_an_id_gets_one() -> None:
    first, second = (read_signal('{"kind": "next_turn", "session": "a"}') for _ in range(2))
    assert first.signal_id
    assert first.signal_id != second.signal_id


def test_the_carrier_says_what_the_message_leaves_out() -> None:
    signal = read_signal('{"kind": "fork"}', {"session": "child", "parent": "root"})
    assert (signal.session, signal.parent) == ("child", "root")
    assert read_signal('{"kind": "one_off", "session": "own"}', {"session": "header"}).session == "own"


@pytest.mark.parametrize(
    ("change", "field", "value", "limit"),
    [
        ({"isl": -1}, "isl", "-1", ">= 0"),
        ({"isl": 99_999_999}, "isl", "99999999", "<= 16777216"),
        ({"osl": "many"}, "osl", '"many"', "int"),
        ({"runs_s": -0.5}, "runs_s", "-0.5", ">= 0.0"),
        ({"starts_in_s": 1e9}, "starts_in_s", "1000000000.0", "<= 604800"),
        ({"deadline_s": 0}, "deadline_s", "0", "> 0"),
        ({"kind": "explode"}, "kind", '"explode"', "one of fork, compaction"),
        ({"kind": None}, "kind", "null", "one of fork"),
        ({"session": ""}, "session", '""', "length >= 1"),
        ({"session": "x" * 300}, "session", '"xxx', "length <= 256"),
        ({"version": 2}, "version", "2", "invalid enum value"),
        ({"colour": "red"}, "colour", '"red"', "no such field; known are kind, session"),
        ({"parent": ""}, "parent", '""', "kind 'fork' needs it"),
        ({"parent": "child"}, "parent", '"child"', "not its own parent"),
        ({"kind": "pin", "ttl_s": None}, "ttl_s", "null", "kind 'pin' needs it"),
        ({"keeps_messages": 3}, "keeps_messages", "3", "not both"),
        ({"isl_after": 100_000}, "isl_after", "100000", "at most isl_before, 96000"),
    ],
)
def test_a_bad_signal_is_refused_naming_field_value_and_limit(
    change: dict[str, Any], field: str, value: str, limit: str
) -> None:
    with pytest.raises(BadSignal) as refused:
        read_signal(json.dumps(FULL | change))
    assert refused.value.field == field
    assert refused.value.value.startswith(value)
    assert limit in refused.value.limit
    assert all(part in str(refused.value) for part in (field, value, limit))


def test_what_is_missing_is_named() -> None:
    for missing in ("kind", "session"):
        with pytest.raises(BadSignal, match=rf"'{missing}' is null; required"):
            read_signal(json.dumps({name: value for name, value in FULL.items() if name != missing}))


@pytest.mark.parametrize("raw", ["", "{", "[]", "3", '"fork"', "null", "\udcff", "[" * 5000, b"\xff\xfe"])
def test_what_is_no_object_is_refused(raw: str | bytes) -> None:
    with pytest.raises(BadSignal):
        read_signal(raw if isinstance(raw, bytes) else raw.encode(errors="surrogateescape"))


def test_a_signal_is_not_read_beyond_its_limit() -> None:
    with pytest.raises(BadSignal, match=str(MAX_SIGNAL_BYTES)):
        read_signal(json.dumps(FULL | {"signal_id": "x" * MAX_SIGNAL_BYTES}))


@given(st.binary(max_size=200))
def test_garbage_is_refused_and_nothing_else_is_raised(raw: bytes) -> None:
    with contextlib.suppress(BadSignal):
        read_signal(raw)


def test_the_published_schema_is_the_one_that_is_enforced() -> None:
    published = json.loads(PUBLISHED.read_text())
    assert published == schema()
    jsonschema.Draft202012Validator.check_schema(published)
    validator = jsonschema.Draft202012Validator(published)
    examples = [
        FULL,
        {"kind": "one_off", "session": "a", "next_in_s": None},
        {"kind": "fork", "session": "a"},
        {"kind": "pin", "session": "a", "ttl_s": 5},
        {"kind": "pin", "session": "a"},
        FULL | {"isl": -1},
        FULL | {"kind": "explode"},
        FULL | {"colour": "red"},
        {"session": "a"},
    ]
    for example in examples:
        try:
            read_signal(json.dumps(example))
            accepted = True
        except BadSignal:
            accepted = False
        assert validator.is_valid(example) is accepted, example
