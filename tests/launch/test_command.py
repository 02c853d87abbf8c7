"""The command `headrace`: its commands, its mistakes, and how little it imports."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from support.source_tree import MODULES

import headrace
from headrace.comm.errors import DiskFull, SettingError, StoreGone
from headrace.launch.command import COMMANDS, main
from headrace.launch.command_line import CommandParser, exit_code
from headrace.launch.config.arguments import Arguments
from headrace.launch.recipes.names import find_recipe, recipes, summary_of

PATIENCE_S = 120.0
LARGE = {"torch", "transformers", "tokenizers", "safetensors", "tensorboard", "matplotlib", "datasets", "numpy"}


def call(*words: str, options: Sequence[str] = ()) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, *options, "-m", "headrace", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


def test_every_command_is_a_function_of_a_module_and_describes_itself(capsys):
    for name, command in COMMANDS.items():
        assert f"launch.{command.module.partition(':')[0]}" in MODULES
        assert main([name, "--help"]) == 0
        assert f"usage: headrace {'run' if name == 'quickstart' else name}" in capsys.readouterr().out


def test_no_words_and_help_list_the_commands(capsys):
    assert main([]) == main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(f"  {name} " in text and command.summary in text for name, command in COMMANDS.items())
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"headrace {headrace.__version__}\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["rnu"], "no command 'rnu'; the nearest is run; --help lists them"),
        (["train"], "no command 'train'; there are run, quickstart, "),
        (["--vresion"], "unknown option --vresion, the nearest is --version; --help lists the options"),
        (["run", "--dryrun"], "unknown option --dryrun, the nearest is --dry-run; --help lists the options"),
        (["run", "quikstart"], "no recipe 'quikstart': the nearest is quickstart; `headrace run --list` says what each does"),
        (["run", "--gpus=8", "--dry-run"], "--gpus=8 is not COUNTxGB, the GPUs of a host, such as --gpus=8x80"),
        (["run", "--try", "5", "calculator"], "--try 5: write --try=5"),
        (["run", "quickstart", "--master-addr", "a"], "--master-addr=a needs --nnodes, the number of hosts"),
        (["run", "--nnodes"], "argument --nnodes: expected one argument; --help lists the options"),
        (["run", "quickstart", "--dry-run", "--nproc-per-node=3"], "= 4, but torchrun started 3 ranks"),
        (["run", "quickstart", "--nproc-per-node=3"], "= 4, but torchrun started 3 ranks"),
        (["status"], "required: RUN_FOLDER|HOST:PORT; --help lists the options"),
        (["ctl", "runs/x", "pause"], "invalid choice: 'pause'"),
        (["ctl", "runs/x", "drain"], "drain needs the name of a rollout; --help"),
        (["ctl", "runs/x", "stop", "rollout-1"], "stop takes no rollout; --help"),
        (["status", "runs/x", "now"], "one word too many: now; --help"),
        (["audit", "nowhere"], "nowhere is not the folder of a run"),
        (["plan", "nowhere"], "no recipe 'nowhere': there are"),
        (["plan", "nowhere.yaml", "--step", "3"], "unknown option --step, the nearest is --steps"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_and_exit_code_2(words: list[str], message: str, tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("headrace.launch.recipes.parts.make_policy", lambda folder, *_: folder.mkdir())
    assert main(words) == 2
    said = capsys.readouterr().err
    assert said.startswith("headrace: error: ") and said.count("\n") == 1
    assert message in said


@pytest.mark.parametrize(
    "words",
    [["--help"], *([name, "--help"] for name in ("run", "status", "audit", "eval", "numerics", "push"))],
    ids="-".join,
)
def test_a_page_of_help_imports_no_large_library(words: list[str]):
    done = call(*words, options=["-X", "importtime"])
    loaded = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert done.returncode == 0 and "headrace" in loaded
    assert not loaded & LARGE


def test_a_reader_that_leaves_early_sees_no_traceback():
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "headrace", "run", "--list"]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, timeout=PATIENCE_S, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_an_output_that_cannot_be_written_is_no_mistake_in_a_setting(unbuffered: str):
    command = [sys.executable, "-m", "headrace", "run", "--list"]
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            command, env=environment, stdout=full, stderr=subprocess.PIPE, text=True, timeout=PATIENCE_S, check=False
        )
    assert done.returncode in (1, 2) and done.stderr.count("\n") == 1
    assert "the output" in done.stderr and "No space left on device" in done.stderr and "is full" not in done.stderr


def test_the_exit_code_of_a_run_counts_even_if_its_reader_has_left(tmp_path: Path):
    (tmp_path / "summary.json").write_text('{"status": "finished", "exit_code": 0}')
    program = """
import sys
from pathlib import Path
from types import SimpleNamespace
from headrace.comm.disk import say
from headrace.launch.command_line import exit_code
from headrace.launch.start import _end_of_run
def run():
    say("a line")
    torchrun = SimpleNamespace(lost_folder="", received=0)
    return _end_of_run(Path(sys.argv[1]), torchrun, 0, is_first=True, with_trace=False)
sys.exit(exit_code(run))
"""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, timeout=PATIENCE_S, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_wrong_option_under_torchrun_is_one_line_of_the_first_rank():
    """`refuse_start` also ends torchrun, before it prints a page of its own (test_agent.py)."""
    for rank, line in (("0", "headrace: error: unknown option --dryrun, the nearest is --dry-run"), ("1", "")):
        ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        command = [sys.executable, "-m", "headrace.launch.run", "quickstart", "--dryrun"]
        done = subprocess.run(
            command, env=os.environ | ranks, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
        assert done.returncode == 2
        assert done.stderr.partition(";")[0].rstrip() == line and done.stderr.count("\n") == (rank == "0")


def test_errors_become_exit_codes(capsys):
    def fails(error: BaseException) -> int:
        def command() -> int:
            raise error

        return exit_code(command)

    assert exit_code(lambda: None) == 0 and exit_code(lambda: 3) == 3
    assert fails(SettingError("run.dir: no")) == 2
    assert fails(StoreGone("it is gone")) == 1
    assert fails(DiskFull("no room")) == 1
    assert fails(KeyboardInterrupt()) == 130
    assert (
        capsys.readouterr().err
        == "headrace: error: run.dir: no\nheadrace: error: it is gone\nheadrace: error: no room\n"
    )
    with pytest.raises(ValueError, match="a bug"):
        fails(ValueError("a bug"))


def test_an_option_is_not_abbreviated():
    parser = CommandParser("x")
    parser.add_argument("--steps")
    with pytest.raises(SettingError, match="the nearest is --steps"):
        parser.parse_args(["--step=3"])


def test_words_may_stand_in_any_order_and_options_have_torchruns_two_forms():
    first = Arguments.parse(["a.yaml", "run.seed=1", "--nnodes", "2", "--node_rank=1", "run.steps=3"])
    assert first == Arguments.parse(["--node-rank", "1", "run.seed=1", "a.yaml", "--nnodes=2", "run.steps=3"])
    assert (first.recipe, first.overrides) == ("a.yaml", ["run.seed=1", "run.steps=3"])
    assert first.hosts == {"nnodes": "2", "node-rank": "1"}


def test_a_recipe_may_be_in_a_folder_whose_name_has_an_equals_sign(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    long = f"data.chat_template={'x' * 5000}"
    for recipe in ("runs/lr=1e-5/config.yaml", "./lr=1e-5.yaml", f"{tmp_path}/lr=1/missing.yaml"):
        found = Arguments.parse(["run.seed=1", recipe, "run.dir=runs/lr=1e-5", long])
        assert (found.recipe, found.overrides) == (recipe, ["run.seed=1", "run.dir=runs/lr=1e-5", long])
    assert Arguments.parse(["lr=1/config.yaml"]).recipe is None
    (tmp_path / "lr=1").mkdir()
    (tmp_path / "lr=1" / "config.yaml").touch()
    assert Arguments.parse(["lr=1/config.yaml"]).recipe == "lr=1/config.yaml", "as the launcher names it to the ranks"


def test_a_recipe_has_a_name_and_says_what_it_does(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "quickstart").write_text("run: {steps: 1}\n")
    for name, path in recipes().items():
        assert find_recipe(name) == str(path)
        assert len(summary_of(path)) > 20 and path.read_text().startswith("# ")
    assert find_recipe("./quickstart") == "./quickstart"
    assert find_recipe("quickstart.yml") == "quickstart.yml"
    (tmp_path / "mine").touch()
    with pytest.raises(SettingError, match="write ./mine for the file here"):
        find_recipe("mine")
