#!/usr/bin/env bash
# Makes the pictures of the pages in docs/use/ anew, from a run of the calculator: some minutes on two cores. It needs Chromium.
# The tests that make them check what they show; without PICTURES they leave them in their own folders.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PATH="$PWD/.venv/bin:$PATH" OMP_NUM_THREADS=1 PYTHONSAFEPATH=1 PICTURES="$PWD/docs/use/pictures"
mkdir -p "$PICTURES"
python -m pytest -m slow tests/launch/test_pictures.py
python -m pytest -m "not slow" tests/launch/test_pictures.py
