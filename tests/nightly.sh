#!/usr/bin/env bash
# What takes hours: slow tests, simulated histories, faults of real processes, malformed input, the sets of extras.sh, mutations.
#   bash tests/nightly.sh [FOLDER]     FOLDER gets a log of each part, and results.md with one line for each; exit code 1 if one failed
# HISTORIES, MINUTES and INPUTS (of each reader) make the parts shorter.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
out=$(realpath -m "${1:-build/nightly}")
mkdir -p "$out"
HEADRACE_TEST_MODELS=$(mktemp -d /tmp/headrace-models.XXXXXX)  # a copy of the checkout has no place for a model
export HEADRACE_TEST_MODELS NIGHTLY=1
trap 'rm -rf "$HEADRACE_TEST_MODELS"' EXIT
cores=$(env -u OMP_NUM_THREADS nproc)
status=0
printf '| part | result | minutes | last line |\n|---|---|---|---|\n' > "$out/results.md"

part() {  # NAME COMMAND...: runs it, and adds its line to the page
    local name=$1 started=$SECONDS result=passed
    shift
    "$@" > "$out/$name.log" 2>&1 || { result="failed ($?)"; status=1; }
    printf '| %s | %s | %d | %s |\n' "$name" "$result" $(((SECONDS - started) / 60)) "$(tail -1 "$out/$name.log" | tr '|' ' ')" >> "$out/results.md"
}

part slow-tests bash .ci/run -m slow --numprocesses 0
part setup bash launch/setup.sh test
part simulation .venv/bin/python tests/simulate.py 0 "${HISTORIES:-10000}" --jobs "$cores"
part chaos .venv/bin/python tests/bench chaos --minutes "${MINUTES:-30}"
part malformed-input .venv/bin/python -m pytest --hypothesis-profile nightly --timeout 0 tests/system/test_malformed_input.py
part mutations .venv/bin/python tests/mutate.py --jobs "$cores"
cat "$out/results.md"
exit "$status"
