"""What the SDK of the Tinker API says of a server, in a process of its own: `python -m support.tinker_sdk URL MODEL methods|flow|bodies`.

`methods` calls every public method of the clients, and prints for each of them `works`, `client` (the client answers alone) or the message of
the refusal, as JSON. `flow` trains, samples, saves and loads, and fails where a result is wrong.
"""

import asyncio
import importlib
import inspect
import json
import logging
import math
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

tinker: Any = importlib.import_module("tinker")
KEY = "tml-a-key-of-the-tests"
TOKENS = [5, 6, 7, 8, 9, 10]
ADAM = tinker.AdamParams(learning_rate=1e-2)
NO_REQUEST = (
    "create_custom_loss", "create_rest_client", "get_console_url", "get_telemetry", "get_base_model", "get_info",
    "get_sampler_handle", "get_tokenizer", "whoami",
)  # fmt: skip
"""Methods that the client answers alone."""
SKIPPED = {"SamplingClient.on_queue_state_change", "ServiceClient.holder"}
"""Called by the SDK itself, and no method."""


def datum(tokens: list[int] = TOKENS, **inputs: Any) -> Any:
    values = inputs or {"weights": [1.0] * (len(tokens) - 1)}
    return tinker.Datum(
        model_input=tinker.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs={"target_tokens": tokens[1:], **values}
    )


def prompt(tokens: list[int]) -> Any:
    return tinker.ModelInput.from_ints(tokens)


def greedy(count: int = 4) -> Any:
    return tinker.SamplingParams(max_tokens=count, temperature=0.0, stop=[])


def squared(data: Any, logprobs: list[Any]) -> tuple[Any, dict[str, float]]:
    total = sum((each**2).sum() for each in logprobs)
    return total, {"squared": float(total)}


def done(result: Any) -> Any:
    """The result of a future of any kind, or of a coroutine; another value as it is."""
    if inspect.iscoroutine(result):
        return done(asyncio.run(result))
    return result.result(timeout=120) if hasattr(result, "result") else result


# ------------------------------------------------------------------------------------------------------------- every method


class Clients:
    """One client of each kind, and what they have saved."""

    def __init__(self, url: str, model: str) -> None:
        self.url = url
        self.model = model
        self.service = tinker.ServiceClient(base_url=url, api_key=KEY, project_id="a-project")
        self.rest = self.service.create_rest_client()
        self.training = self.service.create_lora_training_client(base_model=model, rank=4).result()
        self.sampling = self.training.save_weights_and_get_sampling_client().result()
        self.state = self.training.save_state("first").result().path
        self.sampler_path = self.training.save_weights_for_sampler("first").result().path
        self.session = self.training.model_id.partition(":")[0]
        self._count = 0

    def name(self) -> str:
        self._count += 1
        return f"saved-{self._count}"

    def calls(self) -> dict[str, Callable[[Any], Any]]:
        """How each method is called, by `CLASS.NAME` without `_async`; the order is that of the calls."""
        run_id = self.training.model_id
        one = [datum()]
        service: dict[str, Callable[[Any], Any]] = {
            "copy_weights": lambda f: f(self.state),
            "create_custom_loss": lambda f: f(lambda logprobs: (-logprobs.sum(), {}), {"logprobs": 1}),
            "create_lora_training_client": lambda f: f(self.model, rank=2),
            "create_rest_client": lambda f: f(),
            "create_sampling_client": lambda f: f(base_model=self.model),
            "create_training_client_from_state": lambda f: f(self.state),
            "create_training_client_from_state_with_optimizer": lambda f: f(self.state),
            "get_console_url": lambda f: f(),
            "get_server_capabilities": lambda f: f(),
            "get_telemetry": lambda f: f(),
        }
        training: dict[str, Callable[[Any], Any]] = {
            "create_sampling_client": lambda f: f(self.sampler_path),
            "forward": lambda f: f(one, "cross_entropy"),
            "forward_backward": lambda f: f(one, "cross_entropy"),
            "forward_backward_custom": lambda f: f(one, squared),
            "optim_step": lambda f: (done(self.training.forward_backward(one, "cross_entropy")), f(ADAM))[1],
            "get_console_url": lambda f: f(),
            "get_info": lambda f: f(),
            "get_telemetry": lambda f: f(),
            "get_tokenizer": lambda f: f(),
            "load_state": lambda f: f(self.state),
            "load_state_with_optimizer": lambda f: f(self.state),
            "save_state": lambda f: f(self.name()),
            "save_weights_and_get_sampling_client": lambda f: f(),
            "save_weights_external": lambda f: f(self.name()),
            "save_weights_for_sampler": lambda f: f(self.name()),
        }
        sampling: dict[str, Callable[[Any], Any]] = {
            "compute_logprobs": lambda f: f(prompt(TOKENS)),
            "create": lambda f: f(self.service.holder, base_model=self.model),
            "from_sampler_handle": lambda f: f(self.sampling.get_sampler_handle(), api_key=KEY).sample(
                prompt(TOKENS), 1, greedy()
            ),
            "get_base_model": lambda f: f(),
            "get_sampler_handle": lambda f: f(),
            "get_telemetry": lambda f: f(),
            "get_tokenizer": lambda f: f(),
            "sample": lambda f: f(prompt(TOKENS), 1, greedy()),
        }
        return {
            **{f"ServiceClient.{name}": call for name, call in service.items()},
            **{f"TrainingClient.{name}": call for name, call in training.items()},
            **{f"SamplingClient.{name}": call for name, call in sampling.items()},
            **{f"RestClient.{name}": call for name, call in self._rest_calls(run_id).items()},
            "ServiceClient.close": lambda f: f("success"),
        }

    def _rest_calls(self, run_id: str) -> dict[str, Callable[[Any], Any]]:
        def saved() -> str:
            return done(self.training.save_state(self.name())).path

        return {
            "assign_session_project": lambda f: f(self.session, "a-project"),
            "copy_weights": lambda f: f(self.state, "a-project"),
            "delete_checkpoint": lambda f: f(run_id, "/".join(saved().split("/")[-2:])),
            "delete_checkpoint_from_tinker_path": lambda f: f(saved()),
            "export_session_trace": lambda f: f(self.session),
            "get_audit_log": lambda f: f(),
            "get_billing_usage": lambda f: f("2026-01-01T00:00:00Z", "2026-01-02T00:00:00Z"),
            "get_current_checkpoint_storage_usage": lambda f: f(),
            "get_external_weights_urls": lambda f: f(self.state.replace("/weights/", "/external_weights/")),
            "get_sampler": lambda f: f(self.sampling._sampling_session_id),
            "get_server_capabilities": lambda f: f(),
            "get_session": lambda f: f(self.session),
            "get_telemetry": lambda f: f(),
            "get_training_run": lambda f: f(run_id),
            "get_training_run_by_tinker_path": lambda f: f(self.state),
            "get_weights_info_by_tinker_path": lambda f: f(self.state),
            "list_checkpoints": lambda f: f(run_id),
            "list_sessions": lambda f: f(),
            "list_training_runs": lambda f: f(),
            "list_user_checkpoints": lambda f: f(),
            "publish_checkpoint_from_tinker_path": lambda f: f(self.state),
            "search_sessions": lambda f: f(tinker.types.SessionSearchRequest()),
            "set_checkpoint_ttl_from_tinker_path": lambda f: f(self.state, 3600),
            "unpublish_checkpoint_from_tinker_path": lambda f: f(self.state),
            "whoami": lambda f: f(),
        }


def methods(url: str, model: str) -> dict[str, str]:
    """The status of each method."""
    clients = Clients(url, model)
    owners = {
        "ServiceClient": clients.service, "TrainingClient": clients.training, "SamplingClient": clients.sampling,
        "RestClient": clients.rest,
    }  # fmt: skip
    there = {
        f"{owner}.{name}" for owner, client in owners.items() for name in dir(type(client)) if not name.startswith("_")
    } - SKIPPED
    calls = clients.calls()
    unknown = {name for name in there if name.removesuffix("_async") not in calls}
    assert not unknown, f"the SDK has methods that nobody calls here: {sorted(unknown)}"
    found: dict[str, str] = {}
    for base, call in calls.items():
        owner, _, method = base.partition(".")
        for name in (method, f"{method}_async"):
            if f"{owner}.{name}" in there:
                bound = getattr(owners[owner], name)
                found[f"{owner}.{name}"] = "client" if method in NO_REQUEST else status(lambda c=call, f=bound: c(f))
                if method in NO_REQUEST and method != "whoami":
                    done(call(bound))
    assert found.keys() == there, sorted(there ^ found.keys())
    return found


def status(call: Callable[[], Any]) -> str:
    """`works`, or the reason of the refusal."""
    try:
        done(call())
    except Exception as error:  # noqa: BLE001 - each kind of refusal is told
        text = str(error)
        return text.partition("'message': '")[2].partition("', 'type'")[0] or text.splitlines()[0][:200]
    return "works"


# ------------------------------------------------------------------------------------------------------------------ a flow


def flow(url: str, model: str) -> None:
    """Train, sample, save and load, with two clients at a time."""
    service = tinker.ServiceClient(base_url=url, api_key=KEY)
    training = service.create_lora_training_client(base_model=model, rank=4, seed=3).result()
    base = service.create_sampling_client(base_model=model).result()
    before = done(base.compute_logprobs(prompt(TOKENS)))
    losses = [train(training) for _ in range(15)]
    assert losses[-1] < 0.2 * losses[0], losses
    snapshot = done(training.save_weights_and_get_sampling_client())
    scores = done(snapshot.compute_logprobs(prompt(TOKENS)))
    assert math.isclose(-sum(scores[1:]), losses_of(training), rel_tol=1e-3), (scores, losses_of(training))
    assert done(snapshot.sample(prompt(TOKENS[:2]), 1, greedy())).sequences[0].tokens == TOKENS[2:]
    assert done(base.compute_logprobs(prompt(TOKENS))) == before
    check_saved(service, training, scores)
    check_inflight(training)
    check_samples(snapshot)
    check_policy_losses(training, snapshot)
    check_order(training)
    service.close("success").result()


def train(training: Any) -> float:
    """One update; returns the loss before it."""
    loss = training.forward_backward([datum()], "cross_entropy")
    update = training.optim_step(ADAM)
    assert done(update).metrics["grad_norm"] > 0
    return done(loss).metrics["loss:sum"]


def losses_of(training: Any) -> float:
    return done(training.forward([datum()], "cross_entropy")).metrics["loss:sum"]


def check_saved(service: Any, training: Any, scores: list[float]) -> None:
    """A saved state goes on with the same losses, and a saved sampler gives the same log-probs."""
    state = done(training.save_state("state", ttl_seconds=3600)).path
    path = done(training.save_weights_for_sampler("sampler")).path
    expected = [train(training) for _ in range(3)]
    again = service.create_training_client_from_state_with_optimizer(state).result()
    assert [train(again) for _ in range(3)] == expected
    without = service.create_training_client_from_state(state).result()
    found = [train(without) for _ in range(3)]
    assert found[0] == expected[0] and found[1:] != expected[1:], (found, expected)
    assert done(service.create_sampling_client(model_path=path).result().compute_logprobs(prompt(TOKENS))) == scores


def check_inflight(training: Any) -> None:
    """Samplers of the kind `inflight` share the newest weights."""
    first = done(training.save_weights_and_get_sampling_client(kind="inflight"))
    old = done(first.compute_logprobs(prompt(TOKENS)))
    train(training)
    assert done(first.compute_logprobs(prompt(TOKENS))) == old
    second = done(training.save_weights_and_get_sampling_client(kind="inflight"))
    new = done(second.compute_logprobs(prompt(TOKENS)))
    assert new != old and done(first.compute_logprobs(prompt(TOKENS))) == new


def check_samples(sampler: Any) -> None:
    """Seeds repeat samples, sequences have ids, and a scored prompt has a number for each token but the first."""
    params = tinker.SamplingParams(max_tokens=6, seed=5, temperature=1.0, top_k=-1)
    found = [done(sampler.sample(prompt(TOKENS[:1]), 3, params, include_prompt_logprobs=True)) for _ in range(2)]
    first, second = ([sequence.tokens for sequence in result.sequences] for result in found)
    assert first == second
    assert len({sequence.sequence_id for result in found for sequence in result.sequences}) == 6
    assert found[0].prompt_logprobs == [None]
    scored = done(sampler.compute_logprobs(prompt(TOKENS), prompt_logprobs_last_n=2))
    assert [number is None for number in scored] == [True] * 4 + [False] * 2
    stopped = done(sampler.sample(prompt(TOKENS[:2]), 1, tinker.SamplingParams(max_tokens=9, temperature=0, stop=[8])))
    assert stopped.sequences[0].tokens == [7, 8] and stopped.sequences[0].stop_reason == "stop"
    pending = [sampler.sample(prompt(TOKENS[:1]), 2, params) for _ in range(30)]
    assert all([sequence.tokens for sequence in done(each).sequences] == first[:2] for each in pending)


def check_policy_losses(training: Any, sampler: Any) -> None:
    """A ratio of 1 gives the same value by each loss of policy gradients, but for cispo."""
    scores = done(training.forward([datum()], "cross_entropy")).loss_fn_outputs[0]["logprobs"].data
    advantages = [0.0, 1.0, -2.0, 0.5, 1.0]
    given = datum(logprobs=scores, advantages=advantages)
    for name in ("importance_sampling", "ppo"):
        value = done(training.forward([given], name)).metrics["loss:sum"]
        assert math.isclose(value, -sum(advantages), rel_tol=1e-5), (name, value)
    expected = -sum(a * score for a, score in zip(advantages, scores, strict=True))
    value = done(training.forward([given], "cispo", {"clip_high_threshold": 1.5})).metrics["loss:sum"]
    assert math.isclose(value, expected, rel_tol=1e-4), (value, expected)
    loss = done(training.forward_backward_custom([datum()], squared))
    assert math.isclose(loss.metrics["loss:sum"], sum(score**2 for score in scores), rel_tol=1e-4)
    done(training.optim_step(ADAM))


def check_order(training: Any) -> None:
    """Data in many parts, which the SDK sends at the same time, are one gradient; a wrong one spoils its own update alone."""
    data = [datum() for _ in range(1100)]  # more than a part has
    many = training.forward_backward(data, "cross_entropy")
    result = done(many)
    assert len(result.loss_fn_outputs) == 1100
    done(training.optim_step(ADAM))
    wrong = training.forward_backward([datum(logprobs=[0.0] * 5)], "ppo")
    spoilt = training.optim_step(ADAM)
    good = training.forward_backward([datum()], "cross_entropy")
    update = training.optim_step(ADAM)
    for future, word in ((wrong, "advantages: is missing"), (spoilt, "no weight is changed")):
        try:
            done(future)
        except tinker.RequestFailedError as error:
            assert word in str(error), error
        else:
            raise AssertionError("it did not fail")
    done(good)
    assert done(update).metrics["grad_norm"] > 0


def main(words: list[str]) -> None:
    """Carry out the words."""
    url, model, what = words
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    if what == "methods":
        print(json.dumps(methods(url, model)))
    else:
        flow(url, model)
    assert threading.active_count() < 100


if __name__ == "__main__":
    main(sys.argv[1:])
