"""The routes of agents: claims, calls and ends, each of which may be repeated; what a call may ask for; who may ask."""

import http.client
import json
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from support.agent import ROOT, AgentClient
from support.policies import character_tokenizer
from support.served import ScriptedGenerator

from headrace.comm.messages import RowId
from headrace.rollout.leased_row import LeasedRow
from headrace.rollout.serving.agents import office as office_module

CHAT, TEXT, IDS = "/v1/chat/completions", "/v1/completions", "/inference/v1/generate"
HELLO = [{"role": "user", "content": "hello"}]
KEY = "a-key-of-the-server"
Opener = Callable[..., Any]


def test_a_conversation_of_chats_becomes_one_row_with_the_reward(open_office: Opener):
    office = open_office(ScriptedGenerator([4, 5, 2], text_of=lambda ids: "ok"))
    claimed = office.claim()
    assert claimed["row"] == {"prompt": "say 0", "answer": 0} and claimed["status"] == "open"
    assert claimed["base_url"].endswith(f"{ROOT}/{claimed['id']}/v1")
    first = office.client.call(claimed, CHAT, {"messages": HELLO, "return_token_ids": True}).body
    answer = first["choices"][0]["message"]
    more = [*HELLO, {"role": "assistant", "content": answer["content"]}, {"role": "user", "content": "and?"}]
    second = office.client.call(claimed, CHAT, {"messages": more, "return_token_ids": True}).body
    ended = office.client.end(claimed, reward=0.5)
    assert ended.status == 200 and ended.body["status"] == "ended" and ended.body["turns"] == 2
    held, completion, failure = office.finished()
    assert not failure and held.episode.reward == 0.5 and held.starts == []
    assert completion.prompt_ids == first["prompt_token_ids"]
    whole = [*second["prompt_token_ids"], *second["choices"][0]["token_ids"]]
    assert [*completion.prompt_ids, *completion.token_ids] == whole
    held.completion = completion
    held.reward = 0.5
    columns = held.columns()
    drawn = columns["loss_mask"] == 1
    assert columns["response_ids"][drawn].tolist() == [4, 5, 2, 4, 5, 2]
    assert columns["rollout_logprobs"][drawn].tolist() == [-0.5] * 6
    assert columns["rollout_logprobs"][~drawn].tolist() == [0.0] * int((~drawn).sum())
    assert set(columns["versions"].tolist()) == {7} and held.version == 7
    assert held.num_from_policy == 6 and "branch_starts" not in columns
    assert held.episode.response() == [
        {"role": "assistant", "content": "ok"},
        {"role": "user", "content": "and?"},
        {"role": "assistant", "content": "ok"},
    ]


def test_a_call_that_does_not_continue_becomes_a_branch_of_the_same_row(open_office: Opener):
    office = open_office()
    claimed = office.claim()
    for prompt in ([5, 6], [5, 6, 4, 4, 9], [30, 31]):
        body = {"token_ids": prompt, "sampling_params": {"max_tokens": 2}}
        assert office.client.call(claimed, IDS, body).status == 200
    state = office.client.ask(f"{ROOT}/{claimed['id']}").body
    assert [branch["drawn_tokens"] for branch in state["branches"]] == [4, 2]
    office.client.end(claimed, reward=1)
    held, completion, _ = office.finished()
    held.completion = completion
    held.reward = 1.0
    columns = held.columns()
    assert columns["prompt_ids"].tolist() == [5, 6]
    assert columns["response_ids"].tolist() == [4, 4, 9, 4, 4, 30, 31, 4, 4]
    assert columns["loss_mask"].tolist() == [1, 1, 0, 1, 1, 0, 0, 1, 1]
    assert columns["branch_starts"].tolist() == [7]
    assert held.num_from_policy == 6


def test_a_repeated_claim_and_a_repeated_end_change_nothing(open_office: Opener):
    office = open_office()
    one, two = (office.client.claim(Idempotency_Key="claim 1").body for _ in range(2))
    other = office.client.claim(Idempotency_Key="claim 2").body
    assert one["id"] == two["id"] != other["id"] and len(office.samples.free) == 2
    office.client.call(one, IDS, {"token_ids": [5], "sampling_params": {"max_tokens": 2}})
    ends = [office.client.end(one, reward=1) for _ in range(2)]
    assert [reply.status for reply in ends] == [200, 200] and ends[0].body == ends[1].body
    assert len(office.samples.finished) == 1
    other_reward = office.client.end(one, reward=0)
    assert other_reward.status == 410 and "has ended already: reward 1" in other_reward.body["error"]["message"]
    late = office.client.call(one, IDS, {"token_ids": [5]})
    assert (late.status, late.body["error"]["code"]) == (410, "conversation_over")
    assert office.client.claim(Idempotency_Key="claim 1").body["id"] == one["id"]


def test_what_is_over_keeps_no_tokens_and_is_forgotten_in_the_end(open_office: Opener, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(office_module, "REMEMBERED", 1)
    office = open_office()
    first, second, still_open = (office.claim() for _ in range(3))
    for claimed in (first, second):
        office.client.call(claimed, IDS, {"token_ids": [5, 6], "sampling_params": {"max_tokens": 3}})
        office.client.end(claimed, reward=1)
    assert office.client.ask(f"{ROOT}/{first['id']}").status == 404
    state = office.client.ask(f"{ROOT}/{second['id']}").body
    assert (state["status"], state["turns"], state["drawn_tokens"], state["reward"]) == ("ended", 1, 3, 1.0)
    known = office.office.find(second["id"])
    assert not known.turns.branches and known.held.completion is None and known.held.episode is None
    assert office.client.ask(f"{ROOT}/{still_open['id']}").body["status"] == "open"


def test_a_repeated_call_with_a_key_gets_the_same_answer_and_is_one_turn(open_office: Opener):
    generator = ScriptedGenerator()
    office = open_office(generator)
    claimed = office.claim()
    body = {"token_ids": [5, 6], "sampling_params": {"max_tokens": 3}}
    generator.may_step.clear()
    connection = http.client.HTTPConnection("127.0.0.1", office.served.port, timeout=30)
    headers = {"Content-Type": "application/json", "Idempotency-Key": "call 1"}
    connection.request("POST", f"{ROOT}/{claimed['id']}{IDS}", json.dumps(body), headers)
    office.served.wait_until(lambda: bool(generator.live))
    connection.close()  # the client gives up before the answer
    generator.may_step.set()
    one, two = (office.client.call(claimed, IDS, body, Idempotency_Key="call 1") for _ in range(2))
    assert one.status == 200 and one.body == two.body
    state = office.client.ask(f"{ROOT}/{claimed['id']}").body
    assert (state["turns"], state["drawn_tokens"]) == (1, 3)


def test_an_answer_that_its_client_did_not_wait_for_is_no_turn(open_office: Opener):
    generator = ScriptedGenerator()
    office = open_office(generator)
    claimed = office.claim()
    body = {"token_ids": [5, 6], "sampling_params": {"max_tokens": 200}}
    generator.may_step.clear()
    impatient = http.client.HTTPConnection("127.0.0.1", office.served.port, timeout=0.5)
    with pytest.raises(TimeoutError):
        impatient.request(
            "POST", f"{ROOT}/{claimed['id']}{IDS}", json.dumps(body), {"Content-Type": "application/json"}
        )
        impatient.getresponse()
    impatient.close()
    office.served.wait_until(lambda: not office.served.desk.num_samples)
    generator.may_step.set()
    assert office.client.call(claimed, IDS, {**body, "sampling_params": {"max_tokens": 2}}).status == 200
    assert office.client.ask(f"{ROOT}/{claimed['id']}").body["drawn_tokens"] == 2


def test_a_stream_is_a_turn_of_what_it_has_sent(open_office: Opener):
    office = open_office(
        ScriptedGenerator(
            [4, 5, 2], text_of=lambda ids: str(character_tokenizer().decode(ids, skip_special_tokens=True))
        )
    )
    claimed = office.claim()
    events = office.served.events(f"{ROOT}/{claimed['id']}{CHAT}", {"messages": HELLO})
    assert "".join(event["choices"][0]["delta"].get("content", "") for event in events) == " !"
    office.client.end(claimed, reward=1)
    _, completion, failure = office.finished()
    assert (completion.token_ids, failure) == ([4, 5, 2], "")
    refused = office.client.call(office.claim(), CHAT, {"messages": HELLO, "stream": True}, Idempotency_Key="a")
    assert refused.status == 400 and refused.body["error"]["param"] == "Idempotency-Key"


def test_an_agent_that_says_nothing_has_failed_with_its_reason(open_office: Opener):
    office = open_office(environment__timeout_s=0.3)
    claimed = office.claim()
    office.client.call(claimed, IDS, {"token_ids": [5], "sampling_params": {"max_tokens": 2}})
    held, completion, failure = office.finished()
    assert failure == "the agent said nothing for 0.3 s (environment.timeout_s)" and held.broken_by == "late"
    assert completion.token_ids == [4, 4], "the account counts its tokens"
    state = office.client.ask(f"{ROOT}/{claimed['id']}").body
    assert state["status"] == "failed" and state["failure"] == failure
    late = office.client.end(claimed, reward=1)
    assert late.status == 410 and failure in late.body["error"]["message"]


def test_the_time_of_a_call_is_not_the_agents(open_office: Opener):
    generator = ScriptedGenerator()
    office = open_office(generator, environment__timeout_s=0.4)
    claimed = office.claim()
    generator.may_step.clear()
    threading.Timer(1.0, generator.may_step.set).start()
    body = {"token_ids": [5], "sampling_params": {"max_tokens": 2}}
    assert office.client.call(claimed, IDS, body).status == 200
    assert office.client.end(claimed, reward=1).body["status"] == "ended"


@pytest.mark.parametrize(
    ("outcome", "failure"),
    [
        ({"failure": "the tool broke"}, "the agent: the tool broke"),
        ({"failure": ""}, "the agent: it gave no reason"),
        ({"reward": 1.0}, "the agent ended without a response of the policy"),
    ],
)
def test_an_end_without_a_reward_or_a_turn_is_a_failure(open_office: Opener, outcome: Any, failure: str):
    office = open_office()
    claimed = office.claim()
    ends = [office.client.end(claimed, **outcome) for _ in range(2)]
    assert [reply.status for reply in ends] == [200, 200]
    assert ends[0].body["status"] == "failed" and ends[0].body["failure"] == failure
    held, completion, told = office.finished()
    assert (completion, told, held.broken_by) == (None, failure, "error")


@pytest.mark.parametrize(
    ("outcome", "problem"),
    [
        ({}, "reward: give either the reward, a number, or the failure"),
        ({"reward": 1, "failure": "x"}, "reward: give either"),
        ({"reward": "1"}, "reward: must be a number"),
        ({"reward": 1e39}, "reward: 1e+39 is no number that a row can store"),
        ({"reward": True}, "reward: must be a number"),
        ({"reward": 1, "rewrad": 2}, "rewrad: is not a field that this server knows"),
        ({"reward": 1, "metrics": {"mean": 1}}, "metrics: 'mean': a name has"),
        ({"reward": 1, "metrics": {"a b": 1}}, "metrics: 'a b': a name has"),
        ({"reward": 1, "metrics": {"a": None}}, "metrics.a: must be a finite number"),
    ],
)
def test_a_wrong_end_is_refused_by_its_field_and_leaves_the_conversation_open(
    open_office: Opener, outcome: Any, problem: str
):
    office = open_office()
    claimed = office.claim()
    reply = office.client.end(claimed, **outcome)
    assert reply.status == 400 and reply.body["error"]["message"].startswith(problem), reply.body
    assert office.client.ask(f"{ROOT}/{claimed['id']}").body["status"] == "open"


def test_a_reward_that_is_not_a_number_is_refused(open_office: Opener):
    office = open_office()
    claimed = office.claim()
    reply = office.client.end(claimed, reward=float("nan"))  # as Python writes it, which is no JSON
    assert reply.status == 400 and not office.samples.finished


def test_metrics_go_with_the_row_unless_reward_functions_note_theirs(open_office: Opener):
    office = open_office()
    claimed = office.claim()
    office.client.call(claimed, IDS, {"token_ids": [5], "sampling_params": {"max_tokens": 2}})
    assert office.client.end(claimed, reward=1, metrics={"tool.calls": 2}).status == 200
    held, _, _ = office.finished()
    assert held.info == {"metrics": {"tool.calls": 2}}
    scored = open_office(reward__path="rewards.py:reward")
    reply = scored.client.end(scored.claim(), reward=1, metrics={"a": 1})
    assert reply.status == 400 and reply.body["error"]["param"] == "metrics"


def drawn_params(office: Any, claimed: Any, path: str, body: Any) -> Any:
    """The parameters with which a call is drawn."""
    generator = office.served.generator
    generator.may_step.clear()
    reply: list[Any] = []
    caller = threading.Thread(target=lambda: reply.append(office.client.call(claimed, path, body)))
    caller.start()
    office.served.wait_until(lambda: bool(generator.live) or bool(reply))
    assert not reply, reply[0].body
    (state,) = generator.live.values()
    generator.may_step.set()
    caller.join(30)
    assert reply[0].status == 200
    return state.params


SETTINGS = {
    "sampling__temperature": 0.7, "sampling__top_p": 0.9, "sampling__top_k": 5, "sampling__stop": "[x,yy]",
    "sampling__max_new_tokens": 9,
}  # fmt: skip


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": HELLO, "temperature": None}),
        (TEXT, {"prompt": [5, 6]}),
        (IDS, {"token_ids": [5, 6]}),
        (IDS, {"token_ids": [5, 6], "sampling_params": {"max_tokens": 50}}),
    ],
)
def test_what_an_agent_does_not_say_is_as_in_the_run(open_office: Opener, path: str, body: Any):
    office = open_office(**SETTINGS)
    params = drawn_params(office, office.claim(), path, body)
    assert (params.temperature, params.top_p, params.top_k, params.stops) == (0.7, 0.9, 5, ("x", "yy"))
    assert params.max_new_tokens == 9


def test_what_an_agent_says_holds_where_the_log_probs_stay_right(open_office: Opener):
    office = open_office(**SETTINGS)
    claimed = office.claim()
    said = {"max_tokens": 4, "temperature": 0.7, "top_p": 1.0, "top_k": 0, "stop": "z", "seed": 3}
    params = drawn_params(office, claimed, TEXT, {"prompt": [5, 6], **said})
    assert (params.max_new_tokens, params.top_p, params.top_k, params.stops, params.seed) == (4, 1.0, 0, ("z",), 3)
    for temperature in (1.0, 0):
        for path, body in ((TEXT, {"prompt": [5], "temperature": temperature}),
                           (IDS, {"token_ids": [5], "sampling_params": {"temperature": temperature}})):  # fmt: skip
            reply = office.client.call(claimed, path, body)
            assert reply.status == 400 and reply.body["error"]["code"] == "off_policy"
            assert "not the run's sampling.temperature=0.7" in reply.body["error"]["message"]
    greedy = open_office()
    assert drawn_params(greedy, greedy.claim(), TEXT, {"prompt": [5], "temperature": 0}).temperature == 0


def test_two_runs_draw_the_same_and_two_samples_or_calls_do_not(open_office: Opener):
    seeds: list[Any] = []
    for _ in range(2):
        office = open_office()
        one, other = office.claim(), office.claim()
        calls = ((one, [5]), (one, [5]), (other, [5]))
        seeds.append([drawn_params(office, claimed, IDS, {"token_ids": ids}).seed for claimed, ids in calls])
    assert seeds[0] == seeds[1] and len({*seeds[0]}) == 3


def test_the_response_of_a_branch_has_at_most_its_longest_length(open_office: Opener):
    office = open_office(sampling__max_new_tokens=7)
    claimed = office.claim()
    body = {"token_ids": [5, 6], "sampling_params": {"max_tokens": 3}}
    first = office.client.call(claimed, IDS, body).body["choices"][0]
    assert first["token_ids"] == [4] * 3
    second = office.client.call(claimed, IDS, {"token_ids": [5, 6, 4, 4, 4, 9]}).body["choices"][0]
    assert second["token_ids"] == [4] * 3 and second["finish_reason"] == "length"
    full = office.client.call(claimed, IDS, {"token_ids": [5, 6, 4, 4, 4, 9, 4, 4, 4]})
    assert (full.status, full.body["error"]["code"]) == (400, "conversation_full")
    branch = office.client.call(claimed, IDS, {"token_ids": [5, 6]}).body["choices"][0]
    assert branch["token_ids"] == [4] * 7
    office.client.end(claimed, reward=1)
    _, completion, _ = office.finished()
    assert completion.finish_reason == "length"


def test_the_branches_of_a_conversation_have_together_as_many_tokens_as_a_micro_batch(open_office: Opener):
    office = open_office(context=20, optimizer__micro_tokens=30, sampling__max_new_tokens=100)
    claimed = office.claim()

    def lengths(*prompt: int) -> int:
        reply = office.client.call(claimed, IDS, {"token_ids": prompt, "sampling_params": {"max_tokens": 9}})
        return len(reply.body["choices"][0]["token_ids"]) if reply.status == 200 else reply.body["error"]["code"]

    assert lengths(5, 6) == 9
    assert lengths(5, 6, *[4] * 9) == 9, "it continues, so its prompt is there already"
    assert lengths(7, 8, 9) == 7, "20 and 3 tokens are there"
    assert lengths(10) == "conversation_full"


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_a_length_beyond_the_context_is_cut_and_a_wrong_one_is_refused(open_office: Opener, name: str):
    office = open_office(context=40, sampling__max_new_tokens=100)
    claimed = office.claim()
    body = {"messages": [{"role": "user", "content": "a"}]}
    prompt = office.client.call(claimed, CHAT, {**body, name: 1, "return_token_ids": True}).body["prompt_token_ids"]
    choice = office.client.call(claimed, CHAT, {**body, name: 512}).body["choices"][0]
    assert (len(choice["weight_version"]), choice["finish_reason"]) == (40 - len(prompt), "length")
    for wrong in (0, -1, 1.5, True, "2"):
        refused = office.client.call(claimed, CHAT, {**body, name: wrong})
        assert refused.status == 400 and refused.body["error"]["param"] in ("max_tokens", name), refused.body
    both = {"max_tokens": 2, "max_completion_tokens": 3}
    assert office.client.call(claimed, CHAT, {**body, **both}).status == 400


def test_a_conversation_has_at_most_as_many_turns_as_an_environments(open_office: Opener):
    office = open_office(environment__max_turns=3)
    claimed = office.claim()
    body = {"prompt": [5, 6], "n": 2, "max_tokens": 1}
    assert office.client.call(claimed, TEXT, body).status == 200
    refused = office.client.call(claimed, TEXT, body)
    assert (refused.status, refused.body["error"]["code"]) == (400, "too_many_turns")
    assert office.client.call(claimed, TEXT, {**body, "n": 1}).status == 200


def test_a_claim_without_a_sample_is_told_to_come_back(open_office: Opener):
    office = open_office(num_samples=0, claim_s=0.1)
    reply = office.client.claim()
    assert (reply.status, reply.body["error"]["code"], reply.headers["retry-after"]) == (503, "no_sample", "1")
    keyed = office.client.claim(Idempotency_Key="a")
    assert keyed.status == 503
    office.office.ended = "finished"
    over = office.client.claim(Idempotency_Key="a")
    assert (over.status, over.body["error"]["code"]) == (410, "run_ended")


def test_the_sample_of_a_client_that_left_before_its_claim_was_answered_goes_to_another(open_office: Opener):
    office = open_office(num_samples=0, claim_s=30.0)
    impatient = http.client.HTTPConnection("127.0.0.1", office.served.port, timeout=30)
    impatient.request("POST", ROOT)
    time.sleep(0.2)
    impatient.close()
    time.sleep(0.2)
    office.samples.free.append(LeasedRow(RowId(0, 3, 0), 1, 0, {"prompt": "late"}))
    assert office.claim()["row"] == {"prompt": "late"}


def test_a_conversations_key_opens_that_conversation_alone(open_office: Opener):
    office = open_office(keys=[KEY])
    assert AgentClient(office.served.port).claim().status == 401
    one, two = office.claim(), office.claim()
    own = AgentClient(office.served.port, one["api_key"])
    body = {"token_ids": [5], "sampling_params": {"max_tokens": 1}}
    assert own.call(one, IDS, body).status == 200
    assert own.ask(f"{ROOT}/{one['id']}/v1/models").status == 200
    for path in (f"{ROOT}/{two['id']}", f"{ROOT}/conv-unknown"):
        assert own.ask(path).status == 401
    assert own.call(two, IDS, body).status == own.claim().status == 401
    assert own.ask("/v1/completions", {"prompt": [5]}).status == 401
    assert office.client.call(two, IDS, body).status == 200, "the server's key opens all"
    unknown = office.client.ask(f"{ROOT}/conv-unknown")
    assert (unknown.status, unknown.body["error"]["code"]) == (404, "unknown_conversation")
    assert own.end(one, reward=1).status == 200


def test_equal_texts_of_two_agents_keep_their_own_tokens(open_office: Opener):
    """The answers are the same text from different tokens; each conversation goes on from its own."""
    office = open_office(ScriptedGenerator(text_of=lambda ids: "ok"))
    claims = [office.claim(), office.claim()]
    for claimed, length in zip(claims, (3, 2), strict=True):
        office.client.call(claimed, CHAT, {"messages": HELLO, "max_tokens": length})
    more = [*HELLO, {"role": "assistant", "content": "ok"}, {"role": "user", "content": "and?"}]
    for claimed, length in zip(claims, (3, 2), strict=True):
        office.client.call(claimed, CHAT, {"messages": more, "max_tokens": 1})
        (branch,) = office.client.ask(f"{ROOT}/{claimed['id']}").body["branches"]
        assert branch["drawn_tokens"] == length + 1


def test_a_body_that_is_no_object_and_a_claim_with_unknown_fields_are_refused(open_office: Opener):
    office = open_office()
    claimed = office.claim()
    assert office.client.ask(f"{ROOT}/{claimed['id']}/end", [1]).status == 400
    assert office.client.ask(ROOT, {"sample": 1}).body["error"]["param"] == "sample"
    assert office.client.ask(ROOT, {"metadata": {"agent": "a"}}).status == 200
    assert office.client.ask(f"{ROOT}/{claimed['id']}/nothing").status == 404
