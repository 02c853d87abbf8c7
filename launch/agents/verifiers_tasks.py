"""Tasks of a verifiers environment, played by its harness against a conversation of a running job.

The harness's calls go through verifiers' own interception to the conversation's address, as chat completions. So the run has the exact tokens, and
nothing is tokenized here. The run gets the reward of the trace.
"""

import asyncio
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib import import_module
from importlib.util import find_spec
from itertools import islice
from typing import Any, Self

from ...comm.errors import SettingError

TASK_COLUMN = "task"
"""The column of a row with the number of its task."""
MOST_REASON = 500
"""Characters of the reason of a failure."""
KEPT_EPISODES = 64
"""Episodes for which the servers of an environment are kept: they keep a client for each conversation."""


class VerifiersTasks:
    """A taskset and the settings of its environment."""

    def __init__(self, taskset: str, settings: Mapping[str, Any]) -> None:
        """settings: of verifiers' `env` section, nested. Raises `SettingError` if they do not fit, or the taskset is not installed."""
        if find_spec("verifiers") is None:
            raise SettingError(f"verifiers:{taskset} needs the package verifiers: pip install verifiers")
        loaders: Any = import_module("verifiers.v1.utils.loaders")
        own = settings.get("taskset")
        named = {**(own if isinstance(own, dict) else {}), "id": taskset}
        try:
            self._config = loaders.resolve_env_config({**settings, "taskset": named})
            self._load = loaders.load_environment
            self.taskset = self._load(self._config).taskset
        except Exception as error:
            raise SettingError(f"verifiers:{taskset} cannot be loaded: {_line(error)}") from error
        self._tasks: dict[int, Any] = {}
        self._unread: Iterator[Any] = iter(self.taskset)

    def rows(self, most: int | None) -> Iterator[dict[str, Any]]:
        """Rows of a data set, one for each task. Raises `SettingError` for an endless taskset without `most`."""
        if most is None and not self.taskset.bounded:
            raise SettingError("--rows: this taskset is endless; say how many: --limit 1000")
        for number, task in enumerate(islice(iter(self.taskset), most)):
            text = task.data.prompt_text or task.data.name or f"task {number}"
            yield {"prompt": text, TASK_COLUMN: number} | ({"name": task.data.name} if task.data.name else {})

    def task(self, row: Mapping[str, Any]) -> Any:
        """The task that a row of the data set names. Raises `SettingError`."""
        number = row.get(TASK_COLUMN)
        if not isinstance(number, int) or isinstance(number, bool) or number < 0:
            raise SettingError(
                f"data.path: a row has no column `{TASK_COLUMN}` with the number of a task; `headrace agent verifiers:TASKSET"
                " --rows` prints such rows"
            )
        while number not in self._tasks:
            if (task := next(self._unread, None)) is None:
                raise SettingError(f"data.path: there is no task {number}: the taskset has {len(self._tasks)}")
            self._tasks[len(self._tasks)] = task
        return self._tasks[number]

    def player(self) -> "Player":
        """A player for one conversation after the other."""
        return Player(self, self._load, self._config)


class Player:
    """Plays conversations in an environment of its own, whose servers are renewed now and then. An async context."""

    def __init__(self, tasks: VerifiersTasks, load: Any, config: Any) -> None:
        self._tasks = tasks
        self._load = load
        self._config = config
        self._environment: Any = None
        self._serving: Any = None
        self._num_played = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self._end_serving()

    async def play(self, claimed: Mapping[str, Any]) -> dict[str, Any]:
        """How a claimed conversation ends: `reward`, or `failure` with the reason.

        Raises `SettingError` for a row without a task, and for an environment that trains several agents at once.
        """
        task = self._tasks.task(claimed["row"])
        clients: Any = import_module("verifiers.v1.clients")
        variable = f"HEADRACE_CONVERSATION_{claimed['id']}"
        os.environ[variable] = claimed["api_key"]  # verifiers takes keys from there alone
        try:
            environment = await self._served()
            client = clients.EvalClientConfig(base_url=claimed["base_url"], api_key_var=variable)
            episode = await environment.run_episode(task, clients.ModelContext(claimed["model"], client))
        except Exception as error:  # noqa: BLE001 - of the taskset or the harness, such as servers that do not start
            await self._end_serving()
            return {"failure": _line(f"{type(error).__name__}: {error}")}
        finally:
            del os.environ[variable]
        return _outcome(episode)

    async def _served(self) -> Any:
        if self._environment is not None and self._num_played >= KEPT_EPISODES:
            await self._end_serving()
        if self._environment is None:
            environment = await asyncio.to_thread(self._load, self._config)
            self._serving = environment.serving()
            await self._serving.__aenter__()
            self._environment = environment
            self._num_played = 0
        self._num_played += 1
        return self._environment

    async def _end_serving(self) -> None:
        serving = self._serving
        self._environment = self._serving = None
        if serving is not None:
            with suppress(Exception):  # of servers that have ended already
                await serving.__aexit__(None, None, None)


def _outcome(episode: Any) -> dict[str, Any]:
    trained = [trace for trace in episode.traces if trace.agent.trainable]
    if len(trained) > 1:
        raise SettingError(
            f"verifiers: {len(trained)} agents of this environment would be trained in one episode, and a conversation has one reward"
        )
    if not episode.ok or not trained:
        errors = [error for trace in episode.traces for error in trace.errors] + episode.errors
        # A harness sees only a status where the policy's answer has failed.
        errors += [call.error for trace in episode.traces for call in trace.calls if call.error is not None]
        words = f"{errors[-1].type}: {errors[-1].message}" if errors else "the episode has not completed"
        return {"failure": _line(words)}
    return {"reward": float(trained[0].reward)}


def _line(words: object) -> str:
    """Words on one line, cut."""
    return " ".join(str(words).split())[:MOST_REASON]


def quiet() -> None:
    """Leave out what verifiers logs of each episode."""
    logging.getLogger("verifiers").setLevel(logging.WARNING)
