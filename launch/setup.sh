#!/usr/bin/env bash
# Creates .venv and installs the project with the tested versions; does nothing when that is current.
#   bash launch/setup.sh [EXTRA[,EXTRA...]]     e.g. test
# PYTHON names the interpreter to build .venv with (3.11 or newer).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

system=$(uname -s)
if [ "$system" != Linux ]; then
    echo "Headrace needs Linux: this is $system" >&2
    exit 1
fi

extras=${1:-}
state=$(cat pyproject.toml constraints.txt | sha256sum | cut -c1-16)
stamp=.venv/installed-$state-$extras

# Without extras, an environment of this state with any extras will do.
if [ -e "$stamp" ] || { [ -z "$extras" ] && compgen -G ".venv/installed-$state-*" >/dev/null; }; then
    exit 0
fi

python=${PYTHON:-}
for candidate in ${python:-python3 python3.13 python3.12 python3.11}; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        python=$candidate
        break
    fi
    python=
done
if [ -z "$python" ]; then
    echo "setup: no Python 3.11 or newer found; set PYTHON to one" >&2
    exit 1
fi

echo "setup: installing into $PWD/.venv (minutes, the first time)" >&2
[ -x .venv/bin/python ] || "$python" -m venv .venv
rm -f .venv/installed-*
pip() { .venv/bin/python -m pip --disable-pip-version-check "$@"; }
# torch first and pinned, so that nothing else can choose its version.
pip install --quiet --constraint constraints.txt torch
pip install --quiet --constraint constraints.txt --editable ".${extras:+[$extras]}"
touch "$stamp"
