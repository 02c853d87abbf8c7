"""Ranks of a trainer that are threads of one process, for tests of what they decide together."""

import threading

import torch

from headrace.trainer.actor_group import ActorGroup


class RankThreads:
    """The collectives of ranks that are threads."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size)
        self.values: dict[int, list[float]] = {}

    def group(self, rank: int) -> ActorGroup:
        group = ActorGroup(rank, self.barrier.parties, torch.device("cpu"), 60)

        def all_reduce_max(values: list[float]) -> list[float]:
            self.values[rank] = values
            self.barrier.wait(60)
            found = [max(each) for each in zip(*self.values.values(), strict=True)]
            self.barrier.wait(60)
            return found

        group.all_reduce_max = all_reduce_max
        return group
