# SPDX-License-Identifier: Apache-2.0
"""The metrics registry and its HTTP endpoint."""

from __future__ import annotations

import urllib.error
import urllib.request

import pytest

from kvcr.errors import ConfigError
from kvcr.guard.meters import Meters
from kvcr.metrics import Registry, serve_metrics


def test_counters_render_with_their_labels() -> None:
    registry = Registry()
    counter = registry.counter("kvcr_x_total", "Things.", ["where"])
    counter.inc(where="pull")
    counter.inc(2.5, where='a"b\n')
    assert registry.render() == (
        "# HELP kvcr_x_total Things.\n# TYPE kvcr_x_total counter\n"
        'kvcr_x_total{where="a\\"b\\n"} 2.5\nkvcr_x_total{where="pull"} 1\n'
    )


def test_a_counter_without_labels_starts_at_zero() -> None:
    registry = Registry()
    registry.counter("kvcr_y_total", "Others.")
    assert "kvcr_y_total 0\n" in registry.render()


def test_counters_only_grow() -> None:
    counter = Registry().counter("kvcr_z_total", "Z.")
    with pytest.raises(ValueError, match="only grows"):
        counter.inc(-1)


def test_other_labels_than_declared_are_refused() -> None:
    counter = Registry().counter("kvcr_z_total", "Z.", ["a"])
    with pytest.raises(ValueError, match="has labels"):
        counter.inc(b="x")


def test_histogram_buckets_are_cumulative() -> None:
    registry = Registry()
    histogram = registry.histogram("kvcr_h_seconds", "H.", buckets=[0.1, 1.0])
    for value in (0.05, 0.1, 0.5, 7.0):
        histogram.observe(value)
    assert registry.render().splitlines()[2:] == [
        'kvcr_h_seconds_bucket{le="0.1"} 2',
        'kvcr_h_seconds_bucket{le="1"} 3',
        'kvcr_h_seconds_bucket{le="+Inf"} 4',
        "kvcr_h_seconds_sum 7.65",
        "kvcr_h_seconds_count 4",
    ]


def test_a_gauge_that_cannot_be_refreshed_is_told_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    registry = Registry()
    registry.before_render(lambda: {}["nothing"])
    port = serve_metrics(registry, "127.0.0.1", 0)
    with pytest.raises(urllib.error.HTTPError, match="500"):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5)
    assert "KeyError: 'nothing'" in caplog.text
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=5) as answer:
        assert answer.read() == b"ok\n"


def test_gauges_are_refreshed_before_rendering() -> None:
    registry = Registry()
    gauge = registry.gauge("kvcr_g", "G.")
    registry.before_render(lambda: gauge.set(42))
    assert "kvcr_g 42" in registry.render()


def test_a_name_is_registered_once() -> None:
    registry = Registry()
    registry.gauge("kvcr_g", "G.")
    with pytest.raises(ValueError, match="registered twice"):
        registry.counter("kvcr_g", "G.")


def test_served_over_http() -> None:
    registry = Registry()
    registry.counter("kvcr_y_total", "Others.").inc(3)
    port = serve_metrics(registry, "127.0.0.1", 0)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as response:
        assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
        assert "kvcr_y_total 3" in response.read().decode()
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/other", timeout=5)
    with pytest.raises(ConfigError, match=f":{port}.*choose another port"):
        serve_metrics(registry, "127.0.0.1", port)


def test_what_the_first_pull_adds_is_an_increase() -> None:
    page = Meters().registry.render()
    for transport in ("shm", "nixl"):
        assert f'kvcr_pulled_blocks_total{{transport="{transport}"}} 0' in page
        assert f'kvcr_pull_seconds_count{{transport="{transport}"}} 0' in page
