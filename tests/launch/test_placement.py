"""Which role and which GPU each rank gets."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.comm.errors import SettingError
from headrace.comm.recipe import RoleSettings
from headrace.launch.config.hosts import equal_hosts
from headrace.launch.placement import (
    count_ranks,
    place_joining,
    place_ranks,
    processes_on,
    staging_gpu,
    visible_devices,
)

EIGHT = tuple("01234567")
"""The GPUs of a host."""


def test_on_one_host_an_actor_is_first_and_the_relay_last():
    names = [place.name for place in place_ranks(RoleSettings(actor=1, relay=1, rollout=2), equal_hosts(4, 4))]
    assert names == ["actor-0", "rollout-0", "rollout-1", "relay-0"]


def test_relays_are_spread_one_per_host_first():
    places = place_ranks(RoleSettings(actor=4, relay=3, rollout=9), equal_hosts(16, 8))
    assert [(place.index, place.host) for place in places if place.role == "relay"] == [(2, 0), (0, 0), (1, 1)]


def test_of_nine_ranks_on_eight_gpus_the_relay_has_no_gpu():
    places = place_ranks(RoleSettings(actor=4, relay=1, rollout=4), equal_hosts(9, 9))
    assert [visible_devices(place, EIGHT) for place in places] == [*"01234567", ""]


def test_fewer_gpus_than_ranks_are_shared_and_no_gpu_hides_all():
    places = place_ranks(RoleSettings(actor=1, relay=1, rollout=2), equal_hosts(4, 4))
    assert [visible_devices(place, EIGHT[:1]) for place in places] == ["0", "0", "0", ""]
    assert [visible_devices(place, EIGHT[:0]) for place in places] == [""] * 4


def test_a_wrong_number_of_ranks_names_both_settings():
    with pytest.raises(SettingError, match=r"roles\.rollout = 4.*started 3 ranks.*--nproc-per-node 4"):
        place_ranks(RoleSettings(actor=1, relay=1, rollout=2), equal_hosts(3, 3))


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9), st.integers(1, 8))
def test_every_rank_has_one_role_and_every_process_one_rank(
    actors: int, relays: int, rollouts: int, ranks_per_host: int
):
    roles = RoleSettings(actor=actors, relay=relays, rollout=rollouts)
    places = place_ranks(roles, equal_hosts(actors + relays + rollouts, ranks_per_host))
    for role, count in (("actor", actors), ("relay", relays), ("rollout", rollouts)):
        assert sorted(place.index for place in places if place.role == role) == list(range(count))
    assert places[0].name == "actor-0"
    assert all((place.slot is None) == (place.role == "relay") for place in places)


def test_over_nccl_the_relays_have_the_first_gpu_without_a_worker():
    places = place_ranks(RoleSettings(actor=1, relay=1, rollout=1, task=1), equal_hosts(4, 4))
    gpus = ("6", "GPU-1f", "4", "5")
    staging = staging_gpu("nccl", places, 0, gpus)
    assert [visible_devices(place, gpus, staging) for place in places] == ["6", "GPU-1f", "", "4"]
    assert staging_gpu("auto", places, 0, gpus) == ""
    assert staging_gpu("nccl", [place for place in places if place.role != "relay"], 0, gpus[:2]) == ""
    with pytest.raises(SettingError, match="comm.link: nccl needs a GPU of host 0 for the relays, .* all 2"):
        staging_gpu("nccl", places, 0, gpus[:2])


def test_a_rank_counts_the_ranks_on_its_gpu():
    places = place_ranks(RoleSettings(actor=1, relay=1, rollout=4, task=1), equal_hosts(7, 7))
    assert [processes_on(places, place, EIGHT[:2]) for place in places] == [3, 2, 3, 2, 3, 1, 1]
    assert {processes_on(places, place, ()) for place in places} == {1}


def test_references_and_tasks_come_after_the_rollouts_and_a_task_has_no_gpu():
    places = place_ranks(RoleSettings(actor=1, relay=1, rollout=1, reference=2, task=1), equal_hosts(6, 6))
    assert [p.name for p in places] == ["actor-0", "rollout-0", "reference-0", "reference-1", "task-0", "relay-0"]
    assert [visible_devices(place, EIGHT[:4]) for place in places] == ["0", "1", "2", "3", "", ""]


def test_without_a_number_each_host_has_one_relay():
    places = place_ranks(RoleSettings(actor=1, rollout=5), equal_hosts(9, 3))
    assert [(place.host, place.index) for place in places if place.role == "relay"] == [(0, 0), (1, 1), (2, 2)]
    assert count_ranks(RoleSettings(actor=1, rollout=5), num_hosts=3) == 9


def test_hosts_with_one_rank_each_are_the_relays_of_larger_hosts():
    places = place_ranks(RoleSettings(actor=3, relay=2, rollout=5), [4, 4, 1, 1])
    assert [(place.name, place.host) for place in places if place.role == "relay"] == [("relay-0", 2), ("relay-1", 3)]
    assert [place.name for place in places[:4]] == ["actor-0", "actor-1", "actor-2", "rollout-0"]
    assert [place.slot for place in places] == [0, 1, 2, 3, 0, 1, 2, 3, None, None]


def test_a_host_that_joins_has_numbers_after_those_of_the_run():
    places = place_joining(rollouts=4, relays=1, tp=2, first_replica=3, first_relay=2)
    assert [place.name for place in places] == ["rollout-3", "shard-3", "rollout-4", "shard-4", "relay-2"]
    assert [place.slot for place in places] == [0, 1, 2, 3, None]
