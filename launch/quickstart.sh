#!/usr/bin/env bash
# Sets up .venv where needed, then trains a small policy on this machine's CPU.
#   bash launch/quickstart.sh [NAME] [KEY=VALUE ...]
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
bash "$root/launch/setup.sh"
exec "$root/.venv/bin/headrace" quickstart "$@"
