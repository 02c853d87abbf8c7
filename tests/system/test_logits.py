"""A policy that travels from the actor to a rollout gives the same logits bit for bit."""

import pytest
import torch
from support.closing import at_end
from support.in_memory import MemoryFleet, MemoryNetwork
from support.policies import tiny_policy

from headrace.comm.recipe import CommSettings
from headrace.comm.shared_memory import Segment
from headrace.comm.waits import waiting
from headrace.relay.weights.layout import Layout
from headrace.relay.weights.publisher import WeightPublisher
from headrace.relay.weights.server import WeightServer
from headrace.rollout.weights import RolloutWeights
from headrace.trainer.policy.model import load_policy

TOKENS, STARTS = torch.arange(4, 44), torch.tensor([0, 17, 40])


def logits(policy):
    with torch.no_grad():
        return policy.logits(policy.forward_packed(TOKENS, STARTS))


@pytest.mark.parametrize(
    ("family", "link"), [("llama", "auto"), ("qwen3", "tcp"), ("gemma3_text", "auto"), ("mixtral", "auto")]
)
def test_after_each_push_the_rollouts_logits_are_the_actors_bit_for_bit(tmp_path, family, link):
    network, settings, path = (
        MemoryNetwork(),
        CommSettings(link=link, deadline_s=60),
        tiny_policy(tmp_path, family),
    )
    segment = Segment.create_anonymous()
    server = WeightServer(
        MemoryFleet.join_network(network, "relay", 0, {"segment": segment.path}, settings), segment, settings
    ).start()
    actor, rollout = load_policy(path), load_policy(path, weights=False)
    layout = Layout.of(actor.weights(), "float32")
    publisher = WeightPublisher(MemoryFleet.join_network(network, "actor", 0, {}, settings), layout, settings).start()
    weights = RolloutWeights(MemoryFleet.join_network(network, "rollout", 0, {}, settings), rollout, settings)
    for thing in (segment, server, publisher, weights):
        at_end(thing.close)
    optimizer, before = torch.optim.AdamW(actor.parameters(), lr=1e-2), None
    for version in range(1, 4):
        actor.token_logprobs(actor.forward_packed(TOKENS, STARTS)[:-1], TOKENS[1:])[0].mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        publisher.publish(version, actor.weights())
        with waiting("the relay", f"version {version}", 60) as wait:
            wait.until(lambda version=version: weights.newest() == version)
        assert weights.pull(60).version == version
        assert torch.equal(logits(rollout), logits(actor))
        assert before is None or not torch.equal(before, logits(rollout))
        before = logits(rollout)
