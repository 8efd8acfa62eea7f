# SPDX-License-Identifier: Apache-2.0
"""``python -m kvcr.graph.healthy URL``: exit code 0 when it answers 200. For images without curl."""

from __future__ import annotations

import sys
import urllib.request


def main(url: str, timeout_s: float = 3.0) -> int:
    """Say why not on stdout, where docker keeps it."""
    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as answer:
            return 0 if answer.status == 200 else 1
    except OSError as error:
        print(f"{url}: {error}")
        return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
