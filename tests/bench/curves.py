"""Learning curves of a real model: one run of a task, by this program or by TRL's GRPOTrainer, and its held-out accuracy.

    python tests/bench curves run TASK SIDE --policy FOLDER [--lr LR] [--seed N] [...] [--set KEY=VALUE ...]
    python tests/bench curves list      the runs that docs/use/results.md wants, with their commands
    python tests/bench curves draw      its tables and pictures, of the runs that are kept

A run keeps one small file, a line at a time, so nothing that was measured is lost. The clock begins with the command that a user
would type: Python's start, the loading of the model and, on our side, the start of all processes are in it. On both sides a
step ends when its line is in the side's file of metrics. The held-out accuracy takes no time of a run: one program
(`held_out.py`) measures it afterwards for all sides, on weights that the run has saved. The time to save them counts on
both sides.
"""

import argparse
import json
import math
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from random import Random
from typing import Any

import msgspec

from headrace.comm.errors import SettingError
from headrace.comm.recipe import Recipe
from headrace.comm.waits import waiting
from headrace.launch.command_line import exit_code
from headrace.launch.config.load import read_recipe, save_recipe
from headrace.launch.processes.child import Child, describe_exit, print_message
from headrace.launch.recipes import addition, step_speed
from headrace.relay.checkpoints import CheckpointFolder
from headrace.rollout.rewards import ready

from .curve_report import Cell, write_report
from .harness import BenchProcess, command, peer_environment
from .recipes import two_calls

_POLL_S = 0.1
_END_S = 180.0
"""Seconds that an interrupted run has for its last checkpoint."""
_EVALUATION_S = 3600.0
_RECIPES = Path(__file__).with_name("recipes")
_PEER = Path(__file__).with_name("trl_peer.py")
_PEER_ROWS = 32
"""Rows of one forward of the peer."""
_ANSWERS = 100
"""Held-out questions of GSM8K."""


def _gsm8k_data(folder: Path, seed: int, given: Path | None) -> None:
    """`prompts.jsonl`, the training set in an order that depends on the seed, and `held-out.jsonl`, the first of the test set."""
    if given is None:
        raise SettingError("gsm8k needs --data FOLDER, with train.jsonl and test.jsonl as published")
    train, test = ((given / f"{name}.jsonl").read_text(encoding="utf-8").splitlines() for name in ("train", "test"))
    Random(f"gsm8k {seed}").shuffle(train)
    for name, lines in (("prompts", train), ("held-out", test[:_ANSWERS])):
        (folder / f"{name}.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


@dataclass(frozen=True, slots=True)
class LearningTask:
    """A recipe with its functions and data. The first reward function is the accuracy."""

    recipe: Path
    words: tuple[str, ...]
    write_data: Callable[[Path, int, Path | None], None]
    every: int = 5
    """Steps between two folders of weights."""


TASKS: Mapping[str, LearningTask] = {
    "addition": LearningTask(
        Path(addition.__file__).with_name("smollm2.yaml"),
        (f"reward.path={addition.__file__}:score",),
        lambda folder, seed, _: addition.write_data(folder, seed),
    ),
    "gsm8k": LearningTask(
        _RECIPES / "gsm8k.yaml",
(),
        _gsm8k_data,
        every=10,
    ),
    "two-calls": LearningTask(
        _RECIPES / "two-calls.yaml",
        (f"reward.path=[{two_calls.__file__}:score,{two_calls.__file__}:calls]", "reward.weights=[1.0,0.0]",
         f"environment.tools=[{two_calls.__file__}:calc]"),
        lambda folder, seed, _: two_calls.write_data(folder, seed),
    ),
}  # fmt: skip
SIDES: Mapping[str, tuple[str, ...]] = {
    "headrace": (),
    "sync": ("run.schedule=sync",),
    "headrace-lora": ("lora.rank=16",),
    "trl": (),
}
"""Settings of each side beside the task's."""


PLAN = (
    *(Cell("addition", side, lr, 0, 60) for lr in (3e-5, 2e-5) for side in ("headrace", "sync", "trl")),
    *(Cell("addition", side, 3e-5, 1, 60) for side in ("headrace", "sync", "trl")),
    *(Cell("addition", "headrace-lora", lr, 0, 60) for lr in (3e-4, 6e-4)),
    *(Cell("gsm8k", side, 2e-5, 0, 24) for side in ("headrace", "sync")),
    *(Cell("two-calls", side, 2e-5, 0, 40) for side in ("headrace", "sync")),
)
"""The runs of docs/use/results.md."""


class Kept:
    """The file of one run's figures; each line is on the disk when `add` returns."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._stream = path.open("w", encoding="utf-8", buffering=1)

    def add(self, row: Mapping[str, object]) -> None:
        self._stream.write(json.dumps({key: _rounded(value) for key, value in row.items()}) + "\n")

    def close(self) -> None:
        self._stream.close()


def _rounded(value: object) -> object:
    return float(f"{value:.5g}") if isinstance(value, float) else value


class Run:
    """A side under way: its process, its metrics, and the folders of weights that it has saved."""

    def __init__(self, cell: Cell, home: Path, recipe: Recipe, words: Sequence[str], trl_python: str | None) -> None:
        """home: with `prompts.jsonl`; recipe: of the task with all words, which our side gets on its command line."""
        self.home, self.recipe = home, recipe
        self.is_peer = cell.side == "trl"
        self.metrics = home / "metrics.jsonl" if self.is_peer else home / "run" / "metrics.jsonl"
        environment: Mapping[str, str] | None = None
        if self.is_peer:
            assert trl_python is not None
            (home / "policy").symlink_to(Path(recipe.model.path).resolve())
            (home / "run.json").write_text(json.dumps(peer_settings(cell, home, recipe)), encoding="utf-8")
            _write_chats(home / "prompts.jsonl", recipe.data.prompt_column)
            rewards = [path if ":" in path else f"{ready.__file__}:{path}" for path in recipe.reward.functions.values()]
            command = [trl_python, str(_PEER), "learn", str(home), ",".join(rewards)]
            environment = peer_environment(len(os.sched_getaffinity(0)))
        else:
            file = str(TASKS[cell.task].recipe)
            command = [sys.executable, "-m", "headrace.launch.run", file, *words]
        self._place = 0
        self._started = time.monotonic()
        self.child = Child(f"the run of {cell.side}", command, environment=environment, death_signal=signal.SIGTERM)

    @property
    def seconds(self) -> float:
        """Since the command was given."""
        return time.monotonic() - self._started

    def new_rows(self) -> Iterator[dict[str, Any]]:
        """The steps whose lines are whole since the last call, in the form that is kept."""
        if not self.metrics.exists():
            return
        seconds = self.seconds
        with self.metrics.open("rb") as stream:
            stream.seek(self._place)
            for line in stream:
                if not line.endswith(b"\n"):
                    return
                self._place += len(line)
                yield self._kept_row(json.loads(line), seconds)

    def _kept_row(self, row: Mapping[str, Any], seconds: float) -> dict[str, object]:
        rows = self.recipe.batch.prompts_per_step * self.recipe.batch.samples_per_prompt
        kept = {"step": row["step"] + 1, "seconds": seconds, "reward": row["reward/mean"]}
        kept["tokens"] = round(row["response_length/mean"] * rows)
        named = {"staleness": "staleness/mean", "mismatch": "mismatch/logprob_abs_diff", "stale_kl": "staleness/kl"}
        kept |= {short: row[name] for short, name in named.items() if name in row}
        return kept | {name: row[f"reward/{name}"] for name in self.recipe.reward.functions if f"reward/{name}" in row}

    def keep_weights(self) -> dict[int, Path]:
        """The folders of weights so far, by step. Ours are linked, since a run removes its older checkpoints."""
        if self.is_peer:
            return {int(path.name.rpartition("-")[2]): path for path in (self.home / "trl").glob("checkpoint-*")}
        checkpoints, found = CheckpointFolder(self.home / "run"), {}
        for step in checkpoints.whole():
            linked = self.home / "weights" / f"step_{step}"
            if not linked.exists():
                shutil.copytree(checkpoints.path(step) / "hf", linked, copy_function=os.link)
        for path in (self.home / "weights").glob("step_*"):
            found[int(path.name.rpartition("_")[2])] = path
        return found

    def end(self) -> int:
        """End the process if it runs, in order where it can; returns its exit code."""
        if self.child.poll() is None:  # a program that a shell has started in the background ignores SIGINT
            self.child.send(signal.SIGTERM if self.is_peer else signal.SIGINT)
        with waiting(self.child.name, "its end", _END_S) as wait:
            wait.until(lambda: self.child.poll() is not None, _POLL_S)
        return self.child.poll() or 0


def _write_chats(path: Path, column: str) -> None:
    """Give the rows of a file their prompt as TRL reads it: messages in the column `prompt`."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for row in rows:
        if isinstance(given := row.pop(column), str):
            given = [{"role": "user", "content": given}]
        row["prompt"] = given
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def peer_settings(cell: Cell, home: Path, recipe: Recipe) -> dict[str, object]:
    """Those of TRL's GRPOConfig that are the recipe's, and its faster ways: weights in fp32 with bf16 autocast, plain `generate`."""
    num_rows = recipe.batch.prompts_per_step * recipe.batch.samples_per_prompt
    return {
        "output_dir": str(home / "trl"), "seed": cell.seed, "max_steps": cell.steps, "learning_rate": cell.lr,
        "warmup_steps": recipe.optimizer.warmup_steps, "lr_schedule": recipe.optimizer.lr_schedule,
        "per_device_train_batch_size": _PEER_ROWS,
        "gradient_accumulation_steps": num_rows // _PEER_ROWS, "num_generations": recipe.batch.samples_per_prompt,
        "max_completion_length": recipe.sampling.max_new_tokens, "adam_beta1": recipe.optimizer.beta1,
        "adam_beta2": recipe.optimizer.beta2, "max_grad_norm": recipe.optimizer.max_grad_norm,
        "bf16": recipe.model.compute_type == "bfloat16", "logging_strategy": "steps", "logging_steps": 1,
        "save_strategy": "steps" if recipe.checkpoint.every else "no", "save_steps": recipe.checkpoint.every or 1,
        "save_only_model": True, "reward_weights": list(recipe.reward.weights) or None,
        "chat_template": recipe.data.chat_template or None,
    }  # fmt: skip


def run_cell(cell: Cell, home: Path, options: argparse.Namespace) -> None:
    """Run it, evaluate its weights, keep the figures. Raises `SettingError` for wrong words and `RuntimeError` for a run that fails."""
    task = TASKS[cell.task]
    task.write_data(home, cell.seed, options.data)
    words = [
        f"run.dir={home / 'run'}", f"run.steps={cell.steps}", f"run.seed={cell.seed}", f"model.path={options.policy}",
        "model.dtype=bfloat16", f"data.path={home / 'prompts.jsonl'}", "data.shuffle=false", f"optimizer.lr={cell.lr}",
        f"checkpoint.every={task.every}", "eval.every=0", *task.words, *SIDES[cell.side], *options.words,
    ]  # fmt: skip
    recipe = read_recipe(task.recipe, words)
    kept = Kept(options.keep / cell.file_name)
    kept.add(_header(cell, recipe, options) | {"speed": _speed()})
    busy, own = busy_and_all(), OwnCpu()
    run = Run(cell, home, recipe, words, options.trl_python)
    try:
        while (code := run.child.poll()) is None and run.seconds < options.minutes * 60:
            for row in run.new_rows():
                kept.add(row)
                print_message(f"{run.seconds:.0f} s: {json.dumps(row)}")
            run.keep_weights()
            time.sleep(_POLL_S)
    finally:
        ended = run.end()
    for row in run.new_rows():
        kept.add(row)
    shares = [after - before for after, before in zip(busy_and_all(), busy, strict=True)]
    kept.add(
        {"end": ended, "total_s": run.seconds, "busy": shares[0] / shares[1], "own": own.share(), "speed": _speed()}
    )
    if code:
        raise RuntimeError(f"{describe_exit(run.child.name, code)}; its files are in {home}")
    weights = {0: Path(options.policy), **run.keep_weights()}
    for step, means in _evaluations(recipe, weights, home):
        kept.add({"step": step, "held_out": means})
    kept.close()


def _header(cell: Cell, recipe: Recipe, options: argparse.Namespace) -> dict[str, object]:
    """The run, its programs and its machine."""
    names = "import importlib.metadata as m; print(*(f'{n} {m.version(n)}' for n in %s))"
    versions = {"torch", "transformers"} | ({"trl"} if cell.side == "trl" else set())
    python = options.trl_python if cell.side == "trl" else sys.executable
    models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "task": cell.task, "side": cell.side, "lr": cell.lr, "seed": cell.seed, "steps": cell.steps,
        "rows": recipe.batch.prompts_per_step * recipe.batch.samples_per_prompt, "words": options.words,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"), "commit": _output(["git", "rev-parse", "--short", "HEAD"]),
        "with": _output([python, "-c", names % sorted(versions)]), "cores": len(os.sched_getaffinity(0)),
        "cpu": models[0].partition(": ")[2] if models else platform.machine(),
    }  # fmt: skip


class OwnCpu:
    """The share of the machine that the child processes take from now on."""

    def __init__(self) -> None:
        self._before = os.times()

    def share(self) -> float:
        after, before = os.times(), self._before
        busy = after.children_user + after.children_system - before.children_user - before.children_system
        return busy / (after.elapsed - before.elapsed) / (os.cpu_count() or 1)


def busy_and_all() -> tuple[float, float]:
    """Ticks that all CPUs of this machine were busy, and all ticks, since it started."""
    ticks = [float(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks)


def _speed() -> float | None:
    """Seconds of `step_speed` in bfloat16: the speed of a shared machine changes during the day."""
    return step_speed.measured().get("bfloat16")


def _output(command: Sequence[str]) -> str:
    """The first line that a command prints, empty if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=_RECIPES, timeout=_END_S)
    return done.stdout.partition("\n")[0]


def _evaluations(recipe: Recipe, weights: Mapping[int, Path], home: Path) -> Iterator[tuple[int, dict[str, float]]]:
    """By step the mean of each reward function over the greedy answers to the held-out prompts."""
    data, run = {"path": str(home / "held-out.jsonl")}, {"dir": str(home / "evaluation")}
    config = save_recipe(replaced(recipe, data=data, run=run))
    steps = sorted(weights)
    with BenchProcess(command("held_out", config, *(weights[step] for step in steps))) as process:
        for step in steps:
            yield step, json.loads(process.line("{", _EVALUATION_S))


def replaced(recipe: Recipe, **sections: Mapping[str, object]) -> Recipe:
    """The recipe with other settings in some sections."""
    changed = {name: msgspec.structs.replace(getattr(recipe, name), **values) for name, values in sections.items()}
    return msgspec.structs.replace(recipe, **changed)


def list_plan(options: argparse.Namespace) -> None:
    """Print the command of each run of the plan, with a mark before those that are kept."""
    for cell in PLAN:
        mark = "done " if (options.keep / cell.file_name).exists() else "     "
        words = f"{cell.task} {cell.side} --lr {cell.lr:g} --seed {cell.seed} --steps {cell.steps} --policy {options.policy}"
        words += f" --trl-python {options.trl_python}" if cell.side == "trl" else ""
        words += f" --data {options.data}" if cell.task == "gsm8k" else ""
        print(f"{mark}python tests/bench curves run {words}")


def run(options: argparse.Namespace) -> None:
    """Run one cell; raises `SettingError` for wrong words."""
    cell = Cell(options.task, options.side, options.lr, options.seed, options.steps)
    if cell.side == "trl" and (options.trl_python is None or cell.task == "two-calls"):
        raise SettingError("the side trl needs --trl-python PATH, and does not have the task two-calls")
    home = Path(tempfile.mkdtemp(prefix="headrace-curves-"))
    try:
        run_cell(cell, home, options)
    except SettingError:
        shutil.rmtree(home)  # after another error it stays: it has logs and weights
        raise
    shutil.rmtree(home)


def main(words: Sequence[str]) -> int:
    """Carry out one of the three commands; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python tests/bench curves", description=(__doc__ or "").split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    one, all_of_them, report = (commands.add_parser(name) for name in ("run", "list", "draw"))
    one.add_argument("task", choices=[*TASKS])
    one.add_argument("side", choices=[*SIDES])
    one.add_argument("--set", dest="words", action="append", default=[], metavar="KEY=VALUE", help="a further setting")
    one.add_argument("--lr", type=float, default=2e-5, help="peak learning rate")
    one.add_argument("--seed", type=int, default=0, help="of the order of the prompts and of sampling")
    one.add_argument("--steps", type=int, default=50, help="steps of the run")
    one.add_argument("--minutes", type=float, default=math.inf, help="end the run in order after this time")
    for each in (one, all_of_them):
        each.add_argument(
            "--policy", metavar="FOLDER", default="MODEL", help="SmolLM2-135M-Instruct in Hugging Face form"
        )
        each.add_argument("--trl-python", metavar="PATH", help="interpreter that has TRL")
        each.add_argument("--data", type=Path, metavar="FOLDER", help="GSM8K's train.jsonl and test.jsonl")
    for each in (one, all_of_them, report):
        each.add_argument(
            "--keep", type=Path, default=Path("docs/use/results"), metavar="FOLDER", help="of the kept figures"
        )
    report.add_argument(
        "--page", type=Path, default=Path("docs/use/results.md"), help="the document whose tables are filled"
    )
    options = parser.parse_args(words)
    actions = {
        "run": lambda: run(options),
        "list": lambda: list_plan(options),
        "draw": lambda: write_report(PLAN, options.keep, options.page),
    }
    return exit_code(actions[options.command])
