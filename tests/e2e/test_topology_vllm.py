# SPDX-License-Identifier: Apache-2.0
"""RDMA domains on real vLLM workers: where a prefix is pulled from, and where it is computed instead."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from demo.observe import observe
from tests.e2e.agg import PROMPT_BLOCKS, Agg, messages, running
from tests.e2e.tiny_model import BLOCK_SIZE

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def agg(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Agg]:
    """Two workers in rack A and one in rack B; nothing is copied between racks."""
    options = [
        "--VllmWorker.ServiceArgs.workers=3",
        "--VllmWorker.topology=[{rdma_domain: A}, {rdma_domain: A}, {rdma_domain: B}]",
        "--Router.topology=required",
    ]
    with running(tmp_path_factory.mktemp("racks"), options) as graph:
        yield graph


def test_inside_the_domain_a_prefix_is_pulled_and_outside_it_is_computed(agg: Agg) -> None:
    holder, beside, outside = agg.graph.workers
    chat = messages(1)
    cold = observe(agg.graph, chat, max_tokens=8, worker=holder)
    near = observe(agg.graph, chat, max_tokens=8, worker=beside)
    far = observe(agg.graph, chat, max_tokens=8, worker=outside)
    assert (near.source, near.pulled_blocks) == (holder, PROMPT_BLOCKS)
    assert near.answer.cached_tokens == PROMPT_BLOCKS * BLOCK_SIZE
    assert (far.source, far.pulled_blocks, far.answer.cached_tokens) == (None, 0, 0)
    assert cold.answer.text == near.answer.text == far.answer.text
