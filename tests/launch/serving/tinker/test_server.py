"""The routes of the Tinker API by a plain client: order, repeated requests, what is refused, and who makes room."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.policies import tiny_policy
from support.tinker_client import Client, loss_body, sample_body, serve

from headrace.launch.serving.tinker import models, sessions


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., Client]:
    path = tiny_policy(tmp_path)
    return lambda **options: serve(path, tmp_path / "saved", **options)


@pytest.fixture
def client(start: Callable[..., Client]) -> Client:
    return start()


def test_requests_are_carried_out_in_the_order_of_their_numbers_and_each_once(start: Callable[..., Client]):
    client = start(most_models=2)
    model = client.begin()
    update = client.step(model, 2)  # before its gradient
    first = client.loss(model, 1)
    assert client.loss(model, 1) == first  # a repeated request
    assert client.step(model, 2) == update
    norm = client.result(update)["metrics"]["grad_norm"]
    assert client.result(update) == client.result(update)
    # Twice the gradient would have twice the norm.
    other = client.begin()
    client.loss(other, 1)
    assert client.result(client.step(other, 2))["metrics"]["grad_norm"] == pytest.approx(norm)


def test_another_request_with_a_number_that_was_used_is_refused(client: Client):
    model = client.begin()
    client.loss(model, 1)
    status, message = client.error("forward_backward", loss_body(model, 1, 2.0), kind="application/x-protobuf")
    assert status == 400 and "was another request" in message


def test_a_failed_gradient_spoils_its_update_alone(client: Client):
    model = client.begin()
    failed = client.result(client.loss(model, 1, name="gspo"))
    assert failed["category"] == "user" and "loss_fn: 'gspo' is not supported" in failed["error"]
    client.loss(model, 2)
    assert "no weight is changed: loss_fn: 'gspo'" in client.result(client.step(model, 3))["error"]
    assert "there was no forward_backward" in client.result(client.step(model, 4))["error"]
    client.loss(model, 5)
    assert client.result(client.step(model, 6))["metrics"]["grad_norm"] > 0
    wrong = {"model_id": model, "seq_id": 7, "optimizer_params": {"type": "dimuon"}}
    assert "optimizer_params: is not supported" in client.result(client.get("optim_step", wrong))["error"]


def test_each_sampler_has_its_own_weights_and_tells_them(client: Client):
    model = client.begin()
    base = {"session_id": client.session, "sampling_session_seq_id": 9, "base_model": "tiny"}
    initial = client.get("create_sampling_session", base)["sampling_session_id"]
    before = client.sampler(model, 1, 0)
    live = client.sampler(model, 2, 1, kind="inflight")
    for number in range(3, 21, 2):
        client.loss(model, number)
        client.step(model, number + 1)
    after = client.sampler(model, 21, 2)
    client.sampler(model, 22, 3, kind="inflight")
    found: dict[str, tuple[bytes, set[int]]] = {}
    for name in (before, after, live, initial):
        first = client.get("asample", sample_body(name, params={"temperature": 0}))
        raw = client.result(first)
        (sequence,) = first["sample_sequence_ids"]
        versions = client.get(f"sequences/{sequence}/versions")["weight_versions"]
        assert len(versions) == 4
        found[name] = (raw, set(versions))
    assert found[before][0] == found[initial][0] != found[after][0] == found[live][0]
    assert [found[name][1] for name in (initial, before, after, live)] == [{0}, {1}, {3}, {4}]
    assert client.get(f"samplers/{before}")["base_model"] == "tiny"


def test_a_repeated_request_for_samples_is_the_same_one(client: Client):
    model = client.begin()
    sampler = client.sampler(model, 1, 0)
    body = sample_body(sampler, num_samples=3)
    del body["sampling_params"]["seed"]
    first = client.get("asample", body)
    assert client.get("asample", body) == first and len(first["sample_sequence_ids"]) == 3
    assert client.result(first) == client.result(first)
    assert "was another request" in client.error("asample", {**body, "num_samples": 2})[1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"topk_prompt_logprobs": 2}, "topk_prompt_logprobs: is not supported"),
        ({"record_stability_info": True}, "record_stability_info: is not supported"),
        ({"target_prompt_logprobs": {"data": [1]}}, "target_prompt_logprobs: is not supported"),
        ({"prompt_logprobs_last_n": 1}, "prompt_logprobs_last_n: needs prompt_logprobs=true"),
        ({"prompt_logprobs": True, "prompt_logprobs_last_n": 2}, "prompt_logprobs_last_n: must be from 1 to 1"),
        ({"num_samples": 0}, "num_samples: must be from 1"),
        ({"unknown": 1}, "unknown: is not a field that this server knows"),
        ({"prompt": {"chunks": []}}, "prompt: has no tokens"),
        ({"prompt": {"chunks": [{"type": "image"}]}}, r"prompt.chunks[0].type: image is not supported"),
        ({"prompt": {"chunks": [{"tokens": [500]}]}}, r"prompt.chunks[0].tokens: must be token ids below 128"),
        ({"params": {"max_tokens": 300}}, "sampling_params.max_tokens: 300 tokens after a prompt of 2 do not fit"),
        ({"params": {"temperature": -1}}, "sampling_params.temperature: must be 0, or at least"),
        ({"params": {"stop": [""]}}, "sampling_params.stop: must be text, or a list"),
        ({"params": {"min_p": 0.1}}, "sampling_params.min_p: is not a field"),
        ({"sampling_session_id": "x:sample:0"}, "there is no sampling session 'x:sample:0'"),
    ],
)
def test_a_request_for_samples_is_refused_by_its_field(client: Client, changes: dict[str, Any], message: str):
    model = client.begin()
    body = sample_body(client.sampler(model, 1, 0), **{"params": changes.pop("params", {}), **changes})
    assert message in client.error("asample", body)[1]


def test_too_many_samples_are_sent_away_until_there_is_room(client: Client):
    model = client.begin()
    sampler = client.sampler(model, 1, 0)
    first = client.get("asample", sample_body(sampler, num_samples=20, params={"max_tokens": 250, "stop": []}))
    assert client.ask("asample", sample_body(sampler, 1, num_samples=1))[0] == 429
    client.get("cancel_future", {"request_id": first["request_id"]})
    assert client.result(first) == {"error": "the client has cancelled it", "category": "user"}
    assert isinstance(client.result(client.get("asample", sample_body(sampler, 1))), bytes)


def test_a_client_that_is_gone_makes_room(client: Client, monkeypatch: pytest.MonkeyPatch):
    model = client.begin()
    waiting = client.create(1)
    client.get(f"sessions/{client.session}/finish", {"reason": {"type": "success"}})
    assert client.error("session_heartbeat", {"session_id": client.session})[0] == 410
    assert client.error("get_info", {"model_id": model})[0] == 410
    assert client.result(waiting)["model_id"].endswith(":train:1")
    monkeypatch.setattr(sessions, "SILENT_S", 0.0)
    assert client.begin() != model


def test_a_sampling_session_that_is_asked_for_again_by_another_number_is_the_first_one(client: Client):
    model = client.begin()
    body = {"model_id": model, "seq_id": 1, "sampling_session_seq_id": 0}
    first = client.get("save_weights_for_sampler", body)
    assert client.get("save_weights_for_sampler", {**body, "sampling_session_seq_id": 1}) == first
    assert client.result(first)["sampling_session_id"].endswith(":sample:0")
    assert "was another request" in client.error("save_weights_for_sampler", {**body, "kind": "inflight"})[1]


def test_snapshots_without_a_name_are_kept_while_they_are_new(client: Client, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(models, "KEPT_ADAPTERS", 1)
    model = client.begin()
    old, new = (client.sampler(model, number + 1, number) for number in range(2))
    lost = client.result(client.get("asample", sample_body(old)))
    assert lost["category"] == "user" and "give those that should stay a name" in lost["error"]
    assert isinstance(client.result(client.get("asample", sample_body(new))), bytes)


def test_saved_weights_are_there_after_a_new_start(start: Callable[..., Client]):
    first = start()
    model = first.begin()
    first.loss(model, 1)
    first.step(model, 2)
    state = first.result(first.get("save_weights", {"model_id": model, "seq_id": 3, "path": "a"}))["path"]
    sampler = first.result(first.get("save_weights_for_sampler", {"model_id": model, "seq_id": 4, "path": "b"}))["path"]
    again = first.get("save_weights", {"model_id": model, "seq_id": 5, "path": "a"})
    assert f"path: {state} exists" in first.result(again)["error"]
    first.get(f"sessions/{first.session}/finish", {})
    first.close()
    second = start()
    second.session = second.get("create_session", {"tags": [], "user_metadata": {}, "sdk_version": "x"})["session_id"]
    assert second.error("forward_backward", loss_body(model, 5), kind="application/x-protobuf")[0] == 404
    assert second.get("weights_info", {"tinker_path": state})["lora_rank"] == 4
    load = {"session_id": second.session, "model_seq_id": 0, "path": state, "optimizer": True}
    loaded = second.result(second.get("load_weights", load))["model_id"]
    assert second.get("get_info", {"model_id": loaded})["lora_rank"] == 4
    runs = second.get("training_runs?limit=1&offset=0")
    assert runs["cursor"]["total_count"] == 2 and runs["training_runs"][0]["training_run_id"] == loaded
    saved = second.get(f"training_runs/{model}/checkpoints")["checkpoints"]
    assert {item["tinker_path"] for item in saved} == {state, sampler}
    body = {"session_id": second.session, "sampling_session_seq_id": 0, "model_path": sampler}
    name = second.get("create_sampling_session", body)["sampling_session_id"]
    assert isinstance(second.result(second.get("asample", sample_body(name))), bytes)
    assert "is a state of training" in second.error("create_sampling_session", {**body, "model_path": state})[1]
    second.get(f"training_runs/{model}/checkpoints/weights/a", method="DELETE")
    assert second.error("weights_info", {"tinker_path": state})[0] == 404


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("telemetry/x", {}, 404, "POST /api/v1/telemetry/x is not supported by this server"),
        ("create_session", {"unknown": 1}, 400, "unknown: is not a field"),
        ("create_session", [], 400, "the body must be a JSON object"),
        ("create_session", b"{", 400, "the body is not JSON"),
        ("session_heartbeat", {"session_id": "x"}, 404, "there is no session 'x': this server was started anew"),
        ("optim_step", {"model_id": "x:train:0", "seq_id": 1}, 404, "there is no model 'x:train:0'"),
        ("optim_step", {"model_id": "x:train:0"}, 400, "seq_id: is missing"),
        ("forward_backward", b"{}", 415, "forward_backward must be application/x-protobuf"),
        ("retrieve_future", {"request_id": "x"}, 404, "there is no request 'x'"),
        ("weights_info", {"tinker_path": "x"}, 404, "is not tinker://RUN_ID/weights/NAME"),
        ("training_runs?limit=x", None, 400, "limit: must be a whole number"),
        ("training_runs/..%2Fx", None, 404, "is not"),
    ],
)
def test_a_wrong_request_is_told_why(client: Client, path: str, body: Any, status: int, message: str):
    found = client.error(path, body)
    assert found[0] == status and message in found[1]


def test_a_model_of_another_name_or_layers_that_are_not_there_are_refused(client: Client):
    client.begin()
    body = {"session_id": client.session, "model_seq_id": 5, "base_model": "other", "lora_config": {"rank": 4}}
    assert "there is no model 'other' here; this server has 'tiny'" in client.error("create_model", body)[1]
    alone = {"rank": 4, "train_attn": False, "train_mlp": False}
    for config, message in ((alone, "the LM head takes no adapter"), ({"rank": 0}, "lora_config.rank: must be from 1")):
        assert message in client.error("create_model", {**body, "base_model": "tiny", "lora_config": config})[1]


def test_keys_are_asked_for_in_the_sdks_header(start: Callable[..., Client]):
    client = start(keys=["tml-a-long-key"])
    assert client.error("client/config", {})[0] == 401
    client.headers = {"X-API-Key": "tml-another-key"}
    assert client.error("client/config", {})[0] == 401
    client.headers = {"X-API-Key": "tml-a-long-key"}
    assert client.get("client/config", {})["pjwt_auth_enabled"] is False


def test_all_weights_may_be_trained(start: Callable[..., Client]):
    client = start(is_full=True)
    model = client.begin()
    assert client.get("get_info", {"model_id": model})["is_lora"] is False
    client.loss(model, 1)
    assert client.result(client.step(model, 2))["metrics"]["grad_norm"] > 0
    sampler = client.sampler(model, 3, 0)
    assert isinstance(client.result(client.get("asample", sample_body(sampler))), bytes)
