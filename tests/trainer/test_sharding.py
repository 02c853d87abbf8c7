"""Sharded ranks train as one rank does, and none of them ever holds the whole policy."""

import pytest
from support.actor_ranks import Job, run_ranks
from support.policies import tiny_policy

from headrace.comm.recipe import TrainerSettings

CHECKPOINTED = TrainerSettings(activation_checkpointing=True)
PAIRS = TrainerSettings(shard_ranks=2)


@pytest.mark.parametrize(
    ("family", "changes", "size", "settings"),
    [
        ("llama", {"tie_word_embeddings": True, "vocab_size": 127}, 2, TrainerSettings()),
        pytest.param("llama", {"vocab_size": 127}, 1, TrainerSettings(offload=True), marks=pytest.mark.slow),
        pytest.param("qwen3", {}, 2, CHECKPOINTED, marks=pytest.mark.slow),
        pytest.param("llama", {"vocab_size": 127}, 4, PAIRS, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", {}, 2, TrainerSettings(), marks=pytest.mark.slow),
        pytest.param("mixtral", {}, 4, PAIRS, marks=pytest.mark.slow),
        pytest.param("qwen3_5_text", {}, 2, CHECKPOINTED, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_ranks_that_share_the_weights_train_as_one_rank_does(tmp_path, family, changes, size, settings):
    path = str(tiny_policy(tmp_path, family, **changes))
    (alone,) = run_ranks(Job(path), tmp_path / "one")
    found = run_ranks(Job(path, size, trainer=settings), tmp_path / "several")
    for result in found:
        assert result["norms"] == pytest.approx(alone["norms"], rel=1e-4)
        for name, weight in alone["weights"].items():
            assert (result["weights"][name] - weight).abs().max() < 2e-5, name
    copies = size // (settings.shard_ranks or size)
    assert sum(result["shard_bytes"] for result in found) == copies * alone["shard_bytes"]


@pytest.mark.slow
def test_a_rank_that_loads_a_policy_holds_its_own_rows_only(tmp_path):
    """240 MB of weights: each of two ranks takes half of them, and little else while it loads."""
    path = tiny_policy(tmp_path, vocab_size=20_000, hidden_size=512, intermediate_size=2048, num_hidden_layers=10)
    total = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    (alone,), pair = (run_ranks(Job(str(path), size, steps=0), tmp_path / str(size)) for size in (1, 2))
    assert [rank["names"] for rank in (alone, *pair)] == [["of all"], *[["of all", "of rank"]] * 2]
    torch_kb = alone["loading_kb"] - alone["shard_bytes"] / 1024
    assert total > 200e6
    for rank in pair:
        assert abs(rank["shard_bytes"] / total - 0.5) < 0.02
        assert rank["loading_kb"] < rank["shard_bytes"] / 1024 + torch_kb + 60_000
