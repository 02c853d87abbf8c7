#!/usr/bin/env bash
# Everything that only a GPU can show, in at most 9 minutes: checks and figures, and one table at the end. A part that fails
# stops no other one. It needs the packages of pyproject.toml and pytest, pytest-timeout, hypothesis and psutil; no network.
#   bash tests/gpu.sh [--json FILE] [--dry-run]
# --dry-run goes through all parts on the CPU in tiny sizes. PYTHON names the interpreter, LOGS the folder of the logs.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-$(if [[ -x .venv/bin/python ]]; then echo .venv/bin/python; else echo python3; fi)}
logs=${LOGS:-$(mktemp -d)} json="" dry=0
while (($#)); do
  case $1 in
    --json) json=${2:?--json takes a file}; shift 2 ;;
    --dry-run) dry=1; shift ;;
    *) echo "unknown option $1; the options are --json FILE and --dry-run" >&2; exit 2 ;;
  esac
done
mkdir -p "$logs"
export PYTHONPATH=$PWD/src${PYTHONPATH:+:$PYTHONPATH} TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
POLICIES=$(mktemp -d)
export POLICIES
trap 'rm -rf "$POLICIES"' EXIT  # several GB
missing=$("$python" -c 'from importlib.util import find_spec
modules = "torch transformers safetensors numpy tensorboard yaml msgspec xxhash pytest pytest_timeout hypothesis psutil"
print(*(name for name in modules.split() if find_spec(name) is None))')
if [[ $missing ]]; then
  echo "$python lacks $missing: install them, or put them on PYTHONPATH (pip install --target FOLDER WHEELS)" >&2
  exit 2
fi
if ((dry)); then
  export CUDA_VISIBLE_DEVICES="" OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
elif ! "$python" -c "import sys, torch; sys.exit(not torch.cuda.is_available())"; then
  echo "torch finds no GPU here; --dry-run goes through the parts without one" >&2
  exit 2
fi

rows=()
part() {  # NAME SECONDS COMMAND...: run it, and keep its result for the table; its lines that begin with "=" are figures
  local name=$1 limit=$(($2 * (dry ? 4 : 1))) started=$SECONDS code
  shift 2
  echo "== $name"
  timeout --kill-after=10 "$limit" "$@" >"$logs/$name.log" 2>&1
  code=$?
  local result=ok
  ((code == 124 || code == 137)) && result="over ${limit} s"
  ((code == 5)) && code=0 result="nothing to run"  # pytest's code where all tests need a GPU
  ((code)) && [[ $result == ok ]] && result="failed ($code)"
  rows+=("$name"$'\t'"$result"$'\t'"$((SECONDS - started))")
  sed -n 's/^=\([^=]\)/\1/p' "$logs/$name.log"
  [[ $result == ok || $result == nothing* ]] || tail -n 15 "$logs/$name.log"
}
# The warnings of other versions of libraries are no failures here.
tests() { part "$1" "$2" "$python" -m pytest -q -p no:cacheprovider -W default "${@:3}"; }
figures() { part "$1" "$2" "$python" tests/gpu_figures.py "$1"; }

timeout $((dry ? 600 : 120)) "$python" tests/gpu_figures.py policies >"$logs/policies.log" 2>&1 &  # by the CPU, beside the tests
making=$!
figures environment 20
mapfile -t files < <(grep -rl --include="test_*.py" "mark.gpu" tests)
tests gpu-tests 80 -m gpu "${files[@]}"
tests kernels 70 tests/rollout/engine/test_triton.py tests/rollout/engine/test_triton_draw.py \
    tests/trainer/policy/test_kernels.py tests/trainer/policy/test_exact_kernels.py tests/rollout/engine/test_exact_kernels.py
wait "$making"
figures exact 35
part runs 110 "$python" tests/gpu_runs.py "$logs/runs"
((dry)) || figures generator 60
figures decode 50
figures prefill 15
figures train 45
figures copies 20
figures profile 25

echo
printf '%-14s %-16s %s\n' part result seconds
for row in "${rows[@]}"; do IFS=$'\t' read -r name result seconds <<<"$row"; printf '%-14s %-16s %s\n' "$name" "$result" "$seconds"; done
echo "logs: $logs"
if [[ $json ]]; then
  printf '%s\n' "${rows[@]}" | LOGS=$logs "$python" tests/gpu_figures.py json >"$json"
fi
[[ "${rows[*]}" != *failed* && "${rows[*]}" != *over* ]]
