"""The SDK of the Tinker API against `headrace tinker`: every method of its clients, a whole flow, and the messages on the wire."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.closing import at_end
from support.cookbook import write_data_sets
from support.policies import tiny_policy
from support.source_tree import ROOT
from support.tinker_script import KilledServer

from headrace.comm.process_tree import children_of
from headrace.launch.recipes.parts import RECIPE, TASKS
from headrace.launch.recipes.tiny_policy import build_policy
from headrace.launch.serving.tinker.bodies import loss_answer, read_address, read_loss_request, sample_answer
from headrace.rollout.serving.samplers import Sampled, SampleResult
from headrace.trainer.tinker.trained_model import LossResult

pytest.importorskip("tinker")

pytestmark = [pytest.mark.extra, pytest.mark.filterwarnings("ignore")]
PATIENCE_S = 400.0
KEY = "tml-a-key-of-the-tests"
ROW = re.compile(r"^\| `(\w+)` \| (works|client|refused) \| (.+) \|$", re.MULTILINE)


def start(model: Path, folder: Path, *words: str) -> str:
    """The address of a server, until the end of the test."""
    return start_process(model, folder, *words)[0]


def start_process(model: Path, folder: Path, *words: str) -> tuple[str, int]:
    """The address of a server, until the end of the test, and the process that starts it again."""
    command = [sys.executable, "-u", "-m", "headrace", "tinker", str(model), "--port=0", f"--dir={folder}"]
    environment = {**os.environ, "HEADRACE_API_KEY": KEY}
    process = subprocess.Popen(
        [*command, "model.dtype=float32", *words], stdout=subprocess.PIPE, text=True, env=environment
    )

    def stop() -> None:
        process.terminate()
        process.communicate(timeout=PATIENCE_S)

    at_end(stop)
    assert process.stdout is not None
    console = process.stdout
    for line in console:
        if found := re.match(r"TINKER_BASE_URL=(http://127\.0\.0\.1:\d+)  ", line):
            threading.Thread(target=lambda: [*console], daemon=True).start()  # a restart prints more
            return found[1], process.pid
    raise AssertionError("it ended")


def run(module: str, *words: str, meanwhile: Callable[[Callable[[], bool]], None] = lambda _: None) -> str:
    """The output of a client's program. meanwhile: called with what tells whether the program still runs."""
    environment = {**os.environ, "TINKER_API_KEY": KEY, "HF_HUB_OFFLINE": "1", "TINKER_TELEMETRY": "0"}
    command = [sys.executable, "-m", f"support.{module}", *words]
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        program = subprocess.Popen(command, stdout=output, stderr=errors, text=True, env=environment)
        try:
            meanwhile(lambda: program.poll() is None)
            program.wait(PATIENCE_S)
        finally:
            program.kill()
            program.wait(PATIENCE_S)
        output.seek(0)
        errors.seek(0)
        assert program.returncode == 0, errors.read()[-3000:]
        return output.read()


def test_every_method_of_the_clients_works_or_is_refused_as_the_page_says(tmp_path: Path):
    model = tiny_policy(tmp_path)
    url = start(model, tmp_path / "saved", "--models=8")
    found: dict[str, str] = json.loads(run("tinker_sdk", url, str(model), "methods").splitlines()[-1])
    for name, status in found.items():
        assert found.get(f"{name}_async", status).partition(" ")[0] == status.partition(" ")[0]
    told = {
        f"{owner}.{name}": status
        for owner, status, names in ROW.findall((ROOT / "docs" / "use" / "tinker.md").read_text())
        for name in re.findall(r"`(\w+)`", names)
    }
    short = {
        name: status
        for name, status in found.items()
        if name.removesuffix("_async") not in found or "_async" not in name
    }
    assert {name: "refused" if " " in status else status for name, status in short.items()} == told
    refusals = [text for text in found.values() if " " in text]
    assert all("is not supported" in text for text in refusals), refusals


@pytest.mark.parametrize("words", [(), ("--full",)])
def test_a_client_trains_samples_saves_and_loads(tmp_path: Path, words: tuple[str, ...]):
    model = tiny_policy(tmp_path)
    run("tinker_sdk", start(model, tmp_path / "saved", "--models=3", *words), str(model), "flow")


@pytest.mark.parametrize("is_full", [False, True])
def test_a_client_notices_nothing_of_a_server_that_is_killed_again_and_again(tmp_path: Path, is_full: bool):
    model = tiny_policy(tmp_path)
    server = KilledServer(model, tmp_path / "saved", every=3, name=str(model), is_full=is_full, most_models=3)
    draw = random.Random(int(is_full))
    recovery = tmp_path / "saved" / "recovery"
    killed_at: list[int] = []

    def newest() -> int:
        """The highest number of a request, of all models."""
        return max((int(file.stem) for file in recovery.glob("*/*/*.request")), default=-1)

    def kill(is_running: Callable[[], bool]) -> None:
        while is_running():
            time.sleep(0.01)
            if newest() > (killed_at[-1] + 4 if killed_at else 0):
                time.sleep(draw.uniform(0.0, 0.2))
                killed_at.append(newest())
                server.restart()

    run("tinker_sdk", f"http://127.0.0.1:{server.port}", str(model), "flow", meanwhile=kill)
    assert len(killed_at) >= 8


@pytest.fixture(scope="module")
def sorting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's policy, and its task as the data sets of the cookbook."""
    folder = tmp_path_factory.mktemp("cookbook")
    task = TASKS[RECIPE]
    build_policy(folder / "policy", task.characters, task.example, seed=0, num_steps=task.warm_up_steps)
    write_data_sets(folder, 4096)
    return folder


def metrics_of(folder: Path, recipe: str, name: str) -> list[float]:
    lines = (folder / f"log-{recipe}" / "metrics.jsonl").read_text().splitlines()
    return [row[name] for row in map(json.loads, lines) if name in row]


@pytest.mark.parametrize("kills", [(), (2, 9, 17)])
def test_the_cookbooks_loop_of_reinforcement_learning_raises_the_reward(
    tmp_path: Path, sorting: Path, kills: tuple[int, ...]
):
    """Also where the process that serves is killed after these steps."""
    pytest.importorskip("tinker_cookbook")
    shutil.rmtree(sorting / "log-rl_loop", ignore_errors=True)
    policy = sorting / "policy"
    url, parent = start_process(policy, tmp_path / "saved", "generator.max_running=128")
    left = [*kills]

    def kill(is_running: Callable[[], bool]) -> None:
        metrics = sorting / "log-rl_loop" / "metrics.jsonl"
        while left and is_running():
            time.sleep(0.1)
            if metrics.exists() and len(metrics.read_text().splitlines()) >= left[0]:
                del left[0]
                for child in children_of(parent):
                    os.kill(child, signal.SIGKILL)

    settings = (f'model_name="{policy}"', "batch_size=16", "group_size=8", "max_tokens=24", "learning_rate=0.003")
    more = ('loss_fn="importance_sampling"', "max_steps=45", "save_every=15", "lora_rank=16")
    run("cookbook", "rl_loop", url, str(sorting), *settings, *more, meanwhile=kill)
    rewards = metrics_of(sorting, "rl_loop", "reward/total")
    assert len(rewards) == 45 and not left
    assert np.mean(rewards[-8:]) > np.mean(rewards[:4]) + 0.12, rewards


def test_the_cookbooks_loop_of_supervised_learning_lowers_the_loss(tmp_path: Path, sorting: Path):
    pytest.importorskip("tinker_cookbook")
    policy = sorting / "policy"
    url = start(policy, tmp_path / "saved")
    settings = ("batch_size=64", "learning_rate=0.003", "max_steps=12", "save_every=0", "lora_rank=16")
    run("cookbook", "sl_loop", url, str(sorting), f'model_name="{policy}"', *settings)
    losses = metrics_of(sorting, "sl_loop", "train_mean_nll")
    assert losses[-1] < 0.6 * losses[0], losses


BASIC = ("batch_size=8", "group_size=4", "max_tokens=24", "learning_rate=0.003", "max_steps=4", "save_every=0")


def test_the_cookbooks_trainer_finds_no_difference_between_sampler_and_trainer(tmp_path: Path, sorting: Path):
    pytest.importorskip("tinker_cookbook")
    policy = sorting / "policy"
    url = start(policy, tmp_path / "saved", "generator.max_running=128")
    run("cookbook", "rl_basic", url, str(sorting), f'model_name="{policy}"', *BASIC)
    differences = metrics_of(sorting, "rl_basic", "optim/kl_sample_train_v1")
    assert len(differences) == 4 and max(map(abs, differences)) < 1e-4
    penalties = metrics_of(sorting, "rl_basic", "kl_policy_base")
    assert abs(penalties[0]) < 1e-4 < penalties[-1]


def test_the_cookbooks_asynchronous_trainer_trains_what_older_weights_drew(tmp_path: Path, sorting: Path):
    pytest.importorskip("tinker_cookbook")
    policy = sorting / "policy"
    url = start(policy, tmp_path / "saved", "generator.max_running=128")
    shutil.rmtree(sorting / "log-rl_basic", ignore_errors=True)
    run("cookbook", "rl_basic", url, str(sorting), f'model_name="{policy}"', *BASIC, "max_steps_off_policy=2")
    ages = metrics_of(sorting, "rl_basic", "async/staleness_max")
    assert len(ages) == 4 and ages[0] == 0 and 0 < max(ages) <= 2


# --------------------------------------------------------------------------------------------------------------- the wire


@pytest.fixture
def wire() -> Any:
    return pytest.importorskip("tinker.proto.tinker_public_pb2")


@pytest.fixture
def answers() -> Any:
    return pytest.importorskip("tinker.proto.response_conv")


def test_a_request_of_the_sdk_is_read_as_it_was_meant(wire: Any):
    requests: Any = pytest.importorskip("tinker.proto.request_conv")
    types: Any = pytest.importorskip("tinker.types")
    rng = np.random.default_rng(0)
    tokens = [rng.integers(0, 1 << 17, size).tolist() for size in (1, 40, 300)]
    data = [
        types.Datum(
            model_input=types.ModelInput(
                chunks=[types.EncodedTextChunk(tokens=part) for part in (each[:1], each[1:]) if part]
            ),
            loss_fn_inputs={"target_tokens": each, "advantages": rng.normal(size=len(each)).astype(np.float32)},
        )
        for each in tokens
    ]
    given = types.ForwardBackwardInput(
        data=data, loss_fn="ppo", loss_fn_config={"clip_low_threshold": 0.7, "text": "x"}
    )
    request = types.ForwardBackwardRequest(forward_backward_input=given, model_id="a:train:0", seq_id=300)
    message = requests.forward_backward_request_to_proto(request)
    raw = message.SerializeToString()
    assert read_address(raw) == ("a:train:0", 300)
    found = read_loss_request(raw)
    assert (found.loss, found.settings, found.needs_gradient) == ("ppo", {"clip_low_threshold": 0.7, "text": "x"}, True)
    for datum, own, original in zip(found.data, tokens, data, strict=True):
        assert datum.token_ids.tolist() == own and datum.inputs["target_tokens"].tolist() == own
        np.testing.assert_array_equal(datum.inputs["advantages"], original.loss_fn_inputs["advantages"].to_numpy())
    message.forward_only = True
    assert not read_loss_request(message.SerializeToString()).needs_gradient


def test_the_sdk_reads_log_probs_as_they_were_meant(answers: Any):
    logprobs = [np.array([-1.5, -2.0], np.float32), np.zeros(0, np.float32), np.array([-0.25], np.float32)]
    found = answers.deserialize_forward_backward_output(loss_answer(LossResult(logprobs, -3.25)))
    assert found.metrics == {"loss:sum": -3.25}
    for output, expected in zip(found.loss_fn_outputs, logprobs, strict=True):
        np.testing.assert_array_equal(output["logprobs"].to_numpy(), expected)


@pytest.mark.parametrize("scores", [None, np.array([np.nan, -1.0], np.float32)])
def test_the_sdk_reads_samples_as_they_were_meant(answers: Any, scores: np.ndarray | None):
    responses = [Sampled([7, 300_000], [-1.0, -2.0], [1, 1], "stop"), Sampled([8], [-0.5], [1], "length")]
    found = answers.deserialize_sample_response(sample_answer(SampleResult(responses, scores)))
    assert [each.tokens for each in found.sequences] == [[7, 300_000], [8]]
    assert [each.logprobs for each in found.sequences] == [[-1.0, -2.0], [-0.5]]
    assert [each.stop_reason for each in found.sequences] == ["stop", "length"]
    assert found.prompt_logprobs == (None if scores is None else [None, -1.0])
