"""The peer of the workloads `trainer-*` and `end-to-end` and of `curves`: TRL's GRPOTrainer, in an interpreter of its own.

    PEER_PYTHON tests/bench/trl_peer.py step FOLDER BATCH          a step on the rollouts of FOLDER for each line on stdin
    PEER_PYTHON tests/bench/trl_peer.py run FOLDER ENGINE          a run by FOLDER/run.json; ENGINE is `plain` or `batching`
    PEER_PYTHON tests/bench/trl_peer.py learn FOLDER REWARDS       a run by FOLDER/run.json on chat prompts; REWARDS is FILE.py:FUNCTION,...

It runs by path, because that interpreter has TRL but not this project. Generation in `step` is TRL's own `rollout_func`, which
returns the given rollouts. The time of a step in `step` is the CPU time of the training steps and of the update, without the
preparation of their inputs.
"""

import json
import os
import resource
import sys
import time
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Any


def resident_bytes(field: str) -> int:
    """`VmRSS` or `VmHWM` (the largest so far) of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def trainer_of(
    path: str, data: list[dict[str, Any]], reward: Any, settings: dict[str, Any], rollouts: Any = None
) -> Any:
    """A GRPOTrainer without the options that trade time for memory; in fp32 unless `settings` says otherwise."""
    trl, datasets = import_module("trl"), import_module("datasets")
    transformers: Any = import_module("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    tokenizer.chat_template = settings.pop("chat_template", None) or tokenizer.chat_template
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    common = {
        "bf16": False, "gradient_checkpointing": False, "use_cpu": True, "report_to": [], "save_strategy": "no",
        "disable_tqdm": True, "logging_strategy": "no", "shuffle_dataset": False, "lr_scheduler_type": "constant",
        "beta": 0.0, "loss_type": "dapo", "adam_beta2": 0.95, "dataloader_pin_memory": False,
    }  # fmt: skip
    return trl.GRPOTrainer(
        model=path,
        reward_funcs=reward,
        args=trl.GRPOConfig(**(common | settings)),
        train_dataset=datasets.Dataset.from_list(data),
        processing_class=tokenizer,
        rollout_func=rollouts,
    )


def serve_steps(folder: Path, batch: int) -> None:
    """Train on the rollouts; print the CPU seconds of each step and the largest memory above that before the first one."""
    given = json.loads((folder / "rollouts.json").read_text())
    completions, rewards = given["completions"], given["rewards"]
    num_samples = len(completions) // len(given["prompts"])

    def rollouts(prompts: list[str], _: Any) -> dict[str, Any]:
        ids = [prompt for prompt in given["prompts"] for _ in range(num_samples)]
        return {"prompt_ids": ids, "completion_ids": completions, "logprobs": [[0.0] * len(c) for c in completions]}

    settings = {
        "output_dir": str(folder / "trl"), "per_device_train_batch_size": batch, "num_generations": num_samples,
        "gradient_accumulation_steps": len(completions) // batch, "max_completion_length": 1 << 12, "learning_rate": 1e-4,
        "max_steps": 1 << 20,
    }  # fmt: skip
    data = [{"prompt": "a"}] * len(given["prompts"])
    trainer = trainer_of(str(folder / "policy"), data, lambda **_: rewards, settings, rollouts)
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM counts from here
    trainer.add_callback(steps_of(trainer))
    trainer.train()


def steps_of(trainer: Any) -> Any:
    """A callback that begins a step for each line on stdin and prints its figures."""
    transformers: Any = import_module("transformers")
    prepare, spent = trainer._prepare_inputs, [0.0]

    def prepared(inputs: Any) -> Any:
        started = time.process_time()
        found = prepare(inputs)
        spent[0] += time.process_time() - started
        return found

    trainer._prepare_inputs = prepared

    class Steps(transformers.TrainerCallback):
        started, before = 0.0, 0

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if not state.global_step:
                self.before = resident_bytes("VmRSS")
                print("ready", flush=True)
            if not sys.stdin.readline():
                os._exit(0)
            spent[0], self.started = 0.0, time.process_time()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            seconds = time.process_time() - self.started - spent[0]
            print(json.dumps([seconds, resident_bytes("VmHWM") - self.before]), flush=True)

    return Steps()


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """The rows of FOLDER/prompts.jsonl."""
    return [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]


def serve_run(folder: Path, engine: str) -> None:
    """Train with the settings of FOLDER/run.json; print the wall time of all steps and their response tokens."""
    transformers: Any = import_module("transformers")
    settings = json.loads((folder / "run.json").read_text())
    sys.path.insert(0, str(folder))
    given, num_tokens = import_module("reward").reward, [0]

    def reward(completion_ids: list[list[int]], **columns: Any) -> list[float]:
        num_tokens[0] += sum(map(len, completion_ids))
        return given(**columns)

    class Start(transformers.TrainerCallback):
        at = 0.0

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.at = time.monotonic()

    settings |= {"output_dir": str(folder / "trl"), "use_transformers_continuous_batching": engine == "batching"}
    trainer, start = trainer_of(str(folder / "policy"), rows_of(folder), reward, settings), Start()
    trainer.add_callback(start)
    trainer.train()
    print(json.dumps([time.monotonic() - start.at, num_tokens[0]]), flush=True)


def chat_reward(name: str) -> Any:
    """TRL's form of a function FILE.py:FUNCTION of the text of a response and, where it takes one, of the right answer."""
    file, _, function = name.rpartition(":")
    sys.path.insert(0, str(Path(file).parent))
    score = getattr(import_module(Path(file).stem), function)
    takes = [word for word in signature(score).parameters if word != "solution_str"]

    def reward(completions: list[list[dict[str, str]]], **columns: Any) -> list[float]:
        texts = [messages[-1]["content"] for messages in completions]
        answers = zip(texts, columns["answer"], strict=True)
        return [score(solution_str=text, **dict.fromkeys(takes, answer)) for text, answer in answers]

    reward.__name__ = function
    return reward


def serve_learning(folder: Path, names: str) -> None:
    """Train with the settings of FOLDER/run.json; write a line of FOLDER/metrics.jsonl, under the names of this project, for each step."""
    transformers: Any = import_module("transformers")
    rewards = [chat_reward(name) for name in names.split(",")]

    class Metrics(transformers.TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
            if "reward" not in logs:
                return  # the summary at the end
            row = {
                "step": state.global_step - 1,
                "reward/mean": logs["reward"],
                "response_length/mean": logs["completions/mean_length"],
                "learning_rate": logs["learning_rate"],
            }
            with (folder / "metrics.jsonl").open("a") as stream:
                stream.write(json.dumps(row) + "\n")

    settings = json.loads((folder / "run.json").read_text())
    warmup_steps, schedule = settings.pop("warmup_steps"), settings.pop("lr_schedule")
    trainer = trainer_of(str(folder / "policy"), rows_of(folder), rewards, settings)

    def create_scheduler(num_training_steps: int, optimizer: Any = None) -> Any:
        """Our rates: transformers' own begin with a step at rate 0, which would train nothing."""

        def factor(step: int) -> float:
            if step < warmup_steps:
                return (step + 1) / (warmup_steps + 1)
            left = (num_training_steps - step) / max(1, num_training_steps - warmup_steps)
            return max(0.0, left) if schedule == "linear" else 1.0

        trainer.lr_scheduler = import_module("torch").optim.lr_scheduler.LambdaLR(
            optimizer or trainer.optimizer, factor
        )
        return trainer.lr_scheduler

    trainer.create_scheduler = create_scheduler
    trainer.add_callback(Metrics())
    trainer.train()


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    mode, place, word = sys.argv[1:]
    if mode == "step":
        serve_steps(Path(place), int(word))
    elif mode == "learn":
        serve_learning(Path(place), word)
    else:
        serve_run(Path(place), word)
