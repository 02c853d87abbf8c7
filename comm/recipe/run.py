"""`run`, `roles`, `model`, `data`, `reward` and `environment`: what a run trains on, and with which processes."""

from collections.abc import Callable, Sequence
from pathlib import PurePath
from statistics import fmean, pstdev
from typing import Literal
from urllib.parse import parse_qs, urlsplit

from msgspec import Struct

from ..errors import SettingError
from .fields import Count, Finite, NotNegative, OptionalCount, ScheduleName, Seconds

REWARD_STATISTICS: dict[str, Callable[[Sequence[float]], float]] = {
    "mean": fmean,
    "std": pstdev,
    "min": min,
    "max": max,
}
"""Metrics of a step's rewards, `reward/mean` and so on; no reward function has one of these names."""


class RunSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`run.*`: folder, length and schedule of the run."""

    dir: str = "runs/run"
    """Run folder: metrics, journal, logs, checkpoints, summary."""
    seed: OptionalCount = 0
    """Seed of the data order, of sampling and of every other random choice."""
    steps: Count = 100
    """Optimizer steps of the run."""
    schedule: ScheduleName = "headrace"
    """The order of generation, training and weight updates (docs/use/schedules.md)."""
    save_rows: Literal["recovery", "all", "none"] = "recovery"
    """Rows that stay under `rows/`: `recovery` those since the second newest checkpoint, from which steps can be trained again; `all` those
    of each step, for `headrace replay`; with `none` the death of the trainer ends the run."""
    resume: Literal["never", "auto", "restart"] = "never"
    """`never` refuses a folder with a run; `auto` continues it after its last step; `restart` starts at step 1 and keeps its files aside."""
    samples: OptionalCount = 2
    """Groups of each step whose texts, rewards and log-probs are kept in `samples.jsonl` (docs/use/viewer.md), two of their samples on the console and in TensorBoard now and then; 0 is off."""
    report_to: tuple[Literal["tensorboard", "wandb", "trackio", "mlflow"], ...] = ("tensorboard",)
    """Where the metrics go beside `metrics.jsonl` and the console (docs/use/trackers.md); [] is nowhere."""
    on_collapse: Literal["warn", "stop"] = "warn"
    """At an alarm that learning is about to collapse (docs/use/troubleshooting.md): go on, or `stop` with the last checkpoint before it."""

    def __post_init__(self) -> None:
        if self.dir.startswith("~"):  # no shell replaces it within a word, and a folder of this name would be made
            raise SettingError(f"run.dir={self.dir}: ~ is not replaced here; write the home folder, or ./{self.dir}")


class RoleSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`roles.*`: the number of ranks of each role; torchrun starts their sum."""

    actor: Count = 1
    """Ranks of the trainer."""
    relay: Count | None = None
    """CPU processes that hold weights and experience; each host gets one before any gets two. null is one for each host."""
    rollout: Count = 1
    """Ranks of the generator; `rollout.tp` of them make one replica."""
    reference: OptionalCount = 0
    """Ranks that compute the initial policy for a KL term, each with a whole copy; with 0 the trainer's ranks compute it."""
    task: OptionalCount = 0
    """CPU processes for `queue.tasks`."""


class ModelSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`model.*`: the policy."""

    path: str = ""
    """Folder or Hugging Face Hub id of a decoder-only checkpoint with its tokenizer."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Compute type of generator and trainer. Null is bfloat16 on GPUs and on CPUs with instructions for it (AMX, AVX-512 BF16, Arm BF16), else float32."""

    @property
    def compute_type(self) -> Literal["float32", "bfloat16"]:
        """`dtype`, or float32, the type of any device; the start of a run has set it for the devices of the run."""
        return self.dtype or "float32"


class DataSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`data.*`: the prompts."""

    path: str | tuple[str, ...] = ""
    """JSONL or parquet file, Hugging Face data set, `FILE.py:NAME` (docs/use/data.md), or a list of these, whose rows are mixed."""
    weights: tuple[NotNegative, ...] = ()
    """Shares of the sets of `path` in the prompts; empty is each set's share of the rows."""
    subset: str = ""
    """Subset (configuration) of a Hugging Face data set."""
    split: str = "train"
    """Split of a Hugging Face data set."""
    prompt_column: str = "prompt"
    """Column of the prompts: text, or chat messages with `role` and `content`."""
    system_prompt: str = ""
    """System message before each prompt that has none; text prompts become user messages."""
    chat_template: str = ""
    """A chat template, as a file or as text, instead of the tokenizer's; `tokenizer` applies the tokenizer's template to text prompts too."""
    chat_template_kwargs: dict[str, bool | int | float | str] | None = None
    """Arguments of the chat template, such as `{enable_thinking: false}`."""
    shuffle: bool = True
    """Shuffle the prompts in each epoch, by `run.seed`."""
    curriculum: str = ""
    """`FILE.py:FUNCTION`: the probability from 0 to 1 that a row is used, given the steps trained so far and the row (docs/use/data.md)."""
    too_long: Literal["error", "drop"] = "error"
    """For a prompt that leaves no room for a response: `error` ends the run, `drop` skips the prompt."""

    @property
    def paths(self) -> tuple[str, ...]:
        """The files and data sets of `path`."""
        return (self.path,) if isinstance(self.path, str) else self.path

    @property
    def is_chat(self) -> bool:
        """Whether text prompts become user messages."""
        return bool(self.system_prompt or self.chat_template)


class RewardSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`reward.*`: the reward functions."""

    path: str | tuple[str, ...] = ""
    """`FILE.py:FUNCTION` in TRL's or verl's form, a built-in one such as math or gsm8k, the address of a judge or another server, or a list of these (docs/use/rewards.md)."""
    weights: tuple[Finite, ...] = ()
    """Weights of the functions in the sum of rewards; empty gives each the weight 1."""
    batch: Literal["sample", "group"] = "sample"
    """Unit of scoring: with `group` a call gets all samples of each of its prompts, for functions that compare them."""
    timeout_s: Seconds = 30.0
    """Longest time of one call in seconds; then its process is killed, and its trajectories are scored again one by one. One that is late alone counts as failed."""
    workers: Count = 1
    """Reward processes per rollout."""

    @property
    def functions(self) -> dict[str, str]:
        """The functions by name; functions of one name get that of their file before it. Raises `SettingError`."""
        paths = (self.path,) if isinstance(self.path, str) else self.path
        names = [_name_of(path) for path in paths]
        unique = [
            name if names.count(name) == 1 or is_address(path) else f"{PurePath(path.rpartition(':')[0]).stem}.{name}"
            for name, path in zip(names, paths, strict=True)
        ]
        for name in unique:
            if unique.count(name) > 1 or name in REWARD_STATISTICS:
                raise SettingError(
                    f"reward.path: the name '{name}' is already taken; give the function another name, or an address #name=NAME"
                )
        return dict(zip(unique, paths, strict=True))


def is_address(path: str) -> bool:
    """Whether an entry of `reward.path` is the address of a server."""
    return "://" in path


def _name_of(path: str) -> str:
    """The name of a reward in the metrics: of a function its own, of an address `#name=`, `judge` or the last part of its path."""
    if not is_address(path):
        return path.rpartition(":")[2]
    scheme, _, rest = path.partition("://")
    parts = urlsplit(f"//{rest}")
    if given := parse_qs(parts.fragment).get("name"):
        return given[-1]
    if scheme.startswith("judge+"):
        return "judge"
    return PurePath(parts.path).name or parts.netloc.partition(":")[0]


OPENENV = "openenv:"
"""Begins an `environment.path` that is the address of a server."""
MCP = "mcp:"
"""Begins an entry of `environment.tools` that stands for a server's tools: its address, or its command."""
SERVE = "serve"
"""`environment.path` of a run whose trajectories are those of agents."""


class EnvironmentSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`environment.*`: tools and environments with which the policy interacts over several turns."""

    path: str = ""
    """`FILE.py:CLASS` with `reset` and `step`, or with methods that are tools; `openenv:URL` for an OpenEnv server (docs/use/environments.md); `serve` for agents that use `rollout.serve` (docs/use/agents.md)."""
    tools: tuple[str, ...] = ()
    """Python functions that the policy may call, each `FILE.py:FUNCTION` or `package.module:FUNCTION`, with type hints and a docstring; `mcp:URL` and `mcp:COMMAND` stand for all tools of an MCP server."""
    max_turns: Count = 16
    """Most turns of the policy in a trajectory."""
    timeout_s: Seconds = 30.0
    """Longest time of one call of an environment or a tool in seconds; then its trajectory counts as failed."""
    workers: Count = 1
    """Processes per rollout that host environments, each any number of them."""

    @property
    def is_set(self) -> bool:
        """Whether rollouts generate trajectories of several turns."""
        return bool(self.tools or (self.path and not self.is_served))

    @property
    def is_served(self) -> bool:
        """Whether the trajectories are those of agents, which use the run over HTTP."""
        return self.path == SERVE

    @property
    def server(self) -> str:
        """The address of the OpenEnv server; empty if `path` names another environment."""
        return self.path.removeprefix(OPENENV) if self.path.startswith(OPENENV) else ""

    @property
    def user_code(self) -> list[str]:
        """The paths of the user's Python code."""
        own = [] if self.server or self.is_served else [self.path]
        return [path for path in (*own, *self.tools) if path and not path.startswith(MCP)]
