#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# The demonstration on this machine: `scripts/demo.sh [arguments of python -m demo]`.
set -euo pipefail
cd "$(dirname "$0")/.."
exec .venv/bin/python -m demo "$@"
