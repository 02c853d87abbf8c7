"""A generator with a loop of its own asks the hub for prompts."""

import threading
import time
from pathlib import Path

import pytest
from support.in_memory import MemoryFleet, MemoryNetwork
from support.policies import tiny_policy

from headrace.comm.errors import WaitTimeout
from headrace.comm.fleet import TRAINS_AGAIN
from headrace.comm.messages import RowDone
from headrace.comm.messages.base import RowId
from headrace.comm.shared_memory import Segment
from headrace.launch.config.load import read_recipe
from headrace.rollout.leased_row import LeasedRow
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


def test_the_first_version_is_waited_for_while_the_trainer_trains_steps_again_and_a_whole_deadline_after_that(
    tmp_path: Path,
):
    network, deadline_s = MemoryNetwork(), 0.4
    recipe = read_recipe(None, [f"model.path={tiny_policy(tmp_path)}", f"comm.deadline_s={deadline_s}"])
    actor, segment = MemoryFleet.join_network(network, "actor"), Segment.create_anonymous("weights")
    MemoryFleet.join_network(network, "relay", info={"segment": segment.path})
    service = GeneratorService(MemoryFleet.join_network(network, "rollout"), recipe).start()
    actor.announce(**{TRAINS_AGAIN: "yes"})
    began = time.monotonic()
    caught_up = threading.Timer(2.5 * deadline_s, actor.announce, kwargs={TRAINS_AGAIN: ""})
    caught_up.start()
    with pytest.raises(WaitTimeout, match="relay, a version"):
        service.take_weights()
    caught_up.join()
    assert time.monotonic() - began > 3.4 * deadline_s
    service.close()
    segment.close()


@pytest.mark.parametrize(
    ("prompt", "response", "message"),
    [
        ([], [5], "the prompt of .* has no tokens"),
        ([1, 100_000], [5], "the prompt of .* has the token id 100000, outside of the policy's vocabulary of "),
        ([1], [5, -1], "the response of .* has the token id -1, outside of the policy's vocabulary of "),
    ],
)
def test_a_trajectory_that_cannot_be_trained_is_refused_where_it_enters(tmp_path: Path, prompt, response, message):
    service, segment = started_service(tmp_path)
    sample = LeasedRow(RowId(0, 1, 2), 1, version=0, row={})
    service._leases.held[sample.row_id.number] = sample
    with pytest.raises(ValueError, match=message):
        service.put(sample, prompt, response, [-1.0] * len(response), reward=1.0)
    assert sample.row_id.number in service._leases.held
    service.close()
    segment.close()


def test_a_prompt_that_a_generator_of_the_users_made_is_not_taken_for_that_of_its_group(tmp_path: Path, monkeypatch):
    service, segment = started_service(tmp_path)
    written: list[LeasedRow] = []
    monkeypatch.setattr(service._row_writer, "submit", written.append)
    sample = LeasedRow(RowId(0, 1, 2), 1, version=0, row={"prompt": "2 + 2"})
    service._leases.held[sample.row_id.number] = sample
    service.put(sample, [1, 2, 3], [5], [-1.0], reward=1.0)
    report = written[0].report(["unit"])
    assert isinstance(report, RowDone) and (report.num_tokens, report.num_prompt_tokens) == (4, 0)
    service.close()
    segment.close()


def started_service(folder: Path) -> tuple[GeneratorService, Segment]:
    """A service beside a hub and a relay that do nothing, and the relay's memory."""
    network = MemoryNetwork()
    recipe = read_recipe(None, [f"model.path={tiny_policy(folder)}", "comm.deadline_s=10"])
    segment = Segment.create_anonymous("weights")
    MemoryFleet.join_network(network, "hub")
    MemoryFleet.join_network(network, "relay", info={"segment": segment.path})
    service = GeneratorService(MemoryFleet.join_network(network, "rollout"), recipe).start()
    return service, segment
