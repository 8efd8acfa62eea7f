# SPDX-License-Identifier: Apache-2.0
"""The session table: chains that grow, are shared, are rewritten, and are forgotten."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcr.keys import KeySpace, extend_chain, extend_packed, pack_keys
from router_hints.chains import Chain, common_blocks
from router_hints.names import extend_names
from router_hints.sessions import MAX_STALE, SessionKey, SessionTable

BLOCK = 4
SPACE = KeySpace("dynamo", "tiny@test+0")


def keys_of(tokens: list[int], space: KeySpace = SPACE) -> bytes:
    return pack_keys(extend_chain(space.root(), tokens, BLOCK))


def names_of(tokens: list[int]) -> bytes:
    return extend_names(None, np.array(tokens, np.uint32), BLOCK, SPACE.salt)


def table(**options: object) -> SessionTable:
    return SessionTable(block_size=BLOCK, **options)  # type: ignore[arg-type]


def key(name: str, tenant: str = "") -> SessionKey:
    return SessionKey(tenant, name)


def turn(sessions: SessionTable, name: str, tokens: list[int], parent: str = "", now_s: float = 0.0):  # type: ignore[no-untyped-def]
    return sessions.begin(key(name), parent, SPACE, tokens, now_s)


# --- chains ---------------------------------------------------------------------------------------


@given(
    st.lists(st.integers(0, 3), max_size=40),
    st.lists(st.lists(st.integers(0, 3), max_size=9), max_size=6),
    st.lists(st.integers(0, 3), max_size=60),
)
@settings(max_examples=200, deadline=None)
def test_a_chain_has_the_keys_of_its_tokens_however_they_came(
    prompt: list[int], decoded: list[list[int]], following: list[int]
) -> None:
    chain = Chain.of(SPACE, BLOCK, prompt)
    for tokens in decoded:
        chain.append(tokens)
    seen = prompt + [token for tokens in decoded for token in tokens]
    assert bytes(chain.keys) == keys_of(seen)
    assert chain.cut_names(0) == names_of(seen)
    assert chain.tokens == len(seen)
    for after in (seen + following, following):
        assert bytes(Chain.of(SPACE, BLOCK, after, chain).keys) == keys_of(after)
        assert Chain.of(SPACE, BLOCK, after, chain).cut_names(0) == names_of(after)
    copied = Chain.restored(SPACE, BLOCK, bytes(chain.keys), chain.tail, chain.mark(), chain.cut_names(0))
    copied.append(following)
    assert bytes(copied.keys) == keys_of(seen + following)
    assert copied.cut_names(0) == names_of(seen + following)
    untold = Chain.restored(SPACE, BLOCK, bytes(chain.keys), chain.tail, chain.mark(), b"")
    untold.append(following)
    assert untold.cut_names(0) == (b"" if chain.blocks else names_of(seen + following))
    assert Chain.of(SPACE, BLOCK, seen + following, untold).cut_names(0) == names_of(seen + following)
    assert bytes(Chain.of(SPACE, BLOCK, seen + following, copied).keys) == keys_of(seen + following)


def test_what_a_prompt_has_in_common_with_the_last_one_is_not_hashed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hashed: list[int] = []
    real = extend_packed

    def counting(parent, tokens, block_size):  # type: ignore[no-untyped-def]
        hashed.append(len(tokens) // block_size)
        return real(parent, tokens, block_size)

    monkeypatch.setattr("router_hints.chains.extend_packed", counting)
    tokens = list(range(100 * BLOCK))
    chain = Chain.of(SPACE, BLOCK, tokens)
    chain.append([7] * BLOCK)
    hashed.clear()
    Chain.of(SPACE, BLOCK, [*tokens, *[7] * BLOCK, *range(2 * BLOCK)], chain)
    assert sum(hashed) == 2
    hashed.clear()
    Chain.of(SPACE, BLOCK, [*tokens, *[8] * BLOCK], chain)
    assert sum(hashed) == 1, "the answer came back in other words, the prompt did not"


def test_another_salt_or_model_has_nothing_in_common() -> None:
    tokens = list(range(40))
    chain = Chain.of(SPACE, BLOCK, tokens)
    other = Chain.of(KeySpace("dynamo", "tiny@test+0", salt="t"), BLOCK, tokens, chain)
    assert chain.common(other) == 0


@given(st.binary(max_size=30), st.binary(max_size=30), st.integers(0, 3))
def test_common_blocks_finds_the_first_difference(ours: bytes, theirs: bytes, first: int) -> None:
    # Each byte stands for a token; the chained keys have the property the search relies on.
    a, b = keys_of(sorted(ours)), keys_of(sorted(theirs))
    count = min(len(a), len(b)) // 16
    expected = next((i for i in range(count) if a[i * 16 : i * 16 + 16] != b[i * 16 : i * 16 + 16]), count)
    assert common_blocks(a, b, 0) == expected
    if first <= expected:
        assert common_blocks(a, b, first) == max(expected, min(first, count))


# --- sessions ---------------------------------------------------------------------------------------


def test_prompt_and_decoded_tokens_make_the_chain() -> None:
    sessions = table()
    run = turn(sessions, "a", list(range(10)))
    for token in (90, 91, 92):
        sessions.decoded(run, [token])
    sessions.finish(run, 1.0)
    session = sessions.get(key("a"))
    assert session is not None
    assert session.chain is not None
    assert bytes(session.chain.keys) == keys_of([*range(10), 90, 91, 92])
    assert (session.running, session.turns, sessions.blocks) == (0, 1, 3)


def test_a_session_of_another_tenant_is_another_session() -> None:
    sessions = table()
    sessions.begin(key("a", "one"), "", KeySpace("dynamo", "m", salt="one"), [1] * 8, 0.0)
    assert sessions.get(key("a", "two")) is None
    assert sessions.get(key("a")) is None
    assert sessions.get(key("a", "one")) is not None


def test_what_another_session_uses_is_shared_and_the_rest_is_its_own() -> None:
    sessions = table()
    parent = [*range(8), *range(50, 62)]
    turn(sessions, "parent", parent)
    turn(sessions, "child", [*parent[:12], *range(200, 212)], parent="parent")
    child = sessions.get(key("child"))
    assert child is not None
    assert sessions.shared_blocks(child) == 3
    ((space, first, keys, names),) = sessions.own_blocks(child, 0)
    assert (space, first, keys) == (SPACE, 3, keys_of([*parent[:12], *range(200, 212)])[3 * 16 :])
    assert names == names_of([*parent[:12], *range(200, 212)])[3 * 8 :]
    sessions.forget(key("parent"))
    assert sessions.shared_blocks(child) == 0


def test_a_rewritten_history_leaves_a_branch_that_is_still_the_sessions_own() -> None:
    sessions = table()
    turn(sessions, "a", [*range(8), *range(20, 40)])
    run = turn(sessions, "a", [*range(8), *range(60, 72)])
    assert run.dropped is not None
    assert (run.dropped.first, len(run.dropped.keys) // 16) == (2, 5)
    session = sessions.get(key("a"))
    assert session is not None
    assert [(first, len(keys) // 16) for _, first, keys, _ in sessions.own_blocks(session, 0)] == [
        (0, 5),
        (2, 5),
    ]
    turn(sessions, "b", [*range(8), *range(20, 32)])
    assert [(first, len(keys) // 16) for _, first, keys, _ in sessions.own_blocks(session, 0)] == [
        (2, 3),
        (5, 2),
    ]


def test_compaction_cuts_the_chain_and_forgets_branches() -> None:
    sessions = table()
    turn(sessions, "a", [*range(8), *range(20, 40)])
    turn(sessions, "a", [*range(8), *range(60, 72)])
    session = sessions.get(key("a"))
    assert session is not None
    sessions.compact(session, 2)
    assert session.chain is not None
    assert (session.chain.blocks, session.stale, sessions.blocks) == (2, [], 2)
    run = turn(sessions, "a", [*range(8), *range(80, 90)])
    assert run.dropped is None


def test_idle_sessions_are_forgotten_and_running_ones_are_not() -> None:
    sessions = table(ttl_s=100.0)
    turn(sessions, "running", [1] * 8)
    sessions.finish(turn(sessions, "idle", [2] * 8), 0.0)
    sessions.expire(99.0)
    assert len(sessions) == 2
    sessions.expire(101.0)
    assert sessions.get(key("idle")) is None
    assert sessions.get(key("running")) is not None
    assert sessions.forgotten["idle"] == 1


def test_memory_is_bounded_by_sessions_and_by_blocks() -> None:
    sessions = table(max_sessions=10, max_blocks=1000)
    for number in range(100):
        sessions.finish(turn(sessions, f"s{number}", [number] * 8), float(number))
    assert len(sessions) == 10
    assert sessions.get(key("s99")) is not None
    sessions = table(max_blocks=50)
    for number in range(100):
        sessions.finish(turn(sessions, f"s{number}", [number] * 40), float(number))
    assert sessions.blocks <= 50
    assert sessions.forgotten["full"] == 95
    for number in range(3 * MAX_STALE):
        sessions.finish(turn(sessions, "one", [1] * 4 + [number] * 8), 200.0)
    assert sessions.blocks <= 50


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_blocks_are_counted_and_sharing_is_found_whatever_happens(data: st.DataObject) -> None:
    """Against a model that keeps every session's tokens."""
    sessions = table(max_sessions=4)
    runs: list[tuple[str, object, list[int]]] = []
    tokens_of: dict[str, list[int]] = {}
    for step in range(data.draw(st.integers(1, 25))):
        name = data.draw(st.sampled_from("abcdef"))
        what = data.draw(st.sampled_from(["turn", "turn", "decode", "finish", "compact", "forget"]))
        if what == "turn":
            tokens = data.draw(st.lists(st.integers(0, 1), max_size=30))
            runs.append((name, turn(sessions, name, tokens, now_s=float(step)), list(tokens)))
            tokens_of[name] = runs[-1][2]
        elif what == "decode" and runs:
            _, run, tokens = data.draw(st.sampled_from(runs))
            more = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=6))
            sessions.decoded(run, more)  # type: ignore[arg-type]
            tokens.extend(more)
        elif what == "finish" and runs:
            _, run, _ = data.draw(st.sampled_from(runs))
            sessions.finish(run, float(step))  # type: ignore[arg-type]
        elif what == "compact" and (session := sessions.get(key(name))) and session.chain:
            keep = data.draw(st.integers(0, session.chain.blocks))
            sessions.compact(session, keep)
            tokens_of[name] = (
                tokens_of[name][: keep * BLOCK]
                if keep * BLOCK < len(tokens_of[name]) // BLOCK * BLOCK
                else tokens_of[name]
            )
        elif what == "forget":
            sessions.forget(key(name))
        alive = {s.key.session: s for s in sessions.all()}
        assert sessions.blocks == sum(s.blocks for s in alive.values())
        chains = {n: keys_of(tokens_of[n]) for n in alive}
        for alive_name, session in alive.items():
            mine = np.frombuffer(chains[alive_name], dtype="S16")
            assert bytes(session.chain.keys if session.chain else b"") == chains[alive_name]
            expected = 0
            for other, theirs in chains.items():
                if other != alive_name:
                    expected = max(
                        expected, len(set(mine.tolist()) & set(np.frombuffer(theirs, dtype="S16").tolist()))
                    )
            assert sessions.shared_blocks(session) == expected
