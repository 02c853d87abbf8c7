"""The part `runs` of `tests/gpu.sh`: the quickstart with settings that change what its processes do, several at a time on one GPU.

A run that fails is named with the end of its output. Usage: `gpu_runs.py FOLDER [NAME ...]`.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from bench.policies import build

from headrace.launch.config.load import read_recipe
from headrace.launch.recipes import sort_digits
from headrace.launch.recipes.parts import RECIPE, missing_parts
from headrace.launch.recipes.tiny_policy import character_tokenizer

HAS_GPU = torch.cuda.is_available()
DEADLINE_S = 90
SIDE_BY_SIDE = 5 if HAS_GPU else 2
"""Runs at a time: their processes import torch and make a context each, which keeps some 30 cores busy at first."""
NUM_STEPS = {"plain": 30}
RUNS: dict[str, Sequence[str]] = {
    "plain": (),
    "float32": ("model.dtype=float32",),
    "exact": ("generator.exact=true",),
    "lora": ("lora.rank=8",),
    "offload": ("trainer.offload=true",),
    "checkpointed": ("trainer.activation_checkpointing=true",),
    "compiled": ("trainer.compile=true",),
    "rows-alone": ("trainer.prefix_tree=false",),
    "filtered": ("sampling.top_p=0.95", "sampling.top_k=8", "sampling.repetition_penalty=1.05"),
    "reference": ("algorithm.kl_coef=0.01", "roles.reference=1"),
    "critic": ("algorithm.advantage=gae",),
    "evaluated": ("eval.every=3",),
    "resumed": ("checkpoint.every=3",),
    "larger": (),
}
"""The settings of each run; `resumed` is started twice, `larger` trains a policy of half a billion random weights."""


def words_of(name: str, folder: Path, steps: int) -> list[str]:
    """The arguments of `headrace run` for a run."""
    words = [str(RECIPE), f"run.dir={folder / name}", f"run.steps={steps}", *RUNS[name]]
    if HAS_GPU and name != "float32":
        words.append("model.dtype=bfloat16")
    if name == "evaluated":
        words.append(f"eval.path={folder / 'questions.jsonl'}")
    if name == "larger":
        words += [f"model.path={folder / 'policy'}", f"data.path={folder / 'prompts.jsonl'}", "optimizer.lr=1e-6"]
        words.append(f"reward.path={sort_digits.__file__}:reward")
    return words


def start(name: str, folder: Path, words: Sequence[str]) -> "subprocess.Popen[bytes]":
    """A run, with its output in a file."""
    with (folder / f"{name}.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "headrace", "run", *words],
            stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=dict(os.environ),
        )  # fmt: skip


def finish(process: "subprocess.Popen[bytes]", deadline_s: float) -> int | None:
    """The exit code; None of a run that is still there after `deadline_s` seconds, which is ended."""
    try:
        return process.wait(deadline_s)
    except subprocess.TimeoutExpired:
        process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
    return None


def report(name: str, folder: Path, code: int | None) -> bool:
    """Print a run's figures, or the end of its output; returns whether it is as it should be."""
    if code != 0:
        print(f"={name:<24} {'took too long' if code is None else f'failed ({code})'}", flush=True)
        print(*(folder / f"{name}.log").read_text(errors="replace").splitlines()[-25:], sep="\n", flush=True)
        return False
    rows = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    newest = {key: value for row in rows for key, value in row.items()}
    names = ("reward/mean", "mismatch/logprob_abs_diff", "mismatch/kl", "timing_s/update_actor", "perf/throughput")
    figures = [f"{key}={newest[key]:.4g}" for key in names if key in newest]
    print(
        f"={name:<24} steps={len(rows)}",
        *figures,
        f"gb={newest.get('perf/max_memory_allocated_gb', 0):.3g}",
        flush=True,
    )
    differences = [row["mismatch/logprob_abs_diff"] for row in rows if "mismatch/logprob_abs_diff" in row]
    if name == "exact" and any(differences):
        print(f"  generator and trainer differ in exact mode: {differences}")
        return False
    return True


def run(name: str, folder: Path) -> bool:
    """Start a run and wait for it; returns whether it is as it should be."""
    steps = NUM_STEPS.get(name, 6) if HAS_GPU else 2
    code = finish(start(name, folder, words_of(name, folder, steps)), DEADLINE_S)
    if name == "resumed" and code == 0:
        code = finish(start(name, folder, [*words_of(name, folder, steps + 2), "run.resume=auto"]), DEADLINE_S)
    return report(name, folder, code)


def main(folder: Path, names: Sequence[str]) -> int:
    """The runs, some side by side."""
    folder.mkdir(parents=True, exist_ok=True)
    missing_parts(read_recipe(RECIPE, []))
    if "larger" in names:
        size = "0.5b" if HAS_GPU else "5m"
        made = Path(os.environ.get("POLICIES", folder)) / size
        source = made if made.is_dir() else build(size, folder)
        (folder / "policy").mkdir(exist_ok=True)
        for file in source.iterdir():
            (folder / "policy" / file.name).symlink_to(file.resolve())
        character_tokenizer(sort_digits.CHARACTERS).save_pretrained(folder / "policy")
    sort_digits.write_data(folder / "prompts.jsonl", 256, 0)
    sort_digits.write_data(folder / "questions.jsonl", 16, 1)
    with ThreadPoolExecutor(SIDE_BY_SIDE) as threads:
        results = list(threads.map(run, names, [folder] * len(names)))
    return 0 if all(results) else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:] or (list(RUNS) if HAS_GPU else ["exact", "larger", "resumed"])))
