"""`headrace numerics`: its words, its checks, and what it prints about the engines of a model."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from ...comm.disk import say
from ...comm.errors import SettingError
from ...comm.plugins import process_function
from ...comm.recipe import Recipe
from ...trainer.policy.checkpoint_files import find_checkpoint
from ...trainer.policy.families import FAMILIES
from ...trainer.policy.supported import is_exact_supported
from ..config.checks.data import check_data
from ..config.checks.recipe import check_family, check_function
from ..config.device_defaults import with_device_defaults
from ..config.gpus import Gpus
from ..config.model_files import ModelFiles, read_config
from ..config.named_model import read_named
from ..processes.child import print_message
from ..processes.full_gpu import full_gpu_in_one_line
from .mismatch import (
    FAR,
    GENERATOR,
    TRAINER,
    Mismatch,
    ScoredSample,
    Verdict,
    WorstToken,
    healthy_kl,
    mismatches,
    verdict,
    worst_tokens,
)

MOST_PROMPTS = 32
"""Prompts of a data set that are used, its first ones."""
MOST_TOKENS = 128
"""Longest response to a model without a run or recipe."""
TELL_S = 10.0
"""Seconds between two lines about the progress of one part of the work."""
_WORST = 5
_TOPICS = (
    "a river", "the moon", "bread", "a violin", "winter", "a bridge", "bees", "a library", "the sea", "a mountain",
    "glass", "a train", "tea", "a desert", "paper", "a clock",
)  # fmt: skip
_QUESTIONS = ("Write two sentences about {}.", "Explain in a few words what {} has to do with mathematics.")
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class NumericsRequest:
    """A command line: the model with its settings, and the number of responses to each prompt."""

    recipe: Recipe
    num_samples: int

    @classmethod
    def of(cls, words: Sequence[str], num_samples: int) -> "NumericsRequest":
        """words: a model and `KEY=VALUE` settings. Raises `SettingError`."""
        if num_samples < 1:
            raise SettingError(f"--samples must be at least 1, not {num_samples}")
        _, recipe = read_named(words, [f"sampling.max_new_tokens={MOST_TOKENS}"])
        if recipe.trainer.engine != "builtin":
            raise SettingError("trainer.engine: numerics compares with the built-in trainer alone; leave this out")
        if recipe.rollout.tp > 1:
            print_message("warning: rollout.tp: numerics runs one rank; sums over several ranks add a rounding")
        recipe = _of_one_rank_each(with_device_defaults(recipe, Gpus.of_this_host()), num_samples)
        return cls(recipe, num_samples)


def compare_engines(request: NumericsRequest) -> int:
    """Score the same tokens by all engines and print how far they are apart; returns the exit code, 1 if that is not healthy.

    Raises `HeadraceError` with one line.
    """
    recipe = request.recipe
    started = time.monotonic()
    say(f"numerics of {recipe.model.path} in {recipe.model.compute_type}; rollout.engine={recipe.rollout.engine}")
    rows = _checked_rows(recipe)
    with full_gpu_in_one_line("rollout"):
        from .scored_tokens import score

        samples = score(recipe, rows, request.num_samples, _Progress().tell)
    found = [*mismatches(samples)]
    whole = next(mismatch for pair, name, mismatch in found if pair == (GENERATOR, TRAINER) and name == "all")
    for line in _table(found):
        say(line)
    if worst := worst_tokens(samples, _WORST):
        say("largest differences between generator and trainer (log p; prompts and positions count from 1):")
        for token in worst:
            say(f"  {_shown(token, recipe)}")
    result = _verdict(whole, recipe)
    say(f"{_counts(samples)}, {time.monotonic() - started:.0f} s")
    say(result.text)
    return 0 if result.is_healthy else 1


class _Progress:
    """Says lines: the first of each part of the work, and then one every `TELL_S`."""

    def __init__(self) -> None:
        self._part = ""
        self._told = 0.0

    def tell(self, text: str) -> None:
        """Say a line, whose words before a colon name the part of the work."""
        part = text.partition(":")[0]
        now = time.monotonic()
        if part != self._part or now - self._told >= TELL_S:
            say(text)
            self._part = part
            self._told = now


def _of_one_rank_each(recipe: Recipe, num_samples: int) -> Recipe:
    """The recipe for one process of each role on this host, and one turn of each sample; how tokens are computed stays as it is.

    A new adapter changes no weight, but its base is rounded as in a run with `lora.rank`.
    """
    defaults = Recipe()
    max_running = min(recipe.generator.num_slots, MOST_PROMPTS * num_samples)
    return replace(
        recipe,
        roles=replace(defaults.roles, actor=1, relay=1, rollout=1),
        environment=defaults.environment,
        trainer=defaults.trainer,
        algorithm=defaults.algorithm,
        lora=replace(recipe.lora, path=""),
        generator=replace(recipe.generator, max_running=max_running),
        rollout=replace(recipe.rollout, tp=1),
        comm=replace(recipe.comm, interface=_LOOPBACK, tls=False, link="auto"),
    )


def _checked_rows(recipe: Recipe) -> list[dict[str, Any]]:
    """Check the files that the recipe names, and give the rows whose prompts are answered."""
    policy = ModelFiles.read(recipe.model.path)
    check_family(recipe.generator, recipe.algorithm, policy.folder)
    engine = recipe.rollout.engine
    if ".py:" in engine:
        check_function("rollout.engine", engine, "FILE.py:CLASS")
    if process_function("rollout.engine", engine) is not None:
        raise SettingError(
            f"rollout.engine: {engine} is a function with a loop of its own; numerics needs an adapter's class"
            " (docs/use/engines.md)"
        )
    if recipe.data.path:
        prompts = check_data(recipe.data, MOST_PROMPTS).prompts[:MOST_PROMPTS]
        return [{"prompt": prompt} for prompt in prompts]
    from ...trainer.policy.model import load_tokenizer

    has_template = bool(recipe.data.chat_template or load_tokenizer(recipe.model.path).chat_template)
    return [{"prompt": [{"role": "user", "content": text}] if has_template else text} for text in questions()]


def questions() -> Iterator[str]:
    """The built-in prompts, as many as `MOST_PROMPTS`."""
    return (question.format(topic) for topic in _TOPICS for question in _QUESTIONS)


def _verdict(whole: Mismatch, recipe: Recipe) -> Verdict:
    config = read_config(find_checkpoint(recipe.model.path))
    has_experts = FAMILIES[config["model_type"]].experts is not None
    bound = healthy_kl(recipe.model.compute_type, has_experts=has_experts)
    return verdict(whole, bound, _cure(recipe, config))


def _cure(recipe: Recipe, config: dict[str, Any]) -> str:
    """The advice for engines that are too far apart."""
    if recipe.rollout.engine != "builtin":
        return (
            f"rollout.engine={recipe.rollout.engine} computes another policy than the trainer; see docs/use/numerics.md"
        )
    if recipe.generator.exact:
        return "generator.exact is on, so this is a fault of the program: report it, with the name of the model"
    if is_exact_supported(config):
        return "set generator.exact=true, which makes them equal"
    if recipe.model.compute_type != "float32":
        return "set model.dtype=float32; this family has no exact mode"
    return "this is more than rounding: report it, with the name of the model"


def _counts(samples: Sequence[ScoredSample]) -> str:
    num_tokens = sum(len(sample.token_ids) for sample in samples)
    num_prompts = len({sample.prompt for sample in samples})
    return f"{num_tokens:,} tokens in {len(samples)} responses to {num_prompts} prompts"


def _table(found: Sequence[tuple[tuple[str, str], str, Mismatch]]) -> Iterator[str]:
    yield f"{'engines':26}{'positions':>11}{'tokens':>9}{'mean |diff|':>13}{'KL':>10}{'beyond ' + format(FAR, 'g'):>12}"
    shown = ("", "")
    for pair, name, mismatch in found:
        engines = f"{pair[0]}, {pair[1]}" if pair != shown else ""
        shown = pair
        yield (
            f"{engines:26}{name:>11}{mismatch.num_tokens:>9,}{mismatch.mean_difference:>13.1e}{mismatch.kl:>10.1e}"
            f"{mismatch.far_share:>12.2%}"
        )


def _shown(token: WorstToken, recipe: Recipe) -> str:
    from ...trainer.policy.model import load_tokenizer

    text = load_tokenizer(recipe.model.path).decode([token.token_id])
    values = ", ".join(f"{engine} {logprob:.4f}" for engine, logprob in token.logprobs.items())
    return f"prompt {token.prompt + 1}, position {token.position + 1}, token {token.token_id} {text!r}: {values}"
