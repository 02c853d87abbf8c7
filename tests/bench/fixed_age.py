"""Learning from rows of a fixed age, in one process: the trainer and the generator of the project, without the processes between.

    PYTHONPATH=tests python -m bench.fixed_age OUT --tasks sort-digits,stories --variants default,dppo --ages 0,1,3,8,mixed --seeds 0,1 --steps 300

A cell is one run: a task, a variant of the loss, an age, a seed. Each step trains rows that the policy of `age` steps before drew
(in the first steps, that of the start). With the age `mixed` the weights change while a response is drawn: its first tokens are
up to 8 versions old, and later tokens are newer. A cell writes OUT/TASK.VARIANT.AGE.SEED.json; cells with a file are left out, and
several processes may share a folder. The result of a cell is the mean reward of 512 held-out prompts, one response each, drawn at
the temperature of training; it is the mean of the policies after the last step, ten steps before and twenty steps before, since the
policy of a single step may stand at a crest or in a trough.
"""

import argparse
import asyncio
import itertools
import json
import os
import re
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from torch import Tensor

from headrace.comm.messages import GroupId, TrainBatch
from headrace.comm.messages.queue import GroupRef
from headrace.comm.recipe import Recipe
from headrace.launch.config.load import read_recipe
from headrace.launch.recipes import addition, calculator, parts, smollm2, sort_digits
from headrace.relay.queue.batch import Batch
from headrace.relay.queue.micro_batches import rounds
from headrace.rollout import Engine, SamplingParams
from headrace.rollout.engine.chat_template import prompt_tokens, text_tokens
from headrace.rollout.engine.sequence import Completion
from headrace.rollout.environments.tools import ToolEnvironment
from headrace.trainer.actor_group import ActorGroup
from headrace.trainer.algorithms.objective import LossTerms
from headrace.trainer.batch import PackedBatch
from headrace.trainer.learners.actor import Actor
from headrace.trainer.policy.model import load_policy, load_tokenizer
from headrace.trainer.step_metrics import StepMetrics

HELD_OUT = 512
EVALUATED = (0, 10, 20)
"""Steps before the end whose policies answer the held-out prompts."""
MIXED_AGE = 8
"""Versions between the first token of a response and the step that trains it, with the age `mixed`."""
MIXED_TOKENS = 4
"""Decoding steps of each version, with the age `mixed`."""
KEPT = (
    "reward/mean", "actor/entropy", "actor/grad_norm", "actor/ppo_kl", "actor/pg_clipfrac", "is/ess", "is/mean", "is/max",
    "staleness/token_mean", "staleness/kl", "staleness/limited_frac", "response_length/mean",
)  # fmt: skip

Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Task:
    """A task: the settings of its recipe, its policy of a seed, its rows, its reward, its tools."""

    settings: tuple[str, ...]
    policy: Callable[[Path, int], Path]
    rows: Callable[[int, int], list[dict[str, Any]]]
    """Rows by seed: of the training data, or held-out ones with a seed of -1; so many of them."""
    reward: Callable[[str, list[int], Mapping[str, Any]], float]
    tools: tuple[Callable[..., Any], ...] = ()
    max_turns: int = 1


@dataclass
class Response:
    """A response under way: its tokens with their log-probs, and with the version and the loss mask of each."""

    row: Mapping[str, Any]
    prompt_ids: list[int]
    token_ids: list[int] = field(default_factory=list[int])
    logprobs: list[float] = field(default_factory=list[float])
    versions: list[int] = field(default_factory=list[int])
    mask: list[int] = field(default_factory=list[int])
    is_cut: bool = False
    is_done: bool = False
    num_turns: int = 0

    def take(self, turn: Completion, versions: Sequence[int]) -> None:
        """Add a turn of the policy."""
        self.token_ids += turn.token_ids
        self.logprobs += turn.logprobs
        self.versions += versions
        self.mask += [1] * len(turn.token_ids)
        self.is_cut = turn.finish_reason == "length"
        self.num_turns += 1

    def insert(self, token_ids: Sequence[int]) -> None:
        """Add what a tool has answered."""
        self.token_ids += token_ids
        self.logprobs += [0.0] * len(token_ids)
        self.versions += [self.versions[-1]] * len(token_ids)
        self.mask += [0] * len(token_ids)


class Sampler:
    """Draws responses with weights that change at its caller's wish."""

    def __init__(self, task: Task, recipe: Recipe, seed: int) -> None:
        self.task = task
        self.recipe = recipe
        self.tokenizer = load_tokenizer(recipe.model.path)
        self.policy = load_policy(recipe.model.path, recipe.model.compute_type, torch.device("cpu"))
        self.numbers = itertools.count()
        self.engine = Engine(self.policy, max_running=128, seed=seed, tokenizer=self.tokenizer)

    def load(self, weights: Weights) -> None:
        """Take other weights; what is cached of sequences under way stays, as it does in a run."""
        with torch.no_grad():
            for name, parameter in self.policy.model.named_parameters():
                parameter.copy_(weights[name])
        self.engine.weights_changed()

    def draw(self, rows: Sequence[Mapping[str, Any]], versions: Sequence[tuple[int, Weights]]) -> list[Response]:
        """One response to each row: by one version, or by several in turn, of which the last draws all further tokens."""
        found = [Response(row, prompt_tokens(dict(row), self.tokenizer, self.recipe.data)) for row in rows]
        while live := [response for response in found if not response.is_done]:
            self._turn(live, versions)
        return found

    def _turn(self, live: Sequence[Response], versions: Sequence[tuple[int, Weights]]) -> None:
        """A turn of each response."""
        left = list(versions)
        number, weights = left.pop(0)
        self.load(weights)
        ids = {next(self.numbers): response for response in live}
        for trajectory_id, response in ids.items():
            room = self.recipe.sampling.max_new_tokens - len(response.token_ids)
            prompt = response.prompt_ids + response.token_ids
            self.engine.add_group(prompt, SamplingParams(room), [trajectory_id])
        ends: list[tuple[int, dict[int, int]]] = []
        lengths = {trajectory_id: len(r.prompt_ids) + len(r.token_ids) for trajectory_id, r in ids.items()}
        done: list[Completion] = []
        for step in itertools.count(1):
            if self.engine.idle:
                break
            done += self.engine.step()
            if left and step % MIXED_TOKENS == 0:
                drawn = {p.trajectory_id: p.num_tokens - lengths[p.trajectory_id] for p in self.engine.unfinished()}
                ends.append((number, drawn))
                number, weights = left.pop(0)
                self.load(weights)
        for turn in done:
            response = ids[turn.trajectory_id]
            of_tokens: list[int] = []
            for version, drawn in ends:
                of_tokens += [version] * (drawn.get(turn.trajectory_id, len(turn.token_ids)) - len(of_tokens))
            of_tokens += [number] * (len(turn.token_ids) - len(of_tokens))
            response.take(turn, of_tokens)
            self._answer(response, turn)

    def _answer(self, response: Response, turn: Completion) -> None:
        """Add the results of the tools that a turn calls, if it calls any and there is room for another turn."""
        response.is_done = True
        if not self.task.tools or response.num_turns == self.task.max_turns or response.is_cut:
            return
        result = asyncio.run(_tool_step(self.task.tools, response.row, turn.text))
        if result.done:
            return
        tokens = text_tokens(str(result.observation), self.tokenizer)
        if len(response.token_ids) + len(tokens) >= self.recipe.sampling.max_new_tokens:
            return
        response.insert(tokens)
        response.is_done = False

    def score(self, response: Response) -> float:
        """The reward of a response."""
        text = self.tokenizer.decode(response.token_ids, skip_special_tokens=True)
        return self.task.reward(text, response.token_ids, response.row)


async def _tool_step(tools: Sequence[Callable[..., Any]], row: Mapping[str, Any], text: str) -> Any:
    environment = ToolEnvironment(list(tools))
    await environment.reset(**row)
    return await environment.step(text)


class EffectiveShare(StepMetrics):
    """The statistics of a step, with the weights of whole responses: products of p / b over the tokens with loss."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: list[Tensor] = []

    def add_batch(self, batch: PackedBatch, logprobs: Tensor, terms: LossTerms) -> None:
        super().add_batch(batch, logprobs, terms)
        log_ratio = (logprobs - batch.rollout_logprobs) * batch.mask
        sums = torch.stack([part.sum() for part in log_ratio.split(batch.response_lengths.tolist())])
        self.weights.append(sums.clamp(-20, 20).exp().double())

    @property
    def share(self) -> float:
        """(sum of w)^2 / (n sum of w^2) of the n responses."""
        weights = torch.cat(self.weights)
        return float(weights.sum().square() / (len(weights) * weights.square().sum()))


def train(task: Task, variant: str, age: int | None, seed: int, num_steps: int, folder: Path) -> dict[str, Any]:
    """A cell: num_steps steps of rows that are `age` versions old (None: mixed); its curves and its final reward."""
    words = [*task.settings, *VARIANTS[variant], f"run.seed={seed}", f"run.steps={num_steps}"]
    recipe = read_recipe(None, [f"model.path={task.policy(folder, seed)}", *words])
    torch.manual_seed(seed)
    actor = Actor(recipe, ActorGroup(rank=0, size=1, device=torch.device("cpu"), deadline_s=60))
    usual_rate = actor.lr
    sampler = Sampler(task, recipe, seed)
    rows = task.rows(seed, 4096)
    held_out = task.rows(-1, HELD_OUT)
    finals: list[float] = []
    order = Random(f"order {seed}")
    lag = MIXED_AGE if age is None else age
    history: deque[tuple[int, Weights]] = deque(maxlen=lag + 1)
    curves: dict[str, list[float]] = {name: [] for name in KEPT}
    started = time.process_time()
    for step in range(num_steps):
        history.append((step, _weights(actor)))
        versions = list(history) if age is None else [history[0]]
        chosen = order.sample(rows, recipe.batch.prompts_per_step)
        drawn = sampler.draw([row for row in chosen for _ in range(recipe.batch.samples_per_prompt)], versions)
        stats = EffectiveShare()
        actor.accumulate(_batch(step, drawn, [sampler.score(r) for r in drawn], recipe), stats)
        rate = usual_rate() * (stats.share**0.5 if variant == SCALED else 1.0)
        actor.lr = partial(float, rate)
        metrics = {**actor.step(stats), **stats.metrics(step)}
        for name, values in curves.items():
            values.append(float(metrics.get(name, float("nan"))))
        if num_steps - step - 1 in EVALUATED:
            drawn = sampler.draw(held_out, [(step + 1, _weights(actor))])
            finals.append(statistics.fmean(map(sampler.score, drawn)))
        if step % 25 == 24:
            recent = statistics.fmean(curves["reward/mean"][-25:])
            print(
                f"  {variant} age {age} seed {seed} step {step + 1:>3}  reward {recent:.3f}  {time.process_time() - started:.0f} s",
                flush=True,
            )
    return {
        "final": statistics.fmean(finals),
        "finals": finals,
        "cpu_s": time.process_time() - started,
        "curves": curves,
    }


def _weights(actor: Actor) -> Weights:
    return {name: p.detach().clone() for name, p in actor.policy.model.named_parameters()}


def _batch(step: int, drawn: Sequence[Response], rewards: Sequence[float], recipe: Recipe) -> Batch:
    """The rows of a step as the hub hands them out."""
    size = recipe.batch.samples_per_prompt
    groups: list[GroupRef] = []
    for number in range(len(drawn) // size):
        own = slice(number * size, (number + 1) * size)
        sizes = [len(r.prompt_ids) + len(r.token_ids) for r in drawn[own]]
        versions = [min(r.versions) for r in drawn[own]]
        places = [["relay-0#1"]] * size
        group = GroupId(0, step * recipe.batch.prompts_per_step + number)
        groups.append(GroupRef(group, list(range(size)), [1] * size, places, versions, sizes, list(rewards[own])))
    taken = TrainBatch(step=step, first=0, total=len(groups), groups=groups, metrics={})
    columns = {ref.key: _columns(r) for ref, r in zip(taken.rows(), drawn, strict=True)}
    micro_batches = [parts[0] for parts in rounds(taken.rows(), 1, recipe.optimizer.micro_batch)]
    return Batch(taken, micro_batches, columns)


def _columns(response: Response) -> dict[str, np.ndarray]:
    return {
        "prompt_ids": np.array(response.prompt_ids, np.int32),
        "response_ids": np.array(response.token_ids, np.int32),
        "rollout_logprobs": np.array(response.logprobs, np.float32),
        "versions": np.array(response.versions, np.int32),
        "loss_mask": np.array(response.mask, np.uint8),
        "truncated": np.array([response.is_cut], np.uint8),
    }


# ----------------------------------------------------------------------------------------------------------- the tasks


def _tiny(task: parts.Task) -> Callable[[Path, int], Path]:
    def make(folder: Path, seed: int) -> Path:
        home = folder / task.home
        home.mkdir(parents=True, exist_ok=True)
        parts.make_policy(home / f"seed-{seed}", seed, task)
        return home / f"seed-{seed}"

    return make


def _made(write: Callable[[Path, int, int], None]) -> Callable[[int, int], list[dict[str, Any]]]:
    def rows(seed: int, number: int) -> list[dict[str, Any]]:
        with tempfile.TemporaryDirectory() as folder:
            write(Path(folder) / "rows.jsonl", number, seed)
            return [json.loads(line) for line in (Path(folder) / "rows.jsonl").read_text().splitlines()]

    return rows


def _addition_rows(seed: int, number: int) -> list[dict[str, Any]]:
    pairs = addition.held_out() if seed < 0 else addition.training(seed)
    return [addition.make_row(pair) for pair in pairs[:number]]


def _openings(seed: int, number: int) -> list[dict[str, Any]]:
    return [{"prompt": parts.OPENINGS[index % len(parts.OPENINGS)]} for index in range(number)]


def _words_with_s(text: str, token_ids: list[int], row: Mapping[str, Any]) -> float:
    """A tenth for each different word that begins with s: repeating one word, which is soon learnt, gains nothing."""
    return len(set(re.findall(r"\bs[a-z]+", text.lower()))) / 10


def _stories_policy(folder: Path, seed: int) -> Path:
    return Path(__file__).resolve().parents[1] / "assets" / "stories260k"


def _by_columns(reward: Callable[..., list[float]]) -> Callable[[str, list[int], Mapping[str, Any]], float]:
    def score(text: str, token_ids: list[int], row: Mapping[str, Any]) -> float:
        columns = {name: [value] for name, value in row.items() if name != "prompt"}
        return float(reward(prompts=[row["prompt"]], completions=[text], completion_ids=[token_ids], **columns)[0])

    return score


_SMALL = (
    "model.dtype=float32", "batch.prompts_per_step=16", "batch.samples_per_prompt=8", "optimizer.lr=3e-4",
    "optimizer.warmup_steps=5", "optimizer.beta1=0.9", "optimizer.beta2=0.95", "optimizer.micro_tokens=8192",
)  # fmt: skip
TASKS = {
    "sort-digits": Task(
        (*_SMALL, "sampling.max_new_tokens=32"),
        _tiny(parts.TASKS[parts.RECIPE]),
        _made(sort_digits.write_data),
        _by_columns(sort_digits.reward),
    ),
    "calculator": Task(
        (*_SMALL, "sampling.max_new_tokens=56"),
        _tiny(parts.TASKS[parts.CALCULATOR]),
        _made(calculator.write_data),
        _by_columns(calculator.reward),
        (calculator.calc,),
        3,
    ),
    "stories": Task(
        (*_SMALL, "batch.prompts_per_step=8", "sampling.max_new_tokens=48", "optimizer.lr=1e-3", "optimizer.warmup_steps=0"),
        _stories_policy,
        _openings,
        _words_with_s,
    ),
    "addition": Task(
        (
            "model.dtype=bfloat16", "batch.prompts_per_step=16", "batch.samples_per_prompt=8", "sampling.max_new_tokens=16",
            "optimizer.lr=3e-5", "optimizer.lr_schedule=linear", "optimizer.warmup_steps=5", "optimizer.micro_tokens=2048",
        ),
        lambda folder, seed: smollm2.fetch(),
        _addition_rows,
        lambda text, token_ids, row: addition.score(text, row["answer"]),
    ),
}  # fmt: skip

SCALED = "truncate-ess"
"""The variant whose learning rate is multiplied by the root of the share of effective responses (VCPO, arXiv 2602.17616)."""
_LOSSES = Path(__file__).with_name("peer_losses.py")
_AT_GENERATOR = "algorithm.proximal=rollout"
_TRUNCATE = "algorithm.importance_sampling=token_truncate"
VARIANTS: dict[str, tuple[str, ...]] = {
    "default": (),
    "token-truncate": (_TRUNCATE,),
    SCALED: (_TRUNCATE,),
    "clip-generator": (_AT_GENERATOR, "algorithm.loss=clip"),
    "dppo": (_AT_GENERATOR, f"algorithm.loss={_LOSSES}:dppo"),
    "none": (_AT_GENERATOR, "algorithm.loss=reinforce"),
}
"""The default and what it is compared with, as settings."""


def cells(args: argparse.Namespace) -> Iterator[tuple[str, str, str, int]]:
    """Seeds first, so that a table of all cells with fewer seeds is complete as early as possible."""
    words = [getattr(args, name).split(",") for name in ("seeds", "tasks", "ages", "variants")]
    for seed, task, age, variant in itertools.product(*words):
        yield task, variant, age, int(seed)


def table(folder: Path) -> str:
    """Final rewards of the cells so far, as Markdown: a line for each task, age and number of steps, a column for each variant.

    A cell shows the mean over its seeds, and in brackets the lowest and their number; the effective sample size of tokens, the
    mean of the last 50 steps; the entropy at the end over that at the start.
    """
    found = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    variants = [name for name in VARIANTS if any(cell["variant"] == name for cell in found)]
    lines = [f"| task, age, steps | {' | '.join(variants)} |", "|---" * (len(variants) + 1) + "|"]
    for key in sorted({(cell["task"], cell["age"], cell["steps"]) for cell in found}):
        cells = [
            [cell for cell in found if (cell["task"], cell["age"], cell["steps"], cell["variant"]) == (*key, name)]
            for name in variants
        ]
        lines.append(f"| {', '.join(map(str, key))} | {' | '.join(map(_cell, cells))} |")
    hours = sum(cell["cpu_s"] for cell in found) / 3600
    return "\n".join([*lines, "", f"{len(found)} runs, {hours:.1f} CPU hours"])


def _cell(cells: Sequence[Mapping[str, Any]]) -> str:
    if not cells:
        return ""
    finals = [cell["final"] for cell in cells]
    ess = statistics.fmean(statistics.fmean(cell["curves"]["is/ess"][-50:]) for cell in cells)
    entropy = statistics.fmean(
        statistics.fmean(cell["curves"]["actor/entropy"][-25:]) / statistics.fmean(cell["curves"]["actor/entropy"][:5])
        for cell in cells
    )
    return f"{statistics.fmean(finals):.3f} ({min(finals):.3f}, {len(finals)}) ess {ess:.2f} ent {entropy:.2f}"


def main() -> None:
    """Run the cells that have no file yet, or print the table of those that have one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tasks", default="sort-digits,calculator,stories")
    parser.add_argument("--variants", default="default,token-truncate")
    parser.add_argument("--ages", default="0,1,3,8,mixed")
    parser.add_argument("--seeds", default="0,1")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--table", action="store_true", help="print the results so far and run nothing")
    args = parser.parse_args()
    if args.table:
        print(table(args.out))
        return
    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    for task, variant, age, seed in cells(args):
        place = args.out / f"{task}.{variant}.{age}.{seed}.json"
        with suppress(FileExistsError):
            os.close(os.open(place.with_suffix(".begun"), os.O_CREAT | os.O_EXCL))
            print(f"{task} {variant} age {age} seed {seed}", flush=True)
            lag = None if age == "mixed" else int(age)
            result = train(TASKS[task], variant, lag, seed, args.steps, args.out / "policies")
            named = {"task": task, "variant": variant, "age": age, "seed": seed, "steps": args.steps}
            place.write_text(json.dumps(named | result) + "\n")
            print(
                f"{task} {variant} age {age} seed {seed}: {result['final']:.3f} in {result['cpu_s']:.0f} s", flush=True
            )


if __name__ == "__main__":
    main()
