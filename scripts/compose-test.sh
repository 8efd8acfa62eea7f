#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Bring deploy/compose/compose.yaml up, unmodified, under a Docker daemon of our own in a network namespace of its
# own, with locally built images under the upstream names, and look at it from outside. Needs root, dockerd and
# debootstrap (Debian: apt install docker.io debootstrap busybox-static); without them it says so and passes.
set -euo pipefail
cd "$(dirname "$0")/.."

skip() {
    echo "compose: skipped, $*"
    exit 0
}
[ "$(id -u)" = 0 ] || skip "it needs root to run a Docker daemon"
for program in dockerd docker containerd busybox debootstrap unshare; do
    command -v "$program" >/dev/null || skip "$program is not installed"
done
unshare --net --mount true 2>/dev/null || skip "namespaces are not permitted here"

exec unshare --net --mount "$PWD/.venv/bin/python" -m pytest tests/compose "$@"
