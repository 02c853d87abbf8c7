#!/usr/bin/env bash
# Installs Debian's Slurm for the tests of launch/slurm, where that is possible; without it they are skipped. tests/run.sh calls it where CI is set.
set -uo pipefail
if command -v slurmctld >/dev/null || [ -x /usr/sbin/slurmctld ]; then
    exit 0
fi
if [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
    echo "Slurm is not installed: that needs root and apt-get" >&2
    exit 0
fi
install() {
    DEBIAN_FRONTEND=noninteractive timeout 150 apt-get install --quiet --quiet --yes --no-install-recommends \
        slurmctld slurmd slurm-client munge slurm-wlm-basic-plugins >/dev/null 2>&1
}
install || { timeout 60 apt-get --quiet --quiet update >/dev/null 2>&1 && install; } || echo "Slurm could not be installed" >&2
