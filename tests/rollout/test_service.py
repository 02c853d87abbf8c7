"""A generator with a loop of its own asks the hub for prompts."""

import threading
import time
from pathlib import Path

import pytest
from support.in_memory import MemoryFleet, MemoryNetwork
from support.policies import tiny_policy

from headrace.comm.errors import WaitTimeout
from headrace.comm.shared_memory import Segment
from headrace.launch.config.load import read_recipe
from headrace.rollout.service import GeneratorService


def test_prompts_are_waited_for_as_long_as_there_is_a_hub(tmp_path: Path):
    network, deadline_s = MemoryNetwork(), 0.2
    recipe = read_recipe(None, [f"model.path={tiny_policy(tmp_path)}", f"comm.deadline_s={deadline_s}"])
    hub, segment = MemoryFleet.join_network(network, "hub"), Segment.create_anonymous("weights")
    MemoryFleet.join_network(network, "relay", info={"segment": segment.path})
    service = GeneratorService(MemoryFleet.join_network(network, "rollout"), recipe).start()
    service.version = 0
    began = time.monotonic()
    silence = threading.Timer(3 * deadline_s, hub.crash)
    silence.start()
    with pytest.raises(WaitTimeout, match="hub, prompts"):
        service.prompts(4)
    silence.join()
    assert time.monotonic() - began > 2 * deadline_s
    service.close()
    segment.close()
