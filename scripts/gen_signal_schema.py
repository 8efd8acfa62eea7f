#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Write docs/signals.schema.json from the struct in components/kvcr/protocol/signals.py.

``gen_signal_schema.py`` writes the file, ``gen_signal_schema.py --check`` fails when it is out of date.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "docs/signals.schema.json"
sys.path.insert(0, str(ROOT / "components"))

from kvcr.protocol.signals import schema  # noqa: E402


def main() -> int:
    text = json.dumps(schema(), indent=2) + "\n"
    if "--check" not in sys.argv[1:]:
        TARGET.write_text(text)
        return 0
    if TARGET.exists() and TARGET.read_text() == text:
        return 0
    print(f"{TARGET.relative_to(ROOT)} is out of date; run scripts/{Path(__file__).name}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
