"""The same tokens scored by the engines of a run, and by transformers, on this host.

Generator and trainer are those of a run: the trainer publishes its first version through a relay, and the generator takes it. The run's
store, relay, trainer and rollout are members of one process.
"""

import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from msgspec.structs import asdict
from transformers import AutoModelForCausalLM

from ...comm.errors import HeadraceError
from ...comm.fleet import StoreFleet
from ...comm.recipe import Recipe
from ...comm.shared_memory import Segment
from ...comm.store.server import StoreServer
from ...relay.queue.micro_batches import rounds
from ...relay.weights.server import WeightServer
from ...rollout.engine.sampling import SamplingParams
from ...rollout.engine.sequence import Completion
from ...rollout.generators.base import Generator, open_generator
from ...trainer.batch import Trajectory, pack
from ...trainer.learners.builtin import ActorLearner
from ...trainer.logprobs import packed_logprobs
from ...trainer.policy.model import default_device
from .mismatch import GENERATOR, TRAINER, TRANSFORMERS, ScoredSample

Tell = Callable[[str], None]
"""Takes a line about the work that begins, or how far it is."""


class _Members(NamedTuple):
    """The members of a run that compute."""

    actor: StoreFleet
    rollout: StoreFleet


class _Drawn(NamedTuple):
    """A finished response, and the number of its prompt."""

    prompt: int
    completion: Completion


def score(recipe: Recipe, rows: Sequence[dict[str, Any]], num_samples: int, tell: Tell) -> list[ScoredSample]:
    """Draw `num_samples` responses to the prompt of each row, and score their tokens by all engines.

    recipe: of one rank of each role, on an address of this host. Raises `SettingError`, and `HeadraceError` where no prompt has a response.
    """
    tell("loading the trainer")
    with _run(recipe) as members:
        learner = ActorLearner(members.actor, recipe)
        try:
            learner.publish()
            tell("loading the generator")
            drawn = _generated(members.rollout, recipe, rows, num_samples, tell)
            tell("scoring by the trainer")
            by_trainer = _by_trainer(learner, recipe, drawn)
        finally:
            learner.close()
    del learner  # its memory is transformers' now
    tell("scoring by transformers")
    by_transformers = _by_transformers(recipe, drawn)
    engines = (GENERATOR, TRAINER, TRANSFORMERS)
    columns = [np.array(found.completion.logprobs, np.float64) for found in drawn], by_trainer, by_transformers
    return [
        ScoredSample(
            found.prompt,
            found.completion.prompt_ids,
            found.completion.token_ids,
            dict(zip(engines, logprobs, strict=True)),
        )
        for found, *logprobs in zip(drawn, *columns, strict=True)
    ]


@contextmanager
def _run(recipe: Recipe) -> Iterator[_Members]:
    """The members of a run that needs no hub: a store and a relay serve weights."""
    secret = secrets.token_bytes(32)
    with ExitStack() as stack:
        store = StoreServer(recipe.comm.interface, secret).start()
        stack.callback(store.close)

        def join(role: str, info: dict[str, str]) -> StoreFleet:
            fleet = StoreFleet.join(store.address, role, 0, secret, info, recipe.comm)
            stack.callback(fleet.leave)
            return fleet

        segment = Segment.create_anonymous("numerics")
        stack.callback(segment.close)
        relay = join("relay", {"segment": segment.path})
        stack.callback(WeightServer(relay, segment, recipe.comm).start().close)
        yield _Members(join("actor", {}), join("rollout", {}))


def _generated(
    fleet: StoreFleet, recipe: Recipe, rows: Sequence[dict[str, Any]], num_samples: int, tell: Tell
) -> list[_Drawn]:
    """The responses of the recipe's generator, by prompt and sample."""
    generator = open_generator(fleet, recipe)
    try:
        generator.take_weights(recipe.comm.deadline_s)
        prompts = [generator.prompt_ids(row) for row in rows]
        params = SamplingParams(**asdict(recipe.sampling))
        for number, prompt in enumerate(prompts):
            if 0 < len(prompt) < generator.context:
                first = number * num_samples
                generator.add_group(prompt, params, range(first, first + num_samples))
        drawn = [_Drawn(each.trajectory_id // num_samples, each) for each in _completions(generator, tell)]
    finally:
        generator.close()
    drawn = sorted(
        (each for each in drawn if each.completion.token_ids), key=lambda each: each.completion.trajectory_id
    )
    if not drawn:
        raise HeadraceError("no prompt has a response: each is empty, or leaves no room in the policy's context")
    return drawn


def _completions(generator: Generator, tell: Tell) -> Iterator[Completion]:
    num_tokens = 0
    started = time.monotonic()
    while not generator.idle:
        for completion in generator.step():
            if completion.finish_reason == "error":
                raise HeadraceError("the generator's logits are not finite")
            num_tokens += len(completion.token_ids)
            yield completion
        tell(f"generating: {num_tokens:,} tokens of finished responses after {time.monotonic() - started:.0f} s")


@torch.no_grad()
def _by_trainer(learner: ActorLearner, recipe: Recipe, drawn: Sequence[_Drawn]) -> list[np.ndarray]:
    """float64 [R] of each response, in micro-batches like those of a step."""
    trajectories = [_trajectory(each.completion) for each in drawn]
    found: dict[int, np.ndarray] = {}
    for (part,) in rounds(trajectories, 1, recipe.optimizer.micro_batch):
        device = learner.group.device
        packed = pack(part, version=0, device=device, longest_in_tree=learner.longest_in_tree)
        logprobs = packed_logprobs(learner.policy, packed, recipe)[0]
        own = logprobs.double().cpu().split([len(each.response_ids) for each in part])
        found |= {id(each): logprob.numpy() for each, logprob in zip(part, own, strict=True)}
    return [found[id(each)] for each in trajectories]


@torch.no_grad()
def _by_transformers(recipe: Recipe, drawn: Sequence[_Drawn]) -> list[np.ndarray]:
    """float64 [R] of each response, each sequence by itself. The log-softmax is in float32, of logits in the compute type."""
    device = default_device()
    dtype = getattr(torch, recipe.model.compute_type)
    model: Any = AutoModelForCausalLM.from_pretrained(recipe.model.path, dtype=dtype, trust_remote_code=False)
    model.to(device).eval()
    found: list[np.ndarray] = []
    for each in (drawing.completion for drawing in drawn):
        tokens = torch.tensor([each.prompt_ids + each.token_ids], device=device)
        logits = model(input_ids=tokens, use_cache=False).logits[0, len(each.prompt_ids) - 1 : -1].float()
        logprobs = (logits / (recipe.sampling.temperature or 1.0)).log_softmax(-1)
        targets = tokens[0, len(each.prompt_ids) :, None]
        found.append(logprobs.gather(1, targets)[:, 0].double().cpu().numpy())
    return found


def _trajectory(completion: Completion) -> Trajectory:
    response = np.array(completion.token_ids, np.int32)
    zeros = np.zeros(len(response), np.float32)
    prompt = np.array(completion.prompt_ids, np.int32)
    return Trajectory(prompt, response, zeros, zeros, version=0, advantages=zeros)
