"""The words of `headrace replay`: the run or the pack, its steps, its variants, and the settings that may differ."""

from pathlib import Path

import pytest
from support.actors import recipe_of
from support.policies import tiny_policy
from support.trained_run import stale_batch, trained_run

from headrace.launch.report.replay import main


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of three steps with a checkpoint after the first, which has been moved since."""
    home = tmp_path_factory.mktemp("home")
    policy = tiny_policy(home / "policy", "qwen3")
    recipe = recipe_of(
        policy, run__dir=home / "before", batch__prompts_per_step=2, sampling__max_new_tokens=16, model__dtype="float32"
    )
    trained_run(recipe, [[stale_batch(step, number, total=2) for number in range(2)] for step in range(3)], [1])
    return (home / "before").rename(home / "run")


def test_a_run_is_replayed_where_its_folder_is_now(run_dir: Path, capsys: pytest.CaptureFixture[str]):
    assert main([str(run_dir)]) == 0
    assert "3 steps replayed, 0 of them differ" in capsys.readouterr().out
    assert main([str(run_dir), "--steps", "2"]) == 0
    assert "1 steps replayed, 0 of them differ" in capsys.readouterr().out


def test_a_step_that_differs_is_told_and_ends_with_1(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    metrics = run_dir / "metrics.jsonl"
    before = metrics.read_text()
    metrics.write_text(before.replace('"actor/grad_norm": ', '"actor/grad_norm": 1', 1))
    assert main([str(run_dir)]) == 1
    assert "actor/grad_norm 1" in (said := capsys.readouterr().out) and "1 of them differ" in said
    metrics.write_text(before)


def test_variants_are_told_side_by_side_and_those_without_effect_are_warnings(run_dir: Path, capsys):
    words = ["--with", "algorithm.loss=gspo algorithm.proximal=rollout", "--with", "algorithm.loss=gspo"]
    assert main([str(run_dir), "--steps", "2-3", *words]) == 0
    said = capsys.readouterr()
    assert "variant 2: algorithm.loss=gspo\n" in said.out and said.out.count("variant 2  ") == 2
    assert said.err.count("warning") == 1
    assert 'warning: --with "algorithm.loss=gspo": algorithm.loss=gspo: no effect, since' in said.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "name one folder of a run, or one pack, not none"),
        (["RUN", "RUN"], "name one folder of a run, or one pack, not"),
        (["nowhere"], "nowhere is neither the folder of a run, which has a config.yaml, nor a pack"),
        (["RUN", "--steps", "two"], "--steps two: write one step"),
        (["RUN", "--steps", "0"], "--steps 0: the run in RUN has trained steps 1 to 3"),
        (["RUN", "--steps", "4"], "--steps 4: the run in RUN has trained steps 1 to 3"),
        (["RUN", "--steps", "3-2"], "--steps 3-2: the run in RUN has trained steps 1 to 3"),
        (["RUN", "--steps", "3-4"], "--steps 3-4: the run in RUN has trained steps 1 to 3"),
        (["RUN", "--with", "sampling.temperature=2"], '--with "sampling.temperature=2": sampling.temperature cannot be another one'),
        (["RUN", "--with", "algorithm.loss=clip reward.path=x"], "reward.path cannot be another one: the run drew and rewarded"),
        (["RUN", "--with", "gspo"], "--with \"gspo\": 'gspo' is not an override"),
        (["RUN", "--with", "algorithm.los=gspo"], "unknown setting 'algorithm.los'"),
        (["RUN", "--with", "algorithm.loss=own"], "algorithm.loss=own is not allowed"),
        (["RUN", "--with", "algorithm.loss=none.py:loss"], 'loss=none.py:loss": algorithm.loss: cannot read'),
        (["RUN", "--with", "algorithm.kl_in=reward"], "algorithm.kl_in=reward has no effect while"),
        (["RUN", "--with", "algorithm.loss='gspo"], "No closing quotation"),
        (["RUN", "algorithm.loss=gspo"], 'to compare with it, write --with "algorithm.loss=gspo"'),
        (["RUN", "run.seed=3"], "run.seed=3: a replay trains the steps as the run did; only model.path"),
        (["RUN", "--checkpoint", "x"], "--checkpoint: only with a pack"),
        (["RUN", "--without-weights"], "--without-weights: only with --pack"),
        (["RUN/config.yaml"], "is not a whole pack"),
        (["RUN/config.yaml", "--steps", "2"], "--steps: RUN/config.yaml is a pack, which has one step"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(run_dir: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    assert main([word.replace("RUN", str(run_dir)) for word in words]) == 2
    said = capsys.readouterr()
    assert message.replace("RUN", str(run_dir)) in said.err and said.err.count("\n") == 1


def test_a_step_is_packed_and_the_pack_is_replayed(run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    pack = tmp_path / "pack"
    assert main([str(run_dir), "--steps", "3", "--pack", str(pack)]) == 0
    assert f"step 3 is packed in {pack} (" in capsys.readouterr().out
    assert main([str(pack)]) == 0
    assert "1 steps replayed, 0 of them differ" in capsys.readouterr().out
    assert main([str(pack), "model.dtype=bfloat16"]) == 1, "on the same machine every bit counts"
    assert "warning: model.dtype=bfloat16" in capsys.readouterr().err
    assert main([str(run_dir), "--steps", "2", "--pack", str(tmp_path / "small"), "--without-weights"]) == 0
    checkpoint = run_dir / "checkpoints" / "step_1"
    words = [str(tmp_path / "small"), "--checkpoint", str(checkpoint)]
    capsys.readouterr()
    assert main(words) == 2
    assert "model.path: the run began with its sender's folder qwen3, which is not" in capsys.readouterr().err
    assert main([*words, f"model.path={run_dir.parent / 'policy' / 'qwen3'}"]) == 0
