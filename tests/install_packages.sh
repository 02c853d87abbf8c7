#!/usr/bin/env bash
# Installs Debian's Slurm (launch/slurm), bubblewrap (the sandbox of rewards) and Chromium (headrace view) for the tests, where that is possible;
# without them those tests are skipped. tests/run.sh calls it where CI is set.
set -uo pipefail
missing=()
if ! command -v slurmctld >/dev/null && [ ! -x /usr/sbin/slurmctld ]; then
    missing+=(slurmctld slurmd slurm-client munge slurm-wlm-basic-plugins)
fi
command -v bwrap >/dev/null || missing+=(bubblewrap)
command -v chromium >/dev/null || missing+=(chromium)
if [ "${#missing[@]}" -eq 0 ]; then
    exit 0
fi
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
    echo "not installed, since that needs root and apt-get: ${missing[*]}" >&2
    exit 0
fi
install() {
    DEBIAN_FRONTEND=noninteractive timeout 150 apt-get install --quiet --quiet --yes --no-install-recommends "${missing[@]}" >/dev/null 2>&1
}
install || { timeout 60 apt-get --quiet --quiet update >/dev/null 2>&1 && install; } || echo "could not be installed: ${missing[*]}" >&2
