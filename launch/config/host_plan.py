"""The memory of a run on each of its hosts: every process that a start brings there, added up.

A process counts with what it holds for itself; shared memory counts once, with the relay that has it, and the files of the
libraries once for each host.
"""

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from ...comm.recipe import Recipe
from ...trainer.memory import CHECKPOINT_PARTS, TORCH_BYTES, MemoryEstimate
from ..placement import Placement
from .memory_advice import advice

_GB = 1e9
_LIBRARIES_BYTES = 0.12e9
_LAUNCHER_BYTES = 0.305e9
_SUPERVISOR_BYTES = 0.016e9
_REWARD_BYTES = 0.015e9
"""Measured with the CPU build of torch 2.13; a reward process has more if the user's file imports more."""
_REWARD_PROCESSES = 2
STATES = (
    "weights",
    "gradients",
    "moments",
    "reference policy",
    "critic",
    "weights at the version's start",
    "3 versions",
    "process",
)
"""The parts that a process holds all the time, whatever the data are."""


class HostShortage(NamedTuple):
    """Why the processes do not fit into a host; `is_certain` if what they hold all the time is too much already."""

    text: str
    is_certain: bool


class HostPlan:
    """The processes of one host; `need` is that of each role, on `gpu_roles` with their device's parts in a GPU."""

    def __init__(
        self,
        host: int,
        recipe: Recipe,
        places: Sequence[Placement],
        needs: dict[str, MemoryEstimate],
        gpu_roles: Collection[str],
    ) -> None:
        self.host = host
        self._needs = needs
        self._gpu_roles = gpu_roles
        self._places = [place for place in places if place.host == host]

    def bytes_of(self, place: Placement, parts: Collection[str] | None = None) -> float:
        """Bytes of a process in the host's memory; of these parts alone, where they are given."""
        role = "rollout" if place.role == "shard" else place.role
        need = self._needs.get(role)
        if need is None:
            return TORCH_BYTES
        held = need.host if role in self._gpu_roles else {**need.device, **need.host}
        if role == "actor" and place.index:
            held = {name: size for name, size in held.items() if name != CHECKPOINT_PARTS[1]}
        return sum(size for name, size in held.items() if parts is None or name in parts)

    def others(self) -> dict[str, float]:
        """The processes without a role in the recipe."""
        has_hub = any(place.name == "relay-0" for place in self._places)
        rollouts = sum(place.role == "rollout" for place in self._places)
        return {
            "launcher": _LAUNCHER_BYTES + TORCH_BYTES,
            "supervisors": _SUPERVISOR_BYTES * len(self._places),
            "hub and store": 2 * TORCH_BYTES * has_hub,
            "rewards": _REWARD_BYTES * _REWARD_PROCESSES * rollouts,
            "libraries": _LIBRARIES_BYTES,
        }

    @property
    def num_bytes(self) -> float:
        return sum(self.bytes_of(place) for place in self._places) + sum(self.others().values())

    def shortages(self, host_bytes: float, free_bytes: float | None = None) -> Iterator[HostShortage]:
        """The reason why the processes do not fit into this memory, or into the part that other programs leave of it now; none if they do."""
        need = self.num_bytes
        least = sum(self.bytes_of(place, STATES) for place in self._places)
        largest = max(self._places, key=self.bytes_of)
        change = f"set {advice(largest.role, on_gpu=False) or 'fewer roles here'}, or take a larger host"
        each = f"{largest.name} alone {self.bytes_of(largest) / _GB:.1f} GB"
        whose = f"host {self.host} has {host_bytes / _GB:.1f} GB of memory"
        if least > host_bytes:
            yield HostShortage(
                f"{whose}, and the weights and states of its processes alone need {least / _GB:.1f} GB ({each}): {change}",
                True,
            )
        elif need > host_bytes:
            copies = sum(self.bytes_of(place, CHECKPOINT_PARTS) for place in self._places if place.role == "actor")
            yield HostShortage(
                f"{whose} and its processes need {need / _GB:.1f} GB (an estimate; {each}),"
                f" {copies / _GB:.1f} GB of them for the copy of a checkpoint: {change}",
                False,
            )
        elif free_bytes is not None and need > free_bytes:
            yield HostShortage(
                f"{whose}, of which {free_bytes / _GB:.1f} GB are free now, and its processes need {need / _GB:.1f} GB"
                f" (an estimate; {each}): end other programs, or {change}",
                False,
            )
