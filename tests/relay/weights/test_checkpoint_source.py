"""Versions that no relay holds any more, from the trainer's checkpoints."""

from pathlib import Path

import numpy as np
import pytest
import torch
from support.closing import at_end
from support.in_memory import MemoryFleet, MemoryNetwork
from support.policies import tiny_policy

from headrace.comm.errors import WrongDigest
from headrace.comm.messages.weights import WeightsPulled
from headrace.comm.recipe import CommSettings
from headrace.comm.shared_memory import Segment
from headrace.relay.journal.events import Checkpointed, Published
from headrace.relay.journal.journal import Journal
from headrace.relay.weights.checkpoint_source import CheckpointSource
from headrace.relay.weights.layout import Layout
from headrace.relay.weights.server import WeightServer
from headrace.relay.weights.slots import VersionNotAvailable
from headrace.rollout.weights import RolloutWeights
from headrace.trainer.export import save_policy
from headrace.trainer.policy.model import load_policy


class Run:
    """A run folder after five steps: version 5 was published in bfloat16 and has a checkpoint in float32; version 4 has none."""

    def __init__(self, folder: Path, family: str = "llama"):
        self.dir = folder / "run"
        self.start = tiny_policy(folder, family)
        self.policy = load_policy(self.start, "float32")
        with torch.no_grad():
            for parameter in self.policy.parameters():
                parameter.mul_(1.01)
        self.layout = Layout.of(self.policy.weights(), "bfloat16")
        self.published = np.zeros(self.layout.num_bytes, np.uint8)
        self.layout.write(self.policy.weights(), self.published)
        self.digest = self.layout.digest(self.published)
        save_policy(self.policy, self.dir / "checkpoints/step_5/hf", weights=self.policy.weights())
        journal = Journal(self.dir / "journal.jsonl")
        journal.append(Published(version=4, digest="0" * 32, relay="relay-0"))
        journal.append(Published(version=5, digest=self.digest, relay="relay-0"))
        journal.append(Checkpointed(step=5, path="/somewhere/else/checkpoints/step_5"))
        journal.close()
        self.source = CheckpointSource(self.dir, lambda folder: load_policy(folder / "hf", "bfloat16").weights())

    def read(self, version: int) -> str:
        return self.source.read(version, self.layout, np.zeros(self.layout.num_bytes, np.uint8))


@pytest.mark.parametrize("family", ["llama", "gemma2", "mixtral"])  # mixtral's experts have other names on disk
def test_a_checkpoint_gives_the_bytes_that_were_published(tmp_path: Path, family: str):
    run = Run(tmp_path, family)
    into = np.zeros(run.layout.num_bytes, np.uint8)
    assert run.source.read(5, run.layout, into) == run.digest
    assert np.array_equal(into, run.published)


def test_a_checkpoint_of_other_weights_is_refused(tmp_path: Path):
    run = Run(tmp_path)
    save_policy(load_policy(run.start), run.dir / "checkpoints/step_5/hf")
    with pytest.raises(WrongDigest, match="step_5 does not hold version 5"):
        run.read(5)


def test_a_version_without_checkpoint_names_the_settings_and_one_unknown_is_told_apart(tmp_path: Path):
    run = Run(tmp_path)
    with pytest.raises(VersionNotAvailable, match=r"no checkpoint of step 4; checkpoint\.every"):
        run.read(4)
    with pytest.raises(VersionNotAvailable, match="it is not in the journal"):
        run.read(6)


def test_a_rollout_takes_from_the_checkpoint_a_version_that_no_relay_holds(tmp_path: Path):
    run, network, settings = Run(tmp_path), MemoryNetwork(), CommSettings(deadline_s=60)
    segment = Segment.create_anonymous()
    relay = MemoryFleet.join_network(network, "relay", 0, {"segment": segment.path}, settings)
    server = WeightServer(relay, segment, settings).start()
    policy = load_policy(run.start, "bfloat16")
    weights = RolloutWeights(
        MemoryFleet.join_network(network, "rollout", 0, {}, settings), policy, settings, str(run.dir)
    )
    for thing in (segment, server, weights):
        at_end(thing.close)
    assert weights.pull_version(5) == WeightsPulled(5, run.digest)
    assert weights.version == 5
    expected = load_policy(run.dir / "checkpoints/step_5/hf", "bfloat16").weights()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in policy.weights().items())
