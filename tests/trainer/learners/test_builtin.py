"""The built-in learner: its checkpoints name the base that was loaded, and a run that continues needs nothing else."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from support.actors import recipe_of
from support.closing import at_end
from support.in_memory import MemoryFleet, MemoryNetwork
from support.policies import tiny_policy

from headrace.comm.shared_memory import Segment
from headrace.trainer.learners.builtin import ActorLearner
from headrace.trainer.learners.state_copies import StateCopies
from headrace.trainer.policy.adapter_files import keep_start
from headrace.trainer.policy.checkpoint_files import weights_digest
from headrace.trainer.policy.model import load_tokenizer


def learner_of(base: Path, folder: Path, **settings: object) -> ActorLearner:
    recipe = recipe_of(base, **{"lora__rank": 2, "run__dir": folder} | settings)
    learner = ActorLearner(MemoryFleet.join_network(MemoryNetwork(), "actor", 0, settings=recipe.comm), recipe)
    at_end(learner.close)
    return learner


def test_a_checkpoint_names_the_base_that_was_loaded_though_its_files_changed_since(tmp_path: Path):
    base, folder = tiny_policy(tmp_path), tmp_path / "step_1"
    learner, digest = learner_of(base, tmp_path), weights_digest(base)
    write = learner.stage()
    (base / "model.safetensors").unlink()
    write(folder)
    learner.restore(folder)
    with safe_open(folder / "adapter" / "adapter_model.safetensors", framework="pt") as file:
        assert digest in file.metadata().values()


@pytest.mark.parametrize("form", ["text", "file", "tokenizer", ""])
def test_the_exported_tokenizer_has_the_chat_template_of_the_run(tmp_path: Path, form: str):
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    (tmp_path / "own.jinja").write_text(template)
    setting = {"text": template, "file": str(tmp_path / "own.jinja")}.get(form, form)
    base = tiny_policy(tmp_path)
    exported = load_tokenizer(learner_of(base, tmp_path, data__chat_template=setting).export())
    assert exported.chat_template == (template if form in ("text", "file") else load_tokenizer(base).chat_template)


def test_the_last_weights_are_exported_when_their_checkpoint_was_given_up(tmp_path: Path):
    learner = learner_of(tiny_policy(tmp_path), tmp_path)
    write, folder = learner.stage(), tmp_path / "checkpoints" / "step_0"
    assert (Path(learner.export()) / "model.safetensors").exists(), "nothing was written yet"
    write(folder)
    exported = (folder / "hf" / "model.safetensors").stat().st_ino
    learner.export()
    assert (folder / "hf" / "model.safetensors").stat().st_ino == exported, "the checkpoint has it"


def test_an_actor_starts_again_without_the_adapter_that_its_run_began_with(tmp_path: Path):
    base, folder, run = tiny_policy(tmp_path), tmp_path / "step_1", tmp_path / "run"
    learner_of(base, tmp_path).stage()(folder)
    run.mkdir()
    settings = {"lora__path": folder / "adapter"}
    learner = learner_of(base, run, **settings)
    keep_start(learner.recipe.run.dir, learner.recipe.lora)
    (run / "journal.jsonl").touch()
    shutil.rmtree(folder)
    learner_of(base, run, **settings)


@pytest.mark.parametrize("rank", [0, 2])
def test_the_export_of_a_checkpoint_has_the_weights_of_its_step_while_training_goes_on(tmp_path: Path, rank: int):
    learner, folder = learner_of(tiny_policy(tmp_path), tmp_path, lora__rank=rank), tmp_path / "step_0"
    expected = {name: tensor.detach().float().clone() for name, tensor in learner.policy.weights().items()}
    write = learner.stage()
    with torch.no_grad():
        for parameter in learner.policy.model.parameters():
            parameter.add_(1)
    write(folder)
    with safe_open(folder / "hf" / "model.safetensors", framework="pt") as file:
        names = [*file.keys()]
        assert len(names) > 5
        for name in names:
            torch.testing.assert_close(file.get_tensor(name).float(), expected[name])


def test_a_checkpoint_that_cannot_be_written_releases_the_copy_that_it_was_to_be_written_from(tmp_path: Path):
    learner, folder = learner_of(tiny_policy(tmp_path), tmp_path), tmp_path / "step_0"
    learner.copies = copies = StateCopies(Segment.create_anonymous("copies"), learner.state, learner.group)
    write = learner.stage()
    assert copies._held
    folder.touch()  # not a folder
    with pytest.raises(Exception, match="step_0"):
        write(folder)
    assert not copies._held
    folder.unlink()
    uncalled = learner.stage()
    assert copies._held
    del uncalled
    assert not copies._held
    newer = learner.stage()
    del write  # its hold has ended before
    assert newer and copies._held
