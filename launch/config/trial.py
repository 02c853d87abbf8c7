"""`--try[=N]`: tries the prompts, the rewards and the tools of a recipe on the first rows of its data, without a run and without a GPU.

Rewards and tools are called by the hosts of a rollout, in processes of their own with the deadlines of a run. The policy is not
loaded: the response is `--response`, or what the row has as its answer.
"""

import json
import logging
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
from msgspec import structs

from ...comm.errors import SettingError, UnusablePrompt
from ...comm.messages import GroupId
from ...comm.recipe import EnvironmentSettings, Recipe, RewardSettings
from ...comm.waits import waiting
from ...relay.dataset.opening import checked_prompts, open_rows
from ...rollout.engine.sequence import Completion
from ...rollout.environments.base import Episode, with_observation
from ...rollout.environments.pool import EnvironmentCall, EnvironmentPool
from ...rollout.environments.schemas import tool_schemas
from ...rollout.leased_row import LeasedRow
from ...rollout.rewards.function import ground_truth_of, has_ground_truth
from ...rollout.rewards.pool import RewardPool
from ...rollout.user_code.host import STARTUP_S, C, UserCodePool
from .checks.recipe import check_functions
from .checks.signatures import check_reward_arguments, check_tools

OPTION = "--try"
RESPONSE = "--response"
PLACEHOLDER = "This is a response."
"""The response of a row without an answer."""
ANOTHER = "42"
"""One more response, for rewards that have been the same for all."""
FORMS = ("<think>a</think> <answer>{}</answer>", "<think>a</think> \\boxed{{{0}}}\n#### {0}")
"""Responses with the row's answer in the forms that rewards often ask for."""
POLL_S = 0.002
MOST_SHOWN = 2000
"""Characters of a prompt that are shown, the first and the last half of them."""
_ANSWERS = ("response", "completion", "target", "label", "output", "reference", "expected")
"""Columns that may hold a right response, after those of the ground truth."""
_MOST_OTHERS = 2
"""Responses beside those of the rows and of `FORMS`, for rewards that are the same for all."""
_COPIES = 2
"""Samples of a call: a function for batches that returns one reward for all is found only with several."""
_SLOW = 0.5
"""Share of the deadline from which on a call counts as slow: the machine of a run is busier."""
_MISTAKES = ("NameError", "UnboundLocalError", "ImportError", "ModuleNotFoundError", "TypeError", "AttributeError")
"""Errors of a tool that hardly come from its arguments, which are made up."""


class _Row(NamedTuple):
    """A row of the data, as it is called in the output."""

    title: str
    columns: dict[str, Any]


@dataclass(slots=True)
class Trial:
    """The options of a trial, and what it has found: `problems` are lines that begin with a setting."""

    num_rows: int
    response: str | None
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Possible mistakes, and the limits of the trial."""
    rewards: dict[str, set[float | None]] = field(default_factory=dict)
    """The different rewards that each function has given."""
    num_scored: int = 0

    @classmethod
    def of(cls, num_rows: str, response: str | None) -> "Trial":
        """The trial that `--try=num_rows` and `--response` ask for. Raises `SettingError`."""
        if not num_rows.isdecimal() or not int(num_rows):
            raise SettingError(f"{OPTION}={num_rows}: give a number of rows, from 1")
        return cls(int(num_rows), response)

    def run(self, recipe: Recipe) -> int:
        """Try the recipe and print what was found; returns the exit code, 2 after a mistake. Raises `SettingError`."""
        if recipe.is_emulated:
            raise SettingError(f"{OPTION}: rollout.engine=emulated has neither texts nor rewards")
        logging.getLogger("headrace").addHandler(logging.NullHandler())  # the output has the same messages
        check_functions(recipe)
        check_tools(recipe.environment)
        rows = list(_rows(recipe, self.num_rows))
        if recipe.reward.path and ":" not in recipe.rollout.engine:
            for warning in check_reward_arguments(recipe.reward, [row.columns for row in rows], "data.path"):
                _say(f"warning: {warning}")
        tokenizer = _tokenizer(recipe)
        schemas = tool_schemas(recipe.environment) or []
        pool = RewardPool(recipe.reward, recipe.run.steps).start() if recipe.reward.path else None
        try:
            self._try_rows(rows, recipe, pool, tokenizer, schemas)
        except SettingError as error:  # a file that cannot be loaded, or a wrong number of rewards
            self.problems.append(str(error))
        finally:
            if pool is not None:
                pool.close()
        if recipe.environment.is_set:
            self._try_environment(rows[0], recipe.environment, schemas)
        return self._tell_end()

    def _tell_end(self) -> int:
        """Print the mistakes and the warnings; returns the exit code."""
        for problem in dict.fromkeys(self.problems):
            sys.stderr.write(f"headrace: error: {problem}\n")
        for note in self.notes:
            _say(f"warning: {note}")
        _say("a mistake was found" if self.problems else "no mistake was found" if self.notes else "all is well")
        return 2 if self.problems else 0

    def _try_rows(
        self, rows: Sequence[_Row], recipe: Recipe, pool: RewardPool | None, tokenizer: Any, schemas: Sequence[Any]
    ) -> None:
        """Try the prompt and the reward of each row."""
        for row in rows:
            _say(row.title)
            self._try_prompt(row, recipe, tokenizer, schemas)
            if pool is not None:
                self._try_reward(row, pool, recipe.reward, tokenizer)
        if pool is not None and not self.problems:
            self._try_others(rows[0], pool, recipe.reward, tokenizer)

    def _try_prompt(self, row: _Row, recipe: Recipe, tokenizer: Any, schemas: Sequence[dict[str, Any]]) -> None:
        """Print the prompt as the policy gets it."""
        prompt = row.columns["prompt"]
        if tokenizer is None:
            _say("  prompt (as in the data, since model.path is not set):")
            _say(_indented(prompt if isinstance(prompt, str) else json.dumps(prompt, ensure_ascii=False, indent=1)))
            return
        from ...rollout.engine.chat_template import prompt_tokens

        try:
            tokens = prompt_tokens(row.columns, tokenizer, recipe.data, list(schemas) or None)
        except UnusablePrompt as error:
            self.problems.append(str(error))
            return
        _say(f"  prompt ({len(tokens)} tokens):")
        _say(_indented(tokenizer.decode(tokens)))

    def _try_environment(self, row: _Row, settings: EnvironmentSettings, schemas: Sequence[dict[str, Any]]) -> None:
        """Begin a trajectory of a row in the environment for each tool, and call that tool; without tools, take one step."""
        setting = "environment.path" if settings.path else "environment.tools"
        is_chat = not isinstance(row.columns["prompt"], str)
        turns = [_turn_of(schema["function"], is_chat=is_chat) for schema in schemas]
        pool = EnvironmentPool(settings).start()
        limit_s = settings.timeout_s + STARTUP_S
        try:
            for number, (shown, turn) in enumerate(turns or [("step", _answer_of(row.columns, self.response)[1])]):
                begun = EnvironmentCall(number, None, row.columns, Episode(row.columns["prompt"]))
                self._ask(pool, begun, "reset", limit_s)
                prompt = with_observation(row.columns["prompt"], begun.step.observation)
                call = EnvironmentCall(number, None, row.columns, Episode(prompt, [turn], state=begun.state))
                seconds = 0.0 if begun.failure else self._ask(pool, call, shown, limit_s)
                if failure := begun.failure or call.failure:
                    self.problems.append(f"{setting}: {shown}: {failure}")
                    continue
                self._tell_step(setting, shown, call, seconds, is_tool=bool(turns))
                pool.drop(number)
        except SettingError as error:  # nothing works
            self.problems.append(str(error))
        finally:
            pool.close()

    def _ask(self, pool: EnvironmentPool, call: EnvironmentCall, what: str, limit_s: float) -> float:
        """Make a call of an environment; returns its seconds."""
        return _awaited(pool, lambda: pool.submit(call), lambda: call in pool.finished(), what, limit_s)

    def _tell_step(self, setting: str, shown: str, call: EnvironmentCall, seconds: float, *, is_tool: bool) -> None:
        observation = call.step.observation
        text = (
            observation if isinstance(observation, str) else "\n".join(str(each.get("content")) for each in observation)
        )
        more = "" if is_tool else f", reward {call.step.reward:g}, {'done' if call.step.done else 'not done'}"
        _say(f"  {shown} -> {_cut(text)!r} ({seconds:.3f} s{more})")
        error = _error_in(text) if is_tool else ""
        if error.partition(":")[0] in _MISTAKES:
            self.problems.append(f"{setting}: {shown}: {error}")
        elif error:
            _say("    the arguments are made up; the policy would read this error as the tool's answer")

    def _try_reward(self, row: _Row, pool: RewardPool, settings: RewardSettings, tokenizer: Any) -> None:
        """Score the response of a row, copies of it in one call. Raises `SettingError` if no call will work."""
        origin, response = _answer_of(row.columns, self.response)
        _say(f"  response ({origin}): {_cut(response)!r}")
        request, seconds = self._score(row, response, pool, settings, tokenizer)
        self._tell_reward(request, seconds, settings.timeout_s)

    def _try_others(self, row: _Row, pool: RewardPool, settings: RewardSettings, tokenizer: Any) -> None:
        """Score other responses to a row while a function has given one reward only; note the functions that still have."""
        tried = _answer_of(row.columns, self.response)[1]
        answer = _answer_of(row.columns, None)[1]
        others = dict.fromkeys([answer, PLACEHOLDER, ANOTHER])
        formed = [form.format(answer.rpartition("####")[2].strip()) for form in FORMS]  # GSM8K's is a worked solution
        for response in [*[text for text in others if text != tried][:_MOST_OTHERS], *formed]:
            if not self._constant:
                return
            request, _ = self._score(row, response, pool, settings, tokenizer)
            if request.failure:
                self.notes.append(f"reward.path: the response {_cut(response)!r} has no reward: {request.failure}")
                return
        for name, reward in self._constant.items():
            self.notes.append(
                f"reward.path: {name} gave {reward:g} for all {self.num_scored} responses of this trial; try one that should"
                f" get another with {RESPONSE} TEXT"
            )

    @property
    def _constant(self) -> dict[str, float]:
        """The functions that have given one reward only, and that reward; a function for rows of other data gives none."""
        first = {name: next(iter(given)) for name, given in self.rewards.items() if len(given) == 1}
        return {name: reward for name, reward in first.items() if reward is not None}

    def _score(
        self, row: _Row, response: str, pool: RewardPool, settings: RewardSettings, tokenizer: Any
    ) -> tuple[LeasedRow, float]:
        """Score copies of a response to a row in one call; returns one of them and the seconds.

        Raises `SettingError` if no call will work.
        """
        tokens = tokenizer(response, add_special_tokens=False)["input_ids"] if tokenizer else [*response.encode()]
        requests = [_finished(i, row.columns, response, list(tokens)) for i in range(_COPIES)]
        scored: list[LeasedRow] = []

        def is_scored() -> bool:
            scored.extend(pool.finished())
            return len(scored) == len(requests)

        # A call that ends its process is made again, once for each half.
        limit_s = 2 * (settings.timeout_s + STARTUP_S)
        seconds = _awaited(pool, lambda: pool.submit(*requests), is_scored, "the reward", limit_s)
        self.num_scored += 1
        for name in settings.functions:
            self.rewards.setdefault(name, set()).add(requests[0].info.get("metrics", {}).get(name))
        return requests[0], seconds

    def _tell_reward(self, request: LeasedRow, seconds: float, timeout_s: float) -> None:
        metrics = request.info.get("metrics", {})
        parts = ", ".join(f"{name} {value:g}" for name, value in metrics.items())
        reward = "none" if request.reward is None else f"{request.reward:g}"
        _say(f"  reward {reward} ({parts or 'no function gave one'}; {seconds:.3f} s for a call of {_COPIES} samples)")
        for name, note in request.info.get("extra", {}).items():
            _say(f"    {name}: {_cut(str(note))}")
        for frame in request.frames:
            _say(f"    {frame}")
        if request.failure:
            hint = "; is a `return` missing?" if request.failure.endswith("None") else ""
            self.problems.append(f"reward.path: {request.failure}{hint}")
        elif seconds > _SLOW * timeout_s:
            self.problems.append(
                f"reward.timeout_s: a call took {seconds:.1f} s of {timeout_s:g} s, and a run has less time for it; raise it"
            )


def _rows(recipe: Recipe, num: int) -> Iterator[_Row]:
    """The first rows of each set. Raises `SettingError` for one that cannot be used."""
    data = recipe.data
    if not any(data.paths):
        raise SettingError("data.path is not set; it names a file or data set with a column of prompts")
    for path in data.paths:
        rows = open_rows(structs.replace(data, path=path))
        for index, _ in enumerate(checked_prompts(rows, path, data.prompt_column, num)):
            yield _Row(f"{path}:{index + 1}", msgspec.json.decode(rows[index]))


def _tokenizer(recipe: Recipe) -> Any:
    """The policy's tokenizer, None without `model.path`."""
    if not recipe.model.path:
        return None
    from ...trainer.policy.checkpoint_files import WITHOUT_WEIGHTS, find_checkpoint
    from ...trainer.policy.model import load_tokenizer

    return load_tokenizer(find_checkpoint(recipe.model.path, WITHOUT_WEIGHTS))


def _answer_of(row: Mapping[str, Any], response: str | None) -> tuple[str, str]:
    """The response to try, and where it comes from."""
    if response is not None:
        return RESPONSE, response
    if has_ground_truth(row) and (answer := ground_truth_of(row)) is not None:
        return "the row's ground truth", str(answer)
    for name in _ANSWERS:
        if isinstance(answer := row.get(name), str | int | float):
            return f"the row's column {name}", str(answer)
    return f"a placeholder; give another with {RESPONSE} TEXT", PLACEHOLDER


def _finished(sample: int, row: dict[str, Any], response: str, tokens: list[int]) -> LeasedRow:
    """A sample of a group whose response is given."""
    done = Completion(sample, [], tokens, [0.0] * len(tokens), "stop", text=response)
    return LeasedRow(GroupId(0, 0).row(sample), 1, 0, row, done, response=response)


def _turn_of(function: Mapping[str, Any], *, is_chat: bool) -> tuple[str, str]:
    """A call of a tool with arguments that fit its schema: as it is shown, and as the policy writes it."""
    name = function["name"]
    parameters = function["parameters"]
    required = [key for key in parameters["properties"] if key in parameters.get("required", ())]
    arguments = {key: _example(parameters["properties"][key]) for key in required}
    shown = f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"
    if is_chat:
        return shown, f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"
    first = next(iter(arguments.values()), "")  # text has room for one argument
    return shown, f"<{name}>{first}</{name}>"


def _example(schema: Mapping[str, Any]) -> Any:
    """A value of a JSON schema."""
    if choices := schema.get("enum"):
        return choices[0]
    if variants := schema.get("anyOf"):
        return _example(variants[0])
    kinds = schema.get("type", "string")
    kind = kinds if isinstance(kinds, str) else kinds[0]
    if kind == "array":
        return [_example(schema.get("items", {}))]
    if kind == "object":
        return {key: _example(value) for key, value in schema.get("properties", {}).items()}
    return {"integer": 1, "number": 1.5, "boolean": True, "null": None}.get(kind, "example")


def _error_in(text: str) -> str:
    """The error of a tool in its answer; empty without one."""
    try:
        answer = json.loads(text.removeprefix("<result>").removesuffix("</result>"))
    except ValueError:
        return ""
    return str(answer["error"]) if isinstance(answer, dict) and answer.keys() == {"error"} else ""


def _awaited(
    pool: UserCodePool[C], submit: Callable[[], None], is_done: Callable[[], bool], what: str, limit_s: float
) -> float:
    """Make a call; returns its seconds, without those of the start of its process."""
    began = time.monotonic()
    has_started = False

    def is_over() -> bool:
        nonlocal began, has_started
        has_started = has_started or pool.is_ready  # it is not ready either once a call has ended it
        if not has_started:
            began = time.monotonic()
        return is_done()

    submit()
    with waiting(f"the process of {pool.code}", what, limit_s) as wait:
        wait.until(is_over, POLL_S)
    return time.monotonic() - began


def _cut(text: str, most: int = 300) -> str:
    return text if len(text) <= most else f"{text[: most // 2]} ... {text[-most // 2 :]}"


def _indented(text: str) -> str:
    return textwrap.indent(_cut(text, MOST_SHOWN), "    | ", lambda line: True)


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
