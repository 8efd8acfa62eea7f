#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Format, lint, types, licence lines, generated pages. Changes nothing; `scripts/lint.sh --fix` formats.
set -uo pipefail
cd "$(dirname "$0")/.."
bin=.venv/bin
failed=()

check() {
    local name=$1
    shift
    printf -- '-- %s\n' "$name"
    "$@" || failed+=("$name")
}

# Files of the project, committed or not yet, without those that are ignored.
sources() { git ls-files --cached --others --exclude-standard -- "$@" | while read -r f; do [ -f "$f" ] && echo "$f"; done; }

spdx_lines() {
    local missing=0 file
    while read -r file; do
        if ! head -n 3 "$file" | grep -q 'SPDX-License-Identifier: Apache-2.0'; then
            echo "$file: no 'SPDX-License-Identifier: Apache-2.0' in its first three lines"
            missing=1
        fi
    done < <(sources '*.py' '*.pyi' '*.c' '*.h' '*.sh' '*.toml' '*.yaml' '*.yml' '*.conf' '*Dockerfile*' '*.dockerfile' \
        Makefile .ci/run requirements)
    return "$missing"
}

flag_tables_sorted() {
    local table
    for table in components/kvcr/graph/flags/*.txt; do
        LC_ALL=C sort -cu "$table" || return 1
    done
}

if [ "${1:-}" = --fix ]; then
    "$bin/ruff" format . && "$bin/ruff" check --fix .
    exit
fi
check "ruff format" "$bin/ruff" format --check .
check "ruff check" "$bin/ruff" check .
check "mypy --strict components" "$bin/mypy" --strict components
check "SPDX lines" spdx_lines
check "flag tables" flag_tables_sorted
check "import directions" "$bin/python" -m pytest -q tests/unit/test_import_direction.py
check "docs/configuration.md is current" "$bin/python" scripts/gen_config_docs.py --check
check "docs/signals.schema.json is current" "$bin/python" scripts/gen_signal_schema.py --check
check "docs/reference is current" "$bin/python" scripts/gen_reference.py --check
check "dashboards conform to Grafana's schema" bash scripts/check_dashboards.sh
check "links in documents" "$bin/python" scripts/check_links.py
if [ ${#failed[@]} -gt 0 ]; then
    printf 'lint: failed: %s\n' "$(printf '%s; ' "${failed[@]}")"
    exit 1
fi
echo "lint: clean"
