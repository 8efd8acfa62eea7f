#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Build the development environment in .venv from the locks of requirements/, and install this project into it.
# Safe to run again: a step whose inputs did not change is skipped.
set -euo pipefail
cd "$(dirname "$0")/.."

lock=requirements/lock-cpu.txt
tools=requirements/lock-dev.txt
venv=.venv
torch_index=https://download.pytorch.org/whl/cpu
export PIP_DISABLE_PIP_VERSION_CHECK=1

say() { printf '== %s\n' "$*"; }

# pip with a line that counts in place of hundreds. What it says itself is in the log, and shown when it fails.
log=$venv/setup.log
install() {
    local total counted=0
    total=$(cat "$lock" "$tools" | grep -c '==')
    "$venv/bin/pip" install --progress-bar off "$@" 2>&1 | while IFS= read -r line; do
        printf '%s\n' "$line" >>"$log"
        case $line in
            Collecting*) counted=$((counted + 1)) && progress "$counted of $total packages fetched" ;;
            Installing*) progress "installing what was fetched, a minute or two" ;;
        esac
    done || {
        tail -n 30 "$log" >&2
        echo "setup: pip failed; all it said is in $log. Run make setup again to go on from there" >&2
        exit 1
    }
    progress ""
}
progress() { if [ -t 1 ]; then printf '\r\e[2K%s' "${1:+   $1}"; fi; }

find_python() {
    local candidate
    for candidate in "${PYTHON:-}" python3.11 python3 python; do
        if [ -n "$candidate" ] && command -v "$candidate" >/dev/null &&
            [ "$("$candidate" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" = 3.11 ]; then
            printf '%s\n' "$candidate"
            return
        fi
    done
    echo "setup: the lock is for Python 3.11, and none was found; install it (Debian: apt install python3.11" \
        "python3.11-venv python3.11-dev) or name one: PYTHON=/path/to/python3.11 make setup" >&2
    exit 1
}

# Prints a digest of the files named; a step is up to date when its stamp holds the same.
digest() { cat "$@" | sha256sum | cut -d' ' -f1; }
fresh() { [ "$(cat "$venv/$1" 2>/dev/null)" = "$2" ]; }

started=$SECONDS
if [ ! -x "$venv/bin/python" ] || [ ! -x "$venv/bin/pip" ]; then
    python=$(find_python)
    say "creating $venv with $("$python" --version)"
    if ! "$python" -m venv "$venv"; then
        rm -rf "$venv"
        echo "setup: python cannot create virtual environments; Debian: apt install python3.11-venv" >&2
        exit 1
    fi
fi

locked=$(digest "$lock" "$tools")
if fresh .stamp-lock "$locked"; then
    say "packages: up to date"
else
    say "packages: installing what $lock and $tools name (2.6 GB; up to ten minutes, once)"
    torch=$(grep '^torch==' "$lock")
    # PyPI has no CPU build. By itself: nothing else should be looked for, and found, on a second index.
    progress "fetching $torch"
    if ! "$venv/bin/pip" install --quiet --no-deps "$torch" 2>/dev/null; then
        progress ""
        say "packages: $torch comes from $torch_index"
        install --no-deps --index-url "$torch_index" "$torch"
    fi
    install --no-deps -r "$lock" -r "$tools"
    printf '%s\n' "$locked" >"$venv/.stamp-lock"
fi

# Sources in Python are used where they are; only metadata and the C extension need an install.
packaged=$(digest pyproject.toml setup.py components/*/_*.[ch] components/kvcr/__init__.py)
if fresh .stamp-package "$packaged" && "$venv/bin/python" -c 'import kvcr' 2>/dev/null; then
    say "dynamo-kvcr: up to date"
else
    say "dynamo-kvcr: installing from here, in place"
    headers=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("include"))')
    if [ ! -f "$headers/Python.h" ] || ! command -v gcc >/dev/null; then
        echo "setup: the C extensions need gcc and $headers/Python.h; Debian: apt install gcc python3.11-dev" >&2
        exit 1
    fi
    install --no-deps --no-build-isolation -e .
    printf '%s\n' "$packaged" >"$venv/.stamp-package"
fi
# PyPI's torchvision does not load beside a torch for CPUs, and vLLM imports it: see kvcr/vllm/torchvision_ops.py.
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
printf '%s\n' "$PWD/components/kvcr/vllm/child_site" >"$site/kvcr_child_site.pth"
# As an installed package has it. Where PYTHONDONTWRITEBYTECODE is set, every start of a guard would compile its
# modules: 0.5 of a second that its successor is waited for.
env -u PYTHONDONTWRITEBYTECODE "$venv/bin/python" -m compileall -q components
say "environment ready in $((SECONDS - started)) s"
