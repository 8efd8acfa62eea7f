# SPDX-License-Identifier: Apache-2.0
"""``python -m kvcr.cli``: the same as the console script ``kvcr``."""

from kvcr.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
