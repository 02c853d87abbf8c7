"""The model card of a trained model: `README.md` in its folder, in the form of the Hugging Face Hub.

Hosts, addresses, and the folders of the run, its models, data and functions stay out of it: it may be published.
"""

import json
import math
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import msgspec
import yaml

from ...comm.clock import duration
from ...comm.errors import SettingError
from ...comm.recipe import Recipe
from ...comm.recipe.run import is_address
from ..config.load import LAB, parse_recipe
from ..config.run_checkpoints import ADAPTER, TrainedModel
from ..config.run_folder import METRICS_FILE, read_summary
from ..config.values import show_value
from ..processes.child import print_message
from .summary import evaluation_rows, reward_text

CARD = "README.md"
MARK = "<!-- Written by Headrace. Remove this line, and the file is not written again. -->"
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
_SHOWN_ELSEWHERE = ("run.dir", "run.steps", "run.resume", "model.path", "data.path", "reward.path", "eval.path")
_TEXTS = ("checkpoint.best", "data.system_prompt", "sampling.stop")
"""Settings that name no file, although they may have a slash."""
_OF_THE_MACHINES = ("comm", LAB)
"""Sections that say nothing about the model."""
_MOST_TEXT = 200
"""Longest text of a setting that is shown, in characters; a chat template may have pages."""


def write_cards(summary: Mapping[str, Any]) -> None:
    """Write the cards of the model that a run has exported at its end, and of its adapter if there is one."""
    folder = Path(str(summary.get("export") or ""))
    if not summary.get("export") or not folder.is_dir():
        return
    for path in (folder, folder.parent / ADAPTER):
        if path.is_dir():
            try:
                write_card(TrainedModel.find(str(path)))
            except (OSError, SettingError) as error:
                print_message(f"warning: {path / CARD} is not written: {error}")


def write_card(model: TrainedModel, name: str = "") -> Path:
    """Write the card of a model into its folder, unless it has one that was not written here; returns its path.

    name: on the Hub, if the model has one. Raises `OSError`, and `SettingError` for a recipe that cannot be read.
    """
    path = Path(model.path) / CARD
    if path.exists() and MARK not in path.read_text(encoding="utf-8", errors="replace"):
        return path
    path.write_text(card(model, name), encoding="utf-8")
    return path


def card(model: TrainedModel, name: str = "") -> str:
    """The text of the card. Of a model without a run it says little."""
    file = model.recipe_file
    recipe = None if file is None else parse_recipe(file.read_text(encoding="utf-8"))
    base = "" if recipe is None else _base_model(recipe)
    head = _head(model, recipe, base)
    title = name or (model.run_dir.absolute().name if model.run_dir is not None else Path(model.path).absolute().name)
    parts = [f"---\n{yaml.safe_dump(head, sort_keys=False, allow_unicode=True)}---", MARK, f"# {title}"]
    kind = "adapter (LoRA)" if model.is_adapter else "model"
    if recipe is None:
        parts.append(f"A language {kind}, published with Headrace.")
    else:
        source = base or _shown(recipe.model.path)
        parts.append(
            f"This {kind} was trained by reinforcement learning with Headrace, from {source}, for {model.step} steps."
        )
        parts += ["## Training", _table(_facts(recipe, source)), "Settings that differ from the defaults:"]
        parts.append("```\n" + "".join(f"{line}\n" for line in changed_settings(recipe)) + "```")
        parts += _results(model)
    parts += ["## Use", _usage(model, name or "FOLDER"), "## Versions", _table(_versions())]
    return "\n\n".join(parts) + "\n"


def changed_settings(recipe: Recipe) -> Iterator[str]:
    """`key=value` of each setting that differs from its default, without folders and machines."""
    defaults = msgspec.to_builtins(Recipe())
    for section, values in msgspec.to_builtins(recipe).items():
        if section in _OF_THE_MACHINES:
            continue
        for key, value in values.items():
            name = f"{section}.{key}"
            if name not in _SHOWN_ELSEWHERE and value != defaults[section][key]:
                yield f"{name}={show_value(_public(value, is_text=name in _TEXTS))}"


def _head(model: TrainedModel, recipe: Recipe | None, base: str) -> dict[str, Any]:
    """The YAML header, with the names that the Hub knows."""
    head: dict[str, Any] = {}
    if base:
        head["base_model"] = base
    if recipe is not None and (found := _license(recipe.model.path, base)):
        head["license"] = found
    head |= {"library_name": "peft" if model.is_adapter else "transformers", "pipeline_tag": "text-generation"}
    head["tags"] = ["headrace", *(["reinforcement-learning"] if recipe is not None else [])]
    if model.is_adapter:
        head["tags"].append("lora")
    datasets = [path for path in recipe.data.paths if _is_dataset(path)] if recipe is not None else []
    return head | ({"datasets": datasets} if datasets else {})


def _facts(recipe: Recipe, source: str) -> dict[str, str]:
    """Data, reward, algorithm and size of a step."""
    batch = recipe.batch
    algorithm = recipe.algorithm
    rewards = recipe.reward.functions.values() or [
        "agents" if recipe.environment.is_served else recipe.environment.path
    ]
    return {
        "base model": source,
        "data": ", ".join(map(_data_name, recipe.data.paths)),
        "held-out data": ", ".join(map(_data_name, recipe.eval.paths)),
        "reward": ", ".join(map(_reward_name, rewards)),
        "algorithm": f"advantage {_shown(algorithm.advantage)}, loss {_shown(algorithm.loss)}",
        "batch": f"{batch.prompts_per_step} prompts with {batch.samples_per_prompt} samples each",
        "weights": f"LoRA of rank {recipe.lora.rank}" if recipe.lora.rank else "all",
    }


def _results(model: TrainedModel) -> list[str]:
    """Reward and evaluations up to the model's step; nothing if the run has left no metrics."""
    assert model.run_dir is not None, "a recipe is that of a run"
    rewards, evaluations, seconds = _measured(model.run_dir / METRICS_FILE, model.step)
    if not rewards:
        return []
    summary = read_summary(model.run_dir) or {}
    is_last = summary.get("steps") == model.step and "reward_first" in summary
    rows = {"reward": reward_text(summary) if is_last else f"{rewards[-1]:.3f}  (mean of step {model.step})"}
    rows |= {f"held-out: {name}": text for name, text in evaluation_rows(evaluations)}
    return ["## Results", _table(rows | {"time": duration(seconds)})]


def _measured(path: Path, num_steps: int) -> tuple[list[float], list[dict[str, float]], float]:
    """Mean reward of each of the first steps, evaluations of their versions, and their seconds.

    The evaluation of a version is in the line of the step during which it was completed, which may be a later one.
    """
    rewards: list[float] = []
    evaluations: list[dict[str, float]] = []
    seconds = 0.0
    # A line may be damaged by a power cut, or be in the writing.
    with suppress(OSError, ValueError, KeyError), path.open(encoding="utf-8") as file:
        for line in map(json.loads, file):
            if line["step"] < num_steps:
                rewards.append(line["reward/mean"])
                seconds = line["time_s"]
            if line.get("eval/version", math.inf) <= num_steps:
                evaluations.append({key: value for key, value in line.items() if key.startswith("eval/")})
    return rewards, evaluations, seconds


def _usage(model: TrainedModel, name: str) -> str:
    if model.is_adapter:
        lines = [
            "from peft import AutoPeftModelForCausalLM",
            "",
            f'model = AutoPeftModelForCausalLM.from_pretrained("{name}")',
        ]
    else:
        lines = [
            "from transformers import AutoModelForCausalLM, AutoTokenizer",
            "",
            f'tokenizer = AutoTokenizer.from_pretrained("{name}")',
            f'model = AutoModelForCausalLM.from_pretrained("{name}")',
        ]
    return "\n".join(["```python", *lines, "```"])


def _versions() -> dict[str, str]:
    found = {"Python": platform.python_version()}
    for package in ("headrace", "torch", "transformers"):
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def _table(rows: Mapping[str, str]) -> str:
    escaped = {name: text.replace("|", "\\|") for name, text in rows.items()}
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {text} |" for name, text in escaped.items() if text)])


def _base_model(recipe: Recipe) -> str:
    """The Hub's name of the base model; empty for a folder. A name counts if the Hub's cache has it."""
    return recipe.model.path if _cached(recipe.model.path, "config.json") else ""


def _license(path: str, base: str) -> str:
    """The licence in the card of the base model, empty if that is not known here."""
    file = Path(_cached(base, CARD) or Path(path) / CARD)
    with suppress(OSError, ValueError, yaml.YAMLError, AttributeError):
        _, header, _ = file.read_text(encoding="utf-8").split("---\n", 2)
        return str(yaml.safe_load(header).get("license") or "")
    return ""


def _cached(name: str, file: str) -> str:
    """The path of a file of a model in the Hub's cache; empty if it is not there."""
    if not _HUB_ID.fullmatch(name) or Path(name).exists():
        return ""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name, file)
    return found if isinstance(found, str) else ""


def _is_dataset(name: str) -> bool:
    """Whether a name is that of a data set of the Hub, which its cache has: a folder that is not here looks the same."""
    if not _HUB_ID.fullmatch(name) or Path(name).exists():
        return False
    from huggingface_hub import constants

    return (Path(constants.HF_HUB_CACHE) / f"datasets--{name.replace('/', '--')}").is_dir()


def _data_name(path: str) -> str:
    return path if _is_dataset(path) else _shown(path)


def _reward_name(path: str) -> str:
    """A reward function; of a server only the judge's model, as its address has a host and perhaps a secret."""
    if not is_address(path):
        return _shown(path)
    model = parse_qs(urlsplit(path).fragment).get("model", [""])[-1]
    return f"a judge ({_shown(model)})" if model else "a server"


def _shown(name: str) -> str:
    """A file or folder, perhaps with a name after it, without those above it."""
    return "(an address)" if is_address(name) else name.rstrip("/").rpartition("/")[2]


def _public(value: Any, *, is_text: bool) -> Any:
    """A setting's value without folders and addresses, and without pages of text."""
    if isinstance(value, str):
        if len(value) > _MOST_TEXT:
            return f"({len(value)} characters)"
        return value if is_text or "{" in value else _shown(value)  # a chat template has braces
    if isinstance(value, Sequence):
        return [_public(each, is_text=is_text) for each in value]
    if isinstance(value, Mapping):
        return {key: _public(each, is_text=is_text) for key, each in value.items()}
    return value
