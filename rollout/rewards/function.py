"""A user's reward function behind one call, in any of its forms, with those arguments that it takes.

| form | called | arguments |
|---|---|---|
| TRL | for a batch | `prompts`, `completions`, `completion_ids`, each column, `trainer_state`, `log_metric`, `log_extra` |
| verl, per sample | for a sample | `data_source`, `solution_str`, `ground_truth`, `extra_info` |
| verl, batch | for a batch | `data_sources`, `solution_strs`, `ground_truths`, `extra_infos` |

A function without `**kwargs` gets only the arguments that it names; it may name arguments of each form. Any of them may be
async. A reward is a number, None, verl's dict with `score`, or a pair of a score and a dict.
"""

import asyncio
import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

OWN = {"prompts", "completions", "completion_ids", "trainer_state", "log_metric", "log_extra"}
"""Arguments of every function, beside the columns."""
VERL = {"data_source", "solution_str", "ground_truth", "extra_info"}
"""More arguments of a function that takes `solution_str`; in the batch form they end in `s`."""
_SHOWN = 80
"""Characters of a wrong reward in a message."""


class WrongLength(Exception):
    """The function returned a wrong number of rewards."""


@dataclass(slots=True)
class TrainerState:
    """TRL's `trainer_state`, as far as a rollout knows it."""

    global_step: int
    """The version of the weights that drew the responses: the steps trained before."""
    max_steps: int


@dataclass(slots=True)
class Scores:
    """One function's rewards of a batch, and its notes on each sample."""

    rewards: list[float | None]
    metrics: list[dict[str, float]]
    """Numbers to average over a step."""
    extra: list[dict[str, Any]]
    """Other values, which are saved with the row."""


@dataclass(slots=True)
class _Notes:
    """The calls of `log_metric` and `log_extra` in one call of the function."""

    metrics: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    extra: dict[str, list[Any]] = field(default_factory=lambda: defaultdict(list))

    def log_metric(self, name: str, value: float) -> None:
        self.metrics[name].append(float(value))

    def log_extra(self, column: str, values: list[Any]) -> None:
        self.extra[column].extend(values)


class RewardFunction:
    """A function with its name; `max_steps` is that of the run.

    With `reads_last`, the text of a chat is the policy's last message alone, without those of tools and earlier turns.
    """

    def __init__(
        self, name: str, function: Callable[..., Any], max_steps: int = 0, *, reads_last: bool = False
    ) -> None:
        self.name = name
        self._as_text = _last_text if reads_last else _as_text
        self.is_async = any(map(inspect.iscoroutinefunction, (function, type(function).__call__)))
        self._function = function
        self._max_steps = max_steps
        parameters = inspect.signature(function).parameters
        self._is_per_sample = "solution_str" in parameters
        self._is_verl = self._is_per_sample or "solution_strs" in parameters
        self._names = set(parameters)
        self._takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())

    def score(self, batch: dict[str, Any]) -> Scores:
        """The rewards of a batch: `prompts`, `completions`, `completion_ids`, `columns` (one list per column), `step`.

        Raises `WrongLength` and the function's errors.
        """
        calls = self._calls(batch)
        return self._scores(batch, [(_result(self._function(**arguments)), notes) for arguments, notes in calls])

    async def score_async(self, batch: dict[str, Any]) -> Scores:
        """The same for an async function; its calls for the samples of a batch run at the same time."""
        calls = self._calls(batch)
        results = await asyncio.gather(*(self._function(**arguments) for arguments, _ in calls))
        return self._scores(batch, [(result, notes) for result, (_, notes) in zip(results, calls, strict=True)])

    def _calls(self, batch: dict[str, Any]) -> list[tuple[dict[str, Any], _Notes]]:
        """The arguments of each call for a batch, with the notes that the call may make."""
        rows = [
            dict(zip(batch["columns"], values, strict=True)) for values in zip(*batch["columns"].values(), strict=True)
        ]
        rows = rows or [{} for _ in batch["prompts"]]
        own = {name: batch[name] for name in ("prompts", "completions", "completion_ids")}
        state = TrainerState(batch.get("step", 0), self._max_steps)
        calls: list[tuple[dict[str, Any], _Notes]] = []
        for i in range(len(rows) if self._is_per_sample else 1):
            notes = _Notes()
            log = {"trainer_state": state, "log_metric": notes.log_metric, "log_extra": notes.log_extra}
            if self._is_per_sample:
                given = rows[i] | {name: values[i] for name, values in own.items()} | log
                given |= {
                    name: values[0] for name, values in self._verl(rows[i : i + 1], own["completions"][i : i + 1])
                }
            else:
                given = batch["columns"] | own | log
                given |= {f"{name}s": values for name, values in self._verl(rows, own["completions"])}
            calls.append((self._wanted(given, batch["columns"]), notes))
        return calls

    def _verl(self, rows: list[dict[str, Any]], completions: list[Any]) -> Iterator[tuple[str, list[Any]]]:
        """verl's arguments, one value for each sample; the data needs a ground truth only if the function takes it."""
        if self._is_verl:
            yield "data_source", [row.get("data_source") for row in rows]
            yield "solution_str", [self._as_text(each) for each in completions]
            yield "extra_info", [row if row.get("extra_info") is None else row["extra_info"] for row in rows]
            if self._takes_any or {"ground_truth", "ground_truths"} & self._names:
                yield "ground_truth", [ground_truth_of(row) for row in rows]

    def _wanted(self, given: dict[str, Any], columns: Collection[str]) -> dict[str, Any]:
        """The given arguments that the function takes."""
        if not self._takes_any:
            return {name: value for name, value in given.items() if name in self._names}
        if self._is_verl:
            verl = VERL if self._is_per_sample else {f"{name}s" for name in VERL}
            return {name: value for name, value in given.items() if name in self._names | verl}
        if clash := sorted(OWN & set(columns)):
            raise ValueError(f"the data has a column {clash[0]!r}, which is another argument of reward functions")
        return given

    def _scores(self, batch: dict[str, Any], results: list[tuple[Any, _Notes]]) -> Scores:
        num = len(batch["prompts"])
        if self._is_per_sample:
            rewards = [result for result, _ in results]
            lengths = [1] * num
        else:
            rewards = self._listed(results[0][0], num)
            lengths = [num]
            self._check_length(len(rewards), num, "rewards")
        scores = Scores([], [], [])
        for (_, notes), length in zip(results, lengths, strict=True):
            for column, values in notes.extra.items():
                self._check_length(len(values), length, f"values of log_extra({column!r})")
            metrics = {name: sum(values) / len(values) for name, values in notes.metrics.items()}
            scores.metrics += [dict(metrics) for _ in range(length)]
            scores.extra += [{name: values[i] for name, values in notes.extra.items()} for i in range(length)]
        for metrics, extra, value in zip(scores.metrics, scores.extra, rewards, strict=True):
            try:
                reward, info = _score_and_info(value)
            except (TypeError, ValueError):
                raise TypeError(f"{self.name} returned {_short(value)}, which is not a number") from None
            scores.rewards.append(reward)
            for key, note in info.items():
                if (number := _as_number(note)) is not None:
                    metrics[f"{self.name}/{key}"] = number
                else:
                    extra[f"{self.name}/{key}"] = note
        return scores

    def _listed(self, value: Any, num: int) -> list[Any]:
        if value is None:
            raise TypeError(f"{self.name} returned None instead of a list of rewards; is a `return` missing?")
        if isinstance(value, str | bytes | dict) or not isinstance(value, Iterable):
            raise TypeError(f"{self.name} returned {_short(value)} for {num} completions, not a list")
        return list(value)

    def _check_length(self, length: int, wanted: int, what: str) -> None:
        if length != wanted:
            raise WrongLength(f"{self.name} returned {length} {what} for {wanted} completions")


def combined(names: list[str], weights: list[float], scores: list[Scores]) -> list[tuple[float | None, dict[str, Any]]]:
    """Each sample's reward, the weighted sum of those functions that gave one, and its notes. None if none gave one."""
    samples: list[tuple[float | None, dict[str, Any]]] = []
    for i in range(len(scores[0].rewards)):
        given = {name: each.rewards[i] for name, each in zip(names, scores, strict=True)}
        parts = {name: reward for name, reward in given.items() if reward is not None}
        total = sum(weight * parts[name] for name, weight in zip(names, weights, strict=True) if name in parts)
        info: dict[str, dict[str, Any]] = {"metrics": {}, "extra": {}}
        for each in scores:
            info["metrics"] |= each.metrics[i]
            info["extra"] |= each.extra[i]
        info["metrics"] |= parts
        info["metrics"] = {name: value for name, value in info["metrics"].items() if math.isfinite(value)}
        samples.append((total if parts else None, {name: notes for name, notes in info.items() if notes}))
    return samples


def ground_truth_of(row: Mapping[str, Any]) -> Any:
    """The first of `ground_truth`, `reward_model.ground_truth` as in verl's data sets, `answer` and `solution`.

    Raises `KeyError` if a row has none of them.
    """
    found = _ground_truths(row)
    if not found:
        raise KeyError("the data has no column ground_truth, reward_model.ground_truth, answer or solution")
    # Rows of other data in the same call may have columns that are None here.
    return next((value for value in found if value is not None), None)


def has_ground_truth(row: Mapping[str, Any]) -> bool:
    """Whether a row has a column for `ground_truth`."""
    return bool(_ground_truths(row))


def _ground_truths(row: Mapping[str, Any]) -> list[Any]:
    nested = row.get("reward_model")
    verls = nested if isinstance(nested, dict) else {}
    places = ((row, "ground_truth"), (verls, "ground_truth"), (row, "answer"), (row, "solution"))
    return [place[name] for place, name in places if name in place]


def _as_text(completion: str | list[dict[str, Any]]) -> str:
    """A whole response as text: of a chat all its messages, those of tools and environments among them."""
    if isinstance(completion, str):
        return completion
    return "\n".join(content for each in completion if isinstance(content := each.get("content"), str))


def _last_text(completion: str | list[dict[str, Any]]) -> str:
    """The policy's last message of a chat as text; a response of text has no messages and is whole."""
    if isinstance(completion, str):
        return completion
    return _as_text([each for each in completion if each.get("role") == "assistant"][-1:])


def _result(value: Any) -> Any:
    return asyncio.run(value) if inspect.iscoroutine(value) else value


def _score_and_info(value: Any) -> tuple[float | None, Mapping[str, Any]]:
    """A reward as a number, with the other entries of verl's dict, or of the dict of a pair."""
    info: Mapping[str, Any] = {}
    if isinstance(value, tuple):
        value, info = value
    if isinstance(value, dict):
        if "score" not in value:
            raise KeyError(f"a reward is a dict without 'score'; it has {', '.join(map(repr, value))}")
        info = {name: entry for name, entry in {**value, **info}.items() if name != "score"}
        value = value["score"]
    return (None if value is None else float(value)), info


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _as_number(value: Any) -> float | None:
    """A number or a truth value as float; None for anything else."""
    try:
        return None if isinstance(value, str | bytes) else float(value)
    except (TypeError, ValueError, OverflowError):
        return None
