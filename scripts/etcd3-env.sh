#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Build .cache/etcd3-venv: the environment in which the etcd client over etcd3 0.12.0 is tested, apart from
# the main one because its pins are of 2020. Prints the path of its Python. Safe to run again.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=.cache/etcd3-venv
# etcd3aio for its generated messages, see components/kvcr/dynamo/etcd/etcd3_compat.py; the rest is what
# the tests and the values of KVCR import.
packages=("etcd3==0.12.0" "tenacity<7" "etcd3aio==0.3.0" "msgspec>=0.19")
stamp=$(printf '%s\n' "${packages[@]}")
if [ "$(cat "$venv/.stamp" 2>/dev/null)" != "$stamp" ]; then
    base=.venv/bin/python
    [ -x "$base" ] || base=python3.11
    rm -rf "$venv"
    mkdir -p .cache
    "$base" -m venv "$venv" >&2
    "$venv/bin/pip" install --quiet --disable-pip-version-check "${packages[@]}" >&2
    printf '%s\n' "$stamp" >"$venv/.stamp"
fi
printf '%s\n' "$PWD/$venv/bin/python"
