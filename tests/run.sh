#!/usr/bin/env bash
# Sets up .venv where needed, then checks everything: format, lint, types, tests on all cores.
#   bash tests/run.sh [PYTEST ARGUMENTS]        e.g. -m slow for the tests of minutes
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash launch/setup.sh test
if [ -n "${CI:-}" ]; then
    bash tests/install_packages.sh
fi
cores=$(env -u OMP_NUM_THREADS nproc)  # nproc obeys OMP_NUM_THREADS
export PATH="$PWD/.venv/bin:$PATH" OMP_NUM_THREADS=1 PYTHONSAFEPATH=1
ruff format --check .
ruff check .
types=$(mktemp) pyright="" status=0
trap 'rm -f "$types"; [ -z "$pyright" ] || kill "$pyright"' EXIT
pyright > "$types" &  # beside the tests: it takes one core for most of a minute
pyright=$!
limits=()
if [ -n "${CI:-}" ]; then
    # A test that hangs fails after 500 s. If that does not free its process, the process prints its threads and ends after 600 s.
    limits=(--timeout 500 -o faulthandler_timeout=600 -o faulthandler_exit_on_timeout=true)
fi
# Two workers more than cores: tests of whole runs wait for their processes for a part of their time.
python -m pytest -m "not slow" --numprocesses $((cores + 2)) --maxprocesses 16 --dist worksteal --durations 30 --durations-min 3 "${limits[@]}" "$@" || status=$?
if [ "$status" = 1 ] && [ -n "${CI:-}" ]; then
    # Real processes share few cores of an unknown machine here. What fails alone too is a fault; what passes is named above.
    echo "run.sh: the failed tests run once more, without others beside them"
    status=0
    python -m pytest -m "not slow" --last-failed --last-failed-no-failures none --maxfail 5 "${limits[@]}" "$@" || status=$?
fi
wait "$pyright" || status=$?
pyright=""
cat "$types"
if [ "$status" != 0 ]; then
    exit "$status"
fi
if [ -n "${CI:-}${NIGHTLY:-}" ]; then
    CORES=$cores bash tests/extras.sh
fi
