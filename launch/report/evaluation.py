"""An evaluation without a run: its words, its checks, and what it prints and writes."""

import itertools
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from ...comm.clock import estimate
from ...comm.disk import AppendFile, say
from ...comm.errors import SettingError
from ...comm.recipe import CheckpointSettings, Recipe
from ...relay.journal.evaluations import response_line
from ...relay.journal.events import Evaluated
from ...relay.queue.evaluation_prompts import EvaluationPrompts, open_evaluation
from ..config.checks.data import check_lengths
from ..config.checks.evaluation import check_evaluation
from ..config.checks.recipe import check_family, check_files
from ..config.checks.signatures import check_reward_arguments, check_tools
from ..config.device_defaults import with_device_defaults
from ..config.gpus import Gpus
from ..config.model_files import ModelFiles
from ..config.named_model import read_named
from ..config.run_checkpoints import WHOLE, TrainedModel
from ..processes.child import print_message
from ..processes.full_gpu import full_gpu_in_one_line
from .summary import print_table

TELL_S = 10.0
"""Seconds between two lines about the samples that are done."""
_MISSING = ("does not exist", "cannot read")
"""Parts of messages about a file."""


@dataclass(frozen=True, slots=True)
class EvalRequest:
    """A command line: the model, its settings, the file."""

    model: TrainedModel
    recipe: Recipe
    """With the model's path, and an evaluation that is on."""
    out: Path | None
    """The file for the responses that the user has named, which does not exist yet."""
    max_running: int | None
    """Samples that are decoded together, if the user has said so."""

    @classmethod
    def of(cls, words: Sequence[str], out: str | None) -> "EvalRequest":
        """The words of a command line, sorted: a model and settings. out: the file that it names. Raises `SettingError`."""
        model, recipe = read_named(words)
        chooses = any(word.startswith("generator.max_running=") for word in words)
        return cls(model, _evaluated(recipe), _named_file(out), recipe.generator.max_running if chooses else None)


def evaluate(request: EvalRequest) -> int:
    """Generate, score, write the responses and print the metrics; returns the exit code, 1 if no response has a score.

    Raises `HeadraceError` with one line.
    """
    with full_gpu_in_one_line("rollout"):
        return _evaluate(request)


def _evaluated(recipe: Recipe) -> Recipe:
    """The recipe with an evaluation that is on, on these devices."""
    evaluation = replace(recipe.eval, every=recipe.eval.every or 1)
    # What the run's best checkpoint is chosen by is not a question here.
    recipe = replace(recipe, eval=evaluation, checkpoint=CheckpointSettings())
    return with_device_defaults(recipe, Gpus.of_this_host())


def _named_file(out: str | None) -> Path | None:
    """The file of `--out`, if it is given. Raises `SettingError` for one that exists, or has no folder."""
    if out is None:
        return None
    if Path(out).exists():
        raise _exists(out)
    if not Path(out).absolute().parent.is_dir():
        raise SettingError(f"--out: {Path(out).parent} is not a folder")
    return Path(out)


def _exists(out: str | Path) -> SettingError:
    return SettingError(f"--out: {out} exists already; name another file, or remove it")


def _usual_files(model: TrainedModel) -> Iterator[Path]:
    """Names for the file: beside the checkpoint's folder, or in the present one where that cannot be written."""
    here = Path.cwd()
    folder = here / model.path.replace("/", "--")
    if model.is_local:
        folder = Path(model.path).absolute()
        folder = folder.parent if folder.name == WHOLE and model.run_dir else folder
    above = folder.parent if os.access(folder.parent, os.W_OK) else here
    above = above.relative_to(here) if above.is_relative_to(here) else above
    yield above / f"{folder.name}.evaluation.jsonl"
    for number in itertools.count(2):
        yield above / f"{folder.name}.evaluation-{number}.jsonl"


def _check(recipe: Recipe) -> Any:
    """Make the checks of a start that concern an evaluation, and print warnings; returns the longest prompt."""
    policy = ModelFiles.read(recipe.model.path)
    found = check_evaluation(recipe)
    if not found:
        raise SettingError("eval.path is not set; it names the prompts, such as eval.path=test.jsonl")
    if recipe.environment.is_served and not recipe.reward.path:
        raise SettingError(
            "reward.path is not set: agents gave the rewards of this run (environment.path=serve); name a reward function for single"
            " responses, or let an agent measure at `headrace serve`"
        )
    check_files("rollout", recipe)
    check_tools(recipe.environment)
    warnings: list[str] = []
    if recipe.reward.path:
        rows = [row for _, data in found for row in data.first_rows]
        warnings += check_reward_arguments(recipe.reward, rows, "eval.path")
    check_family(recipe.generator, recipe.algorithm, policy.folder)
    for settings, data in found:
        warnings += check_lengths(settings, data.prompts, policy, recipe.environment, recipe.sampling.max_new_tokens)
    for warning in warnings:
        print_message(f"warning: {warning}")
    return max((prompt for _, data in found for prompt in data.prompts), key=lambda prompt: len(str(prompt)))


def _evaluate(request: EvalRequest) -> int:
    recipe = request.recipe
    try:
        longest = _check(recipe)
    except SettingError as error:
        is_elsewhere = request.model.recipe_file is not None and any(words in str(error) for words in _MISSING)
        hint = "; the run's recipe names its files from the folder where the run was started" if is_elsewhere else ""
        raise SettingError(f"{error}{hint}") from error
    prompts = open_evaluation(recipe.data, recipe.eval, recipe.run.steps, num_shares=1)
    assert prompts is not None, "the prompts were just checked"
    started = time.monotonic()
    with _opened(request) as file:
        say(f"evaluating {_title(request)} on {_contents(prompts)}; the responses go to {file.path}")
        from ...rollout.local_evaluation import LocalEvaluation, LocalGenerator
        from ...rollout.rewards.pool import open_rewards

        num_samples = recipe.eval.samples * sum(prompts.num_prompts.values())
        generator = LocalGenerator(recipe, longest, num_samples, request.max_running)
        rewards = open_rewards(recipe.reward, recipe.run.steps, "builtin")
        evaluation = LocalEvaluation(recipe, prompts, generator, rewards, request.model.step)
        tally = Tally(num_samples, time.monotonic())
        say(f"generating on {generator.policy.device}, up to {generator.max_running} samples at a time")
        with closing(evaluation):
            try:
                for samples in evaluation.turns():
                    for sample in samples:
                        file.append(
                            response_line(request.model.step, sample.name, sample.row, sample.event, sample.text)
                        )
                        tally.add(sample.event)
                    tally.tell(evaluation.num_decoding, evaluation.num_elsewhere)
            except KeyboardInterrupt:
                place = f"; {file.path} has them" if tally.num_done else ""
                print_message(f"interrupted after {tally.num_done} of {num_samples} samples{place}")
                raise
        metrics = evaluation.metrics()
    loaded_s = tally.started - started
    print_table({"model": _title(request), **_rows(metrics), **tally.rows(loaded_s), "responses": str(file.path)})
    if tally.num_scored:
        return 0
    print_message("error: no response has a score, for the reasons above")
    return 1


class Tally:
    """Counts of the samples that are done; prints a line every `TELL_S`."""

    def __init__(self, num_samples: int, started: float) -> None:
        self.started = started
        self.num_done = 0
        self._num_samples = num_samples
        self._rewards: list[float] = []
        self._tokens = 0
        self._failures: Counter[str] = Counter()
        self._told = started

    def add(self, event: Evaluated) -> None:
        """Count a sample that has ended."""
        self.num_done += 1
        self._tokens += event.num_tokens
        if event.failure:
            self._failures[event.failure] += 1
        else:
            self._rewards.append(event.reward)

    @property
    def num_scored(self) -> int:
        """Samples that have a reward."""
        return len(self._rewards)

    def tell(self, num_decoding: int, num_elsewhere: int) -> None:
        """Print a line if it is time: the samples that are done, in generation, and with a reward function or environment."""
        now = time.monotonic()
        if now - self._told < TELL_S:
            return
        self._told = now
        mean = f", mean reward {sum(self._rewards) / self.num_scored:.3f}" if self._rewards else ""
        say(
            f"{self.num_done} of {self._num_samples} samples done{mean}; {num_decoding} in generation, {num_elsewhere} wait for"
            f" rewards or environments{self._time_left(now - self.started)}"
        )

    def rows(self, loaded_s: float) -> dict[str, str]:
        """Rows of the table at the end."""
        elapsed_s = time.monotonic() - self.started
        speed = f"{self._tokens / max(elapsed_s, 1e-9):,.0f} tokens/s"
        rows = {"time": f"{elapsed_s:.1f} s, after {loaded_s:.1f} s of loading; {speed}"}
        reasons = "; ".join(f"{count} x {reason}" for reason, count in self._failures.most_common())
        return rows | ({"without a score": reasons} if reasons else {})

    def _time_left(self, elapsed_s: float) -> str:
        if not self.num_done:
            return ""
        left_s = elapsed_s / self.num_done * (self._num_samples - self.num_done)
        return f"; about {estimate(left_s)} left"


@contextmanager
def _opened(request: EvalRequest) -> Iterator[AppendFile]:
    """The new file for the responses; without any it is removed again."""
    file = _new_file(request)
    try:
        yield file
    finally:
        if not file.num_bytes:
            file.path.unlink(missing_ok=True)
        file.close()


def _new_file(request: EvalRequest) -> AppendFile:
    """The file, which no other evaluation has: of the usual names the first that is free. Raises `SettingError`."""
    for path in [request.out] if request.out else _usual_files(request.model):
        try:
            return AppendFile(path, request.recipe.comm.deadline_s, is_new=True)
        except FileExistsError:  # perhaps made since the words were read
            continue
        except OSError as error:
            raise SettingError(f"--out: cannot write {path}: {error.strerror}") from error
    raise _exists(str(request.out))


def _title(request: EvalRequest) -> str:
    steps = f" (after {request.model.step} steps)" if request.model.step else ""
    return f"{request.model.path}{steps}"


def _contents(prompts: EvaluationPrompts) -> str:
    samples = f", {prompts.settings.samples} samples each" if prompts.settings.samples > 1 else ""
    return ", ".join(f"{num} prompts of {name}" for name, num in prompts.num_prompts.items()) + samples


def _rows(metrics: Mapping[str, float]) -> dict[str, str]:
    """The metrics under their names in a run."""
    return {name: f"{value:.4g}" for name, value in metrics.items() if name != "eval/version"}
