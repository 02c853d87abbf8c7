"""The engine against transformers and against itself: batching, preemption, stops, weights, moves, errors."""

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.policies import STORIES, plain_logprobs, random_prompts, tiny_policy
from transformers import AddedToken, AutoModelForCausalLM

from headrace.comm.errors import SettingError
from headrace.rollout import Engine, SamplingParams
from headrace.rollout.engine.memory import AvailableMemory, plan_cache
from headrace.rollout.engine.text import Text
from headrace.rollout.engine.to_device import check_device
from headrace.trainer.policy.model import load_policy, load_tokenizer


def by_transformers(path, prompts, max_new_tokens):
    model: Any = AutoModelForCausalLM.from_pretrained(path).eval()
    responses = []
    for prompt in prompts:
        ids = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=max_new_tokens,
            do_sample=False,
        )
        responses.append(ids[0, len(prompt) :].tolist())
    return responses


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_greedy_responses_equal_those_of_transformers_generate(tmp_path, family):
    path = tiny_policy(tmp_path, family)
    prompts = random_prompts(64, longest=90)
    expected = by_transformers(path, prompts, 24)
    for max_running in (1, 7, 32):
        engine = Engine(path, max_running=max_running)
        completions = engine.generate(prompts, SamplingParams(max_new_tokens=24, temperature=0))
        assert [c.token_ids for c in completions] == expected
        engine.check()
        assert engine.idle and engine.pool.num_free == engine.pool.num_pages - 1


def test_logprobs_are_as_near_to_float64_as_those_of_a_plain_forward():
    engine = Engine(STORIES, max_running=16)
    plain = AutoModelForCausalLM.from_pretrained(STORIES).eval()
    exact = AutoModelForCausalLM.from_pretrained(STORIES, dtype=torch.float64).eval()
    ours, theirs = [], []
    for completion in engine.generate(["Once upon a time", "Lily"] * 12, SamplingParams(max_new_tokens=200)):
        expected = plain_logprobs(exact, completion.prompt_ids, completion.token_ids)
        ours.append((torch.tensor(completion.logprobs) - expected).abs().max())
        theirs.append((plain_logprobs(plain, completion.prompt_ids, completion.token_ids) - expected).abs().max())
        assert (completion.finish_reason == "stop") == (completion.token_ids[-1] in (1, 2))
    assert max(ours) <= 2e-5 and max(ours) <= 1.5 * max(theirs)


def test_a_trajectory_does_not_depend_on_its_batch(llama):
    prompts = random_prompts(24, longest=120)
    params = SamplingParams(max_new_tokens=60, n=3)
    alone = Engine(llama, max_running=1).generate(prompts, params)
    batched = Engine(llama, max_running=32).generate(prompts, params)
    assert [c.token_ids for c in alone] == [c.token_ids for c in batched]
    assert len({tuple(c.token_ids) for c in alone[:3]}) == 3


def test_completions_stream_as_they_finish_and_a_closed_stream_leaves_nothing(llama):
    engine = Engine(llama)
    params = [SamplingParams(max_new_tokens=k, ignore_eos=True) for k in (30, 5, 60)]
    stream = engine.stream(["a", "b", "c"], params)
    assert [len(next(stream).token_ids), len(next(stream).token_ids)] == [5, 30]
    stream.close()
    engine.check()
    assert engine.idle and engine.pool.num_free == engine.pool.num_pages - 1
    with pytest.raises(SettingError, match="no tokens"):
        engine.generate([[5], []])
    assert engine.idle


def test_samples_of_a_prompt_are_adjacent_in_the_prompts_order(llama):
    prompts = random_prompts(5, longest=70)
    completions = Engine(llama, max_running=4).generate(prompts, SamplingParams(max_new_tokens=9, n=2))
    assert [c.prompt_ids for c in completions] == [p for p in prompts for _ in range(2)]


def test_a_group_gives_what_its_samples_give_alone(llama):
    prompt = random_prompts(1, longest=1)[0] * 100
    together, apart = Engine(llama), Engine(llama)
    together.add_group(prompt, SamplingParams(max_new_tokens=100), [5, 6, 7, 8])
    for trajectory_id in (5, 6, 7, 8):
        apart.add_group(prompt, SamplingParams(max_new_tokens=100), [trajectory_id])
    outcomes = []
    for engine in (together, apart):
        found = {}
        while not engine.idle:
            found |= {c.trajectory_id: c.token_ids for c in engine.step()}
            engine.check()
        outcomes.append(found)
    assert outcomes[0] == outcomes[1] and sorted(outcomes[0]) == [5, 6, 7, 8]


def test_a_small_cache_preempts_and_changes_no_trajectory(llama):
    prompts = random_prompts(24, longest=120)
    params = SamplingParams(max_new_tokens=100, ignore_eos=True, n=2)
    roomy = Engine(llama, max_running=16)
    tight = Engine(llama, max_running=16, kv_gb=12 * 64 * 512 / 1e9)
    expected = [c.token_ids for c in roomy.generate(prompts, params)]
    assert [c.token_ids for c in tight.generate(prompts, params)] == expected
    tight.check()
    assert tight.scheduler.num_preempted > 0 and roomy.scheduler.num_preempted == 0


def test_a_prompt_in_chunks_gives_what_it_gives_at_once(llama):
    prompts = random_prompts(6, longest=200)
    params = SamplingParams(max_new_tokens=20)
    at_once = Engine(llama).generate(prompts, params)
    in_chunks = Engine(llama, prefill_tokens=17).generate(prompts, params)
    assert [c.token_ids for c in at_once] == [c.token_ids for c in in_chunks]


def test_stop_tokens_and_strings_end_a_response(llama):
    engine = Engine(llama)
    free = engine.generate(["hello"], SamplingParams(max_new_tokens=50, ignore_eos=True))[0]
    third = free.token_ids[2]
    engine = Engine(llama)
    by_id = engine.generate(["hello"], SamplingParams(max_new_tokens=50, ignore_eos=True, stop=(third,)))[0]
    assert by_id.token_ids == free.token_ids[: free.token_ids.index(third) + 1]
    assert by_id.finish_reason == "stop"
    wanted = free.text[4:6]
    engine = Engine(llama)
    by_text = engine.generate(["hello"], SamplingParams(max_new_tokens=50, ignore_eos=True, stop=wanted))[0]
    assert by_text.text == free.text[: free.text.index(wanted)] and by_text.finish_reason == "stop"


def test_a_stop_string_of_characters_that_are_several_tokens_each_ends_a_response():
    engine = Engine(STORIES)
    smiles = engine.text.encode("\U0001f642" * 3)
    assert len(smiles) >= 12, "this tokenizer writes the character in bytes"
    sequence = engine._sequence([1], SamplingParams(max_new_tokens=100, stop="\U0001f642" * 3), 0, 0)
    sequence.token_ids = [*engine.text.encode("Once upon a time"), *smiles][:-1]
    assert not engine.text.has_ended(sequence)
    sequence.token_ids.append(smiles[-1])
    assert engine.text.has_ended(sequence)
    sequence = engine._sequence([1], SamplingParams(stop="\u65e5\u672c"), 0, 0)
    sequence.token_ids = engine.text.encode("\u672c" * 10 + "\u65e5\u672c")
    assert engine.text.has_ended(sequence), "the tokens that are looked at begin within a character"


def test_the_text_of_a_special_token_stops_a_response_as_its_id_does(llama):
    engine = Engine(llama)
    special = engine.text.tokenizer.eos_token
    params = [SamplingParams(max_new_tokens=60, ignore_eos=True, stop=stop) for stop in ((special,), ())]
    stopped, free = engine.generate([[5, 6, 7]] * 2, [replace(p, seed=3) for p in params])
    sequence = engine._sequence([1], params[0], 0, 0)
    assert sequence.stop_ids == {engine.text.tokenizer.eos_token_id} and sequence.stop_strings == ()
    assert stopped.token_ids == free.token_ids[: len(stopped.token_ids)]
    tokenizer = load_tokenizer(llama)
    tokenizer.add_tokens([AddedToken("<|end|>", special=True), AddedToken("</think>", special=False)])
    assert "<|end|>" not in tokenizer.all_special_tokens
    stops = Text(tokenizer).split_stops(("<|end|>", "</think>"))
    assert stops == (("</think>",), {tokenizer.convert_tokens_to_ids("<|end|>")})


def test_a_policy_with_logits_that_are_not_finite_ends_its_responses_as_errors(tmp_path):
    engine = Engine(load_policy(tiny_policy(tmp_path)))
    with torch.no_grad():
        engine.policy.head.weight[3] = float("nan")
    engine.weights_changed()
    for temperature in (0.0, 1.0):
        done = engine.generate([[5, 6, 7], [8]], SamplingParams(max_new_tokens=9, temperature=temperature))
        assert [(c.finish_reason, c.token_ids) for c in done] == [("error", [])] * 2
    engine.check()


@pytest.mark.parametrize("attention", ["pool", "gather"])
def test_pages_of_a_trajectory_that_ended_in_nan_spoil_no_later_one(tmp_path, attention):
    policy = load_policy(tiny_policy(tmp_path))
    engine, params = Engine(policy, attention=attention), SamplingParams(max_new_tokens=9, temperature=0)
    prompts = [[5, 6, 7], [8]]
    expected = [c.token_ids for c in engine.generate(prompts, params)]
    weight = policy.weights()["model.layers.0.self_attn.v_proj.weight"]
    good = weight.detach().clone()
    with torch.no_grad():
        weight[3] = float("nan")
    engine.weights_changed()
    bad = engine.generate([random_prompts(1, 1)[0] * n for n in (61, 125)], params)
    assert [c.finish_reason for c in bad] == ["error"] * 2
    with torch.no_grad():
        weight.copy_(good)
    engine.weights_changed()
    assert [c.token_ids for c in engine.generate(prompts, params)] == expected
    engine.check()


def test_an_engine_on_another_gpu_than_the_current_one_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    with pytest.raises(SettingError, match=r"device=cuda:1: the current device of this process is cuda:0"):
        check_device(torch.device("cuda:1"))
    for device in ("cuda:0", "cuda", "cpu"):
        check_device(torch.device(device))


def test_prompts_of_the_wrong_kind_are_refused(llama):
    engine = Engine(llama)
    with pytest.raises(SettingError, match="prompts must be a list"):
        engine.generate("Once")
    with pytest.raises(SettingError, match="whole numbers"):
        engine.generate([[5.0, 6.0]])  # pyright: ignore[reportArgumentType]


def test_ignore_eos_runs_to_the_limit_or_the_end_of_the_context(llama):
    engine = Engine(llama)
    prompt = random_prompts(1, 1)[0] * 250
    short = engine.generate([[5, 6]], SamplingParams(max_new_tokens=40, ignore_eos=True))[0]
    long = engine.generate([prompt], SamplingParams(max_new_tokens=40, ignore_eos=True))[0]
    assert len(short.token_ids) == 40 and short.finish_reason == "length"
    assert len(long.token_ids) == 6 and long.finish_reason == "length"


def test_a_prompt_with_a_seed_of_its_own_gets_the_same_samples_again(llama):
    engine = Engine(llama)
    params = SamplingParams(max_new_tokens=12, seed=7, n=2)
    first, again = engine.generate(["abc"], params), engine.generate(["xyz", "abc"], params)
    assert [c.token_ids for c in first] == [c.token_ids for c in again[2:]]


def test_each_prompt_may_have_parameters_of_its_own(llama):
    engine = Engine(llama)
    params = [SamplingParams(max_new_tokens=k, ignore_eos=True, temperature=k % 2, top_k=k % 3) for k in range(1, 8)]
    lengths = [len(c.token_ids) for c in engine.generate(["hello"] * 7, params)]
    assert lengths == list(range(1, 8))
    with pytest.raises(SettingError, match="7 sampling parameters for 2 prompts"):
        engine.generate(["a", "b"], params)


def test_one_token_left_by_the_filter_is_the_greedy_one(llama):
    completion = Engine(llama).generate(["hello"], SamplingParams(max_new_tokens=30, top_k=1, temperature=0.7))[0]
    greedy = Engine(llama).generate(["hello"], SamplingParams(max_new_tokens=30, temperature=0))[0]
    assert greedy.token_ids == completion.token_ids and max(completion.logprobs) < 0


def test_a_cancelled_trajectory_leaves_nothing_behind(llama):
    engine = Engine(llama, max_running=2)
    engine.add_group(random_prompts(1, 90)[0], SamplingParams(max_new_tokens=50, ignore_eos=True), [1, 2, 3, 4])
    engine.step()
    assert engine.num_running == 2 and engine.num_waiting == 2
    assert engine.cancel(1) and engine.cancel(4) and not engine.cancel(9)
    assert {live.trajectory_id for live in engine.unfinished()} == {2, 3}
    finished = []
    while not engine.idle:
        finished += [c.trajectory_id for c in engine.step()]
    engine.check()
    assert sorted(finished) == [2, 3] and engine.pool.num_free == engine.pool.num_pages - 1


def test_a_trajectory_that_is_cancelled_before_its_end_is_read_is_not_returned(llama):
    engine = Engine(llama)
    engine._is_async = True
    engine.add_group([5, 6], SamplingParams(stop=range(128)), [1])
    assert engine.step() == [] and engine.cancel(1) and engine.idle and engine.step() == []


def test_a_turn_continues_without_new_tokens_where_steps_are_read_late(llama):
    """The step behind the stop has cached the stop token, here on a page of its own, the last one of the context."""
    turns = []
    for is_async in (False, True):
        engine = Engine(llama, page_size=16)
        engine._is_async = is_async
        engine.add_group([5] * 240, SamplingParams(stop=range(128), pause_at_stop=True), [1])
        (first,) = [*engine.step(), *engine.step()]
        assert len(first.token_ids) == 1 and engine.resume(1)
        turns.append([*engine.step(), *engine.step()])
        engine.check()
    assert [done.token_ids for done in turns[0]] == [done.token_ids for done in turns[1]] and len(turns[0]) == 1


def test_weights_overwritten_in_place_are_the_next_version(llama, tmp_path):
    other = load_policy(tiny_policy(tmp_path, seed=1))
    expected = Engine(other).generate([[5, 6, 7]], SamplingParams(max_new_tokens=20, temperature=0))[0]
    empty = load_policy(llama, weights=False)
    buffers = {name: torch.empty_like(weight) for name, weight in empty.weights().items()}
    engine = Engine(empty)
    engine.bind(buffers)
    for source in (load_policy(llama), other):
        for name, weight in source.weights().items():
            buffers[name].copy_(weight.detach())
        engine.weights_changed()
        completion = engine.generate([[5, 6, 7]], SamplingParams(max_new_tokens=20, temperature=0))[0]
    assert completion.token_ids == expected.token_ids and completion.logprobs == expected.logprobs


def test_a_trajectory_continues_under_weights_that_change_midway(llama, tmp_path):
    """The tokens before the switch stay; those after it have the new weights' probabilities for the whole prefix."""
    second = AutoModelForCausalLM.from_pretrained(tiny_policy(tmp_path, seed=1)).eval()
    engine = Engine(llama, max_running=4)
    prompts = random_prompts(6, longest=40)
    params = SamplingParams(max_new_tokens=24, ignore_eos=True)
    for number, prompt in enumerate(prompts):
        engine.add_group(prompt, params, [number])
    for _ in range(9):
        engine.step()
    before = {live.trajectory_id: live.num_tokens for live in engine.unfinished()}
    engine.recompute()
    assert (engine.num_running, engine.num_waiting) == (0, 6)
    weights = dict(second.named_parameters())
    with torch.no_grad():
        for name, tensor in engine.policy.weights().items():
            tensor.copy_(weights[name])
    engine.weights_changed()
    done = {c.trajectory_id: c for c in iter_until_idle(engine)}
    assert engine.unfinished() == [] and engine.pool.num_free == engine.pool.num_pages - 1
    for number, prompt in enumerate(prompts):
        kept = before[number] - len(prompt)
        assert len(done[number].token_ids) == 24 and 0 <= kept < 24
        expected = plain_logprobs(second, prompt, done[number].token_ids)[kept:]
        assert (torch.tensor(done[number].logprobs[kept:]) - expected).abs().max() <= 2e-5
    assert any(kept > len(prompts[number]) for number, kept in before.items())


def iter_until_idle(engine):
    while not engine.idle:
        yield from engine.step()


def test_an_error_names_the_setting_to_change(llama, tmp_path):
    engine = Engine(llama)
    with pytest.raises(SettingError, match="prompt of 300 tokens leaves no room in the policy's context of 256"):
        engine.generate([[5] * 300])
    with pytest.raises(SettingError, match="outside the policy's vocabulary of 128"):
        engine.generate([[5, 128]])
    with pytest.raises(SettingError, match="no tokens"):
        engine.generate([[]])
    with pytest.raises(SettingError, match=r"sampling\.temperature must be 0, or at least 1e-05"):
        SamplingParams(temperature=-1)
    with pytest.raises(SettingError, match=r"generator\.kv_gb: 1e-06 GB does not hold one sequence"):
        Engine(llama, kv_gb=1e-6)
    with pytest.raises(SettingError, match=r"model\.path: no Hugging Face checkpoint"):
        Engine(tmp_path / "nowhere")
    assert engine.idle


def test_a_repetition_penalty_is_that_of_transformers(llama):
    prompts = random_prompts(6, longest=20)
    model: Any = AutoModelForCausalLM.from_pretrained(llama).eval()
    params = SamplingParams(max_new_tokens=25, temperature=0, repetition_penalty=1.7)
    for completion in Engine(llama, max_running=4).generate(prompts, params):
        expected = model.generate(
            torch.tensor([completion.prompt_ids]), max_new_tokens=25, do_sample=False, repetition_penalty=1.7
        )
        assert completion.token_ids == expected[0, len(completion.prompt_ids) :].tolist()


@pytest.mark.parametrize("with_cache", [False, True])
def test_a_trajectory_that_moves_gets_the_tokens_of_one_that_stays(llama, with_cache):
    prompts, params = random_prompts(5, longest=120), SamplingParams(max_new_tokens=80, ignore_eos=True)
    stayed = {c.trajectory_id: c for c in Engine(llama).generate(prompts, params)}
    here, there = Engine(llama), Engine(llama, seed=99)
    for index, prompt in enumerate(prompts):
        here.add_group(prompt, params, [index])
    for _ in range(30):
        here.step()
    states = here.export_sequences([1, 3, 4], with_cache)
    assert all((p.cache is not None) == with_cache and len(p.token_ids) == 30 for p in states)
    there.import_sequences(states)
    moved = []
    while not (here.idle and there.idle):
        moved += [*here.step(), *there.step()]
    here.check()
    there.check()
    assert {c.trajectory_id: c.token_ids for c in moved} == {i: c.token_ids for i, c in stayed.items()}
    for completion in moved:
        assert torch.tensor(completion.logprobs).allclose(torch.tensor(stayed[completion.trajectory_id].logprobs))


def test_ten_thousand_requests_leave_no_page_and_no_object_behind(llama):
    engine = Engine(llama, max_running=64)
    params = SamplingParams(max_new_tokens=2, ignore_eos=True)

    def serve(count) -> int:
        assert len(engine.generate([[5 + i % 90] for i in range(count)], params)) == count
        gc.collect()
        return len(gc.get_objects())

    before = serve(2_000)
    assert serve(8_000) - before < 100
    engine.check()
    assert engine.pool.num_free == engine.pool.num_pages - 1


def test_the_engine_describes_its_choices(llama):
    assert Engine(llama).description.startswith(
        "lean forward in float32 on cpu, attention 'pool', 130 pages of 64 tokens, at most 0.0"
    )
    assert "attention 'gather'" in Engine(llama, attention="gather").description
    with pytest.raises(SettingError, match=r"generator\.attention: 'triton' does not support this policy here"):
        Engine(llama, attention="triton")
    with pytest.raises(SettingError, match=r"generator\.kv_gb: 1000000\.0 GB of KV cache, but the free memory leaves"):
        Engine(llama, kv_gb=1e6)


def test_the_cache_has_the_pages_of_all_sequences_as_far_as_the_memory_allows(llama):
    policy, gpu = load_policy(llama), "generator.gpu_share=0.5 of the GPU"
    page = 2 * 2 * 64 * 2 * 16 * 4
    assert plan_cache(policy, 64, 8, None, AvailableMemory(10**9, 10**9, gpu)).num_pages == 8 * 4 + 2
    large = plan_cache(policy, 64, 20_000, None, AvailableMemory(10**10, 10**10, gpu))
    assert large.num_pages == 80_002 and large.max_kept == 2**30 // page, "on a CPU an untouched page takes no memory"
    assert plan_cache(policy, 64, 8, 9.0, AvailableMemory(10**10, 0, gpu)).max_kept == 9 * 10**9 // page
    scarce = plan_cache(policy, 64, 8, None, AvailableMemory(40 * page, 20 * page, gpu))
    assert (
        scarce.num_pages == 20 and str(scarce) == f"20 pages of 64 tokens, at most {20 * page / 1e9:.3g} GB of KV cache"
    )
    assert plan_cache(policy, 64, 8, 50 * page / 1e9, AvailableMemory(60 * page, 9 * page, gpu)).num_pages == 50
    with pytest.raises(
        SettingError, match=r"kv_gb: generator\.gpu_share=0\.5 of the GPU does not hold one sequence of 256"
    ):
        plan_cache(policy, 64, 8, None, AvailableMemory(9 * page, 3 * page, gpu))
    with pytest.raises(SettingError, match=r"kv_gb: 1 GB of KV cache, but generator\.gpu_share=0\.5 of the GPU leaves"):
        plan_cache(policy, 64, 8, 1, AvailableMemory(60 * page, 9 * page, gpu))


def test_back_ends_agree(llama):
    prompts, params = random_prompts(9, longest=100), SamplingParams(max_new_tokens=40, n=3)
    pool, gather = (Engine(llama, attention=name).generate(prompts, params) for name in ("pool", "gather"))
    assert [c.token_ids for c in pool] == [c.token_ids for c in gather]


def test_reading_one_step_late_changes_nothing(llama):
    prompts = random_prompts(20, longest=120)
    params = [SamplingParams(max_new_tokens=40, n=3, stop=(9 + i,), ignore_eos=i % 2 == 0) for i in range(20)]
    outcomes = []
    for is_async in (False, True):
        engine = Engine(llama, max_running=12, kv_gb=30 * 64 * 512 / 1e9)
        engine._is_async = is_async
        outcomes.append([(c.token_ids, c.logprobs) for c in engine.generate(prompts, params)])
        engine.check()
        assert engine.idle and engine.pool.num_free == engine.pool.num_pages - 1
    assert [tokens for tokens, _ in outcomes[0]] == [tokens for tokens, _ in outcomes[1]]


def test_a_step_waits_for_the_one_before_it_only_when_a_row_may_change(llama):
    """While pages and not rows are short, a waiting prompt is tried again when pages are free, not at every step."""
    engine = Engine(llama, max_running=8, page_size=16, kv_gb=25 * 16 * 512 / 1e9)
    engine._is_async = True
    for index, length in enumerate((60, 60, 60, 200)):
        engine.add_group([5 + index] * length, SamplingParams(max_new_tokens=150, ignore_eos=True), [index])
    drain, reads = engine._drain, []
    engine._drain = lambda: reads.append(engine._in_flight is not None) or drain()
    for _ in range(60):
        engine.step()
    assert (engine.num_running, engine.num_waiting, engine.pool.num_free) == (3, 1, 0)
    assert sum(reads) <= 1, "when the fourth prompt finds no room"
    assert len([*iter_until_idle(engine)]) == 4
    engine.check()
