# SPDX-License-Identifier: Apache-2.0
"""Prometheus pages of the running processes: read, parsed, and compared before and after a request."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field

# name{label="value",...} number [timestamp], as the text format 0.0.4 writes it
_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+-?\d+)?$")
_LABEL = re.compile(r'([A-Za-z_]\w*)="((?:[^"\\]|\\.)*)"')

Labels = frozenset[tuple[str, str]]


@dataclass(frozen=True)
class Page:
    """The samples of one process at one moment."""

    samples: Mapping[tuple[str, Labels], float] = field(default_factory=dict)

    def total(self, name: str, **labels: str) -> float:
        """Sum of every sample of ``name`` that carries all of ``labels``; 0.0 when there is none."""
        wanted = set(labels.items())
        return sum(value for (n, have), value in self.samples.items() if n == name and wanted <= have)

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """Value of ``name`` summed for each value of ``label``."""
        out: dict[str, float] = {}
        for (n, have), value in self.samples.items():
            if n == name:
                key = dict(have).get(label, "")
                out[key] = out.get(key, 0.0) + value
        return out

    def names(self) -> set[str]:
        return {name for name, _ in self.samples}


def parse(text: str) -> Page:
    """A page of the Prometheus text format. Lines that are not samples are skipped."""
    samples: dict[tuple[str, Labels], float] = {}
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        match = _SAMPLE.match(line.strip())
        if match is None:
            continue
        name, labels, value = match.groups()
        try:
            number = float(value)
        except ValueError:
            continue
        samples[name, frozenset(_LABEL.findall(labels or ""))] = number
    return Page(samples)


def scrape(url: str, timeout_s: float = 20.0) -> Page:
    """Read one metrics page. Raises ``OSError`` when the process does not answer."""
    with urllib.request.urlopen(url, timeout=timeout_s) as response:
        return parse(response.read().decode())


def growth(before: Page, after: Page) -> Page:
    """How much every sample of ``after`` grew since ``before``; what did not change is left out."""
    return Page(
        {
            key: value - before.samples.get(key, 0.0)
            for key, value in after.samples.items()
            if value != before.samples.get(key, 0.0)
        }
    )
