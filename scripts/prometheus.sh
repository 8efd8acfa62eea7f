#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Print the directory that has prometheus and promtool: of PATH, or unpacked below the cache from the Debian or
# Ubuntu package of this machine's own archive (apt checks its signature), without root. Exit code 1, with the reason,
# where they cannot be had.
set -euo pipefail
cache=${KVCR_CACHE:-$HOME/.cache/kvcr}/prometheus

fail() {
    echo "prometheus: $*; install it (Debian: apt install prometheus) to run what needs it" >&2
    exit 1
}
if command -v prometheus >/dev/null && command -v promtool >/dev/null; then
    dirname "$(command -v prometheus)"
    exit
fi
if [ ! -x "$cache/usr/bin/promtool" ]; then
    command -v apt-get >/dev/null && command -v dpkg-deb >/dev/null || fail "it is not installed, and apt-get is not here"
    mkdir -p "$(dirname "$cache")"
    exec 9>"$cache.lock"
    flock 9
fi
if [ ! -x "$cache/usr/bin/promtool" ]; then
    work=$(mktemp -d "$cache.XXXXXX")
    trap 'rm -rf "$work"' EXIT
    # Lists of our own: the machine's may be missing or out of date, and are root's.
    mkdir -p "$work/lists/partial" "$work/archives/partial" "$work/unpacked"
    apt=(timeout 180 apt-get -qq -o Dir::State::Lists="$work/lists" -o Dir::Cache="$work/archives" -o APT::Sandbox::User=
        -o Dir::Cache::pkgcache= -o Dir::Cache::srcpkgcache= -o Acquire::Retries=1 -o Acquire::Languages=none)
    "${apt[@]}" update >"$work/log" 2>&1 && (cd "$work" && "${apt[@]}" download prometheus >>"$work/log" 2>&1) ||
        fail "it is not installed, and not to be had from this machine's package archive ($(tail -n 1 "$work/log"))"
    dpkg-deb -x "$work"/prometheus_*.deb "$work/unpacked"
    "$work/unpacked/usr/bin/prometheus" --version >/dev/null 2>&1 || fail "the package's program does not run here"
    rm -rf "$cache"
    mv "$work/unpacked" "$cache"
fi
echo "$cache/usr/bin"
