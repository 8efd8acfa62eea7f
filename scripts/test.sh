#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# All checks, in stages: lint, unit, integration, crash, e2e, wheel, docs; and compose, only when it is named. `scripts/test.sh unit e2e` runs only those.
# Every stage runs even when an earlier one failed; the exit code is 0 only when all passed.
set -uo pipefail
cd "$(dirname "$0")/.."
python=.venv/bin/python
stages=("$@")
[ ${#stages[@]} -gt 0 ] || stages=(lint unit integration crash e2e wheel docs)
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
summary=()
status=0

run_stage() {
    case $1 in
    lint) bash scripts/lint.sh ;;
    unit | integration | crash | e2e) "$python" -m pytest "tests/$1" ;;
    wheel) bash scripts/wheel-test.sh ;;
    docs) bash scripts/docs.sh --check ;;
    compose) bash scripts/compose-test.sh ;;
    *)
        echo "no stage $1; known: lint unit integration crash e2e wheel docs compose" >&2
        return 2
        ;;
    esac
}

# Alerts and dashboards are tested on a real Prometheus. Where none can be had those tests say so and are skipped.
if prometheus=$(bash scripts/prometheus.sh); then PATH=$prometheus:$PATH; fi

count=0
for stage in "${stages[@]}"; do
    count=$((count + 1))
    printf '\n==== stage %d/%d: %s ====\n' "$count" "${#stages[@]}" "$stage"
    started=$SECONDS
    run_stage "$stage" 2>&1 | tee "$logs/$stage"
    code=${PIPESTATUS[0]}
    # pytest says "no tests collected" with 5.
    [ "$code" -eq 0 ] && result=passed || { result="FAILED ($code)" && status=1; }
    # pytest's last line has the numbers; the other stages end with a sentence of their own.
    summary+=("$(printf '%-12s %-11s %4d s  %s' "$stage" "$result" $((SECONDS - started)) \
        "$(tail -n 1 "$logs/$stage" | tr -d '=' | sed 's/^ *//; s/ *$//')")")
done

printf '\n==== summary ====\n'
printf '%s\n' "${summary[@]}"
exit "$status"
