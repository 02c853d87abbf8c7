"""A checkpoint holds everything that training needs to continue bit for bit."""

import errno
import gc
import io
import os
import pickle
import shutil
import threading
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.policies import tiny_policy
from support.rank_threads import RankThreads
from support.small_disk import fill, small_disk
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING
from transformers import AutoModelForCausalLM

from headrace.comm.errors import SettingError
from headrace.comm.messages import GroupId, TrainBatch
from headrace.comm.messages.queue import GroupRef
from headrace.comm.recipe import CheckpointSettings, LoraSettings, ModelSettings, OptimizerSettings, Recipe
from headrace.relay.queue.batch import Batch
from headrace.relay.weights.copies_on_disk import CopiesOnDisk, CopyHead
from headrace.trainer import checkpoint
from headrace.trainer.actor_group import ActorGroup
from headrace.trainer.checkpoint import CheckpointWriter, load_state, save_state, staged
from headrace.trainer.checkpoint_reader import _MetadataUnpickler
from headrace.trainer.export import save_policy
from headrace.trainer.learners.builtin import Actor
from headrace.trainer.policy.model import load_tokenizer
from headrace.trainer.step_metrics import StepMetrics

ALONE = ActorGroup(rank=0, size=1, device=torch.device("cpu"), deadline_s=10)


@pytest.fixture(scope="module")
def policy_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_policy(tmp_path_factory.mktemp("policy"), "qwen3")


def actor_of(policy_dir: Path, rank: int = 0) -> Actor:
    torch.manual_seed(0)
    optimizer, lora = OptimizerSettings(lr=1e-3, warmup_steps=3), LoraSettings(rank=rank)
    return Actor(Recipe(model=ModelSettings(path=str(policy_dir)), optimizer=optimizer, lora=lora), ALONE)


def random_row(key: str) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(list(key.encode()))
    return {
        "prompt_ids": rng.integers(4, 99, 5).astype(np.int32),
        "response_ids": rng.integers(4, 99, 7).astype(np.int32),
        "rollout_logprobs": -4 * np.ones(7, dtype=np.float32),
        "loss_mask": np.ones(7, dtype=np.uint8),
        "truncated": np.zeros(1, dtype=np.uint8),
    }


def batch_of(step: int) -> Batch:
    """Two random trajectories of a prompt."""
    group = GroupRef(GroupId(0, step), [0, 1], [1, 1], [["relay-0#1"]] * 2, [step, step], [12, 12], [0.0, 1.0])
    rows = group.rows()
    taken = TrainBatch(step=step, first=0, total=1, groups=[group], metrics={})
    return Batch(taken, [rows], {row.key: random_row(row.key) for row in rows})


def train(actor: Actor, num_steps: int) -> list[float]:
    norms = []
    for step in range(actor.version, actor.version + num_steps):
        stats = StepMetrics()
        actor.accumulate(batch_of(step), stats)
        norms.append(actor.step(stats)["actor/grad_norm"])
    return norms


@pytest.mark.parametrize("rank", [0, 4])
def test_a_resumed_run_continues_bit_for_bit(policy_dir: Path, tmp_path: Path, rank: int):
    unbroken = actor_of(policy_dir, rank)
    train(unbroken, 4)
    expected = train(unbroken, 3)
    broken = actor_of(policy_dir, rank)
    train(broken, 4)
    random_number = torch.get_rng_state()
    save(broken, tmp_path)
    resumed = actor_of(policy_dir, rank)
    torch.manual_seed(99)
    load_state(resumed.state, tmp_path, is_alone=True)
    assert resumed.version == 4
    assert torch.equal(torch.get_rng_state(), random_number)
    assert train(resumed, 3) == expected
    for name, weight in unbroken.policy.weights().items():
        assert torch.equal(weight, resumed.policy.weights()[name]), name


@pytest.mark.parametrize("written_on", ["cpu", "gpu"])
def test_a_checkpoint_of_a_cpu_is_loaded_on_a_gpu_and_the_reverse(
    policy_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written_on: str
):
    before = actor_of(policy_dir)
    train(before, 2)
    numbers = {"gpu": torch.arange(16, dtype=torch.uint8)}
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: numbers["gpu"].clone())
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state: numbers.update(gpu=state))
    state = before.state.state_dict()
    if written_on == "gpu":
        state["rng"]["cuda"] = torch.zeros(16, dtype=torch.uint8)
    save_state(staged(state), tmp_path, team=None)
    resumed = actor_of(policy_dir)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: written_on == "cpu")
        line = load_state(resumed.state, tmp_path, is_alone=True)
    assert ("without a GPU" in line) is (written_on == "cpu") and "random numbers do not continue" in line
    assert torch.equal(numbers["gpu"], torch.arange(16, dtype=torch.uint8)), "the GPU's own numbers stay as they are"
    assert resumed.version == 2 and train(resumed, 2) == train(before, 2)


def test_a_checkpoint_of_the_same_kind_of_device_is_loaded_without_a_word(policy_dir: Path, tmp_path: Path):
    actor = actor_of(policy_dir)
    assert load_state(actor.state, save(actor, tmp_path), is_alone=True) == ""


def test_a_resumed_run_has_the_optimizers_settings_of_its_own_recipe(policy_dir: Path, tmp_path: Path):
    before = actor_of(policy_dir)
    train(before, 1)
    changed = OptimizerSettings(lr=1e-3, weight_decay=0.5, beta1=0.8, beta2=0.5, eps=1e-3)
    actor = Actor(Recipe(model=ModelSettings(path=str(policy_dir)), optimizer=changed), ALONE)
    load_state(actor.state, save(before, tmp_path), is_alone=True)
    found = [(group["weight_decay"], group["betas"], group["eps"]) for group in actor.updater.optimizer.param_groups]
    assert found == [(0.5, (0.8, 0.5), 1e-3), (0.0, (0.8, 0.5), 1e-3)]


def save(actor: Actor, folder: Path) -> Path:
    save_state(staged(actor.state.state_dict()), folder, team=None)
    return folder


def test_a_staged_checkpoint_does_not_follow_the_training_that_goes_on(policy_dir: Path, tmp_path: Path):
    actor, expected = actor_of(policy_dir), actor_of(policy_dir)
    train(actor, 2)
    copy = staged(actor.state.state_dict())
    train(actor, 3)
    save_state(copy, tmp_path, team=None)
    load_state(actor.state, tmp_path, is_alone=True)
    assert train(actor, 2) == train(expected, 4)[2:]


@pytest.mark.parametrize("is_tied", [True, False])
def test_a_checkpoint_has_nothing_of_the_weights_below_an_adapter(tmp_path: Path, is_tied: bool):
    actor = actor_of(tiny_policy(tmp_path, tie_word_embeddings=is_tied), rank=4)
    trained = {name for name, p in actor.policy.model.named_parameters() if p.requires_grad}
    assert set(actor.state.state_dict()["model"]) == trained
    with pytest.raises(SettingError, match=r"run\.resume.*does not fit this run"):
        load_state(actor.state, save(actor_of(tmp_path / "llama"), tmp_path / "whole"), is_alone=True)


def test_a_checkpoint_of_another_model_is_a_mistake_in_the_settings(policy_dir: Path, tmp_path: Path):
    path = save(actor_of(policy_dir), tmp_path / "step_0")
    other = actor_of(tiny_policy(tmp_path, "qwen3", hidden_size=32))
    with pytest.raises(SettingError, match=r"run\.resume.*step_0 does not fit this run"):
        load_state(other.state, path, is_alone=True)


def test_a_damaged_state_is_a_mistake_in_the_settings(policy_dir: Path, tmp_path: Path):
    actor = actor_of(policy_dir)
    data = next((save(actor, tmp_path) / "dcp").glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:5000])
    with pytest.raises(SettingError, match=r"run\.resume"):
        load_state(actor.state, tmp_path, is_alone=True)


class Touch:
    """Unpickled, it creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        return os.mkdir, (str(self.path),)


def test_metadata_that_would_run_code_is_refused_and_runs_nothing(policy_dir: Path, tmp_path: Path):
    actor = actor_of(policy_dir)
    metadata = save(actor, tmp_path / "step_0") / "dcp" / ".metadata"
    metadata.write_bytes(pickle.dumps([Touch(tmp_path / "ran"), pickle.loads(metadata.read_bytes())]))
    with pytest.raises(SettingError, match=r"step_0 does not fit this run: its metadata names posix\.mkdir, which"):
        load_state(actor.state, tmp_path / "step_0", is_alone=True)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("metadata", [b"", b"no pickle", pickle.dumps({"a": "dictionary"}), pickle.dumps(1)[:-1]])
def test_damaged_metadata_is_a_mistake_in_the_settings(policy_dir: Path, tmp_path: Path, metadata: bytes):
    actor = actor_of(policy_dir)
    (save(actor, tmp_path / "step_0") / "dcp" / ".metadata").write_bytes(metadata)
    with pytest.raises(SettingError, match=r"step_0 does not fit this run: its metadata"):
        load_state(actor.state, tmp_path / "step_0", is_alone=True)


def test_an_optimizers_setting_that_would_run_code_is_refused_and_runs_nothing(policy_dir: Path, tmp_path: Path):
    actor = actor_of(policy_dir)
    state = actor.state.state_dict()
    state["optimizer"]["param_groups"][0]["lr"] = Touch(tmp_path / "ran")
    save_state(state, tmp_path / "step_0", team=None)
    with pytest.raises(
        SettingError, match=r"step_0 does not fit this run: its trainer\.optimizer\S*lr names posix\.mkdir"
    ):
        load_state(actor.state, tmp_path / "step_0", is_alone=True)
    assert not (tmp_path / "ran").exists()


class Disk:
    """A writer of checkpoints whose writes wait for the test, and what it has reported."""

    def __init__(self, run_dir: Path, *, deadline_s: float = 60, is_lead: bool = True, **settings: Any) -> None:
        self.may_write = threading.Event()
        self.reported: list[int] = []
        self.writer = CheckpointWriter(
            run_dir,
            CheckpointSettings(**settings),
            deadline_s=deadline_s,
            is_lead=is_lead,
            on_written=lambda step, path: self.reported.append(step),
        )

    def write(self, folder: Path) -> None:
        assert self.may_write.wait(60)
        (folder / "dcp").mkdir()

    def fail(self, folder: Path) -> None:
        raise OSError(5, "Input/output error")


def test_training_goes_on_while_a_checkpoint_is_written_and_it_is_reported_when_whole(tmp_path: Path):
    disk = Disk(tmp_path)
    disk.writer.begin(4, lambda: disk.write)
    disk.writer.check()
    assert (disk.reported, disk.writer.folder.whole()) == ([], {})
    disk.may_write.set()
    disk.writer.close()
    assert (disk.reported, [*disk.writer.folder.whole()]) == ([4], [4])


def test_a_checkpoint_replaces_the_copies_that_a_failed_run_has_left_once_the_journal_has_it(tmp_path: Path):
    copies, disk = CopiesOnDisk(tmp_path), Disk(tmp_path)
    for step in (3, 4, 5):
        copies.write(0, CopyHead(step, "0", 1, 100, 1, "1"), np.zeros(100, np.uint8))
    disk.may_write.set()
    for step, left in ((4, [3, 4, 5]), (6, [5])):
        disk.writer.begin(step, lambda: disk.write)
        disk.writer.close()
        assert copies.steps() == left
        disk.writer.folder.set_latest(step)


def test_copies_that_cannot_be_removed_cost_the_trainer_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    disk, failed = Disk(tmp_path), list[Iterable[int]]()

    def fail(_: CopiesOnDisk, steps: Iterable[int]) -> None:
        failed.append(steps)
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    monkeypatch.setattr(CopiesOnDisk, "remove", fail)
    disk.may_write.set()
    disk.writer.begin(4, lambda: disk.write)
    disk.writer.close()
    assert disk.reported == [4] and failed


def test_no_rank_ends_before_rank_0_has_sealed_the_checkpoint(tmp_path: Path):
    ranks = RankThreads(2)
    disks = [Disk(tmp_path, is_lead=rank == 0) for rank in range(2)]
    for disk in disks:
        disk.writer.begin(4, lambda disk=disk: disk.write if disk is disks[0] else lambda _: None)
    threading.Timer(0.2, disks[0].may_write.set).start()

    def end(rank: int) -> list[int]:
        disks[rank].writer.close(ranks.group(rank))
        return [*disks[rank].writer.folder.whole()]

    with ThreadPoolExecutor(2) as pool:
        assert [*pool.map(end, range(2))] == [[4], [4]]


def test_the_state_is_copied_when_the_copy_before_is_written(tmp_path: Path):
    disk, written = Disk(tmp_path), list[list[int]]()

    def stage() -> Callable[[Path], None]:
        written.append([*disk.reported])
        threading.Timer(0.01, disk.may_write.set).start()
        return disk.write

    for step in (1, 2):
        disk.writer.begin(step, stage)
    disk.writer.close()
    assert written == [[], [1]], "host memory has room for one copy"


def test_a_checkpoint_that_is_given_up_leaves_nothing_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    disk, writes = Disk(tmp_path), list["weakref.ref[Callable[[Path], None]]"]()

    def full(_: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    def stage() -> Callable[[Path], None]:
        def write(folder: Path) -> None:
            full(folder)

        writes.append(weakref.ref(write))
        return write

    monkeypatch.setattr(checkpoint, "raise_if_unwritable", full)
    gc.disable()
    try:
        disk.writer.begin(4, stage)
        disk.writer.close()
        assert writes[0]() is None, "without a collection of cycles"
    finally:
        gc.enable()


def test_one_checkpoint_is_written_at_a_time_and_old_ones_are_removed(tmp_path: Path):
    disk = Disk(tmp_path, keep=1)
    disk.may_write.set()
    for step in (1, 2, 3):
        disk.writer.begin(step, lambda: disk.write)
    disk.writer.close()
    assert (disk.reported, [*disk.writer.folder.whole()]) == ([1, 2, 3], [3])


def test_the_best_checkpoint_by_an_evaluation_stays_when_its_score_comes_later(tmp_path: Path):
    disk = Disk(tmp_path, keep=1, best="eval/a/avg@1")
    disk.may_write.set()
    for step in (2, 4, 6):
        disk.writer.begin(step, lambda: disk.write)
    disk.writer.close()
    whole = disk.writer.folder.whole
    assert [*whole()] == [2, 4, 6], "each may be the best"
    for step, value in ((2, 0.1), (4, 0.9), (6, 0.3)):
        disk.writer.score({"eval/version": step, "eval/a/avg@1": value})
    disk.writer.check()
    assert {step: manifest.score for step, manifest in whole().items()} == {4: 0.9, 6: 0.3}
    assert (tmp_path / "checkpoints" / "best").read_text() == "step_4"


def test_the_error_of_a_writer_is_raised_in_the_trainers_loop(tmp_path: Path):
    disk = Disk(tmp_path)
    disk.writer.begin(4, lambda: disk.fail)
    with pytest.raises(OSError, match="Input/output"):
        disk.writer.close()
    with pytest.raises(OSError, match="Input/output"):
        disk.writer.check()
    assert (disk.reported, disk.writer.folder.whole()) == ([], {})


def test_a_folder_that_cannot_be_made_is_not_taken_for_a_full_disk(tmp_path: Path):
    disk = Disk(tmp_path)
    (tmp_path / "checkpoints").write_text("a file")
    disk.writer.begin(4, lambda: disk.write)
    with pytest.raises(NotADirectoryError):
        disk.writer.close()


def test_a_disk_that_was_full_for_a_moment_costs_one_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    disk = Disk(tmp_path)

    def fail(folder: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    disk.writer.begin(4, lambda: fail)
    disk.writer.close()
    assert disk.writer.folder.whole() == {} and "this checkpoint is given up" in capsys.readouterr().out


def test_a_checkpoint_that_is_removed_while_its_size_is_read_costs_the_trainer_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    disk, scandir, given_up = Disk(tmp_path), os.scandir, list[Path]()

    def list_what_is_gone(path: str | Path) -> Any:
        if threading.current_thread() is threading.main_thread() and not given_up:
            given_up.append(Path(path))
            shutil.rmtree(path)
            disk.may_write.set()
        return scandir(path)

    is_begun = threading.Event()

    def write(folder: Path) -> None:
        is_begun.set()
        assert disk.may_write.wait(60)
        folder.mkdir()
        disk.write(folder)

    disk.writer.begin(4, lambda: write)
    assert is_begun.wait(60)
    monkeypatch.setattr(os, "scandir", list_what_is_gone)
    disk.writer.close()
    assert given_up == [disk.writer.folder.path(4)] and disk.reported == [4]


def test_the_scores_that_are_on_the_disk_are_not_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    disk, written = Disk(tmp_path, keep=9, best="eval/a/avg@1"), list[int]()
    set_score = disk.writer.folder.set_score
    monkeypatch.setattr(
        disk.writer.folder, "set_score", lambda step, score: written.append(step) or set_score(step, score)
    )
    disk.may_write.set()
    disk.writer.score({"eval/version": 6, "eval/a/avg@1": 0.5})  # before its checkpoint is begun
    for step in (2, 4, 6):
        disk.writer.begin(step, lambda: disk.write)
        disk.writer.close()
        disk.writer.score({"eval/version": step, "eval/a/avg@1": step / 10})
        disk.writer.check()
    assert written == [2, 4, 6, 6]


def test_an_error_after_a_checkpoint_is_whole_leaves_it_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    disk = Disk(tmp_path)
    disk.may_write.set()
    monkeypatch.setattr(disk.writer.folder, "prune", lambda *_, **__: (tmp_path / "nowhere").rmdir())
    disk.writer.begin(4, lambda: disk.write)
    with pytest.raises(FileNotFoundError):
        disk.writer.close()
    assert (disk.reported, disk.writer.folder.problem(4)) == ([4], "")


def test_a_checkpoint_without_room_is_given_up_and_training_goes_on(
    policy_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    actor = actor_of(policy_dir)
    with small_disk(tmp_path / "disk", megabytes=2) as disk:
        writer = Disk(disk).writer
        writer.begin(1, lambda: lambda folder: (folder / "dcp").mkdir())
        writer.close()
        ballast = fill(disk)
        os.truncate(ballast, ballast.stat().st_size - 100_000)  # room for a part
        train(actor, 2)
        copy = staged(actor.state.state_dict())
        writer.begin(2, lambda: lambda folder: save_state(copy, folder, team=None))
        writer.close()
        assert [*writer.folder.whole()] == [1] and not writer.folder.path(2).exists()
        assert "run.dir is full" in capsys.readouterr().out


def test_the_export_gives_the_trained_policys_logits_in_plain_transformers(policy_dir: Path, tmp_path: Path):
    actor = actor_of(policy_dir)
    train(actor, 2)
    save_policy(actor.policy, tmp_path, load_tokenizer(policy_dir))
    plain = AutoModelForCausalLM.from_pretrained(tmp_path)
    tokens = torch.arange(4, 40)
    with torch.no_grad():
        hidden = actor.policy.forward_packed(tokens, torch.tensor([0, len(tokens)], dtype=torch.int32))
        ours, theirs = actor.policy.logits(hidden), plain(tokens[None]).logits[0]
    assert (ours - theirs).abs().max() < 2e-5


def test_the_learning_rate_warms_up_and_stays(policy_dir: Path):
    actor = actor_of(policy_dir)
    rates = []
    for _ in range(6):
        rates.append(actor.lr())
        train(actor, 1)
    assert rates == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3, 1e-3, 1e-3, 1e-3])


class _Attribute:
    """Pickled as a call of `getattr`, the form in which Python 3.11.0 to 3.11.3 write a member of an enum."""

    def __init__(self, owner: object, name: str) -> None:
        self.call = (owner, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, self.call


def test_members_of_enums_are_read_in_the_form_of_each_python_and_nothing_else_of_that_form():
    name = "TORCH_CONTIGUOUS_FORMAT"
    member = pickle.dumps(_Attribute(_MEM_FORMAT_ENCODING, name))
    assert _MetadataUnpickler(io.BytesIO(member)).load() is _MEM_FORMAT_ENCODING[name]
    for owner, name in ((_MEM_FORMAT_ENCODING, "__reduce_ex__"), (torch.Size, "numel")):
        with pytest.raises(ValueError, match="getattr for more than a member of an enum"):
            _MetadataUnpickler(io.BytesIO(pickle.dumps(_Attribute(owner, name)))).load()
