#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# All checks, in stages: lint, unit, integration, crash, e2e, wheel, docs, compose.
# `scripts/test.sh unit e2e` runs only those. Every stage runs even when an earlier one failed; the exit code is 0 only
# when all passed. The last lines say what failed: of a long log, that is what people see.
set -uo pipefail
cd "$(dirname "$0")/.."
python=.venv/bin/python
stages=("$@")
[ ${#stages[@]} -gt 0 ] || stages=(lint unit integration crash e2e wheel docs compose)
logs=$(mktemp -d)
trap 'rm -rf "$logs"' EXIT
# pytest ends by itself on Ctrl-C, and the stages after it would run.
trap 'exit 130' INT
summary=()
failed=()
status=0

# Alerts and dashboards are tested on a real Prometheus. Where none can be had those tests say so and are skipped.
if prometheus=$(bash scripts/prometheus.sh); then PATH=$prometheus:$PATH; fi

# The width is that of a line that names a test and says what was wrong.
run_pytest() {
    COLUMNS=160 "$python" -m pytest "$@"
}

# So many calls at the same time, which divide the modules among them; one after the other in the log.
run_shared() {
    local calls=$1 tests=$2 claims others=() code=0 call
    claims=$logs/claims-$(basename "$tests")
    mkdir "$claims"
    # In process groups of their own: what is just in the background does not hear of Ctrl-C.
    set -m
    for ((call = 2; call <= calls; call++)); do
        run_pytest --share "$claims" "$tests" >"$claims.$call" 2>&1 </dev/null &
        others+=("$!")
    done
    set +m
    trap 'kill -INT -- "${others[@]/#/-}"' INT TERM
    run_pytest --share "$claims" "$tests" || code=$?
    for call in "${!others[@]}"; do
        wait "${others[$call]}" || code=$?
        cat "$claims.$((call + 2))"
    done
    trap - INT TERM
    return "$code"
}

run_stage() {
    case $1 in
    lint) bash scripts/lint.sh ;;
    # Two cores: what computes is divided in two, what mostly waits in three. Engines need a machine to themselves.
    unit | crash) run_shared 2 "tests/$1" ;;
    integration) run_shared 3 "tests/$1" ;;
    e2e) run_pytest "tests/$1" ;;
    wheel) bash scripts/wheel-test.sh ;;
    docs) bash scripts/docs.sh --check ;;
    compose) bash scripts/compose-test.sh ;;
    *)
        echo "no stage $1; known: lint unit integration crash e2e wheel docs compose" >&2
        return 2
        ;;
    esac
}

# pytest's own last line has the numbers, whatever a library writes after it; other stages end with a sentence.
last_line() {
    { grep -E '^=+ .* in [0-9.]+s' "$1" || grep -v '^[[:space:]]*$' "$1" | tail -n 1; } |
        sed 's/^=* *//; s/ *=*$//' | paste -sd ';' | sed 's/;/; /g'
}

# The tests of a stage that failed; of one without tests, its end.
what_failed() {
    grep -E '^(FAILED|ERROR) ' "$1" || grep -v '^[[:space:]]*$' "$1" | tail -n 10
}

count=0
for stage in "${stages[@]}"; do
    count=$((count + 1))
    printf '\n==== stage %d/%d: %s ====\n' "$count" "${#stages[@]}" "$stage"
    started=$SECONDS
    run_stage "$stage" 2>&1 | tee -i "$logs/$stage"
    code=${PIPESTATUS[0]}
    result=passed
    # pytest says "no tests collected" with 5.
    end=$(last_line "$logs/$stage")
    if [ "$code" -ne 0 ]; then
        result="FAILED ($code)" && status=1 && failed+=("$stage")
    elif [[ $end =~ ^("$stage: skipped"|[0-9]+ skipped in) ]]; then
        result=skipped
    fi
    summary+=("$(printf '%-12s %-11s %4d s  %s' "$stage" "$result" $((SECONDS - started)) "$end")")
done

printf '\n==== summary ====\n'
printf '%s\n' "${summary[@]}"
for stage in ${failed[@]+"${failed[@]}"}; do
    printf '\n---- failed: %s ----\n' "$stage"
    what_failed "$logs/$stage"
done
exit "$status"
