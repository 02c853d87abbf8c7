"""The command line: mistakes, the help page, the dry run, the ranks of torchrun."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from support.policies import tiny_policy

from headrace.comm.recipe import RunSettings
from headrace.launch.config.checks.recipe import check_recipe, check_run_folder
from headrace.launch.config.device_defaults import multiplies_bfloat16
from headrace.launch.config.gpus import Gpus
from headrace.launch.config.load import read_recipe
from headrace.launch.lab.warm_up import WARM_UP
from headrace.launch.processes.rank import prepare
from headrace.launch.processes.secret import SECRET_FILE
from headrace.launch.processes.store_address import FIND_S
from headrace.launch.run import main
from headrace.relay.journal.journal import Journal

PATIENCE_S = 240.0
REWARD = "def reward(prompts, completions, completion_ids, **columns):\n    return [1.0] * len(completions)\n"


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_policy(tmp_path_factory.mktemp("policy"), "llama")


@pytest.fixture
def words(tmp_path: Path, run_dir: Path, policy: Path) -> dict[str, str]:
    """A valid command line, as settings."""
    (tmp_path / "rewards.py").write_text(REWARD)
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "say a"}\n{"prompt": "say b"}\n')
    (tmp_path / "recipe.yaml").write_text("run: {steps: 2}\n")
    return {
        "run.dir": str(run_dir),
        "model.path": str(policy),
        "data.path": str(tmp_path / "prompts.jsonl"),
        "reward.path": f"{tmp_path / 'rewards.py'}:reward",
    }


class Answer(NamedTuple):
    returncode: int
    stdout: str
    stderr: str
    imports: str


def call(*words: str, **environment: str) -> "Answer":
    command = [sys.executable, "-X", "importtime", "-m", "headrace.launch.run", *words]
    done = subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    return Answer(done.returncode, done.stdout, *_split(done.stderr))


def _split(errors: str) -> tuple[str, str]:
    """The messages, and the report of imports."""
    lines = errors.splitlines(keepends=True)
    imports = [line for line in lines if line.startswith("import time:")]
    return "".join(line for line in lines if line not in imports), "".join(imports)


def as_words(settings: dict[str, str]) -> list[str]:
    return [f"{key}={value}" for key, value in settings.items()]


def broken(file: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / file).write_text(text)


MISTAKES: list[tuple[str, dict[str, str], Callable[[Path], object] | None, str]] = [
    ("an unknown key", {"run.stpes": "3"}, None, "the nearest is 'run.steps'"),
    ("no model", {"model.path": ""}, None, "model.path is not set"),
    ("a missing model", {"model.path": "/no/such/folder"}, None, "model.path: /no/such/folder does not exist"),
    ("a missing data file", {"data.path": "/no/such.jsonl"}, None, "data.path: /no/such.jsonl does not exist"),
    ("no prompt column", {}, broken("prompts.jsonl", '{"question": "x"}\n'), "has no `prompt` column; it has question"),
    ("data that is not JSON", {}, broken("prompts.jsonl", '{"prompt": "x"}\nhello\n'), "data.path: {folder}/prompts.jsonl:2"),
    ("an empty data file", {}, broken("prompts.jsonl", "\n"), "data.path: {folder}/prompts.jsonl has no rows"),
    ("a prompt that is too long", {}, broken("prompts.jsonl", json.dumps({"prompt": "ab " * 999})), "data.too_long: prompt 1"),
    ("a missing reward file", {"reward.path": "/no/such.py:f"}, None, "reward.path: cannot read /no/such.py"),
    ("a missing reward function", {"reward.path": "{folder}/rewards.py:f"}, None, "has no function 'f'; it defines reward"),
    ("a reward without a function", {"reward.path": "x.py"}, None, "reward.path: 'x.py' is not of the form FILE.py:FUNCTION"),
    ("a reward file that is not Python", {}, broken("rewards.py", "def reward(:"), "rewards.py is not valid Python (line 1"),
    ("a missing engine", {"rollout.engine": "{folder}/rewards.py:Engine"}, None, "rollout.engine: {folder}/rewards.py has no function 'Engine'"),
    ("a rate below a schedule's last", {"optimizer.lr_schedule": "polynomial", "optimizer.lr": "1e-7"}, None, "optimizer.lr: lr_schedule=polynomial"),
    ("a floor of another schedule", {"optimizer.min_lr_ratio": "0.1"}, None, "optimizer.min_lr_ratio: only with lr_schedule=cosine"),
    ("an update without a group", {"batch.updates_per_version": "99"}, None, "batch.updates_per_version: more than batch.prompts"),
    ("a warm-up without an end", {"optimizer.warmup_steps": "100", "optimizer.lr_schedule": "linear"}, None, "optimizer.warmup_steps"),
    ("an empty prompt", {}, broken("prompts.jsonl", '{"prompt": "x"}\n{"prompt": ""}\n'), "{folder}/prompts.jsonl:2 has an empty `prompt`"),
    ("a column that a reward needs", {}, broken("rewards.py", "def reward(solution_str, answer):\n    return 1.0"), "reward.path: reward needs 'answer', which is neither an argument of rewards nor a column; the first row of data.path has no column but the prompt"),
    ("a reward without a ground truth", {}, broken("rewards.py", "def reward(solution_str, ground_truth):\n    return 1.0"), "reward takes a ground truth, from a column ground_truth, answer or solution"),
    ("an argument of verl alone", {}, broken("rewards.py", "def reward(completion, ground_truth):\n    return 1.0"), "needs 'completion', which is neither an argument of rewards nor a column; the first row of data.path has no column but the prompt; the nearest is 'completions'"),
    ("a tool without hints", {"environment.tools": "[{folder}/tools.py:search]"}, broken("tools.py", 'def search(query):\n    "Finds."\n'), "environment.tools: the tool search has no type hint for its argument 'query'"),
    ("a tool without words", {"environment.tools": "[{folder}/tools.py:search]"}, broken("tools.py", "def search(query: str): ...\n"), "environment.tools: the tool search has no docstring"),
    ("chat without a template", {}, broken("prompts.jsonl", '{"prompt": [{"role": "user", "content": "x"}]}\n'), "chat_template"),
    ("a cache below one sequence", {"generator.kv_gb": "1e-6"}, None, "generator.kv_gb: 1e-06 GB does not hold one sequence of"),
    ("an unwritable run folder", {"run.dir": "/proc/run"}, None, "run.dir: cannot create /proc/run"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("settings", "spoil", "message"), [case[1:] for case in MISTAKES], ids=[c[0] for c in MISTAKES]
)
def test_a_mistake_is_one_message_and_exit_code_2(tmp_path: Path, words, settings, spoil, message, capsys):
    if spoil is not None:
        spoil(tmp_path)
    changed = words | {key: value.format(folder=tmp_path) for key, value in settings.items()}
    assert main([str(tmp_path / "recipe.yaml"), *as_words(changed)]) == 2
    said = capsys.readouterr()
    assert said.out.count("\n") <= 2 and "Traceback" not in said.out
    assert said.err.startswith("headrace: error: ") and said.err.count("\n") == 1
    assert message.format(folder=tmp_path) in said.err
    made = Path(words["run.dir"]).exists()
    if "recipe" not in message:
        assert main([str(tmp_path / "recipe.yaml"), *as_words(changed), "--dry-run"]) == 2
        assert message.format(folder=tmp_path) in capsys.readouterr().err
        assert Path(words["run.dir"]).exists() is made


@pytest.mark.parametrize(
    ("config", "setting", "message"),
    [
        ({"model_type": "gpt2"}, "run.seed=1", "model.path: model type 'gpt2' is not supported (supported: gemma, gemma2, "),
        ({"model_type": "llava", "text_config": {"model_type": "llama"}}, "run.seed=1", "model type 'llava' is not supported"),
        ({"attention_dropout": 0.1}, "run.seed=1", "model.path: llama with attention_dropout is not supported"),
        ({"quantization_config": {"quant_method": "awq"}}, "run.seed=1", "llama with quantized weights (quantization_config) awq"),
        ({"rope_scaling": {"type": "longrope"}}, "run.seed=1", "llama with rope type 'longrope'"),
        ({}, "algorithm.router_aux_coef=0.1", "algorithm.router_aux_coef: model type 'llama' has no experts"),
        ({"model_type": "gemma2"}, "generator.exact=true", "generator.exact is not available for model type 'gemma2'"),
    ],
)  # fmt: skip
@pytest.mark.parametrize("mode", [[], ["--dry-run"]])
def test_a_policy_that_cannot_be_computed_is_refused_before_a_process_starts(
    tmp_path: Path, words, config, setting, message, mode, capsys
):
    path = tiny_policy(tmp_path)
    file = path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"rope_parameters": None} | config))
    assert main([*as_words(words | {"model.path": str(path)}), setting, *mode]) == 2
    assert message in capsys.readouterr().err


def test_a_mistake_ends_the_program_without_a_traceback():
    done = call("nowhere.yaml")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "headrace: error: no recipe file 'nowhere.yaml'\n"


def test_a_run_folder_with_a_run_in_it_is_refused_unless_resumed(words, run_dir: Path, capsys):
    run_dir.mkdir()
    (run_dir / "journal.jsonl").touch()
    assert main(as_words(words)) == 2
    assert f"run.dir: {run_dir} holds a run already; set run.resume=auto" in capsys.readouterr().err


def test_a_run_that_is_under_way_keeps_its_folder(words, run_dir: Path, capsys):
    (run_dir / SECRET_FILE).parent.mkdir(parents=True)
    (run_dir / SECRET_FILE).write_text("its own")
    journal = Journal(run_dir / "journal.jsonl")
    assert main([*as_words(words), "run.resume=auto"]) == 2
    assert f"run.dir: a run is under way in {run_dir}; end it" in capsys.readouterr().err
    assert (run_dir / SECRET_FILE).read_text() == "its own"
    journal.close()
    check_run_folder(RunSettings(dir=str(run_dir), resume="auto"))


def test_help_imports_no_large_library():
    done = call("--help")
    assert done.returncode == 0 and "optimizer.lr=" in done.stdout
    loaded = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.imports.splitlines()}
    assert "headrace" in loaded
    assert not loaded & {"torch", "transformers", "tokenizers", "safetensors", "tensorboard", "matplotlib", "datasets"}


def test_ctl_tells_its_usage_without_torch():
    command = [sys.executable, "-X", "importtime", "-m", "headrace.launch.status.command"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    errors, imports = _split(done.stderr)
    assert done.returncode == 2 and "required: RUN_FOLDER|HOST:PORT, order; --help" in errors
    assert "torch" not in imports


def test_a_rate_that_ruins_a_large_policy_is_a_warning_and_of_an_adapter_a_much_higher_one(words, tmp_path, capsys):
    path = tiny_policy(tmp_path)
    config = json.loads((path / "config.json").read_text())
    for hidden, rate, rank, kind in (
        (64, "3e-4", 0, ""), (8192, "1e-5", 0, ""), (8192, "3e-4", 0, "all "),
        (8192, "1e-5", 8, ""), (8192, "2e-4", 8, ""), (8192, "3e-3", 8, "an adapter of"), (64, "3e-3", 8, ""),
    ):  # fmt: skip
        (path / "config.json").write_text(json.dumps(config | {"hidden_size": hidden, "intermediate_size": hidden}))
        given = [f"optimizer.lr={rate}", f"lora.rank={rank}"]
        assert main([*as_words(words | {"model.path": str(path)}), *given, "--dry-run"]) == 0
        errors = capsys.readouterr().err
        assert f"optimizer.lr={float(rate):g} is high for {kind}" in errors if kind else "is high for" not in errors


def test_a_file_that_hides_a_module_of_python_is_refused(words, tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("os.py", "time.py", "mine.py", "turtle.py"):  # loaded before the folder counts, or not at all
        (tmp_path / name).touch()
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    assert main([*as_words(words), "--dry-run"]) == 0
    (tmp_path / "random.py").touch()
    assert main([*as_words(words), "--dry-run"]) == 2
    assert "random.py in the present folder would be imported in place of" in capsys.readouterr().err
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    assert main([*as_words(words), "--dry-run"]) == 0


def test_a_dry_run_warns_of_a_type_that_is_slow_here_as_a_start_does(words, tmp_path: Path, monkeypatch, capsys):
    (tmp_path / "cpuinfo").write_text("flags : avx2\n")
    monkeypatch.setattr(multiplies_bfloat16, "__defaults__", (tmp_path / "cpuinfo",))
    monkeypatch.setattr(Gpus, "of_this_host", Gpus)
    for dtype in ("float32", "bfloat16"):
        assert main([*as_words(words), f"model.dtype={dtype}", "--dry-run"]) == 0
        assert ("model.dtype=bfloat16 is several times slower" in capsys.readouterr().err) is (dtype == "bfloat16")


def test_a_dry_run_prints_the_plan_without_torch_and_starts_nothing(words, run_dir: Path):
    done = call(*as_words(words), "roles.rollout=2", "sampling.max_new_tokens=8", "--dry-run", "--settings")
    assert done.returncode == 0
    for part in (
        "rank 3  host 0  relay-0 + hub",
        "128 trajectories a step",
        "epochs of 2 prompts",
        "parameters",
        "rollout: 2",
    ):
        assert part in done.stdout
    assert "torch" not in done.imports
    assert not run_dir.exists()


@pytest.mark.parametrize(
    ("given", "warning"),
    [
        (["--gpus=8x80"], "6 of 8 GPUs of a host have no rank and stay unused; raise roles.actor and roles.rollout"),
        (["--gpus=8x80", "roles.actor=2", "roles.rollout=6"], ""),
        (["--gpus=2x80"], ""),
        (["--gpus=1x80"], ""),
    ],
)
def test_gpus_without_a_rank_are_a_warning(words, capsys, given: list[str], warning: str):
    assert main([*as_words(words), *given, "--dry-run"]) == 0
    errors = capsys.readouterr().err
    assert warning in errors and ("stay unused" in errors) is bool(warning)


@pytest.mark.parametrize(("hosts", "warning"), [((7, 7), "2 of 8 GPUs of a host"), ((5, 9), ""), ((), "")])
def test_a_start_warns_of_gpus_that_no_rank_uses_on_any_of_its_hosts(words, monkeypatch, capsys, hosts, warning: str):
    monkeypatch.setattr(Gpus, "of_this_host", lambda: Gpus(tuple("01234567"), 80.0))
    monkeypatch.setenv("OMP_NUM_THREADS", "77")
    recipe = read_recipe(None, [*as_words(words), "roles.actor=4", "roles.rollout=8", "roles.relay=2"])
    prepare(recipe, hosts).close()
    errors = capsys.readouterr().err
    assert warning in errors and ("stay unused" in errors) is bool(warning)
    of_threads = next(line for line in errors.splitlines() if "OMP_NUM_THREADS=77" in line)
    assert "actor " in of_threads and ("rollout " in of_threads) is (hosts != (5, 9)), (
        "the first host has no rollout there"
    )


def test_a_resumed_run_waits_for_the_copies_that_the_run_before_still_writes(words, tmp_path: Path, monkeypatch):
    waited_for: list[tuple[Path, float, float]] = []
    monkeypatch.setattr("headrace.launch.processes.rank.wait_for_writers", lambda *args: waited_for.append(args))
    cases = (("never", (), None), ("auto", (), math.inf), ("auto", (3,), FIND_S / 2))
    for resume, hosts, longest_s in cases:
        recipe = read_recipe(
            None, [*as_words(words), f"run.dir={tmp_path / 'run'}", f"run.resume={resume}", "comm.deadline_s=7"]
        )
        prepare(recipe, hosts).close()
        assert waited_for == ([] if longest_s is None else [(tmp_path / "run", 7.0, longest_s)])
        waited_for.clear()
        (tmp_path / "run/summary.json").unlink(missing_ok=True)


def test_a_plan_says_how_many_epochs_the_rows_of_any_sized_data_are(words, tmp_path: Path, capsys):
    (tmp_path / "own.py").write_text("rows = [{'prompt': 'p', 'answer': 1}] * 5\n")
    words |= {"data.path": f"{tmp_path / 'own.py'}:rows", "run.steps": "2", "batch.prompts_per_step": "5"}
    assert main([*as_words(words), "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "2 steps = 10 groups\n" in said and "run.steps=2: 2.00 epochs of 5 prompts\n" in said
    assert main([*as_words(words), "data.weights=[1]", "--dry-run"]) == 0
    assert "epochs" not in capsys.readouterr().out, "sets with weights start again at different times"


def test_ranks_without_a_recipe_print_the_help_page_once_and_end_with_2():
    ranks = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    first, second = (call(RANK=rank, LOCAL_RANK=rank, **ranks) for rank in "01")
    assert (first.returncode, second.returncode, second.stdout, second.stderr) == (2, 2, "", "")
    assert "optimizer.lr=" in first.stdout
    assert first.stderr == "headrace: error: no recipe; name its file after headrace.launch.run\n"


@pytest.mark.parametrize("rank", ["0", "1"])
def test_under_torchrun_only_the_first_rank_prints_the_plan(words, rank: str):
    words["sampling.max_new_tokens"] = "8"
    done = call(*as_words(words), "--dry-run", RANK=rank, WORLD_SIZE="3", LOCAL_WORLD_SIZE="3")
    assert done.returncode == 0
    assert bool(done.stdout) is (rank == "0")


def test_the_rank_of_a_clusters_pod_is_not_one_of_torchrun(words, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main([*as_words(words), "--dry-run"]) == 0
    assert "rank 2  host 0  relay-0 + hub" in capsys.readouterr().out


def test_a_wrong_number_of_ranks_is_reported_once(words):
    ranks = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    first, second = (call(*as_words(words), RANK=rank, **ranks) for rank in "01")
    assert (first.returncode, second.returncode, second.stderr) == (2, 2, "")
    assert "torchrun started 2 ranks" in first.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--nnodes=2"], "--nnodes=2 needs --master-addr"),
        (["--nnodes", "2", "--node-rank", "2", "--master-addr", "h"], "--node-rank=2 must be below --nnodes=2"),
        (["--nnodes", "two", "--master-addr", "h"], "--nnodes=two is not a number"),
        (["--nnodes", "2", "--master-addr", "h", "roles.rollout=2"], "5 ranks, which 2 hosts (--nnodes) cannot share equally"),
        (["--nnodes", "2", "--master-addr", "h", "--nproc-per-node", "3"], "= 4, but torchrun started 6 ranks"),
        (["--hosts", "2"], "unknown option --hosts; --help lists the options"),
        (["--gpus=8x80"], "--gpus: only with --dry-run"),
        (["join=x", "--dry-run"], "join: the other options are not for a host that joins"),
        (["join=x", "--nnodes=2", "--master-addr=h"], "join: the other options are not for a host that joins"),
        (["join=x", "--try"], "join: the other options are not for a host that joins"),
        (["join=x", "--trace"], "join: the other options are not for a host that joins"),
        (["join=x"], "has no effect; all settings except roles.rollout and roles.relay come from the run's recipe"),
    ],
)  # fmt: skip
def test_hosts_that_do_not_fit_the_roles_are_refused_before_torchrun_starts(words, options, message, capsys):
    assert main([*as_words(words), *options]) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1


def test_the_warm_up_of_a_plan_has_room_for_any_schedule_of_the_learning_rate(words):
    long = {
        "run.steps": "500",
        "optimizer.lr_schedule": "cosine",
        "optimizer.min_lr_ratio": ".1",
        "optimizer.warmup_steps": "50",
    }
    check_recipe(read_recipe(None, as_words(words | long | WARM_UP)))


def test_a_dry_run_without_a_policy_prints_the_plan_and_says_so(words, capsys):
    assert main([*as_words(words | {"model.path": ""}), "--dry-run"]) == 2
    said = capsys.readouterr()
    assert "unknown: model.path is not set" in said.out and "error: model.path is not set" in said.err


def test_a_dry_run_prints_the_plan_alone_and_all_settings_on_request(words, capsys):
    assert main([*as_words(words), "--dry-run"]) == 0
    plan = capsys.readouterr().out
    assert plan.startswith("roles\n") and plan.count("\n") < 30 and "optimizer:" not in plan
    assert main([*as_words(words), "--dry-run", "--settings"]) == 0
    assert capsys.readouterr().out.startswith(plan[: plan.index("run.steps=")])
    assert main([*as_words(words), "--settings"]) == 2
    assert "--settings: only with --dry-run" in capsys.readouterr().err


def test_a_dry_run_with_data_that_ends_the_program_prints_the_plan_and_says_so(words, tmp_path: Path, capsys):
    (tmp_path / "own.py").write_text("import sys\n\n\nclass Rows(list):\n    def __len__(self):\n        sys.exit(3)\n")
    assert main([*as_words(words | {"data.path": f"{tmp_path / 'own.py'}:Rows"}), "--dry-run"]) == 2
    said = capsys.readouterr()
    assert said.out.startswith("roles\n") and "epochs" not in said.out
    assert "error: data.path: " in said.err and "SystemExit: 3 (" in said.err and "own.py:6)" in said.err


def test_a_dry_run_shows_the_ranks_of_several_hosts(words, capsys):
    assert main([*as_words(words), "roles.rollout=3", "--nnodes=2", "--master-addr=h", "--dry-run"]) == 0
    plan = capsys.readouterr().out
    assert "rank 2  host 0  relay-0 + hub" in plan and "rank 5  host 1  relay-1" in plan
