"""Each actor rank has its second copy on another host, and each keeps one."""

import pytest

from headrace.relay.weights.partners import partners


@pytest.mark.parametrize("hosts", ["ab", "aabb", "abab", "abcabc", "aaabbbccc"])
def test_each_rank_keeps_the_copy_of_one_on_another_host_and_has_its_own_on_one(hosts: str):
    found = [partners(rank, hosts) for rank in range(len(hosts))]
    for rank, pair in enumerate(found):
        assert pair is not None and hosts[pair.keeper] != hosts[rank]
        kept = found[pair.keeper]
        assert kept is not None and kept.kept == rank
    assert sorted(pair.keeper for pair in found if pair is not None) == [*range(len(hosts))]


@pytest.mark.parametrize("hosts", ["a", "aaaa", "aab"])
def test_on_one_host_and_on_unequal_ones_there_are_none(hosts: str):
    assert [partners(rank, hosts) for rank in range(len(hosts))] == [None] * len(hosts)
