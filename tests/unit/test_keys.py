# SPDX-License-Identifier: Apache-2.0
"""Block keys: golden vectors pin the function that router and engine share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcr.keys import (
    KEY_VERSION,
    KeySpace,
    _chain,
    extend_chain,
    extend_in_python,
    model_identity,
    pack_keys,
    unpack_keys,
)

GOLDEN = json.loads((Path(__file__).parent / "golden_keys.json").read_text())
VECTORS = {vector["name"]: vector for vector in GOLDEN["vectors"]}
TOKENS = [(31 * i * i + 7 * i) % 151936 for i in range(300)]
SPACE = KeySpace(namespace="dynamo", model=model_identity("tiny-qwen", "5f2c"))


@pytest.mark.parametrize("vector", VECTORS.values(), ids=VECTORS.keys())
def test_keys_are_the_golden_ones(vector: dict[str, Any]) -> None:
    root = KeySpace(**vector["space"]).root()
    chain = extend_chain(root, TOKENS, vector["block_size"])

    assert GOLDEN["key_version"] == KEY_VERSION
    assert root.hex() == vector["root"]
    assert [block.hex() for block in chain[:3]] == vector["keys"][: len(chain)]
    assert (len(chain), chain[-1].hex()) == (vector["count"], vector["last"])


def test_a_salt_is_the_same_bare_and_tagged_by_dynamo() -> None:
    assert VECTORS["salt_bare"]["root"] == VECTORS["salt_tagged_by_dynamo"]["root"]


def test_everything_else_that_the_bytes_depend_on_tells_chains_apart() -> None:
    distinct = [name for name in VECTORS if name not in ("salt_tagged_by_dynamo",)]
    assert len({VECTORS[name]["keys"][0] for name in distinct}) == len(distinct)


def test_no_salt_is_not_the_empty_salt_of_someone_else() -> None:
    assert KeySpace("dynamo", SPACE.model, salt="dynamo-cache-salt:").root() == SPACE.root()
    assert KeySpace("dynamo", SPACE.model, salt=" ").root() != SPACE.root()


@given(
    tokens=st.lists(st.integers(0, 2**32 - 1), max_size=200),
    block_size=st.sampled_from([1, 16, 32]),
    cut=st.integers(0, 12),
)
def test_a_chain_may_be_extended_in_pieces(tokens: list[int], block_size: int, cut: int) -> None:
    whole = extend_chain(SPACE.root(), tokens, block_size)
    head = extend_chain(SPACE.root(), tokens[: cut * block_size], block_size)
    tail = extend_chain(head[-1] if head else SPACE.root(), tokens[len(head) * block_size :], block_size)
    assert head + tail == whole
    assert len(whole) == len(tokens) // block_size


def test_tokens_may_be_an_array_of_any_integer_type() -> None:
    assert extend_chain(SPACE.root(), np.array(TOKENS, np.int64), 16) == extend_chain(
        SPACE.root(), TOKENS, 16
    )


def test_a_block_size_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1 token, got 0"):
        extend_chain(SPACE.root(), TOKENS, 0)


def test_packing_is_undone_by_unpacking_and_ragged_blobs_are_refused() -> None:
    chain = extend_chain(SPACE.root(), TOKENS, 16)
    assert unpack_keys(pack_keys(chain)) == chain
    with pytest.raises(ValueError, match="got 17 bytes"):
        unpack_keys(bytes(17))


def test_new_weights_under_an_old_name_have_another_identity() -> None:
    names = {model_identity("m", "a"), model_identity("m", "b"), model_identity("m", "a", 1)}
    assert len(names) == 3


NOT_BUILT = pytest.mark.skipif(_chain is None, reason="kvcr._chain is not built")


@NOT_BUILT
@given(
    st.binary(min_size=16, max_size=16),
    st.lists(st.integers(0, 2**32 - 1), max_size=300),
    st.integers(1, 130),
)
def test_the_native_chain_is_the_one_in_python(parent: bytes, tokens: list[int], block_size: int) -> None:
    raw = np.array(tokens, dtype="<u4").tobytes()
    native = _chain.extend(parent, raw, 4 * block_size, b"kvcr-block")
    assert native == extend_in_python(parent, raw, 4 * block_size)


@NOT_BUILT
def test_the_native_chain_refuses_what_is_no_parent() -> None:
    with pytest.raises(ValueError, match="expected 16"):
        _chain.extend(b"short", b"", 64, b"kvcr-block")
