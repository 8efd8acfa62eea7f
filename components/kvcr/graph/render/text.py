# SPDX-License-Identifier: Apache-2.0
"""A rendered document as YAML text."""

from __future__ import annotations

from typing import Any


def to_yaml(document: dict[str, Any]) -> str:
    """In the order given, and without anchors, which readers would have to look up."""
    import yaml

    class Plain(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            return True

    return yaml.dump(document, Dumper=Plain, sort_keys=False, width=110, default_flow_style=False)
