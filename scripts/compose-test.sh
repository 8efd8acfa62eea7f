#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Bring deploy/compose/compose.yaml up, unmodified, under a Docker daemon of our own, with locally built images under
# the upstream names, and look at it from outside. Installs nothing; where no daemon can run it says so and passes.
# Everything runs in namespaces of its own (network, mounts, processes), so that all of it ends with this script.
set -euo pipefail
cd "$(dirname "$0")/.."
limit_s=${KVCR_COMPOSE_LIMIT_S:-1500}
packages="apt install docker.io debootstrap busybox-static"

skip() {
    echo "compose: skipped, $*"
    exit 0
}
[ "$(id -u)" = 0 ] || skip "it needs root to run a Docker daemon"
for program in dockerd containerd docker debootstrap busybox curl unshare; do
    command -v "$program" >/dev/null || skip "$program is not installed (Debian: $packages)"
done
isolated=(unshare --net --mount --pid --fork --kill-child --mount-proc)
"${isolated[@]}" true 2>/dev/null || skip "namespaces are not permitted here"
.venv/bin/python -m tests.compose.prepare || skip "what it needs from the network could not be had"

work=$(mktemp -d)
export KVCR_COMPOSE_CGROUP=/kvcr-compose-$$
cleanup() {
    rm -rf "$work"
    # The daemon removes those of containers it stops; this is for when it was ended itself.
    find /sys/fs/cgroup -depth -type d -path "*$KVCR_COMPOSE_CGROUP*" -exec rmdir {} \; 2>/dev/null || true
}
trap cleanup EXIT
# Beside other work, all containers together would get as much of the processors as one process.
if [ -e /sys/fs/cgroup/cpu/cpu.shares ]; then
    mkdir "/sys/fs/cgroup/cpu$KVCR_COMPOSE_CGROUP"
    echo 8192 >"/sys/fs/cgroup/cpu$KVCR_COMPOSE_CGROUP/cpu.shares"
fi
code=0
timeout --signal=KILL "$limit_s" \
    "${isolated[@]}" .venv/bin/python -m pytest tests/compose --basetemp="$work/run" "$@" || code=$?
[ "$code" != 137 ] || echo "compose: did not end within $limit_s s (load $(cut -d' ' -f1 /proc/loadavg))"
exit "$code"
