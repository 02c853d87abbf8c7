"""Placement: which role, host and GPU each of torchrun's ranks gets.

The functions depend on numbers only, so all supervisors compute the same placement.
"""

import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import structs
from msgspec.structs import astuple

from ..comm.errors import SettingError
from ..comm.recipe import Recipe, RoleSettings

RESTARTABLE = frozenset({"hub", "relay", "rollout", "shard", "reference", "task"})
"""Roles whose processes are started again when they die; the death of any other ends the run.

The hub continues where its journal ends. A relay's weights survive in its supervisor's memory. Its rows survive in another relay, or are generated again.
"""


@dataclass(frozen=True, slots=True)
class Placement:
    """The role of one rank, and its host. `slot` counts the ranks of the host that use a GPU; relays and tasks have none."""

    role: str
    index: int
    host: int
    slot: int | None

    @property
    def name(self) -> str:
        """The name in logs and messages, such as `rollout-1`."""
        return f"{self.role}-{self.index}"


def count_relays(roles: RoleSettings, num_hosts: int = 1) -> int:
    """The number of relays: the recipe's, or one for each host."""
    return num_hosts if roles.relay is None else roles.relay


def count_ranks(roles: RoleSettings, num_hosts: int = 1) -> int:
    """The number of ranks of all roles."""
    return sum(astuple(structs.replace(roles, relay=count_relays(roles, num_hosts))))


def with_relays(recipe: Recipe, num_hosts: int) -> Recipe:
    """The recipe with its number of relays."""
    return structs.replace(recipe, roles=structs.replace(recipe.roles, relay=count_relays(recipe.roles, num_hosts)))


def place_ranks(roles: RoleSettings, world_size: int, ranks_per_host: int, tp: int = 1) -> list[Placement]:
    """The placement of each rank, `[world_size]`; raises `SettingError` if the counts do not fit.

    Relays take the last ranks of the hosts, one per host first. The other ranks are actors, then rollouts, references and
    tasks, in rank order, so rank 0 is an actor. The first of the `tp` ranks of a replica is its `rollout`, the others are
    its `shard`s; all are on one host.
    """
    check_replicas(roles, tp)
    num_hosts = -(-world_size // ranks_per_host)
    wanted = count_ranks(roles, num_hosts)
    if wanted != world_size:
        raise SettingError(
            f"roles.actor + roles.relay + roles.reference + roles.task + roles.rollout = {wanted}, but torchrun started {world_size} ranks;"
            f" change roles or start torchrun with {_fitting_counts(wanted, num_hosts)}"
        )
    relay_of_rank = _place_relays(count_relays(roles, num_hosts), world_size, ranks_per_host)
    places: list[Placement] = []
    slots = [0] * num_hosts
    workers = iter(
        [("actor", i) for i in range(roles.actor)]
        + _replicas(roles.rollout, tp)
        + [(role, i) for role, count in (("reference", roles.reference), ("task", roles.task)) for i in range(count)]
    )
    for rank in range(world_size):
        host = rank // ranks_per_host
        if rank in relay_of_rank:
            places.append(Placement("relay", relay_of_rank[rank], host, None))
        else:
            role, index = next(workers)
            on_cpu = role == "task"
            places.append(Placement(role, index, host, None if on_cpu else slots[host]))
            slots[host] += not on_cpu
    _check_replicas_on_one_host(places, tp)
    return places


def _fitting_counts(num_ranks: int, num_hosts: int) -> str:
    """The options of torchrun that start so many ranks."""
    if num_ranks % num_hosts:
        return f"--nproc-per-node {num_ranks} on one host"
    return f"--nproc-per-node {num_ranks // num_hosts}" + (f" on {num_hosts} hosts" if num_hosts > 1 else "")


def _replicas(num_ranks: int, tp: int) -> list[tuple[str, int]]:
    """Role and index of the generator's ranks, replica by replica."""
    others = tp - 1
    return [
        ("rollout", i) if rank == 0 else ("shard", i * others + rank - 1)
        for i in range(num_ranks // tp)
        for rank in range(tp)
    ]


def _check_replicas_on_one_host(placements: list[Placement], tp: int) -> None:
    ranks = [place for place in placements if place.role in ("rollout", "shard")]
    for first in range(0, len(ranks), tp):
        if len({place.host for place in ranks[first : first + tp]}) > 1:
            raise SettingError(
                f"rollout.tp={tp}: the ranks of {ranks[first].name} would be on two hosts; change roles so that each host"
                " has room for whole replicas"
            )


def _place_relays(num_relays: int, world_size: int, ranks_per_host: int) -> dict[int, int]:
    """Rank -> relay index: the last free rank of each host in turn; rank 0 is never a relay."""
    free = [
        [rank for rank in range(first, min(first + ranks_per_host, world_size)) if rank > 0]
        for first in range(0, world_size, ranks_per_host)
    ]
    relay_of_rank: dict[int, int] = {}
    while len(relay_of_rank) < num_relays:
        for ranks in free:
            if ranks and len(relay_of_rank) < num_relays:
                relay_of_rank[ranks.pop()] = len(relay_of_rank)
    return relay_of_rank


def visible_devices(placement: Placement, num_gpus: int, staging: str | None = None) -> str:
    """`CUDA_VISIBLE_DEVICES` of a rank on a host with `num_gpus`: one each in order, shared when there are too few.

    A relay has only `staging`, its `relay.staging_device`, if that is a GPU.
    """
    if placement.slot is None:
        return "" if placement.role == "task" or staging in (None, "cpu") else staging
    return str(placement.slot % num_gpus) if num_gpus else ""


def check_replicas(roles: RoleSettings, tp: int) -> None:
    """Raise `SettingError` unless the generator's ranks make whole replicas."""
    if roles.rollout % tp:
        raise SettingError(
            f"roles.rollout={roles.rollout} is not a multiple of rollout.tp={tp}, the ranks of a replica"
        )


def check_staging(placements: Sequence[Placement], host: int, num_gpus: int, staging: str | None) -> None:
    """Raise `SettingError` unless the relays of a host can use `staging`, their `relay.staging_device`, there."""
    if staging in (None, "cpu") or all(p.role != "relay" for p in placements if p.host == host):
        return
    if not staging.isdigit() or int(staging) >= num_gpus:
        raise SettingError(
            f"relay.staging_device={staging} is neither cpu nor one of the {num_gpus} GPUs of host {host}"
        )
    for place in placements:
        if place.host == host and place.role == "actor" and visible_devices(place, num_gpus) == str(int(staging)):
            raise SettingError(
                f"relay.staging_device={staging} is the GPU of {place.name}, and NCCL needs two; name another, or null"
            )


def count_gpus() -> int:
    """The number of this host's GPUs, from nvidia-smi, which makes no CUDA context here; 0 without nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return 0
    listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60, check=False)
    return sum(line.startswith("GPU ") for line in listing.stdout.splitlines()) if listing.returncode == 0 else 0
