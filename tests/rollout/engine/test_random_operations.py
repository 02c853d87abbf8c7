"""Random operations on an engine: each token is the one that its random number draws from the policy of its moment, in float64.

Rows end and begin at every step, lose their pages, wait for an environment, move and come back, under weights that change; steps are
read at once, one step late, and one step late from captured graphs.
"""

import random
from collections import Counter
from typing import Any

import pytest
import torch
from support.fake_cuda import use_graphs
from support.policies import tiny_policy
from transformers import AutoModelForCausalLM

from headrace.rollout import Engine, SamplingParams
from headrace.rollout.engine import cuda_graphs
from headrace.rollout.engine.streams import stream_key, uniforms
from headrace.trainer.policy.model import load_policy

BOUND = 5e-5
KINDS = [
    {}, {}, {}, {"temperature": 0.7}, {"temperature": 0.0}, {"top_k": 5}, {"top_p": 0.7, "temperature": 0.8}, {"min_p": 0.1},
    {"repetition_penalty": 1.4}, {"top_k": 20, "top_p": 0.9, "repetition_penalty": 0.8}, {"pause_at_stop": True, "stop": (9, 17, 33)},
]  # fmt: skip


def allowed_share(logits: torch.Tensor, params: SamplingParams, seen: set[int]) -> torch.Tensor:
    """The probabilities [vocab] that a token is drawn by: penalty, temperature, top-k, top-p and min-p by their definitions."""
    scaled = logits / (params.temperature or 1)
    for token in seen if params.repetition_penalty != 1 else ():
        value = scaled[token].item()
        scaled[token] = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
    if params.temperature == 0:
        return torch.zeros_like(scaled).index_fill(0, scaled.argmax(), 1.0)
    values, order = scaled.sort(descending=True)
    kept = torch.ones_like(values, dtype=torch.bool)
    if params.top_k:
        kept[params.top_k :] = False
    shares = values.masked_fill(~kept, float("-inf")).softmax(-1)
    if params.top_p < 1:
        kept &= shares.cumsum(-1) - shares < params.top_p
    kept &= shares >= params.min_p * shares[0]
    return torch.zeros_like(scaled).scatter(0, order, values.masked_fill(~kept, float("-inf")).softmax(-1))


class Play:
    """An engine under random operations, and all that is known of its trajectories."""

    def __init__(self, paths: list[Any], mode: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.random = random.Random(seed)
        self.references: list[Any] = [
            AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64, attn_implementation="eager").eval()
            for path in paths
        ]
        self.weights = [load_policy(path).weights() for path in paths]
        self.version = 0
        self.policy = load_policy(paths[0])
        size = {"page_size": 8, "kv_gb": 80 * 8 * 512 / 1e9, "prefill_tokens": self.random.choice((7, 30, 64))}
        self.engine = Engine(self.policy, max_running=7, seed=seed, **size)
        if mode == "graphs":
            use_graphs(self.engine, monkeypatch)
        self.engine._is_async = mode != "sync"
        self.next_id = 0
        self.prompts: dict[int, list[int]] = {}
        self.params: dict[int, SamplingParams] = {}
        self.versions: dict[int, list[int | None]] = {}
        """The version of the weights that each token was drawn by; None for a token of the environment."""
        self.done: Counter[str] = Counter()
        self.num_checked = 0

    def note(self, finished: list[Any]) -> None:
        """Note which version the new tokens are of, and check what has ended."""
        for each in (*self.engine.responses(), *self.engine._finished_early, *finished):
            known = self.versions[each.trajectory_id]
            known += [self.version] * (len(each.token_ids) - len(known))
        for completion in finished:
            self.check(completion)

    @torch.no_grad()
    def check(self, completion: Any) -> None:
        """Each token of a finished trajectory, or of one whose turn is over, against transformers in float64."""
        number = completion.trajectory_id
        params = self.params[number]
        prompt = self.prompts[number]
        tokens = completion.token_ids
        key = stream_key(self.engine.seed, number)
        draws = uniforms(torch.tensor([key] * len(tokens)), torch.arange(len(tokens))).double()
        logits = [model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1] for model in self.references]
        for place, (token, version) in enumerate(zip(tokens, self.versions[number], strict=True)):
            if version is None:
                assert completion.logprobs[place] == 0.0
                continue
            row = logits[version][place]
            scaled = row / (params.temperature or 1)
            assert abs(scaled.log_softmax(-1)[token].item() - completion.logprobs[place]) < BOUND
            shares = allowed_share(row.clone(), params, {*prompt, *tokens[:place]})
            if params.temperature == 0:
                assert row.max() - row[token] < BOUND or params.repetition_penalty != 1
            else:
                after = shares.cumsum(-1)[token]
                assert after - shares[token] - BOUND <= draws[place] <= after + BOUND
            self.num_checked += 1
        self.done["stop" if completion.finish_reason == "stop" else "length"] += 1

    def add(self) -> None:
        length = self.random.randint(1, 90)
        start = self.random.choice(([5] * 40, [6, 7] * 30, []))[:length]
        prompt = start + [self.random.randint(4, 98) for _ in range(length - len(start))]
        ids = range(self.next_id, self.next_id + self.random.randint(1, 4))
        self.next_id = ids.stop
        params = []
        for number in ids:
            limit = self.random.choice((1, 2, 3, 9, 20, 60, 300))
            params.append(SamplingParams(max_new_tokens=limit, **self.random.choice(KINDS)))
            self.prompts[number] = prompt
            self.params[number] = params[-1]
            self.versions[number] = []
        self.engine.add_group(prompt, params, ids)

    def step(self) -> None:
        for _ in range(self.random.randint(1, 6)):
            self.note(self.engine.step())

    def pause(self) -> None:
        if self.engine.scheduler.running:
            self.engine.pause(self.random.choice(self.engine.scheduler.running).trajectory_id)

    def resume(self) -> None:
        self.note([])
        if not self.engine.scheduler.paused:
            return
        number = self.random.choice(self.engine.scheduler.paused).trajectory_id
        tokens = [self.random.randint(4, 98) for _ in range(self.random.randint(0, 9))]
        if self.engine.resume(number, tokens):
            self.versions[number] += [None] * len(tokens)
        else:
            self.cancel(number)

    def cancel(self, number: int | None = None) -> None:
        held = [each.trajectory_id for each in self.engine.unfinished()]
        if held:
            self.engine.cancel(self.random.choice(held) if number is None else number)
            self.done["cancelled"] += 1

    def move(self) -> None:
        """Away and back, with their keys and values or without."""
        held = [each.trajectory_id for each in self.engine.unfinished()]
        chosen = self.random.sample(held, min(len(held), 3))
        self.engine.import_sequences(self.engine.export_sequences(chosen, with_cache=self.random.random() < 0.5))
        self.done["moved"] += len(chosen)

    def change_weights(self) -> None:
        self.engine.recompute()
        self.note([])
        self.version = 1 - self.version
        with torch.no_grad():
            for name, weight in self.policy.weights().items():
                weight.copy_(self.weights[self.version][name])
        self.engine.weights_changed()

    def run(self, count: int) -> None:
        """So many operations, then all trajectories to their ends."""
        for _ in range(count):
            kind = self.random.choices(
                (self.add, self.step, self.pause, self.resume, self.cancel, self.move, self.change_weights),
                (25, 50, 6, 12, 4, 6, 2),
            )[0]
            kind()
            self.note([])
            self.engine.check()
        while not self.engine.idle:
            self.note(self.engine.step())
            self.engine.check()
            for sequence in list(self.engine.scheduler.paused):
                self.engine.cancel(sequence.trajectory_id)


def play(folder, mode, seed, count, monkeypatch, family) -> Play:
    paths = [tiny_policy(folder / str(version), family, seed=version) for version in range(2)]
    monkeypatch.setattr(cuda_graphs, "_NARROWEST", 32)
    played = Play(paths, mode, seed, monkeypatch)
    played.run(count)
    return played


@pytest.mark.parametrize("mode", ["sync", "async", "graphs"])
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_each_token_is_drawn_from_the_policy_of_its_moment(tmp_path, monkeypatch, family, mode):
    played = play(tmp_path, mode, 3, 150, monkeypatch, family)
    assert played.num_checked > 500 and {"stop", "length", "cancelled", "moved"} <= {*played.done}
    assert played.engine.scheduler.num_preempted > 0 and played.engine.num_recomputed > 0
    assert played.engine.pool.num_free == played.engine.pool.num_pages - 1


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("mode", ["sync", "async", "graphs"])
def test_each_token_of_many_is_drawn_from_the_policy_of_its_moment(tmp_path, monkeypatch, mode, seed):
    assert play(tmp_path, mode, seed, 1500, monkeypatch, "mistral").num_checked > 5000
