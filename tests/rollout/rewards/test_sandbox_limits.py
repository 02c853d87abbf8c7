"""The limits of a sandbox on a host that has limits of its own."""

import resource

import pytest

from headrace.rollout.rewards.sandbox_init import set_limits


def test_a_limit_is_the_hosts_own_where_that_is_lower(monkeypatch: pytest.MonkeyPatch):
    of_host = {resource.RLIMIT_NOFILE: 32, resource.RLIMIT_FSIZE: 1 << 30, resource.RLIMIT_AS: resource.RLIM_INFINITY}
    set_to: dict[int, int] = {}

    def set_one(kind: int, bounds: tuple[int, int]) -> None:
        if of_host[kind] != resource.RLIM_INFINITY and bounds[1] > of_host[kind]:
            raise ValueError("not allowed to raise maximum limit")
        set_to[kind] = bounds[1]

    monkeypatch.setattr(resource, "getrlimit", lambda kind: (0, of_host[kind]))
    monkeypatch.setattr(resource, "setrlimit", set_one)
    set_limits(dict.fromkeys(of_host, 64))
    assert set_to == {resource.RLIMIT_NOFILE: 32, resource.RLIMIT_FSIZE: 64, resource.RLIMIT_AS: 64}
