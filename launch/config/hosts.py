"""The hosts of a run: how many ranks each has."""

import os

RANKS_OF_HOSTS = "HEADRACE_RANKS_OF_HOSTS"
"""Set by a launcher that was given a number of ranks for each host: these numbers, with commas."""
JOINED_HOST = -1
"""The number of every host that has joined a running job; the run's own are 0, 1, ..."""


def equal_hosts(world_size: int, ranks_per_host: int) -> list[int]:
    """The number of ranks on each host where all have equally many, but for the rest on the last."""
    full, rest = divmod(world_size, ranks_per_host)
    return [ranks_per_host] * full + [rest] * (rest > 0)


def ranks_of_hosts() -> list[int]:
    """The number of ranks on each host, as this rank's environment has it; torchrun itself knows equal hosts only."""
    if RANKS_OF_HOSTS in os.environ:
        return [int(ranks) for ranks in os.environ[RANKS_OF_HOSTS].split(",")]
    return equal_hosts(int(os.environ["WORLD_SIZE"]), int(os.environ["LOCAL_WORLD_SIZE"]))
