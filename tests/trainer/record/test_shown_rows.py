"""The rows that are recorded are whole groups drawn by chance, from all ranks, with the numbers of their training."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from support.actors import actor_of, batch_of, group_of, on_two_ranks, recipe_of, row_of
from support.policies import tiny_policy

from headrace.comm.messages import TrainBatch
from headrace.relay.queue.batch import Batch
from headrace.trainer.actor_group import ActorGroup
from headrace.trainer.record import shown_rows
from headrace.trainer.record.shown_rows import Sample, ShownRows
from headrace.trainer.step_metrics import StepMetrics


def groups_of_step(step: int, total: int, num_shown: int, together: int = 1) -> list[str]:
    """The groups that are shown of a step whose groups arrive so many at a time."""
    shown = ShownRows(num_shown)
    for first in range(0, total, together):
        groups = [group_of(step, number) for number in range(first, min(first + together, total))]
        taken = TrainBatch(step=step, first=first, total=total, groups=groups, metrics={})
        rows = taken.rows()
        columns = {row.key: row_of(row.row.prompt, row.row.sample, row.num_tokens - 4) for row in rows}
        shown.add(Batch(taken, [rows[:2], rows[2:]], columns))
    samples = shown.found()
    names = [str(sample.row.row.group) for sample in samples]
    assert [names.count(name) for name in names] == [3] * len(names), "whole groups"
    assert all(len(sample.versions) == len(sample.response_ids) == len(sample.logprobs or []) for sample in samples)
    return [*dict.fromkeys(names)]


def test_which_groups_are_shown_depends_on_the_step_alone_and_not_on_how_they_arrive():
    assert groups_of_step(4, 16, 2) == groups_of_step(4, 16, 2, together=5)
    assert len(groups_of_step(4, 16, 2)) == 2 and len(groups_of_step(4, 3, 8)) == 3 and not groups_of_step(4, 3, 0)
    places = {int(name.partition(".")[2]) % 100 for step in range(60) for name in groups_of_step(step, 16, 2)}
    assert places == {*range(16)}, "those that arrive first would be the ones with short responses"


def test_rows_beyond_the_bound_on_tokens_leave_their_rank_without_the_numbers_of_tokens(
    monkeypatch: pytest.MonkeyPatch,
):
    batch = batch_of(2, 0, num_groups=3, total=3)
    whole = ShownRows(3)
    whole.add(batch)
    lengths = [len(sample.response_ids) for sample in whole.found()]
    monkeypatch.setattr(shown_rows, "MOST_TOKENS", sum(lengths[:4]))
    halves = [ShownRows(3), ShownRows(3)]
    sent: list[bytes] = []
    for rank in (1, 0):
        rows = [batch.rows[rank::2]]
        half = halves[rank]
        half.add(Batch(batch.row_batch, rows, {row.key: batch.columns[row.key] for row in rows[0]}))
    all_lengths = np.sum([half._lengths() for half in halves], axis=0).tolist()
    for rank in (1, 0):
        group = ActorGroup(rank, 2, torch.device("cpu"), 10)
        monkeypatch.setattr(group, "all_reduce_sum", lambda _: all_lengths)
        monkeypatch.setattr(group, "gather", lambda data: [data, *sent] if len(sent) else sent.append(data) or [])
        halves[rank].gather(group)
    found = halves[0].found()
    assert [sample.row for sample in found] == [sample.row for sample in whole.found()] and not halves[1].found()
    assert [sample.logprobs is not None for sample in found] == [True] * 4 + [False] * 5
    numbers = [sample["logprobs"] is None for sample in msgspec.msgpack.decode(sent[0])]
    assert True in numbers and False in numbers, "the bound is over the rows of all ranks, and before they are sent"


EPOCHS = {"batch.prompts_per_step": 4, "batch.passes": 2, "batch.updates_per_version": 2, "optimizer.micro_tokens": 24}


def test_the_log_probs_are_those_of_the_first_pass_over_a_row(tmp_path: Path):
    recipe = recipe_of(tiny_policy(tmp_path, "qwen2"), **EPOCHS | {"optimizer.lr": 0.05})
    actor, once = (
        actor_of(recipe),
        actor_of(msgspec.structs.replace(recipe, batch=msgspec.structs.replace(recipe.batch, passes=1))),
    )
    found: list[list[Sample]] = []
    for each in (actor, once):
        stats = StepMetrics(num_shown=4)
        for number in range(4):
            each.accumulate(batch_of(0, number, total=4), stats)
        each.step(stats)
        found.append(stats.shown.found())
    assert found[0] == found[1] and len(found[0]) == 12
    for sample in found[0]:
        assert sample.num_trained == len(sample.response_ids) and sample.trainer_logprobs is not None
        assert sample.advantages is not None and sample.advantage == pytest.approx(sample.advantages[0])
        assert len({*sample.advantages}) == 1
        assert max(sample.trainer_logprobs) < 0 and len(sample.trainer_logprobs) == len(sample.response_ids)


TWO_RANKS = """
from headrace.trainer.step_metrics import StepMetrics
recipe = recipe_of(args[0], **{"batch.prompts_per_step": 4, "roles.actor": 2})
stats = StepMetrics(num_shown=2)
actor = actor_of(recipe, group)
actor.accumulate(batch_of(3, 0, num_groups=4, total=4, group=group), stats)
actor.step(stats)
if group.rank:
    assert not stats.shown.found()
else:
    import msgspec
    Path(args[1]).write_bytes(msgspec.msgpack.encode(stats.shown.found()))
"""


GATHERED = """
assert group.gather(b"x" * (5 * (group.rank + 1))) == ([b"x" * 5, b"x" * 10] if group.rank == 0 else [])
assert group.gather(b"" if group.rank else b"own") == ([b"own", b""] if group.rank == 0 else [])
assert group.union([f"r{group.rank}"]) == ["r0", "r1"]
"""


def test_rank_0_alone_gets_the_bytes_of_each_rank(tmp_path: Path):
    on_two_ranks(tmp_path, GATHERED)


@pytest.mark.slow
def test_rank_0_records_the_rows_of_all_ranks(tmp_path: Path):
    policy = tiny_policy(tmp_path, "qwen2")
    on_two_ranks(tmp_path, TWO_RANKS, policy, tmp_path / "found")
    found = msgspec.msgpack.decode((tmp_path / "found").read_bytes(), type=list[Sample])
    actor = actor_of(recipe_of(policy, **{"batch.prompts_per_step": 4}))
    stats = StepMetrics(num_shown=2)
    actor.accumulate(batch_of(3, 0, num_groups=4, total=4), stats)
    actor.step(stats)
    alone = stats.shown.found()
    assert [sample.row for sample in found] == [sample.row for sample in alone] and len(found) == 6
    for ours, theirs in zip(found, alone, strict=True):
        assert (ours.response_ids, ours.logprobs, ours.advantages) == (
            theirs.response_ids,
            theirs.logprobs,
            theirs.advantages,
        )
        assert np.allclose(ours.trainer_logprobs or [], theirs.trainer_logprobs or [1], atol=1e-5)
